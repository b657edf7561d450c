//! The search against a plain loop, a useless layer planted and found, and interrupted pruning against uninterrupted.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use configs::Labels;
use data::supervision::Example;
use evaluator::drafter::{Block, LaneWork};
use model::checkpoint::{DrafterFile, TextFiles};
use model::{ModelConfig, Transformer};
use pruner::ledger::{Event, Ledger, TauLoss};
use pruner::pruning::{Context, Progress, PruneError, Settings, least_harmful, prune};
use pruner::search::{Blocks, Counted, count};
use tch::Kind;
use torch::group::Group;
use trainer::backward::{LossSettings, Objective};
use trainer::batch::BlockShape;
use trainer::metrics::Sinks;
use trainer::objective::{Distillation, PositionWeights};
use trainer::optimiser::{AdamWSettings, Curve, Schedule};
use trainer::packing::{BatchSize, Packing};
use trainer::saving::Output;
use trainer::training::{Ending, Plan, Training, drafter_of, train};
use trainer::watching::Watch;

const BLOCK: usize = 4;

fn shape(labels: Labels) -> BlockShape {
    BlockShape { block_size: BLOCK, mask_token: 23, labels, anchor_sees_block: labels == Labels::InPlace }
}

/// Sequences with a rule that a tiny drafter can learn: each token is the one before it plus the sequence's step.
fn examples(count: u32) -> Vec<Example> {
    let sequence = |row: u32| (0..20).map(|position| (row * 3 + position * (1 + row % 3)) % 22).collect();
    (0..count).map(|row| Example { ids: sequence(row), prompt_length: 4 }).collect()
}

fn ids(count: u32) -> Vec<String> {
    (0..count).map(|row| row.to_string()).collect()
}

fn plan(labels: Labels, steps: u64) -> Plan {
    Plan {
        stage: "recover".to_string(),
        steps,
        packing: Packing {
            seed: 7,
            size: BatchSize::Responses(4),
            anchors: 6,
            shape: shape(labels),
            gamma: 4.0,
            forward_rows: 1000,
        },
        loss: LossSettings { ar_weight: 1.0, weights: PositionWeights::Exponential, chunk_rows: 64, recompute: false },
        optimiser: AdamWSettings { beta1: 0.9, beta2: 0.95, weight_decay: 0.0 },
        learning_rate: 1e-2,
        mask_learning_rate: 1e-2,
        schedule: Schedule { warmup: 0.1, curve: Curve::Cosine, minimum: 0.1 },
        clip: 1.0,
        save_every: 2,
        evaluate_every: 1000,
        keep_last: 1,
        kind: Kind::Float,
    }
}

fn text_files() -> TextFiles {
    TextFiles { tokenizer: "{}".to_string(), tokenizer_config: "{}".to_string(), generation_config: None }
}

