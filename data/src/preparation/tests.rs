#![allow(clippy::unwrap_used)]

use super::*;
use crate::requests::read_chunk;
use crate::testing::{VOCABULARY, byte_tokenizer, template};
use serde_json::json;

/// What preparing files gives.
struct Outcome {
    made: Result<Prepared, PreparationError>,
    work: Vec<Work>,
    rejected: Vec<Rejected>,
}

fn prepare_with(files: &[(&str, &[u8])], limit: Option<usize>, max_tokens: usize) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let write = |&(name, bytes): &(&str, &[u8])| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let prompts: Vec<PathBuf> = files.iter().map(write).collect();
    let (tokenizer, template, inputs) = (byte_tokenizer(), template(), BTreeMap::new());
    let preparation = Preparation {
        prompts: &prompts,
        limit,
        seed: 1,
        max_tokens,
        vocabulary: VOCABULARY,
        tokenizer: &tokenizer,
        template: &template,
        thinking: false,
        inputs: &inputs,
    };
    let target = folder.path().join("work");
    let made = prepare(&preparation, &target, &AtomicBool::new(false), &mut |_, _| {});
    let chunks = made.as_ref().map_or(0, |made| made.chunks);
    let work = (0..chunks).flat_map(|chunk| read_chunk(&target, chunk).unwrap()).collect();
    let rejected = fs::read_to_string(target.join(REJECTED)).unwrap_or_default();
    let rejected = rejected.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    Outcome { made, work, rejected }
}

fn prepare_text(text: &[u8]) -> Outcome {
    prepare_with(&[("prompts.jsonl", text)], None, 1000)
}

/// The reason for which a row is rejected beside a good one.
fn reason(row: &str) -> String {
    let outcome = prepare_text(format!("{{\"prompt\": \"good\"}}\n{row}\n").as_bytes());
    assert_eq!((outcome.work.len(), outcome.rejected.len()), (1, 1), "{row}");
    outcome.rejected[0].reason.clone()
}

/// What is said before each answer: role and text, turn by turn.
fn said(row: &str) -> Vec<Vec<String>> {
    let outcome = prepare_text(row.as_bytes());
    let work = outcome.work.first().unwrap_or_else(|| panic!("{row}: {:?}", outcome.made));
    let in_words = |messages: &[Message]| messages.iter().map(|it| format!("{}:{}", &it.role[..1], it.content)).collect();
    std::iter::once(&work.request.messages).chain(&work.later).map(|turn| in_words(turn)).collect()
}

#[test]
fn blank_lines_carriage_returns_a_byte_order_mark_and_a_missing_last_newline_are_fine() {
    let text = b"\xef\xbb\xbf{\"id\": \"a\", \"prompt\": \"one\"}\r\n\r\n   \n{\"id\": \"b\", \"prompt\": \"two\"}";
    let outcome = prepare_text(text);
    let found: Vec<(&str, usize, &str)> =
        outcome.work.iter().map(|work| (work.request.id.as_str(), work.request.line, work.request.source.as_str())).collect();
    assert_eq!(found, [("a", 1, "prompts.jsonl"), ("b", 4, "prompts.jsonl")]);
    assert_eq!(outcome.work[0].prompt_text, "user:one<|end|>assistant:");
    assert_eq!(outcome.work[0].prompt_ids.len(), "user:one".len() + 1 + "assistant:".len());
    let made = outcome.made.unwrap();
    assert_eq!((made.rows_read, made.rows_used, made.rows_rejected), (2, 2, 0));
}

