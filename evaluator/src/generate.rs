//! Batched generation by the target alone: the built-in engine behind `regenerate`.
//!
//! Many responses grow side by side, each in its own lane of one cache, which is allocated once. A lane that finishes takes the next
//! prompt; when none waits, the last running lane moves into its place, so that the running lanes stay the first ones. Prompts are taken
//! longest first out of a pool that is filled again when it is empty, so that lanes of like length run together. A response does not
//! depend on its neighbours (f32): rows meet in matrix products only.
//!
//! Shapes legend: see the crate `model`.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use data::engine::{Answer, Conversations, Question};
use data::responses::FinishReason;
use model::attention::StepAttention;
use model::{CachedAttention, KvCache, Piece, Transformer};
use tch::Tensor;

use crate::decode::{DecodeError, check_prompts};
use crate::room::allocate;
use crate::sampling::{Sampler, TokenPlace};

/// Rows that one prefill forward takes at most, unless a single prompt is longer.
const PREFILL_ROWS: usize = 2048;

/// How to generate.
#[derive(Debug, Clone)]
pub struct GenerateSettings {
    pub sampler: Sampler,
    pub stop_tokens: Vec<u32>,
    /// A response's longest length; 0 counts as 1.
    pub max_new_tokens: usize,
    /// No prompt has more tokens.
    pub longest_prompt: usize,
    /// Responses that grow at the same time; 0 counts as 1.
    pub lanes: usize,
}

/// More lanes than these make a step no more efficient: reading the weights is then a small part of it.
const MOST_LANES: u128 = 128;

/// Bytes for keys and values where the device does not tell how many are free.
const ROOM_UNKNOWN: u64 = 16_000_000_000;

/// As many lanes of `slots` tokens as pay off and take no more than half of what is free on the target's device, which so many processes
/// share if it is a CPU; 1 at least.
pub fn lanes_with_room(target: &Transformer, slots: usize, processes: usize) -> usize {
    let room = torch::memory::free_bytes(target.device()).map_or(ROOM_UNKNOWN, |free| free / 2 / processes.max(1) as u64);
    let one = KvCache::bytes(&target.config, 1, slots, target.kind()).max(1);
    (u128::from(room) / one).clamp(1, MOST_LANES) as usize
}

/// Questions in the pool when it has just been filled, for every lane.
const QUESTIONS_PER_LANE: usize = 16;

/// A response under way in a lane; its last token is not in the cache yet.
struct Running {
    question: Question,
    ids: Vec<u32>,
}

/// Answers all questions of `conversations` with exact ids. A question that the target cannot read gets a reason in an answer's place.
/// `stop` is looked at after every token; the responses under way are then dropped.
///
/// # Errors
/// A cache for which there is no room, and what libtorch refuses.
pub fn generate(
    target: &Transformer,
    conversations: &mut dyn Conversations,
    settings: &GenerateSettings,
    stop: &AtomicBool,
) -> Result<(), DecodeError> {
    let _no_grad = tch::no_grad_guard();
    let lanes = settings.lanes.max(1);
    let mut cache = allocate("target", target, lanes, settings.longest_prompt.saturating_add(settings.max_new_tokens))?;
    // Taken from the end.
    let mut waiting: Vec<Question> = Vec::new();
    let mut running: Vec<Running> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        if waiting.is_empty() && running.len() < lanes {
            waiting = match fill(target, conversations, settings, lanes) {
                ControlFlow::Continue(questions) => questions,
                ControlFlow::Break(()) => return Ok(()),
            };
            if waiting.is_empty() && running.is_empty() {
                return Ok(());
            }
        }
        let first_new = running.len();
        let mut rows = 0;
        while running.len() < lanes
            && let Some(question) = waiting.pop_if(|next| rows == 0 || rows + next.prompt_ids.len() <= PREFILL_ROWS)
        {
            rows += question.prompt_ids.len();
            running.push(Running { question, ids: Vec::new() });
        }
        if first_new < running.len() {
            let chosen = torch::guarded("reading prompts", || prefill(target, &mut cache, &running, first_new, settings))?;
            running[first_new..].iter_mut().zip(chosen).for_each(|(lane, token)| lane.ids.push(token));
        } else {
            let chosen = torch::guarded("generating", || step(target, &mut cache, &running, settings))?;
            running.iter_mut().zip(chosen).for_each(|(lane, token)| lane.ids.push(token));
        }
        // From the last lane down, so that the lane moved into a gap has been looked at.
        for lane in (0..running.len()).rev() {
            let Some(finish_reason) = finished(&running[lane], settings) else { continue };
            let last = running.len() - 1;
            if lane < last {
                torch::guarded("moving a lane", || cache.move_lane(last, lane))?;
            }
            let Running { question, ids } = running.swap_remove(lane);
            cache.set_length(last, 0);
            if conversations.answer(question.key, Ok(Answer { ids: Some(ids), text: None, finish_reason })).is_break() {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// The next questions, shortest first; empty when there is nothing to ask now.
fn fill(
    target: &Transformer,
    conversations: &mut dyn Conversations,
    settings: &GenerateSettings,
    lanes: usize,
) -> ControlFlow<(), Vec<Question>> {
    let mut questions = Vec::new();
    while questions.len() < QUESTIONS_PER_LANE.saturating_mul(lanes)
        && let Some(question) = conversations.next()
    {
        match readable(target, &question.prompt_ids, settings.longest_prompt) {
            Ok(()) => questions.push(question),
            Err(reason) => conversations.answer(question.key, Err(reason))?,
        }
    }
    questions.sort_by_key(|question| (question.prompt_ids.len(), std::cmp::Reverse(question.key)));
    ControlFlow::Continue(questions)
}

fn readable(target: &Transformer, prompt: &[u32], longest: usize) -> Result<(), String> {
    check_prompts(target, std::iter::once(prompt)).map_err(|error| error.to_string())?;
    if prompt.len() > longest {
        return Err(format!("its prompt has {} tokens, and there is room for {longest}", prompt.len()));
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
    running: &[Running],
    first_new: usize,
    settings: &GenerateSettings,
) -> Vec<u32> {
    let device = target.device();
    let (mut ids, mut positions, mut last_rows, mut pieces) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (lane, work) in running.iter().enumerate().skip(first_new) {
        let prompt = &work.question.prompt_ids;
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
        cache.set_length(lane, work.question.prompt_ids.len());
    }
    choose(&logits_rv, &running[first_new..], settings)
}

/// One more token for every running lane.
fn step(target: &Transformer, cache: &mut KvCache, running: &[Running], settings: &GenerateSettings) -> Vec<u32> {
    let device = target.device();
    let ids: Vec<u32> = running.iter().filter_map(|lane| lane.ids.last().copied()).collect();
    let positions: Vec<usize> = (0..running.len()).map(|lane| cache.length(lane)).collect();
    let mut attention = StepAttention::new(cache, running.len(), device);
    let hidden_td = target.forward(&torch::ids_tensor(&ids, device), &torch::index_tensor(&positions, device), &mut attention);
    let logits_rv = target.logits(&hidden_td);
    for (lane, position) in positions.into_iter().enumerate() {
        cache.set_length(lane, position + 1);
    }
    choose(&logits_rv, running, settings)
}

/// The target's choice for each lane's next token.
fn choose(logits_rv: &Tensor, lanes: &[Running], settings: &GenerateSettings) -> Vec<u32> {
    let place = |lane: &Running| TokenPlace { request: lane.question.counter, position: lane.ids.len() };
    settings.sampler.choose(logits_rv, &lanes.iter().map(place).collect::<Vec<_>>())
}
