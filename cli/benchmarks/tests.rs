#![allow(clippy::unwrap_used)]
use super::*;
use configs::benchmarks::{Preset, preset, presets};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The sets in the form of the DFlash family, where they lie beside the repository.
fn shared() -> Option<PathBuf> {
    let folder = root().join("../shared/benchmarks");
    if !folder.is_dir() {
        eprintln!("skipped: no ../shared/benchmarks here");
        return None;
    }
    Some(folder)
}

fn local(preset: &'static Preset, path: PathBuf) -> configs::Benchmark {
    configs::Benchmark { name: preset.name.clone(), path, preset: Some(preset) }
}

/// Reads rows through a preset.
fn read_rows(preset: &'static Preset, rows: &[serde_json::Value]) -> Chosen {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(preset.file_name());
    fs::write(&path, rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
    choose(&local(preset, path), None, 1).unwrap()
}

fn first_turns(chosen: &Chosen) -> Vec<&str> {
    chosen.conversations.iter().map(|it| it.request.messages[0].content.as_str()).collect()
}

#[test]
fn all_seven_sets_are_read_whole() {
    let Some(folder) = shared() else { return };
    assert_eq!(presets().len(), 7);
    for preset in presets() {
        let benchmark = local(preset, folder.join(preset.file_name()));
        let chosen = choose(&benchmark, None, 1).unwrap();
        assert_eq!((chosen.conversations.len(), chosen.rejected.len()), (preset.prompts, 0), "{}", preset.name);
        let later = usize::from(preset.name == "mt-bench");
        assert!(chosen.conversations.iter().all(|it| it.later_turns.len() == later && it.request.messages.len() == 1));
        let some = choose(&benchmark, Some(10), 1).unwrap();
        assert_eq!((some.conversations.len(), some.prompts), (10, preset.prompts));
        let ids = |chosen: &Chosen| chosen.conversations.iter().map(|it| it.request.id.clone()).collect::<Vec<_>>();
        assert_ne!(ids(&some), ids(&choose(&benchmark, Some(10), 2).unwrap()), "{}", preset.name);
        assert!(ids(&some).iter().all(|id| ids(&chosen).contains(id)));
    }
}

/// What a template's fields were filled with to give `text`; of two ways, the one with the longest first fields.
fn unfilled(template: &str, text: &str) -> Option<Vec<(String, String)>> {
    // The braces of `\boxed{}` have no field in them.
    let hidden = template.replace("{}", "\0");
    let shown = |piece: &str| piece.replace('\0', "{}");
    let (before, pieces) = hidden.split_once('{')?;
    let mut left = text.strip_prefix(shown(before).as_str())?;
    let pieces: Vec<(&str, &str)> = pieces.split('{').filter_map(|piece| piece.split_once('}')).collect();
    let mut fields = Vec::new();
    for (index, (name, after)) in pieces.iter().enumerate() {
        let after = shown(after);
        let is_last = index + 1 == pieces.len();
        let (value, rest) = if is_last { (left.strip_suffix(&*after)?, "") } else { left.rsplit_once(&*after)? };
        fields.push((name.to_string(), value.to_string()));
        left = rest;
    }
    Some(fields)
}

#[test]
fn the_forms_applied_to_the_sets_own_fields_give_the_prompts_of_the_dflash_family() {
    let Some(folder) = shared() else { return };
    for preset in presets() {
        let ready = choose(&local(preset, folder.join(preset.file_name())), None, 1).unwrap();
        let mut by_template = Vec::new();
        let own_fields = |it: &Conversation| {
            let first = &it.request.messages[0].content;
            let row: serde_json::Map<String, serde_json::Value> = match &preset.form {
                Form::Turns(field) => {
                    let turns: Vec<&String> = std::iter::once(first).chain(&it.later_turns).collect();
                    [(field.clone(), serde_json::json!(turns))].into_iter().collect()
                }
                Form::Templates(templates) => {
                    let unfilled = templates.iter().enumerate().find_map(|(index, it)| Some((index, unfilled(it, first)?)));
                    let (index, fields) = unfilled.unwrap_or_else(|| panic!("{} has another form: {first}", preset.name));
                    by_template.push(index);
                    fields.into_iter().map(|(name, value)| (name, value.into())).collect()
                }
            };
            serde_json::Value::Object(row)
        };
        let rows: Vec<serde_json::Value> = ready.conversations.iter().map(own_fields).collect();
        let formed = read_rows(preset, &rows);
        assert_eq!(formed.rejected, []);
        let asked = |chosen: &Chosen| -> Vec<(String, Vec<String>)> {
            let turns = |it: &Conversation| (it.request.messages[0].content.clone(), it.later_turns.clone());
            chosen.conversations.iter().map(turns).collect()
        };
        assert!(asked(&formed) == asked(&ready), "{}", preset.name);
        if preset.name == "livecodebench" {
            // With code to start from, and without.
            assert_eq!([0, 1].map(|index| by_template.iter().filter(|&&it| it == index).count()), [444, 611]);
        }
    }
}

#[test]
fn hub_rows_become_prompts_with_categories() {
    let row = |text: &str| -> serde_json::Value { serde_json::from_str(text).unwrap() };
    let chosen = read_rows(
        preset("livecodebench").unwrap(),
        &[
            row(r#"{"question_id": "1", "question_content": "Add {a}.", "starter_code": "class A:", "difficulty": "easy"}"#),
            row(r#"{"question_id": "2", "question_content": "Read.", "starter_code": "", "difficulty": "hard"}"#),
        ],
    );
    let [with, without] = first_turns(&chosen)[..] else { panic!() };
    assert!(
        with.contains(
            "### Question:\nAdd {a}.\n\n### Format: Use the following code structure:\n```python\nclass A:\n```\n\n###"
        ),
        "{with}"
    );
    assert!(
        without.ends_with("format:\n```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the provided format with backticks)")
    );
    let categories: Vec<&str> = chosen.conversations.iter().map(|it| it.category.as_str()).collect();
    assert_eq!(categories, ["easy", "hard"]);
    let chosen =
        read_rows(preset("mt-bench").unwrap(), &[row(r#"{"prompt": ["one", "two"], "category": "writing", "reference": []}"#)]);
    let conversation = &chosen.conversations[0];
    assert_eq!((first_turns(&chosen)[0], conversation.later_turns.as_slice()), ("one", ["two".to_string()].as_slice()));
    assert_eq!(conversation.category, "writing");
}

#[test]
fn benchmarks_are_described_with_what_was_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gsm8k.jsonl");
    fs::write(&path, "{\"question\": \"1\"}\n{\"question\": \"2\"}\n{}\n{\"turns\": [\"3\", \"4\"], \"category\": \"x\"}\n")
        .unwrap();
    let benchmark = local(preset("gsm8k").unwrap(), path.clone());
    let words = choose(&benchmark, None, 1).unwrap().describe(&benchmark);
    assert!(
        words.starts_with(
            "3 prompts from 2 categories, 4 turns in all; rows left out: 1, the first at line 3: neither `question`"
        )
    );
    assert!(words.ends_with("; GSM8K has 1319, so figures are not those of the whole set"), "{words}");
    let own = configs::Benchmark { preset: None, ..benchmark };
    let words = choose(&own, Some(2), 1).unwrap().describe(&own);
    assert!(words.starts_with("2 of 3 prompts, drawn by the seed from 2 categories, 3 turns in all"), "{words}");
    let absent = configs::Benchmark { path: folder.path().join("absent"), ..own };
    let error = format!("{:#}", choose(&absent, None, 1).err().unwrap());
    assert!(error.contains("benchmark `gsm8k`") && error.contains("absent"), "{error}");
}

#[test]
fn the_second_prompt_of_the_sample_model_goes_on_from_the_first_answer() {
    let model = root().join(".models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !model.exists() {
        eprintln!("skipped: no sample model here; `make setup` fetches it");
        return;
    }
    let text = Rc::new(Text::load(model.to_str().unwrap()).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("two.jsonl");
    fs::write(&path, "{\"turns\": [\"Name a tree.\"]}\n{\"turns\": [\"Name a fruit.\", \"And its colour?\", \"Why?\"]}\n")
        .unwrap();
    let benchmark = configs::Benchmark { name: "two".into(), path, preset: None };
    let Benchmark { prompts, next_turn, .. } = conversations("two", choose(&benchmark, None, 1).unwrap(), &text, false).unwrap();
    let next_turn = next_turn.unwrap();
    assert_eq!(prompts.len(), 2);
    let end = text.tokenizer.token_id("<|im_end|>").unwrap();
    let answer = |words: &str| [text.tokenizer.encode(words, false).unwrap(), vec![end]].concat();
    let (apple, red) = (answer("An apple."), answer("Red, mostly."));
    // It is over where there is no further turn.
    assert_eq!(next_turn(0, &[&apple]).unwrap(), None);
    assert_eq!(next_turn(1, &[&apple, &red, &red]).unwrap(), None);

    let second = next_turn(1, &[&apple]).unwrap().unwrap();
    // The template puts the same before and after an answer as the model did: what was decoded is a prefix of what comes next.
    let decoded = [prompts[1].as_slice(), &apple].concat();
    assert!(second.starts_with(&decoded), "{:?}", text.tokenizer.decode(&second, false));
    let third = next_turn(1, &[&apple, &red]).unwrap().unwrap();
    assert!(third.starts_with(&[second.as_slice(), &red].concat()), "{:?}", text.tokenizer.decode(&third, false));
    let words = text.tokenizer.decode(&third, false).unwrap();
    let tail = "<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\nAn apple.<|im_end|>\n<|im_start|>user\nAnd its \
        colour?<|im_end|>\n<|im_start|>assistant\nRed, mostly.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n";
    assert!(words.ends_with(tail), "{words}");
    // A conversation of one turn needs no more than its prompt.
    let path = folder.path().join("one.jsonl");
    fs::write(&path, "{\"turns\": [\"Name a tree.\"]}\n").unwrap();
    let benchmark = configs::Benchmark { name: "one".into(), path, preset: None };
    let one = conversations("one", choose(&benchmark, None, 1).unwrap(), &text, false).unwrap();
    assert!(one.next_turn.is_none() && one.prompts[0] == prompts[0]);
}
