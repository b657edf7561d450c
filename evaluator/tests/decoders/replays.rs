//! Replay counts exactly what decoding the same prompts counts.

use data::supervision::Example;
use evaluator::rounds::{Round, tally};
use evaluator::{Sampler, Settings, lockstep, replay};

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
            positions: 0,
            candidates: 0,
        };
        let texts = collected(|on_text| lockstep(&target, &drafter, &prompts, &settings, on_text));
        let examples: Vec<Example> = prompts
            .iter()
            .zip(&texts)
            .map(|(prompt, text)| Example { ids: [prompt.as_slice(), &text.tokens].concat(), prompt_length: prompt.len() })
            .collect();
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

#[test]
fn nothing_to_replay_gives_nothing() {
    let drafter = noisy_drafter(&random_model(10, 2, 1), 0.1, 4, LABELS[0], 2);
    let replayed = replay(&drafter, &[], 8).unwrap();
    assert_eq!((replayed.rounds, replayed.tau_pooled), (0, 0.0));
    assert!(
        replay(
            &drafter,
            &[Example { ids: vec![1, 2, 99], prompt_length: 1 }, Example { ids: vec![1, 99, 2], prompt_length: 1 }],
            8
        )
        .is_err()
    );
}
