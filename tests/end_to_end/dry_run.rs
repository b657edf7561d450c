//! `recipes/dry-run-qwen3.toml`: Qwen3's real vocabulary, special tokens and template through all stages, by two processes.

use std::fs;
use std::time::Instant;

use data::responses::read_part;
use serde_json::Value;

use super::{drafthorse, root, stderr};

/// `<|im_end|>`, which ends a turn, and the first id beyond Qwen3's tokenizer.
const IM_END: u32 = 151_645;
const MASK_TOKEN: u32 = 151_669;

#[test]
fn qwen3s_vocabulary_goes_through_all_stages_on_two_processes() {
    if !root().join(".models/qwen3-dry-run").is_dir() {
        eprintln!("skipped: needs .models/qwen3-dry-run, which `python3 setup/dry_run_model.py` makes");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let recipe = root().join("recipes/dry-run-qwen3.toml");
    let begun = Instant::now();
    let output = drafthorse(folder.path(), &["launch", "--nproc", "2", "--", "run", recipe.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    println!("took {:.0} s", begun.elapsed().as_secs_f64());

    let run = folder.path().join("runs/dry-run-qwen3");
    let (mut rows, mut parts) = (0, 0);
    for entry in fs::read_dir(run.join("responses")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "parquet") {
            continue;
        }
        let (provenance, responses) = read_part(&path).unwrap();
        assert!(provenance.target.contains("qwen3-dry-run"), "{provenance:?}");
        parts += 1;
        rows += responses.len();
        for response in &responses {
            // Without thinking, the template closes an empty thought before the answer.
            assert!(response.prompt_text.ends_with("<|im_start|>assistant\n<think>\n\n</think>\n\n"), "{}", response.prompt_text);
            assert!(response.prompt_ids.contains(&IM_END) && !response.thinking);
        }
    }
    assert_eq!(rows, 24);
    assert!(parts > 1, "each rank answers its share");

    let json = |path: &str| serde_json::from_str::<Value>(&fs::read_to_string(run.join(path)).unwrap()).unwrap();
    let pruned = json("prune/layers-01/drafter.json");
    assert_eq!((&pruned["mask_token"], &pruned["thinking"]), (&Value::from(MASK_TOKEN), &Value::from(false)));
    assert_eq!(pruned["removed_layers"].as_array().unwrap().len(), 1);
    for checkpoint in ["step-000000", "step-000006", "layers-01"] {
        let score = fs::read_to_string(run.join(format!("scores/{checkpoint}.json"))).unwrap();
        assert!(score.contains("asynchronous") && score.contains("lockstep"), "{checkpoint}");
    }
    assert!(run.join("report.html").is_file());
}
