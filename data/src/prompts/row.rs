//! One row of a prompt file to one chat: the dialects, and the reasons for which a row is not used.

use super::Message;
use serde_json::{Map, Value};

/// What a usable row says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) id: Option<String>,
    pub(crate) messages: Vec<Message>,
    pub(crate) source: Option<String>,
}

/// The fields that can hold the prompt, in the order in which they are looked for.
pub(crate) const PROMPT_FIELDS: [&str; 7] = ["messages", "conversations", "prompt", "question", "instruction", "turns", "text"];

/// Parses a line; the error is the reason for which the row is rejected.
pub(super) fn parse(line: &[u8]) -> Result<Row, String> {
    let fields = fields(line)?;
    with_messages(&fields, messages(&fields)?)
}

/// The fields of a line.
pub(crate) fn fields(line: &[u8]) -> Result<Map<String, Value>, String> {
    let text = std::str::from_utf8(line).map_err(|error| format!("not UTF-8: {error}"))?;
    let value: Value = serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))?;
    let Value::Object(fields) = value else { return Err("not a JSON object".to_owned()) };
    Ok(fields)
}

/// The row with these fields, once `messages` are found to be a chat that can be answered.
pub(crate) fn with_messages(fields: &Map<String, Value>, messages: Vec<Message>) -> Result<Row, String> {
    let id = ["id", "question_id", "task_id"].into_iter().find_map(|name| identifier(fields.get(name)?));
    let source = fields.get("source").and_then(Value::as_str).filter(|source| !source.is_empty()).map(str::to_owned);
    Ok(Row { id, messages: as_request(messages)?, source })
}

/// A text or a number as a name.
pub(crate) fn identifier(value: &Value) -> Option<String> {
    match value {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Finds the prompt of a row. A field that is null is as good as absent: tables with several dialects have them.
pub(crate) fn messages(fields: &Map<String, Value>) -> Result<Vec<Message>, String> {
    let present = |name: &str| fields.get(name).filter(|value| !value.is_null());
    let Some((name, value)) = PROMPT_FIELDS.into_iter().find_map(|name| Some((name, present(name)?))) else {
        return Err(format!("no prompt field; one of `{}` is needed", PROMPT_FIELDS.join("`, `")));
    };
    match (name, value) {
        ("messages" | "conversations", Value::Array(list)) => list.iter().enumerate().map(message).collect(),
        ("prompt", Value::Array(list)) if list.iter().any(|item| first_present(item, ["role", "from"]).is_some()) => {
            list.iter().enumerate().map(message).collect()
        }
        ("messages" | "conversations", _) => Err(format!("`{name}` is not a list of messages")),
        ("turns", Value::Array(list)) => match list.first() {
            Some(Value::String(first)) => Ok(vec![user(first.clone())]),
            Some(_) => Err("`turns` does not start with a text".to_owned()),
            None => Err("`turns` is empty".to_owned()),
        },
        ("turns", _) => Err("`turns` is not a list of texts".to_owned()),
        ("instruction", value) => {
            let instruction = content(value).map_err(|reason| format!("`instruction` {reason}"))?;
            let input = present("input").map_or(Ok(String::new()), content).map_err(|reason| format!("`input` {reason}"))?;
            let both = if input.trim().is_empty() { instruction } else { format!("{instruction}\n\n{input}") };
            Ok(vec![user(both)])
        }
        (name, value) => Ok(vec![user(content(value).map_err(|reason| format!("`{name}` {reason}"))?)]),
    }
}

/// A message by the user.
pub(crate) fn user(content: String) -> Message {
    Message { role: "user".to_owned(), content }
}

/// The first of these fields that is there and not null.
fn first_present<'a>(value: &'a Value, names: [&str; 2]) -> Option<&'a Value> {
    names.into_iter().find_map(|name| value.get(name).filter(|value| !value.is_null()))
}

fn message((index, value): (usize, &Value)) -> Result<Message, String> {
    let number = index + 1;
    let field = |names: [&str; 2]| {
        let found = first_present(value, names);
        found.ok_or_else(|| format!("message {number} has neither `{}` nor `{}`", names[0], names[1]))
    };
    let role = field(["role", "from"])?;
    let role = role.as_str().and_then(role_of).ok_or_else(|| {
        format!(
            "message {number} has the unknown role `{}`; system, user and assistant are known",
            role.to_string().trim_matches('"')
        )
    })?;
    let content = content(field(["content", "value"])?).map_err(|reason| format!("content of message {number} {reason}"))?;
    Ok(Message { role: role.to_owned(), content })
}

/// The names that chat logs give the three roles.
fn role_of(name: &str) -> Option<&'static str> {
    match name.to_ascii_lowercase().as_str() {
        "system" | "developer" => Some("system"),
        "user" | "human" | "prompter" => Some("user"),
        "assistant" | "gpt" | "chatgpt" | "bing" | "bard" | "bot" | "model" => Some("assistant"),
        _ => None,
    }
}

/// A text, or a list of text parts, which are joined as they stand.
fn content(value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => parts.iter().map(text_part).collect(),
        _ => Err("is not a text".to_owned()),
    }
}

fn text_part(part: &Value) -> Result<&str, String> {
    match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
        (Some("text"), Some(text)) => Ok(text),
        (Some("text"), None) => Err("has a text part without `text`".to_owned()),
        (Some(kind), _) => Err(format!("has a part of type `{kind}`; only text can be used")),
        (None, _) => Err("has a part without `type`".to_owned()),
    }
}

