//! The metadata of a GGUF file as the `tokenizer.json` it was converted from. GGUF names the rules that split a text
//! before merging instead of spelling them out, so they are spelt out here.

use super::TokenizerError;
use crate::gguf::GgufFile;
use serde_json::{Map, Value, json};

pub(super) const MODEL: &str = "tokenizer.ggml.model";
pub(super) const PRE_TOKENIZER: &str = "tokenizer.ggml.pre";
pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
pub(super) const MERGES: &str = "tokenizer.ggml.merges";

pub(super) const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";

/// GGUF's numbers for kinds of tokens: markers such as `<|im_end|>`, tokens that users added, and names for rows of the embedding that
/// the tokenizer does not have.
pub(super) const CONTROL: i64 = 3;
pub(super) const USER_DEFINED: i64 = 4;
pub(super) const UNUSED: i64 = 5;

/// Words with at most one mark before them, single digits, marks, line ends, other white space.
const QWEN2_PATTERN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with up to three digits together.
const LLAMA3_PATTERN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How a family of models prepares a text for merging.
pub(super) struct Rules {
    pub(super) name: &'static str,
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    /// A word that is in the vocabulary is taken whole, even where merges would not lead to it.
    pub(super) ignore_merges: bool,
    /// Whether texts begin with the first token where the file does not say.
    begins_with_bos: bool,
}

pub(super) fn all_rules() -> [Rules; 4] {
    let byte_level =
        |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let sequence = |first: Value, second: Value| json!({"type": "Sequence", "pretokenizers": [first, second]});
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let rules = |name, pre_tokenizer| Rules {
        name,
        normalizer: Value::Null,
        pre_tokenizer,
        ignore_merges: false,
        begins_with_bos: false,
    };
    [
        rules("gpt-2", byte_level(true)),
        rules("smollm", sequence(json!({"type": "Digits", "individual_digits": true}), byte_level(true))),
        Rules { normalizer: json!({"type": "NFC"}), ..rules("qwen2", sequence(split(QWEN2_PATTERN), byte_level(false))) },
        Rules {
            ignore_merges: true,
            begins_with_bos: true,
            ..rules("llama-bpe", sequence(split(LLAMA3_PATTERN), byte_level(false)))
        },
    ]
}

pub(super) fn tokenizer_json(gguf: &GgufFile) -> Result<Value, TokenizerError> {
    let model = gguf.string(MODEL)?;
    if model != "gpt2" {
        return Err(unsupported(gguf, MODEL, model, "`gpt2` (byte-level BPE)".to_owned()));
    }
    let rules = rules(gguf)?;
    let tokens = gguf.strings(TOKENS)?;
    let types = token_types(gguf, &tokens)?;
    let merges = gguf.strings(MERGES)?;
    let merges = merges.into_iter().map(|merge| pair(gguf, merge)).collect::<Result<Vec<Value>, _>>()?;
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens(&types, &tokens),
        "normalizer": rules.normalizer,
        "pre_tokenizer": rules.pre_tokenizer,
        "post_processor": post_processor(gguf, &tokens, rules.begins_with_bos)?,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": rules.ignore_merges,
            "vocab": vocabulary(gguf, &types, &tokens)?,
            "merges": merges,
        },
    }))
}

fn rules(gguf: &GgufFile) -> Result<Rules, TokenizerError> {
    let name = gguf.string(PRE_TOKENIZER)?;
    let all = all_rules();
    let supported = all.each_ref().map(|rules| format!("`{}`", rules.name)).join(", ");
    all.into_iter().find(|rules| rules.name == name).ok_or_else(|| unsupported(gguf, PRE_TOKENIZER, name, supported))
}

fn token_types(gguf: &GgufFile, tokens: &[&str]) -> Result<Vec<i64>, TokenizerError> {
    let types = gguf.integers(TOKEN_TYPES)?;
    if types.len() != tokens.len() {
        return Err(invalid(gguf, format!("`{TOKEN_TYPES}` has {} entries and `{TOKENS}` has {}", types.len(), tokens.len())));
    }
    Ok(types)
}

