//! The whole loop draws texts from the target's distribution: 200,000 texts of tiny models, counted, against the exact probabilities; and
//! as many of one case (`make soak`).

use std::collections::HashMap;
use std::ops::ControlFlow;

use configs::{Drafts, Labels};
use evaluator::fan_out::{FanOut, Lookup};
use evaluator::sampling::TokenPlace;
use evaluator::verification::verify_drawn;
use evaluator::{Drafter, Event, Sampler, Settings, asynchronous};
use model::Transformer;

use crate::models::{LABELS, fresh_block, fresh_causal, noisy_drafter, random_model};

const PROMPT: [u32; 1] = [1];

/// Texts of each of the eight cases.
const RUNS: usize = 25_000;

/// What a normal number exceeds once in a million times.
const ONE_IN_A_MILLION: f64 = 4.753;

type Counts = HashMap<Vec<u32>, usize>;

/// Tiny models of so many tokens, the texts' length, and how the target chooses.
struct Case {
    target: Transformer,
    drafter: Drafter,
    length: usize,
    sampler: Sampler,
}

impl Case {
    fn new(vocabulary: u32, length: usize, labels: Labels, sampler: Sampler) -> Self {
        let target = random_model(vocabulary, 1, u64::from(vocabulary));
        let drafter = noisy_drafter(&target, 0.3, 3, labels, 77);
        Self { target, drafter, length, sampler }
    }

    /// The probability of every text, from forwards without caches.
    fn law(&self, sampler: &Sampler) -> HashMap<Vec<u32>, f64> {
        let _no_grad = tch::no_grad_guard();
        let mut law = HashMap::from([(vec![], 1.0)]);
        for _ in 0..self.length {
            let step = |(text, reached): (&Vec<u32>, &f64)| {
                let row = self.target_row(sampler, text).into_iter().zip(0_u32..);
                row.map(|(p, token)| ([&text[..], &[token]].concat(), f64::from(p) * reached)).collect::<Vec<_>>()
            };
            law = law.iter().flat_map(step).collect();
        }
        law
    }

    fn target_row(&self, sampler: &Sampler, text: &[u32]) -> Vec<f32> {
        let ids = [&PROMPT, text].concat();
        let logits = fresh_causal(&self.target, &ids).narrow(0, ids.len() as i64 - 1, 1);
        torch::to_f32s(&sampler.probabilities(&logits))
    }

    /// The drafter's distribution of the token behind a text that is not empty.
    fn drafter_row(&self, text: &[u32]) -> Vec<f32> {
        let (anchor, before) = text.split_last().unwrap();
        let slots = fresh_block(&self.drafter, &[&PROMPT, before].concat(), *anchor);
        torch::to_f32s(&self.sampler.probabilities(&slots.narrow(0, self.drafter.first_used_slot() as i64, 1)))
    }

    /// The texts of asynchronous decoding, many side by side, each the answer to a request of its own; and how often a draft was ready at
    /// all, and for full acceptance.
    fn decoded(&mut self, drafts: Drafts, runs: usize) -> (Counts, usize, usize) {
        let prompts = vec![PROMPT.to_vec(); runs];
        let settings = Settings {
            sampler: self.sampler.clone(),
            stop_tokens: vec![],
            max_new_tokens: self.length,
            concurrency: 64,
            fan_out: FanOut::BestFirst { blocks: 4 },
            drafts,
        };
        let (mut counts, mut hits, mut full) = (Counts::new(), 0, 0);
        asynchronous(&self.target, &mut self.drafter, &prompts, &settings, &mut |event| {
            if let Event::Text(text) = event {
                let is_hit = |lookup: Option<Lookup>| lookup == Some(Lookup::Hit);
                hits += text.rounds.iter().filter(|round| is_hit(round.lookup)).count();
                full += text.rounds.windows(2).filter(|it| is_hit(it[1].lookup) && it[0].accepted == it[0].drafted).count();
                *counts.entry(text.tokens).or_default() += 1;
            }
            ControlFlow::Continue(())
        })
        .unwrap();
        (counts, hits, full)
    }

    /// Texts drafted one token at a time, drawn, or by the mistake of judging the likeliest token as if it had been drawn.
    fn simulated(&self, is_drawn: bool) -> Counts {
        let _no_grad = tch::no_grad_guard();
        let mut targets: HashMap<Vec<u32>, Vec<f32>> = HashMap::new();
        let mut drafters = targets.clone();
        let mut counts = Counts::new();
        for request in 0..RUNS as u64 {
            let mut text: Vec<u32> = Vec::new();
            while text.len() < self.length {
                let place = TokenPlace { request, position: text.len() };
                let mut target = |text: &[u32]| {
                    let row = || self.target_row(&self.sampler, text);
                    targets.entry(text.to_vec()).or_insert_with(row).clone()
                };
                let (mut draft, mut from) = (Vec::new(), Vec::new());
                if !text.is_empty() {
                    let row = drafters.entry(text.clone()).or_insert_with(|| self.drafter_row(&text)).clone();
                    draft.push(if is_drawn {
                        self.sampler.draw_drafts(&tch::Tensor::from_slice(&row).unsqueeze(0), &[place])[0]
                    } else {
                        (0..row.len()).max_by(|&one, &other| row[one].total_cmp(&row[other])).unwrap() as u32
                    });
                    from.push(row);
                }
                let rows: Vec<Vec<f32>> = (0..=draft.len()).map(|count| target(&[&text[..], &draft[..count]].concat())).collect();
                let verdict = verify_drawn(&draft, &from, &rows, &self.sampler.chances(place, draft.len()));
                text.extend(draft[..verdict.accepted].iter().copied().chain([verdict.next]));
            }
            text.truncate(self.length);
            *counts.entry(text).or_default() += 1;
        }
        counts
    }
}

