//! The chunked, layer-wise gradient against autograd's on the plain formulation, and resumed training against uninterrupted.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use configs::Labels;
use data::supervision::Example;
use model::checkpoint::{DrafterFile, TextFiles};
use model::{ModelConfig, PackedAttention, Transformer};
use tch::{Device, Kind, Tensor};
use torch::group::Group;
use trainer::backward::{Divergence, LossSettings, Objective, forward_backward};
use trainer::batch::{Batch, BlockShape, Denominators};
use trainer::losses::{LossSums, Losses};
use trainer::objective::{Distillation, PositionWeights, gold_corrected, pace_weights};
use trainer::optimiser::{AdamWSettings, Curve, Schedule};
use trainer::packing::{BatchSize, Packing};
use trainer::parameters::Parameters;
use trainer::saving::{Output, saved_steps};
use trainer::training::{Ending, Plan, Training, train};
use trainer::watching::{StepReport, Watch};

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
        .map(|row| Example::after_prompt((0..12 + row).map(|position| (position * 7 + row * 5) % 38).collect(), 3))
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

/// The model with every parameter a leaf.
fn with_leaves(model: &Transformer) -> Transformer {
    let mut tensors = model.named_parameters().into_iter().map(|(_, tensor)| tensor.copy().set_requires_grad(true));
    Transformer::from_source::<std::convert::Infallible>(model.config.clone(), |_, _| Ok(tensors.next().unwrap())).unwrap()
}

fn plain_gradient(model: &Transformer, loss: &Tensor) -> Vec<f32> {
    loss.backward();
    model.named_parameters().iter().flat_map(|(_, tensor)| torch::to_f32s(&tensor.grad())).collect()
}

/// The denominators of a batch that is a whole step.
fn denominators(batch: &Batch) -> Denominators {
    Denominators {
        diffusion: batch.diffusion.iter().map(|row| row.weight).sum(),
        blocks: batch.sequences.iter().map(|sequence| sequence.anchors.len()).sum(),
        clean: batch.autoregressive.len(),
    }
}

fn settings(ar_weight: f64, chunk_rows: usize, recompute: bool) -> LossSettings {
    LossSettings { ar_weight, weights: PositionWeights::Exponential, chunk_rows, recompute }
}

/// The losses and the gradient of batches that are together one step.
fn ours(
    model: &Transformer,
    batches: &[Batch],
    denominators: &Denominators,
    labels: Labels,
    objective: &Objective<'_>,
    settings: LossSettings,
) -> (Losses, Vec<f32>) {
    let group = Group::alone();
    let parameters = Parameters::new(model, Kind::Float, Device::Cpu, &group);
    let gradient = parameters.zero_gradient();
    let mut sums = LossSums::new(shape(labels).drafts());
    for batch in batches {
        let part = forward_backward(&parameters, &gradient, batch, denominators, shape(labels), objective, settings);
        sums.add(&part.unwrap());
    }
    (sums.losses(denominators, settings), torch::to_f32s(&gradient))
}

fn assert_close(ours: &[f32], plain: &[f32]) {
    assert_eq!(ours.len(), plain.len());
    let largest = plain.iter().fold(0_f32, |largest, value| largest.max(value.abs()));
    assert!(largest > 1e-3, "a gradient of nothing proves nothing");
    for (index, (ours, plain)) in ours.iter().zip(plain).enumerate() {
        assert!((ours - plain).abs() < 1e-5 * largest.max(1.0), "value {index}: {ours} against {plain}");
    }
}

/// The same with a bias on every projection that may have one, and RoPE scaled by YaRN.
fn biased(model_type: &str, tied: bool) -> ModelConfig {
    let mut json = config(model_type, tied).to_json("float32");
    (json["attention_bias"], json["mlp_bias"]) = (true.into(), (model_type == "llama").into());
    json["rope_scaling"] = serde_json::json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8});
    ModelConfig::from_json(&json).unwrap()
}

