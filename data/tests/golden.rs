//! Chat rendering and token ids against the golden values that `tests/golden/make_chat.py` makes with `transformers`.

#![allow(clippy::unwrap_used)]

use data::chat::ChatTemplate;
use data::gguf::GgufFile;
use data::prompts::Message;
use data::tokenizer::{SpecialTokens, Tokenizer};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/chat").join(name)
}

fn sample_model() -> GgufFile {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.models/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.exists(), "run `make setup` first: `{}` is absent", path.display());
    GgufFile::open(&path).unwrap()
}

fn read_json<T: DeserializeOwned>(name: &str) -> T {
    serde_json::from_str(&fs::read_to_string(golden(name)).unwrap()).unwrap()
}

#[derive(Deserialize)]
struct Chat {
    template: String,
    name: String,
    messages: Vec<Message>,
    add_generation_prompt: bool,
    thinking: Option<bool>,
    text: String,
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Text {
    tokenizer: String,
    text: String,
    ids: Vec<u32>,
    ids_with_special: Vec<u32>,
    decoded: String,
    decoded_without_special: String,
}

#[test]
fn chats_are_rendered_and_encoded_as_transformers_does() {
    let sample = sample_model();
    let small = || Tokenizer::from_file(&golden("small_qwen3.tokenizer.json")).unwrap();
    let special = SpecialTokens { eos: Some("<|im_end|>".into()), pad: Some("<|endoftext|>".into()), ..SpecialTokens::default() };
    let template = |name: &str| ChatTemplate::new(fs::read_to_string(golden(name)).unwrap(), &special).unwrap();
    let families = BTreeMap::from([
        ("smollm2", (ChatTemplate::from_gguf(&sample).unwrap(), Tokenizer::from_gguf(&sample).unwrap())),
        ("qwen3", (template("qwen3_chat_template.jinja"), small())),
        ("variants", (template("variants.jinja"), small())),
    ]);
    let chats: Vec<Chat> = read_json("chats.json");
    assert!(families.keys().all(|family| chats.iter().any(|chat| chat.template == *family)));
    for chat in chats {
        let (template, tokenizer) = &families[chat.template.as_str()];
        let case =
            format!("{}, {}, prompt {}, thinking {:?}", chat.template, chat.name, chat.add_generation_prompt, chat.thinking);
        let text = template.render(&chat.messages, chat.add_generation_prompt, chat.thinking).unwrap();
        assert_eq!(text, chat.text, "{case}");
        assert_eq!(tokenizer.encode(&text, false).unwrap(), chat.ids, "{case}");
        assert_eq!(tokenizer.decode(&chat.ids, false).unwrap(), chat.text, "{case}");
    }
}

#[test]
fn texts_are_encoded_and_decoded_as_the_reference_does() {
    let small = |name: &str| Tokenizer::from_gguf(&GgufFile::open(&golden(&format!("small_{name}.gguf"))).unwrap()).unwrap();
    let mut tokenizers: BTreeMap<&str, Tokenizer> = ["gpt-2", "qwen2", "llama-bpe"].map(|name| (name, small(name))).into();
    tokenizers.insert("smollm2", Tokenizer::from_gguf(&sample_model()).unwrap());
    for Text { tokenizer: name, text, ids, ids_with_special, decoded, decoded_without_special } in
        read_json::<Vec<Text>>("texts.json")
    {
        let tokenizer = &tokenizers[name.as_str()];
        assert_eq!(tokenizer.encode(&text, false).unwrap(), ids, "{name}: {text:?}");
        assert_eq!(tokenizer.encode(&text, true).unwrap(), ids_with_special, "{name}: {text:?}");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), decoded, "{name}");
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), decoded_without_special, "{name}");
    }
}

#[test]
fn a_tokenizer_from_gguf_is_the_same_after_writing_and_reading_its_json() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let built = Tokenizer::from_gguf(&sample_model()).unwrap();
    fs::write(&path, built.to_json()).unwrap();
    let read = Tokenizer::from_file(&path).unwrap();
    assert_eq!((read.hash(), read.vocabulary_size()), (built.hash(), 49152));
    assert_eq!((read.token_id("<|im_end|>"), read.token_text(2).as_deref()), (Some(2), Some("<|im_end|>")));
    assert_eq!((read.token_id("no such token"), read.token_text(49152)), (None, None));
    assert_eq!(read.decode(&[1, 2, 49152], true).unwrap(), "");
}