/// How far counts are from a law, as a normal number: chi-square by Wilson and Hilferty's cube root. Rare texts are taken together.
fn distance(counts: &Counts, law: &HashMap<Vec<u32>, f64>) -> f64 {
    let runs = counts.values().sum::<usize>() as f64;
    assert!(counts.keys().all(|text| law.get(text).is_some_and(|&probability| probability > 0.0)), "a text that cannot be");
    let (mut statistic, mut cells, mut rare) = (0.0, 0.0, (0.0, 0.0));
    let mut add = |observed: f64, expected: f64| {
        statistic += (observed - expected).powi(2) / expected;
        cells += 1.0;
    };
    for (text, probability) in law {
        let (observed, expected) = (counts.get(text).copied().unwrap_or(0) as f64, probability * runs);
        if expected < 10.0 {
            rare = (rare.0 + observed, rare.1 + expected);
        } else {
            add(observed, expected);
        }
    }
    if rare.1 >= 10.0 {
        add(rare.0, rare.1);
    }
    let freedom: f64 = cells - 1.0;
    assert!(freedom > 20.0, "{cells} cells");
    let spread = 2.0 / (9.0 * freedom);
    ((statistic / freedom).cbrt() - (1.0 - spread)) / spread.sqrt()
}

/// Counts texts of these models by either draft rule; gives how often a continuation of full acceptance was used with sampled drafts.
fn check(vocabulary: u32, length: usize, labels: Labels, sampler: &Sampler, runs: usize) -> usize {
    let mut case = Case::new(vocabulary, length, labels, sampler.clone());
    let law = case.law(sampler);
    // What the counts must tell apart: the same target, a little warmer.
    let warmer = case.law(&Sampler { temperature: sampler.temperature * 1.25, ..sampler.clone() });
    let mut full_hits = 0;
    for drafts in [Drafts::Point, Drafts::Sampled] {
        let (counts, hits, full) = case.decoded(drafts, runs);
        assert_eq!(counts.values().sum::<usize>(), runs);
        let (found, other) = (distance(&counts, &law), distance(&counts, &warmer));
        eprintln!("{vocabulary} tokens, {labels:?}, {drafts:?}: {found:.2}, warmer {other:.2}; hits {hits}, full {full}");
        assert!(found < ONE_IN_A_MILLION && other > 2.0 * ONE_IN_A_MILLION, "{found} {other}");
        assert!(hits > runs / 10);
        full_hits = full;
    }
    full_hits
}

const SHORT: (u32, usize, Sampler) = (8, 3, Sampler { temperature: 0.8, top_p: 1.0, top_k: 0, seed: 1 });
const LONG: (u32, usize, Sampler) = (4, 5, Sampler { temperature: 1.1, top_p: 0.97, top_k: 0, seed: 2 });

#[test]
fn asynchronous_texts_have_the_targets_distribution_by_either_rule() {
    let mut full_hits = 0;
    for (vocabulary, length, sampler) in [SHORT, LONG] {
        for labels in LABELS {
            let full = check(vocabulary, length, labels, &sampler, RUNS);
            full_hits += if labels == Labels::InPlace { full } else { 0 };
        }
    }
    assert!(full_hits > 500, "{full_hits} continuations of full acceptance");
}

#[test]
#[ignore = "takes minutes: make soak"]
fn soak_200_000_texts_of_each_rule_and_label_have_the_targets_distribution() {
    let (vocabulary, length, sampler) = SHORT;
    for labels in LABELS {
        check(vocabulary, length, labels, &sampler, 200_000);
    }
}

#[test]
fn the_wrong_rule_is_found_out() {
    let sampler = Sampler { temperature: 0.8, top_p: 1.0, top_k: 0, seed: 3 };
    let case = Case::new(8, 3, Labels::InPlace, sampler.clone());
    let law = case.law(&sampler);
    let (right, wrong) = (distance(&case.simulated(true), &law), distance(&case.simulated(false), &law));
    eprintln!("drawn {right:.2}, the likeliest judged as drawn {wrong:.2}");
    assert!(right < ONE_IN_A_MILLION && wrong > 2.0 * ONE_IN_A_MILLION, "{right} {wrong}");
}