#[test]
fn rejected_rows_keep_place_reason_and_text_and_every_row_is_counted() {
    let text = b"{\"prompt\": \"one\"}\n\n{\"prompt\": \n[1]\n{\"prompt\": \"\xff\"}\n{\"prompt\": \"\"}\n{\"other\": 1}\n";
    let outcome = prepare_text(text);
    let lines: Vec<usize> = outcome.rejected.iter().map(|row| row.line).collect();
    assert_eq!(lines, [3, 4, 5, 6, 7]);
    let reasons = ["not JSON: EOF", "not a JSON object", "not UTF-8", "message 1 (`user`) is empty", "no prompt field"];
    for (row, reason) in outcome.rejected.iter().zip(reasons) {
        assert!(row.reason.starts_with(reason), "{} / {reason}", row.reason);
        assert!(row.file.ends_with("prompts.jsonl"));
    }
    assert_eq!(outcome.rejected[1].text, "[1]");
    let made = outcome.made.unwrap();
    assert_eq!((made.rows_read, made.rows_used, made.rows_rejected), (6, 1, 5));
    assert_eq!(made.reasons.in_words().len(), 5);
}

#[test]
fn a_file_without_a_usable_row_is_an_error_even_beside_a_good_one() {
    let good = ("good.jsonl", b"{\"prompt\": \"one\"}".as_slice());
    let error = |bytes| prepare_with(&[good, ("bad.jsonl", bytes)], None, 1000).made.unwrap_err().to_string();
    for nothing in [b"".as_slice(), b"\n \r\n", b"[]"] {
        assert!(error(nothing).contains("bad.jsonl` has no rows"), "{}", error(nothing));
    }
    let of_bad_rows = error(b"\n{\"prompt\": 5}\n{}\n");
    assert!(
        of_bad_rows.contains("none of the 2 rows")
            && of_bad_rows.contains("bad.jsonl` can be used; line 2: `prompt` is not a text"),
        "{of_bad_rows}"
    );
    let utf_16: Vec<u8> = "\u{feff}{}".encode_utf16().flat_map(u16::to_le_bytes).collect();
    assert!(error(&utf_16).contains("UTF-16"));
    assert!(matches!(prepare_with(&[], None, 9).made, Err(PreparationError::Prompts(PromptError::NoFiles))));
    let too_long = prepare_with(&[good], None, 9).made.unwrap_err().to_string();
    assert!(
        too_long.contains("none of the 1 rows") && too_long.contains("leaves no room within `data.max_tokens` = 9"),
        "{too_long}"
    );
}

#[test]
fn dialects_may_be_mixed_in_one_file() {
    let rows = [
        r#"{"messages": [{"role": "user", "content": "a"}]}"#,
        r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "old"}]}"#,
        r#"{"prompt": "a"}"#,
        r#"{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}"#,
        r#"{"question": "a", "answer": "old"}"#,
        r#"{"instruction": "a", "input": ""}"#,
        r#"{"turns": ["a"]}"#,
        r#"{"text": "a"}"#,
        r#"{"messages": [], "prompt": "a"}"#,
        r#"{"conversations": null, "text": "a", "tools": "[]"}"#,
    ];
    let outcome = prepare_text(rows.join("\n").as_bytes());
    assert_eq!(outcome.work.len(), rows.len(), "{:?}", outcome.rejected);
    assert!(outcome.work.iter().all(|work| work.prompt_text == "user:a<|end|>assistant:" && work.later.is_empty()));
    // All are the same chat, so each is told from the first by its number alone.
    let hash = &outcome.work[0].request.id;
    let ids: Vec<&String> = outcome.work.iter().map(|work| &work.request.id).collect();
    assert_eq!((ids[1], ids[9]), (&format!("{hash}#2"), &format!("{hash}#10")));
    assert_eq!(outcome.made.unwrap().duplicate_ids, 9);
}

