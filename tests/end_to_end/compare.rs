//! `drafthorse compare` on score files written here: every format, labels, and what it refuses.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use data::manifest::Manifest;
use evaluator::score::{BenchmarkScore, DecoderScore, PromptFigures, Score};
use serde_json::{Map, Value, json};

use super::{drafthorse, stderr};

const PROMPTS: usize = 20;

/// A score on 20 prompts of 60 tokens, each taking `rounds` rounds or a few more.
fn write_score(folder: &Path, checkpoint: &str, layers: usize, rounds: usize) {
    let figures = |rounds: usize, seconds: f64, speedup: Option<f64>| {
        let figures = |prompt: usize| {
            let rounds = if speedup.is_some() { rounds + prompt % 7 } else { rounds };
            PromptFigures { rounds, committed: 60, seconds: rounds as f64 * seconds }
        };
        let by_prompt: Vec<PromptFigures> = (0..PROMPTS).map(figures).collect();
        let rounds: usize = by_prompt.iter().map(|it| it.rounds).sum();
        let tau = (60 * PROMPTS) as f64 / rounds as f64;
        let benchmark = BenchmarkScore {
            prompts: PROMPTS,
            rounds,
            tau_pooled: tau,
            tau_interval: speedup.map(|_| (tau - 0.2, tau + 0.2)),
            tokens_per_second: tau / seconds,
            speedup,
            speedup_interval: speedup.map(|it| (it - 0.1, it + 0.1)),
            identical_to_autoregressive: speedup.map(|_| true),
            prompts_hash: "0123456789abcdef".to_string(),
            by_prompt,
            ..BenchmarkScore::default()
        };
        DecoderScore { benchmarks: BTreeMap::from([("gsm8k".to_string(), benchmark)]) }
    };
    let score = Score {
        checkpoint: checkpoint.to_string(),
        kind: "d3d".to_string(),
        target: "small".to_string(),
        thinking: Some(false),
        dtype: "f32".to_string(),
        drafter_dtype: "bf16".to_string(),
        block_size: 8,
        layers,
        parameters: None,
        fan_out: "best_first, 24 blocks".to_string(),
        budget: None,
        calibration: None,
        hit_rate_by_blocks: BTreeMap::new(),
        concurrency: 1,
        drafts: "point".to_string(),
        temperature: 0.0,
        sampling: String::new(),
        decoders: BTreeMap::from([
            ("autoregressive".to_string(), figures(60, 0.02, None)),
            ("lockstep".to_string(), figures(rounds, 0.04, Some(1.2))),
            ("asynchronous".to_string(), figures(rounds, 0.03, Some(1.6))),
        ]),
    };
    fs::create_dir_all(folder).unwrap();
    score.write(&folder.join(format!("{checkpoint}.json"))).unwrap();
}

/// A run's folder of scores, its manifest listing the untrained, the trained and two pruned checkpoints.
fn write_run(folder: &Path) {
    let scores = folder.join("scores");
    let all = [("step-000000", 30, 40), ("step-000048", 30, 24), ("layers-28", 28, 30), ("layers-29", 29, 24)];
    for (checkpoint, layers, rounds) in all {
        write_score(&scores, checkpoint, layers, rounds);
    }
    let mut results = Map::new();
    results.insert("scores".to_string(), json!(all.map(|(checkpoint, ..)| checkpoint)));
    let manifest = Manifest { stage: "evaluate".to_string(), complete: true, inputs: BTreeMap::new(), results };
    manifest.write(&scores).unwrap();
}

fn compares(folder: &Path, arguments: &[&str]) -> String {
    let output = drafthorse(folder, &[&["compare"], arguments].concat()).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    assert_eq!(stderr(&output), "", "{arguments:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn labels(json: &str) -> Vec<String> {
    let json: Value = serde_json::from_str(json).unwrap();
    let rows = json["rows"].as_array().unwrap().iter().filter(|row| row["decoder"] == "asynchronous");
    rows.map(|row| row["label"].as_str().unwrap().to_string()).collect()
}

#[test]
fn a_run_is_compared_in_every_format() {
    let folder = tempfile::tempdir().unwrap();
    write_run(&folder.path().join("runs/first"));
    let table = compares(folder.path(), &["runs/first", "--reference", "d3d"]);
    let places: Vec<Option<usize>> =
        ["step-000000", "step-000048", "layers-29", "layers-28"].iter().map(|label| table.find(&format!("\n{label}"))).collect();
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "not in the order of depth: {table}");
    assert!(table.contains("against step-000000, prompt by prompt"));
    assert!(table.lines().any(|line| line.starts_with("layers-29") && line.ends_with("better")), "{table}");
    assert!(table.contains("published: other hardware") && table.contains("another model: small"));
    assert!(table.contains("fastest with the same output on gsm8k: "));
    assert_eq!(compares(folder.path(), &["first", "--reference", "d3d"]), table, "a run may be given by its name");

    let json = compares(folder.path(), &["runs/first", "--format", "json", "--against", "step-000048"]);
    assert_eq!(labels(&json), ["step-000000", "step-000048", "layers-29", "layers-28"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["schema"], &json["against"], &json["published"]), (&json!(1), &json!("step-000048"), &Value::Null));
    let of = |label: &str| {
        let mut rows = json["rows"].as_array().unwrap().iter();
        rows.find(|row| row["label"] == label && row["decoder"] == "asynchronous").unwrap()["difference"].clone()
    };
    assert_eq!(of("step-000048"), Value::Null);
    assert_eq!(of("layers-29")["tau"], json!({"value": 0.0, "interval": [0.0, 0.0], "verdict": "no_difference_shown"}));
    assert_eq!((&of("layers-28")["tau"]["verdict"], &of("layers-28")["prompts"]), (&json!("worse"), &json!(PROMPTS)));

    let csv = compares(folder.path(), &["runs/first", "--format", "csv", "--benchmark", "gsm8k"]);
    assert!(csv.starts_with("label,run,checkpoint,kind,target,") && csv.ends_with("\r\n"));
    assert_eq!(csv.matches("\r\n").count(), 1 + 4 * 3);
    assert!(csv.contains("\"best_first, 24 blocks\""));

    let html = compares(folder.path(), &["runs/first", "--format", "html"]);
    assert!(html.starts_with("<!DOCTYPE html>") && html.ends_with("</html>\n") && !html.contains("<script"));
    assert!(html.contains("over the layers of the drafter") && html.contains("prefers-color-scheme: dark"));
}

