//! The report of a run: one HTML file that can be read offline, with inline style and SVG and no scripts.
//!
//! It opens with the sentence a reader came for (which checkpoint to serve), then shows what that rests on.

use serde_json::Value;

use crate::figures;
use crate::svg::escape;
use crate::table::{self, Verdict, benchmark_names, checkpoint_name, measured, number, or_absent, percent, rate, verdict};

pub use crate::table::table;

/// What a run left behind, as read from its folder. Any part may be empty.
#[derive(Debug, Clone, Default)]
pub struct ReportInput {
    /// Name of the run.
    pub name: String,
    /// The resolved recipe.
    pub recipe_toml: String,
    /// Lines of the trainer's `metrics.jsonl`.
    pub metrics: Vec<Value>,
    /// Lines of the pruner's `ledger.jsonl`.
    pub ledger: Vec<Value>,
    /// Score files, in the order they shall be shown: untrained, trained, pruned.
    pub scores: Vec<Value>,
    /// A few consecutive rounds of the asynchronous decoder.
    pub timeline: Vec<TimelineRound>,
    /// (what, value) of where the run came from: revisions, hashes, machine, time.
    pub provenance: Vec<(String, String)>,
}

/// One round of the asynchronous decoder; times in seconds on one clock. Work that was not done has its end at its start.
#[derive(Debug, Clone, Default)]
pub struct TimelineRound {
    /// From when to when the drafter wrote this round's draft while the target waited; empty for a hit.
    pub draft_start: f64,
    pub draft_end: f64,
    /// From when to when the drafter wrote the pack for this round's outcomes, beside the verification.
    pub pack_start: f64,
    pub pack_end: f64,
    /// From when to when the target verified.
    pub verify_start: f64,
    pub verify_end: f64,
    /// Tokens the round committed.
    pub committed: usize,
    /// How this round's draft came to be: `first`, `hit`, or the cause of the miss.
    pub outcome: String,
}

/// The report as one self-contained HTML document.
pub fn html(input: &ReportInput) -> String {
    let headline = headline(&input.scores);
    let name = escape(&input.name);
    let mut body = format!(
        "<header><p class=\"run\">Drafthorse report · {name}</p>\n<h1>{}</h1>\n{}{}</header>\n<main>\n",
        escape(&headline.sentence),
        headline.details.iter().map(|detail| format!("<p class=\"quiet\">{}</p>\n", escape(detail))).collect::<String>(),
        headline.chosen.as_ref().map(tiles).unwrap_or_default(),
    );
    let chosen = headline.chosen.as_ref().map(|standing| standing.index);
    body += &section("Scores", &score_table(&input.scores, chosen), "No checkpoint has been scored.");
    let acceptance = figures::acceptance(&input.scores).unwrap_or_default();
    body += &section("Acceptance by position", &acceptance, "The scores hold no acceptance by position.");
    body += &section("Loss over steps", &figures::losses(&input.metrics), "The run's metrics hold no loss.");
    body += &section("Replay τ over steps", &figures::replay_tau(&input.metrics), "The run's metrics hold no replay τ.");
    body += &section("τ loss by layer", &pruning(&input.ledger), "The pruner's ledger holds no measured layer.");
    let misses = figures::misses(&input.scores).unwrap_or_default();
    body += &section("Misses by cause", &misses, "The scores hold no misses of the asynchronous decoder.");
    let timeline = figures::timeline(&input.timeline).unwrap_or_default();
    body += &section("Timeline", &timeline, "No rounds of the asynchronous decoder were kept.");
    body += &section("Resolved recipe", &recipe(&input.recipe_toml), "The resolved recipe was not kept.");
    body += &section("Provenance", &provenance(&input.provenance), "Nothing is known about where this run came from.");
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{name} · Drafthorse report</title>\n<style>\n{}</style>\n</head>\n<body>\n{body}</main>\n</body>\n</html>\n",
        include_str!("report.css"),
    )
}

fn section(title: &str, body: &str, missing: &str) -> String {
    let missing = format!("<p class=\"missing\">{}</p>\n", escape(missing));
    format!("<section>\n<h2>{}</h2>\n{}</section>\n", escape(title), if body.is_empty() { &missing } else { body })
}

