//! The decoders: one loop over rounds, fed by whoever proposes drafts.
//!
//! Autoregressive decoding proposes nothing; lockstep drafts on the target's own timeline; [`crate::asynchronous`] drafts ahead on
//! a second thread. Prefill, verification, stop rule and length limit are the loop's, so all decoders write the same text.
//!
//! Several texts may be under way at once, each in a lane of the caches: a round is one target forward over all their blocks, and each
//! text has its own verdict (`under_way`). A lane whose text is finished takes the next prompt.

use std::ops::ControlFlow;
use std::time::Instant;

use configs::Drafts;
use data::responses::FinishReason;
use model::Transformer;
use torch::TorchError;

use crate::drafter::Drafter;
use crate::drafting::Drafting;
use crate::fan_out::{FanOut, Lookup};
use crate::room::allocate;
use crate::rounds::Round;
use crate::sampling::Sampler;
use crate::under_way::{Text, round};
use crate::verification::Verdict;

/// What the decoders share.
#[derive(Debug, Clone)]
pub struct Settings {
    pub sampler: Sampler,
    pub stop_tokens: Vec<u32>,
    pub max_new_tokens: usize,
    /// Texts decoded side by side.
    pub concurrency: usize,
    /// Of use to the asynchronous decoder only.
    pub fan_out: FanOut,
    /// How drafted tokens are chosen and verified; of no use to the autoregressive decoder.
    pub drafts: Drafts,
}

impl Settings {
    /// Lanes that these prompts keep busy.
    pub(crate) fn lanes(&self, prompts: &[Vec<u32>]) -> usize {
        self.concurrency.clamp(1, prompts.len().max(1))
    }

    /// What draws the drafts, if they are drawn.
    pub(crate) fn drawn_by(&self) -> Option<&Sampler> {
        (self.drafts == Drafts::Sampled).then_some(&self.sampler)
    }
}

/// A finished text and how it came to be.
#[derive(Debug, Clone)]
pub struct Decoded {
    /// Index of its prompt.
    pub prompt: usize,
    /// The response, its stop token included.
    pub tokens: Vec<u32>,
    pub finish: FinishReason,
    pub rounds: Vec<Round>,
    /// Until the first token was known.
    pub prefill_seconds: f64,
    /// From then to the last token, without the prefills of other texts; a round that several texts shared is shared out evenly, so that
    /// the sum over texts is what the clock showed.
    pub decode_seconds: f64,
}

/// Why decoding cannot begin or go on.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    #[error("prompt {index} {problem}; give at least one token, all below the target's `vocab_size` {vocabulary}")]
    Prompt { index: usize, problem: String, vocabulary: i64 },
    #[error("the drafter's `block_size` is {0}; it must be at least 2, an anchor and a mask")]
    BlockSize(usize),
    #[error("the drafter's `vocab_size` is {drafter} and the target's {target}; the drafter's must not be larger")]
    Vocabulary { drafter: i64, target: i64 },
    #[error("the drafter needs `mask_token` {mask_token} below its `vocab_size` {vocabulary}")]
    MaskToken { mask_token: u32, vocabulary: i64 },
    #[error("the drafter's thread ended early: {0}")]
    DrafterThread(String),
    #[error(
        "the {whose}'s keys and values take {gigabytes:.2} GB for {lanes} × {slots} tokens (texts side by side × prompt and new tokens), \
         and {free:.2} GB are free; allow fewer new tokens (`max_new_tokens`) or fewer texts side by side"
    )]
    NoRoom { whose: &'static str, lanes: usize, slots: usize, gigabytes: f64, free: f64 },
    #[error("decoder `{decoder}` needs a drafter; give one or leave the decoder out")]
    NoDrafter { decoder: &'static str },
    #[error("benchmark `{benchmark}`, conversation {conversation}: the next turn cannot be asked: {problem}")]
    NextTurn { benchmark: String, conversation: usize, problem: String },
    #[error("stopped on request")]
    Stopped,
    #[error(transparent)]
    Torch(#[from] TorchError),
}

/// What the target has said since the last proposal.
#[derive(Debug, Clone, Copy)]
pub(crate) enum News {
    /// The first token of a text, from the prefill.
    First(u32),
    /// The outcome of a round that did not end the text.
    Outcome(Verdict),
}

/// When something ran.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub start: Instant,
    pub seconds: f64,
}

impl Span {
    pub(crate) fn since(start: Instant) -> Self {
        Self { start, seconds: start.elapsed().as_secs_f64() }
    }
}

/// What the target has said about the text of a lane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaneNews {
    pub lane: usize,
    pub news: News,
}

