//! The last step: put one removed layer back, take another out, and keep the result if its τ is better after recovery. Leaving layers out
//! one by one does not find the best set of them, since what one costs depends on the others (EvoPress, <https://arxiv.org/abs/2410.14649>).
//!
//! A layer comes back with the unpruned drafter's weights. For each of them the search finds the layer that can then best be spared, on the
//! same blocks as always; the pair with the highest τ recovers.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use model::Transformer;
use model::checkpoint::DrafterFile;
use trainer::metrics::MetricSink;
use trainer::training::Ending;

use crate::choosing::least_harmful;
use crate::ledger::{Event, Ledger, Swap, Swapped};
use crate::pruning::{
    Context, Progress, PruneError, Settings, Tau, cannot_write, layers, layers_name, load_pruned, recovery_name,
};
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

/// Where that checkpoint waits until it is known whether it is kept. No name of a pruned checkpoint: whoever follows the run would score it.
fn waiting_name(depth: usize) -> String {
    format!("swap-{depth:02}")
}

/// Whether the swap's recovery is done: its checkpoint is there, or was no better and is gone.
pub(crate) fn swap_has_recovered(folder: &Path, ledger: &Ledger, depth: usize) -> bool {
    let rejected = ledger.swapped().is_some_and(|swapped| swapped.depth == depth && !swapped.kept);
    rejected || [waiting_name(depth), swapped_name(depth)].iter().any(|name| folder.join(name).exists())
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
    pruned: Pruned,
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
        let Some(swap) = measure(context, settings, &pruned, put_back, &blocks, stop)? else {
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
    let Swap { put_back: back, take_out, .. } = *best;
    let Pruned { model, file, tau: tau_before } = pruned;
    if !file.removed_layers.contains(&back) || file.removed_layers.contains(&take_out) {
        let out = format!("but of the drafter of {} the layers {:?} are out", layers(depth), file.removed_layers);
        return Err(ledger.contradicts(format!("layer {back} is to come back and layer {take_out} to go, {out}")));
    }
    let removed: Vec<usize> = file.removed_layers.iter().copied().filter(|&layer| layer != back).chain([take_out]).collect();
    let [waiting, kept_as] = [waiting_name(depth), swapped_name(depth)].map(|name| context.folder.join(name));
    if ledger.swapped().is_none() && kept_as.exists() {
        // An older version had it wait there.
        fs::rename(&kept_as, &waiting).map_err(cannot_write(&waiting))?;
    }
    let name = swap_recovery_name(depth);
    if swap_has_recovered(context.folder, ledger, depth) {
        drop(model);
    } else {
        let (with, layers) = put_back(context.teacher, &model, &file.removed_layers, back);
        let kept: Vec<usize> = (0..=depth).filter(|&index| layers[index] != take_out).collect();
        let start = with.with_layers(&kept);
        // The recovery has weights of its own.
        drop((model, with));
        let drafter = DrafterFile { removed_layers: removed.clone(), parent: Some(layers_name(depth)), ..file };
        let recovery = Recovery { start, drafter, name: name.clone(), folder: &waiting };
        let ending = recover(context, settings, recovery, sink, progress, stop)?;
        if let Ending::Stopped { .. } = ending {
            return Ok(ending);
        }
    }
    clear(context, &name)?;
    let kept = match ledger.swapped() {
        Some(swapped) => swapped.kept,
        None => {
            let tau = tau_of(&load_pruned(context, ledger, &waiting, &removed)?.0)?;
            let swapped = Swapped { put_back: back, take_out, depth, tau_before, tau, kept: tau > tau_before };
            ledger.push(Event::Swapped(swapped.clone())).map_err(|source| ledger.cannot_write(source))?;
            progress(Progress::Swapped(&swapped));
            swapped.kept
        }
    };
    if kept && !kept_as.exists() {
        fs::rename(&waiting, &kept_as).map_err(cannot_write(&kept_as))?;
    }
    // A start that was killed may have left either.
    for left in [Some(&waiting), (!kept).then_some(&kept_as)].into_iter().flatten().filter(|left| left.exists()) {
        fs::remove_dir_all(left).map_err(cannot_write(left))?;
    }
    Ok(Ending::Done)
}

/// The pruned drafter with one layer of the unpruned one at its old place, and what each layer is numbered there.
fn put_back(unpruned: &Transformer, pruned: &Transformer, removed: &[usize], layer: usize) -> (Transformer, Vec<usize>) {
    let is_alive = |index: &usize| *index == layer || !removed.contains(index);
    let layers: Vec<usize> = (0..unpruned.layers.len()).filter(is_alive).collect();
    let place = layers.iter().position(|&index| index == layer).unwrap_or(0);
    let mut order: Vec<usize> = (0..pruned.layers.len()).collect();
    // Any layer holds the place until the right one is there.
    order.insert(place, 0);
    let mut with = pruned.with_layers(&order);
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
    let (with, layers) = put_back(context.teacher, &pruned.model, &pruned.file.removed_layers, layer);
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
