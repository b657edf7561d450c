//! From benchmarks to the figures of a score.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use configs::{Decoder, Drafts, Hardware, Labels, Latency};
use evaluator::benchmark::{Benchmark, Plan, decoder_name, evaluate};
use evaluator::fan_out::{FanOut, Lookup};
use evaluator::rounds::Round;
use evaluator::score::RoundRow;
use evaluator::simulated::simulate;
use evaluator::{DecodeError, Sampler, Settings};

use crate::models::{noisy_drafter, prompts, random_model};

static ALL: [Decoder; 3] = [Decoder::Asynchronous, Decoder::Autoregressive, Decoder::Lockstep];

struct Setup {
    benchmarks: Vec<Benchmark>,
    settings: Settings,
}

impl Setup {
    fn new() -> Self {
        let prompts = prompts(6, 10);
        let part =
            |name: &str, prompts: &[Vec<u32>]| Benchmark { name: name.to_string(), prompts: prompts.to_vec(), next_turn: None };
        Self {
            benchmarks: vec![part("first", &prompts[..2]), part("second", &prompts[2..])],
            settings: Settings {
                sampler: Sampler::greedy(),
                stop_tokens: vec![4],
                max_new_tokens: 12,
                concurrency: 1,
                fan_out: FanOut::Rectangle { positions: 2, candidates: 2 },
                drafts: Drafts::Point,
            },
        }
    }

    fn of<'a>(&'a self, decoders: &'a [Decoder]) -> Plan<'a> {
        Plan { benchmarks: &self.benchmarks, decoders, settings: &self.settings }
    }
}

#[test]
fn a_score_has_every_decoder_on_every_benchmark() {
    let plan = Setup::new();
    let target = random_model(10, 2, 1);
    let mut drafter = noisy_drafter(&target, 0.1, 4, Labels::Next, 2);
    let (mut baselines, mut calls, go_on) = (BTreeMap::new(), Vec::new(), AtomicBool::new(false));
    let mut progress = |done, total| calls.push((done, total));
    let evaluation = evaluate(&target, Some(&mut drafter), plan.of(&ALL), &mut baselines, &mut progress, &go_on).unwrap();
    assert_eq!(calls, (1..=18).map(|done| (done, 18)).collect::<Vec<_>>());
    for (name, count) in [("first", 2), ("second", 4)] {
        let of = |decoder: &str| &evaluation.decoders[decoder].benchmarks[name];
        let (alone, in_turn, ahead) = (of("autoregressive"), of("lockstep"), of("asynchronous"));
        assert_eq!((alone.prompts, alone.tokens), (count, baselines[name].turns[0].answers.iter().map(Vec::len).sum()));
        assert_eq!((alone.tau_pooled, alone.speedup, alone.identical_to_autoregressive), (1.0, None, None));
        for other in [in_turn, ahead] {
            assert_eq!((other.tokens, other.identical_to_autoregressive, other.near_ties), (alone.tokens, Some(true), None));
            assert_eq!(other.speedup, Some(other.tokens_per_second / alone.tokens_per_second));
            let (low, high) = other.tau_interval.unwrap();
            assert!(low <= other.tau_pooled && other.tau_pooled <= high && other.prompts_hash == alone.prompts_hash);
            assert_eq!(other.by_prompt.iter().map(|it| it.rounds).sum::<usize>(), other.rounds);
            assert!(other.round_cost.unwrap() > 0.0 && other.speedup_interval.unwrap().0 > 0.0);
            assert_eq!(other.tau_pooled, (other.tokens - count) as f64 / other.rounds as f64);
            let rows =
                |decoder: &str| evaluation.rounds.iter().filter(|row| row.decoder == decoder && row.benchmark == name).count();
            assert_eq!((rows("lockstep"), rows("asynchronous")), (in_turn.rounds, ahead.rounds));
        }
        // With `next` labels a continuation is the block that lockstep drafts, so the rounds are the same.
        assert_eq!(in_turn.tau_pooled, ahead.tau_pooled);
        assert!(ahead.hit_rate.is_some() && in_turn.hit_rate.is_none());
    }
}