#[test]
fn the_layer_wise_chunked_gradient_equals_autograds() {
    for (config, labels) in [
        (config("llama", true), Labels::Next),
        (config("qwen3", false), Labels::InPlace),
        (config("qwen3", true), Labels::Next),
        (config("qwen2", true), Labels::Next),
        (biased("llama", false), Labels::InPlace),
        (biased("qwen3", true), Labels::Next),
    ] {
        let model = Transformer::random(config, 3, Kind::Float);
        let batch = batch(labels);
        let reference = with_leaves(&model);
        let loss = plain_loss(&reference, &batch, labels, None, 0.7);
        let plain = plain_gradient(&reference, &loss);
        for (name, bias) in reference.named_parameters().into_iter().filter(|(name, _)| name.ends_with(".bias")) {
            // Softmax does not see what all keys have in common; RoPE leaves a little of it.
            let least = if name.contains("k_proj") { 1e-6 } else { 1e-4 };
            assert!(bias.grad().abs().max().double_value(&[]) > least, "{name} has no part in the loss");
        }
        for (chunk_rows, recompute) in [(1, true), (5, false), (1000, true)] {
            let how = settings(0.7, chunk_rows, recompute);
            let (losses, gradient) =
                ours(&model, std::slice::from_ref(&batch), &denominators(&batch), labels, &Objective::Tokens, how);
            assert!((losses.total - f64::try_from(&loss).unwrap()).abs() < 1e-5);
            assert_close(&gradient, &plain);
        }
    }
}

#[test]
fn a_step_split_into_forwards_has_the_whole_steps_loss_and_gradient() {
    let examples = examples();
    let pack = |items: &[(usize, Vec<usize>)]| {
        let items: Vec<_> = items.iter().map(|(index, anchors)| (&examples[*index], anchors.clone())).collect();
        Batch::pack(&items, shape(Labels::Next), 3.0)
    };
    let items = [(0, vec![3, 5, 6, 10]), (1, vec![4, 11]), (2, vec![]), (3, vec![13, 14])];
    let model = Transformer::random(config("qwen3", true), 3, Kind::Float);
    let whole = pack(&items);
    let of = denominators(&whole);
    for weights in [PositionWeights::Exponential, PositionWeights::Pace { alpha: 0.3 }] {
        let how = LossSettings { weights, ..settings(0.7, 6, true) };
        let (losses, gradient) = ours(&model, std::slice::from_ref(&whole), &of, Labels::Next, &Objective::Tokens, how);
        // An empty forward in between stands for a rank that has nothing to do.
        let parts = [pack(&items[..1]), pack(&items[1..3]), Batch::default(), pack(&items[3..])];
        let (split_losses, split_gradient) = ours(&model, &parts, &of, Labels::Next, &Objective::Tokens, how);
        assert!((losses.total - split_losses.total).abs() < 1e-5, "{losses:?} {split_losses:?}");
        assert_close(&split_gradient, &gradient);
    }
}

#[test]
fn the_gradient_in_bf16_is_that_in_f32_but_for_rounding() {
    let model = Transformer::random(config("qwen3", true), 3, Kind::Float);
    let batch = batch(Labels::Next);
    let of = denominators(&batch);
    let (losses, expected) =
        ours(&model, std::slice::from_ref(&batch), &of, Labels::Next, &Objective::Tokens, settings(1.0, 6, true));
    let group = Group::alone();
    let parameters = Parameters::new(&model, Kind::BFloat16, Device::Cpu, &group);
    assert_eq!(parameters.master.kind(), Kind::Float, "masters stay in f32");
    let gradient = parameters.zero_gradient();
    let how = settings(1.0, 6, true);
    let sums = forward_backward(&parameters, &gradient, &batch, &of, shape(Labels::Next), &Objective::Tokens, how).unwrap();
    assert!((sums.losses(&of, how).total - losses.total).abs() < 0.03 * losses.total);
    let squared = |values: &mut dyn Iterator<Item = f32>| values.map(|value| f64::from(value).powi(2)).sum::<f64>();
    let ours = torch::to_f32s(&gradient);
    let difference = squared(&mut ours.iter().zip(&expected).map(|(ours, expected)| ours - expected));
    // bf16 has 8 bits: a few thousandths of each number, in every operation of a few layers.
    let distance = (difference / squared(&mut expected.iter().copied())).sqrt();
    assert!(distance < 0.1, "{distance}");
}

