//! The report of a run: one HTML file that can be read offline, with inline style and SVG and no scripts.
//!
//! It opens with the sentence a reader came for (which checkpoint to serve), then shows what that rests on.

use serde_json::Value;

use crate::figures;
use crate::headline::{headline, tiles};
use crate::simulated;
use crate::svg::escape;
use crate::table::{self, checkpoint_name};

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
    let by_benchmark = figures::by_benchmark(&input.scores);
    body += &section("τ and speed by benchmark", &by_benchmark, "The scores hold no τ of the asynchronous decoder.");
    let acceptance = figures::acceptance(&input.scores).unwrap_or_default();
    body += &section("Acceptance by position", &acceptance, "The scores hold no acceptance by position.");
    // Of the checkpoint to serve, or of the last that was scored.
    let shown = chosen.and_then(|index| input.scores.get(index)).or(input.scores.last());
    let hit_rates = shown.and_then(figures::hit_rates).unwrap_or_default();
    body += &section("Hit rate over blocks", &hit_rates, "The scores hold no hit rates on held-out responses.");
    body += &section("Loss over steps", &figures::losses(&input.metrics), "The run's metrics hold no loss.");
    body += &section("Replay τ over steps", &figures::replay_tau(&input.metrics), "The run's metrics hold no replay τ.");
    body += &section("What each layer is worth", &pruning(&input.ledger), "The pruner's ledger holds no measured layer.");
    let misses = figures::misses(&input.scores).unwrap_or_default();
    body += &section("Misses by cause", &misses, "The scores hold no misses of the asynchronous decoder.");
    let timeline = figures::timeline(&input.timeline).unwrap_or_default();
    body += &section("Timeline", &timeline, "No rounds of the asynchronous decoder were kept.");
    let simulated = simulated::html(&input.scores);
    if !simulated.is_empty() {
        body += &section("Simulated on other hardware", &simulated, "");
    }
    body += &section("Resolved recipe", &recipe(&input.recipe_toml), "The resolved recipe was not kept.");
    body += &section("Provenance", &provenance(&input.provenance), "Nothing is known about where this run came from.");
    page(&format!("{name} · Drafthorse report"), &format!("{body}</main>\n"))
}

/// A document of its own around `body`, with the report's style; the title is HTML already.
pub(crate) fn page(title: &str, body: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{}</style>\n</head>\n<body>\n{body}</body>\n</html>\n",
        include_str!("report.css"),
    )
}

fn section(title: &str, body: &str, missing: &str) -> String {
    let missing = format!("<p class=\"missing\">{}</p>\n", escape(missing));
    format!("<section>\n<h2>{}</h2>\n{}</section>\n", escape(title), if body.is_empty() { &missing } else { body })
}

fn score_table(scores: &[Value], chosen: Option<usize>) -> String {
    let grid = table::grid(scores);
    if grid.rows.is_empty() {
        return String::new();
    }
    let checkpoints: Vec<String> = scores.iter().map(checkpoint_name).collect();
    let table = table::html(&grid, chosen.map(|index| &checkpoints[index]));
    format!("{table}<p class=\"quiet\">{}</p>\n", escape(table::legend(scores).trim_end()))
}

