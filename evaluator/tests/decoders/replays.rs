//! Replay counts exactly what decoding the same prompts counts.

use configs::{Drafts, Labels};
use data::supervision::Example;
use evaluator::fan_out::{FanOut, Lookup};
use evaluator::replay::{HitRate, hit_rates};
use evaluator::rounds::{Round, tally};
use evaluator::{Decoded, Drafter, Sampler, Settings, asynchronous, lockstep, replay};

use crate::models::{LABELS, noisy_drafter, prompts, random_model};
use crate::texts::collected;

#[test]
fn replay_equals_decoding() {
    let mut accepted = 0;
    for seed in 0..8 {
        let target = random_model(10, 2, seed);
        let drafter = noisy_drafter(&target, 0.1, 2 + seed as usize % 5, LABELS[seed as usize % 2], seed + 100);
        let prompts = prompts(9, 10);
        // The stop token ends some texts at once: their responses have one token and no round.
        let settings = Settings {
            sampler: Sampler::greedy(),
            stop_tokens: vec![seed as u32],
            max_new_tokens: 19,
            concurrency: 1,
            fan_out: FanOut::BestFirst { blocks: 0 },
            drafts: Drafts::Point,
        };
        let texts = collected(|on_event| lockstep(&target, &drafter, &prompts, &settings, on_event));
        let examples = examples(&prompts, &texts);
        let rounds: Vec<Round> = texts.iter().flat_map(|text| text.rounds.iter().cloned()).collect();
        let expected = tally(&rounds);
        accepted += rounds.iter().map(|round| round.accepted).sum::<usize>();
        for responses_per_batch in [1, 4, 100] {
            let replayed = replay(&drafter, &examples, responses_per_batch).unwrap();
            let per_response: Vec<(usize, usize)> =
                texts.iter().map(|text| (text.rounds.len(), text.rounds.iter().map(|round| round.committed).sum())).collect();
            assert_eq!(replayed.per_response, per_response, "seed {seed}");
            assert_eq!((replayed.rounds, replayed.committed), (expected.rounds, expected.committed));
            assert_eq!((replayed.tau_pooled, replayed.tau_macro), (expected.tau_pooled, expected.tau_macro));
            assert_eq!(replayed.acceptance_by_position, expected.acceptance_by_position);
        }
    }
    assert!(accepted > 100, "only {accepted} tokens were accepted, too few to show anything");
}

/// Responses as replay takes them.
pub(crate) fn examples(prompts: &[Vec<u32>], texts: &[Decoded]) -> Vec<Example> {
    let example =
        |(prompt, text): (&Vec<u32>, &Decoded)| Example::after_prompt([prompt, &text.tokens[..]].concat(), prompt.len());
    prompts.iter().zip(texts).map(example).collect()
}

const FAN_OUTS: [FanOut; 9] = [
    FanOut::Rectangle { positions: 2, candidates: 1 },
    FanOut::Rectangle { positions: 11, candidates: 2 },
    FanOut::Rectangle { positions: 0, candidates: 3 },
    FanOut::BestFirst { blocks: 0 },
    FanOut::BestFirst { blocks: 1 },
    FanOut::BestFirst { blocks: 6 },
    FanOut::BestFirst { blocks: 99 },
    FanOut::Geometric { blocks: 5, acceptance: 0.5, rank_exponent: 0.7 },
    FanOut::Geometric { blocks: 12, acceptance: 0.8, rank_exponent: 1.5 },
];

/// What running the asynchronous decoder with this fan-out finds ready.
fn found_ready(
    target: &model::Transformer,
    drafter: &mut Drafter,
    prompts: &[Vec<u32>],
    settings: &Settings,
) -> (HitRate, Vec<Decoded>) {
    let texts = collected(|on_event| asynchronous(target, drafter, prompts, settings, on_event));
    let lookups = texts.iter().flat_map(|text| &text.rounds).filter_map(|round| round.lookup).filter(|it| *it != Lookup::First);
    let mut rate = HitRate::default();
    for lookup in lookups {
        rate.rounds += 1;
        rate.hits += usize::from(lookup == Lookup::Hit);
    }
    (rate, texts)
}

