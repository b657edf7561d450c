//! The texts under way: how one begins, one round of all of them, and the target's forward that both take.
//!
//! After every round the target's cache holds exactly the committed tokens of a text but the last, which enters as the next round's
//! anchor.

use std::time::Instant;

use data::responses::FinishReason;
use model::{CachedAttention, KvCache, Piece, Transformer};
use tch::Tensor;
use torch::TorchError;

use crate::decode::{DecodeError, Decoded, LaneNews, News, Proposer, Settings};
use crate::judging::{Trial, judge};
use crate::rounds::Round;
use crate::sampling::TokenPlace;
use crate::verification::{Committed, Verdict, commit};

/// A text under way.
pub(crate) struct Text {
    pub(crate) prompt: usize,
    pub(crate) lane: usize,
    pub(crate) tokens: Vec<u32>,
    /// Set when it has ended.
    pub(crate) finish: Option<FinishReason>,
    pub(crate) rounds: Vec<Round>,
    /// What the proposer does not know yet.
    news: News,
    prefill_seconds: f64,
    pub(crate) decode_seconds: f64,
    /// When the first token was known.
    epoch: Instant,
}

impl Text {
    /// Prefills a lane and takes the first token.
    pub(crate) fn begin<'p>(
        target: &Transformer,
        cache: &mut KvCache,
        proposer: &mut dyn Proposer<'p>,
        (lane, prompt, ids): (usize, usize, &'p [u32]),
        settings: &Settings,
    ) -> Result<Self, DecodeError> {
        let started = Instant::now();
        proposer.start(lane, (prompt, ids))?;
        cache.set_length(lane, 0);
        let logits_rv = target_logits(target, cache, &[(lane, ids)], 1)?;
        let place = TokenPlace { request: prompt as u64, position: 0 };
        let alone = judge(&logits_rv, &settings.sampler, &[Trial { place, draft: &[], drawn_from: None }])?[0];
        cache.set_length(lane, ids.len());
        // The first token passes the same stop and length rules as all others, but belongs to no round.
        let Committed { tokens, ended } = commit(&[], &alone, &settings.stop_tokens, settings.max_new_tokens);
        let epoch = Instant::now();
        Ok(Self {
            prompt,
            lane,
            tokens,
            finish: ended,
            rounds: Vec::new(),
            news: News::First(alone.next),
            prefill_seconds: epoch.duration_since(started).as_secs_f64(),
            decode_seconds: 0.0,
            epoch,
        })
    }

    /// The last token, which the target has not read yet.
    fn anchor(&self) -> u32 {
        match self.news {
            News::First(token) | News::Outcome(Verdict { next: token, .. }) => token,
        }
    }

    /// What it came to, once it has ended.
    pub(crate) fn finished(self) -> Decoded {
        let Self { prompt, tokens, finish, rounds, prefill_seconds, decode_seconds, .. } = self;
        Decoded { prompt, tokens, finish: finish.unwrap_or(FinishReason::Length), rounds, prefill_seconds, decode_seconds }
    }
}

/// One round of all texts that have not ended: their drafts, one target forward, and what each commits.
pub(crate) fn round<'p>(
    target: &Transformer,
    cache: &mut KvCache,
    proposer: &mut dyn Proposer<'p>,
    texts: &mut [Text],
    settings: &Settings,
) -> Result<(), DecodeError> {
    let round_start = Instant::now();
    let mut texts: Vec<&mut Text> = texts.iter_mut().filter(|text| text.finish.is_none()).collect();
    let news: Vec<LaneNews> = texts.iter().map(|text| LaneNews { lane: text.lane, news: text.news }).collect();
    let proposals = proposer.propose(&news)?;
    let verify_start = Instant::now();
    let blocks: Vec<Vec<u32>> = texts
        .iter()
        .zip(&proposals)
        .map(|(text, proposal)| std::iter::once(text.anchor()).chain(proposal.tokens.iter().copied()).collect())
        .collect();
    let work: Vec<(usize, &[u32])> = texts.iter().zip(&blocks).map(|(text, block)| (text.lane, block.as_slice())).collect();
    let logits_rv = target_logits(target, cache, &work, usize::MAX)?;
    let trials: Vec<Trial<'_>> = texts
        .iter()
        .zip(&proposals)
        .map(|(text, proposal)| Trial {
            place: TokenPlace { request: text.prompt as u64, position: text.tokens.len() },
            draft: &proposal.tokens,
            drawn_from: proposal.drawn_from.as_deref(),
        })
        .collect();
    let verdicts = judge(&logits_rv, &settings.sampler, &trials)?;
    let verify_seconds = verify_start.elapsed().as_secs_f64();
    let lanes = texts.len();
    for ((text, proposal), verdict) in texts.iter_mut().zip(&proposals).zip(verdicts) {
        let room = settings.max_new_tokens - text.tokens.len();
        let mut committed = commit(&proposal.tokens, &verdict, &settings.stop_tokens, room);
        let offset = |instant: Instant| instant.saturating_duration_since(text.epoch).as_secs_f64();
        if let (Some((pack, blocks)), Some(previous)) = (proposal.pack, text.rounds.last_mut()) {
            (previous.pack_start, previous.pack_seconds, previous.pack_blocks) = (offset(pack.start), pack.seconds, blocks);
        }
        let context = cache.length(text.lane);
        cache.set_length(text.lane, context + committed.tokens.len());
        text.rounds.push(Round {
            prompt: text.prompt,
            round: text.rounds.len(),
            lookup: proposal.lookup,
            lanes,
            context,
            draft_start: proposal.draft.map_or(0.0, |draft| offset(draft.start)),
            draft_seconds: proposal.draft.map_or(0.0, |draft| draft.seconds),
            verify_start: offset(verify_start),
            verify_seconds,
            wait_seconds: verify_start.duration_since(round_start).as_secs_f64(),
            bubble_seconds: proposal.bubble_seconds,
            ..Round::counted(proposal.tokens.len(), &verdict, &committed)
        });
        text.tokens.append(&mut committed.tokens);
        text.finish = committed.ended;
        text.news = News::Outcome(verdict);
    }
    Ok(())
}

