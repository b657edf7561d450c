//! Both draft rules leave the target's distribution as it is: shown by enumeration, with the probability of everything that can happen.
//!
//! A text grows by rounds, as in the decoders: a block drafts a few tokens from distributions that depend on what stands before it, and
//! the crate's own rule judges them. The noise that draws a position is one number for the whole text, used anew in each round that drafts
//! the position, as the decoders do it.

use std::collections::HashMap;

use data::supervision::counter_generator;
use evaluator::Sampler;
use evaluator::verification::{Chance, Verdict, verify, verify_drawn};
use rand_chacha::rand_core::RngCore;
use tch::Tensor;

type Text = Vec<u32>;

/// How tokens are drafted and judged.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rule {
    Point,
    Drawn,
    /// The drafter's likeliest token, judged as if it had been drawn: the mistake to test for.
    PointJudgedAsDrawn,
}

/// Which block drafts after full acceptance.
#[derive(Debug, Clone, Copy, PartialEq)]
enum AfterFull {
    /// The one anchored at the bonus token.
    Fresh,
    /// The one anchored at the last drafted token, if its likeliest first token equals the bonus token.
    Continuation,
    /// Of both the one whose drawn token the target likes better: a choice that looks at noise before its time.
    Peeking,
}

/// Distributions of a small world.
struct World {
    vocabulary: usize,
    length: usize,
    /// Tokens that a block drafts.
    drafted: usize,
    /// The target's, by the text so far.
    target: HashMap<Text, Vec<f32>>,
    /// The drafter's, by the text before a block and the slot in it.
    drafter: HashMap<(Text, usize), Vec<f32>>,
    laws: HashMap<(Text, usize, Text), Vec<(Verdict, f64)>>,
}

impl World {
    fn new(vocabulary: usize, length: usize, drafted: usize, sampler: &Sampler, seed: u64) -> Self {
        let mut generator = counter_generator(seed, 0, 0, 0);
        let mut row = |sharpness: f64| {
            let logits: Vec<f32> =
                (0..vocabulary).map(|_| (f64::from(generator.next_u32()) / 2_f64.powi(32) * sharpness) as f32).collect();
            torch::to_f32s(&sampler.probabilities(&Tensor::from_slice(&logits).unsqueeze(0)))
        };
        let (mut target, mut drafter) = (HashMap::new(), HashMap::new());
        let mut texts: Vec<Text> = vec![vec![]];
        for _ in 0..=length {
            for text in &texts {
                target.insert(text.clone(), row(4.0));
                (0..drafted).for_each(|slot| drop(drafter.insert((text.clone(), slot), row(3.0))));
            }
            let longer = |text: &Text| (0..vocabulary as u32).map(|token| [&text[..], &[token]].concat()).collect::<Vec<_>>();
            texts = texts.iter().flat_map(longer).collect();
        }
        Self { vocabulary, length, drafted, target, drafter, laws: HashMap::new() }
    }

    /// The target's own distribution of texts.
    fn expected(&self) -> HashMap<Text, f64> {
        let mut law = HashMap::from([(vec![], 1.0)]);
        for _ in 0..self.length {
            let step = |(text, reached): (&Text, &f64)| {
                let next = normalised(&self.target[text]).into_iter().zip(0_u32..);
                next.map(|(p, token)| ([&text[..], &[token]].concat(), p * reached)).collect::<Vec<_>>()
            };
            law = law.iter().flat_map(step).collect();
        }
        law
    }

    /// The distribution of texts that decoding by rounds gives.
    fn decoded(&mut self, rule: Rule, after_full: AfterFull) -> HashMap<Text, f64> {
        let mut law = HashMap::new();
        let mut noises: Vec<(Vec<f64>, f64)> = vec![(vec![], 1.0)];
        for position in 0..self.length {
            let cells = if rule == Rule::Drawn { self.cells(position) } else { vec![(0.5, 1.0)] };
            let step = |(noise, weight): &(Vec<f64>, f64)| {
                cells.iter().map(|(middle, width)| ([&noise[..], &[*middle]].concat(), weight * width)).collect::<Vec<_>>()
            };
            noises = noises.iter().flat_map(step).collect();
        }
        for (noise, weight) in noises {
            self.round(&mut law, rule, after_full, &noise, (vec![], 0), weight);
        }
        law
    }

    /// Parts of (0, 1) within which a number draws the same token at this position from whichever block: middle and width of each.
    fn cells(&self, position: usize) -> Vec<(f64, f64)> {
        let mut edges = vec![0.0, 1.0];
        for (_, row) in self.drafter.iter().filter(|((text, slot), _)| text.len() + slot == position) {
            let mut sum = 0.0;
            edges.extend(normalised(row).into_iter().map(|probability| {
                sum += probability;
                sum
            }));
        }
        edges.sort_by(f64::total_cmp);
        edges.windows(2).map(|edge| ((edge[0] + edge[1]) / 2.0, edge[1] - edge[0])).filter(|(_, width)| *width > 1e-15).collect()
    }

