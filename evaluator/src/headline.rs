//! The sentence that a report opens with: which checkpoint to serve and why, or that none is worth it here.

use serde_json::Value;

use crate::svg::escape;
use crate::table::{self, Verdict, benchmark_names, checkpoint_name, measured, number, or_absent, percent, rate, verdict};

/// How a checkpoint did over all benchmarks together.
#[derive(Debug, Clone)]
pub(crate) struct Standing {
    pub(crate) index: usize,
    checkpoint: String,
    tokens_per_second: f64,
    speedup: Option<f64>,
    tau: Option<f64>,
    hit_rate: Option<f64>,
    identical: bool,
    prompts: f64,
    tokens: f64,
}

/// What a reader came for, and what to know beside it.
pub(crate) struct Headline {
    pub(crate) sentence: String,
    pub(crate) details: Vec<String>,
    pub(crate) chosen: Option<Standing>,
}

/// The checkpoint to serve: the fastest with identical output; and whether serving it is worth it here.
pub(crate) fn headline(scores: &[Value]) -> Headline {
    let without = |sentence: &str| Headline { sentence: sentence.to_owned(), details: Vec::new(), chosen: None };
    if scores.is_empty() {
        return without("No checkpoint has been scored yet");
    }
    let standings = standings(scores, "asynchronous");
    if standings.is_empty() {
        return without("No checkpoint was scored with the asynchronous decoder, so none can be recommended");
    }
    let fastest = |candidates: &mut dyn Iterator<Item = &Standing>| {
        candidates.max_by(|left, right| left.tokens_per_second.total_cmp(&right.tokens_per_second)).cloned()
    };
    let Some(chosen) = fastest(&mut standings.iter().filter(|standing| standing.identical)) else {
        return without("Serve none of these: no checkpoint is shown to give the same output as autoregressive decoding");
    };
    let (name, speed) = (&chosen.checkpoint, rate(chosen.tokens_per_second));
    let same = match table::drafts_are_sampled(&scores[chosen.index]) {
        true => "output of the same distribution",
        false => "same output",
    };
    let mut details = Vec::new();
    let lockstep = fastest(&mut standings_with_identical_output(scores, "lockstep").iter());
    let anything_faster = standings.iter().any(|standing| standing.identical && standing.speedup.is_some_and(is_faster));
    let sentence = match chosen.speedup {
        Some(speedup) if anything_faster => {
            format!(
                "Serve {name}: {speed} tokens/s with the asynchronous decoder, {speedup:.2} times autoregressive decoding, {same}"
            )
        }
        Some(speedup) => {
            let lockstep_wins = lockstep.as_ref().and_then(|other| other.speedup).is_some_and(is_faster);
            let best = if lockstep_wins { "Lockstep" } else { "Autoregressive" };
            details.push(format!(
                "{best} decoding serves best here. Of the checkpoints with identical output, {name} is the one to try on \
                 another machine: it has the most tokens per second ({speed})."
            ));
            format!(
                "The asynchronous decoder is not faster than autoregressive decoding on this machine: at best {speedup:.2} times, with {name}"
            )
        }
        None => {
            format!("Serve {name}: {speed} tokens/s with the asynchronous decoder, {same}; its speedup was not measured")
        }
    };
    if let Some(lockstep) = lockstep.filter(|other| other.tokens_per_second > chosen.tokens_per_second) {
        let times = lockstep.speedup.map_or_else(String::new, |speedup| format!(", {speedup:.2} times autoregressive decoding"));
        let speed = rate(lockstep.tokens_per_second);
        details.push(format!(
            "The lockstep decoder is faster than the asynchronous one on this machine: {speed} tokens/s with {}{times}.",
            lockstep.checkpoint
        ));
    }
    let faster = |standing: &&Standing| !standing.identical && standing.tokens_per_second > chosen.tokens_per_second;
    for other in standings.iter().filter(faster) {
        let speed = rate(other.tokens_per_second);
        details.push(format!("{} is faster ({speed} tokens/s), but its output is not shown to be identical.", other.checkpoint));
    }
    if chosen.prompts > 0.0 && chosen.tokens > 0.0 {
        details.push(format!("Measured on {} prompts, {} tokens.", chosen.prompts, chosen.tokens));
    }
    Headline { sentence, details, chosen: Some(chosen) }
}

/// Whether a speedup is above 1 as it is printed.
fn is_faster(speedup: f64) -> bool {
    (speedup * 100.0).round() > 100.0
}

fn standings(scores: &[Value], decoder: &str) -> Vec<Standing> {
    scores.iter().enumerate().filter_map(|(index, score)| standing(index, score, decoder)).collect()
}

fn standings_with_identical_output(scores: &[Value], decoder: &str) -> Vec<Standing> {
    standings(scores, decoder).into_iter().filter(|standing| standing.identical).collect()
}

