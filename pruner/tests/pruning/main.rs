//! The search against a plain loop, a useless layer planted and found, and interrupted pruning against uninterrupted.
#![allow(clippy::unwrap_used)]

mod endings;

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use configs::{Criterion, Labels};
use data::supervision::Example;
use evaluator::drafter::{Block, LaneWork};
use model::checkpoint::{DrafterFile, TextFiles};
use model::{ModelConfig, PackedAttention, Sequence, Transformer};
use pruner::choosing::least_harmful;
use pruner::criteria::{mean_scores, weigh};
use pruner::ledger::{Event, Ledger, TauLoss};
use pruner::pruning::{Context, Progress, PruneError, Settings, prune};
use pruner::search::{Blocks, Counted, committed, count};
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
    (0..count).map(|row| Example::after_prompt(sequence(row), 4)).collect()
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
    (layer.o_proj.weight, layer.down_proj.weight) = (layer.o_proj.weight.zeros_like(), layer.down_proj.weight.zeros_like());
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
fn the_search_counts_the_same_with_more_rows_than_logits_at_once() {
    let (model, held_out) = (trained(Labels::Next), examples(24).split_off(12));
    let blocks = Blocks::draw(&held_out, shape(Labels::Next), 14, 9);
    let counts = committed(&model, &blocks);
    // 3 drafts of each block, in batches of 8 responses: more than the 256 rows that are there at once.
    assert_eq!(counts[..8].iter().map(|(_, blocks)| 3 * blocks).sum::<usize>(), 336);
    let [tokens, drafted] = [0, 1].map(|which| counts.iter().map(|it| [it.0, it.1][which]).sum::<usize>() as f64);
    assert_eq!(tokens / drafted, plain_tau(&model, Labels::Next, &held_out, 14, 9));
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
    run_with(folder, teacher, stop_at, examples(15).split_off(12), |settings| settings.remove = remove)
}

/// The same with other held-out responses or settings.
fn run_with(
    folder: &Path,
    teacher: &Transformer,
    stop_at: usize,
    held_out: Vec<Example>,
    change: impl FnOnce(&mut Settings),
) -> Result<Ending, PruneError> {
    run_told(folder, teacher, stop_at, held_out, change, &mut |_| {})
}

