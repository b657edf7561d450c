//! The score table: one row for each checkpoint and benchmark, as cells for the report and as aligned text for the
//! terminal.

use serde_json::Value;

/// What stands in a cell whose figure was not measured.
pub(crate) const ABSENT: &str = "–";

pub(crate) const LEGEND: &str = "\
τ: tokens committed per forward of the target, over all rounds. speedup: tokens/s over the autoregressive decoder's.
hit rate: rounds whose outcome had a continuation ready. identical: the same tokens as autoregressive decoding;
near-ties: they part only where the target's best tokens are tied but for rounding.
";

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
    format!("{}\n{LEGEND}", aligned(&grid))
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
    let mut cells = vec![
        checkpoint_name(score),
        if benchmark.is_empty() { ABSENT.to_owned() } else { printable(benchmark) },
        or_absent(number(score, "layers"), |layers| format!("{layers}")),
        or_absent(number(asynchronous, "tau_pooled"), |tau| format!("{tau:.2}")),
    ];
    for decoder in decoders {
        let figures = measured(score, decoder, benchmark);
        cells.push(or_absent(number(figures, "tokens_per_second"), rate));
        if decoder != "autoregressive" {
            cells.push(or_absent(number(figures, "speedup"), |speedup| format!("{speedup:.2}×")));
        }
    }
    cells.push(or_absent(number(asynchronous, "hit_rate"), percent));
    let verdicts = decoders.iter().filter_map(|decoder| verdict(measured(score, decoder, benchmark)));
    cells.push(verdicts.max().map_or(ABSENT, Verdict::name).to_owned());
    cells
}

/// How a decoder's texts compare with the autoregressive decoder's, the worst last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    Identical,
    /// They part only where the target's best tokens are tied but for rounding.
    NearTies,
    Different,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Verdict::Identical => "yes",
            Verdict::NearTies => "near-ties",
            Verdict::Different => "no",
        }
    }
}

/// `None` where nothing was compared.
pub(crate) fn verdict(figures: &Value) -> Option<Verdict> {
    let divergences = figures["first_divergences"].as_array().map_or(0, Vec::len) as u64;
    Some(match figures["identical_to_autoregressive"].as_bool()? {
        true => Verdict::Identical,
        false if divergences > 0 && figures["near_ties"].as_u64() == Some(divergences) => Verdict::NearTies,
        false => Verdict::Different,
    })
}

fn aligned(grid: &Grid) -> String {
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

fn column(group: &str, title: &'static str, numeric: bool) -> Column {
    Column { group: printable(group), title, numeric }
}

/// The decoders of all scores: the three usual ones in their order, then others as they come.
fn decoder_names(scores: &[Value]) -> Vec<String> {
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

fn keys(value: &Value) -> Vec<String> {
    value.as_object().map(|object| object.keys().cloned().collect()).unwrap_or_default()
}

fn push_new(names: &mut Vec<String>, name: String) {
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
fn printable(text: &str) -> String {
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
    fn a_name_cannot_break_the_line() {
        assert_eq!(grid(&[score("a\n\u{1b}[31mb", 1, 1.0, true)]).rows[0][0], "a\u{fffd}\u{fffd}[31mb");
    }

    #[test]
    fn without_scores_it_says_so() {
        assert_eq!(table(&[]), "no checkpoint has been scored yet\n");
    }
}