#[test]
fn answers_go_and_what_is_said_before_each_stays() {
    let chat = |messages: &[(&str, &str)]| {
        let messages: Vec<_> = messages.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
        json!({ "messages": messages }).to_string()
    };
    let (s, u, a, t) = (("system", "s"), ("user", "u"), ("assistant", "a"), ("tool", "t"));
    assert_eq!(said(&chat(&[u])), [["u:u"]]);
    assert_eq!(said(&chat(&[s, u, a])), [["s:s", "u:u"]]);
    assert_eq!(said(&chat(&[s, u, a, ("user", "v"), a])), [vec!["s:s", "u:u"], vec!["u:v"]]);
    assert_eq!(said(&chat(&[u, a, a, ("user", "v")])), [["u:u"], ["u:v"]]);
    assert_eq!(said(&chat(&[u, ("user", "v"), a, ("user", "w")])), [vec!["u:u", "u:v"], vec!["u:w"]]);
    assert_eq!(said(r#"{"turns": ["one", "two", "three"]}"#), [["u:one"], ["u:two"], ["u:three"]]);
    // A call and what it gave stay; the answer after them goes.
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]});
    let with_call = json!({"messages": [{"role": "user", "content": "u"}, call, {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]});
    assert_eq!(said(&with_call.to_string()), [vec!["u:u", "a:", "t:t"], vec!["u:v"]]);
    assert_eq!(said(&chat(&[u, a, t, a, u])), [vec!["u:u", "a:a", "t:t"], vec!["u:u"]]);

    assert_eq!(reason(&chat(&[a, u])), "the chat starts with the assistant");
    assert_eq!(reason(&chat(&[s])), "the chat has no user message");
    assert!(reason(&chat(&[s, a])).contains("the chat starts with the assistant"));
    assert_eq!(reason(&chat(&[u, s, a])), "message 2 is a system message and not the first");
    assert_eq!(reason(r#"{"turns": ["one", 2]}"#), "turn 2 of `turns` is not a text");
    assert_eq!(reason(r#"{"turns": ["one", " "]}"#), "turn 2 of `turns` is empty");
    assert!(reason(r#"{"messages": [{"role": "laguna_s", "content": "a"}]}"#).contains("unknown role `laguna_s`"));
    assert!(reason(r#"{"messages": ["no message", {"role": "user", "content": "a"}]}"#).contains("message 1 has neither"));
    for empty in [r#"{"conversations": null}"#, r#"{"conversations": []}"#, "{}"] {
        assert!(
            ["no prompt field", "the chat has no user message"].iter().any(|it| reason(empty).starts_with(it)),
            "{}",
            reason(empty)
        );
    }
}

#[test]
fn tools_are_a_list_or_the_text_of_one() {
    let prompt =
        |tools: &str| prepare_text(format!("{{\"prompt\": \"a\", \"tools\": {tools}}}").as_bytes()).work[0].prompt_text.clone();
    let listed = prompt(r#"[{"name": "f"}]"#);
    assert!(listed.starts_with("tools:[{\"name\": \"f\"}]<|end|>"), "{listed}");
    assert_eq!(listed, prompt(r#""[{\"name\": \"f\"}]""#));
    for none in ["null", r#""""#, "[]", r#""[]""#, r#"" ""#, r#""null""#] {
        assert_eq!(prompt(none), "user:a<|end|>assistant:", "{none}");
    }
    assert!(reason(r#"{"prompt": "a", "tools": "[{"}"#).starts_with("`tools` is not JSON"));
    assert_eq!(reason(r#"{"prompt": "a", "tools": 5}"#), "`tools` is not a list of tools");
}

#[test]
fn odd_rows_are_used_or_rejected_and_never_end_the_reading() {
    let used = [
        r#"{"prompt": "\u0000\u0007 controls"}"#,
        r#"{"prompt": "\ud83d\ude00 and \u2028"}"#,
        "{\"prompt\": \"\u{feff}\u{200b}\u{202e}x\"}",
        r#"{"prompt": "a", "prompt": "the last of two counts"}"#,
        r#"{"prompt": "a", "id": 340282366920938463463374607431768211456}"#,
        r#"{"prompt": "a", "id": 1.5}"#,
        r#"{"prompt": "a", "id": ["no", "name"]}"#,
        r#"{"prompt": "a", "id": "", "source": 5, "extra": {"deep": [[[1e300]]]}}"#,
        r#"{"prompt": "<|end|> in what the user says"}"#,
    ];
    let outcome = prepare_text(used.join("\n").as_bytes());
    assert_eq!(outcome.work.len(), used.len(), "{:?}", outcome.rejected);
    assert_eq!(outcome.work[3].request.messages[0].content, "the last of two counts");
    let deep = format!("{{\"prompt\": \"a\", \"deep\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    for (row, expected) in [
        ("{\"prompt\": \"a raw\ttab\"}", "not JSON: control character"),
        (r#"{"prompt": "\ud800"}"#, "not JSON: "),
        (r#"{"prompt": NaN}"#, "not JSON: "),
        (r#"{"prompt": "a", "n": 1e999}"#, "not JSON: number out of range"),
        ("{'prompt': 'a'}", "not JSON: "),
        (r#"{"prompt": "a"} {"prompt": "b"}"#, "not JSON: trailing characters"),
        ("null", "not a JSON object"),
        ("\"a\"", "not a JSON object"),
        (r#"{"prompt": ["a", "b"]}"#, "`prompt` "),
        (r#"{"prompt": {"text": "a"}}"#, "`prompt` is not a text"),
        (r#"{"prompt": "\n\t "}"#, "message 1 (`user`) is empty"),
        (r#"{"messages": {"role": "user"}}"#, "`messages` is not a list"),
        (
            r#"{"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}"#,
            "content of message 1 has a part of type `image`",
        ),
        (&deep, "not JSON: recursion limit"),
    ] {
        assert!(reason(row).starts_with(expected), "{}: {}", &row[..row.len().min(60)], reason(row));
    }
}

#[test]
fn rows_that_were_tokenised_before_need_a_mask_that_fits() {
    let row = |ids: &str, mask: &str| format!("{{\"input_ids\": {ids}, \"loss_mask\": {mask}, \"text\": \"ignored\"}}");
    let spans = |ids: &str, mask: &str| -> Vec<(usize, usize)> {
        let work = prepare_text(row(ids, mask).as_bytes()).work.remove(0);
        work.supervised.into_iter().map(|span| (span.start, span.end)).collect()
    };
    assert_eq!(spans("[10, 20, 1, 2, 3, 30, 40]", "[0, 0, 1, 1, 1, 0, 0]"), [(2, 5)]);
    assert_eq!(spans("[10, 20, 7, 8]", "[false, false, true, true]"), [(2, 4)]);
    assert_eq!(spans("[10, 1, 30, 10, 2, 2]", "[0, 1, 0, 0, 1, 1]"), [(1, 2), (4, 6)]);
    let long = |item: &str| format!("[0, {}]", vec![item; 200_000].join(", "));
    assert_eq!(spans(&long("5"), &long("1")), [(1, 200_001)]);
    assert!(reason(r#"{"input_ids": [1, 2]}"#).contains("no `loss_mask`"));
    for (ids, mask, expected) in [
        ("[1, 2]", "[1]", "`input_ids` has 2 items and `loss_mask` has 1"),
        ("[1, 258]", "[0, 1]", "`input_ids` has 258 at position 1, beyond the target's vocabulary of 258"),
        ("[1, -2]", "[0, 1]", "`input_ids` has -2 at position 1, which is no token id"),
        ("[1, 2.5]", "[0, 1]", "`input_ids` has 2.5 at position 1"),
        ("[1, \"2\"]", "[0, 1]", "`input_ids` has \"2\" at position 1"),
        ("[1, 2]", "[0, 2]", "`loss_mask` has 2 at position 1, which is neither 0 nor 1"),
        ("[1, 2]", "[0, 0]", "`loss_mask` has no 1"),
        ("[]", "[]", "`loss_mask` has no 1"),
        ("[1, 2]", "[1, 1]", "`loss_mask` begins with a 1"),
        ("5", "[0, 1]", "`input_ids` is not a list"),
        ("[1, 2]", "\"01\"", "`loss_mask` is not a list"),
    ] {
        assert!(reason(&row(ids, mask)).starts_with(expected), "{}", reason(&row(ids, mask)));
    }
}

#[test]
fn ids_are_given_or_hashed_and_told_apart_by_file() {
    let row = |id: &str, prompt: &str| format!("{{\"id\": {id}, \"prompt\": \"{prompt}\"}}\n");
    let one = [row("\"a\"", "1"), row("\"a\"", "2"), row("7", "3"), row("null", "4")].concat();
    let two = [row("\"a\"", "5"), row("\"a\"", "6"), row("null", "4")].concat();
    let files = [("one.jsonl", one.as_bytes()), ("two.jsonl", two.as_bytes())];
    let outcome = prepare_with(&files, None, 1000);
    let ids: Vec<String> = outcome.work.iter().map(|work| work.request.id.clone()).collect();
    let hash = content_hash(&[Message::new("user", "4")], None);
    assert_eq!(ids, ["a", "a#2", "7", &hash, "a@two.jsonl", "a@two.jsonl#2", &format!("{hash}@two.jsonl")]);
    assert_eq!(outcome.made.unwrap().duplicate_ids, 4);
}

#[test]
fn a_limit_leaves_the_same_rows_whatever_the_order_of_rows_and_files() {
    let rows = |range: std::ops::Range<usize>| -> Vec<String> {
        range.map(|n| format!("{{\"id\": {n}, \"prompt\": \"p{n}\"}}\n")).collect()
    };
    let ids = |files: &[(&str, &[u8])], limit| {
        let outcome = prepare_with(files, Some(limit), 1000);
        let made = outcome.made.unwrap();
        assert_eq!(made.rows_read, made.rows_used + made.rows_rejected + made.rows_left_out_by_limit);
        let mut ids: Vec<String> = outcome.work.into_iter().map(|work| work.request.id).collect();
        ids.sort();
        ids
    };
    let (first, second) = (rows(0..30).concat(), rows(30..50).concat());
    let files = [("a", first.as_bytes()), ("b", second.as_bytes())];
    let twenty = ids(&files, 20);
    assert_eq!(twenty.len(), 20);
    let backward: String = rows(0..50).into_iter().rev().collect();
    assert_eq!(twenty, ids(&[("c", backward.as_bytes())], 20));
    let thirty = ids(&files, 30);
    assert!(twenty.iter().all(|id| thirty.contains(id)), "a larger limit only adds");
    assert_eq!(ids(&files, 99).len(), 50);
}

#[test]
fn chunks_have_the_rows_in_their_order_and_count_only_once_complete() {
    let rows: String = (0..40).map(|n| format!("{{\"id\": {n}, \"prompt\": \"p\"}}\n")).collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prompts.jsonl");
    fs::write(&path, rows).unwrap();
    let (tokenizer, template) = (byte_tokenizer(), template());
    let inputs = BTreeMap::from([("seed".to_owned(), "1".to_owned())]);
    let preparation = Preparation {
        prompts: &[path],
        limit: None,
        seed: 1,
        max_tokens: 100,
        vocabulary: VOCABULARY,
        tokenizer: &tokenizer,
        template: &template,
        thinking: false,
        inputs: &inputs,
    };
    let work = folder.path().join("work");
    let stopped = prepare(&preparation, &work, &AtomicBool::new(true), &mut |_, _| {});
    assert!(matches!(stopped, Err(PreparationError::Stopped)));
    assert_eq!(prepared(&work, &inputs).unwrap(), None);
    let mut told = Vec::new();
    let made = prepare(&preparation, &work, &AtomicBool::new(false), &mut |bytes, rows| told.push((bytes, rows))).unwrap();
    assert_eq!(told, [(fs::metadata(&preparation.prompts[0]).unwrap().len(), 40)]);
    let ids: Vec<Vec<String>> =
        (0..made.chunks).map(|chunk| read_chunk(&work, chunk).unwrap().into_iter().map(|it| it.request.id).collect()).collect();
    assert_eq!(ids.iter().map(Vec::len).collect::<Vec<_>>(), [16, 16, 8]);
    assert_eq!(ids.concat(), (0..40).map(|n| n.to_string()).collect::<Vec<_>>());
    assert_eq!(prepared(&work, &inputs).unwrap(), Some(made));
    assert_eq!(prepared(&work, &BTreeMap::new()).unwrap(), None);
}
