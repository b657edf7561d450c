//! τ and speed of every checkpoint, benchmark by benchmark, each with its interval.

use serde_json::Value;

use super::figure;
use crate::dots::{Dot, DotChart, dot_chart};
use crate::svg::is_drawable;
use crate::table::{benchmark_names, checkpoint_name, measured, number};

/// Two figures, of the asynchronous decoder: τ, and the speedup where it was measured. Empty where there is neither.
pub(crate) fn by_benchmark(scores: &[Value]) -> String {
    let tau = Quantity {
        name: "τ",
        axis: "τ, tokens a round",
        line: "no draft kept",
        value: "tau_pooled",
        interval: "tau_interval",
        unit: "",
    };
    let speedup = Quantity {
        name: "Speedup",
        axis: "speedup, times the target alone",
        line: "the target alone",
        value: "speedup",
        interval: "speedup_interval",
        unit: "×",
    };
    [tau, speedup].iter().map(|quantity| quantity.figure(scores)).collect()
}

/// What a figure is about: its words, and the keys that a score has it under.
struct Quantity {
    name: &'static str,
    axis: &'static str,
    /// What 1 is.
    line: &'static str,
    value: &'static str,
    interval: &'static str,
    unit: &'static str,
}

impl Quantity {
    fn figure(&self, scores: &[Value]) -> String {
        let mut groups: Vec<(String, Vec<Dot>)> = Vec::new();
        let mut legend: Vec<(usize, String)> = Vec::new();
        let mut best: Option<(f64, String)> = None;
        for (style, score) in scores.iter().enumerate() {
            for benchmark in benchmark_names(score) {
                let Some(dot) = self.dot(style, score, &benchmark) else { continue };
                if best.as_ref().is_none_or(|(value, _)| dot.value > *value) {
                    best = Some((dot.value, format!("{} with {} on {benchmark}", dot.text, checkpoint_name(score))));
                }
                if legend.last().is_none_or(|(last, _)| *last != style) {
                    legend.push((style, checkpoint_name(score)));
                }
                match groups.iter_mut().find(|(name, _)| *name == benchmark) {
                    Some((_, dots)) => dots.push(dot),
                    None => groups.push((benchmark, vec![dot])),
                }
            }
        }
        let Some((_, best)) = best else { return String::new() };
        let title = format!("{} by benchmark, at best {best}", self.name);
        let note = format!("Asynchronous decoder; whiskers: 95 % intervals over prompts. The line at 1: {}.", self.line);
        let chart = DotChart { label: title.clone(), x_label: self.axis.to_owned(), legend, groups, line_at: 1.0 };
        figure(&title, &note, |width| dot_chart(&chart, width))
    }

    fn dot(&self, style: usize, score: &Value, benchmark: &str) -> Option<Dot> {
        let figures = measured(score, "asynchronous", benchmark);
        let value = number(figures, self.value).filter(|value| is_drawable(*value))?;
        let print = |value: f64| format!("{value:.2}{}", self.unit);
        let interval = figures[self.interval].as_array().and_then(|ends| Some((ends.first()?.as_f64()?, ends.get(1)?.as_f64()?)));
        // One prompt has no spread, whatever a file says.
        let interval = interval.filter(|_| number(figures, "prompts").is_none_or(|prompts| prompts > 1.0));
        let spread = interval.map_or_else(String::new, |(low, high)| format!(", {} to {}", print(low), print(high)));
        let text = print(value);
        let hover = format!("{}, {benchmark}: {text}{spread}", checkpoint_name(score));
        Some(Dot { style, value, interval, apart: false, text, hover })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_checkpoint_stands_under_every_benchmark_that_it_was_scored_on() {
        let score =
            |name: &str, benchmarks: Value| json!({"checkpoint": name, "decoders": {"asynchronous": {"benchmarks": benchmarks}}});
        let scores = [
            score("one", json!({"gsm8k": {"tau_pooled": 2.0, "tau_interval": [1.5, 2.5]}, "code": {"tau_pooled": 1.25}})),
            score(
                "two",
                json!({"gsm8k": {"tau_pooled": 2.25, "tau_interval": null, "speedup": 1.5, "speedup_interval": [1e308, 2.0]}}),
            ),
            score("none", json!({})),
        ];
        let html = by_benchmark(&scores);
        crate::report::check_well_formed(&format!("<!DOCTYPE html>{html}"));
        assert!(html.contains("τ by benchmark, at best 2.25 with two on gsm8k"), "{html}");
        assert!(html.contains("Speedup by benchmark, at best 1.50× with two on gsm8k"));
        assert!(html.contains("one, gsm8k: 2.00, 1.50 to 2.50") && html.contains("one, code: 1.25<"));
        assert!(!html.contains("e308") && !html.contains(">none<"));
        assert_eq!(by_benchmark(&[json!({})]), "");
    }
}
