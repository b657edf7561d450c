//! All decoders write the same text, over every path a round can take, and their rounds are what a drafter without a cache would
//! have drafted.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use configs::{Drafts, Labels};
use evaluator::fan_out::{FanOut, Lookup};
use evaluator::rounds::Round;
use evaluator::sampling::TokenPlace;
use evaluator::{DecodeError, Decoded, Drafter, Event, Sampler, Settings, asynchronous, autoregressive, lockstep};
use model::Transformer;

use crate::models::{LABELS, fresh_causal, fresh_ranking, noisy_drafter, prompts, random_model};

const VOCABULARY: u32 = 10;

pub(crate) fn settings(stop_tokens: &[u32], max_new_tokens: usize) -> Settings {
    let fan_out = FanOut::Rectangle { positions: 2, candidates: 1 };
    let (sampler, stop_tokens) = (Sampler::greedy(), stop_tokens.to_vec());
    Settings { sampler, stop_tokens, max_new_tokens, concurrency: 1, fan_out, drafts: Drafts::Point }
}

/// All texts, in the order of their prompts; what was told of them on the way must add up to them.
pub(crate) fn collected(
    decode: impl FnOnce(&mut dyn FnMut(Event<'_>) -> ControlFlow<()>) -> Result<(), DecodeError>,
) -> Vec<Decoded> {
    let mut texts = Vec::new();
    let mut told: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    decode(&mut |event| {
        match event {
            Event::Tokens { prompt, tokens, round } => {
                assert!(round.is_none_or(|round| round.committed == tokens.len()));
                told.entry(prompt).or_default().extend_from_slice(tokens);
            }
            Event::Text(text) => texts.push(text),
        }
        ControlFlow::Continue(())
    })
    .unwrap();
    texts.sort_by_key(|text| text.prompt);
    assert!(texts.iter().all(|text| told[&text.prompt] == text.tokens));
    texts
}

/// Positions and candidates of a rectangle.
fn rectangle(settings: &Settings) -> (usize, usize) {
    match settings.fan_out {
        FanOut::Rectangle { positions, candidates } => (positions, candidates),
        FanOut::BestFirst { .. } | FanOut::Geometric { .. } => panic!("not a rectangle"),
    }
}

pub(crate) fn tokens(texts: &[Decoded]) -> Vec<&[u32]> {
    texts.iter().map(|text| text.tokens.as_slice()).collect()
}

/// What a round drafted, best tokens first: its verified slots, the guesses of the bonus token; and what became of it.
struct Before<'a> {
    verified: Vec<Vec<u32>>,
    guesses: Option<Vec<u32>>,
    round: &'a Round,
}

/// Checks each round of a text against drafts and outcomes worked out without any cache, pack or second thread.
fn check_rounds(drafter: &Drafter, prompt: &[u32], text: &Decoded, settings: &Settings) {
    let (positions, candidates) = rectangle(settings);
    let mut known = 1;
    let mut previous: Option<Before<'_>> = None;
    for round in &text.rounds {
        let anchor = text.tokens[known - 1];
        let prefix = [prompt, &text.tokens[..known - 1]].concat();
        let mut slots = fresh_ranking(drafter, &prefix, anchor);
        let mut bonus = if drafter.labels == Labels::Next { slots.pop() } else { None };
        let mut expected = Lookup::First;
        if let Some(Before { verified, guesses, round: before }) = previous {
            let hit_or = |hit: bool, miss| if hit { Lookup::Hit } else { miss };
            expected = match (verified.get(before.accepted), guesses) {
                (Some(_), _) if before.accepted >= positions => Lookup::BeyondPositions,
                (Some(ranked), _) => hit_or(ranked[1..].iter().take(candidates).any(|&it| it == anchor), Lookup::WrongCandidate),
                (None, Some(guesses)) => hit_or(guesses[..candidates].contains(&anchor), Lookup::FullAcceptance),
                (None, None) => {
                    // Anchored at the last drafted token; the first prediction is spent on the check.
                    let ahead = fresh_ranking(drafter, &prefix[..prefix.len() - 1], prefix[prefix.len() - 1]);
                    let hit = drafter.block_size > 2 && ahead[0][0] == anchor;
                    if hit && round.lookup.is_some() {
                        (slots, bonus) = (ahead[1..].to_vec(), None);
                    }
                    hit_or(hit, Lookup::FullAcceptance)
                }
            };
        }
        assert!(round.lookup.is_none_or(|lookup| lookup == expected), "{:?} instead of {expected:?}", round.lookup);
        let rest = &text.tokens[known..];
        let agreeing = slots.iter().zip(rest).take_while(|(slot, token)| slot[0] == **token).count();
        assert_eq!((round.accepted, round.committed), (agreeing, rest.len().min(agreeing + 1)));
        assert_eq!(round.drafted, if agreeing == rest.len() { agreeing } else { slots.len() });
        known += round.committed;
        previous = Some(Before { verified: slots, guesses: bonus, round });
    }
    assert_eq!(known, text.tokens.len());
}

/// Checks a text against the choices from one forward over all of it.
fn check_choices(target: &Transformer, index: usize, prompt: &[u32], text: &Decoded, settings: &Settings) {
    let ids = [prompt, &text.tokens].concat();
    let logits = fresh_causal(target, &ids[..ids.len() - 1]);
    let places: Vec<TokenPlace> = (0..text.tokens.len()).map(|position| TokenPlace { request: index as u64, position }).collect();
    let logits = logits.narrow(0, prompt.len() as i64 - 1, places.len() as i64);
    assert_eq!(settings.sampler.choose(&logits, &places), text.tokens);
}

#[test]
fn all_decoders_write_the_same_text_over_all_paths() {
    let mut lookups: BTreeMap<(bool, Lookup), usize> = BTreeMap::new();
    let mut endings: BTreeMap<(&str, bool), usize> = BTreeMap::new();
    for seed in 0..20 {
        let labels = LABELS[seed as usize % 2];
        let block_size = 2 + (seed as usize / 2) % 5;
        let target = random_model(VOCABULARY, 2, seed);
        let mut drafter = noisy_drafter(&target, 0.1, block_size, labels, seed + 100);
        let prompts = prompts(8, VOCABULARY);
        let candidates = 1 + seed as usize % 3 / 2;
        let fan_out = FanOut::Rectangle { positions: 2, candidates };
        let settings = Settings { fan_out, ..settings(&[seed as u32 % VOCABULARY], 21 + seed as usize % 4) };
        let alone = collected(|on_event| autoregressive(&target, &prompts, &settings, on_event));
        let in_turn = collected(|on_event| lockstep(&target, &drafter, &prompts, &settings, on_event));
        let ahead = collected(|on_event| asynchronous(&target, &mut drafter, &prompts, &settings, on_event));
        assert_eq!(tokens(&alone), tokens(&in_turn), "seed {seed}");
        assert_eq!(tokens(&alone), tokens(&ahead), "seed {seed}");
        for (index, prompt) in prompts.iter().enumerate() {
            check_choices(&target, index, prompt, &alone[index], &settings);
            check_rounds(&drafter, prompt, &in_turn[index], &settings);
            check_rounds(&drafter, prompt, &ahead[index], &settings);
            assert!(alone[index].finish == in_turn[index].finish && alone[index].finish == ahead[index].finish);
            assert!(in_turn[index].rounds.iter().all(|round| round.lookup.is_none() && round.prompt == index));
            for round in &ahead[index].rounds {
                *lookups.entry((labels == Labels::Next, round.lookup.unwrap())).or_default() += 1;
            }
            if let Some(last) = ahead[index].rounds.last() {
                let inside_the_draft = last.committed == last.accepted;
                *endings.entry((ahead[index].finish.name(), inside_the_draft)).or_default() += 1;
            }
        }
    }
    for labels in LABELS {
        for lookup in Lookup::ALL {
            assert!(lookups.contains_key(&(labels == Labels::Next, lookup)), "{labels:?} never met {lookup:?}: {lookups:?}");
        }
    }
    for ending in [("stop", true), ("stop", false), ("length", true), ("length", false)] {
        assert!(endings.contains_key(&ending), "no text ended by {ending:?}: {endings:?}");
    }
}

#[test]
fn sampled_texts_are_the_same_too() {
    for seed in 0..6 {
        let target = random_model(VOCABULARY, 2, seed);
        let mut drafter = noisy_drafter(&target, 0.1, 4, LABELS[seed as usize % 2], seed + 100);
        let prompts = prompts(5, VOCABULARY);
        let sampler = Sampler { temperature: 0.8, top_p: 0.95, top_k: 6, seed };
        let fan_out = FanOut::Rectangle { positions: 2, candidates: 2 };
        let settings = Settings { sampler, fan_out, ..settings(&[3], 20) };
        let alone = collected(|on_event| autoregressive(&target, &prompts, &settings, on_event));
        let in_turn = collected(|on_event| lockstep(&target, &drafter, &prompts, &settings, on_event));
        let ahead = collected(|on_event| asynchronous(&target, &mut drafter, &prompts, &settings, on_event));
        assert_eq!(tokens(&alone), tokens(&in_turn));
        assert_eq!(tokens(&alone), tokens(&ahead));
        for (index, prompt) in prompts.iter().enumerate() {
            check_choices(&target, index, prompt, &alone[index], &settings);
            check_rounds(&drafter, prompt, &ahead[index], &settings);
        }
    }
}

#[test]
fn a_fan_out_of_any_size_works() {
    let target = random_model(VOCABULARY, 2, 7);
    for (positions, candidates) in [(0, 0), (0, 2), (1, 0), (11, 9), (11, 30)] {
        let mut drafter = noisy_drafter(&target, 0.1, 4, LABELS[positions % 2], 3);
        let prompts = prompts(3, VOCABULARY);
        let settings = Settings { fan_out: FanOut::Rectangle { positions, candidates }, ..settings(&[], 16) };
        let alone = collected(|on_event| autoregressive(&target, &prompts, &settings, on_event));
        let ahead = collected(|on_event| asynchronous(&target, &mut drafter, &prompts, &settings, on_event));
        assert_eq!(tokens(&alone), tokens(&ahead));
        let misses = ahead.iter().flat_map(|text| &text.rounds).filter(|it| it.lookup == Some(Lookup::WrongCandidate)).count();
        // With every token but the drafted one among the candidates no rejection within the positions can miss.
        assert!(candidates < 9 || misses == 0);
    }
}

#[test]
fn texts_decoded_side_by_side_are_those_decoded_alone() {
    let mut hits = 0;
    for seed in 0..6 {
        let target = random_model(VOCABULARY, 2, seed);
        let mut drafter = noisy_drafter(&target, 0.1, 5, LABELS[seed as usize % 2], seed + 100);
        let prompts = prompts(9, VOCABULARY);
        let one = settings(&[seed as u32], 24);
        let alone = collected(|on_event| autoregressive(&target, &prompts, &one, on_event));
        let in_turn = collected(|on_event| lockstep(&target, &drafter, &prompts, &one, on_event));
        for concurrency in [1, 2, 4, 16] {
            for blocks in [0, 1, 6, 99] {
                let settings = Settings { concurrency, fan_out: FanOut::BestFirst { blocks }, ..one.clone() };
                let ahead = collected(|on_event| asynchronous(&target, &mut drafter, &prompts, &settings, on_event));
                assert_eq!(tokens(&alone), tokens(&ahead));
                assert!(ahead.iter().flat_map(|text| &text.rounds).all(|it| it.lanes <= concurrency && it.pack_blocks <= blocks));
                hits += ahead.iter().flat_map(|text| &text.rounds).filter(|it| it.lookup == Some(Lookup::Hit)).count();
                if drafter.labels == Labels::Next {
                    let kept = |texts: &[Decoded]| -> Vec<(usize, usize, usize)> {
                        let rounds = texts.iter().flat_map(|text| &text.rounds);
                        rounds.map(|it| (it.drafted, it.accepted, it.context)).collect()
                    };
                    assert_eq!(kept(&in_turn), kept(&ahead));
                }
            }
            let settings = Settings { concurrency, ..one.clone() };
            assert_eq!(tokens(&alone), tokens(&collected(|on_event| autoregressive(&target, &prompts, &settings, on_event))));
            assert_eq!(tokens(&alone), tokens(&collected(|on_event| lockstep(&target, &drafter, &prompts, &settings, on_event))));
        }
    }
    assert!(hits > 100, "{hits}");
}

#[test]
fn texts_of_no_and_one_token_have_no_round() {
    let target = random_model(VOCABULARY, 2, 7);
    let mut drafter = noisy_drafter(&target, 0.1, 4, Labels::Next, 3);
    let prompts = prompts(2, VOCABULARY);
    for length in [0, 1] {
        let texts = collected(|on_event| asynchronous(&target, &mut drafter, &prompts, &settings(&[], length), on_event));
        assert!(texts.iter().all(|text| text.tokens.len() == length && text.rounds.is_empty()));
    }
    let every_token: Vec<u32> = (0..VOCABULARY).collect();
    let texts = collected(|on_event| lockstep(&target, &drafter, &prompts, &settings(&every_token, 9), on_event));
    assert!(texts.iter().all(|text| text.tokens.len() == 1 && text.finish.name() == "stop"));
}

#[test]
fn times_of_rounds_follow_each_other() {
    let target = random_model(VOCABULARY, 2, 7);
    let mut drafter = noisy_drafter(&target, 0.1, 4, Labels::Next, 3);
    let text = collected(|on_event| asynchronous(&target, &mut drafter, &prompts(1, VOCABULARY), &settings(&[], 24), on_event))
        .remove(0);
    assert!(text.rounds.len() > 2);
    for pair in text.rounds.windows(2) {
        let end = pair[0].verify_start + pair[0].verify_seconds;
        assert!(end <= pair[1].verify_start && pair[1].verify_start <= text.decode_seconds);
        assert!(pair[0].pack_seconds > 0.0);
        // A draft is made in the round itself unless it was ready.
        assert_eq!(pair[1].draft_seconds > 0.0, pair[1].lookup != Some(Lookup::Hit));
        assert!(pair[1].wait_seconds >= pair[1].draft_seconds);
    }
}

#[test]
fn a_failure_on_the_drafters_side_ends_decoding_with_its_error() {
    let target = random_model(VOCABULARY, 2, 7);
    // The drafter knows fewer tokens than the target, and meets one of the others in the prompt.
    let mut drafter = noisy_drafter(&random_model(5, 2, 8), 0.1, 4, Labels::Next, 3);
    let failed = |result: Result<(), DecodeError>| result.unwrap_err().to_string();
    let prompts = [vec![1, 2], vec![1, 9]];
    let mut ignore = |_: Event<'_>| ControlFlow::Continue(());
    let message = failed(asynchronous(&target, &mut drafter, &prompts, &settings(&[], 16), &mut ignore));
    assert!(message.contains("while drafting"), "{message}");
    let message = failed(lockstep(&target, &drafter, &prompts, &settings(&[], 16), &mut ignore));
    assert!(message.contains("while drafting"), "{message}");
}

#[test]
fn unfit_drafters_and_prompts_are_refused() {
    let target = random_model(VOCABULARY, 2, 7);
    let mut ignore = |_: Event<'_>| ControlFlow::Continue(());
    let mut message = |drafter: &mut Drafter, prompts: &[Vec<u32>]| {
        asynchronous(&target, drafter, prompts, &settings(&[], 4), &mut ignore).unwrap_err().to_string()
    };
    let drafter = || noisy_drafter(&target, 0.1, 4, Labels::Next, 3);
    assert!(message(&mut Drafter { block_size: 1, ..drafter() }, &[]).contains("`block_size` is 1"));
    assert!(message(&mut Drafter { mask_token: 10, ..drafter() }, &[]).contains("`mask_token` 10"));
    let larger = random_model(VOCABULARY + 1, 2, 7);
    assert!(message(&mut Drafter { model: larger, ..drafter() }, &[]).contains("`vocab_size` is 11"));
    assert!(message(&mut drafter(), &[vec![1], vec![]]).contains("prompt 1 is empty"));
    assert!(message(&mut drafter(), &[vec![1, 10]]).contains("prompt 0 has the token 10"));
}

#[test]
fn decoding_stops_between_texts_and_a_panic_of_the_caller_hangs_nobody() {
    let target = random_model(VOCABULARY, 2, 7);
    let mut drafter = noisy_drafter(&target, 0.1, 4, Labels::Next, 3);
    let prompts = prompts(5, VOCABULARY);
    let mut count = 0;
    let mut twice = |event: Event<'_>| {
        count += usize::from(matches!(event, Event::Text(_)));
        if count == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    asynchronous(&target, &mut drafter, &prompts, &settings(&[], 8), &mut twice).unwrap();
    assert_eq!(count, 2);
    let threads = tch::get_num_threads();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        asynchronous(&target, &mut drafter, &prompts, &settings(&[], 8), &mut |_: Event<'_>| panic!("on purpose"))
    }));
    assert!(panicked.is_err());
    assert_eq!(tch::get_num_threads(), threads);
}
