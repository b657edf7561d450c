//! A tokenizer as the metadata of a GGUF file, the reverse of `from_gguf`: only what comes back as the same token ids is written.

use super::from_gguf::{CONTROL, MERGES, MODEL, PRE_TOKENIZER, Rules, TOKEN_TYPES, TOKENS, UNUSED, USER_DEFINED, all_rules};
use super::{SpecialTokens, Tokenizer, TokenizerError};
use crate::gguf::writer::Entry;
use serde_json::Value;

/// GGUF's number for an ordinary token.
const NORMAL: i64 = 1;

/// A text without anything that could be a special token, to see what a tokenizer puts around one.
const PLAIN: &str = "a";

impl Tokenizer {
    /// The `tokenizer.ggml` keys, with as many tokens as the embedding has `rows`: those that the tokenizer has no token for are named
    /// `[PAD0]` by their id and marked unused, as llama.cpp's converter does.
    ///
    /// # Errors
    /// GGUF has no name for how the tokenizer splits text, or cannot say something else about it; the message says what.
    pub fn to_gguf(&self, rows: usize, special: &SpecialTokens) -> Result<Vec<(String, Entry)>, TokenizerError> {
        let json: Value = serde_json::from_str(&self.json).map_err(|error| not_expressible(error.to_string()))?;
        let rules = rules(&json)?;
        expect_plain_model(&json["model"])?;
        let (tokens, types) = self.tokens(&json, rows)?;
        let merges = json["model"]["merges"].as_array().into_iter().flatten().map(merge).collect::<Result<Vec<String>, _>>()?;
        let string = |text: &str| Entry::String(text.to_owned());
        let mut metadata = vec![
            (MODEL, string("gpt2")),
            (PRE_TOKENIZER, string(rules.name)),
            (TOKENS, Entry::Strings(tokens)),
            (TOKEN_TYPES, Entry::I32s(types)),
            (MERGES, Entry::Strings(merges)),
        ];
        let (begins_with_bos, ends_with_eos) = self.around(special)?;
        metadata.push(("tokenizer.ggml.add_bos_token", Entry::Bool(begins_with_bos)));
        metadata.push(("tokenizer.ggml.add_eos_token", Entry::Bool(ends_with_eos)));
        let named = [
            ("tokenizer.ggml.bos_token_id", &special.bos),
            ("tokenizer.ggml.eos_token_id", &special.eos),
            ("tokenizer.ggml.padding_token_id", &special.pad),
            ("tokenizer.ggml.unknown_token_id", &special.unknown),
        ];
        for (key, token) in named {
            let Some(token) = token else { continue };
            let id = self.token_id(token).ok_or_else(|| {
                not_expressible(format!(
                    "its configuration names the special token `{token}`, which its vocabulary does not have"
                ))
            })?;
            metadata.push((key, Entry::U32(id)));
        }
        Ok(metadata.into_iter().map(|(key, entry)| (key.to_owned(), entry)).collect())
    }

    /// Text and kind of every row.
    fn tokens(&self, json: &Value, rows: usize) -> Result<(Vec<String>, Vec<i32>), TokenizerError> {
        let mut tokens: Vec<String> = (0..rows).map(|id| format!("[PAD{id}]")).collect();
        let mut types = vec![UNUSED as i32; rows];
        let mut set = |id: &Value, text: &str, kind: i64| -> Result<(), TokenizerError> {
            let row = id.as_u64().and_then(|id| usize::try_from(id).ok()).filter(|&id| id < rows);
            let row =
                row.ok_or_else(|| not_expressible(format!("its token `{text}` is {id}, and the embedding has {rows} rows")))?;
            text.clone_into(&mut tokens[row]);
            types[row] = kind as i32;
            Ok(())
        };
        for (text, id) in json["model"]["vocab"].as_object().into_iter().flatten() {
            set(id, text, NORMAL)?;
        }
        for added in json["added_tokens"].as_array().into_iter().flatten() {
            let text = added["content"].as_str().unwrap_or_default();
            let flag = |name: &str| added[name].as_bool().unwrap_or(false);
            // A reader looks for added tokens in the text as it is, and takes nothing around them.
            let changed = flag("normalized") && !json["normalizer"].is_null() && !text.is_ascii();
            if let Some(rule) = ["lstrip", "rstrip", "single_word"].into_iter().find(|name| flag(name)) {
                return Err(not_expressible(format!("its added token `{text}` has `{rule}`, for which GGUF has no place")));
            } else if changed {
                return Err(not_expressible(format!("its added token `{text}` is looked for in normalised text")));
            }
            set(&added["id"], text, if flag("special") { CONTROL } else { USER_DEFINED })?;
        }
        Ok((tokens, types))
    }

