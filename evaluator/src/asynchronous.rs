//! Drafting ahead while the target verifies: two threads, each with its own model, cache and share of the cores.
//!
//! The target runs the loop of [`crate::decode`] on the calling thread; the drafter lives on a second one for the whole benchmark.
//! They exchange a few numbers a round:
//!
//! ```text
//! target:   prefill ── first token ─▶     verify x0 d1…dk ── outcome ─▶      verify next block ──▶
//! drafter:  prefill                 block ─▶ pack: all likely outcomes  hit: at once ─▶ next pack
//!                                                                       miss: block ─▶
//! ```
//!
//! A pack takes in the block under verification as clean tokens, so their keys and values are there whichever outcome comes, and
//! drafts one block for each continuation of the fan-out.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use model::{KvCache, Transformer};

use crate::decode::{DecodeError, News, OnText, Proposal, Proposer, Settings, Span, check_drafter, decode_prompts, text_slots};
use crate::drafter::{Block, Drafter, LaneWork};
use crate::fan_out::{Continuation, Draft, Lookup, look_up, rectangle};
use crate::verification::Verdict;

/// Decodes with target and drafter running at the same time. On a CPU each gets its share of the cores.
///
/// # Errors
/// As the other decoders; a failure on either thread ends both.
pub fn asynchronous(
    target: &Transformer,
    drafter: &mut Drafter,
    prompts: &[Vec<u32>],
    settings: &Settings,
    on_text: &mut OnText<'_>,
) -> Result<(), DecodeError> {
    check_drafter(target, drafter)?;
    let longest_draft = drafter.block_size - 1;
    let shares = Shares::take();
    let drafter_threads = shares.drafter;
    let (orders, incoming) = channel();
    let (outgoing, proposals) = channel();
    std::thread::scope(|scope| {
        let slots = text_slots(prompts, settings);
        let worker = scope.spawn(move || {
            torch::set_num_threads(drafter_threads);
            torch::guarded("drafting ahead", || run_drafter(drafter, slots, settings, &incoming, &outgoing))?
        });
        let mut remote = Remote { orders, proposals, longest_draft };
        let decoded = decode_prompts(target, &mut remote, prompts, settings, on_text);
        // Without a sender the drafter's loop ends; then its own error, if any, is the cause of ours.
        drop(remote);
        match worker.join() {
            Ok(Ok(())) => decoded,
            Ok(Err(error)) => Err(error),
            Err(_) => Err(DecodeError::DrafterThread("it panicked".to_string())),
        }
    })
}

/// Gives the calling thread the target's share of the cores, and all of its own back when dropped.
struct Shares {
    before: i32,
    drafter: usize,
}

impl Shares {
    fn take() -> Self {
        let before = tch::get_num_threads();
        let threads = usize::try_from(before).unwrap_or(1);
        let target = (threads / 2).max(1);
        torch::set_num_threads(target);
        Self { before, drafter: threads.saturating_sub(target).max(1) }
    }
}

impl Drop for Shares {
    fn drop(&mut self) {
        tch::set_num_threads(self.before);
    }
}

/// What the target's thread sends.
enum Order<'p> {
    Start(&'p [u32]),
    Draft(News),
}

/// The drafter as the target's thread sees it.
struct Remote<'p> {
    orders: Sender<Order<'p>>,
    proposals: Receiver<Proposal>,
    longest_draft: usize,
}

impl<'p> Remote<'p> {
    fn send(&self, order: Order<'p>) -> Result<(), DecodeError> {
        self.orders.send(order).map_err(|_| gone())
    }
}

fn gone() -> DecodeError {
    DecodeError::DrafterThread("it no longer answers".to_string())
}

impl<'p> Proposer<'p> for Remote<'p> {
    fn start(&mut self, prompt: &'p [u32]) -> Result<(), DecodeError> {
        self.send(Order::Start(prompt))
    }

    fn propose(&mut self, news: News) -> Result<Proposal, DecodeError> {
        self.send(Order::Draft(news))?;
        self.proposals.recv().map_err(|_| gone())
    }

    fn longest_draft(&self) -> usize {
        self.longest_draft
    }
}

