//! The target answers every prompt: exact token ids in Parquet parts, every row accounted for. Prompt files become work on disk first
//! ([`data::preparation`]); then an engine has the conversations, chunk by chunk ([`data::conversations`]): the target itself, loaded on
//! every rank, or servers that have it ([`data::serving`]).

mod answer;
mod servers;

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use anyhow::Context as _;
use configs::Engine;
use data::conversations::{self, UNDER_WAY};
use data::files::{remove_temporaries, write_atomically_with};
use data::manifest::Manifest;
use data::preparation::{Preparation, PreparationError, Prepared, REJECTED, prepare, prepared, prepared_work};
use data::prompts::Rejected;
use data::responses::{FinishReason, IdsFrom, PARTS, Provenance, Response, SCHEMA_VERSION, part_name, read_part};
use serde_json::{Map, Value, json};

use super::{Context, Stage, Status};
use crate::folder::{name_of, values};
use crate::models::{self, Text};

/// The folder of the work, within that of the responses; it goes when all is answered.
const WORK: &str = "requests";

/// Generates what is still missing and writes the manifest.
pub(super) fn run(context: &Context<'_>, earlier: Option<&Manifest>) -> anyhow::Result<Status> {
    let recipe = context.recipe;
    let text = context.text()?;
    let Some(prepared) = work(context, &text, earlier)? else { return Ok(Status::Interrupted) };
    write_rejected(context, &[])?;
    let name = "regenerate";
    context.progress.note(&format!(
        "{name:>12} {} prompts: {} to answer, {} rejected ({REJECTED} says why), {} duplicate ids kept apart",
        prepared.rows_read, prepared.rows_used, prepared.rows_rejected, prepared.duplicate_ids
    ));
    let sources = prepared.sources.iter().filter(|_| prepared.sources.len() > 1).map(|source| source.in_words());
    sources.chain(prepared.reasons.in_words()).for_each(|line| context.progress.note(&format!("{name:>12} {line}")));
    let may_be_rejected = recipe.data.max_rejected * prepared.rows_read as f64;
    if prepared.rows_rejected as f64 > may_be_rejected {
        anyhow::bail!(
            "{} of {} prompts are rejected, more than `data.max_rejected` = {} allows; `{}` says why",
            prepared.rows_rejected,
            prepared.rows_read,
            recipe.data.max_rejected,
            context.folder.join(REJECTED).display()
        );
    }
    write_parts(context, &prepared)?;
    remove_temporaries(&context.folder.join(UNDER_WAY))?;

    if answer::all(context, &text, &prepared, may_be_refused(context, &prepared))? {
        finish(context, &prepared)
    } else {
        Ok(Status::Interrupted)
    }
}

/// What a rank other than 0 does once the work is there: answers its share.
pub(super) fn join(context: &Context<'_>) -> anyhow::Result<()> {
    let prepared = prepared_work(&context.folder.join(WORK))?;
    let prepared = prepared.with_context(|| {
        format!(
            "rank {} sees no work in `{}`, which rank 0 wrote it to",
            context.group.rank(),
            context.folder.join(WORK).display()
        )
    })?;
    for (key, own) in values(context.recipe, Stage::Regenerate) {
        if let Some(of_rank_0) = prepared.inputs.get(&key).filter(|of_rank_0| **of_rank_0 != own) {
            anyhow::bail!("rank {}'s recipe has `{key}` = {own}, and that of rank 0 has {of_rank_0}", context.group.rank());
        }
    }
    answer::share(context, &context.text()?, &prepared, may_be_refused(context, &prepared))
}

/// How many conversations the engine may refuse, after what was rejected before.
fn may_be_refused(context: &Context<'_>, prepared: &Prepared) -> usize {
    let may_be_rejected = (context.recipe.data.max_rejected * prepared.rows_read as f64) as usize;
    may_be_rejected.saturating_sub(prepared.rows_rejected)
}

/// The work of all prompts: as an earlier process made it, else made now; `None` when asked to stop.
fn work(context: &Context<'_>, text: &Text, earlier: Option<&Manifest>) -> anyhow::Result<Option<Prepared>> {
    let recipe = context.recipe;
    let folder = context.folder.join(WORK);
    if let Some(prepared) = prepared(&folder, &context.inputs)? {
        return Ok(Some(prepared));
    }
    // Work is complete before any of it is answered.
    let parts = earlier.and_then(|earlier| earlier.results.get(PARTS)).and_then(Value::as_array);
    if parts.is_some_and(|parts| !parts.is_empty()) {
        anyhow::bail!(
            "`{}` holds responses of an older version of this program, cut short, or has lost its folder `{WORK}`; use `drafthorse run \
             RECIPE --restart regenerate`",
            context.folder.display()
        );
    }
    let preparation = Preparation {
        prompts: &recipe.data.prompts,
        limit: recipe.data.limit,
        seed: recipe.seed,
        max_tokens: recipe.data.max_tokens,
        vocabulary: models::model_config(&recipe.target.model)?.vocab_size as usize,
        tokenizer: &text.tokenizer,
        template: &text.template,
        thinking: recipe.target.thinking,
        inputs: &context.inputs,
    };
    let bytes: u64 = recipe.data.prompts.iter().filter_map(|path| fs::metadata(path).ok()).map(|metadata| metadata.len()).sum();
    // With a limit the files are read twice, the first time for the ids alone.
    let bar = context.progress.bar("prompts", (bytes >> 10) as usize);
    let begun = Instant::now();
    let made = prepare(&preparation, &folder, context.stop, &mut |bytes, rows| {
        let rate = rows as f64 / begun.elapsed().as_secs_f64();
        bar.set((bytes >> 10) as usize, &format!("KB read, {rows} rows, {rate:.0} rows/s"));
    });
    drop(bar);
    match made {
        Err(PreparationError::Stopped) => Ok(None),
        Err(error @ PreparationError::NothingLeft { .. }) => {
            write_rejected(context, &[])?;
            Err(error.into())
        }
        made => Ok(Some(made?)),
    }
}

