//! A comparison as one HTML document that can be read offline, in the style of the report.

use super::text::{LEGEND, benchmarks, differences_grid, fastest, figures_grid, heading, notes, published_grid, shown, times};
use super::{Comparison, PublishedRow, RANKED, Row};
use crate::dots::{DepthChart, DepthSeries, Dot, DotChart, depth_chart, dot_chart};
use crate::figures::figure;
use crate::report::page;
use crate::svg::{STYLES, escape};
use crate::table::{self, rate};

/// The style of published figures: grey and hollow.
const PUBLISHED: usize = STYLES - 1;

/// The comparison as one self-contained HTML document.
pub fn html(comparison: &Comparison) -> String {
    let names = benchmarks(comparison);
    let mut body = header(comparison, &names);
    for benchmark in &names {
        body += &format!("<section>\n<h2>{}</h2>\n", escape(&heading(comparison, benchmark)));
        body += &dots(comparison, benchmark, &SPEEDUP);
        body += &dots(comparison, benchmark, &TAU);
        body += &table::html(&figures_grid(comparison, benchmark), None);
        let differences = differences_grid(comparison, benchmark);
        if !differences.rows.is_empty() {
            let title = escape(&format!("Against {}, prompt by prompt", comparison.against));
            body += &format!("<h3>{title}</h3>\n{}", table::html(&differences, None));
        }
        let notes = notes(comparison, benchmark);
        body += &notes.iter().map(|note| format!("<p class=\"quiet\">{}</p>\n", escape(note))).collect::<String>();
        body += &over_depth(comparison, benchmark);
        body += "</section>\n";
    }
    if let Some(published) = &comparison.published {
        let caution = escape(&published.caution);
        let grid = table::html(&published_grid(&published.rows), None);
        body += &format!("<section>\n<h2>Published figures</h2>\n<p class=\"quiet\">{caution}</p>\n{grid}</section>\n");
    }
    body += &format!("<section>\n<h2>How to read this</h2>\n<p class=\"quiet\">{}</p>\n</section>\n", escape(LEGEND.trim_end()));
    page("Drafthorse comparison", &format!("{body}</main>\n"))
}

fn header(comparison: &Comparison, names: &[&str]) -> String {
    let mut labels: Vec<&str> = comparison.rows.iter().map(|row| row.label.as_str()).collect();
    labels.dedup();
    let checkpoints = if labels.len() == 1 { "1 checkpoint".to_string() } else { format!("{} checkpoints", labels.len()) };
    let sentences: Vec<String> = names.iter().filter_map(|name| fastest(comparison, name)).collect();
    let sentences: String = sentences.iter().map(|sentence| format!("<p>{}</p>\n", escape(&capitalised(sentence)))).collect();
    format!(
        "<header><p class=\"run\">Drafthorse comparison</p>\n<h1>{checkpoints} on {}, against {}</h1>\n{sentences}</header>\n<main>\n",
        escape(&names.join(", ")),
        escape(&comparison.against),
    )
}

fn capitalised(sentence: &str) -> String {
    let mut characters = sentence.chars();
    characters.next().map_or(String::new(), |first| first.to_uppercase().chain(characters).collect())
}

/// What a figure is about.
struct Quantity {
    title: &'static str,
    axis: &'static str,
    /// Where nothing is gained.
    nothing: f64,
    nothing_is: &'static str,
    value: fn(&Row) -> Option<f64>,
    interval: fn(&Row) -> Option<(f64, f64)>,
    published: fn(&PublishedRow) -> f64,
    print: fn(f64) -> String,
}

const SPEEDUP: Quantity = Quantity {
    title: "Speedup",
    axis: "speedup, times the target alone",
    nothing: 1.0,
    nothing_is: "the target alone",
    value: |row| row.speedup,
    interval: |row| row.speedup_interval,
    published: |row| row.speedup,
    print: times,
};

const TAU: Quantity = Quantity {
    title: "τ",
    axis: "τ, tokens a round",
    nothing: 1.0,
    nothing_is: "no draft kept",
    value: |row| Some(row.tau),
    interval: |row| row.tau_interval,
    published: |row| row.tau,
    print: |tau| format!("{tau:.2}"),
};

