//! What a run found, on the terminal and as `report.html`.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use configs::Recipe;
use data::manifest::Manifest;
use evaluator::report::{ReportInput, TimelineRound, html, table};
use evaluator::score::read_rounds;
use serde_json::Value;

use super::Stage;
use super::evaluate::simulate;
use crate::folder::RunFolder;
use crate::progress::{Progress, to_stdout};

/// Rounds shown in the timeline.
const TIMELINE_ROUNDS: usize = 12;

/// Prints the table on stdout and writes the report.
pub(super) fn write(recipe: &Recipe, run: &RunFolder, progress: &Progress) -> anyhow::Result<()> {
    let scores_folder = run.path.join(Stage::Evaluate.folder());
    let manifest = Manifest::read(&scores_folder)?;
    let names: Vec<String> = manifest
        .and_then(|manifest| manifest.results.get("scores").cloned())
        .and_then(|scores| serde_json::from_value(scores).ok())
        .unwrap_or_default();
    let mut scores = Vec::new();
    for name in &names {
        simulate(&scores_folder, name, &recipe.evaluate.hardware)?;
        let path = scores_folder.join(format!("{name}.json"));
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read `{}`", path.display()))?;
        scores.push(serde_json::from_str::<Value>(&text).with_context(|| format!("`{}` is not a score", path.display()))?);
    }
    let timeline = match names.last() {
        Some(name) => timeline(&scores_folder.join(format!("{name}.rounds.parquet")))?,
        None => Vec::new(),
    };
    let input = ReportInput {
        name: recipe.name.clone(),
        recipe_toml: fs::read_to_string(run.path.join("recipe.toml")).unwrap_or_default(),
        metrics: json_lines(&run.path.join(Stage::Train.folder()).join("metrics.jsonl")),
        ledger: json_lines(&run.path.join(Stage::Prune.folder()).join("ledger.jsonl")),
        scores: scores.clone(),
        timeline,
        provenance: provenance(recipe),
    };
    let path = run.path.join("report.html");
    data::files::write_atomically(&path, html(&input).as_bytes())
        .with_context(|| format!("cannot write `{}`", path.display()))?;
    to_stdout(&table(&scores))?;
    progress.note(&format!("{:>12} {}", "report", path.display()));
    Ok(())
}

/// The first rounds of the first text that the asynchronous decoder wrote.
fn timeline(path: &Path) -> anyhow::Result<Vec<TimelineRound>> {
    let rounds = read_rounds(path)?;
    let mut rounds = rounds.into_iter().filter(|row| row.decoder == "asynchronous").peekable();
    let first = rounds.peek().map(|row| row.benchmark.clone());
    let of_first = rounds.filter(|row| Some(&row.benchmark) == first.as_ref() && row.round.prompt == 0).map(|row| row.round);
    Ok(of_first
        .take(TIMELINE_ROUNDS)
        .map(|round| TimelineRound {
            draft_start: round.draft_start,
            draft_end: round.draft_start + round.draft_seconds,
            pack_start: round.pack_start,
            pack_end: round.pack_start + round.pack_seconds,
            verify_start: round.verify_start,
            verify_end: round.verify_start + round.verify_seconds,
            committed: round.committed,
            outcome: round.lookup.map_or("first", evaluator::fan_out::Lookup::name).to_string(),
        })
        .collect())
}

fn json_lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn provenance(recipe: &Recipe) -> Vec<(String, String)> {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or("unknown", |name| name.trim_start_matches(['\t', ' ', ':']));
    [
        ("drafthorse", env!("CARGO_PKG_VERSION").to_string()),
        ("libtorch", "2.11.0 through tch 0.24.0".to_string()),
        ("processor", format!("{cpu}, {} cores", torch::available_cores())),
        ("target", crate::folder::name_of(recipe.target.model.as_ref())),
        ("devices", format!("target {}, drafter {}", recipe.devices.target, recipe.devices.drafter)),
        ("seed", recipe.seed.to_string()),
    ]
    .map(|(name, value)| (name.to_string(), value))
    .to_vec()
}