/// Lists the parts that are there, for those who look on; the stage itself goes by the files.
fn write_parts(context: &Context<'_>, prepared: &Prepared) -> anyhow::Result<()> {
    let through = (0..prepared.chunks).filter(|&chunk| conversations::is_through(&context.folder, chunk));
    let parts: Vec<String> = through.map(part_name).collect();
    context.write_manifest(Stage::Regenerate, false, Map::from_iter([(PARTS.to_string(), json!(parts))]))
}

/// The rows that were rejected in preparation, and the ones that the engine refused.
fn write_rejected(context: &Context<'_>, refused: &[Rejected]) -> anyhow::Result<()> {
    let from = context.folder.join(WORK).join(REJECTED);
    let mut prepared = File::open(&from).with_context(|| format!("cannot read `{}`", from.display()))?;
    write_atomically_with(&context.folder.join(REJECTED), |file| {
        std::io::copy(&mut prepared, file)?;
        for row in refused {
            file.write_all(format!("{}\n", serde_json::to_string(row)?).as_bytes())?;
        }
        Ok(())
    })?;
    Ok(())
}

fn provenance(context: &Context<'_>, text: &Text) -> Provenance {
    let recipe = context.recipe;
    let sampling = &recipe.regenerate;
    let by = match &sampling.server_model {
        Some(model) => format!(" by servers as {model}"),
        None if sampling.engine == Engine::Server => " by servers".to_owned(),
        None => String::new(),
    };
    Provenance {
        target: name_of(recipe.target.model.as_ref()),
        revision: recipe.target.revision.clone(),
        tokenizer_hash: text.tokenizer.hash(),
        chat_template_hash: text.template.hash(),
        sampling: format!(
            "temperature {} top_p {} top_k {} seed {}{by}",
            sampling.temperature, sampling.top_p, sampling.top_k, recipe.seed
        ),
        schema_version: SCHEMA_VERSION,
    }
}

/// Counts what is there, writes the manifest, and removes what was there for the work alone.
fn finish(context: &Context<'_>, prepared: &Prepared) -> anyhow::Result<Status> {
    let mut counts = Counts::default();
    let mut refused = Vec::new();
    for chunk in 0..prepared.chunks {
        read_part(&context.folder.join(part_name(chunk)))?.1.iter().for_each(|response| counts.add(response));
        refused.extend(conversations::refused(&context.folder, chunk)?);
    }
    write_rejected(context, &refused)?;
    let parts: Vec<String> = (0..prepared.chunks).map(part_name).collect();
    let results = Map::from_iter([
        (PARTS.to_string(), json!(parts)),
        ("rows_read".to_string(), json!(prepared.rows_read)),
        ("rows_rejected".to_string(), json!(prepared.rows_rejected + refused.len())),
        ("rows_left_out_by_limit".to_string(), json!(prepared.rows_left_out_by_limit)),
        ("rows_used".to_string(), json!(prepared.rows_used - refused.len())),
        ("sources".to_string(), json!(prepared.sources)),
        ("duplicate_ids".to_string(), json!(prepared.duplicate_ids)),
        ("responses".to_string(), json!(counts.rows)),
        ("tokens".to_string(), json!(counts.tokens)),
        ("finished_by_stop".to_string(), json!(counts.stopped)),
        ("finished_by_length".to_string(), json!(counts.rows - counts.stopped)),
        ("refused_by_engine".to_string(), json!(refused.len())),
        ("ids_from_engine".to_string(), json!(counts.from_engine)),
        ("ids_from_tokenizer".to_string(), json!(counts.from_tokenizer)),
        ("ids_given".to_string(), json!(counts.rows - counts.from_engine - counts.from_tokenizer)),
    ]);
    context.write_manifest(Stage::Regenerate, true, results)?;
    remove_work(&context.folder)?;
    context.progress.note(&format!(
        "{:>12} {} responses, {} tokens; {} ended by themselves, {} at the limit of {} tokens",
        "regenerate",
        counts.rows,
        counts.tokens,
        counts.stopped,
        counts.rows - counts.stopped,
        context.recipe.regenerate.max_new_tokens
    ));
    let more = [
        (refused.len(), format!("conversations refused by the engine ({REJECTED} says why)")),
        (counts.from_tokenizer, "responses whose ids the tokenizer gave, since the engine gave text alone".to_owned()),
    ];
    for (number, what) in more.iter().filter(|(number, _)| *number > 0) {
        context.progress.note(&format!("{:>12} {number} {what}", "regenerate"));
    }
    Ok(Status::Done)
}

/// Removes what is there for the work alone, which is over.
pub(super) fn remove_work(folder: &Path) -> anyhow::Result<()> {
    for folder in [WORK, UNDER_WAY].map(|name| folder.join(name)) {
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("cannot remove `{}`", folder.display()))?;
        }
    }
    Ok(())
}

/// Rows and tokens by how they finished.
#[derive(Default)]
struct Counts {
    rows: usize,
    tokens: usize,
    stopped: usize,
    from_engine: usize,
    from_tokenizer: usize,
}

impl Counts {
    fn add(&mut self, response: &Response) {
        self.rows += 1;
        self.tokens += response.response_ids.len();
        self.stopped += usize::from(response.finish_reason == FinishReason::Stop);
        self.from_engine += usize::from(response.ids_from == IdsFrom::Engine);
        self.from_tokenizer += usize::from(response.ids_from == IdsFrom::Tokenizer);
    }
}