#[test]
fn a_known_baseline_is_not_measured_again_and_other_texts_are_reported() {
    let plan = Setup::new();
    let target = random_model(10, 2, 1);
    let mut drafter = noisy_drafter(&target, 0.1, 4, Labels::InPlace, 2);
    let (mut baselines, go_on) = (BTreeMap::new(), AtomicBool::new(false));
    evaluate(&target, None, plan.of(&ALL[1..2]), &mut baselines, &mut |_, _| {}, &go_on).unwrap();
    // As if the autoregressive decoder had written something else in one place, where the target has a clear preference.
    let first = baselines.get_mut("first").unwrap();
    let position = 1;
    let true_token = first.turns[0].answers[1][position];
    first.turns[0].answers[1][position] = (true_token + 1) % 10;
    let mut total = 0;
    let evaluation =
        evaluate(&target, Some(&mut drafter), plan.of(&ALL), &mut baselines, &mut |_, all| total = all, &go_on).unwrap();
    assert_eq!(total, 12);
    let figures = &evaluation.decoders["lockstep"].benchmarks["first"];
    assert_eq!((figures.identical_to_autoregressive, figures.near_ties), (Some(false), Some(0)));
    let divergence = &figures.first_divergences[0];
    assert_eq!((divergence.prompt, divergence.position, divergence.found), (1, 1, Some(true_token)));
    assert!(divergence.margin.is_some_and(|margin| margin > 1e-3) && !divergence.near_tie);
    assert_eq!(evaluation.decoders["lockstep"].benchmarks["second"].identical_to_autoregressive, Some(true));
    assert!(evaluation.decoders["autoregressive"].benchmarks.contains_key("second"));
    assert!(evaluation.rounds.iter().all(|row| row.decoder != "autoregressive"));
}

#[test]
fn rounds_that_happened_can_be_timed_for_other_hardware() {
    let plan = Setup::new();
    let target = random_model(10, 2, 1);
    let mut drafter = noisy_drafter(&target, 0.1, 4, Labels::InPlace, 2);
    let go_on = AtomicBool::new(false);
    let evaluation = evaluate(&target, Some(&mut drafter), plan.of(&ALL), &mut BTreeMap::new(), &mut |_, _| {}, &go_on).unwrap();
    // One millisecond a forward, whatever it runs over.
    let forward = Latency { floor_ms: 1.0, per_token_ms: 0.0, per_context_token_ms: 0.0, overhead_ms: 0.0 };
    let text = String::from;
    let profile =
        Hardware { name: text("lab"), source: text("-"), verify: forward, pack: forward, draft: forward, reference: text("lab") };
    let rounds = |decoder: &str| -> Vec<&RoundRow> { evaluation.rounds.iter().filter(|row| row.decoder == decoder).collect() };
    for name in ALL.map(decoder_name) {
        for (benchmark, figures) in &evaluation.decoders[name].benchmarks {
            let own: Vec<&Round> =
                rounds(name).into_iter().filter(|row| row.benchmark == *benchmark).map(|row| &row.round).collect();
            let simulated = simulate(&own, 4, &profile).unwrap();
            let hits = own.iter().filter(|round| round.lookup == Some(Lookup::Hit)).count();
            let drafts = if name == "autoregressive" { 0 } else { figures.rounds - hits };
            assert!((simulated.seconds - 1e-3 * (figures.rounds + drafts) as f64).abs() < 1e-9, "{name} {benchmark}");
        }
    }
    // Every block was verified whole, whatever of it the text kept; only one that stands in for a full acceptance is shorter by one.
    assert!(rounds("lockstep").iter().all(|row| row.round.proposed == 3 && row.round.drafted <= 3));
    assert!(rounds("lockstep").iter().any(|row| row.round.drafted < 3), "some text ended inside a draft");
    assert!(rounds("asynchronous").iter().all(|row| row.round.proposed == 3 || row.round.lookup == Some(Lookup::Hit)));
    assert!(rounds("autoregressive").iter().all(|row| row.round.proposed == 0));
}

