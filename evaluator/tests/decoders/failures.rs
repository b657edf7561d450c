//! Whatever fails on either thread of the asynchronous decoder, and wherever in its work, ends the request with an error that says what
//! it was; nobody is left waiting.

use std::ops::ControlFlow;
use std::sync::mpsc::channel;
use std::time::Duration;

use configs::{Drafts, Labels};
use data::engine::{Answer, Conversations, Question};
use evaluator::fan_out::FanOut;
use evaluator::generate::{GenerateSettings, generate};
use evaluator::{DecodeError, Drafter, Event, Sampler, Settings, asynchronous, autoregressive, lockstep};
use model::Transformer;
use tch::{Device, Kind, Tensor};

use crate::models::{noisy_drafter, prompts, random_model};

const VOCABULARY: u32 = 10;

fn settings(max_new_tokens: usize) -> Settings {
    let fan_out = FanOut::Rectangle { positions: 2, candidates: 2 };
    Settings {
        sampler: Sampler::greedy(),
        stop_tokens: Vec::new(),
        max_new_tokens,
        concurrency: 1,
        fan_out,
        drafts: Drafts::Point,
    }
}

/// Runs on a thread of its own and gives what it gives, unless it hangs.
fn unless_it_hangs<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = channel();
    std::thread::spawn(move || sender.send(body()));
    receiver.recv_timeout(Duration::from_secs(120)).expect("the decoder hangs, or its panic reached its caller")
}

/// How the asynchronous decoder fails with these models, and after how many tokens.
fn failure(target: Transformer, mut drafter: Drafter, settings: Settings) -> (String, usize) {
    unless_it_hangs(move || {
        let mut told = 0;
        let mut count = |event: Event<'_>| {
            if let Event::Tokens { tokens, .. } = event {
                told += tokens.len();
            }
            ControlFlow::Continue(())
        };
        let outcome = asynchronous(&target, &mut drafter, &prompts(2, VOCABULARY), &settings, &mut count);
        (outcome.unwrap_err().to_string(), told)
    })
}

fn models() -> (Transformer, Drafter) {
    let target = random_model(VOCABULARY, 2, 7);
    let drafter = noisy_drafter(&target, 0.1, 4, Labels::Next, 3);
    (target, drafter)
}

/// A head of so many rows that no machine has room for the logits of one; all are the same row, which takes no room.
fn endless_head() -> Tensor {
    Tensor::ones([1, 16], (Kind::Float, Device::Cpu)).expand([1 << 47, 16], false)
}

#[test]
fn an_error_of_libtorch_on_the_drafters_thread() {
    let (target, drafter) = models();
    // Three temperatures do not fit four slots, which shows only when outcomes are to be ranked, not at the prefill.
    let (message, _) = failure(target, Drafter { temperatures: vec![1.0; 3], ..drafter }, settings(16));
    assert!(message.starts_with("libtorch failed while drafting: ") && message.contains("size"), "{message}");
}

#[test]
fn a_panic_on_the_drafters_thread() {
    let (target, mut drafter) = models();
    // The cache is made for one layer of the two, so that the second looks for a place that is not there.
    drafter.model.config.num_hidden_layers = 1;
    let (message, told) = failure(target, drafter, settings(16));
    assert!(message.contains("failed while drafting") && message.contains("index out of bounds"), "{message}");
    assert!(told <= 1, "{told}");
}

#[test]
fn memory_that_runs_out_on_the_drafters_thread() {
    let (target, mut drafter) = models();
    drafter.model.lm_head = Some(endless_head());
    let (message, _) = failure(target, drafter, settings(16));
    assert!(message.starts_with("libtorch failed while drafting: "), "{message}");
    // How much was asked for: 4 bytes for each logit of each row.
    let asked =
        message.split(|character: char| !character.is_ascii_digit()).filter_map(|digits| digits.parse::<u64>().ok()).max();
    assert!(asked.is_some_and(|bytes| bytes >= 1 << 47), "{message}");
}

#[test]
fn memory_that_runs_out_on_the_targets_thread() {
    let (mut target, drafter) = models();
    target.lm_head = Some(endless_head());
    let (message, told) = failure(target, drafter, settings(16));
    assert!(message.starts_with("libtorch failed while running the target: "), "{message}");
    assert_eq!(told, 0);
}

#[test]
fn a_failure_of_the_target_while_the_drafter_packs() {
    // The drafter says that it knows as many tokens as the target, but its rows for two more win everywhere. The prefill goes well;
    // then the target is to verify tokens it does not know, while the drafter packs behind them.
    let target = random_model(VOCABULARY, 2, 7);
    let mut drafter = noisy_drafter(&random_model(VOCABULARY + 2, 2, 8), 0.1, 4, Labels::Next, 3);
    drafter.model.config.vocab_size = i64::from(VOCABULARY);
    drafter.mask_token = VOCABULARY - 1;
    let _no_grad = tch::no_grad_guard();
    let head = &drafter.model.embed_tokens * 0.0;
    // Of the two, one is drafted wherever the row's sum is positive, the other where it is not.
    let _ = head.get(i64::from(VOCABULARY)).fill_(100.0);
    let _ = head.get(i64::from(VOCABULARY) + 1).fill_(-100.0);
    drafter.model.lm_head = Some(head);
    let (message, told) = failure(target, drafter, settings(16));
    assert!(message.starts_with("libtorch failed while running the target: ") && message.contains("index"), "{message}");
    assert_eq!(told, 1, "the first token comes from the prefill");
}

#[test]
fn a_cache_beyond_all_memory_is_refused_with_what_it_would_take() {
    // Of 2 layers with 2 heads of 4 values, keys and values in f32 take 128 bytes a token.
    let terabytes = |message: &str, whose: &str| {
        assert!(message.starts_with(&format!("the {whose}'s keys and values take 12800")), "{message}");
        assert!(message.contains("max_new_tokens") && message.contains("GB are free"), "{message}");
    };
    let ask = settings(1_000_000_000_000);
    let (target, drafter) = models();
    terabytes(&failure(target, drafter, ask.clone()).0, "drafter");

    // Only the target's side asks for too much when the drafter has no layers.
    let (target, mut drafter) = models();
    drafter.model.layers.clear();
    drafter.model.config.num_hidden_layers = 0;
    terabytes(&failure(target, drafter, ask.clone()).0, "target");

    let (target, drafter) = models();
    let mut ignore = |_: Event<'_>| ControlFlow::Continue(());
    let prompts = prompts(1, VOCABULARY);
    terabytes(&lockstep(&target, &drafter, &prompts, &ask, &mut ignore).unwrap_err().to_string(), "drafter");
    terabytes(&autoregressive(&target, &prompts, &ask, &mut ignore).unwrap_err().to_string(), "target");
    // More than a number holds, too.
    let endless = settings(usize::MAX);
    let refused = |outcome: Result<(), DecodeError>| assert!(matches!(outcome, Err(DecodeError::NoRoom { .. })), "{outcome:?}");
    refused(lockstep(&target, &drafter, &prompts, &endless, &mut ignore));
    refused(autoregressive(&target, &prompts, &endless, &mut ignore));

    let batch = GenerateSettings {
        sampler: Sampler::greedy(),
        stop_tokens: Vec::new(),
        max_new_tokens: usize::MAX,
        longest_prompt: 9,
        lanes: 1,
    };
    refused(generate(&target, &mut Nothing, &batch, &false.into()));
}

/// Conversations that ask nothing.
struct Nothing;

impl Conversations for Nothing {
    fn next(&mut self) -> Option<Question> {
        None
    }

    fn answer(&mut self, _: u64, _: Result<Answer, String>) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}
