//! `drafthorse inspect`: responses in words, each with what training supervises of it marked.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use clap::Args;
use data::manifest::Manifest;
use data::responses::{FinishReason, PARTS, Provenance, Response, read_part};
use data::supervision::Example;
use data::tokenizer::Tokenizer;

use crate::BadRecipe;
use crate::models::Text;
use crate::progress::to_stdout;
use crate::stages::Stage;

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct InspectArgs {
    /// A part of responses (part-00000.parquet), the folder of responses, or the run that they belong to.
    #[arg(value_name = "PART|FOLDER|RUN")]
    path: PathBuf,
    /// Print so many rows below the summary, the first ones.
    #[arg(long, value_name = "N", default_value_t = 3)]
    rows: usize,
    /// Print the rows with this id instead.
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// Cut prompt and response together at so many tokens, as training does. Default: what the run's recipe says, else nothing is cut.
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// The model whose tokenizer made the ids: a folder or a .gguf file. Default: the target of the run's recipe.
    #[arg(long, value_name = "MODEL")]
    tokenizer: Option<String>,
}

const EXAMPLES: &str = "\
Examples:
  drafthorse inspect runs/quickstart                          all responses of a run, and the first three of them
  drafthorse inspect runs/quickstart --id 17 | less           one row, whole
  drafthorse inspect part-00000.parquet --rows 0 --tokenizer MODEL

What training supervises is green on a terminal, and elsewhere between the brackets \u{27e6} and \u{27e7}. A row of which fewer than two
supervised tokens are left is not trained on, and says so.

Exit codes: 0 done, 1 failed, 2 a path that holds no responses.";

/// Widest bar of the histogram, in characters.
const WIDEST: usize = 40;

/// What is known beside the rows.
struct Known {
    tokenizer: Option<Tokenizer>,
    max_tokens: usize,
}

/// Prints the summary and some rows on stdout.
pub(crate) fn inspect(args: &InspectArgs) -> anyhow::Result<()> {
    let parts = parts(&args.path)?;
    let known = known(args, &parts[0])?;
    let stdout = std::io::stdout();
    let coloured = stdout.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let (mut summary, mut shown) = (Summary::default(), String::new());
    let mut first: Option<Provenance> = None;
    let mut printed = 0;
    for part in &parts {
        let (provenance, rows) = read_part(part).map_err(|error| BadRecipe(error.to_string()))?;
        first.get_or_insert(provenance);
        for row in &rows {
            summary.add(row, known.max_tokens);
            let wanted = args.id.as_ref().map_or(printed < args.rows, |id| *id == row.id);
            if wanted {
                printed += 1;
                shown += &in_words(row, &known, coloured)?;
            }
        }
    }
    if let (Some(id), 0) = (&args.id, printed) {
        return Err(BadRecipe(format!("none of the {} rows has the id `{}`", summary.rows, safe(id))).into());
    }
    let mut text = format!("{}: {} rows in {} parts\n", args.path.display(), summary.rows, parts.len());
    if let Some(provenance) = first {
        text += &format!(
            "by {} ({}), {}; tokenizer {}, chat template {}\n",
            safe(&provenance.target),
            safe(&provenance.revision),
            safe(&provenance.sampling),
            provenance.tokenizer_hash.get(..8).unwrap_or_default(),
            provenance.chat_template_hash.get(..8).unwrap_or_default(),
        );
    }
    to_stdout(&(text + &summary.in_words(known.max_tokens) + &shown))
}

/// The parts that a path stands for; at least one.
fn parts(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if path.is_file() {
        return Ok(vec![path.to_path_buf()]);
    }
    let places = [
        path.to_path_buf(),
        path.join(Stage::Regenerate.folder()),
        Path::new("runs").join(path).join(Stage::Regenerate.folder()),
    ];
    for folder in &places {
        let Some(manifest) = Manifest::read(folder)? else { continue };
        let listed = manifest.results.get(PARTS).and_then(|parts| parts.as_array().cloned()).unwrap_or_default();
        let names: Vec<PathBuf> = listed.iter().filter_map(|name| Some(folder.join(name.as_str()?))).collect();
        if !names.is_empty() {
            return Ok(names);
        }
    }
    Err(BadRecipe(format!(
        "`{}` holds no responses: it is no Parquet file, and neither it nor its folder `{}` lists parts in a manifest.json",
        path.display(),
        Stage::Regenerate.folder()
    ))
    .into())
}