#[test]
fn pace_weighs_every_block_by_its_own_probabilities() {
    let model = Transformer::random(config("llama", true), 3, Kind::Float);
    let batch = batch(Labels::InPlace);
    let reference = with_leaves(&model);
    let (ids_t, positions_t) = (torch::ids_tensor(&batch.ids, Device::Cpu), torch::index_tensor(&batch.positions, Device::Cpu));
    let mut attention = PackedAttention::new(&batch.sequences, shape(Labels::InPlace).pattern(), Device::Cpu);
    let logits = reference.logits(&reference.forward(&ids_t, &positions_t, &mut attention));
    let (mut loss, mut start) = (Tensor::from(0_f32), 0);
    for end in 1..=batch.diffusion.len() {
        if end < batch.diffusion.len() && batch.diffusion[end].draft > 0 {
            continue;
        }
        let rows = &batch.diffusion[start..end];
        let row = torch::index_tensor(&rows.iter().map(|row| row.row).collect::<Vec<_>>(), Device::Cpu);
        let label = torch::ids_tensor(&rows.iter().map(|row| row.label).collect::<Vec<_>>(), Device::Cpu);
        let losses = logits.index_select(0, &row).cross_entropy_loss::<Tensor>(&label, None, tch::Reduction::None, -100, 0.0);
        let probabilities: Vec<f64> = torch::to_f32s(&losses).iter().map(|&loss| f64::from(-loss).exp()).collect();
        let weights: Vec<f32> = pace_weights(&probabilities, 0.5).iter().map(|&weight| weight as f32).collect();
        loss += (losses * Tensor::from_slice(&weights)).sum(Kind::Float);
        start = end;
    }
    let loss = loss / 6.0;
    let plain = plain_gradient(&reference, &loss);
    let how = LossSettings { weights: PositionWeights::Pace { alpha: 0.5 }, ..settings(0.0, 4, true) };
    let (losses, gradient) =
        ours(&model, std::slice::from_ref(&batch), &denominators(&batch), Labels::InPlace, &Objective::Tokens, how);
    assert!((losses.total - f64::try_from(&loss).unwrap()).abs() < 1e-5);
    assert_close(&gradient, &plain);
}

#[test]
fn odd_responses_give_finite_losses_of_their_labels_alone() {
    let model = Transformer::random(config("llama", true), 3, Kind::Float);
    let example = |length: u32, prompt_length| Example::after_prompt((0..length).collect(), prompt_length);
    let check = |example: &Example, anchors: Vec<usize>, labels: Labels, block_labels: usize, clean_labels: usize| {
        let batch = Batch::pack(&[(example, anchors)], shape(labels), 3.0);
        assert_eq!((batch.diffusion.len(), batch.autoregressive.len()), (block_labels, clean_labels));
        let of = denominators(&batch);
        let (losses, gradient) = ours(&model, &[batch], &of, labels, &Objective::Tokens, settings(1.0, 6, true));
        assert!(losses.total.is_finite() && gradient.iter().all(|value| value.is_finite()), "{losses:?}");
        assert_eq!(losses.total > 0.0, block_labels + clean_labels > 0);
        assert_eq!(gradient.iter().any(|&value| value != 0.0), block_labels + clean_labels > 0);
    };
    // Shorter than a block: as many labels as there are tokens behind the anchor.
    check(&example(3, 1), vec![1], Labels::InPlace, 1, 2);
    check(&example(3, 1), vec![1], Labels::Next, 1, 2);
    // One token, which nothing predicts; then no token at all.
    check(&example(1, 0), vec![], Labels::Next, 0, 0);
    check(&example(0, 0), vec![], Labels::Next, 0, 0);
    // Two supervised tokens at the very end: one anchor, one label.
    assert_eq!(example(9, 7).anchors().collect::<Vec<_>>(), [7]);
    check(&example(9, 7), vec![7], Labels::InPlace, 1, 2);
    // A single supervised token makes no anchor, and is still predicted by the clean row before it.
    assert_eq!(example(9, 8).anchors().count(), 0);
    check(&example(9, 8), vec![], Labels::Next, 0, 1);
    // Nothing supervised.
    check(&example(9, 9), vec![], Labels::Next, 0, 0);
    // Five anchors where 128 were asked for: as many blocks, nothing padded.
    let five = example(10, 4);
    let anchors = data::supervision::draw_anchors(&five, 128, 1, 0, 0);
    assert_eq!(anchors, [4, 5, 6, 7, 8]);
    check(&five, anchors, Labels::InPlace, 3 + 3 + 3 + 2 + 1, 6);
}

