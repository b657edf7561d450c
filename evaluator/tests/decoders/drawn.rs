//! With sampled drafts a text depends on seed, request and distributions only: not on what else is decoded, nor on who drafts when.

use configs::{Drafts, Labels};
use evaluator::fan_out::{FanOut, Lookup};
use evaluator::{Decoded, Sampler, Settings, asynchronous, autoregressive, lockstep};

use crate::models::{LABELS, noisy_drafter, prompts, random_model};
use crate::texts::{collected, settings, tokens};

const VOCABULARY: u32 = 10;

/// Drafted, accepted and committed tokens of all rounds of all texts.
fn kept(texts: &[Decoded]) -> Vec<(usize, usize, usize, usize)> {
    let rounds = texts.iter().flat_map(|text| &text.rounds);
    rounds.map(|it| (it.prompt, it.drafted, it.accepted, it.committed)).collect()
}

/// Tokens that a text had before the first round whose draft was ready for full acceptance.
fn before_a_continuation_of_full_acceptance(text: &Decoded) -> Option<usize> {
    let place = text.rounds.windows(2).position(|pair| {
        pair[1].lookup == Some(Lookup::Hit) && pair[0].accepted == pair[0].drafted && pair[0].committed > pair[0].accepted
    })?;
    Some(1 + text.rounds[..=place].iter().map(|round| round.committed).sum::<usize>())
}

#[test]
fn asynchronous_and_lockstep_texts_are_equal_at_any_concurrency() {
    let (mut hits, mut parted, mut replaced, mut continued) = (0, 0, 0, 0);
    for seed in 0..12 {
        let labels = LABELS[seed as usize % 2];
        let block_size = [3, 4, 2, 6, 3, 5][seed as usize / 2];
        let target = random_model(VOCABULARY, 2, seed);
        let mut drafter = noisy_drafter(&target, 0.1, block_size, labels, seed + 100);
        let prompts = prompts(9, VOCABULARY);
        let sampler = Sampler { temperature: [0.6, 1.0, 1.6][seed as usize % 3], top_p: 0.95, top_k: 7, seed };
        let one = Settings { sampler, drafts: Drafts::Sampled, ..settings(&[seed as u32 % VOCABULARY], 60) };
        let in_turn = collected(|on_event| lockstep(&target, &drafter, &prompts, &one, on_event));
        replaced += in_turn.iter().flat_map(|text| &text.rounds).filter(|it| it.accepted < it.drafted).count();
        for fan_out in [FanOut::Rectangle { positions: 3, candidates: 2 }, FanOut::BestFirst { blocks: 7 }] {
            let one = Settings { fan_out, ..one.clone() };
            let ahead = collected(|on_event| asynchronous(&target, &mut drafter, &prompts, &one, on_event));
            for (alone, other) in in_turn.iter().zip(&ahead) {
                let equal_part = match before_a_continuation_of_full_acceptance(other).filter(|_| labels == Labels::InPlace) {
                    Some(known) => {
                        continued += 1;
                        known
                    }
                    None => alone.tokens.len().max(other.tokens.len()),
                };
                let part = |text: &Decoded| text.tokens.iter().take(equal_part).copied().collect::<Vec<u32>>();
                assert_eq!(part(alone), part(other), "seed {seed} {labels:?} {}", one.fan_out);
                parted += usize::from(alone.tokens != other.tokens);
            }
            hits += ahead.iter().flat_map(|text| &text.rounds).filter(|it| it.lookup == Some(Lookup::Hit)).count();
            if labels == Labels::Next {
                assert_eq!((tokens(&in_turn), kept(&in_turn)), (tokens(&ahead), kept(&ahead)));
            }
            for concurrency in [2, 4, 16] {
                let many = Settings { concurrency, ..one.clone() };
                let side_by_side = collected(|on_event| lockstep(&target, &drafter, &prompts, &many, on_event));
                assert_eq!((tokens(&in_turn), kept(&in_turn)), (tokens(&side_by_side), kept(&side_by_side)));
                let side_by_side = collected(|on_event| asynchronous(&target, &mut drafter, &prompts, &many, on_event));
                assert_eq!((tokens(&ahead), kept(&ahead)), (tokens(&side_by_side), kept(&side_by_side)));
            }
        }
    }
    assert!(hits > 100 && replaced > 100 && continued > 4 && parted > 1, "{hits} {replaced} {continued} {parted}");
}

#[test]
fn the_autoregressive_decoder_draws_as_ever_and_sampled_drafts_draw_otherwise() {
    let target = random_model(VOCABULARY, 2, 3);
    let drafter = noisy_drafter(&target, 0.1, 4, Labels::Next, 103);
    let prompts = prompts(8, VOCABULARY);
    let sampler = Sampler { temperature: 1.0, top_p: 1.0, top_k: 0, seed: 1 };
    let point = Settings { sampler, ..settings(&[], 16) };
    let sampled = Settings { drafts: Drafts::Sampled, ..point.clone() };
    let alone = collected(|on_event| autoregressive(&target, &prompts, &point, on_event));
    assert_eq!(tokens(&alone), tokens(&collected(|on_event| autoregressive(&target, &prompts, &sampled, on_event))));
    let drawn = collected(|on_event| lockstep(&target, &drafter, &prompts, &sampled, on_event));
    assert!(alone.iter().zip(&drawn).all(|(one, other)| one.tokens[0] == other.tokens[0]));
    assert_ne!(tokens(&alone), tokens(&drawn));
    let other_seed = Settings { sampler: Sampler { seed: 2, ..sampled.sampler.clone() }, ..sampled };
    assert_ne!(tokens(&drawn), tokens(&collected(|on_event| lockstep(&target, &drafter, &prompts, &other_seed, on_event))));
}

#[test]
fn at_temperature_zero_sampled_drafts_are_the_likeliest_and_the_text_is_the_targets() {
    let target = random_model(VOCABULARY, 2, 3);
    for labels in LABELS {
        let drafter = noisy_drafter(&target, 0.1, 4, labels, 103);
        let prompts = prompts(8, VOCABULARY);
        let point = settings(&[], 16);
        let sampled = Settings { drafts: Drafts::Sampled, ..point.clone() };
        let one = collected(|on_event| lockstep(&target, &drafter, &prompts, &point, on_event));
        let other = collected(|on_event| lockstep(&target, &drafter, &prompts, &sampled, on_event));
        assert_eq!((tokens(&one), kept(&one)), (tokens(&other), kept(&other)));
    }
}
