//! Batched generation writes what decoding one prompt at a time writes, whatever shares the batch.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;

use configs::Drafts;
use data::responses::FinishReason;
use evaluator::fan_out::FanOut;
use evaluator::generate::{GenerateSettings, Generated, Prompt, generate};
use evaluator::{DecodeError, Event, Sampler, Settings, autoregressive};
use model::{ModelConfig, Transformer};
use serde_json::json;
use tch::Kind;

const VOCABULARY: u32 = 24;

fn random_model(model_type: &str, seed: u64) -> Transformer {
    torch::set_num_threads(1);
    let config = json!({"model_type": model_type, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": VOCABULARY});
    Transformer::random(ModelConfig::from_json(&config).unwrap(), seed, Kind::Float)
}

/// Prompts of 1 to 9 tokens, in no order of length; request counters are the indices, as the decoders have them.
fn prompts(count: u32) -> Vec<Prompt> {
    (0..count)
        .map(|index| {
            let ids = (0..1 + index * 5 % 9).map(|place| (index * 7 + place * place * 3 + 1) % VOCABULARY).collect();
            Prompt { request: u64::from(index), ids }
        })
        .collect()
}

fn sampled() -> Sampler {
    Sampler { temperature: 0.9, top_p: 0.95, top_k: 12, seed: 4 }
}

fn settings(sampler: Sampler, stop_tokens: &[u32], max_new_tokens: usize, lanes: usize) -> GenerateSettings {
    GenerateSettings { sampler, stop_tokens: stop_tokens.to_vec(), max_new_tokens, lanes }
}

/// All responses in the order in which they finished.
fn generated(target: &Transformer, prompts: &[Prompt], settings: &GenerateSettings) -> Vec<Generated> {
    let mut responses = Vec::new();
    generate(target, prompts, settings, &AtomicBool::new(false), &mut |response| {
        responses.push(response);
        ControlFlow::Continue(())
    })
    .unwrap();
    responses
}

/// The same responses, in the order of the prompts.
fn in_order(mut responses: Vec<Generated>) -> Vec<Generated> {
    responses.sort_by_key(|response| response.index);
    responses
}

/// What decoding one prompt after the other writes.
fn one_by_one(target: &Transformer, prompts: &[Prompt], settings: &GenerateSettings) -> Vec<Generated> {
    let GenerateSettings { sampler, stop_tokens, max_new_tokens, .. } = settings.clone();
    let fan_out = FanOut::BestFirst { blocks: 0 };
    let settings = Settings { sampler, stop_tokens, max_new_tokens, concurrency: 1, fan_out, drafts: Drafts::Point };
    let prompts: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.ids.clone()).collect();
    let mut texts = Vec::new();
    autoregressive(target, &prompts, &settings, &mut |event| {
        if let Event::Text(text) = event {
            texts.push(Generated { index: text.prompt, ids: text.tokens, finish_reason: text.finish });
        }
        ControlFlow::Continue(())
    })
    .unwrap();
    texts
}

#[test]
fn every_response_is_that_of_its_prompt_alone() {
    for (model_type, seed) in [("llama", 1), ("qwen3", 2), ("llama", 3)] {
        let target = random_model(model_type, seed);
        let prompts = prompts(20);
        for sampler in [Sampler::greedy(), sampled()] {
            let expected = one_by_one(&target, &prompts, &settings(sampler.clone(), &[2, 5, 11], 25, 1));
            let lengths: BTreeSet<usize> = expected.iter().map(|response| response.ids.len()).collect();
            assert!(lengths.len() > 2, "lanes should finish at different times: {lengths:?}");
            // Fewer lanes than prompts, and more.
            for lanes in [0, 1, 3, 8, 64] {
                let found = generated(&target, &prompts, &settings(sampler.clone(), &[2, 5, 11], 25, lanes));
                assert_eq!(in_order(found), expected, "{model_type} {sampler:?} {lanes} lanes");
            }
        }
    }
}

#[test]
fn a_sampled_response_follows_its_request_counter_not_its_place() {
    let target = random_model("llama", 1);
    let settings = settings(sampled(), &[], 12, 3);
    let prompts = prompts(7);
    let whole = in_order(generated(&target, &prompts, &settings));
    let rest: Vec<Prompt> = prompts[4..].iter().rev().cloned().collect();
    for response in in_order(generated(&target, &rest, &settings)) {
        assert_eq!(response.ids, whole[6 - response.index].ids);
    }
    let other = [Prompt { request: 99, ..prompts[6].clone() }];
    assert_ne!(generated(&target, &other, &settings)[0].ids, whole[6].ids);
}

#[test]
fn a_stop_token_is_kept_and_ends_a_response_and_the_limit_ends_the_others() {
    let target = random_model("qwen3", 2);
    let prompts = prompts(12);
    let free = in_order(generated(&target, &prompts, &settings(sampled(), &[], 16, 4)));
    assert!(free.iter().all(|response| response.ids.len() == 16 && response.finish_reason == FinishReason::Length));
    let stopped = in_order(generated(&target, &prompts, &settings(sampled(), &[7, 3], 16, 4)));
    let mut stops = 0;
    for (free, stopped) in free.iter().zip(&stopped) {
        let expected = match free.ids.iter().position(|token| [7, 3].contains(token)) {
            Some(place) => (&free.ids[..=place], FinishReason::Stop),
            None => (&free.ids[..], FinishReason::Length),
        };
        assert_eq!((&stopped.ids[..], stopped.finish_reason), expected);
        stops += usize::from(stopped.finish_reason == FinishReason::Stop);
    }
    assert!(0 < stops && stops < 12, "{stops} of 12 stopped");
}

#[test]
fn one_new_token_comes_from_the_prefill_alone() {
    let target = random_model("llama", 3);
    let prompts = prompts(9);
    let whole = in_order(generated(&target, &prompts, &settings(Sampler::greedy(), &[], 5, 4)));
    for max_new_tokens in [0, 1] {
        let found = in_order(generated(&target, &prompts, &settings(Sampler::greedy(), &[], max_new_tokens, 4)));
        assert_eq!(found.len(), 9);
        for (found, whole) in found.iter().zip(&whole) {
            assert_eq!((&found.ids[..], found.finish_reason), (&whole.ids[..1], FinishReason::Length));
        }
    }
}

#[test]
fn prompts_beyond_one_prefill_forward_are_read_in_several() {
    let target = random_model("llama", 1);
    // Two of these fill a forward, and one is larger than any.
    let lengths = [1000, 1000, 1000, 2500, 3];
    let prompts: Vec<Prompt> = (0_u64..)
        .zip(lengths)
        .map(|(request, length)| Prompt { request, ids: (0..length).map(|place| (place * place + 3) % VOCABULARY).collect() })
        .collect();
    let settings = settings(Sampler::greedy(), &[], 4, 8);
    assert_eq!(in_order(generated(&target, &prompts, &settings)), one_by_one(&target, &prompts, &settings));
}

#[test]
fn generation_ends_when_told_to() {
    let target = random_model("llama", 1);
    let mut calls = 0;
    generate(&target, &prompts(9), &settings(Sampler::greedy(), &[], 3, 2), &AtomicBool::new(false), &mut |_| {
        calls += 1;
        if calls == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .unwrap();
    assert_eq!(calls, 3);
    // The flag is looked at after every token, also while no response finishes.
    let stop = AtomicBool::new(true);
    generate(&target, &prompts(9), &settings(Sampler::greedy(), &[], 1000, 2), &stop, &mut |_| panic!("a response")).unwrap();
    assert!(generated(&target, &[], &settings(Sampler::greedy(), &[], 3, 2)).is_empty());
}

#[test]
fn prompts_that_cannot_be_read_are_refused_before_anything_runs() {
    let target = random_model("llama", 1);
    for (ids, problem) in [(vec![], "prompt 1 is empty"), (vec![0, VOCABULARY], "prompt 1 has the token 24")] {
        let prompts = [Prompt { request: 0, ids: vec![1] }, Prompt { request: 1, ids }];
        let error = generate(&target, &prompts, &settings(Sampler::greedy(), &[], 3, 2), &AtomicBool::new(false), &mut |_| {
            panic!("a response")
        });
        let error = error.unwrap_err();
        assert!(matches!(error, DecodeError::Prompt { index: 1, .. }));
        assert!(error.to_string().starts_with(problem), "{error}");
    }
}

#[test]
fn a_failure_of_libtorch_is_an_error_not_a_panic() {
    let mut target = random_model("llama", 1);
    target.layers[1].o_proj = target.layers[1].o_proj.narrow(1, 0, 15);
    let error = generate(&target, &prompts(2), &settings(Sampler::greedy(), &[], 3, 2), &AtomicBool::new(false), &mut |_| {
        panic!("a response")
    });
    assert!(matches!(error.unwrap_err(), DecodeError::Torch(_)));
}