/// One quantity of all rows of a benchmark, with the published figures of the same benchmark.
fn dots(comparison: &Comparison, benchmark: &str, quantity: &Quantity) -> String {
    let mut groups: Vec<(String, Vec<Dot>)> = Vec::new();
    let mut legend: Vec<(usize, String)> = Vec::new();
    for row in shown(comparison, benchmark) {
        let Some(value) = (quantity.value)(row) else { continue };
        let style = match legend.iter().find(|(_, name)| *name == row.decoder) {
            Some((style, _)) => *style,
            None => {
                legend.push((legend.len() % PUBLISHED, row.decoder.clone()));
                legend[legend.len() - 1].0
            }
        };
        let dot = dot(row, style, value, quantity);
        match groups.iter_mut().find(|(label, _)| *label == row.label) {
            Some((_, dots)) => dots.push(dot),
            None => groups.push((row.label.clone(), vec![dot])),
        }
    }
    if groups.is_empty() {
        return String::new();
    }
    let published = comparison.published.iter().flat_map(|published| &published.rows);
    for row in published.filter(|row| row.beside.as_deref() == Some(benchmark)) {
        let (value, name) = ((quantity.published)(row), format!("published: {}, target {}", row.method, row.target));
        let text = (quantity.print)(value);
        let dot = Dot { style: PUBLISHED, value, interval: None, apart: true, hover: format!("{name}: {text}"), text };
        groups.push((name, vec![dot]));
        if !legend.iter().any(|(style, _)| *style == PUBLISHED) {
            legend.push((PUBLISHED, "published, other hardware".to_string()));
        }
    }
    let title = format!("{} of each checkpoint on {benchmark}", quantity.title);
    let note = format!("Whiskers: 95 % intervals. The line at {}: {}.", (quantity.print)(quantity.nothing), quantity.nothing_is);
    let label = title.clone();
    let chart = DotChart { label, x_label: quantity.axis.to_string(), legend, groups, line_at: quantity.nothing };
    figure(&title, &note, |width| dot_chart(&chart, width))
}

fn dot(row: &Row, style: usize, value: f64, quantity: &Quantity) -> Dot {
    let (interval, print) = ((quantity.interval)(row), quantity.print);
    let text = print(value);
    let spread = interval.map_or(String::new(), |(low, high)| format!(", {} to {}", print(low), print(high)));
    Dot { style, value, interval, apart: false, hover: format!("{}, {}: {text}{spread}", row.label, row.decoder), text }
}

/// τ and speed over the layers left, for every run that has checkpoints of several depths.
fn over_depth(comparison: &Comparison, benchmark: &str) -> String {
    let ranked = || shown(comparison, benchmark).filter(|row| row.decoder == RANKED);
    let mut runs: Vec<&String> = Vec::new();
    for run in ranked().filter_map(|row| row.run.as_ref()) {
        if !runs.contains(&run) {
            runs.push(run);
        }
    }
    let speed = Quantity {
        title: "Tokens per second",
        axis: "tokens/s",
        value: |row| Some(row.tokens_per_second),
        interval: |_| None,
        print: rate,
        ..SPEEDUP
    };
    let speed = if ranked().all(|row| row.speedup.is_some()) { SPEEDUP } else { speed };
    let mut drawn = String::new();
    for quantity in [TAU, speed] {
        let mut series = Vec::new();
        for (style, &run) in runs.iter().enumerate() {
            // Of several checkpoints of one depth, the last is the one that the pruned ones come from.
            let mut points = std::collections::BTreeMap::new();
            for row in ranked().filter(|row| row.run.as_ref() == Some(run)) {
                if let Some(value) = (quantity.value)(row) {
                    points.insert(row.layers, dot(row, style, value, &quantity));
                }
            }
            if points.len() > 1 {
                series.push(DepthSeries { name: run.clone(), style, points: points.into_iter().collect() });
            }
        }
        if !series.is_empty() {
            let title = format!("{} over the layers of the drafter on {benchmark}", quantity.title);
            let note = "Asynchronous decoder; whiskers: 95 % intervals. Of checkpoints of the same depth, the last.";
            let chart = DepthChart { label: title.clone(), y_label: quantity.axis.to_string(), series };
            drawn += &figure(&title, note, |width| depth_chart(&chart, width));
        }
    }
    drawn
}
