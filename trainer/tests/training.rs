//! The chunked, layer-wise gradient against autograd's on the plain formulation, and resumed training against uninterrupted.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use configs::Labels;
use data::supervision::Example;
use model::checkpoint::{DrafterFile, TextFiles};
use model::{ModelConfig, PackedAttention, Transformer};
use tch::{Device, Kind, Tensor};
use trainer::backward::{LossSettings, Objective, forward_backward};
use trainer::batch::{Batch, BlockShape};
use trainer::metrics::Sinks;
use trainer::objective::{Distillation, gold_corrected};
use trainer::optimiser::AdamWSettings;
use trainer::parameters::Parameters;
use trainer::training::{Ending, Output, Plan, saved_steps, train};

fn config(model_type: &str, tied: bool) -> ModelConfig {
    ModelConfig::from_json(&serde_json::json!({
        "model_type": model_type, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "tie_word_embeddings": tied,
    }))
    .unwrap()
}

fn shape(labels: Labels) -> BlockShape {
    BlockShape { block_size: 4, mask_token: 39, labels, anchor_sees_block: labels == Labels::InPlace }
}

fn examples() -> Vec<Example> {
    (0..5_u32)
        .map(|row| Example { ids: (0..12 + row).map(|position| (position * 7 + row * 5) % 38).collect(), prompt_length: 3 })
        .collect()
}

fn batch(labels: Labels) -> Batch {
    let examples = examples();
    Batch::pack(&[(&examples[0], vec![3, 5, 6, 10]), (&examples[1], vec![4, 11])], shape(labels), 3.0)
}

/// Total loss of the plain formulation: all logits at once, autograd through everything.
fn plain_loss(
    model: &Transformer,
    batch: &Batch,
    labels: Labels,
    teacher: Option<(&Transformer, Distillation)>,
    ar_weight: f64,
) -> Tensor {
    let ids_t = torch::ids_tensor(&batch.ids, Device::Cpu);
    let positions_t = torch::index_tensor(&batch.positions, Device::Cpu);
    let hidden = |model: &Transformer| {
        model.forward(&ids_t, &positions_t, &mut PackedAttention::new(&batch.sequences, shape(labels).pattern(), Device::Cpu))
    };
    let logits = model.logits(&hidden(model));
    let rows = |rows: &[trainer::batch::LabelledRow]| {
        (
            torch::index_tensor(&rows.iter().map(|row| row.row).collect::<Vec<_>>(), Device::Cpu),
            torch::ids_tensor(&rows.iter().map(|row| row.label).collect::<Vec<_>>(), Device::Cpu),
            Tensor::from_slice(&rows.iter().map(|row| row.weight as f32).collect::<Vec<_>>()),
        )
    };
    let (row, label, weight) = rows(&batch.diffusion);
    let block_logits = logits.index_select(0, &row);
    let per_row = match teacher {
        None => block_logits.cross_entropy_loss::<Tensor>(&label, None, tch::Reduction::None, -100, 0.0),
        Some((teacher, how)) => {
            let corrected = gold_corrected(&teacher.logits(&hidden(teacher)).index_select(0, &row), &label, how.margin.unwrap());
            let log_student = (block_logits / how.temperature).log_softmax(-1, Kind::Float);
            let target = (corrected / how.temperature).softmax(-1, Kind::Float).detach();
            let pointwise = log_student.kl_div(&target, tch::Reduction::None, false);
            pointwise.sum_dim_intlist(-1, false, Kind::Float) * how.temperature * how.temperature
        }
    };
    let diffusion = (per_row * &weight).sum(Kind::Float) / weight.sum(Kind::Float);
    let (row, label, _) = rows(&batch.autoregressive);
    diffusion
        + ar_weight * logits.index_select(0, &row).cross_entropy_loss::<Tensor>(&label, None, tch::Reduction::Mean, -100, 0.0)
}

fn plain_gradient(parameters: &Parameters, loss: &Tensor) -> Vec<f32> {
    loss.backward();
    let named = parameters.model.named_parameters();
    named.iter().flat_map(|(_, tensor)| torch::to_f32s(&tensor.grad())).collect()
}