/// The same, telling what happens.
fn run_told(
    folder: &Path,
    teacher: &Transformer,
    stop_at: usize,
    held_out: Vec<Example>,
    change: impl FnOnce(&mut Settings),
    told: &mut dyn FnMut(&Progress<'_>),
) -> Result<Ending, PruneError> {
    let (files, examples) = (text_files(), examples(12));
    let drafter = DrafterFile { block_size: BLOCK, labels: "next".to_string(), mask_token: 23, ..DrafterFile::default() };
    let (parent, files) = ("step-000060", &files);
    let context = Context { teacher, parent, drafter, files, folder, examples: &examples, ids: &ids(12), held_out: &held_out };
    let mut settings = Settings {
        remove: 1,
        min_layers: 1,
        keep_tau: 0.0,
        speed: None,
        swap: false,
        criterion: Criterion::Tau,
        anchors: 5,
        distillation: Distillation { temperature: 1.0, margin: Some(0.0) },
        recovery: Plan { learning_rate: 1e-3, ..plan(Labels::Next, 5) },
    };
    change(&mut settings);
    let (stop, events) = (AtomicBool::new(false), AtomicUsize::new(0));
    let mut progress = |event: Progress<'_>| {
        told(&event);
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
    let mut replayed = 0;
    for event in &events {
        // Others may lose nothing on the whole, but not on every resampling.
        let all_zero = |loss: &TauLoss| (loss.tau_loss, loss.low, loss.high) == (0.0, 0.0, 0.0);
        match event {
            Event::TauLoss(loss) => assert_eq!(all_zero(loss), loss.layer == 2, "{loss:?}"),
            Event::ReplayLoss(loss) => {
                replayed += 1;
                assert!(loss.layer != 2 || all_zero(loss) && replayed == 1 && loss.tau_with == before, "{loss:?}");
            }
            _ => {}
        }
    }
    assert_eq!(replayed, 3);
    let (model, file) = model::checkpoint::load(&folder.path().join("layers-03"), Kind::Float, tch::Device::Cpu).unwrap();
    assert_eq!((model.layers.len(), file.layers, file.removed_layers), (3, 3, vec![2]));
    assert_eq!(file.parent.as_deref(), Some("step-000060"));
}

#[test]
fn two_planted_useless_layers_go_first_by_every_criterion() {
    let teacher = with_useless_layer(&with_useless_layer(&trained(Labels::Next), 1), 3);
    for criterion in [Criterion::Tau, Criterion::BlockInfluence, Criterion::LanguageModelLoss] {
        let folder = tempfile::tempdir().unwrap();
        let change = |settings: &mut Settings| {
            (settings.remove, settings.criterion) = (3, criterion);
            // Recovery would teach the second one something.
            settings.recovery.steps = 0;
        };
        let ending = run_with(folder.path(), &teacher, usize::MAX, examples(15).split_off(12), change);
        assert_eq!(ending.unwrap(), Ending::Done);
        let removed = |event: &Event| match event {
            Event::Removed { original_layer, tau_before, tau_after, .. } => Some((*original_layer, *tau_before, *tau_after)),
            _ => None,
        };
        let removed: Vec<(usize, f64, f64)> = events(folder.path()).iter().filter_map(removed).collect();
        assert_eq!(removed[..2].iter().map(|(layer, ..)| *layer).collect::<Vec<_>>(), [1, 3], "{criterion:?}");
        assert!(removed[..2].iter().all(|(_, before, after)| before == after), "{criterion:?}: {removed:?}");
        assert!(removed[2].2 < removed[2].1, "the third one was of use: {criterion:?}: {removed:?}");
    }
}

#[test]
fn the_other_criteria_equal_plain_forwards() {
    let (model, held_out) = (trained(Labels::Next), examples(21).split_off(12));
    let parts = |criterion, anchors| {
        let blocks = Blocks::draw(&held_out, shape(Labels::Next), anchors, 9);
        let mut parts = Vec::new();
        weigh(&model, &blocks, criterion, 0, &mut |part| {
            parts.push(part);
            std::ops::ControlFlow::Continue(())
        });
        assert_eq!(parts.len(), 2);
        mean_scores(&parts)
    };
    let _no_grad = tch::no_grad_guard();
    let hidden = |model: &Transformer, example: &Example, layers: usize| {
        let alone = Sequence { first_row: 0, clean: example.ids.len(), anchors: Vec::new() };
        let mut attention = PackedAttention::new(&[alone], shape(Labels::Next).pattern(), tch::Device::Cpu);
        let positions: Vec<usize> = (0..example.ids.len()).collect();
        let rope = model.rope(&torch::index_tensor(&positions, tch::Device::Cpu));
        let embedded = model.embed(&torch::ids_tensor(&example.ids, tch::Device::Cpu));
        model.forward_layers(0..layers, embedded, &rope, &mut attention)
    };
    let loss = |model: &Transformer| {
        let (mut sum, mut count) = (0.0, 0);
        for example in &held_out {
            let logits = model.logits(&hidden(model, example, model.layers.len())).log_softmax(-1, Kind::Double);
            for position in example.prompt_length()..example.ids.len() {
                sum -= logits.double_value(&[position as i64 - 1, i64::from(example.ids[position])]);
                count += 1;
            }
        }
        sum / f64::from(count)
    };
    let found = parts(Criterion::LanguageModelLoss, 0);
    for (layer, &rise) in found.iter().enumerate() {
        let kept: Vec<usize> = (0..3).filter(|&index| index != layer).collect();
        let expected = loss(&model.with_layers(&kept)) - loss(&model);
        assert!((rise - expected).abs() < 1e-5 && rise != 0.0, "layer {layer}: {rise} {expected}");
    }
    let found = parts(Criterion::BlockInfluence, 0);
    for (layer, &turned) in found.iter().enumerate() {
        let (mut sum, mut count) = (0.0, 0);
        for example in &held_out {
            let [input, output] = [layer, layer + 1].map(|layers| hidden(&model, example, layers).to_kind(Kind::Double));
            let dot = (&input * &output).sum_dim_intlist(-1, false, Kind::Double);
            let norms = (&input * &input).sum_dim_intlist(-1, false, Kind::Double).sqrt()
                * (&output * &output).sum_dim_intlist(-1, false, Kind::Double).sqrt();
            sum += (dot / norms).sum(Kind::Double).double_value(&[]);
            count += example.ids.len() as i32;
        }
        assert!((turned - (1.0 - sum / f64::from(count))).abs() < 1e-5 && turned > 0.0, "layer {layer}: {turned}");
    }
}

#[test]
fn a_ledger_of_another_pruning_and_no_held_out_responses_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let teacher = with_useless_layer(&trained(Labels::Next), 2);
    assert!(matches!(run(folder.path(), &teacher, 1, 2).unwrap(), Ending::Stopped { .. }));
    let before = fs::read(folder.path().join("ledger.jsonl")).unwrap();
    let refused = |teacher: &Transformer, held_out: Vec<Example>, expected: &str, change: &dyn Fn(&mut Settings)| {
        let message = run_with(folder.path(), teacher, usize::MAX, held_out, change).unwrap_err().to_string();
        assert!(message.contains("ledger.jsonl` is of another pruning") && message.contains(expected), "{message}");
        assert!(message.contains("--restart prune"), "{message}");
        assert_eq!(fs::read(folder.path().join("ledger.jsonl")).unwrap(), before);
    };
    let same = || examples(15).split_off(12);
    refused(&with_useless_layer(&trained(Labels::InPlace), 2), same(), "its weights", &|_| {});
    refused(&trained(Labels::Next), same(), "its layers (4 there, 3 now)", &|_| {});
    refused(&teacher, examples(16).split_off(12), "the held-out responses", &|_| {});
    refused(&teacher, same(), "`prune.anchors` (5 there, 4 now)", &|settings| settings.anchors = 4);
    refused(&teacher, same(), "`prune.criterion`", &|settings| settings.criterion = Criterion::BlockInfluence);
    let none = run_with(folder.path(), &teacher, usize::MAX, Vec::new(), |_| {}).unwrap_err();
    assert!(matches!(none, PruneError::NoHoldout) && none.to_string().contains("`data.holdout`"), "{none}");
    // One that does not say what it belongs to, as an older version wrote it.
    let rest = before.iter().position(|&byte| byte == b'\n').unwrap() + 1;
    fs::write(folder.path().join("ledger.jsonl"), &before[rest..]).unwrap();
    let older = run(folder.path(), &teacher, 1, usize::MAX).unwrap_err().to_string();
    assert!(older.contains("older versions"), "{older}");
}

