//! Runs decoders over the prompts of benchmarks and turns what they did into a score.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use configs::{Decoder, Drafts};
use data::supervision::{counter_generator, purpose};
use model::{KvCache, Transformer};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tch::Kind;

use crate::asynchronous::asynchronous;
use crate::bootstrap::ratio_interval;
use crate::decode::{DecodeError, Decoded, Event, Settings, autoregressive, lockstep};
use crate::drafter::Drafter;
use crate::rounds::{Round, ratio, tally};
use crate::sampling::{Sampler, TokenPlace};
use crate::score::{BenchmarkScore, DecoderScore, Divergence, PromptFigures, RoundRow};
use crate::under_way::target_logits;

/// Gives the next turn of a conversation: the index of its prompt and the answers so far → the token ids of the whole conversation up
/// to the next answer, or nothing when it is over.
pub type NextTurn = dyn Fn(usize, &[&[u32]]) -> Result<Option<Vec<u32>>, String>;

/// Named prompts, as token ids.
pub struct Benchmark {
    pub name: String,
    /// Of the first turns.
    pub prompts: Vec<Vec<u32>>,
    /// Absent where every conversation has one turn.
    pub next_turn: Option<Box<NextTurn>>,
}

/// What to run, and how.
#[derive(Clone, Copy)]
pub struct Plan<'a> {
    pub benchmarks: &'a [Benchmark],
    pub decoders: &'a [Decoder],
    pub settings: &'a Settings,
}

/// One turn of all conversations that have one: the prompts, whose they are, and the text all decoders must write.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// Index of the conversation for each prompt.
    pub conversations: Vec<usize>,
    pub prompts: Vec<Vec<u32>>,
    pub answers: Vec<Vec<u32>>,
}

/// What the first decoder did on a benchmark. When that is the autoregressive one, its text is what all others must write, and its
/// speed what they are measured against; the target is the same for all checkpoints of a run, so this is measured once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    pub turns: Vec<Turn>,
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

/// The name of a way to draft in recipes and scores.
pub fn drafts_name(drafts: Drafts) -> &'static str {
    match drafts {
        Drafts::Point => "point",
        Drafts::Sampled => "sampled",
    }
}

/// Tokens that each decoder writes before it is timed.
const WARM_UP_TOKENS: usize = 8;

/// Runs every decoder over every benchmark.
///
/// `baselines` holds the autoregressive results by benchmark. Where it has one, that decoder does not run again; where it has none
/// and the decoder is asked for, it is filled in. Without a baseline there is neither speedup nor comparison of texts.
/// Of a conversation of several turns, all decoders are given the first decoder's answers, so that they answer the same prompts.
/// `progress` is called with (texts done, texts to do, as far as is known) after each text; `stop` is looked at after every round.
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
    let texts_of = |benchmark: &Benchmark, baselines: &BTreeMap<String, Baseline>| match baselines.get(&benchmark.name) {
        Some(baseline) => baseline.turns.iter().map(|turn| turn.prompts.len()).sum(),
        None => benchmark.prompts.len(),
    };
    let mut done = 0;
    let mut evaluation = Evaluation::default();
    let mut conversations: BTreeMap<&str, Vec<Turn>> = BTreeMap::new();
    for (index, &(benchmark, decoder)) in runs.iter().enumerate() {
        let name = decoder_name(decoder);
        let to_do: usize = runs[index..]
            .iter()
            .filter(|&&(benchmark, decoder)| !measured(benchmark, decoder, baselines))
            .map(|(benchmark, _)| texts_of(benchmark, baselines))
            .sum();
        let before = done;
        let score = if measured(benchmark, decoder, baselines) {
            baselines[&benchmark.name].score.clone()
        } else {
            let mut on_text = || {
                done += 1;
                progress(done, (before + to_do).max(done));
            };
            let baseline = baselines.get(&benchmark.name);
            let known = baseline.map(|baseline| &baseline.turns).or_else(|| conversations.get(benchmark.name.as_str()));
            let mut run = Run { target, drafter: drafter.as_deref_mut(), decoder, settings, stop };
            let (turns, texts) = run.benchmark(benchmark, known.map(Vec::as_slice), &mut on_text)?;
            let mut score = figures(&turns, &texts);
            score.peak_memory_bytes = torch::memory::peak_memory_bytes(target.device());
            let rounds = texts.iter().flatten().flat_map(|text| text.rounds.iter().cloned());
            let row = |round| RoundRow { decoder: name.to_string(), benchmark: benchmark.name.clone(), round };
            evaluation.rounds.extend(rounds.map(row));
            if decoder == Decoder::Autoregressive {
                baselines.insert(benchmark.name.clone(), Baseline { turns, score: score.clone() });
            } else {
                if let Some(baseline) = baseline {
                    compare(target, settings, &texts, baseline, &mut score)?;
                }
                conversations.entry(&benchmark.name).or_insert(turns);
            }
            score
        };
        evaluation.decoders.entry(name.to_string()).or_default().benchmarks.insert(benchmark.name.clone(), score);
    }
    Ok(evaluation)
}