fn assert_close(ours: &[f32], plain: &[f32]) {
    assert_eq!(ours.len(), plain.len());
    let largest = plain.iter().fold(0_f32, |largest, value| largest.max(value.abs()));
    assert!(largest > 1e-3, "a gradient of nothing proves nothing");
    for (index, (ours, plain)) in ours.iter().zip(plain).enumerate() {
        assert!((ours - plain).abs() < 1e-5 * largest.max(1.0), "value {index}: {ours} against {plain}");
    }
}

#[test]
fn the_layer_wise_chunked_gradient_equals_autograds() {
    for (model_type, tied, labels) in
        [("llama", true, Labels::Next), ("qwen3", false, Labels::InPlace), ("qwen3", true, Labels::Next)]
    {
        let model = Transformer::random(config(model_type, tied), 3, Kind::Float);
        let batch = batch(labels);
        let reference = Parameters::new(&model, Kind::Float);
        let loss = plain_loss(&reference.model, &batch, labels, None, 0.7);
        let plain = plain_gradient(&reference, &loss);
        for (chunk_rows, recompute) in [(1, true), (5, false), (1000, true)] {
            let parameters = Parameters::new(&model, Kind::Float);
            let settings = LossSettings { ar_weight: 0.7, chunk_rows, recompute };
            let losses = forward_backward(&parameters, &batch, shape(labels), &Objective::Tokens, settings);
            assert!((losses.total - f64::try_from(&loss).unwrap()).abs() < 1e-5);
            assert_close(&torch::to_f32s(&parameters.gradient), &plain);
        }
    }
}

#[test]
fn the_distillation_gradient_equals_autograds() {
    let model = Transformer::random(config("llama", true), 3, Kind::Float);
    let teacher = Transformer::random(config("llama", true), 4, Kind::Float);
    let how = Distillation { temperature: 1.5, margin: Some(0.5) };
    let batch = batch(Labels::Next);
    let reference = Parameters::new(&model, Kind::Float);
    let loss = plain_loss(&reference.model, &batch, Labels::Next, Some((&teacher, how)), 1.0);
    let plain = plain_gradient(&reference, &loss);
    let parameters = Parameters::new(&model, Kind::Float);
    let settings = LossSettings { ar_weight: 1.0, chunk_rows: 7, recompute: true };
    let losses =
        forward_backward(&parameters, &batch, shape(Labels::Next), &Objective::Unpruned { teacher: &teacher, how }, settings);
    assert!((losses.total - f64::try_from(&loss).unwrap()).abs() < 1e-5);
    assert_close(&torch::to_f32s(&parameters.gradient), &plain);
}

#[test]
fn the_gradient_towards_the_targets_distribution_equals_autograds() {
    let model = Transformer::random(config("llama", true), 3, Kind::Float);
    let target = Transformer::random(config("qwen3", false), 4, Kind::Float);
    for labels in [Labels::Next, Labels::InPlace] {
        let batch = batch(labels);
        let reference = Parameters::new(&model, Kind::Float);
        let (ids_t, positions_t) =
            (torch::ids_tensor(&batch.ids, Device::Cpu), torch::index_tensor(&batch.positions, Device::Cpu));
        let mut attention = PackedAttention::new(&batch.sequences, shape(labels).pattern(), Device::Cpu);
        let log_student =
            reference.model.logits(&reference.model.forward(&ids_t, &positions_t, &mut attention)).log_softmax(-1, Kind::Float);
        // The target reads each response by itself.
        let mut by_row = Vec::new();
        for sequence in &batch.sequences {
            let ids_t = ids_t.narrow(0, sequence.first_row as i64, sequence.clean as i64);
            let positions_t = Tensor::arange(sequence.clean as i64, (Kind::Int64, Device::Cpu));
            let alone = model::Sequence { first_row: 0, clean: sequence.clean, anchors: Vec::new() };
            let hidden =
                target.forward(&ids_t, &positions_t, &mut PackedAttention::new(&[alone], shape(labels).pattern(), Device::Cpu));
            by_row.push(target.logits(&hidden).softmax(-1, Kind::Float).detach());
        }
        let taught = Tensor::cat(&by_row, 0);
        let divergence = |rows: &[trainer::batch::LabelledRow]| {
            let row = torch::index_tensor(&rows.iter().map(|row| row.row).collect::<Vec<_>>(), Device::Cpu);
            let predictor = torch::index_tensor(&rows.iter().map(|row| row.predictor).collect::<Vec<_>>(), Device::Cpu);
            let pointwise =
                log_student.index_select(0, &row).kl_div(&taught.index_select(0, &predictor), tch::Reduction::None, false);
            pointwise.sum_dim_intlist(-1, false, Kind::Float)
        };
        let weight = Tensor::from_slice(&batch.diffusion.iter().map(|row| row.weight as f32).collect::<Vec<_>>());
        let blocks = (divergence(&batch.diffusion) * &weight).sum(Kind::Float) / weight.sum(Kind::Float);
        let loss = blocks + 0.5 * divergence(&batch.autoregressive).mean(Kind::Float);
        let plain = plain_gradient(&reference, &loss);
        let parameters = Parameters::new(&model, Kind::Float);
        let settings = LossSettings { ar_weight: 0.5, chunk_rows: 6, recompute: false };
        let losses = forward_backward(&parameters, &batch, shape(labels), &Objective::Target { target: &target }, settings);
        assert!((losses.total - f64::try_from(&loss).unwrap()).abs() < 1e-5);
        assert_close(&torch::to_f32s(&parameters.gradient), &plain);
    }
}

