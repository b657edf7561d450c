//! One row of a prompt file to one chat: the dialects, and the reasons for which a row is not used.

use super::Message;
use serde_json::{Map, Value};
use std::ops::Range;

/// What a usable row says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) id: Option<String>,
    pub(crate) messages: Vec<Message>,
    pub(crate) tools: Option<Value>,
    pub(crate) source: Option<String>,
    /// What the user says after each answer, of a row in `turns` alone.
    pub(crate) later_turns: Vec<String>,
    /// Of a row that was tokenised before; it has no messages.
    pub(crate) tokens: Option<Tokens>,
}

/// A row that says which of its ids are the target's.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tokens {
    pub(crate) ids: Vec<u32>,
    /// The spans of `ids` that the target wrote: ascending, none empty, none next to another.
    pub(crate) supervised: Vec<Range<usize>>,
}

/// The fields that can hold the prompt, in the order in which they are looked for.
pub(crate) const PROMPT_FIELDS: [&str; 7] = ["messages", "conversations", "prompt", "question", "instruction", "turns", "text"];

/// Parses a line; the error is the reason for which the row is rejected.
pub(crate) fn parse(line: &[u8]) -> Result<Row, String> {
    let fields = fields(line)?;
    if fields.get("input_ids").is_some_and(|ids| !ids.is_null()) {
        return Ok(Row { tokens: Some(tokens(&fields)?), ..around(&fields, Vec::new())? });
    }
    let row = with_messages(&fields, messages(&fields)?)?;
    Ok(Row { later_turns: later_turns(&fields)?, ..row })
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
    around(fields, as_request(messages)?)
}

/// The row with these fields around messages that are known to be good.
fn around(fields: &Map<String, Value>, messages: Vec<Message>) -> Result<Row, String> {
    let id = ["id", "question_id", "task_id"].into_iter().find_map(|name| identifier(fields.get(name)?));
    let source = fields.get("source").and_then(Value::as_str).filter(|source| !source.is_empty()).map(str::to_owned);
    Ok(Row { id, messages, tools: tools(fields)?, source, later_turns: Vec::new(), tokens: None })
}

/// Ids and which of them the target wrote: `input_ids`, and `loss_mask` with 1 or `true` for each of those, 0 or `false` for every other.
fn tokens(fields: &Map<String, Value>) -> Result<Tokens, String> {
    let list = |name: &str| match fields.get(name) {
        Some(Value::Array(list)) => Ok(list),
        None | Some(Value::Null) => {
            Err(format!("the row has `input_ids` but no `{name}`, so nothing says which ids are the target's"))
        }
        Some(_) => Err(format!("`{name}` is not a list")),
    };
    let (ids, mask) = (list("input_ids")?, list("loss_mask")?);
    if ids.len() != mask.len() {
        return Err(format!(
            "`input_ids` has {} items and `loss_mask` has {}; they must have the same length",
            ids.len(),
            mask.len()
        ));
    }
    let id = |(index, value): (usize, &Value)| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| format!("`input_ids` has {value} at position {index}, which is no token id"))
    };
    let ids: Vec<u32> = ids.iter().enumerate().map(id).collect::<Result<_, _>>()?;
    let mut supervised: Vec<Range<usize>> = Vec::new();
    for (index, value) in mask.iter().enumerate() {
        match (value.as_bool().or_else(|| value.as_u64().filter(|&bit| bit < 2).map(|bit| bit == 1)), supervised.last_mut()) {
            (None, _) => return Err(format!("`loss_mask` has {value} at position {index}, which is neither 0 nor 1")),
            (Some(false), _) => {}
            (Some(true), Some(span)) if span.end == index => span.end += 1,
            (Some(true), _) => supervised.push(index..index + 1),
        }
    }
    if supervised.is_empty() {
        return Err("`loss_mask` has no 1: none of the ids is the target's".to_owned());
    }
    if supervised[0].start == 0 {
        return Err("`loss_mask` begins with a 1: there is no prompt before the answer".to_owned());
    }
    Ok(Tokens { ids, supervised })
}

/// The user's turns after the first, where a row is in `turns`.
fn later_turns(fields: &Map<String, Value>) -> Result<Vec<String>, String> {
    match prompt_field(fields) {
        Some(("turns", value)) => Ok(texts("turns", value)?.split_off(1)),
        _ => Ok(Vec::new()),
    }
}

/// A list of texts, none of them blank.
pub(crate) fn texts(name: &str, value: &Value) -> Result<Vec<String>, String> {
    let Value::Array(list) = value else { return Err(format!("`{name}` is not a list of texts")) };
    if list.is_empty() {
        return Err(format!("`{name}` is empty"));
    }
    let text = |(index, value): (usize, &Value)| match value.as_str() {
        None => Err(format!("turn {} of `{name}` is not a text", index + 1)),
        Some(text) if text.trim().is_empty() => Err(format!("turn {} of `{name}` is empty", index + 1)),
        Some(text) => Ok(text.to_owned()),
    };
    list.iter().enumerate().map(text).collect()
}