/// One decoder at work.
struct Run<'a> {
    target: &'a Transformer,
    drafter: Option<&'a mut Drafter>,
    decoder: Decoder,
    settings: &'a Settings,
    stop: &'a AtomicBool,
}

impl Run<'_> {
    /// Decodes all turns of all conversations: the `known` ones, or those that its own answers lead to. Texts are by turn, in the order
    /// of the turn's prompts.
    fn benchmark(
        &mut self,
        benchmark: &Benchmark,
        known: Option<&[Turn]>,
        on_text: &mut dyn FnMut(),
    ) -> Result<(Vec<Turn>, Vec<Vec<Decoded>>), DecodeError> {
        // What a first forward allocates and caches is not part of anybody's speed.
        if let Some(first) = benchmark.prompts.first() {
            let max_new_tokens = self.settings.max_new_tokens.min(WARM_UP_TOKENS);
            self.decode(std::slice::from_ref(first), &Settings { max_new_tokens, ..self.settings.clone() }, &mut || {})?;
        }
        let (mut turns, mut texts): (Vec<Turn>, Vec<Vec<Decoded>>) = (Vec::new(), Vec::new());
        loop {
            let number = turns.len();
            let (conversations, prompts) = match known {
                Some(known) if number == known.len() => break,
                Some(known) => (known[number].conversations.clone(), known[number].prompts.clone()),
                None => next_prompts(benchmark, &turns)?,
            };
            if prompts.is_empty() {
                break;
            }
            let settings = Settings { sampler: of_turn(&self.settings.sampler, number), ..self.settings.clone() };
            let mut decoded = self.decode(&prompts, &settings, on_text)?;
            decoded.sort_by_key(|text| text.prompt);
            for text in &mut decoded {
                text.prompt = conversations[text.prompt];
                text.rounds.iter_mut().for_each(|round| (round.prompt, round.turn) = (text.prompt, number));
            }
            let answers = decoded.iter().map(|text| text.tokens.clone()).collect();
            turns.push(Turn { conversations, prompts, answers });
            texts.push(decoded);
        }
        Ok((turns, texts))
    }

    /// Decodes all prompts; texts come as they finish.
    fn decode(
        &mut self,
        prompts: &[Vec<u32>],
        settings: &Settings,
        on_text: &mut dyn FnMut(),
    ) -> Result<Vec<Decoded>, DecodeError> {
        let mut texts = Vec::with_capacity(prompts.len());
        let mut collect = |event: Event<'_>| {
            if let Event::Text(text) = event {
                texts.push(text);
                on_text();
            }
            if self.stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let absent = || DecodeError::NoDrafter { decoder: decoder_name(self.decoder) };
        let target = self.target;
        match self.decoder {
            Decoder::Autoregressive => autoregressive(target, prompts, settings, &mut collect)?,
            Decoder::Lockstep => lockstep(target, self.drafter.as_deref().ok_or_else(absent)?, prompts, settings, &mut collect)?,
            Decoder::Asynchronous => {
                let drafter = self.drafter.as_deref_mut().ok_or_else(absent)?;
                asynchronous(target, drafter, prompts, settings, &mut collect)?;
            }
        }
        if texts.len() < prompts.len() { Err(DecodeError::Stopped) } else { Ok(texts) }
    }
}

/// The prompts of the turn after these, and whose they are.
fn next_prompts(benchmark: &Benchmark, turns: &[Turn]) -> Result<(Vec<usize>, Vec<Vec<u32>>), DecodeError> {
    let Some(last) = turns.last() else {
        return Ok(((0..benchmark.prompts.len()).collect(), benchmark.prompts.clone()));
    };
    let mut next = (Vec::new(), Vec::new());
    for &conversation in benchmark.next_turn.iter().flat_map(|_| &last.conversations) {
        let answers: Vec<&[u32]> = turns
            .iter()
            .filter_map(|turn| {
                let place = turn.conversations.iter().position(|&other| other == conversation)?;
                Some(turn.answers[place].as_slice())
            })
            .collect();
        let Some(next_turn) = &benchmark.next_turn else { break };
        let prompt = next_turn(conversation, &answers).map_err(|problem| DecodeError::NextTurn {
            benchmark: benchmark.name.clone(),
            conversation,
            problem,
        })?;
        if let Some(prompt) = prompt {
            next.0.push(conversation);
            next.1.push(prompt);
        }
    }
    Ok(next)
}

