//! A comparison as aligned text for the terminal, in sentences and grids that the HTML shows as well.

use super::{ALONE, Comparison, Difference, Estimate, PublishedRow, Row, Verdict};
use crate::table::{ABSENT, Column, Grid, aligned, or_absent, percent, printable, rate};

pub(super) const LEGEND: &str = "\
τ: tokens committed per forward of the target, over all rounds. speedup: tokens/s over the target's alone, in the same run.
In brackets: 95 % intervals by resampling prompts; differences are paired by prompt. better, worse: only where the interval
excludes no difference (Δτ of 0, speed of 1.00×). identical: the same tokens as the target alone, near-ties aside.
pack: what the drafter takes in a round to draft ahead, beside the target.
";

/// The comparison as text: for each benchmark the figures, the differences, and what keeps from a verdict.
pub fn table(comparison: &Comparison) -> String {
    let mut text = String::new();
    for benchmark in benchmarks(comparison) {
        text += &format!("{}\n\n{}", heading(comparison, benchmark), drawn(&figures_grid(comparison, benchmark)));
        let differences = differences_grid(comparison, benchmark);
        if !differences.rows.is_empty() {
            text += &format!("\nagainst {}, prompt by prompt\n\n{}", printable(&comparison.against), drawn(&differences));
        }
        for note in notes(comparison, benchmark) {
            text += &format!("{note}\n");
        }
        if let Some(sentence) = fastest(comparison, benchmark) {
            text += &format!("\n{sentence}\n");
        }
        text.push('\n');
    }
    if let Some(published) = &comparison.published {
        text += &format!("{}\n\n{}\n", printable(&published.caution), drawn(&published_grid(&published.rows)));
    }
    text + LEGEND
}

/// A grid without groups leaves the line for their names empty.
fn drawn(grid: &Grid) -> String {
    aligned(grid).trim_start_matches('\n').to_string()
}

/// The benchmarks compared, as they come.
pub(super) fn benchmarks(comparison: &Comparison) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for row in &comparison.rows {
        if !names.contains(&row.benchmark.as_str()) {
            names.push(&row.benchmark);
        }
    }
    names
}

/// The rows of one benchmark that are shown: the target alone has its place in the heading.
pub(super) fn shown<'c>(comparison: &'c Comparison, benchmark: &'c str) -> impl Iterator<Item = &'c Row> {
    comparison.rows.iter().filter(move |row| row.benchmark == benchmark && row.decoder != ALONE)
}

/// Name, prompts and the target's own speed.
pub(super) fn heading(comparison: &Comparison, benchmark: &str) -> String {
    let of_benchmark = || comparison.rows.iter().filter(|row| row.benchmark == benchmark);
    let (fewest, most) = (of_benchmark().map(|row| row.prompts).min(), of_benchmark().map(|row| row.prompts).max());
    let prompts = match (fewest, most) {
        (Some(1), Some(1)) => "1 prompt".to_string(),
        (Some(fewest), Some(most)) if fewest == most => format!("{most} prompts"),
        (Some(fewest), Some(most)) => format!("{fewest} to {most} prompts"),
        _ => "no prompts".to_string(),
    };
    let alone: Vec<&Row> = of_benchmark().filter(|row| row.decoder == ALONE).collect();
    let mut speeds: Vec<(&str, String)> =
        alone.iter().map(|row| (row.run.as_ref().unwrap_or(&row.label).as_str(), rate(row.tokens_per_second))).collect();
    speeds.dedup();
    let alone = match speeds.as_slice() {
        [] => String::new(),
        [(_, speed), rest @ ..] if rest.iter().all(|(_, other)| other == speed) => format!(", the target alone {speed} tokens/s"),
        _ => {
            let each: Vec<String> = speeds.iter().map(|(whose, speed)| format!("{} {speed}", printable(whose))).collect();
            format!(", the target alone in tokens/s: {}", each.join(", "))
        }
    };
    format!("{}: {prompts}{alone}", printable(benchmark))
}

pub(super) fn figures_grid(comparison: &Comparison, benchmark: &str) -> Grid {
    let columns = [
        ("checkpoint", false),
        ("decoder", false),
        ("layers", true),
        ("parameters", true),
        ("τ", true),
        ("tokens/s", true),
        ("speedup", true),
        ("hit rate", true),
        ("pack", true),
        ("identical", false),
    ];
    let cells = |row: &Row| {
        vec![
            printable(&row.label),
            printable(&row.decoder),
            row.layers.to_string(),
            row.parameters.map_or(ABSENT.to_string(), |count| format!("{:.1} M", count as f64 / 1e6)),
            with_interval(row.tau, "", row.tau_interval, plain),
            rate(row.tokens_per_second),
            row.speedup.map_or(ABSENT.to_string(), |speedup| with_interval(speedup, "×", row.speedup_interval, plain)),
            or_absent(row.hit_rate, percent),
            or_absent(row.pack_milliseconds, |milliseconds| format!("{milliseconds:.1} ms")),
            row.identical.unwrap_or(ABSENT).to_string(),
        ]
    };
    grid(&columns, shown(comparison, benchmark).map(cells).collect())
}

