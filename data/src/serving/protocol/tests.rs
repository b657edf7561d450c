#![allow(clippy::unwrap_used)]

use super::*;
use crate::prompts::Message;
use crate::serving::Pace;
use std::time::Duration;

pub(in crate::serving) fn settings() -> ServingSettings {
    ServingSettings {
        endpoints: vec!["http://localhost:1".to_owned()],
        model: None,
        concurrency: 1,
        timeout: Duration::from_secs(1),
        retries: 2,
        temperature: 0.0,
        top_p: 1.0,
        top_k: 0,
        max_new_tokens: 64,
        thinking: false,
        seed: 1,
        api_key: None,
        stop_tokens: Vec::new(),
        pace: Pace::default(),
    }
}

fn question() -> Question {
    Question { key: 3, messages: vec![Message::new("user", "Hi")], tools: None, prompt_ids: vec![5, 6, 7], counter: u64::MAX }
}

fn body(settings: &ServingSettings, left_out: &[&'static str]) -> Value {
    serde_json::from_slice(&request(&question(), settings, "m", settings.max_new_tokens, left_out)).unwrap()
}

fn read(reply: &Value) -> Result<(Answer, u64), Unusable> {
    parse(reply.to_string().as_bytes())?.into_answer(&[5, 6, 7])
}

fn reason(reply: &Value) -> String {
    match read(reply) {
        Err(Unusable::Answer(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_request_says_what_the_settings_say() {
    let greedy = body(&settings(), &[]);
    let expected = json!({
        "model": "m", "messages": [{ "role": "user", "content": "Hi" }], "temperature": 0.0, "top_p": 1.0, "max_tokens": 64,
        "seed": greedy["seed"], "stream": false, "verbose": true, "return_tokens": true, "return_token_ids": true,
        "repeat_penalty": 1.0, "repetition_penalty": 1.0, "chat_template_kwargs": { "enable_thinking": false }
    });
    assert_eq!(greedy, expected);
    let sampled =
        ServingSettings { temperature: 0.6, top_p: 0.95, top_k: 20, thinking: true, stop_tokens: vec![2, 4], ..settings() };
    let sampled = body(&sampled, &["verbose", "return_tokens", "repeat_penalty"]);
    let expected = json!({
        "model": "m", "messages": [{ "role": "user", "content": "Hi" }], "temperature": 0.6, "top_p": 0.95, "max_tokens": 64,
        "seed": greedy["seed"], "stream": false, "return_token_ids": true, "repetition_penalty": 1.0, "min_p": 0.0,
        "stop_token_ids": [2, 4], "chat_template_kwargs": { "enable_thinking": true }, "top_k": 20
    });
    assert_eq!(sampled, expected);
}

#[test]
fn sampling_without_top_k_says_so() {
    let off = ServingSettings { temperature: 1.0, ..settings() };
    assert_eq!(body(&off, &[])["top_k"], -1);
    assert!(extras(&off).iter().all(|extra| extra.name != "top_k" || !extra.needed));
    let on = ServingSettings { temperature: 1.0, top_k: 5, ..settings() };
    assert!(extras(&on).iter().any(|extra| extra.name == "top_k" && extra.needed));
}

#[test]
fn messages_and_tools_go_as_they_are() {
    let mut calls = Message::new("assistant", "");
    calls.tool_calls = Some(json!([{ "type": "function", "function": { "name": "f", "arguments": "{}" } }]));
    let question = Question { messages: vec![calls.clone()], tools: Some(json!([{ "type": "function" }])), ..question() };
    let body: Value = serde_json::from_slice(&request(&question, &settings(), "m", 1, &[])).unwrap();
    assert_eq!(body["messages"], json!([{ "role": "assistant", "content": "", "tool_calls": calls.tool_calls }]));
    assert_eq!(body["tools"], json!([{ "type": "function" }]));
}

#[test]
fn seeds_depend_on_both_numbers_and_fit_31_bits() {
    let mut seeds: Vec<u32> = (0..40).flat_map(|run| (0..40).map(move |counter| seed(run, counter))).collect();
    assert!(seeds.iter().all(|&seed| i32::try_from(seed).is_ok()));
    seeds.sort_unstable();
    seeds.dedup();
    assert_eq!(seeds.len(), 1600);
    assert_eq!(seed(1, 2), seed(1, 2));
}

#[test]
fn ids_are_found_where_each_server_puts_them() {
    let answer = |ids: Option<Vec<u32>>| Answer { ids, text: Some("Yes".to_owned()), finish_reason: FinishReason::Stop };
    let choice = json!({ "message": { "content": "Yes" }, "finish_reason": "stop" });
    let with = |fields: Value| {
        let mut choice = choice.clone();
        choice.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        choice
    };
    let vllm = json!({ "prompt_token_ids": [5, 6, 7], "choices": [with(json!({ "token_ids": [8, 2] }))] });
    assert_eq!(read(&vllm).unwrap(), (answer(Some(vec![8, 2])), 2));
    let sglang = json!({ "choices": [with(json!({ "token_ids": [8, 2], "prompt_token_ids": [5, 6, 7] }))] });
    assert_eq!(read(&sglang).unwrap(), (answer(Some(vec![8, 2])), 2));
    let llama = json!({ "choices": [choice], "usage": { "completion_tokens": 9 }, "__verbose": { "tokens": [8, 2] } });
    assert_eq!(read(&llama).unwrap(), (answer(Some(vec![8, 2])), 2));
    let quiet = json!({ "choices": [choice], "usage": { "completion_tokens": 9 }, "__verbose": { "tokens": [] } });
    assert_eq!(read(&quiet).unwrap(), (answer(None), 9));
    let null = json!({ "prompt_token_ids": null, "choices": [with(json!({ "token_ids": null }))], "usage": null });
    assert_eq!(read(&null).unwrap(), (answer(None), 0));
}

#[test]
fn reasons_to_finish_are_kept_or_named() {
    let reply = |finish: Value| json!({ "choices": [{ "message": { "content": "Yes" }, "finish_reason": finish }] });
    assert_eq!(read(&reply(json!("stop"))).unwrap().0.finish_reason, FinishReason::Stop);
    assert_eq!(read(&reply(json!("tool_calls"))).unwrap().0.finish_reason, FinishReason::Stop);
    assert_eq!(read(&reply(json!("length"))).unwrap().0.finish_reason, FinishReason::Length);
    assert!(reason(&reply(json!("content_filter"))).contains("`content_filter`"));
    assert!(reason(&reply(json!(null))).contains("`finish_reason`"));
}

#[test]
fn another_prompt_is_not_accepted() {
    let reply = |prompt: Value| json!({ "prompt_token_ids": prompt, "choices": [{ "message": { "content": "a" }, "finish_reason": "stop", "token_ids": [1] }] });
    assert!(read(&reply(json!([5, 6, 7]))).is_ok());
    for (prompt, position, seen, recorded) in [
        (json!([5, 9, 7]), 1, "has token 9", "has token 6"),
        (json!([5, 6]), 2, "has ended", "has token 7"),
        (json!([5, 6, 7, 8]), 3, "has token 8", "has ended"),
        (json!([]), 0, "has ended", "has token 5"),
        (json!([-5, 6, 7]), 0, "has token -5", "has token 5"),
    ] {
        let reason = reason(&reply(prompt));
        let expected = format!("at position {position} its prompt {seen}, the recorded one {recorded}");
        assert!(reason.contains(&expected), "{reason}");
    }
}

#[test]
fn ids_must_be_ids() {
    let reply = |ids: Value| json!({ "choices": [{ "message": { "content": "a" }, "finish_reason": "stop", "token_ids": ids }] });
    assert!(reason(&reply(json!([]))).contains("empty"));
    assert!(reason(&reply(json!([1, -1]))).contains("-1"));
    assert!(reason(&reply(json!([1, 1_u64 << 31]))).contains("2147483648"));
    assert!(read(&reply(json!([i32::MAX]))).is_ok());
}

#[test]
fn text_from_which_something_was_taken_is_no_answer_but_ids_are() {
    let reply =
        |message: Value, ids: Value| json!({ "choices": [{ "message": message, "finish_reason": "stop", "token_ids": ids }] });
    for (message, named) in [
        (json!({ "content": "a", "reasoning_content": "b" }), "reasoning parser"),
        (json!({ "content": "a", "reasoning": "b" }), "reasoning parser"),
        (json!({ "content": null, "tool_calls": [{}] }), "parser of tool calls"),
        (json!({ "content": "" }), "empty answer"),
        (json!({ "content": null }), "empty answer"),
    ] {
        assert!(reason(&reply(message.clone(), json!(null))).contains(named), "{message}");
        assert_eq!(read(&reply(message, json!([4]))).unwrap().0.ids, Some(vec![4]));
    }
    assert!(read(&reply(json!({ "content": "a", "reasoning_content": "", "tool_calls": [] }), json!(null))).is_ok());
}

#[test]
fn what_is_not_of_the_protocol_is_told_apart_and_quoted() {
    for body in ["", "<html>Bad gateway</html>", "{\"choices\":[]}", "{}", "[1]", "{\"choices\":3}"] {
        assert!(matches!(parse(body.as_bytes()), Err(Unusable::Reply(reason)) if reason.contains(body)), "{body}");
    }
    let empty = parse(b"{\"choices\": [{\"finish_reason\": \"stop\"}]}").unwrap().into_answer(&[]);
    assert!(matches!(empty, Err(Unusable::Reply(_))));
    for (body, message) in [
        ("{\"error\": {\"message\": \"too long\"}}", "too long"),
        ("{\"error\": \"too long\"}", "too long"),
        ("{\"message\": \"too long\"}", "too long"),
        ("{\"detail\": [\"a\"]}", "[\"a\"]"),
        ("too long", "too long"),
    ] {
        assert_eq!(message_in(body.as_bytes()), message);
    }
}

#[test]
fn models_are_listed_by_name() {
    assert_eq!(models(b"{\"data\": [{\"id\": \"a\"}, {\"id\": \"b\", \"x\": 1}]}").unwrap(), ["a", "b"]);
    assert!(models(b"{}").unwrap_err().contains("regenerate.server_model"));
}
