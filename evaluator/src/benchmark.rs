//! Runs decoders over the prompts of benchmarks and turns what they did into a score.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use configs::Decoder;
use model::{KvCache, Transformer};
use serde::{Deserialize, Serialize};
use tch::Kind;

use crate::asynchronous::asynchronous;
use crate::decode::{DecodeError, Decoded, Settings, autoregressive, lockstep, target_logits};
use crate::drafter::Drafter;
use crate::rounds::{Round, tally};
use crate::score::{BenchmarkScore, DecoderScore, Divergence, RoundRow};

/// Named prompts, as token ids.
#[derive(Debug, Clone)]
pub struct Benchmark {
    pub name: String,
    pub prompts: Vec<Vec<u32>>,
}

/// What to run, and how.
#[derive(Debug, Clone, Copy)]
pub struct Plan<'a> {
    pub benchmarks: &'a [Benchmark],
    pub decoders: &'a [Decoder],
    pub settings: &'a Settings,
}

/// What the autoregressive decoder did on a benchmark: the text all others must write, and the speed they are measured against.
/// The target is the same for all checkpoints of a run, so this is measured once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    pub tokens: Vec<Vec<u32>>,
    pub score: BenchmarkScore,
}

/// The figures of one checkpoint: what goes into a [`crate::score::Score`], and the rounds behind it.
#[derive(Debug, Clone, Default)]
pub struct Evaluation {
    pub decoders: BTreeMap<String, DecoderScore>,
    pub rounds: Vec<RoundRow>,
}

/// A decoder's name in recipes and scores.
pub fn decoder_name(decoder: Decoder) -> &'static str {
    match decoder {
        Decoder::Autoregressive => "autoregressive",
        Decoder::Lockstep => "lockstep",
        Decoder::Asynchronous => "asynchronous",
    }
}

/// Runs every decoder over every benchmark.
///
/// `baselines` holds the autoregressive results by benchmark. Where it has one, that decoder does not run again; where it has none
/// and the decoder is asked for, it is filled in. Without a baseline there is neither speedup nor comparison of texts.
/// `progress` is called with (texts done, texts to do) after each text; `stop` is looked at between texts.
///
/// # Errors
/// [`DecodeError::Stopped`] when `stop` was set, [`DecodeError::NoDrafter`] when a decoder needs the one that is absent, and what the
/// decoders give.
pub fn evaluate(
    target: &Transformer,
    mut drafter: Option<&mut Drafter>,
    plan: Plan<'_>,
    baselines: &mut BTreeMap<String, Baseline>,
    progress: &mut dyn FnMut(usize, usize),
    stop: &AtomicBool,
) -> Result<Evaluation, DecodeError> {
    // The others are compared with the autoregressive decoder, so it goes first whatever the order asked for.
    let Plan { benchmarks, decoders, settings } = plan;
    let mut decoders = decoders.to_vec();
    decoders.sort_by_key(|&decoder| decoder != Decoder::Autoregressive);
    let runs: Vec<(&Benchmark, Decoder)> =
        benchmarks.iter().flat_map(|benchmark| decoders.iter().map(move |&decoder| (benchmark, decoder))).collect();
    let measured = |benchmark: &Benchmark, decoder, baselines: &BTreeMap<String, Baseline>| {
        decoder == Decoder::Autoregressive && baselines.contains_key(&benchmark.name)
    };
    let to_do: Vec<(&Benchmark, Decoder)> =
        runs.iter().copied().filter(|&(benchmark, decoder)| !measured(benchmark, decoder, baselines)).collect();
    let total = to_do.iter().map(|(benchmark, _)| benchmark.prompts.len()).sum();
    let mut done = 0;
    let mut evaluation = Evaluation::default();
    for (benchmark, decoder) in runs {
        let name = decoder_name(decoder);
        let known = baselines.get(&benchmark.name).filter(|_| decoder == Decoder::Autoregressive);
        let score = if let Some(baseline) = known {
            baseline.score.clone()
        } else {
            let mut on_text = || {
                done += 1;
                progress(done, total);
            };
            let texts =
                decode_benchmark(target, drafter.as_deref_mut(), &benchmark.prompts, decoder, settings, &mut on_text, stop)?;
            let mut score = figures(&texts);
            if decoder == Decoder::Autoregressive {
                let tokens = texts.iter().map(|text| text.tokens.clone()).collect();
                let baseline = Baseline { tokens, score: score.clone() };
                baselines.insert(benchmark.name.clone(), baseline);
            } else if let Some(baseline) = baselines.get(&benchmark.name) {
                compare(target, &benchmark.prompts, settings, &texts, baseline, &mut score)?;
            }
            let rounds = texts.into_iter().flat_map(|text| text.rounds);
            let row = |round| RoundRow { decoder: name.to_string(), benchmark: benchmark.name.clone(), round };
            evaluation.rounds.extend(rounds.map(row));
            score
        };
        evaluation.decoders.entry(name.to_string()).or_default().benchmarks.insert(benchmark.name.clone(), score);
    }
    Ok(evaluation)
}

