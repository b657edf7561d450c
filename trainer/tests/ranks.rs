//! What happens on one rank is decided by all. The test starts itself once for each rank.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use configs::Labels;
use data::supervision::Example;
use model::checkpoint::{DrafterFile, TextFiles};
use model::{ModelConfig, Transformer};
use tch::{Device, Kind};
use torch::group::{Group, Place};
use trainer::backward::{LossSettings, Objective};
use trainer::batch::BlockShape;
use trainer::objective::PositionWeights;
use trainer::optimiser::{AdamWSettings, Curve, Schedule};
use trainer::packing::{BatchSize, Packing};
use trainer::saving::Output;
use trainer::training::{Ending, Plan, Training, train};
use trainer::watching::{StepReport, Watch};

const RANKS: usize = 3;
const STEPS: u64 = 12;
/// In two responses of twelve only, and its embedding is not a number.
const BAD: u32 = 33;

fn examples() -> Vec<Example> {
    let ids =
        |row: u32| (0..14).map(|position| if row < 2 && position == 5 { BAD } else { (position * 7 + row * 5) % 30 }).collect();
    (0..12).map(|row| Example::after_prompt(ids(row), 3)).collect()
}

/// Trains as one rank, and says on stdout which steps were left out and whether every weight is a number.
fn rank() {
    let folder = std::path::PathBuf::from(std::env::var("RANKS_FOLDER").unwrap());
    let place = Place::from_environment(|name| std::env::var(name).ok()).unwrap().unwrap();
    let group = Group::join(&place, Device::Cpu, Duration::from_secs(60)).unwrap();
    torch::set_num_threads(1);
    let config = serde_json::json!({"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "tie_word_embeddings": false});
    let start = Transformer::random(ModelConfig::from_json(&config).unwrap(), 3, Kind::Float);
    let _ = start.embed_tokens.select(0, i64::from(BAD)).fill_(f64::NAN);
    let shape = BlockShape { block_size: 4, mask_token: 39, labels: Labels::Next, anchor_sees_block: true };
    let plan = Plan {
        stage: "train".to_string(),
        steps: STEPS,
        packing: Packing { seed: 5, size: BatchSize::Responses(RANKS), anchors: 3, shape, gamma: 3.0, forward_rows: 1000 },
        loss: LossSettings { ar_weight: 1.0, weights: PositionWeights::Exponential, chunk_rows: 16, recompute: true },
        optimiser: AdamWSettings { beta1: 0.9, beta2: 0.95, weight_decay: 0.0 },
        learning_rate: 1e-2,
        mask_learning_rate: 1e-2,
        schedule: Schedule { warmup: 0.0, curve: Curve::Cosine, minimum: 0.1 },
        clip: 1.0,
        save_every: STEPS,
        evaluate_every: STEPS,
        keep_last: 1,
        kind: Kind::Float,
    };
    let ids: Vec<String> = (0..12).map(|row| format!("row-{row}")).collect();
    let files = TextFiles { tokenizer: "{}".to_string(), tokenizer_config: "{}".to_string(), generation_config: None };
    let training = Training {
        start,
        device: Device::Cpu,
        examples: &examples(),
        ids: &ids,
        held_out: &[],
        objective: Objective::Tokens,
        output: Output { folder: &folder, drafter: DrafterFile { layers: 2, ..DrafterFile::default() }, files: &files },
        group: &group,
    };
    let mut skipped = Vec::new();
    let mut report = |step: &StepReport| skipped.extend(step.skipped.as_ref().map(|_| step.step));
    let mut watch = Watch { sink: None, report: &mut report, score_every: None, score: None };
    assert_eq!(train(training, &plan, &mut watch, &AtomicBool::new(false)).unwrap(), Ending::Done);
    eprintln!("skipped {skipped:?}");
}

#[test]
fn a_loss_that_is_not_finite_on_one_rank_is_left_out_by_all() {
    if std::env::var_os("RANKS_FOLDER").is_some() {
        return rank();
    }
    let folder = tempfile::tempdir().unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let children: Vec<_> = (0..RANKS)
        .map(|rank| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "a_loss_that_is_not_finite_on_one_rank_is_left_out_by_all", "--nocapture"]);
            let place = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", RANKS), ("MASTER_PORT", usize::from(port))];
            command.envs(place.map(|(name, value)| (name, value.to_string()))).env("MASTER_ADDR", "127.0.0.1");
            command.env("RANKS_FOLDER", folder.path()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let said: Vec<String> = children
        .into_iter()
        .map(|child| {
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            assert!(output.status.success(), "{said}");
            said.lines().find(|line| line.starts_with("skipped")).unwrap().to_string()
        })
        .collect();
    // Three of twelve responses a step: each bad one is in one step of each of the three epochs, alone or with the other.
    let steps: Vec<u64> = serde_json::from_str(said[0].strip_prefix("skipped ").unwrap()).unwrap();
    assert!((3..=6).contains(&steps.len()), "{steps:?}");
    assert!(said.iter().all(|line| *line == said[0]), "{said:?}");
    let text = std::fs::read_to_string(folder.path().join("skipped.jsonl")).unwrap();
    assert_eq!(text.lines().count(), steps.len());
    for (line, step) in text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()).zip(&steps) {
        let responses: Vec<&str> = line["responses"].as_array().unwrap().iter().map(|id| id.as_str().unwrap()).collect();
        assert!(line["step"] == *step && responses.len() == RANKS, "{line}");
        assert!(responses.iter().any(|id| ["row-0", "row-1"].contains(id)), "{line}");
    }
    // What the bad responses would have spoilt is whole: only the one embedding row is not a number.
    let weights = model::tensor_file::load_safetensors(&folder.path().join("latest/model.safetensors")).unwrap();
    let bad: usize = weights.values().map(|tensor| torch::to_f32s(tensor).iter().filter(|value| value.is_nan()).count()).sum();
    assert_eq!(bad, 32);
}
