//! Text to token ids and back, from a Hugging Face `tokenizer.json` or from the metadata of a GGUF file; both end in the
//! same tokenizer, which can be written out as either.

mod from_gguf;
mod stream;
mod to_gguf;

pub use stream::TextStream;

use crate::files::sha256_hex;
use crate::gguf::{GgufError, GgufFile};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a tokenizer cannot be made or used.
#[derive(Debug, Error)]
pub enum TokenizerError {
    #[error("cannot read `{}`: {reason}", path.display())]
    Read { path: PathBuf, reason: String },
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("`{}`: {key} is `{found}`, which is not supported; supported: {supported}", path.display())]
    Unsupported { path: PathBuf, key: &'static str, found: String, supported: String },
    #[error("`{}`: the tokenizer in its metadata is not valid: {reason}", path.display())]
    InvalidGguf { path: PathBuf, reason: String },
    #[error("a GGUF file cannot express this tokenizer: {0}")]
    NotExpressible(String),
    #[error("cannot encode a text of {bytes} bytes: {reason}")]
    Encode { bytes: usize, reason: String },
    #[error("cannot decode {tokens} tokens: {reason}")]
    Decode { tokens: usize, reason: String },
}

/// A tokenizer with its vocabulary, added tokens and rules.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    json: String,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// When the file is absent or is not a tokenizer.
    pub fn from_file(path: &Path) -> Result<Tokenizer, TokenizerError> {
        let read_error = |reason: String| TokenizerError::Read { path: path.into(), reason };
        let bytes = fs::read(path).map_err(|error| read_error(error.to_string()))?;
        Tokenizer::from_json(&bytes).map_err(read_error)
    }

    /// Builds the tokenizer that a GGUF file describes in its `tokenizer.ggml` keys.
    ///
    /// # Errors
    /// When keys are missing or contradict each other, or the file's kind of tokenizer is not supported; the message
    /// then lists those that are.
    pub fn from_gguf(gguf: &GgufFile) -> Result<Tokenizer, TokenizerError> {
        let json = from_gguf::tokenizer_json(gguf)?.to_string();
        Tokenizer::from_json(json.as_bytes()).map_err(|reason| TokenizerError::InvalidGguf { path: gguf.path.clone(), reason })
    }

    pub(crate) fn from_json(bytes: &[u8]) -> Result<Tokenizer, String> {
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| error.to_string())?;
        // Some files carry the truncation and padding of a training run, which would cut prompts silently.
        inner.with_truncation(None).map_err(|error| error.to_string())?;
        inner.with_padding(None);
        let json = inner.to_string(true).map_err(|error| error.to_string())?;
        Ok(Tokenizer { inner, json })
    }

    /// The token ids of `text`; special tokens written out in it become their ids. `add_special_tokens` adds those that
    /// the tokenizer puts around every text, which a rendered chat template already holds.
    ///
    /// # Errors
    /// When the tokenizer cannot represent the text, which byte-level ones always can.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        match self.inner.encode_fast(text, add_special_tokens) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(TokenizerError::Encode { bytes: text.len(), reason: error.to_string() }),
        }
    }

    /// The text of token ids. Ids outside the vocabulary are left out, and bytes that are not UTF-8 are replaced.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TokenizerError> {
        let decoded = self.inner.decode(ids, skip_special_tokens);
        decoded.map_err(|error| TokenizerError::Decode { tokens: ids.len(), reason: error.to_string() })
    }

    /// The token of an id as the vocabulary writes it.
    pub fn token_text(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token as the vocabulary writes it.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// Whether text can become this token. Special tokens, such as `<|im_end|>`, mark something else, and ids beyond the vocabulary
    /// are rows that fill up an embedding.
    pub fn is_ordinary(&self, id: u32) -> bool {
        match self.inner.get_added_vocabulary().get_added_tokens_decoder().get(&id) {
            Some(added) => !added.special,
            None => self.inner.id_to_token(id).is_some(),
        }
    }

    /// How many tokens there are, added ones included. A model may have more embedding rows.
    pub fn vocabulary_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// SHA-256 of [`Tokenizer::to_json`], in hexadecimal.
    pub fn hash(&self) -> String {
        sha256_hex(&self.json)
    }

    /// The tokenizer as a `tokenizer.json`, which `transformers` loads.
    pub fn to_json(&self) -> &str {
        &self.json
    }
}

