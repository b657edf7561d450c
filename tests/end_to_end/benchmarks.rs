//! Benchmarks by name: what is said about them, and that an answer is part of the next question.

use std::fs;
use std::path::Path;

use data::gguf::GgufFile;
use data::tokenizer::Tokenizer;

use super::{drafthorse, root, stderr, tiny};

/// A tiny model with a recipe for `mt-bench`, of which three invented conversations lie in `copies/`.
fn write(folder: &Path) {
    tiny::write(folder);
    fs::create_dir(folder.join("copies")).unwrap();
    let row = |number: usize, category: &str| {
        format!("{{\"prompt\": [\"Sing of {number}.\", \"Louder than {number}!\"], \"category\": \"{category}\"}}\n")
    };
    fs::write(folder.join("copies/mt-bench.jsonl"), row(1, "high") + &row(2, "high") + &row(3, "low")).unwrap();
    let short = "extends = \"recipe.toml\"\n[data]\nlimit = 8\n[regenerate]\nmax_new_tokens = 8\n[train]\nsteps = 1\n[prune]\nremove = 0\n\
        [evaluate]\nbenchmarks = [\"mt-bench\"]\nbenchmark_folder = \"copies\"\nmax_new_tokens = 6\n";
    fs::write(folder.join("named.toml"), short).unwrap();
}

#[test]
fn check_says_which_benchmarks_and_where_from() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let benchmarks = "evaluate.benchmarks=[\"mt-bench\", \"benchmark.jsonl\"]";
    let output =
        drafthorse(folder.path(), &["check", "named.toml", "--set", benchmarks, "--set", "evaluate.limit=2"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let said = String::from_utf8(output.stdout).unwrap();
    let named = "# benchmark mt-bench: 2 of 3 prompts, drawn by the seed from 2 categories, 4 turns in all; MT-Bench has 80, so figures are \
        not those of the whole set; from ";
    assert!(said.contains(named), "{said}");
    let from = "copies/mt-bench.jsonl: MT-Bench of `HuggingFaceH4/mt_bench_prompts`, licence Apache-2.0\n";
    assert!(said.contains(from), "{said}");
    let own = said.lines().last().unwrap();
    assert!(own.starts_with("# benchmark benchmark: 2 of 3 prompts, drawn by the seed; from /"), "{own}");

    let output =
        drafthorse(folder.path(), &["check", "named.toml", "--set", "evaluate.benchmarks=[\"gsm8k\"]"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let expected =
        "put the rows of `main/test-00000-of-00001.parquet` of the hub dataset `openai/gsm8k` (licence MIT) as JSON Lines";
    assert!(stderr(&output).contains(expected) && stderr(&output).contains("copies/gsm8k.jsonl"), "{}", stderr(&output));
}

#[test]
fn the_second_turn_goes_on_from_the_answer_to_the_first() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let output = drafthorse(folder.path(), &["run", "named.toml"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("mt-bench: 3 prompts from 2 categories, 6 turns in all"), "{}", stderr(&output));

    let scores = folder.path().join("runs/tiny/scores");
    let baseline: serde_json::Value = serde_json::from_slice(&fs::read(scores.join("autoregressive.baseline")).unwrap()).unwrap();
    let turns = baseline["mt-bench"]["turns"].as_array().unwrap();
    assert_eq!(turns.len(), 2);
    let tokenizer =
        Tokenizer::from_gguf(&GgufFile::open(&root().join(".models/SmolLM2-135M-Instruct.Q4_1.gguf")).unwrap()).unwrap();
    let ids =
        |turn: usize, what: &str, index: usize| -> Vec<u32> { serde_json::from_value(turns[turn][what][index].clone()).unwrap() };
    for index in 0..3 {
        let (first, answer, second) = (ids(0, "prompts", index), ids(0, "answers", index), ids(1, "prompts", index));
        assert!(second.starts_with(&first), "{second:?}");
        let answer = tokenizer.decode(&answer, true).unwrap();
        let asked = tokenizer.decode(&second, false).unwrap();
        let tail = format!("{answer}<|im_end|>\n<|im_start|>user\nLouder than {}!<|im_end|>\n<|im_start|>assistant\n", index + 1);
        assert!(!answer.is_empty() && asked.ends_with(&tail), "{asked}");
    }
    let score: serde_json::Value = serde_json::from_slice(&fs::read(scores.join("step-000001.json")).unwrap()).unwrap();
    for decoder in ["lockstep", "asynchronous"] {
        let figures = &score["decoders"][decoder]["benchmarks"]["mt-bench"];
        assert_eq!((&figures["prompts"], &figures["identical_to_autoregressive"]), (&3.into(), &true.into()), "{figures}");
    }
    // The run's own recipe names the same benchmark, with the folder where it is.
    let again = drafthorse(folder.path(), &["evaluate", "runs/tiny"]).output().unwrap();
    assert!(again.status.success() && stderr(&again).contains("evaluate is done"), "{}", stderr(&again));
}
