//! `drafthorse compare`: the scores of runs and files side by side.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use data::manifest::Manifest;
use evaluator::comparison::{Entry, compare as side_by_side, csv, html, table};
use evaluator::score::Score;

use crate::BadRecipe;
use crate::folder::name_of;
use crate::progress::to_stdout;
use crate::stages::Stage;

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CompareArgs {
    /// The folder or the name of a run, for all of its scores; or a score file. Differences are against the first, a run's first
    /// being its untrained drafter.
    #[arg(required = true, value_name = "RUN|SCORE")]
    scores: Vec<PathBuf>,
    /// How it is written to stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
    /// The checkpoint that differences are against, by the label it has in the table.
    #[arg(long, value_name = "LABEL")]
    against: Option<String>,
    /// Only this benchmark; may be given several times.
    #[arg(long = "benchmark", value_name = "NAME")]
    benchmarks: Vec<String>,
    /// Published figures to put beside ours. They are of other hardware, so no verdict is drawn against them.
    #[arg(long, value_enum)]
    reference: Option<Published>,
}

const EXAMPLES: &str = "\
Examples:
  drafthorse compare runs/quickstart                                   what training and pruning gave
  drafthorse compare runs/a runs/b --against b/layers-31               two runs; labels are RUN/CHECKPOINT
  drafthorse compare old.json runs/b/scores/step-000500.json           two scores
  drafthorse compare runs/a --reference d3d --format html > a.html     beside what D3D's authors published

Better and worse stand only where a 95 % interval, over the same prompts in pairs, excludes that nothing differs. There is no verdict
where the prompts or the target are others, nor on speed where the target alone was not equally fast: that is another machine.
Few prompts show little: a hundred or more tell differences of a few per cent.

Exit codes: 0 done, 1 failed, 2 a path that is neither a run nor a score, a run without scores, a name that none has.";

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// Aligned text.
    Table,
    /// For programs; docs/compare.md says what the keys mean.
    Json,
    /// One line a checkpoint, benchmark and decoder.
    Csv,
    /// A page with figures, readable offline.
    Html,
}

#[derive(Clone, Copy, ValueEnum)]
enum Published {
    /// D3D and the methods its paper compares with, on Qwen3-8B and Qwen3-32B.
    D3d,
}

/// Prints the comparison on stdout.
pub(crate) fn compare(args: &CompareArgs) -> anyhow::Result<()> {
    let bad = |error: &dyn std::error::Error| BadRecipe(error.to_string());
    let entries = labelled(read_all(&args.scores)?);
    let mut comparison = side_by_side(&entries, args.against.as_deref(), &args.benchmarks).map_err(|error| bad(&error))?;
    if let Some(Published::D3d) = args.reference {
        comparison = comparison.beside(&configs::Reference::named("d3d")?);
    }
    let text = match args.format {
        Format::Table => table(&comparison),
        Format::Json => serde_json::to_string_pretty(&comparison)? + "\n",
        Format::Csv => csv(&comparison),
        Format::Html => html(&comparison),
    };
    to_stdout(&text)
}

/// A score, and where it came from.
struct Found {
    /// The run's folder; absent for a file by itself.
    run: Option<PathBuf>,
    path: PathBuf,
    score: Score,
}

/// The scores of all arguments, each once.
fn read_all(arguments: &[PathBuf]) -> anyhow::Result<Vec<Found>> {
    let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
    for argument in arguments {
        for one in read(argument)? {
            if seen.insert(fs::canonicalize(&one.path).unwrap_or_else(|_| one.path.clone())) {
                found.push(one);
            }
        }
    }
    Ok(found)
}

