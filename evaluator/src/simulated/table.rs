//! Simulated figures as tables of their own, so that they stand beside no measured one.

use serde_json::Value;

use crate::svg::escape;
use crate::table::{
    self, ABSENT, Grid, aligned, benchmark_names, checkpoint_name, column, decoder_names, keys, measured, number, or_absent,
    percent, printable, push_new, rate,
};

const LEGEND: &str = "\
simulated: what this run's rounds, with the hits and misses they had, would take with a profile's latencies; prefills left out, none of it
measured. speedup: over the target alone, simulated too. waits: share of the time in which the target stands still, behind hits for packs
to end, behind misses and at first for a draft. pack hidden: share of the packs' time in which the target verifies.
";

/// One hardware profile's figures.
struct Simulation {
    /// What they are, and from what: the word `simulated`, the profile's name and its source.
    title: String,
    grid: Grid,
}

/// The terminal's tables below the measured one; empty where nothing was simulated.
pub(crate) fn text(scores: &[Value]) -> String {
    let tables: String = simulations(scores).iter().map(|it| format!("\n{}\n{}", it.title, aligned(&it.grid))).collect();
    if tables.is_empty() { tables } else { format!("{tables}\n{LEGEND}") }
}

/// The same for the report.
pub(crate) fn html(scores: &[Value]) -> String {
    let simulations = simulations(scores);
    let tables: String =
        simulations.iter().map(|it| format!("<p>{}</p>\n{}", escape(&it.title), table::html(&it.grid, None))).collect();
    if tables.is_empty() { tables } else { format!("{tables}<p class=\"quiet\">{}</p>\n", escape(LEGEND.trim_end())) }
}

/// The figures of every profile in these scores.
fn simulations(scores: &[Value]) -> Vec<Simulation> {
    let mut profiles: Vec<(String, String)> = Vec::new();
    for_each(scores, |_, _, _, figures| {
        for name in keys(&figures["simulated"]) {
            let source = figures["simulated"][&name]["source"].as_str().unwrap_or("source unknown").to_string();
            if !profiles.iter().any(|(other, _)| *other == name) {
                profiles.push((name, source));
            }
        }
    });
    let title = |name: &str, source: &str| format!("simulated on {} ({})", printable(name), printable(source));
    profiles.iter().map(|(name, source)| Simulation { title: title(name, source), grid: grid(scores, name) }).collect()
}

/// Calls with every (score, decoder, benchmark) and its figures.
fn for_each<'s>(scores: &'s [Value], mut call: impl FnMut(&'s Value, &str, &str, &'s Value)) {
    for score in scores {
        for benchmark in benchmark_names(score) {
            for decoder in decoder_names(std::slice::from_ref(score)) {
                call(score, &decoder, &benchmark, measured(score, &decoder, &benchmark));
            }
        }
    }
}

fn grid(scores: &[Value], profile: &str) -> Grid {
    let mut simulated_decoders = Vec::new();
    for_each(scores, |_, decoder, _, figures| {
        if figures["simulated"][profile].is_object() {
            push_new(&mut simulated_decoders, decoder.to_string());
        }
    });
    let decoders: Vec<String> = decoder_names(scores).into_iter().filter(|name| simulated_decoders.contains(name)).collect();
    let mut columns = vec![column("", "checkpoint", false), column("", "benchmark", false)];
    for decoder in &decoders {
        let group = format!("{decoder}, simulated");
        columns.extend(figures_of(decoder).iter().map(|(title, _)| column(&group, title, true)));
    }
    let mut rows = Vec::new();
    for score in scores {
        for benchmark in benchmark_names(score) {
            let simulated = |decoder: &str| &measured(score, decoder, &benchmark)["simulated"][profile];
            if decoders.iter().all(|decoder| !simulated(decoder).is_object()) {
                continue;
            }
            let mut cells = vec![checkpoint_name(score), printable(&benchmark)];
            for decoder in &decoders {
                cells.extend(figures_of(decoder).iter().map(|(_, cell)| cell(simulated(decoder))));
            }
            rows.push(cells);
        }
    }
    Grid { columns, rows }
}