#[test]
fn the_distillation_gradient_equals_autograds() {
    let model = Transformer::random(config("llama", true), 3, Kind::Float);
    let teacher = Transformer::random(config("llama", true), 4, Kind::Float);
    let how = Distillation { temperature: 1.5, margin: Some(0.5) };
    let batch = batch(Labels::Next);
    let reference = with_leaves(&model);
    let loss = plain_loss(&reference, &batch, Labels::Next, Some((&teacher, how)), 1.0);
    let plain = plain_gradient(&reference, &loss);
    let objective = Objective::Unpruned { teacher: &teacher, how };
    let (losses, gradient) =
        ours(&model, std::slice::from_ref(&batch), &denominators(&batch), Labels::Next, &objective, settings(1.0, 7, true));
    assert!((losses.total - f64::try_from(&loss).unwrap()).abs() < 1e-5);
    assert_close(&gradient, &plain);
}

#[test]
fn the_gradient_towards_the_targets_distribution_equals_autograds() {
    let model = Transformer::random(config("llama", true), 3, Kind::Float);
    let target = Transformer::random(config("qwen3", false), 4, Kind::Float);
    for labels in [Labels::Next, Labels::InPlace] {
        let batch = batch(labels);
        let reference = with_leaves(&model);
        let (ids_t, positions_t) =
            (torch::ids_tensor(&batch.ids, Device::Cpu), torch::index_tensor(&batch.positions, Device::Cpu));
        let mut attention = PackedAttention::new(&batch.sequences, shape(labels).pattern(), Device::Cpu);
        let log_student = reference.logits(&reference.forward(&ids_t, &positions_t, &mut attention)).log_softmax(-1, Kind::Float);
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
        let divergence = Divergence::Forward(Distillation { temperature: 1.0, margin: None });
        let objective = Objective::Target { target: &target, divergence };
        let (losses, gradient) =
            ours(&model, std::slice::from_ref(&batch), &denominators(&batch), labels, &objective, settings(0.5, 6, false));
        assert!((losses.total - f64::try_from(&loss).unwrap()).abs() < 1e-5);
        assert_close(&gradient, &plain);
    }
}

fn plan(steps: u64) -> Plan {
    Plan {
        stage: "train".to_string(),
        steps,
        packing: Packing {
            seed: 5,
            size: BatchSize::Responses(2),
            anchors: 3,
            shape: shape(Labels::Next),
            gamma: 3.0,
            forward_rows: 1000,
        },
        loss: settings(1.0, 16, true),
        optimiser: AdamWSettings { beta1: 0.9, beta2: 0.95, weight_decay: 0.01 },
        learning_rate: 1e-2,
        mask_learning_rate: 1e-2,
        schedule: Schedule { warmup: 0.1, curve: Curve::Cosine, minimum: 0.1 },
        clip: 1.0,
        save_every: 4,
        evaluate_every: 4,
        keep_last: 2,
        kind: Kind::Float,
    }
}

/// Trains in `folder` on `examples`, asking to stop after step `stop_after`; gives how it ended and the reports.
fn run_on(
    folder: &Path,
    plan: &Plan,
    examples: &[Example],
    held_out: &[Example],
    stop_after: Option<u64>,
) -> (Result<Ending, trainer::training::TrainError>, Vec<StepReport>) {
    let drafter = DrafterFile {
        kind: "d3d".to_string(),
        block_size: 4,
        labels: "next".to_string(),
        mask_token: 39,
        layers: 3,
        ..DrafterFile::default()
    };
    let files = TextFiles { tokenizer: "{}".to_string(), tokenizer_config: "{}".to_string(), generation_config: None };
    let (stop, group) = (AtomicBool::new(false), Group::alone());
    let ids: Vec<String> = (0..examples.len()).map(|index| format!("row-{index}")).collect();
    let training = Training {
        start: Transformer::random(config("llama", true), 3, Kind::Float),
        device: Device::Cpu,
        examples,
        ids: &ids,
        held_out,
        objective: Objective::Tokens,
        output: Output { folder, drafter, files: &files },
        group: &group,
    };
    let mut reports = Vec::new();
    let mut report = |step: &StepReport| {
        reports.push(step.clone());
        // The flag is looked at while a step is computed, so the wish is granted at the end of the next.
        stop.store(stop_after == Some(step.step + 1), Ordering::Relaxed);
    };
    let mut watch = Watch { sink: None, report: &mut report, score_every: None, score: None };
    let ending = train(training, plan, &mut watch, &stop);
    (ending, reports)
}

