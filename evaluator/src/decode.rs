//! The decoders: one loop over rounds, fed by whoever proposes drafts.
//!
//! Autoregressive decoding proposes nothing; lockstep drafts on the target's own timeline; [`crate::asynchronous`] drafts ahead on
//! a second thread. Prefill, verification, stop rule and length limit are the loop's, so all decoders write the same text.
//!
//! After every round the target's cache holds exactly the committed tokens but the last, which enters as the next round's anchor.

use std::ops::ControlFlow;
use std::time::Instant;

use data::responses::FinishReason;
use model::{CachedAttention, KvCache, Piece, Transformer};
use tch::Tensor;
use torch::TorchError;

use crate::drafter::{Block, Drafter, LaneWork};
use crate::fan_out::Lookup;
use crate::rounds::Round;
use crate::sampling::Sampler;
use crate::verification::{Verdict, commit, verify};

/// What the decoders share.
#[derive(Debug, Clone)]
pub struct Settings {
    pub sampler: Sampler,
    pub stop_tokens: Vec<u32>,
    pub max_new_tokens: usize,
    /// Positions whose runners-up are drafted ahead, and how many of them a position; of use to the asynchronous decoder only.
    pub positions: usize,
    pub candidates: usize,
}

/// A finished text and how it came to be.
#[derive(Debug, Clone)]
pub struct Decoded {
    /// The response, its stop token included.
    pub tokens: Vec<u32>,
    pub finish: FinishReason,
    pub rounds: Vec<Round>,
    /// Until the first token was known.
    pub prefill_seconds: f64,
    /// From then to the last token.
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
    #[error("decoder `{decoder}` needs a drafter; give one or leave the decoder out")]
    NoDrafter { decoder: &'static str },
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

/// A draft for the next round and where it came from.
#[derive(Debug, Clone, Default)]
pub(crate) struct Proposal {
    pub tokens: Vec<u32>,
    pub lookup: Option<Lookup>,
    /// The drafting that the target had to wait for.
    pub draft: Option<Span>,
    /// The drafting ahead that ran beside the previous round.
    pub pack: Option<Span>,
}

/// Whoever proposes drafts: one text after the other, one proposal a round.
pub(crate) trait Proposer<'p> {
    /// A new text begins with this prompt.
    fn start(&mut self, prompt: &'p [u32]) -> Result<(), DecodeError>;
    /// The draft for the round after this news.
    fn propose(&mut self, news: News) -> Result<Proposal, DecodeError>;
    /// The most tokens a proposal has.
    fn longest_draft(&self) -> usize;
}

/// Is given each finished text, in the order of the prompts, and says whether to go on.
pub type OnText<'a> = dyn FnMut(Decoded) -> ControlFlow<()> + 'a;

/// Decodes with the target alone, one token a forward.
///
/// # Errors
/// A prompt the target cannot read, and what libtorch refuses; so too for the other decoders.
pub fn autoregressive(
    target: &Transformer,
    prompts: &[Vec<u32>],
    settings: &Settings,
    on_text: &mut OnText<'_>,
) -> Result<(), DecodeError> {
    struct Nothing;
    impl<'p> Proposer<'p> for Nothing {
        fn start(&mut self, _prompt: &'p [u32]) -> Result<(), DecodeError> {
            Ok(())
        }
        fn propose(&mut self, _news: News) -> Result<Proposal, DecodeError> {
            Ok(Proposal::default())
        }
        fn longest_draft(&self) -> usize {
            0
        }
    }
    decode_prompts(target, &mut Nothing, prompts, settings, on_text)
}

/// Decodes by turns: draft a block, verify it, draft the next.
pub fn lockstep(
    target: &Transformer,
    drafter: &Drafter,
    prompts: &[Vec<u32>],
    settings: &Settings,
    on_text: &mut OnText<'_>,
) -> Result<(), DecodeError> {
    check_drafter(target, drafter)?;
    // The block under verification may be taken in as clean tokens beside the block drafted next.
    let cache = drafter.new_cache(1, text_slots(prompts, settings), 2 * drafter.block_size);
    let mut proposer = InTurn { drafter, cache, anchor: 0, draft: Vec::new() };
    decode_prompts(target, &mut proposer, prompts, settings, on_text)
}

/// Drafts one block a round. The drafter's cache takes in what a round committed together with the next block.
struct InTurn<'a> {
    drafter: &'a Drafter,
    cache: KvCache,
    /// The round under way.
    anchor: u32,
    draft: Vec<u32>,
}

impl<'p> Proposer<'p> for InTurn<'_> {
    fn start(&mut self, prompt: &'p [u32]) -> Result<(), DecodeError> {
        self.cache.set_length(0, 0);
        self.drafter.draft(&mut self.cache, &[LaneWork { lane: 0, clean: prompt, blocks: &[] }], 1)?;
        Ok(())
    }