fn plan(steps: u64) -> Plan {
    Plan {
        stage: "train".to_string(),
        seed: 5,
        steps,
        batch_responses: 2,
        anchors: 3,
        gamma: 3.0,
        shape: shape(Labels::Next),
        loss: LossSettings { ar_weight: 1.0, chunk_rows: 16, recompute: true },
        optimiser: AdamWSettings { beta1: 0.9, beta2: 0.95, weight_decay: 0.01 },
        learning_rate: 1e-2,
        mask_learning_rate: 1e-2,
        warmup: 0.1,
        minimum_learning_rate: 0.1,
        clip: 1.0,
        save_every: 4,
        evaluate_every: 4,
        keep_last: 2,
        kind: Kind::Float,
    }
}

/// Trains in `folder`, asking to stop after step `stop_after`; gives the losses seen.
fn run(folder: &Path, stop_after: Option<u64>) -> (Ending, Vec<f64>) {
    let model = Transformer::random(config("llama", true), 3, Kind::Float);
    let examples = examples();
    let drafter = DrafterFile {
        kind: "d3d".to_string(),
        block_size: 4,
        labels: "next".to_string(),
        mask_token: 39,
        layers: 3,
        ..DrafterFile::default()
    };
    let files = TextFiles { tokenizer: "{}".to_string(), tokenizer_config: "{}".to_string(), generation_config: None };
    let output = Output { folder, drafter, files: &files };
    let stop = AtomicBool::new(false);
    let mut losses = Vec::new();
    let mut report = |step: &trainer::training::StepReport| {
        losses.push(step.losses.total);
        stop.store(stop_after == Some(step.step), Ordering::Relaxed);
    };
    let mut sink = Sinks(Vec::new());
    let ending =
        train(&model, &plan(10), &examples[1..], &examples[..1], &Objective::Tokens, &output, &mut sink, &mut report, &stop);
    (ending.unwrap(), losses)
}

#[test]
fn resumed_training_equals_uninterrupted_bit_for_bit() {
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (ending, losses) = run(whole.path(), None);
    assert_eq!(ending, Ending::Done);
    assert!(losses.last() < losses.first(), "{losses:?}");
    let mut pieces = Vec::new();
    for stop_after in [Some(3), Some(7), None] {
        let (ending, losses) = run(parts.path(), stop_after);
        assert_eq!(ending, stop_after.map_or(Ending::Done, |step| Ending::Stopped { step }));
        pieces.extend(losses);
    }
    assert_eq!(pieces, losses);
    let weights = |folder: &Path| std::fs::read(folder.join("latest/model.safetensors")).unwrap();
    assert!(weights(whole.path()) == weights(parts.path()), "the final weights differ");
    assert_eq!(saved_steps(whole.path()), [8, 10], "only the last two checkpoints are kept");
    assert!(!whole.path().join("step-000008/state").exists(), "only the latest checkpoint keeps its optimiser state");
}
