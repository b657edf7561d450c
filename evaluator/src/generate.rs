//! Batched generation by the target alone: the built-in engine behind `regenerate`.
//!
//! Many responses grow side by side, each in its own lane of one cache. A lane that finishes takes the next prompt; when none waits,
//! the last running lane moves into its place, so that the running lanes stay the first ones. Prompts are taken longest first, so
//! that lanes of like length run together. A response does not depend on its neighbours (f32): rows meet in matrix products only.
//!
//! Shapes legend: see the crate `model`.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use data::responses::FinishReason;
use model::attention::StepAttention;
use model::{CachedAttention, KvCache, Piece, Transformer};
use tch::Tensor;

use crate::decode::{DecodeError, check_prompts};
use crate::room::allocate;
use crate::sampling::Sampler;

/// Rows that one prefill forward takes at most, unless a single prompt is longer.
const PREFILL_ROWS: usize = 2048;

/// How to generate.
#[derive(Debug, Clone)]
pub struct GenerateSettings {
    pub sampler: Sampler,
    pub stop_tokens: Vec<u32>,
    /// A response's longest length; 0 counts as 1.
    pub max_new_tokens: usize,
    /// Responses that grow at the same time; 0 counts as 1.
    pub lanes: usize,
}

/// What to answer.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// The counter that sampling draws from; the same for a prompt whatever else is generated.
    pub request: u64,
    pub ids: Vec<u32>,
}

/// A finished response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    /// Which of the prompts it answers.
    pub index: usize,
    /// The response, its stop token included.
    pub ids: Vec<u32>,
    pub finish_reason: FinishReason,
}

/// A response under way in a lane; its last token is not in the cache yet.
struct Running {
    index: usize,
    ids: Vec<u32>,
}

/// Answers all prompts; `on_response` is given each response as it finishes, and says whether to go on. `stop` is looked at after every
/// token; the responses under way are then dropped.
///
/// # Errors
/// A prompt the target cannot read, and what libtorch refuses.
pub fn generate(
    target: &Transformer,
    prompts: &[Prompt],
    settings: &GenerateSettings,
    stop: &AtomicBool,
    on_response: &mut dyn FnMut(Generated) -> ControlFlow<()>,
) -> Result<(), DecodeError> {
    let _no_grad = tch::no_grad_guard();
    check_prompts(target, prompts.iter().map(|prompt| prompt.ids.as_slice()))?;
    let longest = prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0);
    let lanes = settings.lanes.clamp(1, prompts.len().max(1));
    let mut cache = allocate("target", target, lanes, longest.saturating_add(settings.max_new_tokens))?;
    let mut waiting: Vec<usize> = (0..prompts.len()).collect();
    // Taken from the end.
    waiting.sort_by_key(|&index| (prompts[index].ids.len(), std::cmp::Reverse(index)));
    let mut running: Vec<Running> = Vec::new();
    while (!waiting.is_empty() || !running.is_empty()) && !stop.load(Ordering::Relaxed) {
        let first_new = running.len();
        let mut rows = 0;
        while running.len() < lanes
            && let Some(&index) = waiting.last()
            && (rows == 0 || rows + prompts[index].ids.len() <= PREFILL_ROWS)
        {
            rows += prompts[index].ids.len();
            waiting.pop();
            running.push(Running { index, ids: Vec::new() });
        }
        if first_new < running.len() {
            let chosen =
                torch::guarded("reading prompts", || prefill(target, &mut cache, prompts, &running, first_new, settings))?;
            running[first_new..].iter_mut().zip(chosen).for_each(|(lane, token)| lane.ids.push(token));
        } else {
            let chosen = torch::guarded("generating", || step(target, &mut cache, prompts, &running, settings))?;
            running.iter_mut().zip(chosen).for_each(|(lane, token)| lane.ids.push(token));
        }
        // From the last lane down, so that the lane moved into a gap has been looked at.
        for lane in (0..running.len()).rev() {
            let Some(finish_reason) = finished(&running[lane], settings) else { continue };
            let last = running.len() - 1;
            if lane < last {
                torch::guarded("moving a lane", || cache.move_lane(last, lane))?;
            }
            let Running { index, ids } = running.swap_remove(lane);
            cache.set_length(last, 0);
            if on_response(Generated { index, ids, finish_reason }).is_break() {
                return Ok(());
            }
        }
    }
    Ok(())
}

fn finished(lane: &Running, settings: &GenerateSettings) -> Option<FinishReason> {
    match lane.ids.last() {
        Some(last) if settings.stop_tokens.contains(last) => Some(FinishReason::Stop),
        Some(_) if lane.ids.len() >= settings.max_new_tokens => Some(FinishReason::Length),
        _ => None,
    }
}

/// Reads the prompts of the lanes from `first_new` on, in one forward without padding, and chooses their first tokens.
fn prefill(
    target: &Transformer,
    cache: &mut KvCache,
    prompts: &[Prompt],
    running: &[Running],
    first_new: usize,
    settings: &GenerateSettings,
) -> Vec<u32> {
    let device = target.device();
    let (mut ids, mut positions, mut last_rows, mut pieces) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (lane, work) in running.iter().enumerate().skip(first_new) {
        let prompt = &prompts[work.index].ids;
        cache.set_length(lane, 0);
        pieces.push(Piece::causal(lane, ids.len()..ids.len() + prompt.len(), device));
        ids.extend_from_slice(prompt);
        positions.extend(0..prompt.len());
        last_rows.push(ids.len() - 1);
    }
    let mut attention = CachedAttention::new(cache, pieces);
    let hidden_td = target.forward(&torch::ids_tensor(&ids, device), &torch::index_tensor(&positions, device), &mut attention);
    let logits_rv = target.logits(&hidden_td.index_select(0, &torch::index_tensor(&last_rows, device)));
    for (lane, work) in running.iter().enumerate().skip(first_new) {
        cache.set_length(lane, prompts[work.index].ids.len());
    }
    choose(&logits_rv, prompts, &running[first_new..], settings)
}

/// One more token for every running lane.
fn step(
    target: &Transformer,
    cache: &mut KvCache,
    prompts: &[Prompt],
    running: &[Running],
    settings: &GenerateSettings,
) -> Vec<u32> {
    let device = target.device();
    let ids: Vec<u32> = running.iter().filter_map(|lane| lane.ids.last().copied()).collect();
    let positions: Vec<usize> = (0..running.len()).map(|lane| cache.length(lane)).collect();
    let mut attention = StepAttention::new(cache, running.len(), device);
    let hidden_td = target.forward(&torch::ids_tensor(&ids, device), &torch::index_tensor(&positions, device), &mut attention);
    let logits_rv = target.logits(&hidden_td);
    for (lane, position) in positions.into_iter().enumerate() {
        cache.set_length(lane, position + 1);
    }
    choose(&logits_rv, prompts, running, settings)
}

/// The target's choice for each lane's next token.
fn choose(logits_rv: &Tensor, prompts: &[Prompt], lanes: &[Running], settings: &GenerateSettings) -> Vec<u32> {
    if settings.sampler.temperature <= 0.0 {
        return settings.sampler.choose(logits_rv, 0, &[]);
    }
    let choose = |(row, lane): (usize, &Running)| {
        let logits_1v = logits_rv.narrow(0, row as i64, 1);
        settings.sampler.choose(&logits_1v, prompts[lane.index].request, &[lane.ids.len()])
    };
    lanes.iter().enumerate().flat_map(choose).collect()
}