/// A drafter of three layers that has learnt the rule.
fn trained(labels: Labels) -> Transformer {
    let config = serde_json::json!({"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 24, "tie_word_embeddings": true});
    let start = Transformer::random(ModelConfig::from_json(&config).unwrap(), 3, Kind::Float);
    let folder = tempfile::tempdir().unwrap();
    let drafter = DrafterFile { block_size: BLOCK, mask_token: 23, ..DrafterFile::default() };
    let (plan, stop, group, files) = (plan(labels, 60), AtomicBool::new(false), Group::alone(), text_files());
    let training = Training {
        start,
        device: tch::Device::Cpu,
        examples: &examples(12),
        ids: &ids(12),
        held_out: &[],
        objective: Objective::Tokens,
        output: Output { folder: folder.path(), drafter, files: &files },
        group: &group,
    };
    let mut watch = Watch { sink: None, report: &mut |_| {}, score_every: None, score: None };
    train(training, &plan, &mut watch, &stop).unwrap();
    model::checkpoint::load(&folder.path().join("latest"), Kind::Float, tch::Device::Cpu).unwrap().0
}

/// The same function with a fourth layer at `place` that adds nothing.
fn with_useless_layer(model: &Transformer, place: usize) -> Transformer {
    let mut layers: Vec<usize> = (0..model.layers.len()).collect();
    layers.insert(place, 0);
    let mut planted = model.with_layers(&layers);
    let layer = &mut planted.layers[place];
    (layer.o_proj, layer.down_proj) = (layer.o_proj.zeros_like(), layer.down_proj.zeros_like());
    planted
}

/// τ by drafting every block in a forward of its own.
fn plain_tau(model: &Transformer, labels: Labels, examples: &[Example], anchors: usize, seed: u64) -> f64 {
    let drafter = drafter_of(model, shape(labels));
    let (mut committed, mut blocks) = (0, 0);
    for (index, example) in examples.iter().enumerate() {
        for anchor in data::supervision::draw_anchors(example, anchors, seed, 0, index as u64) {
            let mut cache = drafter.new_cache(1, example.ids.len(), BLOCK);
            let block = Block { anchor: example.ids[anchor], context: anchor };
            let work = LaneWork { lane: 0, clean: &example.ids[..anchor], blocks: &[block] };
            let draft = drafter.draft(&mut cache, &[work], 1).unwrap().remove(0);
            let rest = &example.ids[anchor + 1..];
            let accepted = draft.tokens.iter().zip(rest).take_while(|(drafted, token)| drafted == token).count();
            committed += (accepted + 1).min(rest.len());
            blocks += 1;
        }
    }
    committed as f64 / blocks as f64
}

#[test]
fn the_search_equals_a_plain_loop_over_layers_and_blocks() {
    for labels in [Labels::Next, Labels::InPlace] {
        let (model, held_out) = (trained(labels), examples(15).split_off(12));
        let blocks = Blocks::draw(&held_out, shape(labels), 5, 9);
        let mut counted = Counted::default();
        count(&model, &blocks, &mut counted, 9, &mut |_| std::ops::ControlFlow::Continue(()));
        let found: Vec<TauLoss> = counted.losses(3, 9);
        let with = plain_tau(&model, labels, &held_out, 5, 9);
        assert!(with > 1.5, "a drafter that learnt nothing shows nothing: τ {with}");
        assert_eq!(found.len(), 3);
        for (layer, loss) in found.iter().enumerate() {
            let kept: Vec<usize> = (0..3).filter(|&index| index != layer).collect();
            let without = plain_tau(&model.with_layers(&kept), labels, &held_out, 5, 9);
            assert_eq!((loss.layer, loss.tau_with, loss.tau_without), (layer, with, without));
            assert!(loss.low <= loss.tau_loss && loss.tau_loss <= loss.high, "{loss:?}");
        }
    }
}

#[test]
fn halving_picks_the_layer_of_the_plain_loop_and_says_what_it_saved() {
    let (mut dropped, mut computed, mut plain) = (0, 0, 0);
    let held_out = examples(48);
    let learnt = [Labels::Next, Labels::InPlace].map(|labels| (labels, trained(labels)));
    for seed in 0..20 {
        let (labels, learnt) = &learnt[seed as usize % 2];
        let labels = *labels;
        let noisy = |model: &Transformer| {
            let _no_grad = tch::no_grad_guard();
            let other = Transformer::random(model.config.clone(), seed, Kind::Float);
            let mut noise = other.named_parameters().into_iter();
            for (_, weight) in model.named_parameters() {
                let noise = noise.next().unwrap().1 * 0.1;
                weight.shallow_clone().copy_(&(weight * 0.9 + noise));
            }
        };
        let model = with_useless_layer(learnt, seed as usize % 4);
        let model = Transformer::from_source::<std::convert::Infallible>(model.config.clone(), {
            let mut weights = model.named_parameters().into_iter();
            move |_, _| Ok(weights.next().unwrap().1.copy())
        });
        let model = model.unwrap();
        noisy(&model);
        let blocks = Blocks::draw(&held_out, shape(labels), 4, seed);
        let mut counted = Counted::default();
        count(&model, &blocks, &mut counted, seed, &mut |_| std::ops::ControlFlow::Continue(()));
        let losses = counted.losses(4, seed);
        let taus: Vec<f64> = (0..4)
            .map(|layer| {
                let kept: Vec<usize> = (0..4).filter(|&index| index != layer).collect();
                plain_tau(&model.with_layers(&kept), labels, &held_out, 4, seed)
            })
            .collect();
        let best = (0..4).fold(0, |best, layer| if taus[layer] > taus[best] { layer } else { best });
        assert_eq!(least_harmful(&losses), best, "seed {seed}: {taus:?} {losses:?}");
        dropped += losses.iter().filter(|loss| loss.blocks < losses[best].blocks).count();
        let cost = blocks.cost(&counted, 4);
        (computed, plain) = (computed + cost.token_layers, plain + cost.plain_token_layers);
    }
    println!("{dropped} of 80 layers dropped on the way; {:.2} of the plain loop's token-layers", computed as f64 / plain as f64);
    assert!(dropped > 10 && computed * 2 < plain, "{dropped} dropped, {computed} of {plain}");
}

/// Prunes `teacher` in `folder`; the stop flag rises at the `stop_at`-th event.
fn run(folder: &Path, teacher: &Transformer, remove: usize, stop_at: usize) -> Result<Ending, PruneError> {
    let (files, examples, held_out) = (text_files(), examples(12), examples(15).split_off(12));
    let drafter = DrafterFile { block_size: BLOCK, labels: "next".to_string(), mask_token: 23, ..DrafterFile::default() };
    let (parent, files) = ("step-000060", &files);
    let context = Context { teacher, parent, drafter, files, folder, examples: &examples, ids: &ids(12), held_out: &held_out };
    let settings = Settings {
        remove,
        min_layers: 1,
        keep_tau: 0.0,
        anchors: 5,
        distillation: Distillation { temperature: 1.0, margin: Some(0.0) },
        recovery: Plan { learning_rate: 1e-3, ..plan(Labels::Next, 5) },
    };
    let (stop, events) = (AtomicBool::new(false), AtomicUsize::new(0));
    let mut progress = |_: Progress<'_>| {
        if events.fetch_add(1, Ordering::Relaxed) + 1 == stop_at {
            stop.store(true, Ordering::Relaxed);
        }
    };
    prune(&context, &settings, &mut Sinks(Vec::new()), &mut progress, &stop)
}

fn events(folder: &Path) -> Vec<Event> {
    Ledger::open(&folder.join("ledger.jsonl")).unwrap().events
}

#[test]
fn a_planted_useless_layer_is_found_and_its_removal_costs_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let teacher = with_useless_layer(&trained(Labels::Next), 2);
    assert_eq!(run(folder.path(), &teacher, 1, usize::MAX).unwrap(), Ending::Done);
    let events = events(folder.path());
    let removed = events.iter().find_map(|event| match event {
        Event::Removed { original_layer, tau_before, tau_after, .. } => Some((*original_layer, *tau_before, *tau_after)),
        _ => None,
    });
    let (layer, before, after) = removed.unwrap();
    assert_eq!((layer, before), (2, after));
    for event in &events {
        if let Event::TauLoss(loss) = event {
            // Others may lose nothing on the whole, but not on every resampling.
            assert_eq!((loss.tau_loss, loss.low, loss.high) == (0.0, 0.0, 0.0), loss.layer == 2, "{loss:?}");
        }
    }
    let (model, file) = model::checkpoint::load(&folder.path().join("layers-03"), Kind::Float, tch::Device::Cpu).unwrap();
    assert_eq!((model.layers.len(), file.layers, file.removed_layers), (3, 3, vec![2]));
    assert_eq!(file.parent.as_deref(), Some("step-000060"));
}

