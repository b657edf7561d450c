//! The score table: one row for each checkpoint and benchmark, as cells for the report and as aligned text for the
//! terminal.

use serde_json::Value;

use crate::simulated;
use crate::svg::escape;

/// What stands in a cell whose figure was not measured.
pub(crate) const ABSENT: &str = "–";

const LEGEND: &str = "\
τ: tokens committed per forward of the target, over all rounds. speedup: tokens/s over the autoregressive decoder's.
hit rate: rounds whose outcome had a continuation ready. identical: the same tokens as autoregressive decoding;
near-ties: they part only where the target's best tokens are tied but for rounding.
";

const SAMPLED_LEGEND: &str = "\
in distribution: drafts were drawn and verified by the rejection rule, which keeps the distribution of the text, not its tokens.
";

/// What the words of the score table mean.
pub(crate) fn legend(scores: &[Value]) -> String {
    let sampled = scores.iter().any(drafts_are_sampled);
    format!("{LEGEND}{}", if sampled { SAMPLED_LEGEND } else { "" })
}

/// A table before it is drawn. A column belongs to the group (a decoder, or `""`) named in its head.
pub(crate) struct Grid {
    pub(crate) columns: Vec<Column>,
    pub(crate) rows: Vec<Vec<String>>,
}

/// One column: the decoder it belongs to (`""` for none), its title, and whether it holds numbers.
pub(crate) struct Column {
    pub(crate) group: String,
    pub(crate) title: &'static str,
    pub(crate) numeric: bool,
}

/// The terminal table of `scores` (score files, in the order they shall be shown) with a legend of two lines.
pub fn table(scores: &[Value]) -> String {
    let grid = grid(scores);
    if grid.rows.is_empty() {
        return "no checkpoint has been scored yet\n".to_owned();
    }
    format!("{}\n{}{}", aligned(&grid), legend(scores), simulated::text(scores))
}

/// The cells of the score table.
pub(crate) fn grid(scores: &[Value]) -> Grid {
    let decoders = decoder_names(scores);
    let mut columns =
        vec![column("", "checkpoint", false), column("", "benchmark", false), column("", "layers", true), column("", "τ", true)];
    for decoder in &decoders {
        columns.push(column(decoder, "tokens/s", true));
        // The autoregressive decoder is what a speedup is measured against: its own is 1 by definition.
        if decoder != "autoregressive" {
            columns.push(column(decoder, "speedup", true));
        }
    }
    columns.push(column("", "hit rate", true));
    columns.push(column("", "identical", false));

    let mut rows = Vec::new();
    for score in scores {
        let mut benchmarks = benchmark_names(score);
        if benchmarks.is_empty() {
            benchmarks.push(String::new());
        }
        for benchmark in &benchmarks {
            rows.push(row(score, benchmark, &decoders));
        }
    }
    Grid { columns, rows }
}

fn row(score: &Value, benchmark: &str, decoders: &[String]) -> Vec<String> {
    let asynchronous = measured(score, "asynchronous", benchmark);
    let tau = number(asynchronous, "tau_pooled").or_else(|| number(measured(score, "lockstep", benchmark), "tau_pooled"));
    let mut cells = vec![
        checkpoint_name(score),
        if benchmark.is_empty() { ABSENT.to_owned() } else { printable(benchmark) },
        or_absent(number(score, "layers"), |layers| format!("{layers}")),
        or_absent(tau, |tau| format!("{tau:.2}")),
    ];
    for decoder in decoders {
        let figures = measured(score, decoder, benchmark);
        cells.push(or_absent(number(figures, "tokens_per_second"), rate));
        if decoder != "autoregressive" {
            cells.push(or_absent(number(figures, "speedup"), |speedup| format!("{speedup:.2}×")));
        }
    }
    cells.push(or_absent(number(asynchronous, "hit_rate"), percent));
    let verdicts = decoders.iter().filter_map(|decoder| verdict(score, decoder, benchmark));
    cells.push(verdicts.max().map_or(ABSENT, Verdict::name).to_owned());
    cells
}

