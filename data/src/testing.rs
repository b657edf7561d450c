//! What the tests of this crate have in common: a tokenizer whose ids are bytes, and a chat template in which roles are words.

#![allow(clippy::unwrap_used)]

use serde_json::json;

use crate::chat::ChatTemplate;
use crate::tokenizer::{SpecialTokens, Tokenizer};

/// The stop token of [`byte_tokenizer`].
pub(crate) const END: u32 = 257;
/// Ids of [`byte_tokenizer`] are below this.
pub(crate) const VOCABULARY: usize = 258;

/// A tokenizer whose token of an id below 256 is the byte of that value, as byte-level ones write it; then ` world`, which no text
/// is read as for lack of merges, and the special token `<|end|>`.
pub(crate) fn byte_tokenizer() -> Tokenizer {
    let printable = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = 256..;
    let mut vocabulary: serde_json::Map<String, serde_json::Value> = (0..256_u32)
        .map(|byte| {
            let code = if printable(&byte) { byte } else { others.next().unwrap() };
            (char::from_u32(code).unwrap().to_string(), byte.into())
        })
        .collect();
    vocabulary.insert("\u{120}world".to_owned(), 256.into());
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [{"id": END, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    });
    Tokenizer::from_json(tokenizer.to_string().as_bytes()).unwrap()
}

/// `user:text<|end|>` for every message, and `assistant:` where an answer is wanted. Like many templates it refuses a chat that the
/// assistant opens.
pub(crate) fn template() -> ChatTemplate {
    let source = "{% if messages[0].role == 'assistant' %}{{ raise_exception('the user speaks first') }}{% endif %}\
                  {% if tools %}tools:{{ tools | tojson }}<|end|>{% endif %}\
                  {% for message in messages %}{{ message.role + ':' + message.content + '<|end|>' }}{% endfor %}\
                  {% if add_generation_prompt %}assistant:{% endif %}";
    ChatTemplate::new(source.to_owned(), &SpecialTokens::default()).unwrap()
}
