//! The last step: put one removed layer back, take another out, and keep the result if its τ is better after recovery. Leaving layers out
//! one by one does not find the best set of them, since what one costs depends on the others (EvoPress, <https://arxiv.org/abs/2410.14649>).
//!
//! A layer comes back with the unpruned drafter's weights. For each of them the search finds the layer that can then best be spared, on the
//! same blocks as always; the pair with the highest τ recovers.

use std::fs;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use model::Transformer;
use model::checkpoint::{self, DrafterFile};
use trainer::metrics::MetricSink;
use trainer::training::Ending;

use crate::choosing::least_harmful;
use crate::ledger::{Event, Ledger, Swap, Swapped};
use crate::pruning::{Context, Progress, PruneError, Settings, Tau, cannot_write, layers_name, recovery_name};
use crate::recovery::{Recovery, clear, recover};
use crate::search::{Blocks, Counted, Counting, count};

/// The pruned drafter that a swap starts from.
pub(crate) struct Pruned {
    pub model: Transformer,
    pub file: DrafterFile,
    /// By replay.
    pub tau: f64,
}

/// The folder name of the checkpoint that a swap gave.
pub fn swapped_name(depth: usize) -> String {
    format!("{}-swapped", layers_name(depth))
}

/// The name of a swap's recovery and of its metrics.
pub fn swap_recovery_name(depth: usize) -> String {
    format!("{}-swapped", recovery_name(depth))
}

/// Swaps, going on from what the ledger knows.
#[allow(clippy::too_many_arguments)]
pub(crate) fn swap(
    context: &Context<'_>,
    settings: &Settings,
    pruned: &Pruned,
    tau_of: &Tau<'_>,
    ledger: &mut Ledger,
    sink: &mut dyn MetricSink,
    progress: &mut dyn FnMut(Progress<'_>),
    stop: &AtomicBool,
) -> Result<Ending, PruneError> {
    let depth = pruned.model.layers.len();
    let blocks =
        Blocks::draw(context.held_out, settings.recovery.packing.shape, settings.anchors, settings.recovery.packing.seed);
    for &put_back in &pruned.file.removed_layers {
        if ledger.swaps().iter().any(|swap| swap.put_back == put_back) {
            continue;
        }
        let Some(swap) = measure(context, settings, pruned, put_back, &blocks, stop)? else {
            return Ok(Ending::Stopped { step: 0 });
        };
        progress(Progress::SwapMeasured(&swap));
        ledger.push(Event::SwapMeasured(swap)).map_err(|source| ledger.cannot_write(source))?;
        if stop.load(Ordering::Relaxed) {
            return Ok(Ending::Stopped { step: 0 });
        }
    }
    let swaps = ledger.swaps();
    // The first of equals.
    let Some(best) = swaps.iter().rev().max_by(|one, other| one.tau.total_cmp(&other.tau)) else { return Ok(Ending::Done) };
    let (folder, name) = (context.folder.join(swapped_name(depth)), swap_recovery_name(depth));
    if ledger.swapped().is_none() && !folder.exists() {
        let (with, layers) = put_back(context.teacher, pruned, best.put_back);
        let kept: Vec<usize> = (0..=depth).filter(|&index| layers[index] != best.take_out).collect();
        let others = pruned.file.removed_layers.iter().copied().filter(|&layer| layer != best.put_back);
        let drafter = DrafterFile {
            removed_layers: others.chain([best.take_out]).collect(),
            parent: Some(layers_name(depth)),
            ..pruned.file.clone()
        };
        let start = with.with_layers(&kept);
        let recovery = Recovery { start: &start, drafter, name: name.clone(), folder: &folder };
        let ending = recover(context, settings, recovery, sink, progress, stop)?;
        if let Ending::Stopped { .. } = ending {
            return Ok(ending);
        }
    }
    clear(context, &name)?;
    let swapped = match ledger.swapped() {
        Some(swapped) => swapped.clone(),
        None => {
            let (model, _) = checkpoint::load(&folder, context.teacher.kind(), context.teacher.device())?;
            let tau = tau_of(&model)?;
            let kept = tau > pruned.tau;
            let swapped = Swapped { put_back: best.put_back, take_out: best.take_out, depth, tau_before: pruned.tau, tau, kept };
            ledger.push(Event::Swapped(swapped.clone())).map_err(|source| ledger.cannot_write(source))?;
            progress(Progress::Swapped(&swapped));
            swapped
        }
    };
    if !swapped.kept && folder.exists() {
        fs::remove_dir_all(&folder).map_err(cannot_write(&folder))?;
    }
    Ok(Ending::Done)
}

/// The pruned drafter with one layer of the unpruned one at its old place, and what each layer is numbered there.
fn put_back(unpruned: &Transformer, pruned: &Pruned, layer: usize) -> (Transformer, Vec<usize>) {
    let is_alive = |index: &usize| *index == layer || !pruned.file.removed_layers.contains(index);
    let layers: Vec<usize> = (0..unpruned.layers.len()).filter(is_alive).collect();
    let place = layers.iter().position(|&index| index == layer).unwrap_or(0);
    let mut order: Vec<usize> = (0..pruned.model.layers.len()).collect();
    // Any layer holds the place until the right one is there.
    order.insert(place, 0);
    let mut with = pruned.model.with_layers(&order);
    if let Some(back) = unpruned.with_layers(&[layer]).layers.pop() {
        with.layers[place] = back;
    }
    (with, layers)
}

/// What can best be spared when a layer is back; `None` when asked to stop.
fn measure(
    context: &Context<'_>,
    settings: &Settings,
    pruned: &Pruned,
    layer: usize,
    blocks: &Blocks,
    stop: &AtomicBool,
) -> Result<Option<Swap>, PruneError> {
    let (with, layers) = put_back(context.teacher, pruned, layer);
    let place = layers.iter().position(|&index| index == layer);
    let (depth, seed) = (layers.len(), settings.recovery.packing.seed);
    let mut counted = Counted::sparing(place);
    let mut flow = ControlFlow::Continue(());
    torch::guarded("measuring swaps", || {
        count(&with, blocks, &mut counted, seed, &mut |counting| {
            if let (Counting::Part(_), true) = (counting, stop.load(Ordering::Relaxed)) {
                flow = ControlFlow::Break(());
            }
            flow
        });
    })?;
    if flow.is_break() {
        return Ok(None);
    }
    let losses = counted.losses(depth, seed);
    let least = least_harmful(&losses);
    let tau = losses.iter().find(|loss| loss.layer == least).map_or(0.0, |loss| loss.tau_without);
    Ok(Some(Swap { put_back: layer, take_out: layers[least], tau }))
}