/// How a decoder's texts compare with the autoregressive decoder's, the worst last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    Identical,
    /// Not to be compared token by token: drafts were sampled, by a rule that leaves the target's distribution as it is.
    InDistribution,
    /// They part only where the target's best tokens are tied but for rounding.
    NearTies,
    Different,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Verdict::Identical => "yes",
            Verdict::InDistribution => "in distribution",
            Verdict::NearTies => "near-ties",
            Verdict::Different => "no",
        }
    }
}

/// `None` where nothing was compared.
pub(crate) fn verdict(score: &Value, decoder: &str, benchmark: &str) -> Option<Verdict> {
    let figures = measured(score, decoder, benchmark);
    if drafts_are_sampled(score) && decoder != "autoregressive" && !figures.is_null() {
        return Some(Verdict::InDistribution);
    }
    let divergences = figures["first_divergences"].as_array().map_or(0, Vec::len) as u64;
    Some(match figures["identical_to_autoregressive"].as_bool()? {
        true => Verdict::Identical,
        false if divergences > 0 && figures["near_ties"].as_u64() == Some(divergences) => Verdict::NearTies,
        false => Verdict::Different,
    })
}

/// Whether a score is of sampled drafts.
pub(crate) fn drafts_are_sampled(score: &Value) -> bool {
    score["drafts"] == "sampled"
}