/// The figures that a decoder's texts give by themselves.
fn figures(turns: &[Turn], texts: &[Vec<Decoded>]) -> BenchmarkScore {
    let all = || texts.iter().flatten();
    let rounds: Vec<Round> = all().flat_map(|text| text.rounds.iter().cloned()).collect();
    let tally = tally(&rounds);
    let prompts = turns.first().map_or(0, |turn| turn.prompts.len());
    let mut by_prompt = vec![PromptFigures::default(); prompts];
    for text in all() {
        let figures = &mut by_prompt[text.prompt];
        figures.rounds += text.rounds.len();
        figures.committed += text.rounds.iter().map(|round| round.committed).sum::<usize>();
        figures.seconds += text.decode_seconds;
    }
    let drafts = rounds.iter().any(|round| round.drafted > 0);
    let tau = |picked: &[usize]| {
        let sum = |count: fn(&PromptFigures) -> usize| picked.iter().map(|&index| count(&by_prompt[index])).sum();
        ratio(sum(|it| it.committed), sum(|it| it.rounds))
    };
    BenchmarkScore {
        prompts,
        tokens: all().map(|text| text.tokens.len()).sum(),
        rounds: tally.rounds,
        tau_pooled: tally.tau_pooled,
        tau_macro: tally.tau_macro,
        tau_interval: drafts.then(|| ratio_interval(prompts, counter_generator(0, purpose::BOOTSTRAP, 0, 0), tau)),
        tokens_per_second: rate(by_prompt.iter()),
        hit_rate: tally.hit_rate,
        acceptance_by_position: tally.acceptance_by_position,
        accepted_histogram: if drafts { tally.accepted_histogram } else { Vec::new() },
        misses: tally.misses,
        tau_after_hit: tally.tau_after_hit,
        tau_after_miss: tally.tau_after_miss,
        prefill_seconds: all().map(|text| text.prefill_seconds).sum(),
        draft_seconds: tally.draft_seconds,
        pack_seconds: tally.pack_seconds,
        verify_seconds: tally.verify_seconds,
        wait_seconds: tally.wait_seconds,
        bubble_seconds: tally.bubble_seconds,
        prompts_hash: prompts_hash(turns),
        by_prompt,
        ..BenchmarkScore::default()
    }
}

/// Tokens per second over these prompts.
fn rate<'f>(prompts: impl Iterator<Item = &'f PromptFigures>) -> f64 {
    let (committed, seconds) = prompts.fold((0, 0.0), |sum, it| (sum.0 + it.committed, sum.1 + it.seconds));
    if seconds > 0.0 { committed as f64 / seconds } else { 0.0 }
}