/// Checks that a chat is one the target can answer, and drops the answers at its end that regeneration replaces.
///
/// A system message may be empty: to chat templates that is not the same as having none.
fn as_request(mut messages: Vec<Message>) -> Result<Vec<Message>, String> {
    if let Some(index) = messages.iter().skip(1).position(|message| message.role == "system") {
        return Err(format!("message {} is a system message and not the first", index + 2));
    }
    if messages.iter().find(|message| message.role != "system").is_some_and(|first| first.role == "assistant") {
        return Err("the chat starts with the assistant".to_owned());
    }
    while messages.last().is_some_and(|last| last.role == "assistant") {
        messages.pop();
    }
    let empty = |message: &Message| message.role != "system" && message.content.trim().is_empty();
    if let Some(index) = messages.iter().position(empty) {
        return Err(format!("message {} (`{}`) is empty", index + 1, messages[index].role));
    }
    if messages.last().is_none_or(|last| last.role != "user") {
        return Err("the chat has no user message".to_owned());
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn chat(line: &str) -> Vec<(String, String)> {
        parse(line.as_bytes()).unwrap().messages.into_iter().map(|message| (message.role, message.content)).collect()
    }

    fn reason(line: &str) -> String {
        parse(line.as_bytes()).unwrap_err()
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(role, content)| (role.to_string(), content.to_string())).collect()
    }

    #[test]
    fn dialects_with_one_text() {
        let cases = [
            (r#"{"prompt": "p"}"#, "p"),
            (r#"{"question": "q", "answer": "a"}"#, "q"),
            (r#"{"instruction": "i"}"#, "i"),
            (r#"{"instruction": "i", "input": ""}"#, "i"),
            (r#"{"instruction": "i", "input": "x", "output": "o"}"#, "i\n\nx"),
            (r#"{"turns": ["first", "second"]}"#, "first"),
            (r#"{"text": "t"}"#, "t"),
            (r#"{"messages": null, "prompt": "p", "text": "t"}"#, "p"),
            (r#"{"prompt": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}"#, "ab"),
            (r#"{"prompt": [{"role": "user", "content": "p"}]}"#, "p"),
            (r#"{"prompt": [{"role": null, "from": "human", "content": null, "value": "p"}]}"#, "p"),
            (r#"{"prompt": [{"role": null, "type": "text", "text": "p"}]}"#, "p"),
            (r#"{"messages": [{"role": null, "from": "human", "value": "p"}]}"#, "p"),
        ];
        for (line, expected) in cases {
            assert_eq!(chat(line), pairs(&[("user", expected)]), "{line}");
        }
    }

    #[test]
    fn chats_in_both_namings() {
        let expected = pairs(&[("system", ""), ("user", "u"), ("assistant", "a"), ("user", "v")]);
        let roles = r#"{"messages": [{"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}, {"role": "assistant", "content": ""}]}"#;
        assert_eq!(chat(roles), expected);
        for assistant in ["gpt", "chatgpt", "bing", "bard", "ASSISTANT"] {
            let from = format!(
                r#"{{"conversations": [{{"from": "system", "value": ""}}, {{"from": "human", "value": "u"}},
                {{"from": "{assistant}", "value": "a"}}, {{"from": "user", "value": "v"}}, {{"from": "{assistant}", "value": "b"}}]}}"#
            );
            assert_eq!(chat(&from), expected);
        }
    }

    #[test]
    fn reasons_say_what_is_wrong_and_where() {
        let messages = |list: &str| format!(r#"{{"messages": [{list}]}}"#);
        let user = r#"{"role": "user", "content": "u"}"#;
        let assistant = r#"{"role": "assistant", "content": "a"}"#;
        let system = r#"{"role": "system", "content": "s"}"#;
        let cases = [
            (messages(""), "the chat has no user message"),
            (messages(system), "the chat has no user message"),
            (messages(&format!("{assistant}, {user}")), "the chat starts with the assistant"),
            (messages(&format!("{system}, {assistant}")), "the chat starts with the assistant"),
            (messages(&format!("{user}, {system}, {user}")), "message 2 is a system message and not the first"),
            (messages(r#"{"role": "tool", "content": "u"}"#), "message 1 has the unknown role `tool`"),
            (messages(r#"{"role": 5, "content": "u"}"#), "message 1 has the unknown role `5`"),
            (messages(r#"{"role": "user"}"#), "message 1 has neither `content` nor `value`"),
            (messages(r#"{"role": "user", "content": null}"#), "message 1 has neither `content` nor `value`"),
            (messages(r#"{"role": null, "content": "u"}"#), "message 1 has neither `role` nor `from`"),
            (messages(r#"{"role": "user", "content": 5}"#), "content of message 1 is not a text"),
            (messages(r#"{"role": "user", "content": [{"type": "image"}]}"#), "content of message 1 has a part of type `image`"),
            (messages(&format!(r#"{system}, {{"role": "user", "content": " \n"}}"#)), "message 2 (`user`) is empty"),
            (messages(r#""text""#), "message 1 has neither `role` nor `from`"),
            (r#"{"messages": "text"}"#.to_owned(), "`messages` is not a list of messages"),
            (r#"{"turns": []}"#.to_owned(), "`turns` is empty"),
            (r#"{"instruction": "i", "input": 5}"#.to_owned(), "`input` is not a text"),
            (r#"{"prompts": "p"}"#.to_owned(), "no prompt field"),
        ];
        for (line, expected) in cases {
            assert!(reason(&line).starts_with(expected), "{line}: {}", reason(&line));
        }
    }

    #[test]
    fn id_and_source_are_taken_where_given() {
        let row = parse(br#"{"task_id": "HumanEval/0", "source": "humaneval", "prompt": "p"}"#).unwrap();
        assert_eq!((row.id.as_deref(), row.source.as_deref()), (Some("HumanEval/0"), Some("humaneval")));
        let row = parse(br#"{"id": "", "source": "", "prompt": "p"}"#).unwrap();
        assert_eq!((row.id, row.source), (None, None));
    }
}