/// That what the run `tiny` below `folder` wrote can be compared.
pub(super) fn assert_comparable(folder: &Path) {
    let json: Value = serde_json::from_str(&compares(folder, &["tiny", "--format", "json"])).unwrap();
    assert_eq!(json["against"], "step-000000");
    let drafting = || json["rows"].as_array().unwrap().iter().filter(|row| row["decoder"] != "autoregressive");
    assert!(
        drafting().count() >= 4 && drafting().all(|row| row["parameters"].as_u64() > Some(0) && row["tau_interval"].is_array())
    );
    for row in drafting().filter(|row| row["label"] != "step-000000") {
        let difference = &row["difference"];
        assert_eq!((&difference["prompts"], &difference["notes"]), (&row["prompts"], &json!([])), "{row}");
        assert!(difference["tau"]["verdict"].is_string() && difference["speed_ratio"]["verdict"].is_string(), "{row}");
    }
}

#[test]
fn labels_tell_runs_and_files_apart() {
    let folder = tempfile::tempdir().unwrap();
    for run in ["first", "second"] {
        write_score(&folder.path().join(run).join("scores"), "layers-29", 29, 24);
    }
    write_score(&folder.path().join("kept"), "layers-29", 29, 25);
    let of = |arguments: &[&str]| labels(&compares(folder.path(), &[arguments, &["--format", "json"]].concat()));
    assert_eq!(of(&["first"]), ["layers-29"], "without a manifest, the scores that are there");
    assert_eq!(of(&["first", "second"]), ["first/layers-29", "second/layers-29"]);
    assert_eq!(of(&["first", "first/scores/layers-29.json"]), ["layers-29"], "each score once");
    assert_eq!(of(&["kept/layers-29.json", "first"]), ["kept/layers-29", "first/scores/layers-29"]);
    fs::copy(folder.path().join("kept/layers-29.json"), folder.path().join("kept/layers-29.old")).unwrap();
    let one_stem = ["kept/layers-29.json", "kept/layers-29.old"];
    assert_eq!(of(&one_stem), one_stem, "files that differ in nothing but their ending");
    let json = compares(folder.path(), &["first", "second", "--format", "json", "--against", "second/layers-29"]);
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["against"], "second/layers-29");
}

#[test]
fn what_cannot_be_compared_exits_2_and_says_what_was_looked_for() {
    let folder = tempfile::tempdir().unwrap();
    write_run(&folder.path().join("runs/first"));
    fs::create_dir_all(folder.path().join("runs/young")).unwrap();
    fs::write(folder.path().join("runs/young/recipe.toml"), "").unwrap();
    fs::write(folder.path().join("other.json"), "{\"loss\": 1}").unwrap();
    write_run(&folder.path().join("runs/holed"));
    fs::remove_file(folder.path().join("runs/holed/scores/layers-29.json")).unwrap();
    write_run(&folder.path().join("runs/\x1b[31mred"));
    fs::write(folder.path().join("runs/\x1b[31mred/scores/layers-29.json"), "{").unwrap();
    let cases: [(&[&str], &[&str]); 9] = [
        (&["holed"], &["runs/holed/scores/layers-29.json", "drafthorse run runs/holed --restart evaluate"]),
        (&["\x1b[31mred"], &["31mred/scores/layers-29.json", "--restart evaluate"]),
        (&["absent"], &["`absent` is neither a run nor a score", "runs/absent", "`scores`"]),
        (&["young"], &["run `runs/young` has no scores yet", "drafthorse evaluate runs/young"]),
        (&["other.json"], &["other.json", "is not a score"]),
        (&["first", "--against", "best"], &["no score is called `best`", "step-000048"]),
        (&["first", "--benchmark", "math"], &["no score has the benchmark `math`; there are: gsm8k"]),
        (&["first", "--format", "xml"], &["xml", "table, json, csv, html"]),
        (&[], &["RUN|SCORE"]),
    ];
    for (arguments, expected) in cases {
        let output = drafthorse(folder.path(), &[&["compare"], arguments].concat()).output().unwrap();
        let message = stderr(&output);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{arguments:?}: {message}");
        assert!(expected.iter().all(|part| message.contains(part)), "{arguments:?}: {message}");
        assert!(!message.contains('\x1b'), "{message:?}");
    }
}

#[test]
fn help_says_what_a_verdict_is() {
    let output = drafthorse(Path::new("."), &["compare", "--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    for part in ["drafthorse compare runs/quickstart", "95 %", "--against", "--reference", "Exit codes"] {
        assert!(help.contains(part), "{part}: {help}");
    }
}