    fn propose(&mut self, news: News) -> Result<Proposal, DecodeError> {
        let start = Instant::now();
        let (clean, anchor) = match news {
            News::First(token) => (Vec::new(), token),
            News::Outcome(verdict) => {
                (std::iter::once(self.anchor).chain(self.draft[..verdict.accepted].iter().copied()).collect(), verdict.next)
            }
        };
        let block = Block { anchor, context: clean.len() };
        let work = LaneWork { lane: 0, clean: &clean, blocks: &[block] };
        let tokens = self.drafter.draft(&mut self.cache, &[work], 1)?.remove(0).tokens;
        (self.anchor, self.draft) = (anchor, tokens.clone());
        Ok(Proposal { tokens, draft: Some(Span::since(start)), ..Proposal::default() })
    }

    fn longest_draft(&self) -> usize {
        self.drafter.block_size - 1
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
    prompts.iter().map(Vec::len).max().unwrap_or(0) + settings.max_new_tokens
}

/// Decodes the prompts one after the other with one cache.
pub(crate) fn decode_prompts<'p>(
    target: &Transformer,
    proposer: &mut dyn Proposer<'p>,
    prompts: &'p [Vec<u32>],
    settings: &Settings,
    on_text: &mut OnText<'_>,
) -> Result<(), DecodeError> {
    let _no_grad = tch::no_grad_guard();
    check_prompts(target, prompts.iter().map(Vec::as_slice))?;
    let slots = text_slots(prompts, settings) + proposer.longest_draft() + 1;
    let mut cache =
        torch::guarded("allocating the cache", || KvCache::new(&target.config, 1, slots, target.kind(), target.device()))?;
    for (index, prompt) in prompts.iter().enumerate() {
        let decoded = decode_prompt(target, &mut cache, proposer, index, prompt, settings)?;
        if on_text(decoded).is_break() {
            break;
        }
    }
    Ok(())
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

fn decode_prompt<'p>(
    target: &Transformer,
    cache: &mut KvCache,
    proposer: &mut dyn Proposer<'p>,
    index: usize,
    prompt: &'p [u32],
    settings: &Settings,
) -> Result<Decoded, DecodeError> {
    let started = Instant::now();
    proposer.start(prompt)?;
    cache.set_length(0, 0);
    let logits_rv = target_logits(target, cache, prompt, 1)?;
    let first = choose(&logits_rv, settings, index, 0)?[0];
    cache.set_length(0, prompt.len());
    let prefill_seconds = started.elapsed().as_secs_f64();

    // The first token passes the same stop and length rules as all others, but belongs to no round.
    let mut last = commit(&[], &Verdict { accepted: 0, next: first }, &settings.stop_tokens, settings.max_new_tokens);
    let mut news = News::First(first);
    let mut anchor = first;
    let mut tokens = std::mem::take(&mut last.tokens);
    let mut rounds: Vec<Round> = Vec::new();
    let epoch = Instant::now();
    let offset = |instant: Instant| instant.saturating_duration_since(epoch).as_secs_f64();
    let mut idle_since = epoch;
    let finish = loop {
        if let Some(finish) = last.ended {
            break finish;
        }
        let proposal = proposer.propose(news)?;
        let verify_start = Instant::now();
        let block: Vec<u32> = std::iter::once(anchor).chain(proposal.tokens.iter().copied()).collect();
        let logits_rv = target_logits(target, cache, &block, block.len())?;
        let verdict = verify(&proposal.tokens, &choose(&logits_rv, settings, index, tokens.len())?);
        last = commit(&proposal.tokens, &verdict, &settings.stop_tokens, settings.max_new_tokens - tokens.len());
        cache.set_length(0, cache.length(0) + last.tokens.len());
        let verify_seconds = verify_start.elapsed().as_secs_f64();

        if let (Some(pack), Some(previous)) = (proposal.pack, rounds.last_mut()) {
            (previous.pack_start, previous.pack_seconds) = (offset(pack.start), pack.seconds);
        }
        rounds.push(Round {
            prompt: index,
            round: rounds.len(),
            lookup: proposal.lookup,
            draft_start: proposal.draft.map_or(0.0, |draft| offset(draft.start)),
            draft_seconds: proposal.draft.map_or(0.0, |draft| draft.seconds),
            verify_start: offset(verify_start),
            verify_seconds,
            wait_seconds: verify_start.duration_since(idle_since).as_secs_f64(),
            ..Round::counted(proposal.tokens.len(), &verdict, &last)
        });
        idle_since = Instant::now();
        tokens.append(&mut last.tokens);
        (anchor, news) = (verdict.next, News::Outcome(verdict));
    };
    Ok(Decoded { tokens, finish, rounds, prefill_seconds, decode_seconds: offset(Instant::now()) })
}

