//! From benchmarks to the figures of a score.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use configs::{Decoder, Labels};
use evaluator::benchmark::{Benchmark, Plan, evaluate};
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
        let part = |name: &str, prompts: &[Vec<u32>]| Benchmark { name: name.to_string(), prompts: prompts.to_vec() };
        Self {
            benchmarks: vec![part("first", &prompts[..2]), part("second", &prompts[2..])],
            settings: Settings {
                sampler: Sampler::greedy(),
                stop_tokens: vec![4],
                max_new_tokens: 12,
                positions: 2,
                candidates: 2,
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
        assert_eq!((alone.prompts, alone.tokens), (count, baselines[name].tokens.iter().map(Vec::len).sum()));
        assert_eq!((alone.tau_pooled, alone.speedup, alone.identical_to_autoregressive), (1.0, None, None));
        for other in [in_turn, ahead] {
            assert_eq!((other.tokens, other.identical_to_autoregressive, other.near_ties), (alone.tokens, Some(true), None));
            assert_eq!(other.speedup, Some(other.tokens_per_second / alone.tokens_per_second));
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
    let true_token = first.tokens[1][position];
    first.tokens[1][position] = (true_token + 1) % 10;
    let mut total = 0;
    let evaluation =
        evaluate(&target, Some(&mut drafter), plan.of(&ALL), &mut baselines, &mut |_, all| total = all, &go_on).unwrap();
    assert_eq!(total, 12);
    let figures = &evaluation.decoders["lockstep"].benchmarks["first"];
    assert_eq!((figures.identical_to_autoregressive, figures.near_ties), (Some(false), Some(0)));
    let divergence = &figures.first_divergences[0];
    assert_eq!((divergence.prompt, divergence.position, divergence.found), (1, 1, Some(true_token)));
    assert!(divergence.margin > 1e-3 && !divergence.near_tie);
    assert_eq!(evaluation.decoders["lockstep"].benchmarks["second"].identical_to_autoregressive, Some(true));
    assert!(evaluation.decoders["autoregressive"].benchmarks.contains_key("second"));
    assert!(evaluation.rounds.iter().all(|row| row.decoder != "autoregressive"));
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