/// Runs each lane's ids behind what the lane holds → f32 logits `[R, V]` of the last `wanted` rows of each, lane by lane. The caller
/// extends the lanes over the rows that stay.
pub(crate) fn target_logits(
    target: &Transformer,
    cache: &KvCache,
    work: &[(usize, &[u32])],
    wanted: usize,
) -> Result<Tensor, TorchError> {
    torch::guarded("running the target", || {
        let device = target.device();
        let (mut ids, mut positions, mut rows, mut pieces) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for &(lane, lane_ids) in work {
            let (first, held) = (ids.len(), cache.length(lane));
            ids.extend_from_slice(lane_ids);
            positions.extend(held..held + lane_ids.len());
            rows.extend(ids.len() - wanted.min(lane_ids.len())..ids.len());
            pieces.push(Piece::causal(lane, first..ids.len(), device));
        }
        let mut attention = CachedAttention::new(cache, pieces);
        let hidden_td =
            target.forward(&torch::ids_tensor(&ids, device), &torch::index_tensor(&positions, device), &mut attention);
        if rows.len() == ids.len() {
            target.logits(&hidden_td)
        } else {
            target.logits(&hidden_td.index_select(0, &torch::index_tensor(&rows, device)))
        }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::decode::InTurn;
    use crate::drafter::Drafter;
    use crate::drafting::Drafting;
    use crate::fan_out::FanOut;
    use crate::sampling::Sampler;
    use configs::{Drafts, Labels};
    use model::ModelConfig;
    use tch::Kind;

    /// Keys and values of all layers, as far as the lane is held.
    fn held(cache: &KvCache, lane: usize, layers: usize) -> Tensor {
        let parts: Vec<Tensor> = (0..layers)
            .flat_map(|layer| <[Tensor; 2]>::from(cache.lane(layer, lane)))
            .map(|tensor| tensor.narrow(1, 0, cache.length(lane) as i64))
            .collect();
        Tensor::stack(&parts, 0)
    }

    #[test]
    fn after_every_round_the_targets_cache_is_that_of_a_fresh_prefill() {
        let _no_grad = tch::no_grad_guard();
        let config = serde_json::json!({"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 10});
        let model = || Transformer::random(ModelConfig::from_json(&config).unwrap(), 5, Kind::Float);
        let (target, prompts) = (model(), [vec![3, 1, 4], vec![1, 5, 9, 2, 6]]);
        let drafter = Drafter {
            model: model(),
            block_size: 4,
            mask_token: 9,
            labels: Labels::Next,
            anchor_sees_block: true,
            temperatures: Vec::new(),
        };
        let mut accepted = 0;
        // A limit on the length ends decoding behind, and inside, each of the rounds in turn.
        for max_new_tokens in 1..24 {
            let settings = Settings {
                sampler: Sampler::greedy(),
                stop_tokens: vec![],
                max_new_tokens,
                concurrency: 2,
                fan_out: FanOut::BestFirst { blocks: 0 },
                drafts: Drafts::Point,
            };
            let drafting = Drafting::new(&drafter, drafter.new_cache(2, 40, 8), None, None);
            let mut proposer = InTurn { drafting, longest_draft: 3 };
            let mut cache = KvCache::new(&target.config, 2, 40, Kind::Float, target.device());
            let mut texts: Vec<Text> = prompts
                .iter()
                .enumerate()
                .map(|(index, ids)| Text::begin(&target, &mut cache, &mut proposer, (index, index, ids), &settings).unwrap())
                .collect();
            while texts.iter().any(|text| text.finish.is_none()) {
                round(&target, &mut cache, &mut proposer, &mut texts, &settings).unwrap();
            }
            for (lane, (text, prompt)) in texts.into_iter().zip(&prompts).enumerate() {
                let text = text.finished();
                let ids = [&prompt[..], &text.tokens[..max_new_tokens - 1]].concat();
                assert_eq!(cache.length(lane), ids.len());
                let mut fresh = KvCache::new(&target.config, 1, ids.len(), Kind::Float, target.device());
                let _ = target_logits(&target, &fresh, &[(0, &ids)], 1).unwrap();
                fresh.set_length(0, ids.len());
                assert!(held(&cache, lane, 2).allclose(&held(&fresh, 0, 2), 1e-5, 1e-5, false));
                accepted += text.rounds.iter().map(|round| round.accepted).sum::<usize>();
            }
        }
        assert!(accepted > 0, "without an accepted token the rounds show nothing");
    }
}