#[test]
fn a_ledger_that_contradicts_itself_or_a_checkpoint_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let teacher = with_useless_layer(&trained(Labels::Next), 2);
    let change = |settings: &mut Settings| (settings.remove, settings.recovery.steps) = (2, 0);
    let run = || run_with(folder.path(), &teacher, usize::MAX, examples(15).split_off(12), change);
    assert_eq!(run().unwrap(), Ending::Done);
    let path = folder.path().join("ledger.jsonl");
    let whole = fs::read_to_string(&path).unwrap();
    assert!(whole.contains("\"original_layer\":2"), "{whole}");
    let refused = |layer: &str, expected: &str| {
        fs::write(&path, whole.replacen("\"original_layer\":2", &format!("\"original_layer\":{layer}"), 1)).unwrap();
        let message = run().unwrap_err().to_string();
        assert!(message.contains("ledger.jsonl` cannot be gone on from") && message.contains(expected), "{message}");
        assert!(message.contains("--restart prune"), "{message}");
    };
    refused("9", "layer 9 was removed to leave 3 layers, but the drafter of 4 layers has only [0, 1, 2, 3]");
    let second = events(folder.path());
    let second = second.iter().rev().find_map(|event| if let Event::Removed { layer, .. } = event { Some(*layer) } else { None });
    // Another layer than that of the second removal.
    let other = if second == Some(0) { "1" } else { "0" };
    refused(other, &format!("by it the layers [{other}] are out of `"));
    refused(other, "layers-03`, whose drafter.json says [2]");
    fs::write(&path, &whole).unwrap();
    assert_eq!(run().unwrap(), Ending::Done);
}

#[test]
fn pruning_interrupted_anywhere_ends_as_uninterrupted() {
    let teacher = with_useless_layer(&trained(Labels::Next), 1);
    let weights = |folder: &Path, name: &str| fs::read(folder.join(name).join("model.safetensors")).ok();
    for (criterion, all) in [
        // Of the events 4 + 3 are measured layers, 2 · 5 are recovery steps; the search stops behind its one part only. Then the swap.
        (Criterion::Tau, &[1, 2, 3, 6][..]),
        (Criterion::BlockInfluence, &[1, 3]),
        (Criterion::LanguageModelLoss, &[1, 3]),
    ] {
        let run = |folder: &Path, stop_at: usize| {
            let change = |settings: &mut Settings| (settings.remove, settings.swap, settings.criterion) = (2, true, criterion);
            run_with(folder, &teacher, stop_at, examples(15).split_off(12), change).unwrap()
        };
        let whole = tempfile::tempdir().unwrap();
        assert_eq!(run(whole.path(), usize::MAX), Ending::Done);
        for every in all {
            let parts = tempfile::tempdir().unwrap();
            let mut starts = 0;
            while let Ending::Stopped { .. } = run(parts.path(), *every) {
                starts += 1;
                assert!(starts < 40, "every start must get further");
            }
            assert!(starts >= 2, "{starts} interruptions");
            assert_eq!(events(parts.path()), events(whole.path()), "{criterion:?}, stopping at every {every}th event");
            for name in ["layers-03", "layers-02", "layers-02-swapped"] {
                let found = weights(parts.path(), name);
                assert!(found == weights(whole.path(), name), "{name}, {criterion:?}, stopping at every {every}th event");
                assert!(found.is_some() || name.ends_with("swapped"), "{name}");
            }
            assert!(!["recover-03", "recover-02", "recover-02-swapped"].iter().any(|name| parts.path().join(name).exists()));
        }
    }
}

#[test]
fn more_layers_than_there_are_cannot_be_removed() {
    let folder = tempfile::tempdir().unwrap();
    let error = run(folder.path(), &trained(Labels::Next), 3, usize::MAX).unwrap_err();
    assert!(error.to_string().contains("`prune.remove` asks for 3 layers, but the drafter has 3"), "{error}");
    let error = pruner::pruning::check(1, 3, 3).unwrap_err();
    assert!(error.to_string().contains("`prune.remove` asks for 1 layer, but"), "{error}");
    assert!(fs::read_dir(folder.path()).unwrap().next().is_none());
    // Nothing to remove is no fault, however few layers there are.
    assert!(pruner::pruning::check(0, 28, 3).is_ok());
}