/// The tokenizer and the length limit: as given, else of the recipe in the run that the part lies in.
fn known(args: &InspectArgs, part: &Path) -> anyhow::Result<Known> {
    let recipe = part.parent().and_then(Path::parent).map(|run| run.join("recipe.toml")).filter(|path| path.is_file());
    // A run that was moved may not find its prompts; what it says of the target still holds, if that is there.
    let recipe = recipe.and_then(|path| configs::load(&path, &[]).ok());
    let tokenizer = match (&args.tokenizer, &recipe) {
        (Some(model), _) => Some(Text::load(model)?.tokenizer),
        (None, Some(recipe)) => Text::load(&recipe.target.model).ok().map(|text| text.tokenizer),
        (None, None) => None,
    };
    let max_tokens = args.max_tokens.or_else(|| recipe.map(|recipe| recipe.data.max_tokens)).unwrap_or(usize::MAX);
    Ok(Known { tokenizer, max_tokens })
}

/// What all rows together are.
#[derive(Default)]
struct Summary {
    rows: usize,
    prompt_tokens: usize,
    response_tokens: usize,
    supervised: usize,
    dropped: usize,
    cut: usize,
    thinking: usize,
    lengths: Vec<usize>,
    finish_reasons: BTreeMap<&'static str, usize>,
    sources: BTreeMap<String, usize>,
    turns: BTreeMap<u32, usize>,
}

impl Summary {
    fn add(&mut self, row: &Response, max_tokens: usize) {
        self.rows += 1;
        self.prompt_tokens += row.prompt_ids.len();
        self.response_tokens += row.response_ids.len();
        self.cut += usize::from(row.prompt_ids.len() + row.response_ids.len() > max_tokens);
        match Example::new(&row.prompt_ids, &row.response_ids, max_tokens) {
            Some(example) => self.supervised += example.supervised(),
            None => self.dropped += 1,
        }
        self.thinking += usize::from(row.thinking);
        self.lengths.push(row.response_ids.len());
        *self.finish_reasons.entry(row.finish_reason.name()).or_default() += 1;
        *self.sources.entry(safe(&row.source)).or_default() += 1;
        *self.turns.entry(row.turn).or_default() += 1;
    }

    fn in_words(&self, max_tokens: usize) -> String {
        let counts = |pairs: &mut dyn Iterator<Item = (String, usize)>| {
            pairs.map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
        };
        let limit = match max_tokens {
            usize::MAX => String::new(),
            limit => {
                format!(" within {limit} tokens; rows cut: {}, left with fewer than two and dropped: {}", self.cut, self.dropped)
            }
        };
        let mut text = format!(
            "tokens: {} of prompts, {} of responses; {} supervised{limit}\n",
            self.prompt_tokens, self.response_tokens, self.supervised
        );
        text +=
            &format!("ended by: {}\n", counts(&mut self.finish_reasons.iter().map(|(name, count)| (name.to_string(), *count))));
        text += &format!("sources: {}\n", counts(&mut self.sources.iter().map(|(name, count)| (name.clone(), *count))));
        if self.turns.len() > 1 {
            text += &format!("turns: {}\n", counts(&mut self.turns.iter().map(|(turn, count)| (turn.to_string(), *count))));
        }
        if self.thinking > 0 {
            text += &format!("with thinking: {}\n", self.thinking);
        }
        text + &histogram(&self.lengths)
    }
}

/// Lengths of responses, in bins that double.
fn histogram(lengths: &[usize]) -> String {
    let mut bins: BTreeMap<u32, usize> = BTreeMap::new();
    // Bin b holds lengths from 2^(b-1) up to 2^b - 1; 0 is its own.
    lengths.iter().for_each(|length| *bins.entry(usize::BITS - length.leading_zeros()).or_default() += 1);
    let (Some(&first), Some(&last)) = (bins.keys().next(), bins.keys().next_back()) else { return String::new() };
    let most = bins.values().copied().max().unwrap_or(1).max(1);
    let line = |bin: u32| {
        let count = bins.get(&bin).copied().unwrap_or(0);
        let range = if bin == 0 { "0".to_string() } else { format!("{} to {}", 1_u64 << (bin - 1), (1_u64 << bin) - 1) };
        format!("{range:>17} {count:>9} {}\n", "█".repeat((count * WIDEST).div_ceil(most)))
    };
    format!("lengths of responses in tokens:\n{}", (first..=last).map(line).collect::<String>())
}