/// The vocabulary must map every token to one id, which is its position. Unused ones are left out: the converter made them up for rows
/// of the embedding beyond the tokenizer's ids, such as `[PAD151936]`.
fn vocabulary(gguf: &GgufFile, types: &[i64], tokens: &[&str]) -> Result<Map<String, Value>, TokenizerError> {
    let mut vocabulary = Map::with_capacity(tokens.len());
    for (id, (token, _)) in tokens.iter().zip(types).enumerate().filter(|(_, (_, kind))| **kind != UNUSED) {
        if let Some(earlier) = vocabulary.insert(token.to_string(), id.into()) {
            return Err(invalid(gguf, format!("`{TOKENS}` has `{token}` twice, as {earlier} and {id}")));
        }
    }
    Ok(vocabulary)
}

fn pair(gguf: &GgufFile, merge: &str) -> Result<Value, TokenizerError> {
    match merge.split_once(' ') {
        Some((left, right)) if !right.contains(' ') => Ok(json!([left, right])),
        _ => Err(invalid(gguf, format!("`{MERGES}` has `{merge}`, which is not two tokens with a space between"))),
    }
}

/// Tokens that are cut out of a text before anything else; only control tokens are special, that is, can be left out
/// when decoding.
fn added_tokens(types: &[i64], tokens: &[&str]) -> Vec<Value> {
    let added = types.iter().zip(tokens).enumerate().filter(|(_, (kind, _))| matches!(**kind, CONTROL | USER_DEFINED));
    let token = |(id, (&kind, token)): (usize, (&i64, &&str))| json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": kind == CONTROL});
    added.map(token).collect()
}

/// What is put around a text on request; null where nothing is.
fn post_processor(gguf: &GgufFile, tokens: &[&str], begins_with_bos: bool) -> Result<Value, TokenizerError> {
    let named = |wanted: bool, key: &'static str| -> Result<Option<(usize, &str)>, TokenizerError> {
        if !wanted {
            return Ok(None);
        }
        let id = gguf.unsigned(key)?;
        match usize::try_from(id).ok().and_then(|id| Some((id, *tokens.get(id)?))) {
            Some(token) => Ok(Some(token)),
            None => Err(invalid(gguf, format!("`{key}` is {id}, and there are {} tokens", tokens.len()))),
        }
    };
    let switch = |key: &str, default: bool| if gguf.has(key) { gguf.boolean(key) } else { Ok(default) };
    let first = named(switch("tokenizer.ggml.add_bos_token", begins_with_bos)?, "tokenizer.ggml.bos_token_id")?;
    let last = named(switch("tokenizer.ggml.add_eos_token", false)?, "tokenizer.ggml.eos_token_id")?;
    if first.is_none() && last.is_none() {
        return Ok(Value::Null);
    }
    let around = |kind: usize, sequence: &str| {
        let special =
            |token: &Option<(usize, &str)>| token.map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": kind}}));
        let text = json!({"Sequence": {"id": sequence, "type_id": kind}});
        [special(&first), Some(text), special(&last)].into_iter().flatten().collect::<Vec<Value>>()
    };
    let special_tokens: Map<String, Value> = [first, last]
        .into_iter()
        .flatten()
        .map(|(id, text)| (text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]})))
        .collect();
    Ok(json!({
        "type": "TemplateProcessing",
        "single": around(0, "A"),
        "pair": ([around(0, "A"), around(1, "B")].concat()),
        "special_tokens": special_tokens,
    }))
}

fn unsupported(gguf: &GgufFile, key: &'static str, found: &str, supported: String) -> TokenizerError {
    TokenizerError::Unsupported { path: gguf.path.clone(), key, found: found.to_owned(), supported }
}

fn invalid(gguf: &GgufFile, reason: String) -> TokenizerError {
    TokenizerError::InvalidGguf { path: gguf.path.clone(), reason }
}
