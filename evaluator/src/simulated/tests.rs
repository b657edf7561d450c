//! The clock against a closed formula, and what must hold whatever the rounds are.
#![allow(clippy::unwrap_used)]

use configs::Latency;
use data::supervision::{below, counter_generator};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::score::{BenchmarkScore, DecoderScore};

const BLOCK: usize = 8;

fn latency(floor_ms: f64, per_token_ms: f64, per_context_token_ms: f64, overhead_ms: f64) -> Latency {
    Latency { floor_ms, per_token_ms, per_context_token_ms, overhead_ms }
}

fn hardware(verify: Latency, pack: Latency, draft: Latency) -> Hardware {
    let text = |text: &str| text.to_string();
    Hardware { name: text("lab"), source: text("made up"), verify, pack, draft, reference: text("lab") }
}

/// Verification 10 ms, packs 1 ms a token, drafts 4 ms.
fn simple() -> Hardware {
    hardware(latency(10.0, 0.0, 0.0, 0.0), latency(0.1, 1.0, 0.0, 0.0), latency(4.0, 0.0, 0.0, 0.0))
}

fn near(one: f64, other: f64) -> bool {
    (one - other).abs() < 1e-9
}

fn run(rounds: &[Round], hardware: &Hardware) -> Simulated {
    simulate(&rounds.iter().collect::<Vec<_>>(), BLOCK, hardware).unwrap()
}

/// Some profile: the pack's floor may be above or below the verification's.
fn some_hardware(generator: &mut ChaCha8Rng) -> Hardware {
    let mut some = |most: u64| below(generator, most * 1000) as f64 / 1000.0;
    let mut latencies = [(); 3].map(|()| latency(0.001 + some(20), some(1), some(1) / 50.0, some(2)));
    latencies[2].floor_ms /= 2.0;
    let [verify, pack, draft] = latencies;
    hardware(verify, pack, draft)
}

/// Texts as a decoder may write them: ahead with hits and misses and packs of any size or none, or in lockstep.
fn some_rounds(generator: &mut ChaCha8Rng, ahead: bool) -> Vec<Round> {
    let mut some = |most: usize| below(generator, most as u64) as usize;
    let mut rounds = Vec::new();
    for prompt in 0..1 + some(4) {
        let (mut context, last) = (1 + some(900), some(12));
        let mut packed = 0;
        for round in 0..=last {
            let lookup = match (round, packed, some(3)) {
                (0, _, _) => Lookup::First,
                (_, 1.., 0 | 1) => Lookup::Hit,
                _ => Lookup::WrongCandidate,
            };
            let proposed = 1 + some(BLOCK - 1);
            let accepted = some(proposed + 1);
            // The end of a text may lie inside what was accepted.
            let committed = if round == last { 1 + some(accepted + 1) } else { accepted + 1 };
            packed = if ahead && round < last { some(4) * some(8) } else { 0 };
            rounds.push(Round {
                prompt,
                turn: prompt % 2,
                round,
                drafted: if committed <= accepted { committed } else { proposed },
                proposed,
                accepted: accepted.min(committed),
                committed,
                lanes: 1,
                context,
                pack_blocks: packed,
                lookup: ahead.then_some(lookup),
                ..Round::default()
            });
            context += committed;
        }
    }
    rounds
}

/// The wall time by the formula: a round costs the longer of its verification and its pack, and its draft where none was ready.
fn by_formula(rounds: &[Round], hardware: &Hardware) -> f64 {
    let follows = |one: &Round, other: &Round| (one.prompt, one.turn, one.round + 1) == (other.prompt, other.turn, other.round);
    let cost = |round: &Round| {
        let before = rounds.iter().find(|other| follows(other, round));
        let verify = hardware.verify.seconds(1 + round.proposed, round.context);
        let has_pack = round.pack_blocks > 0 && rounds.iter().any(|other| follows(round, other));
        let pack_rows = 1 + round.proposed + BLOCK * round.pack_blocks;
        let pack = if has_pack { hardware.pack.seconds(pack_rows, round.context) } else { 0.0 };
        let unread = before.filter(|before| before.pack_blocks == 0).map_or(0, |before| before.committed);
        let draft = match round.lookup {
            Some(Lookup::Hit) => 0.0,
            _ => hardware.draft.seconds(BLOCK + unread, round.context - unread),
        };
        draft + verify.max(pack)
    };
    rounds.iter().map(cost).sum()
}