/// A text or a number as a name.
pub(crate) fn identifier(value: &Value) -> Option<String> {
    match value {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// The tools of a row: a list, or the JSON text of one; nothing else means any.
fn tools(fields: &Map<String, Value>) -> Result<Option<Value>, String> {
    let list = match fields.get("tools") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => serde_json::from_str(text).map_err(|error| format!("`tools` is not JSON: {error}"))?,
        Some(value) => value.clone(),
    };
    match list {
        Value::Array(tools) if tools.is_empty() => Ok(None),
        Value::Array(tools) if tools.iter().all(Value::is_object) => Ok(Some(Value::Array(tools))),
        Value::Null => Ok(None),
        _ => Err("`tools` is not a list of tools".to_owned()),
    }
}

/// Finds the prompt of a row. A field that is null or an empty list is as good as absent where another has the prompt: tables with several
/// dialects have them.
fn prompt_field(fields: &Map<String, Value>) -> Option<(&'static str, &Value)> {
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let filled = PROMPT_FIELDS.into_iter().any(|name| fields.get(name).is_some_and(|value| !value.is_null() && !empty(value)));
    let present = |name: &str| fields.get(name).filter(|value| !(value.is_null() || filled && empty(value)));
    PROMPT_FIELDS.into_iter().find_map(|name| Some((name, present(name)?)))
}

/// The messages of a row in one of the dialects; of `turns` the first.
pub(crate) fn messages(fields: &Map<String, Value>) -> Result<Vec<Message>, String> {
    let Some((name, value)) = prompt_field(fields) else {
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
            let input = fields
                .get("input")
                .filter(|input| !input.is_null())
                .map_or(Ok(String::new()), content)
                .map_err(|reason| format!("`input` {reason}"))?;
            let both = if input.trim().is_empty() { instruction } else { format!("{instruction}\n\n{input}") };
            Ok(vec![user(both)])
        }
        (name, value) => Ok(vec![user(content(value).map_err(|reason| format!("`{name}` {reason}"))?)]),
    }
}

/// A message by the user.
pub(crate) fn user(content: String) -> Message {
    Message::new("user", content)
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
            "message {number} has the unknown role `{}`; system, user, assistant and tool are known",
            role.to_string().trim_matches('"')
        )
    })?;
    let tool_calls = match value.get("tool_calls") {
        Some(Value::Array(calls)) if role == "assistant" && !calls.is_empty() => Some(Value::Array(calls.clone())),
        None | Some(Value::Null) => None,
        Some(Value::Array(calls)) if calls.is_empty() => None,
        Some(_) => return Err(format!("message {number} (`{role}`) has `tool_calls` that are not an assistant's list of calls")),
    };
    // A message that only calls tools often has no content at all.
    let content = match first_present(value, ["content", "value"]) {
        None if tool_calls.is_some() => String::new(),
        _ => content(field(["content", "value"])?).map_err(|reason| format!("content of message {number} {reason}"))?,
    };
    Ok(Message { role: role.to_owned(), content, tool_calls })
}