    /// Whether the tokenizer puts the first token before a text, and the last one after it.
    fn around(&self, special: &SpecialTokens) -> Result<(bool, bool), TokenizerError> {
        let (bare, whole) = (self.encode(PLAIN, false)?, self.encode(PLAIN, true)?);
        let id = |token: &Option<String>| token.as_deref().and_then(|token| self.token_id(token));
        let before = id(&special.bos).filter(|bos| whole.first() == Some(bos));
        let after =
            id(&special.eos).filter(|eos| whole.last() == Some(eos) && whole.len() > bare.len() + usize::from(before.is_some()));
        let expected: Vec<u32> = before.into_iter().chain(bare).chain(after).collect();
        if expected == whole {
            Ok((before.is_some(), after.is_some()))
        } else {
            Err(not_expressible("it puts other tokens around a text than `bos_token` and `eos_token`".to_owned()))
        }
    }
}

/// The rules that split a text, by GGUF's name.
fn rules(json: &Value) -> Result<Rules, TokenizerError> {
    let (normalizer, splitting) = (&json["normalizer"], without_offsets(&json["pre_tokenizer"]));
    let ignore_merges = json["model"]["ignore_merges"].as_bool().unwrap_or(false);
    let all = all_rules();
    let known = all.each_ref().map(|rules| format!("`{}`", rules.name)).join(", ");
    let same = |rules: &Rules| {
        rules.normalizer == *normalizer
            && without_offsets(&rules.pre_tokenizer) == splitting
            && rules.ignore_merges == ignore_merges
    };
    all.into_iter().find(same).ok_or_else(|| {
        not_expressible(format!(
            "it splits text by rules that this program knows no GGUF name for; it knows those of {known}. They are normalizer \
             {normalizer}, pre-tokenizer {splitting}, ignore_merges {ignore_merges}"
        ))
    })
}

/// Where the pieces of a text begin and end says nothing of which pieces there are.
fn without_offsets(pre_tokenizer: &Value) -> Value {
    let mut plain = pre_tokenizer.clone();
    if let Some(fields) = plain.as_object_mut() {
        fields.remove("trim_offsets");
    }
    if let Some(parts) = plain.get_mut("pretokenizers").and_then(Value::as_array_mut) {
        parts.iter_mut().for_each(|part| *part = without_offsets(part));
    }
    plain
}

/// Refuses whatever is not plain byte-level BPE.
fn expect_plain_model(model: &Value) -> Result<(), TokenizerError> {
    let is_set = |value: &Value| !(value.is_null() || *value == false || *value == "" || *value == 0.0);
    if model["type"] != "BPE" {
        return Err(not_expressible(format!("its model is {}, not `BPE`", model["type"])));
    }
    let odd = ["dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"]
        .into_iter()
        .find(|key| is_set(&model[*key]));
    odd.map_or(Ok(()), |key| Err(not_expressible(format!("its model has `{key}`, which byte-level BPE in GGUF has not"))))
}

/// A pair to be merged, its two parts with a space between.
fn merge(pair: &Value) -> Result<String, TokenizerError> {
    let text = match pair {
        Value::String(text) => text.clone(),
        pair => format!("{} {}", pair[0].as_str().unwrap_or_default(), pair[1].as_str().unwrap_or_default()),
    };
    match text.split_once(' ') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => Ok(text),
        _ => Err(not_expressible(format!("its merge {pair} is not of two tokens without spaces"))),
    }
}