/// Pools the benchmarks of one decoder: speed and speedup by the time they took, τ and hit rate by their rounds.
fn standing(index: usize, score: &Value, decoder: &str) -> Option<Standing> {
    let (mut prompts, mut tokens, mut seconds) = (0.0, 0.0, 0.0);
    let (mut speedup, mut tau, mut hit_rate) = (Pooled::default(), Pooled::default(), Pooled::default());
    let mut identical = true;
    for benchmark in benchmark_names(score) {
        let figures = measured(score, decoder, &benchmark);
        let Some(speed) = number(figures, "tokens_per_second").filter(|speed| *speed > 0.0) else { continue };
        let count = number(figures, "tokens").filter(|tokens| *tokens > 0.0).unwrap_or(1.0);
        let rounds = number(figures, "rounds").unwrap_or(1.0);
        prompts += number(figures, "prompts").unwrap_or(0.0);
        tokens += count;
        seconds += count / speed;
        speedup.add(number(figures, "speedup"), count / speed);
        tau.add(number(figures, "tau_pooled"), rounds);
        hit_rate.add(number(figures, "hit_rate"), rounds);
        let known = verdict(score, decoder, &benchmark);
        identical &= matches!(known, Some(Verdict::Identical | Verdict::InDistribution | Verdict::NearTies));
    }
    (seconds > 0.0).then(|| Standing {
        index,
        checkpoint: checkpoint_name(score),
        tokens_per_second: tokens / seconds,
        speedup: speedup.mean(),
        tau: tau.mean(),
        hit_rate: hit_rate.mean(),
        identical,
        prompts,
        tokens,
    })
}

/// A weighted mean that is known only when every part of it is.
#[derive(Default)]
struct Pooled {
    sum: f64,
    weight: f64,
    incomplete: bool,
}

impl Pooled {
    fn add(&mut self, value: Option<f64>, weight: f64) {
        match value {
            Some(value) => (self.sum, self.weight) = (self.sum + value * weight, self.weight + weight),
            None => self.incomplete = true,
        }
    }

    fn mean(&self) -> Option<f64> {
        (self.weight > 0.0 && !self.incomplete).then(|| self.sum / self.weight)
    }
}

/// The figures of a checkpoint that a reader looks for first.
pub(crate) fn tiles(standing: &Standing) -> String {
    let figures = [
        ("tokens/s", rate(standing.tokens_per_second)),
        ("speedup", or_absent(standing.speedup, |speedup| format!("{speedup:.2}×"))),
        ("τ, tokens a round", or_absent(standing.tau, |tau| format!("{tau:.2}"))),
        ("hit rate", or_absent(standing.hit_rate, percent)),
    ];
    let tile = |(name, value): &(&str, String)| format!("<div><dt>{}</dt><dd>{}</dd></div>\n", escape(name), escape(value));
    format!("<dl class=\"tiles\">\n{}</dl>\n", figures.iter().map(tile).collect::<String>())
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use serde_json::json;

    pub(crate) fn score(checkpoint: &str, speed: f64, identical: bool) -> Value {
        let at = |blocks: usize, hit_rate: f64| json!({"blocks": blocks, "fan_out": "any", "hit_rate": hit_rate, "rounds": 300});
        json!({"checkpoint": checkpoint, "layers": 30,
        "hit_rate_by_blocks": {"best_first": [at(3, 0.4), at(15, 0.7)], "rectangle": [at(3, 0.3), at(15, 0.5)]}, "decoders": {
            "autoregressive": {"benchmarks": {"stories": {"tokens_per_second": 20.0}}},
            "asynchronous": {"benchmarks": {"stories": {
                "prompts": 4, "tokens": 400, "rounds": 200, "tau_pooled": 2.0, "tokens_per_second": speed, "speedup": speed / 20.0,
                "hit_rate": 0.7, "identical_to_autoregressive": identical, "acceptance_by_position": [0.7, 0.4, 0.1],
                "misses": {"wrong_candidate": 40, "beyond_positions": 20}}}},
        }})
    }

    #[test]
    fn headline_serves_the_fastest_identical_checkpoint() {
        let sentence = |scores: &[Value]| headline(scores).sentence;
        let scores = [score("slow", 22.0, true), score("good", 25.0, true), score("wrong", 40.0, false)];
        let headline = headline(&scores);
        assert!(headline.sentence.starts_with("Serve good: 25.0 tokens/s") && headline.sentence.contains("1.25 times"));
        assert!(headline.details.iter().any(|detail| detail.starts_with("wrong is faster (40.0 tokens/s), but")));
        assert!(sentence(&[score("bad", 40.0, false)]).starts_with("Serve none of these"));
        assert!(sentence(&[score("late", 19.0, true)]).contains("not faster than autoregressive decoding on this machine"));
        let mut lockstep = score("late", 19.0, true);
        lockstep["decoders"]["lockstep"] = json!({"benchmarks": {"stories": {
            "tokens_per_second": 30.0, "speedup": 1.5, "identical_to_autoregressive": true}}});
        assert!(super::headline(&[lockstep]).details[0].starts_with("Lockstep decoding serves best here"));
        assert!(super::headline(&[score("late", 19.0, true)]).details[0].starts_with("Autoregressive decoding serves best here"));
        assert!(sentence(&[score("even", 20.05, true)]).contains("not faster"), "1.00 times is not faster");
    }

    #[test]
    fn benchmarks_are_pooled_by_time_and_by_rounds() {
        let mut score = score("both", 30.0, true);
        score["decoders"]["asynchronous"]["benchmarks"]["code"] = json!({"tokens": 100, "rounds": 100, "tau_pooled": 1.0,
            "tokens_per_second": 10.0, "speedup": 0.5, "identical_to_autoregressive": true});
        let standing = standing(0, &score, "asynchronous").unwrap();
        let seconds = 400.0 / 30.0 + 100.0 / 10.0;
        assert!((standing.tokens_per_second - 500.0 / seconds).abs() < 1e-9);
        assert!((standing.speedup.unwrap() - (500.0 / 20.0) / seconds).abs() < 1e-9);
        assert!((standing.tau.unwrap() - 500.0 / 300.0).abs() < 1e-9);
        assert_eq!(standing.hit_rate, None, "one benchmark has none");
    }
}