#[test]
fn hit_rates_by_replay_are_those_of_asynchronous_decoding() {
    let mut hits = 0;
    for seed in 0..6 {
        let target = random_model(10, 2, seed);
        let mut drafter = noisy_drafter(&target, 0.1, 2 + seed as usize % 5, Labels::Next, seed + 100);
        drafter.temperatures = (0..drafter.block_size).map(|slot| 0.8 + 0.2 * slot as f32).collect();
        let prompts = prompts(9, 10);
        let settings = Settings {
            sampler: Sampler::greedy(),
            stop_tokens: vec![seed as u32],
            max_new_tokens: 19,
            concurrency: 2,
            fan_out: FanOut::BestFirst { blocks: 0 },
            drafts: Drafts::Point,
        };
        let mut replayed: Option<Vec<HitRate>> = None;
        for (index, fan_out) in FAN_OUTS.into_iter().enumerate() {
            let settings = Settings { fan_out: fan_out.clone(), ..settings.clone() };
            let (expected, texts) = found_ready(&target, &mut drafter, &prompts, &settings);
            let replayed =
                replayed.get_or_insert_with(|| hit_rates(&drafter, &examples(&prompts, &texts), &FAN_OUTS, usize::MAX).unwrap());
            assert_eq!(replayed[index], expected, "seed {seed}, {fan_out}");
            hits += expected.hits;
        }
        let [.., nothing, one, few, all, _, _] = replayed.unwrap().try_into().unwrap_or([HitRate::default(); 9]);
        assert!(nothing.hits == 0 && one.hits <= few.hits && few.hits <= all.hits);
    }
    assert!(hits > 300, "only {hits} hits, too few to show anything");
}

#[test]
fn with_labels_in_place_a_continuation_at_full_acceptance_is_checked_by_its_own_first_prediction() {
    let fan_outs = [FanOut::Rectangle { positions: 3, candidates: 2 }, FanOut::BestFirst { blocks: 4 }];
    let mut of_full_acceptance = 0;
    for seed in 0..12 {
        let target = random_model(10, 2, seed);
        let mut drafter = noisy_drafter(&target, 0.1, 3 + seed as usize % 3, Labels::InPlace, seed + 100);
        // Until a hit at full acceptance the rounds are the same, so texts end at the first of them.
        for prompt in prompts(9, 10) {
            for (index, fan_out) in fan_outs.iter().enumerate() {
                let settings = Settings {
                    sampler: Sampler::greedy(),
                    stop_tokens: vec![],
                    max_new_tokens: 25,
                    concurrency: 1,
                    fan_out: fan_out.clone(),
                    drafts: Drafts::Point,
                };
                let mut rounds = found_ready(&target, &mut drafter, std::slice::from_ref(&prompt), &settings).1.remove(0).rounds;
                let full = |pair: &[Round]| pair[0].accepted == drafter.block_size - 1 && pair[1].lookup == Some(Lookup::Hit);
                let Some(at) = rounds.windows(2).position(full) else { continue };
                // One more token than the rounds up to the hit commit, so that this one has a round after it.
                rounds.truncate(at + 1);
                let length = 2 + rounds.iter().map(|round| round.committed).sum::<usize>();
                let settings = Settings { max_new_tokens: length, ..settings };
                let (expected, texts) = found_ready(&target, &mut drafter, std::slice::from_ref(&prompt), &settings);
                let replayed =
                    hit_rates(&drafter, &examples(std::slice::from_ref(&prompt), &texts), &fan_outs, usize::MAX).unwrap();
                assert_eq!(replayed[index], expected, "seed {seed}, {fan_out}");
                of_full_acceptance += 1;
            }
        }
    }
    assert!(of_full_acceptance > 10, "only {of_full_acceptance} hits at full acceptance");
}

#[test]
fn no_more_rounds_are_walked_than_asked_for() {
    let target = random_model(10, 2, 3);
    let drafter = noisy_drafter(&target, 0.1, 4, LABELS[1], 5);
    let long = Example::after_prompt((0..200).map(|index| index % 7).collect(), 3);
    let rates = hit_rates(&drafter, &[long.clone(), long], &[FanOut::BestFirst { blocks: 3 }], 20).unwrap();
    assert_eq!(rates[0].rounds, 20);
    assert_eq!(hit_rates(&drafter, &[], &[FanOut::BestFirst { blocks: 3 }], 20).unwrap()[0].share(), 0.0);
}

#[test]
fn nothing_to_replay_gives_nothing() {
    let drafter = noisy_drafter(&random_model(10, 2, 1), 0.1, 4, LABELS[0], 2);
    let replayed = replay(&drafter, &[], 8).unwrap();
    assert_eq!((replayed.rounds, replayed.tau_pooled), (0, 0.0));
    assert!(replay(&drafter, &[Example::after_prompt(vec![1, 2, 99], 1), Example::after_prompt(vec![1, 99, 2], 1)], 8).is_err());
}
