#![allow(clippy::unwrap_used)]
use super::*;
use crate::sample::sample;
use std::fs;

fn read_text(text: &str, form: Option<Form<'_>>, category: Option<&str>) -> Result<Benchmark, PromptError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set.jsonl");
    fs::write(&path, text).unwrap();
    read(&path, form, category)
}

/// The user's texts of the rows, all turns of them.
fn turns(text: &str, form: Option<Form<'_>>) -> Vec<Vec<String>> {
    let read = read_text(text, form, None).unwrap();
    assert!(read.rejected.is_empty(), "{:?}", read.rejected);
    let turns = |it: &Conversation| {
        assert!(it.request.messages.iter().all(|message| message.role == "user"), "{it:?}");
        it.request.messages.iter().map(|message| message.content.clone()).chain(it.later_turns.clone()).collect()
    };
    read.conversations.iter().map(turns).collect()
}

fn templates(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| text.to_string()).collect()
}

#[test]
fn all_turns_are_read_and_are_what_tells_conversations_apart() {
    let text = "{\"turns\": [\"one\", \"two\", \"three\"]}\n{\"turns\": [\"one\"]}\n{\"turns\": [\"one\"]}\n";
    assert_eq!(turns(text, None), [vec!["one", "two", "three"], vec!["one"], vec!["one"]]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set.jsonl");
    fs::write(&path, text).unwrap();
    let ids: Vec<String> = read(&path, None, None).unwrap().conversations.into_iter().map(|it| it.request.id).collect();
    assert_ne!(ids[0], ids[1]);
    assert_eq!(ids[2], format!("{}#2", ids[1]));
}

#[test]
fn a_form_makes_the_prompt_of_the_sets_own_fields() {
    let forms = templates(&["Q: {question}\nStart: {code}\nPut it within \\boxed{}.", "Q: {question}\n{ {question} }"]);
    let form = Some(Form::Templates(&forms));
    let text = concat!(
        "{\"question\": \"What is {code}?\", \"code\": \"x = 1\", \"answer\": \"1\"}\n",
        "{\"question\": \"Why?\", \"code\": \"\"}\n",
        "{\"question\": \"Why?\", \"code\": null}\n",
        "{\"question\": \"Why?\"}\n",
    );
    let without = vec!["Q: Why?\n{ Why? }"];
    let with = vec!["Q: What is {code}?\nStart: x = 1\nPut it within \\boxed{}."];
    assert_eq!(turns(text, form), [with, without.clone(), without.clone(), without]);
}

#[test]
fn rows_that_have_their_prompt_already_are_taken_as_they_are() {
    let forms = templates(&["Solve {prompt}"]);
    let ready = concat!(
        "{\"turns\": [\"a\", \"b\"], \"prompt\": \"p\"}\n",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"m\"}], \"prompt\": \"p\"}\n",
        "{\"prompt\": [{\"role\": \"user\", \"content\": \"c\"}]}\n",
        "{\"prompt\": \"p\"}\n",
    );
    assert_eq!(turns(ready, Some(Form::Templates(&forms))), [vec!["a", "b"], vec!["m"], vec!["c"], vec!["Solve p"]]);
    let forms = templates(&["Solve {problem}"]);
    assert_eq!(turns("{\"prompt\": \"p\"}\n", Some(Form::Templates(&forms))), [["p"]]);

    let listed = concat!(
        "{\"prompt\": [\"a\", \"b\"], \"category\": \"x\"}\n",
        "{\"prompt\": \"p\"}\n",
        "{\"prompt\": [{\"role\": \"user\", \"content\": \"c\"}]}\n",
        "{\"turns\": [\"t\", \"u\"], \"prompt\": [\"a\"]}\n",
    );
    assert_eq!(turns(listed, Some(Form::Turns("prompt"))), [vec!["a", "b"], vec!["p"], vec!["c"], vec!["t", "u"]]);
    // Answers that a chat has already are part of it; only its last question is open.
    let chat = "{\"messages\": [{\"role\": \"user\", \"content\": \"1\"}, {\"role\": \"assistant\", \"content\": \"2\"}, \
        {\"role\": \"user\", \"content\": \"3\"}]}\n";
    let read = read_text(chat, None, None).unwrap();
    assert_eq!((read.conversations[0].request.messages.len(), read.conversations[0].later_turns.len()), (3, 0));
}

#[test]
fn rows_that_cannot_be_used_are_kept_with_their_reason() {
    let forms = templates(&["{question} {code}", "{question}"]);
    let text = concat!(
        "{\"question\": \"q\"}\n",
        "\n",
        "{\"problem\": \"p\"}\n",
        "{\"turns\": [\"a\", \" \"]}\n",
        "{\"turns\": [\"a\", 5]}\n",
        "{\"turns\": []}\n",
        "{\"turns\": \"a\"}\n",
        "{\"question\": \" \"}\n",
        "[]\n",
    );
    let read = read_text(text, Some(Form::Templates(&forms)), None).unwrap();
    assert_eq!((read.rows_read, read.conversations.len()), (8, 1));
    let reasons = [
        (3, "neither `question`, which the set's own rows have, nor a prompt field; one of `messages`, "),
        (4, "turn 2 of `turns` is empty"),
        (5, "turn 2 of `turns` is not a text"),
        (6, "`turns` is empty"),
        (7, "`turns` is not a list of texts"),
        (8, "message 1 (`user`) is empty"),
        (9, "not a JSON object"),
    ];
    assert_eq!(read.rejected.len(), reasons.len());
    for (rejected, (line, reason)) in read.rejected.iter().zip(reasons) {
        assert!(rejected.line == line && rejected.reason.starts_with(reason), "{rejected:?}");
    }
    let error = read_text("{\"problem\": \"p\"}\n", Some(Form::Turns("prompt")), None).unwrap_err().to_string();
    assert!(error.contains("none of the 1 rows") && error.contains("line 1: neither `prompt`, which"), "{error}");
}

#[test]
fn categories_are_where_the_set_has_them() {
    let text = concat!(
        "{\"turns\": [\"a\"], \"subject\": \"Algebra\", \"category\": \"math\"}\n",
        "{\"turns\": [\"b\"], \"category\": \"math\"}\n",
        "{\"turns\": [\"c\"], \"subject\": 5}\n",
        "{\"turns\": [\"d\"], \"subject\": null}\n",
    );
    let categories = |field| -> Vec<String> {
        read_text(text, None, field).unwrap().conversations.into_iter().map(|conversation| conversation.category).collect()
    };
    assert_eq!(categories(Some("subject")), ["Algebra", "math", "5", ""]);
    assert_eq!(categories(None), ["math", "math", "", ""]);
}

#[test]
fn a_sample_is_of_the_same_prompts_however_the_file_is_ordered() {
    let mut lines: Vec<String> =
        (0..60).map(|index| format!("{{\"turns\": [\"ask {index}\"], \"category\": \"{}\"}}\n", index % 3)).collect();
    let drawn = |lines: &[String], seed| -> Vec<String> {
        let read = read_text(&lines.concat(), None, None).unwrap();
        let rows: Vec<(&str, &str)> =
            read.conversations.iter().map(|it| (it.request.id.as_str(), it.category.as_str())).collect();
        let mut asked: Vec<String> = sample(&rows, 9, seed)
            .into_iter()
            .map(|index| read.conversations[index].request.messages[0].content.clone())
            .collect();
        asked.sort();
        asked
    };
    let before = drawn(&lines, 3);
    assert_ne!(before, drawn(&lines, 4));
    lines.reverse();
    assert_eq!(before, drawn(&lines, 3));
}