fn prompts_hash(turns: &[Turn]) -> String {
    let mut hash = Sha256::new();
    for prompt in turns.iter().flat_map(|turn| &turn.prompts) {
        hash.update((prompt.len() as u64).to_le_bytes());
        prompt.iter().for_each(|token| hash.update(token.to_le_bytes()));
    }
    hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// Adds to `score` what only a comparison with the autoregressive decoder tells.
fn compare(
    target: &Transformer,
    settings: &Settings,
    texts: &[Vec<Decoded>],
    baseline: &Baseline,
    score: &mut BenchmarkScore,
) -> Result<(), DecodeError> {
    let alone = &baseline.score;
    if alone.tokens_per_second > 0.0 && alone.by_prompt.len() == score.by_prompt.len() {
        let (ours, theirs) = (&score.by_prompt, &alone.by_prompt);
        let speedup = |picked: &[usize]| {
            let alone = rate(picked.iter().map(|&index| &theirs[index]));
            if alone > 0.0 { rate(picked.iter().map(|&index| &ours[index])) / alone } else { 0.0 }
        };
        let interval = ratio_interval(ours.len(), counter_generator(0, purpose::BOOTSTRAP, 1, 0), speedup);
        // What a round costs is what its tokens would have cost, over what was gained.
        let per_round = |it: &BenchmarkScore| it.by_prompt.iter().map(|it| it.seconds).sum::<f64>() / it.rounds.max(1) as f64;
        score.round_cost = (per_round(alone) > 0.0).then(|| per_round(score) / per_round(alone));
        score.speedup = Some(score.tokens_per_second / alone.tokens_per_second);
        score.speedup_interval = Some(interval);
    }
    if settings.drafts == Drafts::Sampled {
        // Such texts agree with the autoregressive decoder's in distribution only.
        return Ok(());
    }
    let mut compared = 0;
    for (number, (turn, texts)) in baseline.turns.iter().zip(texts).enumerate() {
        let sampler = of_turn(&settings.sampler, number);
        for (index, (text, expected)) in texts.iter().zip(&turn.answers).enumerate() {
            compared += 1;
            if text.tokens != *expected {
                let divergence = first_divergence(target, &turn.prompts[index], (&text.tokens, expected), &sampler, index)?;
                score.first_divergences.push(Divergence { prompt: text.prompt, ..divergence });
            }
        }
    }
    let texts = baseline.turns.iter().map(|turn| turn.answers.len()).sum::<usize>();
    score.identical_to_autoregressive = Some(score.first_divergences.is_empty() && compared == texts);
    score.near_ties = (!score.first_divergences.is_empty())
        .then(|| score.first_divergences.iter().filter(|divergence| divergence.near_tie).count());
    Ok(())
}

/// What draws in the turn of this number: turns of one conversation draw different noise.
fn of_turn(sampler: &Sampler, number: usize) -> Sampler {
    Sampler { seed: sampler.seed.wrapping_add(number as u64), ..sampler.clone() }
}

/// Looks at the target's scores where two texts part. In f32 that is a fault in a decoder; in bf16 the number of rows in a forward can
/// turn the choice round where both tokens score alike: a near-tie, as long as they are no further apart than such forwards differ. A
/// token that such forwards now leave out by top-k or top-p and now do not is a near-tie as well.
fn first_divergence(
    target: &Transformer,
    prompt_ids: &[u32],
    (found, expected): (&[u32], &[u32]),
    sampler: &Sampler,
    request: usize,
) -> Result<Divergence, DecodeError> {
    let _no_grad = tch::no_grad_guard();
    let position = found.iter().zip(expected).take_while(|(one, other)| one == other).count();
    let prefix = [prompt_ids, &expected[..position]].concat();
    let mut cache = KvCache::new(&target.config, 1, prefix.len(), target.kind(), target.device());
    // The prefix all but its last rows, then those rows in one forward, as a verification of so many rows would have them.
    let mut scores = Vec::new();
    for rows in RESCORED_ROWS.map(|rows| rows.min(prefix.len())) {
        let (before, last) = prefix.split_at(prefix.len() - rows);
        cache.set_length(0, 0);
        if !before.is_empty() {
            let _ = target_logits(target, &cache, &[(0, before)], 1)?;
            cache.set_length(0, before.len());
        }
        let logits_rv = target_logits(target, &cache, &[(0, last)], 1)?;
        let chosen_by = || torch::to_f32s(&sampler.scores(&logits_rv, &[TokenPlace { request: request as u64, position }]));
        scores.push(torch::guarded("comparing texts", chosen_by)?);
    }
    let alone = &scores[0];
    let best = alone.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (expected, found) = (expected.get(position).copied(), found.get(position).copied());
    let score_of = |token: Option<u32>| token.and_then(|token| alone.get(token as usize)).copied().unwrap_or(f32::NEG_INFINITY);
    let margin = Some(f64::from(best - score_of(expected).min(score_of(found)))).filter(|margin| margin.is_finite());
    let differences =
        scores[1..].iter().flat_map(|scores| scores.iter().zip(alone)).map(|(one, other)| f64::from((one - other).abs()));
    let noise = differences.filter(|difference| difference.is_finite()).fold(0.0, f64::max);
    let comes_and_goes = |token: Option<u32>| {
        let kept = |scores: &Vec<f32>| token.and_then(|token| scores.get(token as usize)).is_some_and(|score| score.is_finite());
        scores.iter().any(kept) && !scores.iter().all(kept)
    };
    // Either score may have moved by the noise.
    let tied = margin.is_some_and(|margin| margin <= 2.0 * noise) || comes_and_goes(expected) || comes_and_goes(found);
    let near_tie = target.kind() == Kind::BFloat16 && tied;
    Ok(Divergence { prompt: 0, position, expected, found, margin, noise, near_tie })
}

/// Rows of the forwards whose scores are compared; the first is the autoregressive decoder's.
const RESCORED_ROWS: [usize; 5] = [1, 2, 4, 8, 16];
