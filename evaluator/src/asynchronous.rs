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
//! drafts one block for each continuation of the fan-out. How the two exchange orders and answers, and hear of each other's end, is
//! `hand_over`'s.

use model::Transformer;

use crate::decode::{DecodeError, LaneNews, OnEvent, Proposal, Proposer, Settings, check_drafter, decode_prompts, text_slots};
use crate::drafter::Drafter;
use crate::drafting::Drafting;
use crate::hand_over::{Back, Front, Gone, sides};

/// Decodes with target and drafter running at the same time. On a CPU each gets its share of the cores, on one GPU a stream.
///
/// # Errors
/// As the other decoders; a failure on either thread ends both.
pub fn asynchronous(
    target: &Transformer,
    drafter: &mut Drafter,
    prompts: &[Vec<u32>],
    settings: &Settings,
    on_event: &mut OnEvent<'_>,
) -> Result<(), DecodeError> {
    check_drafter(target, drafter)?;
    let longest_draft = drafter.block_size - 1;
    // On this thread, so that the target's cache is measured against what this one leaves.
    let cache = Drafting::cache(drafter, settings.lanes(prompts), text_slots(prompts, settings), Some(&settings.fan_out))?;
    let shares = Shares::take();
    let drafter_threads = shares.drafter;
    let (front, back) = sides();
    std::thread::scope(|scope| {
        let worker = scope.spawn(move || {
            torch::set_num_threads(drafter_threads);
            torch::guarded("drafting ahead", || {
                let _no_grad = tch::no_grad_guard();
                torch::work_beside_others(drafter.model.device())?;
                run_drafter(Drafting::new(drafter, cache, Some(&settings.fan_out), settings.drawn_by()), back)
            })?
        });
        let mut remote = Remote { front, longest_draft };
        let decoded = decode_prompts(target, &mut remote, prompts, settings, on_event);
        remote.front.conclude(decoded, || worker.join(), || DecodeError::DrafterThread("it panicked".to_string()))
    })
}

/// Gives the calling thread the target's share of the cores, and all of its own back when dropped.
pub(crate) struct Shares {
    before: i32,
    /// Threads of the drafter's share.
    pub(crate) drafter: usize,
}

impl Shares {
    pub(crate) fn take() -> Self {
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
    /// A new text in a lane: its prompt's index and ids.
    Start(usize, (usize, &'p [u32])),
    /// What became of the rounds under way; asks for the next drafts.
    Draft(Vec<LaneNews>),
}

/// The drafter as the target's thread sees it.
struct Remote<'p> {
    front: Front<Order<'p>, Vec<Proposal>>,
    longest_draft: usize,
}

impl From<Gone> for DecodeError {
    fn from(_: Gone) -> Self {
        DecodeError::DrafterThread("it no longer answers".to_string())
    }
}

impl<'p> Proposer<'p> for Remote<'p> {
    fn start(&mut self, lane: usize, prompt: (usize, &'p [u32])) -> Result<(), DecodeError> {
        Ok(self.front.order(Order::Start(lane, prompt))?)
    }

    fn propose(&mut self, news: &[LaneNews]) -> Result<Vec<Proposal>, DecodeError> {
        Ok(self.front.ask(Order::Draft(news.to_vec()))?)
    }

    fn longest_draft(&self) -> usize {
        self.longest_draft
    }
}

/// The drafter's thread: answers each order at once if it can, then drafts ahead. Ends when the target's side is gone.
fn run_drafter(mut drafting: Drafting<'_>, back: Back<Order<'_>, Vec<Proposal>>) -> Result<(), DecodeError> {
    back.serve(|order, answer| match order {
        Order::Start(lane, prompt) => drafting.start(lane, prompt),
        Order::Draft(news) => match answer(drafting.answer(&news)?) {
            Ok(()) => drafting.draft_ahead(&news.iter().map(|news| news.lane).collect::<Vec<usize>>()),
            Err(Gone) => Ok(()),
        },
    })
}