#[test]
fn ordinary_tokens_are_those_that_text_can_become() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let from_gguf = Tokenizer::from_gguf(&sample_model()).unwrap();
    fs::write(&path, from_gguf.to_json()).unwrap();
    for tokenizer in [from_gguf, Tokenizer::from_file(&path).unwrap()] {
        assert_eq!(tokenizer.token_text(16).as_deref(), Some("<empty_output>"));
        let ordinary = [2, 16, 17, 100, 49151, 49152].map(|id| tokenizer.is_ordinary(id));
        assert_eq!(ordinary, [false, false, true, true, true, false]);
    }
    // Qwen3's tags for thinking are added, but not special.
    let small = Tokenizer::from_file(&golden("small_qwen3.tokenizer.json")).unwrap();
    let ordinary = ["<think>", "<|im_end|>"].map(|token| small.is_ordinary(small.token_id(token).unwrap()));
    assert_eq!(ordinary, [true, false]);
}

#[test]
fn tokens_that_gguf_calls_unused_are_not_in_the_vocabulary() {
    use data::gguf::Value;
    let mut gguf = GgufFile::open(&golden("small_qwen2.gguf")).unwrap();
    let whole = Tokenizer::from_gguf(&gguf).unwrap();
    for (key, value) in [("tokens", Value::String("[PAD]".into())), ("token_type", Value::I64(5))] {
        let Some(Value::Array(values)) = gguf.metadata.get_mut(&format!("tokenizer.ggml.{key}")) else { panic!("no {key}") };
        values.push(value);
    }
    let padded = Tokenizer::from_gguf(&gguf).unwrap();
    assert!(!padded.is_ordinary(whole.vocabulary_size() as u32));
    assert_eq!(padded.to_json(), whole.to_json());
}

#[test]
fn special_tokens_and_template_come_from_the_metadata() {
    let small = GgufFile::open(&golden("small_llama-bpe.gguf")).unwrap();
    let special = SpecialTokens::from_gguf(&small);
    let expected =
        SpecialTokens { bos: Some("<|endoftext|>".into()), eos: Some("<|im_end|>".into()), ..SpecialTokens::default() };
    assert_eq!(special, expected);
    let template = ChatTemplate::from_gguf(&small).unwrap();
    let messages = [Message::new("user", "hi")];
    assert_eq!(template.render(&messages, true, None).unwrap(), "<|endoftext|>hi<|im_end|>");
}

/// Changes one key of a small file's metadata and says how building a tokenizer then fails.
fn failure(change: impl FnOnce(&mut BTreeMap<String, data::gguf::Value>)) -> String {
    let mut gguf = GgufFile::open(&golden("small_qwen2.gguf")).unwrap();
    change(&mut gguf.metadata);
    Tokenizer::from_gguf(&gguf).unwrap_err().to_string()
}

#[test]
fn metadata_that_cannot_be_used_is_told_with_what_can() {
    use data::gguf::Value;
    let message = failure(|keys| drop(keys.insert("tokenizer.ggml.model".into(), Value::String("llama".into()))));
    assert!(message.contains("small_qwen2.gguf") && message.contains("`llama`") && message.contains("`gpt2`"), "{message}");
    let message = failure(|keys| drop(keys.insert("tokenizer.ggml.pre".into(), Value::String("tekken".into()))));
    assert!(message.contains("`tekken`") && message.contains("`gpt-2`, `smollm`, `qwen2`, `llama-bpe`"), "{message}");
    let message = failure(|keys| drop(keys.remove("tokenizer.ggml.merges")));
    assert!(message.contains("tokenizer.ggml.merges"), "{message}");
    let message =
        failure(|keys| drop(keys.insert("tokenizer.ggml.merges".into(), Value::Array(vec![Value::String("ab".into())]))));
    assert!(message.contains("`ab`, which is not two tokens"), "{message}");
    let message =
        failure(|keys| drop(keys.insert("tokenizer.ggml.merges".into(), Value::Array(vec![Value::String("q qqq".into())]))));
    assert!(message.contains("qqq"), "{message}");
    let message = failure(|keys| drop(keys.insert("tokenizer.ggml.token_type".into(), Value::Array(vec![]))));
    assert!(message.contains("has 0 entries"), "{message}");
    let message = failure(|keys| {
        let Some(Value::Array(tokens)) = keys.get_mut("tokenizer.ggml.tokens") else { panic!("no tokens") };
        tokens[7] = tokens[3].clone();
    });
    assert!(message.contains("twice, as 3 and 7"), "{message}");
    let message = failure(|keys| {
        keys.insert("tokenizer.ggml.add_eos_token".into(), Value::Bool(true));
        keys.insert("tokenizer.ggml.eos_token_id".into(), Value::U64(1 << 40));
    });
    assert!(message.contains("eos_token_id` is 1099511627776"), "{message}");
}