fn pruning(ledger: &[Value]) -> String {
    let mut figures = figures::layers(ledger).into_iter().filter(|figure| !figure.is_empty());
    let mut body = figures.next().unwrap_or_default();
    let others: Vec<String> = figures.collect();
    if !others.is_empty() {
        let count = others.len();
        body += &format!("<details><summary>The searches after it ({count})</summary>\n{}</details>\n", others.concat());
    }
    let removals = figures::removals(ledger);
    if !removals.is_empty() {
        let by_speed = ledger.iter().any(|line| line["event"] == "predicted");
        let columns = figures::REMOVALS.len() - usize::from(!by_speed);
        let heads: String =
            figures::REMOVALS[..columns].iter().map(|title| format!("<th class=\"number\">{title}</th>")).collect();
        let row = |cells: &[String; figures::REMOVALS.len()]| {
            let cell = |cell: &String| format!("<td class=\"number\">{}</td>", escape(cell));
            format!("<tr>{}</tr>\n", cells[..columns].iter().map(cell).collect::<String>())
        };
        let rows: String = removals.iter().map(row).collect();
        body += &format!(
            "<div class=\"scroll\"><table>\n<thead>\n<tr>{heads}</tr>\n</thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n\
             <p class=\"quiet\">The layer removed is numbered as in the drafter before any removal.</p>\n"
        );
    }
    for words in [figures::ending(ledger), figures::swap(ledger)].into_iter().flatten() {
        body += &format!("<p>{}</p>\n", escape(&words));
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

/// Checks that every tag that is opened is closed in turn, and that attributes hold no stray `<`.
#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) fn check_well_formed(html: &str) {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::headline::tests::score;
    use serde_json::json;

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

    #[test]
    fn every_section_is_there_and_every_tag_is_closed() {
        let html = html(&full("quickstart"));
        check_well_formed(&html);
        assert!(!html.contains("class=\"missing\""), "a section found no data");
        let titles: Vec<&str> = html.split("<h2>").skip(1).map(|rest| rest.split('<').next().unwrap()).collect();
        let expected = [
            "Scores",
            "τ and speed by benchmark",
            "Acceptance by position",
            "Hit rate over blocks",
            "Loss over steps",
            "Replay τ over steps",
            "What each layer is worth",
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
    fn pruning_by_another_criterion_by_speed_and_with_a_swap_is_shown() {
        let mut input = full("run");
        let before = html(&input);
        assert!(!before.contains("tokens/s predicted") && !before.contains("Pruning ended"));
        assert!(before.contains("Loss of the recovery after each removal: "), "{before}");
        input.metrics.push(json!({"stage": "recover-2-swapped", "step": 1, "loss": 0.4}));
        let weighed =
            |scores: [f64; 3], rows: usize| json!({"event": "weighed", "depth": 3, "part": {"scores": scores, "rows": rows}});
        input.ledger = vec![
            json!({"event": "begun", "criterion": "block_influence"}),
            weighed([0.3, 0.1, 0.2], 30),
            weighed([0.3, 0.3, 0.2], 10),
            json!({"event": "predicted", "depth": 3, "tau": 2.0, "hit_rate": 0.5, "tokens_per_second": 100.44}),
            json!({"event": "removed", "depth": 2, "layer": 1, "original_layer": 1, "tau_before": 2.0, "tau_after": 1.9}),
            json!({"event": "predicted", "depth": 2, "tau": 1.95, "hit_rate": 0.5, "tokens_per_second": 123.46}),
            json!({"event": "recovered", "depth": 2, "steps": 12, "tau": 1.95, "kept": true}),
            json!({"event": "removed", "depth": 1, "layer": 1, "original_layer": 2, "tau_before": 1.95, "tau_after": 1.1}),
            json!({"event": "predicted", "depth": 1, "tau": 1.2, "hit_rate": 0.4, "tokens_per_second": 90.0}),
            json!({"event": "recovered", "depth": 1, "steps": 12, "tau": 1.2, "kept": false, "end": "speed"}),
            json!({"event": "swapped", "put_back": 1, "take_out": 0, "depth": 2, "tau_before": 1.95, "tau": 1.96, "kept": true}),
        ];
        let html = html(&input);
        check_well_formed(&html);
        assert!(html.contains("Of 3 layers, layer 1 was removed: 1 less the cosine of input and output, 0.15"), "{html}");
        assert!(
            html.contains("<th class=\"number\">tokens/s predicted</th>") && html.contains("<td class=\"number\">123.5</td>")
        );
        let row = |cells: [&str; 8]| {
            let cells: String = cells.iter().map(|cell| format!("<td class=\"number\">{cell}</td>")).collect();
            format!("<tr>{cells}</tr>\n")
        };
        let rows = [
            ["3", "none", "–", "–", "–", "–", "–", "100.4"],
            ["2", "1", "2.000", "1.900", "12", "1.950", "yes", "123.5"],
            ["1", "2", "1.950", "1.100", "12", "1.200", "no", "90.0"],
        ];
        assert!(html.contains(&rows.map(row).concat()), "{html}");
        assert!(html.contains("Pruning ended at 1 layer: the predicted speed no longer rose."), "{html}");
        assert!(html.contains("Loss of the recovery after each removal and the swap: "), "{html}");
        let swap = "put layer 1 back and took layer 0 out: τ 1.960 after recovery, 1.950 without it; it was kept";
        assert!(html.contains(swap), "{html}");
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
        assert_eq!(html.matches("class=\"missing\"").count(), 11);
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
        input.scores[1]["hit_rate_by_blocks"] = json!({"best_first": [{"blocks": 1e308, "hit_rate": 0.5, "rounds": 1e308},
            {"blocks": 3, "hit_rate": 1e308}, {"blocks": 4, "hit_rate": 0.5, "rounds": "x"}], "rectangle": 7});
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
    fn hit_rates_are_those_of_the_checkpoint_to_serve() {
        let mut input = full("run");
        input.scores[0]["hit_rate_by_blocks"] = json!(null);
        let html = html(&input);
        assert!(html.contains("run: best first has a continuation ready for 70 % of outcomes with 15 blocks"), "no such title");
        assert!(html.contains("best first 40 % → 70 %; rectangle 30 % → 50 %. 300 rounds on held-out responses"));
        assert!(figures::hit_rates(&input.scores[0]).is_none());
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
    fn simulated_figures_have_a_section_of_their_own_and_change_nothing_else() {
        let mut input = full("run");
        let before = html(&input);
        let simulated = json!({"lab": {"source": "a <guess>", "seconds": 1.0, "tokens_per_second": 9876.0, "speedup": 54.32}});
        input.scores[0]["decoders"]["asynchronous"]["benchmarks"]["stories"]["simulated"] = simulated;
        let after = html(&input);
        check_well_formed(&after);
        let (start, rest) = after.split_once("<section>\n<h2>Simulated on other hardware</h2>").unwrap();
        let (section, end) = rest.split_once("</section>\n").unwrap();
        assert_eq!(format!("{start}{end}"), before);
        assert!(section.contains("simulated on lab (a &lt;guess&gt;)") && section.contains("9876") && section.contains("54.32×"));
    }
}
