//! Batched generation writes what decoding one prompt at a time writes, whatever shares the batch.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeSet, VecDeque};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use configs::Drafts;
use data::chat::ChatTemplate;
use data::engine::{Answer, Conversations, Question};
use data::gguf::GgufFile;
use data::responses::FinishReason;
use data::tokenizer::Tokenizer;
use evaluator::fan_out::FanOut;
use evaluator::generate::{GenerateSettings, generate, lanes_with_room};
use evaluator::{DecodeError, Event, Sampler, Settings, autoregressive};
use model::{ModelConfig, Transformer, weights};
use serde_json::json;
use tch::{Device, Kind};

const VOCABULARY: u32 = 24;

fn random_model(model_type: &str, seed: u64) -> Transformer {
    torch::set_num_threads(1);
    let config = json!({"model_type": model_type, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": VOCABULARY});
    Transformer::random(ModelConfig::from_json(&config).unwrap(), seed, Kind::Float)
}

/// What to ask; sampling draws from `request`.
#[derive(Debug, Clone)]
struct Prompt {
    request: u64,
    ids: Vec<u32>,
}

/// An answer to the prompt of this index.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Generated {
    index: usize,
    ids: Vec<u32>,
    finish_reason: FinishReason,
}

/// Prompts as conversations of one turn; after some of them a second one is asked.
#[derive(Default)]
struct Asked {
    prompts: VecDeque<(u64, Prompt)>,
    answers: Vec<Generated>,
    refused: Vec<(u64, String)>,
    /// Key -> what is asked once that is answered.
    later: Vec<(u64, Prompt)>,
    /// Answers after which it wants no more.
    enough: Option<usize>,
}

impl Asked {
    fn new(prompts: &[Prompt]) -> Self {
        Asked { prompts: (0..).zip(prompts.iter().cloned()).collect(), ..Asked::default() }
    }
}

impl Conversations for Asked {
    fn next(&mut self) -> Option<Question> {
        let (key, Prompt { request, ids }) = self.prompts.pop_front()?;
        Some(Question { key, messages: Vec::new(), tools: None, prompt_ids: ids, counter: request })
    }

    fn answer(&mut self, key: u64, answer: Result<Answer, String>) -> ControlFlow<()> {
        match answer {
            Ok(Answer { ids, text: None, finish_reason }) => {
                self.answers.push(Generated { index: key as usize, ids: ids.unwrap(), finish_reason });
            }
            Ok(answer) => panic!("{answer:?}"),
            Err(reason) => self.refused.push((key, reason)),
        }
        if let Some(place) = self.later.iter().position(|(after, _)| *after == key) {
            let number = 1000 + key;
            self.prompts.push_back((number, self.later.remove(place).1));
        }
        if self.enough == Some(self.answers.len()) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
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
    GenerateSettings { sampler, stop_tokens: stop_tokens.to_vec(), max_new_tokens, longest_prompt: 2500, lanes }
}

/// All responses in the order in which they finished.
fn generated(target: &Transformer, prompts: &[Prompt], settings: &GenerateSettings) -> Vec<Generated> {
    let mut asked = Asked::new(prompts);
    generate(target, &mut asked, settings, &AtomicBool::new(false)).unwrap();
    assert_eq!(asked.refused, []);
    asked.answers
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
    let mut asked = Asked { enough: Some(3), ..Asked::new(&prompts(9)) };
    generate(&target, &mut asked, &settings(Sampler::greedy(), &[], 3, 2), &AtomicBool::new(false)).unwrap();
    assert_eq!(asked.answers.len(), 3);
    // The flag is looked at after every token, also while no response finishes.
    let mut asked = Asked::new(&prompts(9));
    generate(&target, &mut asked, &settings(Sampler::greedy(), &[], 1000, 2), &AtomicBool::new(true)).unwrap();
    assert_eq!((asked.answers.len(), asked.prompts.len()), (0, 9));
    assert!(generated(&target, &[], &settings(Sampler::greedy(), &[], 3, 2)).is_empty());
}

#[test]
fn what_an_answer_leads_to_is_asked_too_and_pools_are_filled_again() {
    let target = random_model("llama", 1);
    let prompts = prompts(70);
    let settings = settings(sampled(), &[2, 5], 12, 2);
    let expected = one_by_one(&target, &prompts, &settings);
    // Two lanes have a pool of 32; three of the prompts are only asked when another is answered.
    let mut asked = Asked::new(&prompts[..67]);
    asked.later = [(0, 67), (40, 68), (66, 69)].map(|(after, prompt)| (after, prompts[prompt].clone())).to_vec();
    generate(&target, &mut asked, &settings, &AtomicBool::new(false)).unwrap();
    assert_eq!(asked.answers.len(), 70);
    for answer in &asked.answers {
        let place =
            [(1000, 67), (1040, 68), (1066, 69)].iter().find(|(key, _)| *key == answer.index).map_or(answer.index, |it| it.1);
        assert_eq!((&answer.ids, answer.finish_reason), (&expected[place].ids, expected[place].finish_reason));
    }
}

#[test]
fn prompts_that_cannot_be_read_are_refused_and_the_others_answered() {
    let target = random_model("llama", 1);
    let settings = GenerateSettings { longest_prompt: 3, ..settings(Sampler::greedy(), &[], 3, 2) };
    for (ids, problem) in [
        (vec![], "is empty"),
        (vec![0, VOCABULARY], "has the token 24"),
        (vec![1; 4], "its prompt has 4 tokens, and there is room for 3"),
    ] {
        let prompts = [vec![1], ids, vec![2]].map(|ids| Prompt { request: 0, ids });
        let mut asked = Asked::new(&prompts);
        generate(&target, &mut asked, &settings, &AtomicBool::new(false)).unwrap();
        assert_eq!((asked.answers.len(), asked.refused.len(), asked.refused[0].0), (2, 1, 1));
        assert!(asked.refused[0].1.contains(problem), "{:?}", asked.refused);
    }
}

#[test]
fn a_failure_of_libtorch_is_an_error_not_a_panic() {
    let mut target = random_model("llama", 1);
    let o_proj = &mut target.layers[1].o_proj;
    o_proj.weight = o_proj.weight.narrow(1, 0, 15);
    let mut asked = Asked::new(&prompts(2));
    let error = generate(&target, &mut asked, &settings(Sampler::greedy(), &[], 3, 2), &AtomicBool::new(false));
    assert!(matches!(error.unwrap_err(), DecodeError::Torch(_)));
}

/// So many of `../shared/prompts`, answered by SmolLM2 in f32 with the lanes that a recipe has by default, and one after the other.
fn real_prompts_are_answered_as_one_by_one(count: usize, max_new_tokens: usize) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let model = root.join(".models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let rows = root.join("../shared/prompts/gsm8k-train-3000.jsonl");
    if !rows.exists() || !model.exists() {
        eprintln!("skipped: needs {} and {}", rows.display(), model.display());
        return;
    }
    let gguf = GgufFile::open(&model).unwrap();
    let (tokenizer, template) = (Tokenizer::from_gguf(&gguf).unwrap(), ChatTemplate::from_gguf(&gguf).unwrap());
    let conversations = data::benchmarks::read(&rows, None, None).unwrap().conversations;
    let prompts: Vec<Prompt> = (0..)
        .zip(&conversations[..count])
        .map(|(request, conversation)| {
            let text = template.render(&conversation.request.messages, true, None).unwrap();
            Prompt { request, ids: tokenizer.encode(&text, false).unwrap() }
        })
        .collect();
    torch::set_num_threads(torch::available_cores());
    let target = weights::load(&model, Kind::Float, Device::Cpu).unwrap();
    let lanes = lanes_with_room(&target, 2500 + max_new_tokens, 1);
    let settings = settings(Sampler::greedy(), &target.config.eos_token_id, max_new_tokens, lanes);
    let batched = in_order(generated(&target, &prompts, &settings));
    let alone = one_by_one(&target, &prompts, &settings);
    assert_eq!(batched.len(), count);
    for (batched, alone) in batched.iter().zip(&alone) {
        assert_eq!(batched, alone, "prompt {} of {count}, {lanes} lanes", alone.index);
    }
    let tokens: usize = alone.iter().map(|response| response.ids.len()).sum();
    println!("{count} prompts, {lanes} lanes: all {tokens} tokens are those of one-by-one decoding");
}

#[test]
fn real_prompts_are_answered_as_one_by_one_by_the_sample_model() {
    real_prompts_are_answered_as_one_by_one(6, 32);
}

#[test]
#[ignore = "takes half an hour: make soak"]
fn soak_256_real_prompts_are_answered_as_one_by_one() {
    real_prompts_are_answered_as_one_by_one(256, 160);
}