/// The names that chat logs give the roles.
fn role_of(name: &str) -> Option<&'static str> {
    match name.to_ascii_lowercase().as_str() {
        "system" | "developer" => Some("system"),
        "user" | "human" | "prompter" => Some("user"),
        "assistant" | "gpt" | "chatgpt" | "bing" | "bard" | "bot" | "model" | "ai" => Some("assistant"),
        "tool" | "function" | "observation" | "ipython" => Some("tool"),
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
    // A tool may give nothing back, and a call says all by itself.
    let may_be_empty = |message: &Message| ["system", "tool"].contains(&message.role.as_str()) || message.tool_calls.is_some();
    let empty = |message: &Message| !may_be_empty(message) && message.content.trim().is_empty();
    if let Some(index) = messages.iter().position(empty) {
        return Err(format!("message {} (`{}`) is empty", index + 1, messages[index].role));
    }
    if messages.iter().all(|message| message.role != "user") {
        return Err("the chat has no user message".to_owned());
    }
    if let Some(index) = messages.iter().position(|message| message.role == "tool")
        && !messages[..index].iter().any(|message| message.role == "assistant")
    {
        return Err(format!("message {} is a tool's, but no assistant spoke before it", index + 1));
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
            (messages(r#"{"role": "laguna_s", "content": "u"}"#), "message 1 has the unknown role `laguna_s`"),
            (messages(r#"{"role": "tool", "content": "u"}"#), "the chat has no user message"),
            (
                messages(&format!(r#"{user}, {{"role": "tool", "content": "t"}}"#)),
                "message 2 is a tool's, but no assistant spoke",
            ),
            (
                messages(&format!(r#"{user}, {{"role": "assistant", "content": "", "tool_calls": []}}, {user}"#)),
                "message 2 (`assistant`) is empty",
            ),
            (
                messages(r#"{"role": "user", "content": "u", "tool_calls": [{}]}"#),
                "message 1 (`user`) has `tool_calls` that are not",
            ),
            (r#"{"prompt": "p", "tools": "no list"}"#.to_owned(), "`tools` is not JSON"),
            (r#"{"prompt": "p", "tools": {"name": "f"}}"#.to_owned(), "`tools` is not a list of tools"),
            (r#"{"prompt": "p", "tools": ["f"]}"#.to_owned(), "`tools` is not a list of tools"),
            (r#"{"messages": [], "prompt": null}"#.to_owned(), "the chat has no user message"),
            (
                r#"{"messages": ["no message", {"role": "user", "content": "ok"}]}"#.to_owned(),
                "message 1 has neither `role` nor `from`",
            ),
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
    fn tools_are_a_list_or_its_text_and_an_empty_one_is_none() {
        let tools = |value: &str| parse(format!(r#"{{"prompt": "p", "tools": {value}}}"#).as_bytes()).unwrap().tools;
        let expected = serde_json::json!([{"type": "function", "function": {"name": "f"}}]);
        assert_eq!(tools(&expected.to_string()), Some(expected.clone()));
        assert_eq!(tools(&serde_json::to_string(&expected.to_string()).unwrap()), Some(expected));
        for none in ["null", "\"\"", "\" \"", "[]", "\"[]\"", "\"null\""] {
            assert_eq!(tools(none), None, "{none}");
        }
    }

    #[test]
    fn a_chat_with_calls_ends_with_what_the_tool_gave_back() {
        let calls = r#"[{"function": {"name": "f", "arguments": {"x": 1}}}]"#;
        for content in [r#""content": "", "#, r#""content": null, "#, ""] {
            let line = format!(
                r#"{{"messages": [{{"role": "user", "content": "u"}}, {{"role": "assistant", {content}"tool_calls": {calls}}},
                {{"role": "observation", "content": "7"}}, {{"role": "gpt", "content": "It is 7."}}]}}"#
            );
            let row = parse(line.as_bytes()).unwrap();
            let roles: Vec<(&str, &str)> = row.messages.iter().map(|it| (it.role.as_str(), it.content.as_str())).collect();
            assert_eq!(roles, [("user", "u"), ("assistant", ""), ("tool", "7")], "the answer is what is asked for");
            assert_eq!(row.messages[1].tool_calls, Some(serde_json::from_str(calls).unwrap()));
        }
    }

    #[test]
    fn an_empty_list_gives_way_to_the_field_that_has_the_prompt() {
        for line in [r#"{"messages": [], "prompt": "p"}"#, r#"{"conversations": null, "messages": [], "text": "p"}"#] {
            assert_eq!(chat(line), pairs(&[("user", "p")]), "{line}");
        }
    }

    #[test]
    fn odd_values_are_rows_or_reasons_and_never_a_panic() {
        // Deep nesting, numbers beyond a float, halves of surrogate pairs, characters that no text should have.
        let deep = format!(r#"{{"prompt": "p", "extra": {}1{}}}"#, "[".repeat(200), "]".repeat(200));
        assert!(reason(&deep).starts_with("not JSON: recursion limit"), "{}", reason(&deep));
        assert!(reason(r#"{"prompt": "p", "n": 1e999}"#).starts_with("not JSON: number out of range"));
        assert!(reason(r#"{"prompt": "\ud800"}"#).starts_with("not JSON: "));
        assert!(reason(r#"{"prompt": "p", "n": NaN}"#).starts_with("not JSON: "));
        assert_eq!(chat(r#"{"prompt": "\u0000\u202e\u001b[31m"}"#), pairs(&[("user", "\0\u{202e}\u{1b}[31m")]));
        let row = parse(br#"{"id": 12345678901234567890123, "prompt": "p"}"#).unwrap();
        assert!(row.id.is_some_and(|id| id.starts_with("1.2345678901234568e")), "a number as it was read");
        assert_eq!(chat(r#"{"prompt": "a", "prompt": "b"}"#), pairs(&[("user", "b")]), "the last of a key stands, as everywhere");
    }

    #[test]
    fn id_and_source_are_taken_where_given() {
        let row = parse(br#"{"task_id": "HumanEval/0", "source": "humaneval", "prompt": "p"}"#).unwrap();
        assert_eq!((row.id.as_deref(), row.source.as_deref()), (Some("HumanEval/0"), Some("humaneval")));
        let row = parse(br#"{"id": "", "source": "", "prompt": "p"}"#).unwrap();
        assert_eq!((row.id, row.source), (None, None));
    }
}