/// A draft for the next round of a text and where it came from.
#[derive(Debug, Clone, Default)]
pub(crate) struct Proposal {
    pub tokens: Vec<u32>,
    /// The distribution that each of the tokens was drawn from; absent where they are the likeliest ones.
    pub drawn_from: Option<Vec<Vec<f32>>>,
    pub lookup: Option<Lookup>,
    /// The drafting that the target had to wait for.
    pub draft: Option<Span>,
    /// The drafting ahead that ran beside the previous round, and how many continuations it gave this text.
    pub pack: Option<(Span, usize)>,
    /// How long the drafter had been standing still.
    pub bubble_seconds: f64,
}

/// Whoever proposes drafts.
pub(crate) trait Proposer<'p> {
    /// A new text begins in this lane with this prompt: its index and its ids.
    fn start(&mut self, lane: usize, prompt: (usize, &'p [u32])) -> Result<(), DecodeError>;
    /// A draft for each of these texts, in their order.
    fn propose(&mut self, news: &[LaneNews]) -> Result<Vec<Proposal>, DecodeError>;
    /// The most tokens a proposal has.
    fn longest_draft(&self) -> usize;
}

/// What a decoder tells while it works.
#[derive(Debug)]
pub enum Event<'a> {
    /// The text of a prompt has grown by these tokens: by a round, or by its first token, which belongs to none.
    Tokens { prompt: usize, tokens: &'a [u32], round: Option<&'a Round> },
    /// A text is finished.
    Text(Decoded),
}

/// Is told each event, and says whether to go on; if not, unfinished texts are dropped. Texts come in the order in which they finish.
pub type OnEvent<'a> = dyn FnMut(Event<'_>) -> ControlFlow<()> + 'a;

/// Decodes with the target alone, one token a forward.
///
/// # Errors
/// A prompt the target cannot read, and what libtorch refuses; so too for the other decoders.
pub fn autoregressive(
    target: &Transformer,
    prompts: &[Vec<u32>],
    settings: &Settings,
    on_event: &mut OnEvent<'_>,
) -> Result<(), DecodeError> {
    struct Nothing;
    impl<'p> Proposer<'p> for Nothing {
        fn start(&mut self, _lane: usize, _prompt: (usize, &'p [u32])) -> Result<(), DecodeError> {
            Ok(())
        }
        fn propose(&mut self, news: &[LaneNews]) -> Result<Vec<Proposal>, DecodeError> {
            Ok(vec![Proposal::default(); news.len()])
        }
        fn longest_draft(&self) -> usize {
            0
        }
    }
    decode_prompts(target, &mut Nothing, prompts, settings, on_event)
}

/// Decodes by turns: draft a block, verify it, draft the next.
pub fn lockstep(
    target: &Transformer,
    drafter: &Drafter,
    prompts: &[Vec<u32>],
    settings: &Settings,
    on_event: &mut OnEvent<'_>,
) -> Result<(), DecodeError> {
    check_drafter(target, drafter)?;
    let cache = Drafting::cache(drafter, settings.lanes(prompts), text_slots(prompts, settings), None)?;
    let drafting = Drafting::new(drafter, cache, None, settings.drawn_by());
    decode_prompts(target, &mut InTurn { drafting, longest_draft: drafter.block_size - 1 }, prompts, settings, on_event)
}

/// Drafts one block a round on the calling thread.
pub(crate) struct InTurn<'d> {
    pub(crate) drafting: Drafting<'d>,
    pub(crate) longest_draft: usize,
}