fn run(folder: &Path, stop_after: Option<u64>) -> (Ending, Vec<f64>) {
    let examples = examples();
    let (ending, reports) = run_on(folder, &plan(10), &examples[1..], &examples[..1], stop_after);
    (ending.unwrap(), reports.iter().map(|report| report.losses.total).collect())
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

#[test]
fn the_checkpoint_with_the_best_replay_is_kept_beside_the_last() {
    let folder = tempfile::tempdir().unwrap();
    let examples = examples();
    let mut plan = plan(12);
    (plan.evaluate_every, plan.save_every, plan.keep_last) = (1, 100, 1);
    // After a start that learns, a rate that ruins: the best is an early step.
    plan.schedule = Schedule { warmup: 0.0, curve: Curve::Constant, minimum: 1.0 };
    plan.learning_rate = 0.3;
    let (ending, reports) = run_on(folder.path(), &plan, &examples, &examples, None);
    assert_eq!(ending.unwrap(), Ending::Done);
    let taus: Vec<f64> = reports.iter().map(|report| report.replay.as_ref().unwrap().tau_pooled).collect();
    let best = (0..taus.len()).rev().max_by(|&one, &other| taus[one].total_cmp(&taus[other])).unwrap() as u64 + 1;
    let linked = std::fs::read_link(folder.path().join("best")).unwrap();
    assert_eq!(linked.to_str().unwrap(), format!("step-{best:06}"), "{taus:?}");
    let mut expected = vec![best, 12];
    expected.dedup();
    assert_eq!(saved_steps(folder.path()), expected, "{taus:?}");
    for report in &reports {
        let replay = report.replay.as_ref().unwrap();
        assert!(replay.tau_interval.0 <= replay.tau_pooled && replay.tau_pooled <= replay.tau_interval.1);
    }
}

#[test]
fn steps_that_are_not_finite_are_left_out_counted_and_named_until_it_is_enough() {
    let folder = tempfile::tempdir().unwrap();
    let mut plan = plan(60);
    // So high a rate that the weights overflow at once.
    (plan.learning_rate, plan.clip, plan.save_every) = (1e38, 1e38, 1000);
    plan.schedule = Schedule { warmup: 0.0, curve: Curve::Constant, minimum: 1.0 };
    let (ending, reports) = run_on(folder.path(), &plan, &examples(), &[], None);
    let message = ending.unwrap_err().to_string();
    assert!(
        message.contains("20 steps had a loss or gradient that is not finite") && message.contains("skipped.jsonl"),
        "{message}"
    );
    assert!(reports.iter().filter(|report| report.skipped.is_some()).count() >= 19);
    let text = std::fs::read_to_string(folder.path().join("skipped.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 20);
    assert!(lines[0]["reason"].as_str().unwrap().starts_with("not finite"));
    assert!(lines[0]["responses"].as_array().unwrap().iter().all(|id| id.as_str().unwrap().starts_with("row-")), "{}", lines[0]);
}

#[test]
fn a_step_without_anything_supervised_is_left_out_and_training_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let mut plan = plan(4);
    plan.packing.size = BatchSize::Responses(1);
    // One response in two has a prompt and nothing else.
    let examples = [Example::after_prompt(vec![1, 2, 3], 3), examples().remove(0)];
    let (ending, reports) = run_on(folder.path(), &plan, &examples, &[], None);
    assert_eq!(ending.unwrap(), Ending::Done);
    let skipped: Vec<bool> = reports.iter().map(|report| report.skipped.is_some()).collect();
    assert_eq!(skipped.iter().filter(|&&skipped| skipped).count(), 2, "{skipped:?}");
    assert!(reports.iter().all(|report| report.losses.total.is_finite()));
}