#[test]
fn pruning_interrupted_anywhere_ends_as_uninterrupted() {
    let teacher = with_useless_layer(&trained(Labels::Next), 1);
    let whole = tempfile::tempdir().unwrap();
    assert_eq!(run(whole.path(), &teacher, 2, usize::MAX).unwrap(), Ending::Done);
    let weights = |folder: &Path, name: &str| fs::read(folder.join(name).join("model.safetensors")).unwrap();
    // Of the events 4 + 3 are measured layers, 2 · 5 are recovery steps; the search stops behind its one part only.
    for every in [1, 2, 3, 6] {
        let parts = tempfile::tempdir().unwrap();
        let mut starts = 0;
        while let Ending::Stopped { .. } = run(parts.path(), &teacher, 2, every).unwrap() {
            starts += 1;
            assert!(starts < 30, "every start must get further");
        }
        assert!(starts >= 2, "{starts} interruptions");
        assert_eq!(events(parts.path()), events(whole.path()), "stopping at every {every}th event");
        for name in ["layers-03", "layers-02"] {
            assert!(weights(parts.path(), name) == weights(whole.path(), name), "{name}, stopping at every {every}th event");
        }
        assert!(!parts.path().join("recover-02").exists() && !parts.path().join("recover-03").exists());
    }
}

#[test]
fn more_layers_than_there_are_cannot_be_removed() {
    let folder = tempfile::tempdir().unwrap();
    let error = run(folder.path(), &trained(Labels::Next), 3, usize::MAX).unwrap_err();
    assert!(error.to_string().contains("`prune.remove` asks for 3 layers, but the drafter has 3"), "{error}");
    assert!(fs::read_dir(folder.path()).unwrap().next().is_none());
    // Nothing to remove is no fault, however few layers there are.
    assert!(pruner::pruning::check(0, 28, 3).is_ok());
}