/// The grid as text, its columns aligned, below a line with the names of the groups.
pub(crate) fn aligned(grid: &Grid) -> String {
    let mut widths: Vec<usize> = grid.columns.iter().map(|column| column.title.chars().count()).collect();
    for row in &grid.rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    // A decoder's name stands over all of its columns; where it is longer than they are, its last column grows.
    let groups = groups(grid);
    for (name, range) in &groups {
        let span = widths[range.clone()].iter().sum::<usize>() + 2 * (range.len() - 1);
        widths[range.end - 1] += name.chars().count().saturating_sub(span);
    }

    let mut heads = String::new();
    for (name, range) in &groups {
        let span = widths[range.clone()].iter().sum::<usize>() + 2 * (range.len() - 1);
        heads += &format!("{name:>span$}  ");
    }
    let titles: Vec<&str> = grid.columns.iter().map(|column| column.title).collect();
    let mut lines = vec![heads, line(&titles, grid, &widths)];
    lines.push("─".repeat(widths.iter().sum::<usize>() + 2 * (widths.len() - 1)));
    for row in &grid.rows {
        let cells: Vec<&str> = row.iter().map(String::as_str).collect();
        lines.push(line(&cells, grid, &widths));
    }
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

fn line(cells: &[&str], grid: &Grid, widths: &[usize]) -> String {
    let padded = cells
        .iter()
        .zip(&grid.columns)
        .zip(widths)
        .map(|((cell, column), &width)| if column.numeric { format!("{cell:>width$}") } else { format!("{cell:<width$}") });
    padded.collect::<Vec<_>>().join("  ")
}

/// The table in HTML, decoders over the titles where there are any; rows that begin with `chosen` are marked.
pub(crate) fn html(grid: &Grid, chosen: Option<&String>) -> String {
    let groups = groups(grid);
    let heads: String = groups
        .iter()
        .map(|(name, columns)| match name.is_empty() {
            true => "<th></th>".to_owned(),
            false => format!("<th class=\"group\" colspan=\"{}\">{}</th>", columns.len(), escape(name)),
        })
        .collect();
    let heads = if groups.iter().all(|(name, _)| name.is_empty()) { String::new() } else { format!("<tr>{heads}</tr>\n") };
    let class = |numeric: bool| if numeric { " class=\"number\"" } else { "" };
    let titles: String =
        grid.columns.iter().map(|column| format!("<th{}>{}</th>", class(column.numeric), escape(column.title))).collect();
    let mut rows = String::new();
    for row in &grid.rows {
        let cells: String = row
            .iter()
            .zip(&grid.columns)
            .map(|(cell, column)| match (column.title, cell.as_str()) {
                ("identical", "yes" | "no") => format!("<td class=\"{cell}\">{cell}</td>"),
                (_, "better") => "<td class=\"yes\">better</td>".to_owned(),
                (_, "worse") => "<td class=\"no\">worse</td>".to_owned(),
                _ => format!("<td{}>{}</td>", class(column.numeric), escape(cell)),
            })
            .collect();
        let mark = if row.first() == chosen { " class=\"chosen\"" } else { "" };
        rows += &format!("<tr{mark}>{cells}</tr>\n");
    }
    format!(
        "<div class=\"scroll\"><table>\n<thead>\n{heads}<tr>{titles}</tr>\n</thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n"
    )
}

/// Neighbouring columns of one decoder as `(name, range of columns)`; columns of none stand alone with `""`.
pub(crate) fn groups(grid: &Grid) -> Vec<(String, std::ops::Range<usize>)> {
    let mut groups: Vec<(String, std::ops::Range<usize>)> = Vec::new();
    for (index, column) in grid.columns.iter().enumerate() {
        match groups.last_mut() {
            Some((name, range)) if !name.is_empty() && *name == column.group => range.end = index + 1,
            _ => groups.push((column.group.clone(), index..index + 1)),
        }
    }
    groups
}

pub(crate) fn column(group: &str, title: &'static str, numeric: bool) -> Column {
    Column { group: printable(group), title, numeric }
}

/// The decoders of all scores: the three usual ones in their order, then others as they come.
pub(crate) fn decoder_names(scores: &[Value]) -> Vec<String> {
    let mut found = Vec::new();
    for score in scores {
        for name in keys(&score["decoders"]) {
            push_new(&mut found, name);
        }
    }
    let usual = ["autoregressive", "lockstep", "asynchronous"];
    found.sort_by_key(|name| usual.iter().position(|known| known == name).unwrap_or(usual.len()));
    found
}

/// The benchmarks of one score, over all its decoders, as they come.
pub(crate) fn benchmark_names(score: &Value) -> Vec<String> {
    let mut found = Vec::new();
    for decoder in keys(&score["decoders"]) {
        for name in keys(&score["decoders"][&decoder]["benchmarks"]) {
            push_new(&mut found, name);
        }
    }
    found
}

pub(crate) fn keys(value: &Value) -> Vec<String> {
    value.as_object().map(|object| object.keys().cloned().collect()).unwrap_or_default()
}

pub(crate) fn push_new(names: &mut Vec<String>, name: String) {
    if !names.contains(&name) {
        names.push(name);
    }
}

/// The figures of one decoder on one benchmark; JSON null where there are none.
pub(crate) fn measured<'a>(score: &'a Value, decoder: &str, benchmark: &str) -> &'a Value {
    &score["decoders"][decoder]["benchmarks"][benchmark]
}

/// The name a checkpoint goes by in tables and legends.
pub(crate) fn checkpoint_name(score: &Value) -> String {
    printable(score["checkpoint"].as_str().unwrap_or("unnamed"))
}

/// The number under `key`, when it is there and of a size that can be drawn.
pub(crate) fn number(value: &Value, key: &str) -> Option<f64> {
    value[key].as_f64().filter(|number| number.is_finite() && number.abs() <= 1e12)
}

/// Tokens per second, with as many digits as are worth reading.
pub(crate) fn rate(tokens_per_second: f64) -> String {
    if tokens_per_second >= 1000.0 { format!("{tokens_per_second:.0}") } else { format!("{tokens_per_second:.1}") }
}

/// A share of 1 as whole per cent.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

pub(crate) fn or_absent(value: Option<f64>, print: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| ABSENT.to_owned(), print)
}

