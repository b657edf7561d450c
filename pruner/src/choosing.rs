//! Which layer goes: by τ on blocks drawn at random, or by another criterion. The layers that can best be spared are replayed as well.
//!
//! Blocks drawn at random are many and independent, so they decide. Exact replay visits only the anchors that decoding would, in their
//! order, and says what decoding itself would lose; it needs a forward for each round, so it is asked about a short list.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use configs::Criterion;
use data::supervision::Example;
use evaluator::decode::DecodeError;
use evaluator::replay::replay;
use model::Transformer;
use trainer::training::drafter_of;

use crate::criteria::{least, mean_scores, weigh};
use crate::ledger::{Event, Ledger, TauLoss};
use crate::pruning::{Progress, PruneError, Settings};
use crate::search::{Blocks, Committed, Counting, count, tau_loss};

/// Responses whose next blocks are drafted in one forward when τ is replayed.
pub(crate) const REPLAY_LANES: usize = 16;

/// Layers that are replayed in each search.
const SHORT_LIST: usize = 3;

/// What the choice is made from.
pub(crate) struct Choice<'a> {
    pub current: &'a Transformer,
    pub settings: &'a Settings,
    pub blocks: &'a Blocks,
    pub held_out: &'a [Example],
    pub stop: &'a AtomicBool,
}

/// The layer that goes, an index into those of the current drafter; `None` when asked to stop. What the ledger knows is not measured again.
pub(crate) fn choose(
    choice: &Choice<'_>,
    ledger: &mut Ledger,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Option<usize>, PruneError> {
    if choice.settings.criterion != Criterion::Tau {
        return choose_by_score(choice, ledger, progress);
    }
    if measure(choice, ledger, progress)?.is_break() || replay_short_list(choice, ledger, progress)?.is_break() {
        return Ok(None);
    }
    Ok(Some(least_harmful(&ledger.losses(choice.current.layers.len()))))
}

/// The layer of the least loss among those that were measured to the end, the first of equals.
pub fn least_harmful(losses: &[TauLoss]) -> usize {
    short_list(losses).first().map_or(0, |loss| loss.layer)
}

/// The layers that were measured to the end, by their loss, the least harmful first.
fn short_list(losses: &[TauLoss]) -> Vec<&TauLoss> {
    let most = losses.iter().map(|loss| loss.blocks).max().unwrap_or(0);
    let mut measured: Vec<&TauLoss> = losses.iter().filter(|loss| loss.blocks == most).collect();
    measured.sort_by(|one, other| one.tau_loss.total_cmp(&other.tau_loss).then(one.layer.cmp(&other.layer)));
    measured
}

fn stopped(choice: &Choice<'_>) -> ControlFlow<()> {
    if choice.stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

/// Measures what τ loses without each layer, going on from what the ledger knows; a break when asked to stop.
fn measure(
    choice: &Choice<'_>,
    ledger: &mut Ledger,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<ControlFlow<()>, PruneError> {
    let (depth, seed, blocks) = (choice.current.layers.len(), choice.settings.recovery.packing.seed, choice.blocks);
    let started = Instant::now();
    let mut counted = ledger.counted(depth);
    let (mut failed, mut flow) = (None, ControlFlow::Continue(()));
    torch::guarded("measuring layers", || {
        count(choice.current, blocks, &mut counted, seed, &mut |counting| match counting {
            Counting::Candidates { part, done, running } => {
                progress(Progress::Measured { part, parts: blocks.parts(), done, running });
                ControlFlow::Continue(())
            }
            Counting::Part(part) => {
                failed = ledger.push(Event::Counted { depth, part: part.clone() }).err();
                flow = stopped(choice);
                if failed.is_some() { ControlFlow::Break(()) } else { flow }
            }
        });
    })?;
    failed.map_or(Ok(()), Err).map_err(|source| ledger.cannot_write(source))?;
    if flow.is_break() {
        return Ok(flow);
    }
    let known = ledger.losses(depth).len();
    let (losses, cost) = (counted.losses(depth, seed), blocks.cost(&counted, depth));
    for loss in &losses[known.min(losses.len())..] {
        ledger.push(Event::TauLoss(loss.clone())).map_err(|source| ledger.cannot_write(source))?;
    }
    if !ledger.events.iter().any(|event| matches!(event, Event::Searched { depth: found, .. } if *found == depth)) {
        ledger.push(Event::Searched { depth, cost }).map_err(|source| ledger.cannot_write(source))?;
    }
    progress(Progress::Searched { depth, losses: &losses, cost, seconds: started.elapsed().as_secs_f64() });
    Ok(ControlFlow::Continue(()))
}

/// Replays the layers that can best be spared.
fn replay_short_list(
    choice: &Choice<'_>,
    ledger: &mut Ledger,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<ControlFlow<()>, PruneError> {
    let (depth, seed) = (choice.current.layers.len(), choice.settings.recovery.packing.seed);
    let losses = ledger.losses(depth);
    let list: Vec<&TauLoss> = short_list(&losses).into_iter().take(SHORT_LIST).collect();
    let counts = |model: &Transformer| -> Result<Committed, DecodeError> {
        let replay = replay(&drafter_of(model, choice.settings.recovery.packing.shape), choice.held_out, REPLAY_LANES)?;
        Ok(replay.per_response.into_iter().map(|(rounds, committed)| (committed, rounds)).collect())
    };
    let known = ledger.replay_losses(depth).len();
    let mut with: Option<Committed> = None;
    for loss in list.iter().skip(known) {
        let with: &Committed = match &mut with {
            Some(with) => with,
            absent => absent.insert(counts(choice.current)?),
        };
        let kept: Vec<usize> = (0..depth).filter(|&index| index != loss.layer).collect();
        let without = counts(&choice.current.with_layers(&kept))?;
        let exact = tau_loss(depth, loss.layer, with, &without, seed);
        ledger.push(Event::ReplayLoss(exact)).map_err(|source| ledger.cannot_write(source))?;
        if stopped(choice).is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    let both: Vec<(TauLoss, TauLoss)> = list.into_iter().cloned().zip(ledger.replay_losses(depth)).collect();
    progress(Progress::Replayed { losses: &both });
    Ok(ControlFlow::Continue(()))
}

/// Chooses by another criterion than τ.
fn choose_by_score(
    choice: &Choice<'_>,
    ledger: &mut Ledger,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Option<usize>, PruneError> {
    let (depth, criterion, blocks) = (choice.current.layers.len(), choice.settings.criterion, choice.blocks);
    let known = ledger.weighed(depth).len();
    let (mut part, mut failed, mut flow) = (known, None, ControlFlow::Continue(()));
    torch::guarded("weighing layers", || {
        weigh(choice.current, blocks, criterion, known, &mut |weighed| {
            progress(Progress::Measured { part, parts: blocks.parts(), done: depth, running: depth });
            part += 1;
            failed = ledger.push(Event::Weighed { depth, part: weighed }).err();
            flow = stopped(choice);
            if failed.is_some() { ControlFlow::Break(()) } else { flow }
        });
    })?;
    failed.map_or(Ok(()), Err).map_err(|source| ledger.cannot_write(source))?;
    if flow.is_break() {
        return Ok(None);
    }
    let scores = mean_scores(&ledger.weighed(depth));
    progress(Progress::Weighed { criterion, scores: &scores });
    Ok(Some(least(&scores)))
}
