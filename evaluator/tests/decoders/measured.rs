//! What is measured before decoding: a drafter's calibration, and the budget of its packs.

use std::sync::atomic::AtomicBool;

use configs::{Budget, Drafts, Labels};
use data::supervision::Example;
use evaluator::budget::resolve;
use evaluator::calibration::calibrate;
use evaluator::decode::DecodeError;
use evaluator::fan_out::FanOut;
use evaluator::round_times::round_times;
use evaluator::{Drafter, Sampler, Settings, autoregressive, replay};

use crate::models::{LABELS, noisy_drafter, prompts, random_model};
use crate::replays::examples;
use crate::texts::collected;

fn settings(temperature: f64, concurrency: usize) -> Settings {
    Settings {
        sampler: Sampler { temperature, seed: 7, ..Sampler::greedy() },
        stop_tokens: vec![],
        max_new_tokens: 60,
        concurrency,
        fan_out: FanOut::BestFirst { blocks: 0 },
        drafts: Drafts::Point,
    }
}

/// The drafter with all its logits multiplied.
fn scaled(drafter: &Drafter, factor: f64) -> Drafter {
    let _no_grad = tch::no_grad_guard();
    let mut model = drafter.model.shallow_clone();
    model.norm = &model.norm * factor;
    Drafter { model, temperatures: Vec::new(), ..*drafter }
}

#[test]
fn a_drafter_that_is_twice_as_sure_gets_twice_the_temperature() {
    let target = random_model(10, 2, 4);
    let prompts = prompts(24, 10);
    let texts = collected(|on_event| autoregressive(&target, &prompts, &settings(1.0, 4), on_event));
    let examples = examples(&prompts, &texts);
    for labels in LABELS {
        // The target itself, whose anchor sees what the target sees.
        let drafter = Drafter { anchor_sees_block: false, ..noisy_drafter(&target, 0.0, 4, labels, 2) };
        let plain = calibrate(&drafter, &examples, usize::MAX).unwrap().unwrap();
        let sure = calibrate(&scaled(&drafter, 2.0), &examples, usize::MAX).unwrap().unwrap();
        assert_eq!(plain.temperatures.len(), drafter.block_size - drafter.first_used_slot());
        for (sure, plain) in sure.temperatures.iter().zip(&plain.temperatures) {
            assert!((sure / plain - 2.0).abs() < 1e-2 || *sure == 8.0, "{sure} {plain}");
        }
        assert_eq!((sure.acceptance, sure.rank_exponent, sure.blocks), (plain.acceptance, plain.rank_exponent, plain.blocks));
        // What the target draws at temperature 1 the target's own probabilities are right about.
        assert!(labels == Labels::InPlace || (plain.temperatures[0] - 1.0).abs() < 0.1, "{plain:?}");
        assert_eq!(calibrate(&drafter, &examples, usize::MAX).unwrap().unwrap(), plain);
        let few = calibrate(&drafter, &examples, 30).unwrap().unwrap();
        assert!((30..30 + 24).contains(&few.blocks), "{}", few.blocks);
    }
}

#[test]
fn a_token_counts_where_all_drafts_before_it_are_right() {
    let target = random_model(10, 2, 4);
    let prompts = prompts(9, 10);
    let texts = collected(|on_event| autoregressive(&target, &prompts, &settings(0.0, 4), on_event));
    for (labels, block_size) in [(Labels::InPlace, 5), (Labels::Next, 4)] {
        let drafter = noisy_drafter(&target, 0.1, block_size, labels, 2);
        let examples = examples(&prompts, &texts);
        let rounds = replay(&drafter, &examples, 4).unwrap();
        let right: usize = rounds.judged.iter().map(|(_, accepted)| accepted).sum();
        let rejections = rounds.judged.iter().filter(|(drafted, accepted)| accepted < drafted).count();
        let calibration = calibrate(&drafter, &examples, usize::MAX).unwrap().unwrap();
        assert_eq!(calibration.blocks, rounds.rounds);
        assert_eq!(calibration.acceptance, right as f64 / (right + rejections) as f64);
        assert!(right > 20 && rejections > 20);
    }
}

#[test]
fn responses_without_a_round_calibrate_nothing() {
    let drafter = noisy_drafter(&random_model(10, 2, 1), 0.1, 4, LABELS[0], 2);
    assert_eq!(calibrate(&drafter, &[], 9).unwrap(), None);
    assert_eq!(calibrate(&drafter, &[Example::after_prompt(vec![1, 2], 1)], 9).unwrap(), None);
    let error = calibrate(&drafter, &[Example::after_prompt(vec![1, 99, 2], 1)], 9).unwrap_err();
    assert!(error.to_string().contains("calibrating the drafter"), "{error}");
}

