//! The pruning stage: measure, remove, recover, repeat, always distilling from the unpruned drafter (ALGORITHMS: D3D's pruning with
//! recovery distillation).

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use configs::Criterion;
use data::supervision::Example;
use evaluator::decode::DecodeError;
use evaluator::replay::replay;
use model::Transformer;
use model::checkpoint::{self, CheckpointError, DrafterFile, TextFiles};
use tch::{Device, Kind};
use torch::TorchError;
use trainer::metrics::MetricSink;
use trainer::objective::Distillation;
use trainer::training::{Ending, Plan, TrainError, drafter_of};
use trainer::watching::StepReport;

use crate::choosing::{Choice, REPLAY_LANES, choose};
use crate::ledger::{Begun, End, Event, Ledger, Predicted, Swap, Swapped, TauLoss};
use crate::recovery::{Recovery, clear, recover};
use crate::search::{Blocks, Cost};
use crate::speed::SpeedModel;
use crate::swapping::{Pruned, swap};

/// What decides which layers go and when it ends.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Layers to remove at most.
    pub remove: usize,
    pub min_layers: usize,
    /// Share of the unpruned drafter's τ below which pruning ends.
    pub keep_tau: f64,
    /// Where it ends as well when the predicted speed no longer rises.
    pub speed: Option<SpeedModel>,
    /// Whether one removed layer is put back in the end and another taken out, if that is better.
    pub swap: bool,
    /// What tells which layer goes.
    pub criterion: Criterion,
    /// Blocks drawn from each held-out response for the search.
    pub anchors: usize,
    pub distillation: Distillation,
    /// The recovery's plan; its stage name is set for each depth.
    pub recovery: Plan,
}

/// The stage's inputs and where it writes.
pub struct Context<'a> {
    pub teacher: &'a Transformer,
    /// The unpruned checkpoint's name and description.
    pub parent: &'a str,
    pub drafter: DrafterFile,
    pub files: &'a TextFiles,
    pub folder: &'a Path,
    pub examples: &'a [Example],
    /// The examples' ids.
    pub ids: &'a [String],
    pub held_out: &'a [Example],
}

