//! `drafthorse inspect` on the responses of a run.

use std::fs;

use serde_json::json;

use super::{drafthorse, stderr, tiny};

#[test]
fn inspect_tells_what_is_there_and_marks_what_is_supervised() {
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path());
    let rows = [
        json!({ "id": "chat", "prompt": "Tell me of \u{1b}[31mred.", "source": "questions" }),
        json!({ "id": "given", "input_ids": [504, 2365, 314, 253, 2], "loss_mask": [0, 0, 1, 1, 1] }),
        json!({ "id": "turns", "turns": ["One?", "Two?"] }),
    ];
    fs::write(folder.path().join("prompts.jsonl"), rows.map(|row| format!("{row}\n")).concat()).unwrap();
    let output = drafthorse(folder.path(), &["regenerate", "recipe.toml"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let inspect = |arguments: &[&str]| {
        let output = drafthorse(folder.path(), &[&["inspect"], arguments].concat()).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout.clone()).unwrap(), stderr(&output))
    };

    let (code, said, _) = inspect(&["runs/tiny", "--rows", "9"]);
    assert_eq!(code, Some(0), "{said}");
    for words in
        ["runs/tiny: ", "tokens: ", "ended by: ", "sources: ", "questions 1", "lengths of responses", "── chat from questions"]
    {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert!(!said.contains('\u{1b}'), "an escape sequence of a prompt reaches the terminal: {said:?}");
    assert_eq!(said.matches('\u{27e6}').count(), said.matches("── ").count(), "one supervised span a row: {said}");

    // A part by itself, cut so short that too little is left of it, and one row of it.
    let part = "runs/tiny/responses/part-00000.parquet";
    let (code, whole, _) = inspect(&[part, "--rows", "9"]);
    assert_eq!((code, whole.matches("── ").count()), (Some(0), said.matches("── ").count()), "{whole}");
    let (code, cut, _) = inspect(&[part, "--id", "given", "--max-tokens", "3"]);
    assert_eq!((code, cut.matches("── ").count()), (Some(0), 1), "{cut}");
    assert!(cut.contains("dropped") && !cut.contains("dropped: 0"), "{cut}");

    let (code, _, error) = inspect(&["runs/nobody"]);
    assert!(code == Some(2) && error.contains("runs/nobody"), "{error}");
    let (code, _, error) = inspect(&["runs/tiny", "--id", "nobody"]);
    assert!(code != Some(0) && error.contains("nobody"), "{error}");
}