pub(super) fn differences_grid(comparison: &Comparison, benchmark: &str) -> Grid {
    let columns = [
        ("checkpoint", false),
        ("decoder", false),
        ("prompts", true),
        ("Δτ", true),
        ("in τ", false),
        ("speed", true),
        ("in speed", false),
    ];
    let cells = |(row, difference): (&Row, &Difference)| {
        let (tau, speed) = (difference.tau, difference.speed_ratio);
        vec![
            printable(&row.label),
            printable(&row.decoder),
            difference.prompts.to_string(),
            tau.map_or(ABSENT.to_string(), |it| with_interval(it.value, "", it.interval, signed)),
            verdict(tau).to_string(),
            speed.map_or(ABSENT.to_string(), |it| with_interval(it.value, "×", it.interval, plain)),
            verdict(speed).to_string(),
        ]
    };
    let compared = shown(comparison, benchmark).filter_map(|row| Some((row, row.difference.as_ref()?)));
    grid(&columns, compared.map(cells).collect())
}

pub(super) fn published_grid(rows: &[PublishedRow]) -> Grid {
    let columns = [
        ("method", false),
        ("target", false),
        ("GPUs", true),
        ("benchmark", false),
        ("τ", true),
        ("speedup", true),
        ("from", false),
    ];
    let cells = |row: &PublishedRow| {
        vec![
            row.method.clone(),
            row.target.clone(),
            row.gpus.map_or(ABSENT.to_string(), |count| count.to_string()),
            printable(&row.benchmark),
            plain(row.tau),
            times(row.speedup),
            row.paper.clone(),
        ]
    };
    grid(&columns, rows.iter().map(cells).collect())
}

fn grid(columns: &[(&'static str, bool)], rows: Vec<Vec<String>>) -> Grid {
    let column = |&(title, numeric): &(&'static str, bool)| Column { group: String::new(), title, numeric };
    Grid { columns: columns.iter().map(column).collect(), rows }
}

/// What is to be known about the differences of one benchmark; rows with the same note share it.
pub(super) fn notes(comparison: &Comparison, benchmark: &str) -> Vec<String> {
    let mut notes: Vec<(&str, Vec<&Row>)> = Vec::new();
    for row in shown(comparison, benchmark) {
        for note in row.difference.iter().flat_map(|difference| &difference.notes) {
            match notes.iter_mut().find(|(known, _)| *known == note.as_str()) {
                Some((_, rows)) => rows.push(row),
                None => notes.push((note, vec![row])),
            }
        }
    }
    let of_label = |rows: &[&Row], label: &str| rows.iter().filter(|row| row.label == label).count();
    let all: Vec<&Row> = shown(comparison, benchmark).collect();
    let sentence = |(note, rows): (&str, Vec<&Row>)| {
        let mut who: Vec<String> = rows
            .iter()
            .map(|row| match of_label(&rows, &row.label) == of_label(&all, &row.label) {
                true => row.label.clone(),
                false => format!("{} ({})", row.label, row.decoder),
            })
            .collect();
        who.dedup();
        printable(&format!("{}: {note}", who.join(", ")))
    };
    notes.into_iter().map(sentence).collect()
}

/// The sentence about the fastest checkpoint on a benchmark.
pub(super) fn fastest(comparison: &Comparison, benchmark: &str) -> Option<String> {
    let fastest = comparison.fastest.iter().find(|fastest| fastest.benchmark == benchmark)?;
    let speedup = fastest.speedup.map_or(String::new(), |speedup| format!(", {} the target alone", times(speedup)));
    let others = match fastest.not_shown_slower.as_slice() {
        [] => "; all others are shown to be slower".to_string(),
        others => format!("; not shown to be slower: {}", others.join(", ")),
    };
    let (name, speed) = (&fastest.label, rate(fastest.tokens_per_second));
    Some(printable(&format!("fastest with the same output on {benchmark}: {name}, {speed} tokens/s{speedup}{others}")))
}

fn with_interval(value: f64, unit: &str, interval: Option<(f64, f64)>, print: impl Fn(f64) -> String) -> String {
    match interval {
        Some((low, high)) => format!("{}{unit} ({} to {})", print(value), print(low), print(high)),
        None => format!("{}{unit}", print(value)),
    }
}

fn plain(value: f64) -> String {
    format!("{value:.2}")
}

pub(super) fn times(ratio: f64) -> String {
    format!("{ratio:.2}×")
}

/// With a sign, unless it rounds to nothing.
fn signed(value: f64) -> String {
    let text = format!("{value:+.2}");
    if matches!(text.as_str(), "+0.00" | "-0.00") { "0.00".to_string() } else { text.replace('-', "−") }
}

fn verdict(estimate: Option<Estimate>) -> &'static str {
    match estimate {
        None => "not compared",
        Some(estimate) => estimate.verdict.map_or("no verdict", Verdict::name),
    }
}