    /// One round of a text whose block stands behind its first `source` tokens, and all that can follow.
    fn round(
        &mut self,
        law: &mut HashMap<Text, f64>,
        rule: Rule,
        after_full: AfterFull,
        noise: &[f64],
        (known, source): (Text, usize),
        weight: f64,
    ) {
        if known.len() >= self.length {
            *law.entry(known[..self.length].to_vec()).or_default() += weight;
            return;
        }
        let first_slot = known.len() - source;
        let whole = self.drafted - first_slot;
        let count = whole.min(self.length - known.len());
        let draw = |world: &Self, source: &[u32], position: usize| {
            let row = &world.drafter[&(source.to_vec(), position - source.len())];
            if rule == Rule::Drawn { drawn(row, noise[position]) } else { likeliest(row) }
        };
        let draft: Text = (known.len()..known.len() + count).map(|position| draw(self, &known[..source], position)).collect();
        for (verdict, probability) in self.verdicts(rule, &known, source, &draft) {
            let accepted = [&known[..], &draft[..verdict.accepted]].concat();
            let text = [&accepted[..], &[verdict.next]].concat();
            let mut next_source = text.len();
            if verdict.accepted == whole && text.len() < self.length && self.drafted > 1 {
                let uses_continuation = match after_full {
                    AfterFull::Fresh => false,
                    AfterFull::Continuation => likeliest(&self.drafter[&(accepted.clone(), 0)]) == verdict.next,
                    AfterFull::Peeking => {
                        let liking = |token: u32| self.target[&text][token as usize];
                        liking(draw(self, &accepted, text.len())) > liking(draw(self, &text, text.len()))
                    }
                };
                if uses_continuation {
                    next_source = accepted.len();
                }
            }
            self.round(law, rule, after_full, noise, (text, next_source), weight * probability);
        }
    }

    /// All verdicts on a draft, each with its probability.
    fn verdicts(&mut self, rule: Rule, known: &[u32], source: usize, draft: &[u32]) -> Vec<(Verdict, f64)> {
        let key = (known.to_vec(), source, draft.to_vec());
        if let Some(law) = self.laws.get(&key) {
            return law.clone();
        }
        let before = |count| [known, &draft[..count]].concat();
        let target: Vec<&[f32]> = (0..=draft.len()).map(|count| self.target[&before(count)].as_slice()).collect();
        let first_slot = known.len() - source;
        let drafter: Vec<&[f32]> = (first_slot..first_slot + draft.len())
            .map(|slot| self.drafter[&(known[..source].to_vec(), slot)].as_slice())
            .collect();
        let law = if rule == Rule::Point { law_of_choices(draft, &target) } else { law_of_chances(draft, &drafter, &target) };
        self.laws.insert(key, law.clone());
        law
    }

    /// The largest error of a text's probability.
    fn error(&mut self, rule: Rule, after_full: AfterFull) -> f64 {
        self.laws.clear();
        let found = self.decoded(rule, after_full);
        let expected = self.expected();
        assert_eq!(expected.len(), self.vocabulary.pow(self.length as u32));
        assert!((found.values().sum::<f64>() - 1.0).abs() < 1e-12);
        let error = |(text, expected): (&Text, &f64)| (found.get(text).copied().unwrap_or(0.0) - expected).abs();
        expected.iter().map(error).fold(0.0, f64::max)
    }
}

fn normalised(row: &[f32]) -> Vec<f64> {
    let total: f64 = row.iter().copied().map(f64::from).sum();
    row.iter().map(|&weight| f64::from(weight) / total).collect()
}

fn likeliest(row: &[f32]) -> u32 {
    (0..row.len()).max_by(|&one, &other| row[one].total_cmp(&row[other])).unwrap_or(0) as u32
}

fn drawn(row: &[f32], chance: f64) -> u32 {
    let mut sum = 0.0;
    let exceeds = |probability: f64| {
        sum += probability;
        sum > chance
    };
    normalised(row).into_iter().position(exceeds).unwrap() as u32
}

/// The law of the point rule: every run of choices that the target can make, by its probability.
fn law_of_choices(draft: &[u32], target: &[&[f32]]) -> Vec<(Verdict, f64)> {
    let mut runs: Vec<(Text, f64)> = vec![(vec![], 1.0)];
    for row in target {
        let step = |(choices, weight): &(Text, f64)| {
            let tokens = normalised(row).into_iter().zip(0_u32..);
            tokens.map(|(p, token)| ([&choices[..], &[token]].concat(), weight * p)).collect::<Vec<_>>()
        };
        runs = runs.iter().flat_map(step).collect();
    }
    summed(runs.into_iter().map(|(choices, weight)| (verify(draft, &choices), weight)))
}