#[test]
fn the_clock_shows_what_was_worked_out_by_hand() {
    let round = |round, lookup, pack_blocks| Round {
        round,
        proposed: 7,
        accepted: 2,
        committed: 3,
        context: 5 + 3 * round,
        pack_blocks,
        lookup: Some(lookup),
        ..Round::default()
    };
    let rounds = [
        round(0, Lookup::First, 1),           // Draft to 4; verification to 14, pack of 16 tokens to 20.
        round(1, Lookup::Hit, 0),             // Waits to 20, verification to 30, no pack.
        round(2, Lookup::BeyondPositions, 2), // Draft to 34; verification to 44, pack of 24 tokens to 58.
        round(3, Lookup::WrongCandidate, 9),  // Waits to 58, draft to 62; verification to 72, which is the end.
    ];
    let simulated = run(&rounds, &simple());
    assert!(near(simulated.seconds, 0.072), "{simulated:?}");
    assert!(near(simulated.tokens_per_second, 12.0 / 0.072) && near(simulated.speedup, 0.120 / 0.072), "{simulated:?}");
    assert!(near(simulated.wait_on_hits_seconds, 0.006), "{simulated:?}");
    assert!(near(simulated.wait_on_misses_seconds, 0.004 + 0.004 + 0.014 + 0.004), "{simulated:?}");
    // Drafter at work: 4 + 16 + 4 + 24 + 4 of 72; of its packs' 40 the target verified during 10 + 10.
    assert!(near(simulated.drafter_idle_seconds.unwrap(), 0.072 - 0.052) && near(simulated.pack_hidden.unwrap(), 0.5));
    assert_eq!(simulated.source, "made up");
}

#[test]
fn clock_and_formula_agree_on_any_rounds() {
    for case in 0..500 {
        let mut generator = counter_generator(1, 0, case, 0);
        let (hardware, rounds) = (some_hardware(&mut generator), some_rounds(&mut generator, case % 4 > 0));
        let simulated = run(&rounds, &hardware);
        let formula = by_formula(&rounds, &hardware);
        assert!(near(simulated.seconds, formula), "case {case}: {} by the clock, {formula} by the formula", simulated.seconds);
        let verify: f64 = rounds.iter().map(|round| hardware.verify.seconds(1 + round.proposed, round.context)).sum();
        let waits = simulated.wait_on_hits_seconds + simulated.wait_on_misses_seconds;
        assert!(near(simulated.seconds, verify + waits), "case {case}: what is not verification is waiting");
        assert!(simulated.drafter_idle_seconds.unwrap() > -1e-9, "case {case}");
        assert!(simulated.pack_hidden.is_none_or(|hidden| hidden > 0.0 && hidden < 1.0 + 1e-9), "case {case}");
    }
}

#[test]
fn packs_that_are_shorter_than_verifications_cost_nothing() {
    for case in 0..100 {
        let mut generator = counter_generator(2, 0, case, 0);
        let (mut hardware, rounds) = (some_hardware(&mut generator), some_rounds(&mut generator, true));
        hardware.pack = latency(hardware.verify.floor_ms / 2.0, 0.0, 0.0, 0.0);
        let simulated = run(&rounds, &hardware);
        assert_eq!(simulated.wait_on_hits_seconds, 0.0, "case {case}");
        assert!(simulated.pack_hidden.is_none_or(|hidden| near(hidden, 1.0)), "case {case}");
        let without_packs = Hardware { pack: latency(0.0, 0.0, 0.0, 0.0), ..hardware };
        assert!(near(simulated.seconds, by_formula(&rounds, &without_packs)), "case {case}");
    }
}