/// One row: how it came, and its text with what is supervised marked.
fn in_words(row: &Response, known: &Known, coloured: bool) -> anyhow::Result<String> {
    let ended = match row.finish_reason {
        FinishReason::Stop => "ended by a stop token",
        FinishReason::Length => "cut off by the limit of new tokens",
    };
    let mut text = format!(
        "\n── {} from {}, turn {}, {} + {} tokens, {ended}\n",
        safe(&row.id),
        safe(&row.source),
        row.turn,
        row.prompt_ids.len(),
        row.response_ids.len()
    );
    let example = Example::new(&row.prompt_ids, &row.response_ids, known.max_tokens);
    if example.is_none() {
        text += "fewer than two supervised tokens are left: not trained on\n";
    }
    let supervised = example.as_ref().map_or(0, |example| example.supervised());
    let (kept, rest) = row.response_ids.split_at(supervised.min(row.response_ids.len()));
    let (prompt, marked, behind) = match &known.tokenizer {
        Some(tokenizer) => {
            (tokenizer.decode(&row.prompt_ids, false)?, tokenizer.decode(kept, false)?, tokenizer.decode(rest, false)?)
        }
        None => {
            text += "no tokenizer at hand (--tokenizer MODEL): the text as it was stored, without special tokens\n";
            let all = row.response_text.clone();
            if supervised == 0 {
                (row.prompt_text.clone(), String::new(), all)
            } else {
                (row.prompt_text.clone(), all, String::new())
            }
        }
    };
    let mark = |text: String| match (text.is_empty(), coloured) {
        (true, _) => text,
        (false, true) => format!("\x1b[32m{text}\x1b[0m"),
        (false, false) => format!("\u{27e6}{text}\u{27e7}"),
    };
    Ok(text + &safe(&prompt) + &mark(safe(&marked)) + &safe(&behind) + "\n")
}

/// Text without what a terminal would obey; line ends stay.
fn safe(text: &str) -> String {
    let shown = |character: char| match character {
        '\n' => "\n".to_string(),
        other if other.is_control() => other.escape_default().to_string(),
        other => other.to_string(),
    };
    text.chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(prompt: usize, response: usize, finish_reason: FinishReason) -> Response {
        Response {
            id: "a\u{1b}[31m".to_string(),
            prompt_ids: vec![1; prompt],
            response_ids: vec![2; response],
            finish_reason,
            prompt_text: "Why?\n".to_string(),
            response_text: "Because\u{7}.".to_string(),
            ids_from: data::responses::IdsFrom::Engine,
            turn: 0,
            source: "stories".to_string(),
            temperature: 0.0,
            thinking: false,
        }
    }

    #[test]
    fn a_row_says_how_it_came_and_marks_what_is_supervised() -> anyhow::Result<()> {
        let known = |max_tokens| Known { tokenizer: None, max_tokens };
        let text = in_words(&row(3, 5, FinishReason::Stop), &known(usize::MAX), false)?;
        assert!(text.contains("── a\\u{1b}[31m from stories, turn 0, 3 + 5 tokens, ended by a stop token"), "{text}");
        assert!(text.ends_with("Why?\n\u{27e6}Because\\u{7}.\u{27e7}\n"), "{text}");
        let text = in_words(&row(3, 5, FinishReason::Length), &known(4), true)?;
        assert!(text.contains("cut off by the limit") && text.contains("not trained on") && !text.contains('\x1b'), "{text}");
        let text = in_words(&row(3, 5, FinishReason::Length), &known(6), true)?;
        assert!(text.contains("\x1b[32mBecause\\u{7}.\x1b[0m"), "{text}");
        Ok(())
    }

    #[test]
    fn the_summary_counts_every_row_once() {
        let mut summary = Summary::default();
        for (prompt, response, ended) in [(3, 5, FinishReason::Stop), (3, 9, FinishReason::Length), (9, 1, FinishReason::Stop)] {
            summary.add(&row(prompt, response, ended), 10);
        }
        let text = summary.in_words(10);
        let expected =
            "tokens: 15 of prompts, 15 of responses; 12 supervised within 10 tokens; rows cut: 1, left with fewer than two and \
                        dropped: 1
ended by: length 1, stop 2\nsources: stories 3\n";
        assert!(text.starts_with(expected), "{text}");
        let bars: Vec<&str> = text.lines().filter(|line| line.contains(" to ")).map(str::trim).collect();
        assert!(
            bars[0].starts_with("1 to 1         1 █") && bars[1].starts_with("2 to 3         0") && bars.len() == 4,
            "{text}"
        );
        assert!(histogram(&[]).is_empty() && histogram(&[0, usize::MAX >> 1]).contains("  0 "));
    }
}