/// Nobody asks to stop.
static GOES_ON: AtomicBool = AtomicBool::new(false);

#[test]
fn a_budget_of_time_is_measured_and_one_of_blocks_is_not() {
    let target = random_model(10, 2, 4);
    let drafter = noisy_drafter(&target, 0.1, 4, LABELS[1], 2);
    let threads = tch::get_num_threads();
    let of = |budget: Budget| resolve(&target, &drafter, &budget, &settings(0.0, 2), 30, &GOES_ON).unwrap();
    assert_eq!(of(Budget::Blocks(7)), None);
    let hour = of(Budget::Milliseconds(3.6e6)).unwrap();
    assert_eq!((hour.blocks, hour.asked.as_str()), (64, "3600000 ms"));
    assert_eq!((hour.measured.texts, hour.measured.context), (2, 30));
    let nothing = of(Budget::Milliseconds(1e-6)).unwrap();
    assert_eq!((nothing.blocks, nothing.measured.packs.len()), (0, 1));
    let drawn = Settings { drafts: Drafts::Sampled, ..settings(1.0, 2) };
    let drawn = resolve(&target, &drafter, &Budget::Milliseconds(3.6e6), &drawn, 30, &GOES_ON).unwrap().unwrap();
    assert_eq!(drawn.blocks, 64);
    let auto = of(Budget::Auto).unwrap();
    let Some(last) = auto.measured.packs.last() else { panic!("nothing measured") };
    assert!(auto.measured.verify_seconds > 0.0 && auto.blocks <= last.blocks);
    assert_eq!(tch::get_num_threads(), threads, "the caller has its cores back");
    let stopped = resolve(&target, &drafter, &Budget::Auto, &settings(0.0, 1), 30, &AtomicBool::new(true));
    assert!(matches!(stopped, Err(DecodeError::Stopped)), "{stopped:?}");
    let larger = random_model(11, 2, 7);
    let unfit = Drafter { model: larger, temperatures: Vec::new(), ..drafter };
    assert!(resolve(&target, &unfit, &Budget::Auto, &settings(0.0, 1), 30, &GOES_ON).is_err());
}

#[test]
fn rounds_are_timed_for_every_depth() {
    let target = random_model(10, 2, 4);
    let deep = noisy_drafter(&target, 0.1, 4, LABELS[1], 2);
    let shallow = Drafter { model: deep.model.with_layers(&[1]), temperatures: Vec::new(), ..deep };
    let deep = Drafter { model: deep.model.shallow_clone(), temperatures: Vec::new(), ..deep };
    let threads = tch::get_num_threads();
    let unfit = Drafter { model: random_model(11, 2, 7), temperatures: Vec::new(), ..deep };
    let drafters = [(deep, 30), (shallow, 0)];
    let times = round_times(&target, &drafters, &settings(0.0, 2), 30, &GOES_ON).unwrap();
    assert_eq!(tch::get_num_threads(), threads, "the caller has its cores back");
    assert_eq!((times.texts, times.context, times.shared_device), (2, 30, false));
    let found: Vec<(usize, usize)> = times.drafters.iter().map(|it| (it.layers, it.blocks)).collect();
    assert_eq!(found, [(2, 30), (1, 0)]);
    assert!(times.verify_seconds > 0.0 && times.drafters.iter().all(|it| it.draft_seconds > 0.0), "{times:?}");
    assert!(times.drafters[0].pack_seconds > 0.0);
    assert_eq!(times.drafters[1].pack_seconds, 0.0);
    // The model is the formula, applied to what was measured.
    let speed = times.tokens_per_second(2, 1.5, 0.25).unwrap();
    let round = times.verify_seconds.max(times.drafters[0].pack_seconds) + (1.0 - 0.0625) * times.drafters[0].draft_seconds;
    assert!((speed - 3.0 / round).abs() < 1e-9 * speed);
    let stopped = round_times(&target, &drafters, &settings(0.0, 2), 30, &AtomicBool::new(true));
    assert!(matches!(stopped, Err(DecodeError::Stopped)), "{stopped:?}");
    assert!(round_times(&target, &[(unfit, 3)], &settings(0.0, 1), 30, &GOES_ON).is_err());
}