#[test]
fn a_miss_instead_of_a_hit_costs_exactly_a_draft() {
    let mut seen = 0;
    for case in 0..100 {
        let mut generator = counter_generator(3, 0, case, 0);
        let (hardware, mut rounds) = (some_hardware(&mut generator), some_rounds(&mut generator, true));
        let before = run(&rounds, &hardware).seconds;
        let Some(hit) = rounds.iter_mut().find(|round| round.lookup == Some(Lookup::Hit)) else { continue };
        hit.lookup = Some(Lookup::WrongCandidate);
        let draft = hardware.draft.seconds(BLOCK, hit.context);
        assert!(near(run(&rounds, &hardware).seconds, before + draft), "case {case}");
        seen += 1;
    }
    assert!(seen > 50, "{seen} cases had a hit");
}

#[test]
fn in_lockstep_every_draft_takes_in_what_the_round_before_committed() {
    let round =
        |round, accepted| Round { round, proposed: 7, accepted, committed: accepted + 1, context: 100, ..Round::default() };
    let rounds = [round(0, 3), round(1, 7), round(2, 0)];
    let hardware = hardware(latency(10.0, 0.0, 0.0, 0.0), latency(1.0, 0.0, 0.0, 0.0), latency(0.1, 1.0, 0.0, 0.0));
    let simulated = run(&rounds, &hardware);
    assert!(near(simulated.wait_on_misses_seconds, 0.001 * (8.0 + (8.0 + 4.0) + (8.0 + 8.0))), "{simulated:?}");
    assert!(near(simulated.seconds, 0.030 + simulated.wait_on_misses_seconds), "{simulated:?}");
    assert_eq!((simulated.wait_on_hits_seconds, simulated.pack_hidden), (0.0, None));
}

#[test]
fn the_target_alone_takes_a_forward_a_token_however_its_tokens_came() {
    let mut generator = counter_generator(4, 0, 0, 0);
    let hardware = some_hardware(&mut generator);
    let drafted = some_rounds(&mut generator, true);
    let mut one_by_one: Vec<Round> = Vec::new();
    for round in &drafted {
        for before in 0..round.committed {
            let number = one_by_one.iter().filter(|other| other.prompt == round.prompt).count();
            let token = Round {
                round: number,
                committed: 1,
                context: round.context + before,
                lookup: None,
                pack_blocks: 0,
                ..round.clone()
            };
            one_by_one.push(Round { drafted: 0, proposed: 0, accepted: 0, ..token });
        }
    }
    let of_drafts = simulate_alone(&drafted.iter().collect::<Vec<_>>(), &hardware).unwrap();
    let simulated = run(&one_by_one, &hardware);
    assert!(near(simulated.seconds, of_drafts.seconds) && near(simulated.speedup, 1.0));
    assert!(near(simulated.tokens_per_second, of_drafts.tokens_per_second));
    assert_eq!((of_drafts.speedup, of_drafts.drafter_idle_seconds, simulated.drafter_idle_seconds), (1.0, None, None));
    let simulated = run(&drafted, &hardware);
    assert!(near(simulated.speedup, of_drafts.seconds / simulated.seconds));
}

#[test]
fn the_end_of_a_text_does_not_make_its_verification_shorter() {
    let whole = Round { proposed: 7, drafted: 7, accepted: 7, committed: 8, context: 50, ..Round::default() };
    let cut = Round { drafted: 2, accepted: 2, committed: 2, ..whole.clone() };
    let hardware = hardware(latency(0.1, 1.0, 0.0, 0.0), latency(1.0, 0.0, 0.0, 0.0), latency(1.0, 0.0, 0.0, 0.0));
    assert_eq!(run(&[cut], &hardware).seconds, run(&[whole], &hardware).seconds);
}