/// Decodes all prompts with one decoder; `on_text` is called after each text, `stop` looked at between texts.
fn decode_benchmark(
    target: &Transformer,
    drafter: Option<&mut Drafter>,
    prompts: &[Vec<u32>],
    decoder: Decoder,
    settings: &Settings,
    on_text: &mut dyn FnMut(),
    stop: &AtomicBool,
) -> Result<Vec<Decoded>, DecodeError> {
    let stopped = || stop.load(Ordering::Relaxed);
    if stopped() {
        return Err(DecodeError::Stopped);
    }
    let mut texts = Vec::with_capacity(prompts.len());
    let mut collect = |text| {
        texts.push(text);
        on_text();
        if stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let absent = || DecodeError::NoDrafter { decoder: decoder_name(decoder) };
    match decoder {
        Decoder::Autoregressive => autoregressive(target, prompts, settings, &mut collect)?,
        Decoder::Lockstep => lockstep(target, drafter.ok_or_else(absent)?, prompts, settings, &mut collect)?,
        Decoder::Asynchronous => asynchronous(target, drafter.ok_or_else(absent)?, prompts, settings, &mut collect)?,
    }
    if texts.len() < prompts.len() { Err(DecodeError::Stopped) } else { Ok(texts) }
}

/// The figures that a decoder's texts give by themselves.
fn figures(texts: &[Decoded]) -> BenchmarkScore {
    let rounds: Vec<Round> = texts.iter().flat_map(|text| text.rounds.iter().cloned()).collect();
    let tally = tally(&rounds);
    let decode_seconds: f64 = texts.iter().map(|text| text.decode_seconds).sum();
    let drafts = rounds.iter().any(|round| round.drafted > 0);
    BenchmarkScore {
        prompts: texts.len(),
        tokens: texts.iter().map(|text| text.tokens.len()).sum(),
        rounds: tally.rounds,
        tau_pooled: tally.tau_pooled,
        tau_macro: tally.tau_macro,
        tokens_per_second: if decode_seconds > 0.0 { tally.committed as f64 / decode_seconds } else { 0.0 },
        hit_rate: tally.hit_rate,
        acceptance_by_position: tally.acceptance_by_position,
        accepted_histogram: if drafts { tally.accepted_histogram } else { Vec::new() },
        misses: tally.misses,
        prefill_seconds: texts.iter().map(|text| text.prefill_seconds).sum(),
        draft_seconds: tally.draft_seconds,
        pack_seconds: tally.pack_seconds,
        verify_seconds: tally.verify_seconds,
        wait_seconds: tally.wait_seconds,
        ..BenchmarkScore::default()
    }
}

/// Adds to `score` what only a comparison with the autoregressive decoder tells.
fn compare(
    target: &Transformer,
    prompts: &[Vec<u32>],
    settings: &Settings,
    texts: &[Decoded],
    baseline: &Baseline,
    score: &mut BenchmarkScore,
) -> Result<(), DecodeError> {
    let alone = baseline.score.tokens_per_second;
    score.speedup = (alone > 0.0).then(|| score.tokens_per_second / alone);
    for (prompt, (text, expected)) in texts.iter().zip(&baseline.tokens).enumerate() {
        if text.tokens != *expected {
            let divergence = first_divergence(target, prompt, &prompts[prompt], &text.tokens, expected, settings)?;
            score.first_divergences.push(divergence);
        }
    }
    score.identical_to_autoregressive = Some(score.first_divergences.is_empty() && texts.len() == baseline.tokens.len());
    score.near_ties = (!score.first_divergences.is_empty())
        .then(|| score.first_divergences.iter().filter(|divergence| divergence.near_tie).count());
    Ok(())
}

/// Looks at the target's scores where two texts part: when both tokens score as the best one does, but for rounding, the number of
/// rows in a forward can turn the choice round, and it is a near-tie; else it is a fault in a decoder, as is a difference in length.
fn first_divergence(
    target: &Transformer,
    prompt: usize,
    prompt_ids: &[u32],
    found: &[u32],
    expected: &[u32],
    settings: &Settings,
) -> Result<Divergence, DecodeError> {
    let _no_grad = tch::no_grad_guard();
    let position = found.iter().zip(expected).take_while(|(one, other)| one == other).count();
    let prefix = [prompt_ids, &expected[..position]].concat();
    let cache = KvCache::new(&target.config, 1, prefix.len(), target.kind(), target.device());
    let logits_rv = target_logits(target, &cache, &prefix, 1)?;
    let scores =
        torch::guarded("comparing texts", || torch::to_f32s(&settings.sampler.scores(&logits_rv, prompt as u64, &[position])))?;
    let best = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (expected, found) = (expected.get(position).copied(), found.get(position).copied());
    let score_of = |token: Option<u32>| token.and_then(|token| scores.get(token as usize)).copied().unwrap_or(f32::NEG_INFINITY);
    let margin = f64::from(best - score_of(expected).min(score_of(found)));
    Ok(Divergence { prompt, position, expected, found, margin, near_tie: margin <= rounding(target.kind(), best) })
}

/// How far rounding may move the difference of two scores of this size: two steps of bf16, or the 1e-4 to which f32 forwards of
/// different shapes agree.
fn rounding(kind: Kind, score: f32) -> f64 {
    match kind {
        Kind::BFloat16 => 2.0 * f64::from(score.abs().max(f32::MIN_POSITIVE).log2().floor() - 7.0).exp2(),
        _ => 1e-4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rounding_of_bf16_grows_with_the_score() {
        // Between 16 and 32 neighbouring bf16 numbers are 1/8 apart.
        assert_eq!(rounding(Kind::BFloat16, 17.0), 0.25);
        assert_eq!(rounding(Kind::BFloat16, -33.0), 0.5);
        assert_eq!(rounding(Kind::Float, 1000.0), 1e-4);
    }
}