impl<'p> Proposer<'p> for InTurn<'_> {
    fn start(&mut self, lane: usize, prompt: (usize, &'p [u32])) -> Result<(), DecodeError> {
        self.drafting.start(lane, prompt)
    }

    fn propose(&mut self, news: &[LaneNews]) -> Result<Vec<Proposal>, DecodeError> {
        // The drafter never stands still on purpose here: its pauses are the target's verifications.
        Ok(self.drafting.answer(news)?.into_iter().map(|it| Proposal { bubble_seconds: 0.0, ..it }).collect())
    }

    fn longest_draft(&self) -> usize {
        self.longest_draft
    }
}

/// Whether this drafter can serve this target.
pub(crate) fn check_drafter(target: &Transformer, drafter: &Drafter) -> Result<(), DecodeError> {
    let vocabulary = drafter.model.config.vocab_size;
    if drafter.block_size < 2 {
        return Err(DecodeError::BlockSize(drafter.block_size));
    }
    if vocabulary > target.config.vocab_size {
        return Err(DecodeError::Vocabulary { drafter: vocabulary, target: target.config.vocab_size });
    }
    if i64::from(drafter.mask_token) >= vocabulary {
        return Err(DecodeError::MaskToken { mask_token: drafter.mask_token, vocabulary });
    }
    Ok(())
}

/// Cache slots that hold the longest prompt with the longest response.
pub(crate) fn text_slots(prompts: &[Vec<u32>], settings: &Settings) -> usize {
    prompts.iter().map(Vec::len).max().unwrap_or(0).saturating_add(settings.max_new_tokens)
}

/// Decodes all prompts, as many side by side as the settings say, with one cache.
pub(crate) fn decode_prompts<'p>(
    target: &Transformer,
    proposer: &mut dyn Proposer<'p>,
    prompts: &'p [Vec<u32>],
    settings: &Settings,
    on_event: &mut OnEvent<'_>,
) -> Result<(), DecodeError> {
    let _no_grad = tch::no_grad_guard();
    check_prompts(target, prompts.iter().map(Vec::as_slice))?;
    let lanes = settings.lanes(prompts);
    let slots = text_slots(prompts, settings).saturating_add(proposer.longest_draft() + 1);
    let mut cache = allocate("target", target, lanes, slots)?;
    let mut waiting = prompts.iter().enumerate();
    let mut texts: Vec<Text> = Vec::with_capacity(lanes);
    let mut free: Vec<usize> = (0..lanes).rev().collect();
    loop {
        while let Some(lane) = free.pop() {
            let Some((prompt, ids)) = waiting.next() else { break };
            let text = Text::begin(target, &mut cache, proposer, (lane, prompt, ids), settings)?;
            let first = Event::Tokens { prompt, tokens: &text.tokens, round: None };
            if on_event(first).is_break() {
                return Ok(());
            }
            texts.push(text);
        }
        let round_start = Instant::now();
        let running = texts.iter().filter(|text| text.finish.is_none()).count();
        if running > 0 {
            round(target, &mut cache, proposer, &mut texts, settings)?;
        }
        let share = round_start.elapsed().as_secs_f64() / running.max(1) as f64;
        for text in &mut texts {
            if let Some(round) = text.rounds.last() {
                text.decode_seconds += share;
                let tokens = &text.tokens[text.tokens.len() - round.committed..];
                if on_event(Event::Tokens { prompt: text.prompt, tokens, round: Some(round) }).is_break() {
                    return Ok(());
                }
            }
        }
        for text in texts.extract_if(.., |text| text.finish.is_some()) {
            free.push(text.lane);
            if on_event(Event::Text(text.finished())).is_break() {
                return Ok(());
            }
        }
        if texts.is_empty() && waiting.len() == 0 {
            return Ok(());
        }
    }
}

/// Whether the target can read these prompts.
pub(crate) fn check_prompts<'p>(target: &Transformer, prompts: impl Iterator<Item = &'p [u32]>) -> Result<(), DecodeError> {
    let vocabulary = target.config.vocab_size;
    for (index, prompt) in prompts.enumerate() {
        let problem = match prompt.iter().find(|&&token| i64::from(token) >= vocabulary) {
            _ if prompt.is_empty() => "is empty".to_string(),
            Some(token) => format!("has the token {token}"),
            None => continue,
        };
        return Err(DecodeError::Prompt { index, problem, vocabulary });
    }
    Ok(())
}