/// `text` on one line: a name with a line break or an escape sequence must not disturb the terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|character| if character.is_control() { '\u{fffd}' } else { character }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn score(checkpoint: &str, layers: usize, rate: f64, identical: bool) -> Value {
        json!({"checkpoint": checkpoint, "layers": layers, "decoders": {
            "asynchronous": {"benchmarks": {"stories": {"tau_pooled": 2.414, "tokens_per_second": rate,
                "speedup": rate / 20.0, "hit_rate": 0.731, "identical_to_autoregressive": identical}}},
            "autoregressive": {"benchmarks": {"stories": {"tokens_per_second": 20.0}}},
        }})
    }

    #[test]
    fn table_is_aligned_and_explained() {
        let scores = [score("trained", 30, 26.0, true), score("layers-29", 29, 1234.5, false), json!({})];
        let expected = "
                                     autoregressive       asynchronous
checkpoint  benchmark  layers     τ        tokens/s  tokens/s  speedup  hit rate  identical
───────────────────────────────────────────────────────────────────────────────────────────
trained     stories        30  2.41            20.0      26.0    1.30×      73 %  yes
layers-29   stories        29  2.41            20.0      1234   61.73×      73 %  no
unnamed     –               –     –               –         –        –         –  –

τ: tokens committed per forward of the target, over all rounds. speedup: tokens/s over the autoregressive decoder's.
hit rate: rounds whose outcome had a continuation ready. identical: the same tokens as autoregressive decoding;
near-ties: they part only where the target's best tokens are tied but for rounding.
";
        assert_eq!(format!("\n{}", table(&scores)), expected);
    }

    #[test]
    fn one_decoder_that_differs_makes_the_row_differ() {
        let mut score = score("trained", 30, 26.0, true);
        score["decoders"]["lockstep"] = json!({"benchmarks": {"stories": {"identical_to_autoregressive": false}}});
        assert_eq!(grid(&[score]).rows[0].last().map(String::as_str), Some("no"));
    }

    #[test]
    fn near_ties_are_told_from_faults() {
        let told = |divergences: usize, near_ties: usize| {
            let mut score = score("step-1", 30, 25.0, false);
            let figures = &mut score["decoders"]["asynchronous"]["benchmarks"]["stories"];
            figures["first_divergences"] = json!(vec![json!({}); divergences]);
            figures["near_ties"] = json!(near_ties);
            grid(&[score]).rows[0].concat()
        };
        assert!(told(2, 2).ends_with("near-ties"));
        assert!(told(2, 1).ends_with("no") && told(0, 0).ends_with("no"));
    }

    #[test]
    fn sampled_drafts_are_said_to_agree_in_distribution() {
        let mut sampled = score("step-1", 30, 25.0, true);
        assert!(!table(&[sampled.clone()]).contains("in distribution"));
        sampled["drafts"] = json!("sampled");
        let figures = sampled["decoders"]["asynchronous"]["benchmarks"]["stories"].as_object_mut();
        figures.and_then(|figures| figures.remove("identical_to_autoregressive"));
        assert_eq!(grid(&[sampled.clone()]).rows[0].last().map(String::as_str), Some("in distribution"));
        assert!(table(&[sampled]).ends_with(SAMPLED_LEGEND));
        let alone = json!({"checkpoint": "a", "drafts": "sampled",
            "decoders": {"autoregressive": {"benchmarks": {"stories": {"tokens_per_second": 20.0}}}}});
        assert_eq!(grid(&[alone]).rows[0].last().map(String::as_str), Some(ABSENT));
    }

    #[test]
    fn a_name_cannot_break_the_line() {
        assert_eq!(grid(&[score("a\n\u{1b}[31mb", 1, 1.0, true)]).rows[0][0], "a\u{fffd}\u{fffd}[31mb");
    }

    #[test]
    fn without_scores_it_says_so() {
        assert_eq!(table(&[]), "no checkpoint has been scored yet\n");
    }
}