#[test]
fn the_order_of_rounds_does_not_matter_and_missing_ones_do() {
    let mut generator = counter_generator(5, 0, 0, 1);
    let (hardware, rounds) = (some_hardware(&mut generator), some_rounds(&mut generator, true));
    let simulated = run(&rounds, &hardware);
    let backwards: Vec<&Round> = rounds.iter().rev().collect();
    let again = simulate(&backwards, BLOCK, &hardware).unwrap();
    assert_eq!((again.seconds, again.tokens_per_second), (simulated.seconds, simulated.tokens_per_second));
    let refused = |rounds: &[&Round]| simulate(rounds, BLOCK, &hardware).unwrap_err().to_string();
    let first = rounds.iter().filter(|round| round.prompt == 0).count();
    assert!(first > 2, "this text is long enough to lose a round");
    let without: Vec<&Round> = rounds.iter().filter(|round| (round.prompt, round.round) != (0, 1)).collect();
    assert!(refused(&without).starts_with("prompt 0, turn 0 has no round 1 or has it twice"));
    assert!(refused(&[&rounds[0], &rounds[0]]).starts_with("prompt 0, turn 0 has no round 1 or has it twice"));
    let shared = Round { lanes: 3, ..rounds[1].clone() };
    let message = refused(&[&rounds[0], &shared]);
    assert!(
        message.contains("round 1 of prompt 0") && message.contains("(3 in all)") && message.contains("evaluate.concurrency")
    );
    assert_eq!(run(&[], &hardware).seconds, 0.0);
}

#[test]
fn a_score_gets_the_figures_of_every_profile_and_loses_those_of_others() {
    let mut generator = counter_generator(6, 0, 0, 0);
    let rounds = some_rounds(&mut generator, true);
    let row = |benchmark: &str, round: &Round| RoundRow {
        decoder: "asynchronous".to_string(),
        benchmark: benchmark.to_string(),
        round: round.clone(),
    };
    let rows: Vec<RoundRow> = rounds.iter().map(|round| row("stories", round)).collect();
    let decoder = || {
        let names = ["stories", "unknown"].map(|name| (name.to_string(), BenchmarkScore::default()));
        DecoderScore { benchmarks: names.into_iter().collect() }
    };
    let mut score: Score =
        serde_json::from_value(serde_json::json!({"checkpoint": "a", "kind": "d3d", "target": "t", "dtype": "f32",
        "block_size": BLOCK, "layers": 2, "decoders": {}}))
        .unwrap();
    score.decoders =
        ["asynchronous", "autoregressive", "lockstep"].map(|name| (name.to_string(), decoder())).into_iter().collect();
    let profiles = [simple(), Hardware { name: "other".to_string(), ..some_hardware(&mut generator) }];
    add_simulated(&mut score, &rows, &profiles).unwrap();
    let simulated =
        |score: &Score, decoder: &str, benchmark: &str| score.decoders[decoder].benchmarks[benchmark].simulated.clone();
    assert_eq!(simulated(&score, "asynchronous", "stories")["lab"], run(&rounds, &profiles[0]));
    assert_eq!(simulated(&score, "asynchronous", "stories")["other"], run(&rounds, &profiles[1]));
    let alone = simulated(&score, "autoregressive", "stories")["lab"].clone();
    assert_eq!((alone.speedup, alone.pack_hidden), (1.0, None));
    assert!(near(alone.tokens_per_second, 100.0), "a token takes 10 ms");
    // What another decoder did says nothing about lockstep.
    assert!(simulated(&score, "asynchronous", "unknown").is_empty() && simulated(&score, "lockstep", "stories").is_empty());
    add_simulated(&mut score, &rows, &profiles[1..]).unwrap();
    assert_eq!(simulated(&score, "asynchronous", "stories").into_keys().collect::<Vec<_>>(), ["other"]);
    add_simulated(&mut score, &[], &profiles).unwrap();
    assert!(simulated(&score, "asynchronous", "stories").is_empty());
    let json = serde_json::to_string(&score).unwrap();
    assert!(!json.contains("simulated"), "{json}");
}