type Figure = (&'static str, fn(&Value) -> String);

/// The columns of a decoder: what can differ from one to the next.
fn figures_of(decoder: &str) -> &'static [Figure] {
    const ALL: &[Figure] = &[
        ("tokens/s", |it| or_absent(number(it, "tokens_per_second"), rate)),
        ("speedup", |it| or_absent(number(it, "speedup"), |speedup| format!("{speedup:.2}×"))),
        ("waits, misses", |it| share(it, "wait_on_misses_seconds")),
        ("waits, hits", |it| share(it, "wait_on_hits_seconds")),
        ("drafter idle", |it| share(it, "drafter_idle_seconds")),
        ("pack hidden", |it| or_absent(number(it, "pack_hidden"), percent)),
    ];
    match decoder {
        "autoregressive" => &ALL[..1],
        "lockstep" => &ALL[..2],
        _ => ALL,
    }
}

/// A part of the simulated time in per cent of it.
fn share(simulated: &Value, key: &str) -> String {
    match (number(simulated, key), number(simulated, "seconds")) {
        (Some(part), Some(whole)) if whole > 0.0 => percent(part / whole),
        _ => ABSENT.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn scores() -> Vec<Value> {
        let simulated = |tokens_per_second: f64, speedup: f64| {
            json!({"source": "estimated, not measured: two of them", "seconds": 2.0,
            "tokens_per_second": tokens_per_second, "speedup": speedup, "wait_on_hits_seconds": 0.5, "wait_on_misses_seconds": 0.2,
            "drafter_idle_seconds": 0.02, "pack_hidden": 0.75})
        };
        let figures = |simulated: Value| json!({"benchmarks": {"stories": {"tokens_per_second": 7.0, "simulated": simulated}}});
        vec![
            json!({"checkpoint": "trained", "decoders": {
                "asynchronous": figures(json!({"lab": simulated(300.0, 3.0), "a\nb": simulated(1.0, 1.0)})),
                "autoregressive": figures(json!({"lab": simulated(100.0, 1.0)})),
                "lockstep": figures(json!({"lab": simulated(150.0, 1.5)}))}}),
            json!({"checkpoint": "older", "decoders": {"lockstep": {"benchmarks": {"stories": {"tokens_per_second": 9.0}}}}}),
        ]
    }

    #[test]
    fn every_profile_has_a_table_whose_heads_say_simulated() {
        let text = text(&scores());
        let tables: Vec<&str> = text.trim_end_matches(LEGEND).split("\nsimulated on ").collect();
        assert_eq!((tables.len(), tables[0]), (3, ""));
        assert!(tables[1].starts_with("lab (estimated, not measured: two of them)\n"), "{text}");
        assert!(tables[2].starts_with("a\u{fffd}b (estimated"), "{text}");
        for (table, decoders) in [(1, 3), (2, 1)] {
            assert_eq!(tables[table].matches(", simulated").count(), decoders, "{text}");
        }
        let line = tables[1].lines().find(|line| line.starts_with("trained")).unwrap_or_default();
        let cells: Vec<&str> = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        let asynchronous = ["300.0", "3.00×", "10 %", "25 %", "1 %", "75 %"];
        assert_eq!(cells, [&["trained", "stories", "100.0", "150.0", "1.50×"][..], &asynchronous].concat());
        // Neither checkpoints without simulated figures nor measured ones.
        assert!(!text.contains("older") && !text.contains("7.0") && text.ends_with(LEGEND), "{text}");
    }

    #[test]
    fn without_simulated_figures_there_is_nothing() {
        assert_eq!(text(&scores()[1..]) + &html(&scores()[1..]), "");
        assert!(simulations(&[json!({"decoders": {"x": {"benchmarks": {"y": {"simulated": 3}}}}})]).is_empty());
    }
}