/// What happened, for whoever shows progress.
pub enum Progress<'a> {
    /// In this part of the held-out responses, so many of the layers still in the running have been measured.
    Measured {
        part: usize,
        parts: usize,
        done: usize,
        running: usize,
    },
    /// The search is done.
    Searched {
        depth: usize,
        losses: &'a [TauLoss],
        cost: Cost,
        seconds: f64,
    },
    /// What the layers that can best be spared cost, by blocks drawn at random and by exact replay.
    Replayed {
        losses: &'a [(TauLoss, TauLoss)],
    },
    /// Another criterion than τ was measured; by layer, the lowest can best be spared.
    Weighed {
        criterion: Criterion,
        scores: &'a [f64],
    },
    Removed {
        original_layer: usize,
        depth: usize,
        tau_before: f64,
        tau_after: f64,
    },
    Recovering(&'a StepReport),
    Recovered {
        depth: usize,
        tau: f64,
        tau_unpruned: f64,
        /// Whether `tau` is enough.
        keeps_tau: bool,
    },
    /// The speed with a drafter, and with the one of a layer more.
    Predicted {
        predicted: Predicted,
        before: Option<Predicted>,
    },
    SwapMeasured(&'a Swap),
    Swapped(&'a Swapped),
    /// A swap was asked for, but there is nothing to swap in: no removal was kept.
    SwapSkipped,
}

/// τ of a drafter by replay of the held-out responses, pooled.
pub(crate) type Tau<'a> = dyn Fn(&Transformer) -> Result<f64, DecodeError> + 'a;

/// Why pruning cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum PruneError {
    #[error(
        "`prune.remove` asks for {}, but the drafter has {depth} and `prune.min_layers` is {min_layers}; remove fewer", layers(*remove)
    )]
    TooMany { remove: usize, depth: usize, min_layers: usize },
    #[error("no held-out response to measure τ on; raise `data.holdout` or give more prompts")]
    NoHoldout,
    #[error("`{path}` is of another pruning; {differences}. Remove the folder to start again, or run with --restart prune")]
    OtherLedger { path: PathBuf, differences: String },
    #[error("`{path}` line {line}: {source}; remove the folder to start again, or run with --restart prune")]
    Line { path: PathBuf, line: usize, source: serde_json::Error },
    #[error("`{path}` cannot be gone on from: {problem}. Remove the folder to start again, or run with --restart prune")]
    Contradiction { path: PathBuf, problem: String },
    #[error("cannot read `{path}`: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write `{path}`: {source}")]
    Write { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Decode(#[from] DecodeError),
    #[error(transparent)]
    Torch(#[from] TorchError),
}

/// So many layers, in words.
pub fn layers(count: usize) -> String {
    if count == 1 { "1 layer".to_string() } else { format!("{count} layers") }
}

/// The folder name of a pruned checkpoint.
pub fn layers_name(depth: usize) -> String {
    format!("layers-{depth:02}")
}

/// The name of a recovery's folder and of its metrics.
pub fn recovery_name(depth: usize) -> String {
    format!("recover-{depth:02}")
}

/// Refuses to remove more layers than there are, before anything is loaded or trained.
pub fn check(remove: usize, min_layers: usize, depth: usize) -> Result<(), PruneError> {
    if remove > 0 && remove + min_layers.max(1) > depth { Err(PruneError::TooMany { remove, depth, min_layers }) } else { Ok(()) }
}

/// What this pruning's ledger belongs to.
fn begun(context: &Context<'_>, settings: &Settings) -> Begun {
    let bytes = |example: &Example| example.fingerprint().flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
    Begun {
        parent: context.parent.to_string(),
        layers: context.teacher.layers.len(),
        weights: fingerprint(context.teacher),
        held_out: data::files::sha256_hex(context.held_out.iter().flat_map(bytes).collect::<Vec<u8>>()),
        anchors: settings.anchors,
        seed: settings.recovery.packing.seed,
        criterion: settings.criterion,
    }
}

/// A hash of the first values of every tensor: training moves all of them, and reading the rest would take minutes of a large model.
fn fingerprint(model: &Transformer) -> String {
    const FIRST: i64 = 64;
    let _no_grad = tch::no_grad_guard();
    let mut bytes = Vec::new();
    for (name, tensor) in model.named_parameters() {
        bytes.extend_from_slice(name.as_bytes());
        let flat = tensor.flatten(0, -1);
        let first = flat.narrow(0, 0, FIRST.min(flat.size()[0])).to_device(Device::Cpu).to_kind(Kind::Double);
        bytes.extend((0..first.size()[0]).flat_map(|index| first.double_value(&[index]).to_le_bytes()));
    }
    data::files::sha256_hex(bytes)
}

/// Prunes to the end of the settings, going on from the ledger of an earlier start.
///
/// Each `layers-NN` folder is a whole checkpoint after its recovery; while a recovery runs, its own checkpoints lie in `recover-NN`. A swap's
/// checkpoint lies in `swap-NN` until it is measured, and only then among them.
///
/// # Errors
/// See [`PruneError`]; the ledger and finished checkpoints stay valid.
pub fn prune(
    context: &Context<'_>,
    settings: &Settings,
    sink: &mut dyn MetricSink,
    progress: &mut dyn FnMut(Progress<'_>),
    stop: &AtomicBool,
) -> Result<Ending, PruneError> {
    let unpruned = context.teacher.layers.len();
    check(settings.remove, settings.min_layers, unpruned)?;
    if context.held_out.is_empty() {
        return Err(PruneError::NoHoldout);
    }
    let path = context.folder.join("ledger.jsonl");
    let mut ledger = open_ledger(&path, begun(context, settings))?;
    let speed = settings.speed.as_ref();
    if let Some(model) = speed.filter(|model| ledger.times() != Some(&model.times)) {
        ledger.push(Event::Timed(model.times.clone())).map_err(cannot_write(&path))?;
    }
    let shape = settings.recovery.packing.shape;
    let tau_of =
        |model: &Transformer| replay(&drafter_of(model, shape), context.held_out, REPLAY_LANES).map(|replay| replay.tau_pooled);
    let tau_unpruned = tau_of(context.teacher)?;
    let mut speed_current = predict(context, settings, (context.teacher, tau_unpruned), None, &mut ledger, progress)?;
    // The loss of a language model knows of no blocks.
    let anchors = if settings.criterion == Criterion::LanguageModelLoss { 0 } else { settings.anchors };
    let blocks = Blocks::draw(context.held_out, shape, anchors, settings.recovery.packing.seed);

    let (mut current, mut tau_current) = (context.teacher.shallow_clone(), tau_unpruned);
    let (mut file, mut parent) = (context.drafter.clone(), context.parent.to_string());
    let mut alive: Vec<usize> = (0..unpruned).collect();
    let mut removed = Vec::new();
    let mut pruned = None;
    for depth in (unpruned - settings.remove..unpruned).rev() {
        let original_layer = match ledger.removed(depth) {
            Some(original_layer) if alive.contains(&original_layer) => original_layer,
            Some(gone) => {
                let has = format!("the drafter of {} has only {alive:?} of the unpruned one", layers(depth + 1));
                return Err(ledger.contradicts(format!("layer {gone} was removed to leave {}, but {has}", layers(depth))));
            }
            None => {
                let choice = Choice { current: &current, settings, blocks: &blocks, held_out: context.held_out, stop };
                let Some(layer) = choose(&choice, &mut ledger, progress)? else { return Ok(Ending::Stopped { step: 0 }) };
                let kept: Vec<usize> = (0..alive.len()).filter(|&index| index != layer).collect();
                let (tau_before, tau_after) = (tau_current, tau_of(&current.with_layers(&kept))?);
                let original_layer = alive[layer];
                let event = Event::Removed { depth, layer, original_layer, tau_before, tau_after };
                ledger.push(event).map_err(cannot_write(&path))?;
                progress(Progress::Removed { original_layer, depth, tau_before, tau_after });
                original_layer
            }
        };
        let kept: Vec<usize> = (0..alive.len()).filter(|&index| alive[index] != original_layer).collect();
        alive.retain(|&layer| layer != original_layer);
        removed.push(original_layer);
        let (folder, name) = (context.folder.join(layers_name(depth)), recovery_name(depth));
        // The folder appears whole, by a rename at the end of its recovery.
        if !folder.exists() {
            let start = current.with_layers(&kept);
            // The recovery has weights of its own.
            drop(current);
            let drafter = DrafterFile { removed_layers: removed.clone(), parent: Some(parent), layers: depth, ..file };
            let recovery = Recovery { start, drafter, name: name.clone(), folder: &folder };
            let ending = recover(context, settings, recovery, sink, progress, stop)?;
            if let Ending::Stopped { .. } = ending {
                return Ok(ending);
            }
        }
        clear(context, &name)?;
        (current, file) = load_pruned(context, &ledger, &folder, &removed)?;
        parent = layers_name(depth);
        let before = speed_current;
        let kept = match ledger.recovered(depth) {
            Some((tau, kept)) => {
                speed_current = predict(context, settings, (&current, tau), before, &mut ledger, progress)?;
                tau_current = tau;
                kept
            }
            None => {
                let tau = tau_of(&current)?;
                let keeps_tau = tau >= settings.keep_tau * tau_unpruned;
                progress(Progress::Recovered { depth, tau, tau_unpruned, keeps_tau });
                speed_current = predict(context, settings, (&current, tau), before, &mut ledger, progress)?;
                let rises =
                    speed_current.zip(before).is_none_or(|(now, before)| now.tokens_per_second > before.tokens_per_second);
                let (kept, end) = (keeps_tau && rises, end_after(depth, unpruned, settings, keeps_tau, rises));
                let event = Event::Recovered { depth, steps: settings.recovery.steps, tau, tau_unpruned, kept, end };
                ledger.push(event).map_err(cannot_write(&path))?;
                tau_current = tau;
                kept
            }
        };
        if !kept {
            break;
        }
        pruned = Some((depth, tau_current));
    }
    drop(current);
    match pruned {
        Some((depth, tau)) if settings.swap => {
            let removed = &removed[..unpruned - depth];
            let (model, file) = load_pruned(context, &ledger, &context.folder.join(layers_name(depth)), removed)?;
            swap(context, settings, Pruned { model, file, tau }, &tau_of, &mut ledger, sink, progress, stop)
        }
        None if settings.swap => {
            progress(Progress::SwapSkipped);
            Ok(Ending::Done)
        }
        _ => Ok(Ending::Done),
    }
}

/// Loads a pruned checkpoint, which has to be the one that the ledger tells of.
pub(crate) fn load_pruned(
    context: &Context<'_>,
    ledger: &Ledger,
    folder: &Path,
    removed: &[usize],
) -> Result<(Transformer, DrafterFile), PruneError> {
    let (model, file) = checkpoint::load(folder, context.teacher.kind(), context.teacher.device())?;
    if file.removed_layers != removed {
        return Err(ledger.contradicts(format!(
            "by it the layers {removed:?} are out of `{}`, whose drafter.json says {:?}",
            folder.display(),
            file.removed_layers
        )));
    }
    Ok((model, file))
}

/// Why no layer goes after the drafter of `depth` layers has recovered; `None` where one may.
fn end_after(depth: usize, unpruned: usize, settings: &Settings, keeps_tau: bool, rises: bool) -> Option<End> {
    let last = depth + settings.remove == unpruned;
    match (keeps_tau, rises) {
        (false, _) => Some(End::Tau),
        (true, false) => Some(End::Speed),
        (true, true) if !last => None,
        (true, true) if depth == settings.min_layers.max(1) => Some(End::MinLayers),
        (true, true) => Some(End::Asked),
    }
}

/// Opens the ledger of this pruning, or begins it.
fn open_ledger(path: &Path, begun: Begun) -> Result<Ledger, PruneError> {
    let mut ledger = Ledger::open(path)?;
    match ledger.begun() {
        Some(found) if *found == begun => {}
        None if ledger.events.is_empty() => ledger.push(Event::Begun(begun)).map_err(cannot_write(path))?,
        found => {
            let differences = found.map_or("it does not say of which, as older versions wrote it".to_string(), |found| {
                format!("other there than now: {}", found.differences(&begun))
            });
            return Err(PruneError::OtherLedger { path: path.to_path_buf(), differences });
        }
    }
    Ok(ledger)
}

/// The speed with a drafter of this τ, where pruning stops by it; what the ledger knows is not measured again, but told again.
fn predict(
    context: &Context<'_>,
    settings: &Settings,
    (model, tau): (&Transformer, f64),
    before: Option<Predicted>,
    ledger: &mut Ledger,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Option<Predicted>, PruneError> {
    let Some(speed) = &settings.speed else { return Ok(None) };
    let known = ledger.predicted(model.layers.len());
    let predicted = match known {
        None => speed.predict(drafter_of(model, settings.recovery.packing.shape), tau, context.held_out)?,
        known => known,
    };
    if let Some(predicted) = predicted {
        if known.is_none() {
            ledger.push(Event::Predicted(predicted)).map_err(|source| ledger.cannot_write(source))?;
        }
        progress(Progress::Predicted { predicted, before });
    }
    Ok(predicted)
}

/// What to say when a file cannot be written.
pub(crate) fn cannot_write(path: &Path) -> impl FnOnce(io::Error) -> PruneError + use<> {
    let path = path.to_path_buf();
    move |source| PruneError::Write { path, source }
}