#[test]
fn texts_of_sampled_drafts_are_timed_but_not_compared() {
    let mut plan = Setup::new();
    plan.settings.sampler.temperature = 0.8;
    plan.settings.drafts = Drafts::Sampled;
    let target = random_model(10, 2, 1);
    let mut drafter = noisy_drafter(&target, 0.1, 4, Labels::Next, 2);
    let go_on = AtomicBool::new(false);
    let evaluation = evaluate(&target, Some(&mut drafter), plan.of(&ALL), &mut BTreeMap::new(), &mut |_, _| {}, &go_on).unwrap();
    for decoder in ["lockstep", "asynchronous"] {
        let figures = &evaluation.decoders[decoder].benchmarks["second"];
        assert!(figures.speedup.is_some() && figures.round_cost.is_some() && figures.tau_pooled > 1.0);
        assert_eq!((figures.identical_to_autoregressive, figures.near_ties), (None, None));
        assert!(figures.first_divergences.is_empty());
    }
}

#[test]
fn the_stop_flag_and_an_absent_drafter_are_errors() {
    let plan = Setup::new();
    let target = random_model(10, 2, 1);
    let mut drafter = noisy_drafter(&target, 0.1, 4, Labels::InPlace, 2);
    let stop = AtomicBool::new(false);
    let mut progress = |done, _| stop.store(done == 3, Ordering::Relaxed);
    let result = evaluate(&target, Some(&mut drafter), plan.of(&ALL), &mut BTreeMap::new(), &mut progress, &stop);
    assert!(matches!(result, Err(DecodeError::Stopped)));
    let go_on = AtomicBool::new(false);
    let result = evaluate(&target, None, plan.of(&ALL), &mut BTreeMap::new(), &mut |_, _| {}, &go_on);
    assert!(matches!(result, Err(DecodeError::NoDrafter { decoder: "asynchronous" })));
}

#[test]
fn a_second_turn_is_asked_with_the_first_decoders_answer_and_belongs_to_its_prompt() {
    let mut plan = Setup::new();
    // Conversations of one or two turns, by the parity of their index.
    plan.benchmarks.truncate(1);
    plan.benchmarks[0].prompts = prompts(5, 10);
    let firsts = plan.benchmarks[0].prompts.clone();
    plan.benchmarks[0].next_turn = Some(Box::new(move |index, answers| {
        let more = index % 2 == 0 && answers.len() == 1;
        Ok(more.then(|| [&firsts[index], answers[0], &[index as u32, 7]].concat()))
    }));
    let target = random_model(10, 2, 1);
    let mut drafter = noisy_drafter(&target, 0.1, 4, Labels::Next, 2);
    let (mut baselines, go_on) = (BTreeMap::new(), AtomicBool::new(false));
    let evaluation = evaluate(&target, Some(&mut drafter), plan.of(&ALL), &mut baselines, &mut |_, _| {}, &go_on).unwrap();
    let turns = &baselines["first"].turns;
    assert_eq!(turns.len(), 2);
    assert_eq!(turns[1].conversations, [0, 2, 4]);
    for (place, &conversation) in turns[1].conversations.iter().enumerate() {
        let expected = [&turns[0].prompts[conversation][..], &turns[0].answers[conversation], &[conversation as u32, 7]].concat();
        assert_eq!(turns[1].prompts[place], expected);
    }
    for decoder in ["autoregressive", "lockstep", "asynchronous"] {
        let figures = &evaluation.decoders[decoder].benchmarks["first"];
        assert_eq!((figures.prompts, figures.by_prompt.len()), (5, 5));
        assert!(figures.identical_to_autoregressive != Some(false));
    }
    assert!(evaluation.rounds.iter().any(|row| row.round.turn == 1 && row.round.prompt == 4));
    // Without the autoregressive decoder the first of the others leads the conversation.
    let both = [Decoder::Lockstep, Decoder::Asynchronous];
    let other = evaluate(&target, Some(&mut drafter), plan.of(&both), &mut BTreeMap::new(), &mut |_, _| {}, &go_on).unwrap();
    assert_eq!(
        other.decoders["asynchronous"].benchmarks["first"].tokens,
        evaluation.decoders["asynchronous"].benchmarks["first"].tokens
    );
    let failing = Benchmark { next_turn: Some(Box::new(|_, _| Err("no template".to_string()))), ..plan.benchmarks.remove(0) };
    plan.benchmarks.push(failing);
    let error = evaluate(&target, None, plan.of(&ALL[1..2]), &mut BTreeMap::new(), &mut |_, _| {}, &go_on).unwrap_err();
    assert!(error.to_string().contains("`first`, conversation 0") && error.to_string().contains("no template"), "{error}");
}