/// The drafter's thread: answers each order at once if it can, then drafts ahead. Ends when the target's side is gone.
fn run_drafter(
    drafter: &Drafter,
    slots: usize,
    settings: &Settings,
    orders: &Receiver<Order<'_>>,
    proposals: &Sender<Proposal>,
) -> Result<(), DecodeError> {
    let _no_grad = tch::no_grad_guard();
    let mut cache = drafter.new_cache(1, slots, pack_rows(drafter.block_size, settings));
    let mut ahead: Option<Ahead> = None;
    for order in orders {
        match order {
            Order::Start(prompt) => {
                ahead = None;
                cache.set_length(0, 0);
                drafter.draft(&mut cache, &[LaneWork { lane: 0, clean: prompt, blocks: &[] }], 1)?;
            }
            Order::Draft(news) => {
                let (anchor, draft, proposal) = answer(drafter, &mut cache, ahead.take(), news, settings)?;
                if proposals.send(proposal).is_err() {
                    break;
                }
                ahead = Some(draft_ahead(drafter, &mut cache, anchor, draft, settings)?);
            }
        }
    }
    Ok(())
}

/// The most rows a pack has: the block under verification and a block for each continuation.
fn pack_rows(block_size: usize, settings: &Settings) -> usize {
    let continuations = settings.positions.min(block_size - 1) * settings.candidates + settings.candidates.max(1);
    (1 + continuations) * block_size
}

/// What is ready for the outcomes of the round under way.
struct Ahead {
    /// Tokens in the cache before the round's block.
    prefix: usize,
    drafted: usize,
    prepared: Vec<(Continuation, Draft)>,
    pack: Span,
}

/// The next draft: from what is ready if the outcome is among it, else from a block drafted now.
fn answer(
    drafter: &Drafter,
    cache: &mut KvCache,
    ahead: Option<Ahead>,
    news: News,
    settings: &Settings,
) -> Result<(u32, Draft, Proposal), DecodeError> {
    let (anchor, found, pack) = match (news, ahead) {
        (News::Outcome(verdict), Some(ahead)) => {
            // The pack's clean rows that the target accepted are committed text now.
            cache.set_length(0, ahead.prefix + 1 + verdict.accepted);
            let Verdict { next, .. } = verdict;
            (next, look_up(ahead.prepared, &verdict, ahead.drafted, settings.positions), Some(ahead.pack))
        }
        (News::First(token) | News::Outcome(Verdict { next: token, .. }), _) => (token, Err(Lookup::First), None),
    };
    let (draft, lookup, span) = match found {
        Ok(draft) => (draft, Lookup::Hit, None),
        Err(cause) => {
            let start = Instant::now();
            let block = Block { anchor, context: 0 };
            let work = LaneWork { lane: 0, clean: &[], blocks: &[block] };
            let draft = drafter.draft(cache, &[work], settings.candidates + 1)?.remove(0);
            (draft, cause, Some(Span::since(start)))
        }
    };
    let proposal = Proposal { tokens: draft.tokens.clone(), lookup: Some(lookup), draft: span, pack };
    Ok((anchor, draft, proposal))
}

/// One pack: the block under verification as clean tokens, and a block for each continuation of the fan-out.
fn draft_ahead(
    drafter: &Drafter,
    cache: &mut KvCache,
    anchor: u32,
    draft: Draft,
    settings: &Settings,
) -> Result<Ahead, DecodeError> {
    let start = Instant::now();
    let prefix = cache.length(0);
    let clean: Vec<u32> = std::iter::once(anchor).chain(draft.tokens.iter().copied()).collect();
    let continuations = rectangle(&draft, drafter.block_size, settings.positions, settings.candidates);
    let blocks: Vec<Block> = continuations.iter().map(|it| Block { anchor: it.anchor, context: it.context }).collect();
    let work = LaneWork { lane: 0, clean: &clean, blocks: &blocks };
    let drafts = drafter.draft(cache, &[work], settings.candidates + 1)?;
    let prepared = continuations.into_iter().zip(drafts).collect();
    Ok(Ahead { prefix, drafted: draft.tokens.len(), prepared, pack: Span::since(start) })
}