/// The scores that one argument names: those of a run by depth, the deepest first, or a file's.
fn read(argument: &Path) -> anyhow::Result<Vec<Found>> {
    if argument.is_file() {
        let score = Score::read(argument).map_err(|error| BadRecipe(error.to_string()))?;
        let run = argument.parent().filter(|folder| folder.ends_with(Stage::Evaluate.folder())).and_then(Path::parent);
        let run = run.map(Path::to_path_buf).filter(|run| run.file_name().is_some());
        return Ok(vec![Found { run, path: argument.to_path_buf(), score }]);
    }
    let shown = argument.display();
    let places = [argument.to_path_buf(), Path::new("runs").join(argument)];
    let Some(run) = places.iter().find(|run| run.join(Stage::Evaluate.folder()).is_dir() || run.join("recipe.toml").is_file())
    else {
        let message = format!(
            "`{shown}` is neither a run nor a score; looked for the score file `{shown}`, and for `{}` in the folders `{shown}` and \
             `{}`",
            Stage::Evaluate.folder(),
            places[1].display()
        );
        return Err(BadRecipe(message).into());
    };
    let folder = run.join(Stage::Evaluate.folder());
    let names = score_names(&folder)?;
    if names.is_empty() {
        let message = format!("run `{}` has no scores yet; `drafthorse evaluate {0}` makes them", run.display());
        return Err(BadRecipe(message).into());
    }
    let mut found = Vec::new();
    for name in names {
        let path = folder.join(format!("{name}.json"));
        let score = Score::read(&path).map_err(|error| {
            BadRecipe(format!("{error}; `drafthorse run {} --restart evaluate` scores the run again", run.display()))
        })?;
        found.push(Found { run: Some(run.clone()), score, path });
    }
    found.sort_by_key(|found| std::cmp::Reverse(found.score.layers));
    Ok(found)
}

/// The names of a run's scores in the order of its manifest; of a run that is still being scored, those that are there.
fn score_names(folder: &Path) -> anyhow::Result<Vec<String>> {
    let listed = match Manifest::read(folder)?.and_then(|manifest| manifest.results.get("scores").cloned()) {
        Some(scores) => serde_json::from_value(scores)
            .with_context(|| format!("the manifest in `{}` does not list scores by name", folder.display()))?,
        None => Vec::new(),
    };
    if !listed.is_empty() {
        return Ok(listed);
    }
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".json")?.to_string()))
        .filter(|name| name.starts_with("step-") || name.starts_with("layers-"))
        .collect();
    // Steps before pruned checkpoints, in the order of training.
    names.sort_unstable_by_key(|name| (name.starts_with("layers-"), name.clone()));
    Ok(names)
}

/// Names the scores: by checkpoint where that is clear, else with the run, else with the path.
fn labelled(found: Vec<Found>) -> Vec<Entry> {
    let runs: BTreeSet<&PathBuf> = found.iter().filter_map(|one| one.run.as_ref()).collect();
    let names: BTreeSet<String> = runs.iter().map(|run| name_of(run)).collect();
    let several = runs.len() > 1;
    let names_differ = names.len() == runs.len();
    let run_name = |run: &PathBuf| if names_differ { name_of(run) } else { run.display().to_string() };
    let plain: Vec<String> = found
        .iter()
        .map(|one| match &one.run {
            Some(run) if several => format!("{}/{}", run_name(run), one.score.checkpoint),
            _ => one.score.checkpoint.clone(),
        })
        .collect();
    let is_unique = |label: &String| plain.iter().filter(|other| *other == label).count() == 1;
    let stem = |one: &Found| one.path.with_extension("").display().to_string();
    // `a.json` and `a.old` have one stem, but no two have one path.
    let by_path = |one: &Found| {
        let shared = found.iter().filter(|other| stem(other) == stem(one)).count() > 1;
        if shared { one.path.display().to_string() } else { stem(one) }
    };
    found
        .iter()
        .zip(&plain)
        .map(|(one, label)| Entry {
            label: if is_unique(label) { label.clone() } else { by_path(one) },
            run: one.run.as_ref().map(run_name),
            score: one.score.clone(),
        })
        .collect()
}