/// How a checkpoint did over all benchmarks together.
#[derive(Debug, Clone)]
struct Standing {
    index: usize,
    checkpoint: String,
    tokens_per_second: f64,
    speedup: Option<f64>,
    tau: Option<f64>,
    hit_rate: Option<f64>,
    identical: bool,
    prompts: f64,
    tokens: f64,
}

struct Headline {
    sentence: String,
    details: Vec<String>,
    chosen: Option<Standing>,
}

/// The checkpoint to serve: the fastest with identical output; and whether serving it is worth it here.
fn headline(scores: &[Value]) -> Headline {
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
    let mut details = Vec::new();
    let lockstep = fastest(&mut standings_with_identical_output(scores, "lockstep").iter());
    let anything_faster = standings.iter().any(|standing| standing.identical && standing.speedup.is_some_and(is_faster));
    let sentence = match chosen.speedup {
        Some(speedup) if anything_faster => {
            format!(
                "Serve {name}: {speed} tokens/s with the asynchronous decoder, {speedup:.2} times autoregressive decoding, same output"
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
            format!("Serve {name}: {speed} tokens/s with the asynchronous decoder, same output; its speedup was not measured")
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
        identical &= matches!(verdict(figures), Some(Verdict::Identical | Verdict::NearTies));
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

fn tiles(standing: &Standing) -> String {
    let figures = [
        ("tokens/s", rate(standing.tokens_per_second)),
        ("speedup", or_absent(standing.speedup, |speedup| format!("{speedup:.2}×"))),
        ("τ, tokens a round", or_absent(standing.tau, |tau| format!("{tau:.2}"))),
        ("hit rate", or_absent(standing.hit_rate, percent)),
    ];
    let tile = |(name, value): &(&str, String)| format!("<div><dt>{}</dt><dd>{}</dd></div>\n", escape(name), escape(value));
    format!("<dl class=\"tiles\">\n{}</dl>\n", figures.iter().map(tile).collect::<String>())
}

fn score_table(scores: &[Value], chosen: Option<usize>) -> String {
    let grid = table::grid(scores);
    if grid.rows.is_empty() {
        return String::new();
    }
    let heads: String = table::groups(&grid)
        .iter()
        .map(|(name, columns)| match name.is_empty() {
            true => "<th></th>".to_owned(),
            false => format!("<th class=\"group\" colspan=\"{}\">{}</th>", columns.len(), escape(name)),
        })
        .collect();
    let class = |numeric: bool| if numeric { " class=\"number\"" } else { "" };
    let titles: String =
        grid.columns.iter().map(|column| format!("<th{}>{}</th>", class(column.numeric), escape(column.title))).collect();
    let checkpoints: Vec<String> = scores.iter().map(checkpoint_name).collect();
    let chosen = chosen.map(|index| &checkpoints[index]);
    let mut rows = String::new();
    for row in &grid.rows {
        let cells: String = row
            .iter()
            .zip(&grid.columns)
            .map(|(cell, column)| match (column.title, cell.as_str()) {
                ("identical", "yes" | "no") => format!("<td class=\"{cell}\">{cell}</td>"),
                _ => format!("<td{}>{}</td>", class(column.numeric), escape(cell)),
            })
            .collect();
        let mark = if row.first() == chosen { " class=\"chosen\"" } else { "" };
        rows += &format!("<tr{mark}>{cells}</tr>\n");
    }
    format!(
        "<div class=\"scroll\"><table>\n<thead>\n<tr>{heads}</tr>\n<tr>{titles}</tr>\n</thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n\
         <p class=\"quiet\">{}</p>\n",
        escape(table::LEGEND.trim_end()),
    )
}

fn pruning(ledger: &[Value]) -> String {
    let mut figures = figures::tau_losses(ledger).into_iter().filter(|figure| !figure.is_empty());
    let mut body = figures.next().unwrap_or_default();
    let others: Vec<String> = figures.collect();
    if !others.is_empty() {
        let count = others.len();
        body += &format!("<details><summary>The searches after it ({count})</summary>\n{}</details>\n", others.concat());
    }
    let removals = figures::removals(ledger);
    if !removals.is_empty() {
        let titles = ["layers left", "layer removed", "τ before", "τ after", "steps of recovery", "τ recovered"];
        let heads: String = titles.iter().map(|title| format!("<th class=\"number\">{title}</th>")).collect();
        let row = |cells: &[String; 6]| {
            let cells: String = cells.iter().map(|cell| format!("<td class=\"number\">{}</td>", escape(cell))).collect();
            format!("<tr>{cells}</tr>\n")
        };
        let rows: String = removals.iter().map(row).collect();
        body += &format!(
            "<div class=\"scroll\"><table>\n<thead>\n<tr>{heads}</tr>\n</thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n\
             <p class=\"quiet\">The layer removed is numbered as in the drafter before any removal.</p>\n"
        );
    }
    body
}

fn recipe(toml: &str) -> String {
    if toml.trim().is_empty() { String::new() } else { format!("<pre>{}</pre>\n", escape(toml)) }
}

fn provenance(pairs: &[(String, String)]) -> String {
    if pairs.is_empty() {
        return String::new();
    }
    let row = |(what, value): &(String, String)| format!("<tr><td>{}</td><td>{}</td></tr>\n", escape(what), escape(value));
    format!("<table class=\"provenance\">\n<tbody>\n{}</tbody>\n</table>\n", pairs.iter().map(row).collect::<String>())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use serde_json::json;

    fn score(checkpoint: &str, speed: f64, identical: bool) -> Value {
        json!({"checkpoint": checkpoint, "layers": 30, "decoders": {
            "autoregressive": {"benchmarks": {"stories": {"tokens_per_second": 20.0}}},
            "asynchronous": {"benchmarks": {"stories": {
                "prompts": 4, "tokens": 400, "rounds": 200, "tau_pooled": 2.0, "tokens_per_second": speed, "speedup": speed / 20.0,
                "hit_rate": 0.7, "identical_to_autoregressive": identical, "acceptance_by_position": [0.7, 0.4, 0.1],
                "misses": {"wrong_candidate": 40, "beyond_positions": 20}}}},
        }})
    }

    fn round(start: f64, outcome: &str) -> TimelineRound {
        TimelineRound {
            draft_start: start,
            draft_end: if outcome == "hit" { start } else { start + 0.02 },
            pack_start: start + 0.02,
            pack_end: start + 0.06,
            verify_start: start + 0.02,
            verify_end: start + 0.07,
            committed: 3,
            outcome: outcome.to_owned(),
        }
    }

    fn full(name: &str) -> ReportInput {
        let mut ledger: Vec<Value> = (0..4)
            .map(|layer| json!({"event": "tau_loss", "depth": 4, "layer": layer, "tau_loss": 0.1, "low": 0.05, "high": 0.15, "blocks": 9}))
            .collect();
        ledger
            .push(json!({"event": "removed", "depth": 3, "layer": 2, "original_layer": 2, "tau_before": 2.0, "tau_after": 1.9}));
        ledger.push(json!({"event": "recovered", "depth": 3, "steps": 12, "tau": 1.98}));
        ReportInput {
            name: name.to_owned(),
            recipe_toml: format!("name = \"{name}\""),
            metrics: vec![
                json!({"stage": name, "step": 1, "loss": 3.0, "loss_diffusion": 2.0, "loss_autoregressive": 1.0}),
                json!({"stage": name, "step": 2, "loss": 2.5, "replay_tau_pooled": 1.9, "replay_tau_macro": 2.0}),
                json!({"stage": "recover-3", "step": 1, "loss": 0.5}),
            ],
            ledger,
            scores: vec![score("untrained", 15.0, true), score(name, 26.0, true)],
            timeline: vec![round(1.0, "hit"), round(1.05, name)],
            provenance: vec![(name.to_owned(), name.to_owned())],
        }
    }

    /// Checks that every tag that is opened is closed in turn, and that attributes hold no stray `<`.
    fn check_well_formed(html: &str) {
        let mut open: Vec<&str> = Vec::new();
        let body = html.strip_prefix("<!DOCTYPE html>").unwrap();
        for piece in body.split('<').skip(1) {
            let (tag, _) = piece.split_once('>').unwrap_or_else(|| panic!("tag without end: {piece}"));
            assert_eq!(tag.matches('"').count() % 2, 0, "odd quotes in {tag}");
            let name = tag.split([' ', '/']).find(|part| !part.is_empty()).unwrap();
            if tag.starts_with('/') {
                assert_eq!(open.pop(), Some(name), "closed out of turn");
            } else if !tag.ends_with('/') && name != "meta" {
                open.push(name);
            }
        }
        assert_eq!(open, Vec::<&str>::new(), "never closed");
    }

    #[test]
    fn every_section_is_there_and_every_tag_is_closed() {
        let html = html(&full("quickstart"));
        check_well_formed(&html);
        assert!(!html.contains("class=\"missing\""), "a section found no data");
        let titles: Vec<&str> = html.split("<h2>").skip(1).map(|rest| rest.split('<').next().unwrap()).collect();
        let expected = [
            "Scores",
            "Acceptance by position",
            "Loss over steps",
            "Replay τ over steps",
            "τ loss by layer",
            "Misses by cause",
            "Timeline",
            "Resolved recipe",
            "Provenance",
        ];
        assert_eq!(titles, expected);
        assert_eq!(html.matches("<svg").count(), html.matches("role=\"img\" aria-label=").count());
        assert!(!html.contains("<script") && !html.contains("src=") && !html.contains("href="));
    }

    #[test]
    fn names_are_escaped_everywhere() {
        let html = html(&full("<script>alert(\"1\")</script>&'"));
        check_well_formed(&html);
        assert!(!html.contains("<script"));
        assert!(html.contains("&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;&#39;"));
    }

    #[test]
    fn an_empty_run_says_what_is_missing() {
        let html = html(&ReportInput::default());
        check_well_formed(&html);
        assert_eq!(html.matches("class=\"missing\"").count(), 9);
        assert_eq!(html.matches("<svg").count(), 0);
    }

    #[test]
    fn values_that_cannot_be_drawn_never_become_coordinates() {
        let mut input = full("run");
        input
            .metrics
            .push(json!({"stage": "run", "step": 3, "loss": 1e308, "loss_diffusion": -1e308, "replay_tau_pooled": null}));
        input.ledger.push(json!({"event": "tau_loss", "depth": 4, "layer": 1, "tau_loss": 1e300, "low": -1e300, "high": 1e300}));
        input.ledger.push(json!({"event": "tau_loss", "depth": 2, "layer": 0, "tau_loss": 0.0, "low": 0.0, "high": 0.0}));
        input.ledger.push(json!({"event": "tau_loss", "depth": 4, "layer": u64::MAX, "tau_loss": 0.1}));
        input.scores.push(json!({"checkpoint": 7, "decoders": {"asynchronous": {"benchmarks": {"stories": {
            "tokens_per_second": 0.0, "rounds": 0, "acceptance_by_position": [1e308, "x", null], "misses": {"a": 0, "b": -1, "c": "x"}}}}}}));
        let broken = [(f64::NAN, 1.0, 2.0), (1.0, f64::INFINITY, 2.0), (f64::NEG_INFINITY, 1.0, f64::NAN), (2.0, 1.0, 1.0)];
        for (draft_start, draft_end, verify_end) in broken {
            input.timeline.push(TimelineRound { draft_start, draft_end, pack_start: draft_end, verify_end, ..round(1.0, "hit") });
        }
        let html = html(&input);
        check_well_formed(&html);
        for svg in html.split("<svg").skip(1) {
            let svg = svg.split("</svg>").next().unwrap();
            for word in ["NaN", "inf", "e300", "e308"] {
                assert!(!svg.contains(word), "{word} in {svg}");
            }
        }
    }

    #[test]
    fn a_pack_is_marked_by_the_round_that_follows_it() {
        let rounds = [round(1.0, "first"), round(1.1, "hit"), round(1.2, "wrong_candidate")];
        let timeline = figures::timeline(&rounds).unwrap();
        assert!(timeline.contains("3 rounds, 9 tokens: 1 draft was ready, 1 was missed"));
        let texts = |sign: &str| timeline.matches(&format!(">{sign}</text>")).count();
        assert_eq!((texts("✓"), texts("×")), (2, 2), "one each in the wide and in the narrow drawing");
        assert!(
            timeline.contains("pack for round 2, used: 40.0 ms") && timeline.contains("pack for round 3, thrown away: 40.0 ms")
        );
        assert!(timeline.contains("draft of round 3, miss: wrong candidate: 20.0 ms") && !timeline.contains("draft of round 2"));
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