/// The law of the rejection rule: where its verdict turns as one of the uniform numbers grows is found by halving, to the last bit.
fn law_of_chances(draft: &[u32], drafter: &[&[f32]], target: &[&[f32]]) -> Vec<(Verdict, f64)> {
    let mut chances = vec![Chance { accept: 0.0, replace: 0.5 }; target.len()];
    let verdict = |chances: &[Chance]| verify_drawn(draft, drafter, target, chances);
    let mut law = Vec::new();
    let mut reached = 1.0;
    for position in 0..=draft.len() {
        let mut accepting = 0.0;
        if position < draft.len() {
            accepting = turn(|chance| {
                chances[position].accept = chance;
                verdict(&chances).accepted > position
            });
            chances[position].accept = (accepting + 1.0) / 2.0;
        }
        // What is left is rejected, or nothing is left to reject: a token is drawn.
        if 1.0 - accepting > 1e-15 {
            let mut before = 0.0;
            for token in 0..target[0].len() as u32 {
                let edge = turn(|chance| {
                    chances[position].replace = chance;
                    verdict(&chances).next <= token
                });
                law.push((Verdict { accepted: position, next: token }, reached * (1.0 - accepting) * (edge - before)));
                before = edge;
            }
        }
        if position < draft.len() {
            if accepting == 0.0 {
                break;
            }
            chances[position].accept = accepting / 2.0;
            reached *= accepting;
        }
    }
    summed(law.into_iter())
}

/// Where in (0, 1) a statement that holds for small numbers and not for large ones turns.
fn turn(mut holds: impl FnMut(f64) -> bool) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if holds(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    // An edge at an end is reached up to the last bit only.
    if high < 1e-15 { 0.0 } else { high }
}

fn summed(law: impl Iterator<Item = (Verdict, f64)>) -> Vec<(Verdict, f64)> {
    let mut sums: HashMap<(usize, u32), f64> = HashMap::new();
    law.for_each(|(verdict, weight)| *sums.entry((verdict.accepted, verdict.next)).or_default() += weight);
    let kept = sums.into_iter().filter(|(_, weight)| *weight > 0.0);
    kept.map(|((accepted, next), weight)| (Verdict { accepted, next }, weight)).collect()
}

fn sampler(temperature: f64, top_k: usize, top_p: f64) -> Sampler {
    Sampler { temperature, top_p, top_k, seed: 0 }
}

#[test]
fn both_rules_give_the_targets_distribution_at_any_temperature_and_truncation() {
    let _no_grad = tch::no_grad_guard();
    let mut seed = 0;
    for temperature in [0.0, 0.3, 1.0, 2.0] {
        for (top_k, top_p) in [(0, 1.0), (2, 1.0), (1, 1.0), (0, 0.8), (3, 0.6)] {
            for (vocabulary, length, drafted) in [(3, 3, 1), (3, 3, 2), (3, 3, 3), (4, 2, 2), (4, 3, 2)] {
                seed += 1;
                let mut world = World::new(vocabulary, length, drafted, &sampler(temperature, top_k, top_p), seed);
                for rule in [Rule::Point, Rule::Drawn] {
                    let error = world.error(rule, AfterFull::Fresh);
                    assert!(error < 1e-12, "{rule:?} {temperature} {top_k} {top_p} {vocabulary} {length} {drafted}: {error}");
                }
            }
        }
    }
}

#[test]
fn a_likeliest_token_judged_as_if_drawn_gives_another_distribution() {
    let _no_grad = tch::no_grad_guard();
    for temperature in [0.3, 1.0, 2.0] {
        for (vocabulary, length, drafted) in [(3, 2, 1), (3, 2, 2), (4, 2, 2)] {
            let mut world = World::new(vocabulary, length, drafted, &sampler(temperature, 0, 1.0), 7);
            assert!(world.error(Rule::PointJudgedAsDrawn, AfterFull::Fresh) > 0.01);
            assert!(world.error(Rule::Drawn, AfterFull::Fresh) < 1e-12);
        }
    }
}

#[test]
fn a_continuation_behind_the_last_drafted_token_keeps_the_distribution_and_one_chosen_by_its_draft_does_not() {
    let _no_grad = tch::no_grad_guard();
    // Two drafted tokens and the bonus token come before the first position at which the continuation drafts.
    let mut peeking = 0.0_f64;
    for (seed, sampler) in
        [(1, sampler(1.0, 0, 1.0)), (2, sampler(0.5, 2, 1.0)), (3, sampler(2.0, 0, 1.0)), (4, sampler(1.0, 0, 0.9))]
    {
        let mut world = World::new(3, 4, 2, &sampler, seed);
        for rule in [Rule::Point, Rule::Drawn] {
            let error = world.error(rule, AfterFull::Continuation);
            assert!(error < 1e-12, "{rule:?}: {error}");
        }
        let error = world.error(Rule::Drawn, AfterFull::Peeking);
        eprintln!("peeking {error:e}");
        peeking = peeking.max(error);
    }
    // Where a truncated target takes none of the drafter's tokens it makes no difference in which of them a block is chosen by.
    assert!(peeking > 1e-4, "{peeking}");
}