/// The special tokens a chat template may name, as texts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    pub bos: Option<String>,
    pub eos: Option<String>,
    pub pad: Option<String>,
    pub unknown: Option<String>,
}

impl SpecialTokens {
    /// From the ids in a GGUF file's metadata; an id outside the vocabulary counts as absent.
    pub fn from_gguf(gguf: &GgufFile) -> SpecialTokens {
        let tokens = gguf.strings("tokenizer.ggml.tokens").unwrap_or_default();
        let token = |key: &str| {
            let id = usize::try_from(gguf.unsigned(key).ok()?).ok()?;
            tokens.get(id).map(|token| token.to_string())
        };
        SpecialTokens {
            bos: token("tokenizer.ggml.bos_token_id"),
            eos: token("tokenizer.ggml.eos_token_id"),
            pad: token("tokenizer.ggml.padding_token_id"),
            unknown: token("tokenizer.ggml.unknown_token_id"),
        }
    }

    /// From a `tokenizer_config.json`, where a token is a text or an object with `content`.
    ///
    /// # Errors
    /// When the file is absent or is not JSON.
    pub fn from_configuration(path: &Path) -> Result<SpecialTokens, TokenizerError> {
        let read_error = |reason: String| TokenizerError::Read { path: path.into(), reason };
        let bytes = fs::read(path).map_err(|error| read_error(error.to_string()))?;
        let configuration: Value = serde_json::from_slice(&bytes).map_err(|error| read_error(error.to_string()))?;
        let token = |key: &str| {
            let value = configuration.get(key)?;
            value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
        };
        Ok(SpecialTokens {
            bos: token("bos_token"),
            eos: token("eos_token"),
            pad: token("pad_token"),
            unknown: token("unk_token"),
        })
    }

    /// The tokens that are set, under the names that templates and `tokenizer_config.json` use.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let all = [("bos_token", &self.bos), ("eos_token", &self.eos), ("pad_token", &self.pad), ("unk_token", &self.unknown)];
        all.into_iter().filter_map(|(name, token)| Some((name, token.as_deref()?)))
    }

    /// The `tokenizer_config.json` that goes beside [`Tokenizer::to_json`] in a checkpoint, as text.
    pub fn to_configuration(&self, chat_template: &str) -> String {
        let mut configuration = serde_json::Map::new();
        configuration.insert("tokenizer_class".to_owned(), "PreTrainedTokenizerFast".into());
        configuration.insert("model_input_names".to_owned(), vec!["input_ids", "attention_mask"].into());
        configuration.insert("clean_up_tokenization_spaces".to_owned(), false.into());
        configuration.extend(self.named().map(|(name, token)| (name.to_owned(), token.into())));
        configuration.insert("chat_template".to_owned(), chat_template.into());
        format!("{:#}\n", Value::Object(configuration))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn special_tokens_come_back_from_a_written_configuration() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer_config.json");
        let special = SpecialTokens { bos: None, eos: Some("<|im_end|>".into()), pad: Some("<pad>".into()), unknown: None };
        fs::write(&path, special.to_configuration("{{ messages }}")).unwrap();
        assert_eq!(SpecialTokens::from_configuration(&path).unwrap(), special);
        let written: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(written["model_input_names"], serde_json::json!(["input_ids", "attention_mask"]));
        fs::write(&path, r#"{"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": null}"#).unwrap();
        let read = SpecialTokens::from_configuration(&path).unwrap();
        assert_eq!(read, SpecialTokens { bos: Some("<s>".into()), ..SpecialTokens::default() });
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        assert!(Tokenizer::from_file(&path).unwrap_err().to_string().contains("tokenizer.json"));
        fs::write(&path, "{\"model\": 5}").unwrap();
        assert!(Tokenizer::from_file(&path).unwrap_err().to_string().contains("tokenizer.json"));
    }
}