/// Runs `ids` behind what lane 0 of the cache holds → f32 logits `[wanted, V]` of the last rows. The caller extends the lane over the
/// rows that stay.
pub(crate) fn target_logits(target: &Transformer, cache: &KvCache, ids: &[u32], wanted: usize) -> Result<Tensor, TorchError> {
    torch::guarded("running the target", || {
        let (device, held) = (target.device(), cache.length(0));
        let positions: Vec<usize> = (held..held + ids.len()).collect();
        let mut attention = CachedAttention::new(cache, vec![Piece::causal(0, 0..ids.len(), device)]);
        let hidden_td = target.forward(&torch::ids_tensor(ids, device), &torch::index_tensor(&positions, device), &mut attention);
        target.logits(&hidden_td.narrow(0, (ids.len() - wanted) as i64, wanted as i64))
    })
}

/// The target's choices for consecutive positions of a response, `from` on.
fn choose(logits_rv: &Tensor, settings: &Settings, request: usize, from: usize) -> Result<Vec<u32>, TorchError> {
    torch::guarded("choosing the target's tokens", || {
        let positions: Vec<usize> = (from..from + logits_rv.size()[0] as usize).collect();
        settings.sampler.choose(logits_rv, request as u64, &positions)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use configs::Labels;
    use model::ModelConfig;
    use tch::Kind;

    /// Keys and values of all layers, as far as lane 0 is held.
    fn held(cache: &KvCache, layers: usize) -> Tensor {
        let parts: Vec<Tensor> = (0..layers)
            .flat_map(|layer| <[Tensor; 2]>::from(cache.lane(layer, 0)))
            .map(|tensor| tensor.narrow(1, 0, cache.length(0) as i64))
            .collect();
        Tensor::stack(&parts, 0)
    }

    #[test]
    fn after_every_round_the_targets_cache_is_that_of_a_fresh_prefill() {
        let _no_grad = tch::no_grad_guard();
        let config = serde_json::json!({"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 10});
        let model = || Transformer::random(ModelConfig::from_json(&config).unwrap(), 5, Kind::Float);
        let (target, prompt) = (model(), vec![3, 1, 4]);
        let drafter = Drafter { model: model(), block_size: 4, mask_token: 9, labels: Labels::Next, anchor_sees_block: true };
        let mut cache = KvCache::new(&target.config, 1, 40, Kind::Float, target.device());
        let mut accepted = 0;
        // A limit on the length ends decoding behind, and inside, each of the rounds in turn.
        for max_new_tokens in 1..24 {
            let settings =
                Settings { sampler: Sampler::greedy(), stop_tokens: vec![], max_new_tokens, positions: 0, candidates: 0 };
            let drafter_cache = drafter.new_cache(1, 40, 8);
            let mut proposer = InTurn { drafter: &drafter, cache: drafter_cache, anchor: 0, draft: Vec::new() };
            let text = decode_prompt(&target, &mut cache, &mut proposer, 0, &prompt, &settings).unwrap();
            let ids = [&prompt[..], &text.tokens[..max_new_tokens - 1]].concat();
            assert_eq!(cache.length(0), ids.len());
            let mut fresh = KvCache::new(&target.config, 1, ids.len(), Kind::Float, target.device());
            let _ = target_logits(&target, &fresh, &ids, 1).unwrap();
            fresh.set_length(0, ids.len());
            assert!(held(&cache, 2).allclose(&held(&fresh, 2), 1e-5, 1e-5, false));
            accepted = text.rounds.iter().map(|round| round.accepted).sum();
        }
        assert!(accepted > 0, "without an accepted token the rounds show nothing");
    }
}