fn not_expressible(what: String) -> TokenizerError {
    TokenizerError::NotExpressible(what)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::gguf::GgufFile;
    use serde_json::json;
    use std::path::{Path, PathBuf};

    fn golden(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/chat").join(name)
    }

    fn small() -> Tokenizer {
        Tokenizer::from_file(&golden("small_qwen3.tokenizer.json")).unwrap()
    }

    /// Written into a file and read from it again.
    fn there_and_back(tokenizer: &Tokenizer, rows: usize, special: &SpecialTokens) -> (Tokenizer, GgufFile) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.gguf");
        let metadata = tokenizer.to_gguf(rows, special).unwrap();
        crate::gguf::writer::write::<std::io::Error>(&path, &metadata, &[], |_| Ok(Vec::new())).unwrap();
        let file = GgufFile::open(&path).unwrap();
        (Tokenizer::from_gguf(&file).unwrap(), file)
    }

    #[test]
    fn every_family_comes_back_with_the_same_ids() {
        #[derive(serde::Deserialize)]
        struct Text {
            text: String,
        }
        let texts: Vec<Text> = serde_json::from_slice(&std::fs::read(golden("texts.json")).unwrap()).unwrap();
        assert!(texts.len() > 20);
        let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.models/SmolLM2-135M-Instruct.Q4_1.gguf");
        let files = ["small_gpt-2.gguf", "small_llama-bpe.gguf", "small_qwen2.gguf"].map(golden);
        let mut cases: Vec<(Tokenizer, SpecialTokens)> = files
            .into_iter()
            .chain([sample])
            .map(|path| GgufFile::open(&path).expect("run `make setup` first"))
            .map(|file| (Tokenizer::from_gguf(&file).unwrap(), SpecialTokens::from_gguf(&file)))
            .collect();
        cases.push((small(), SpecialTokens { eos: Some("<|im_end|>".into()), ..SpecialTokens::default() }));
        for (tokenizer, special) in cases {
            let rows = tokenizer.vocabulary_size() + 7;
            let (back, file) = there_and_back(&tokenizer, rows, &special);
            assert_eq!(SpecialTokens::from_gguf(&file), special);
            assert_eq!(file.strings(TOKENS).unwrap()[rows - 1], format!("[PAD{}]", rows - 1));
            assert_eq!(back.token_id(&format!("[PAD{}]", rows - 1)), None, "a made-up token is no token");
            for Text { text } in &texts {
                for around in [false, true] {
                    let ids = tokenizer.encode(text, around).unwrap();
                    assert_eq!(back.encode(text, around).unwrap(), ids, "{text:?}");
                    assert_eq!(back.decode(&ids, true).unwrap(), tokenizer.decode(&ids, true).unwrap());
                }
            }
            for id in 0..rows as u32 {
                assert_eq!(back.token_text(id), tokenizer.token_text(id));
                assert_eq!(back.is_ordinary(id), tokenizer.is_ordinary(id), "{id}");
            }
        }
    }

    #[test]
    fn what_gguf_cannot_say_is_refused() {
        let json: Value = serde_json::from_str(small().to_json()).unwrap();
        let refusal = |change: &dyn Fn(&mut Value)| {
            let mut json = json.clone();
            change(&mut json);
            let tokenizer = Tokenizer::from_json(json.to_string().as_bytes()).unwrap();
            tokenizer.to_gguf(600, &SpecialTokens::default()).unwrap_err().to_string()
        };
        let digits =
            |json: &mut Value| json["pre_tokenizer"]["pretokenizers"][0] = json!({"type": "Digits", "individual_digits": true});
        assert!(refusal(&digits).contains("knows no GGUF name for; it knows those of `gpt-2`, `smollm`, `qwen2`, `llama-bpe`"));
        assert!(refusal(&|json| json["normalizer"] = Value::Null).contains("normalizer null"));
        assert!(refusal(&|json| json["added_tokens"][0]["lstrip"] = true.into()).contains("`<|endoftext|>` has `lstrip`"));
        assert!(refusal(&|json| json["model"]["end_of_word_suffix"] = "</w>".into()).contains("end_of_word_suffix"));
        let framed = json!({"type": "TemplateProcessing", "pair": [], "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [481], "tokens": ["<|im_start|>"]}},
            "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]});
        assert!(refusal(&|json| json["post_processor"] = framed.clone()).contains("other tokens around a text"));
        let message = small().to_gguf(480, &SpecialTokens::default()).unwrap_err().to_string();
        assert!(message.contains("`<|endoftext|>` is 480, and the embedding has 480 rows"), "{message}");
        let unknown = SpecialTokens { eos: Some("</s>".into()), ..SpecialTokens::default() };
        assert!(small().to_gguf(600, &unknown).unwrap_err().to_string().contains("`</s>`"));
    }
}
