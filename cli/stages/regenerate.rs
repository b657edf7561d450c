//! The target answers every prompt: exact token ids in Parquet parts, every row accounted for.

mod accounting;

use std::collections::HashSet;
use std::fs;
use std::ops::ControlFlow;

use anyhow::Context as _;
use data::manifest::Manifest;
use data::prompts::{self, Rejected, Request};
use data::responses::{FinishReason, PARTS, Provenance, Response, SCHEMA_VERSION, read_part, write_part};
use data::supervision::{counter_of, within_limit};
use evaluator::generate::{GenerateSettings, Generated, Prompt, generate};
use evaluator::sampling::Sampler;
use serde_json::{Map, Value, json};

use super::{Context, Stage, Status};
use crate::folder::name_of;
use crate::models::{self, Text};

/// Responses that a killed process loses at most, and rows of a part at least.
const PART_ROWS: usize = 64;

/// A request on its way to a response.
struct Work {
    request: Request,
    /// The counter that sampling draws from, by the id: a response hangs on nothing but its own request.
    counter: u64,
    text: String,
    ids: Vec<u32>,
}

/// Generates what is still missing and writes the manifest.
pub(super) fn run(context: &Context<'_>, earlier: Option<&Manifest>) -> anyhow::Result<Status> {
    let recipe = context.recipe;
    let text = context.text()?;
    let mut read = prompts::read(&recipe.data.prompts)?;
    if let Some(limit) = recipe.data.limit {
        let ids: Vec<&str> = read.requests.iter().map(|request| request.id.as_str()).collect();
        let left: HashSet<usize> = within_limit(&ids, limit, recipe.seed).into_iter().collect();
        let mut index = 0..read.requests.len();
        read.requests.retain(|_| index.next().is_some_and(|index| left.contains(&index)));
    }
    let mut rejected = std::mem::take(&mut read.rejected);
    let work = render(context, &text, std::mem::take(&mut read.requests), &mut rejected)?;
    prompts::write_rejected(&context.folder.join("rejected.jsonl"), &rejected)?;
    let used = work.len();
    let sources = accounting::by_file(&read.rows_by_file, work.iter().map(|work| &work.request), &rejected);
    context.progress.note(&format!(
        "{:>12} {} prompts: {used} to answer, {} rejected (rejected.jsonl says why), {} duplicate ids kept apart",
        "regenerate",
        read.rows_read,
        rejected.len(),
        read.duplicate_ids
    ));
    accounting::in_words(&sources, &rejected)
        .iter()
        .for_each(|line| context.progress.note(&format!("{:>12} {line}", "regenerate")));
    if work.is_empty() {
        let first = rejected.first().map_or(String::new(), |row| format!("; the first was: {}", row.reason));
        anyhow::bail!("none of the {} prompts can be used{first}", read.rows_read);
    }
    if rejected.len() as f64 > recipe.data.max_rejected * read.rows_read as f64 {
        anyhow::bail!(
            "{} of {} prompts are rejected, more than `data.max_rejected` = {} allows; `{}` says why",
            rejected.len(),
            read.rows_read,
            recipe.data.max_rejected,
            context.folder.join("rejected.jsonl").display()
        );
    }

    let mut parts: Vec<String> = parts_of(earlier);
    let mut counts = Counts::default();
    let mut answered = HashSet::new();
    for part in &parts {
        for response in read_part(&context.folder.join(part))?.1 {
            counts.add(&response);
            answered.insert(response.id);
        }
    }
    remove_unlisted(context, &parts)?;
    let sampling = &recipe.regenerate;
    let provenance = Provenance {
        target: name_of(recipe.target.model.as_ref()),
        revision: recipe.target.revision.clone(),
        tokenizer_hash: text.tokenizer.hash(),
        chat_template_hash: text.template.hash(),
        sampling: format!(
            "temperature {} top_p {} top_k {} seed {}",
            sampling.temperature, sampling.top_p, sampling.top_k, recipe.seed
        ),
        schema_version: SCHEMA_VERSION,
    };
    let results = |parts: &[String], counts: &Counts| {
        let mut results = Map::new();
        results.insert(PARTS.to_string(), json!(parts));
        results.insert("rows_read".to_string(), json!(read.rows_read));
        results.insert("rows_rejected".to_string(), json!(rejected.len()));
        results.insert("rows_left_out_by_limit".to_string(), json!(read.rows_read - rejected.len() - used));
        results.insert("rows_used".to_string(), json!(counts.rows));
        results.insert("sources".to_string(), json!(sources));
        results.insert("duplicate_ids".to_string(), json!(read.duplicate_ids));
        results.insert("tokens".to_string(), json!(counts.tokens));
        results.insert("finished_by_stop".to_string(), json!(counts.stopped));
        results.insert("finished_by_length".to_string(), json!(counts.rows - counts.stopped));
        results
    };
    context.write_manifest(Stage::Regenerate, false, results(&parts, &counts))?;

    let missing: Vec<&Work> = work.iter().filter(|work| !answered.contains(&work.request.id)).collect();
    let prompts: Vec<Prompt> = missing.iter().map(|work| Prompt { request: work.counter, ids: work.ids.clone() }).collect();
    if !prompts.is_empty() {
        let target = models::target(recipe)?;
        let settings = GenerateSettings {
            sampler: Sampler {
                temperature: sampling.temperature,
                top_p: sampling.top_p,
                top_k: sampling.top_k,
                seed: recipe.seed,
            },
            stop_tokens: target.config.eos_token_id.clone(),
            max_new_tokens: sampling.max_new_tokens,
            lanes: sampling.batch_rows,
        };
        let bar = context.progress.bar("regenerate", used);
        let started = std::time::Instant::now();
        let mut pending: Vec<Response> = Vec::new();
        let mut fresh_tokens = 0;
        let mut failure = None;
        let mut flush = |pending: &mut Vec<Response>, counts: &mut Counts| -> anyhow::Result<()> {
            if !pending.is_empty() {
                parts.push(write_part(&context.folder, parts.len(), pending, &provenance)?);
                pending.iter().for_each(|response| counts.add(response));
                pending.clear();
                context.write_manifest(Stage::Regenerate, false, results(&parts, counts))?;
            }
            Ok(())
        };
        let outcome = generate(&target, &prompts, &settings, context.stop, &mut |generated: Generated| {
            let work = missing[generated.index];
            fresh_tokens += generated.ids.len();
            match response(context, &text, work, generated) {
                Ok(response) => pending.push(response),
                Err(error) => failure = Some(error),
            }
            if failure.is_none() && pending.len() >= PART_ROWS {
                failure = flush(&mut pending, &mut counts).err();
            }
            let rate = fresh_tokens as f64 / started.elapsed().as_secs_f64();
            bar.set(counts.rows + pending.len(), &format!("{rate:.0} tokens/s"));
            if failure.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        // What is finished is kept, whatever ended the rest.
        flush(&mut pending, &mut counts)?;
        outcome?;
        if let Some(error) = failure {
            return Err(error);
        }
    }
    if counts.rows < used {
        return Ok(Status::Interrupted);
    }
    context.write_manifest(Stage::Regenerate, true, results(&parts, &counts))?;
    context.progress.note(&format!(
        "{:>12} {} responses, {} tokens; {} ended by themselves, {} at the limit of {} tokens",
        "regenerate",
        counts.rows,
        counts.tokens,
        counts.stopped,
        counts.rows - counts.stopped,
        sampling.max_new_tokens
    ));
    Ok(Status::Done)
}

/// Renders every request; those that leave no room for a response are rejected.
fn render(context: &Context<'_>, text: &Text, requests: Vec<Request>, rejected: &mut Vec<Rejected>) -> anyhow::Result<Vec<Work>> {
    let recipe = context.recipe;
    let mut work = Vec::with_capacity(requests.len());
    for request in requests {
        let reason = match text.prompt_with_tools(&request.messages, request.tools.as_ref(), recipe.target.thinking) {
            Ok((prompt_text, ids)) if ids.len() + 2 <= recipe.data.max_tokens => {
                work.push(Work { counter: counter_of(&request.id), request, text: prompt_text, ids });
                continue;
            }
            Ok((_, ids)) => format!(
                "the prompt has {} tokens and leaves no room within `data.max_tokens` = {}",
                ids.len(),
                recipe.data.max_tokens
            ),
            Err(error) => format!("the chat template refuses it: {error:#}"),
        };
        let row = Rejected { file: request.file, line: request.line, reason, text: serde_json::to_string(&request.messages)? };
        rejected.push(row);
    }
    Ok(work)
}

fn response(context: &Context<'_>, text: &Text, work: &Work, generated: Generated) -> anyhow::Result<Response> {
    Ok(Response {
        id: work.request.id.clone(),
        prompt_ids: work.ids.clone(),
        response_text: text.tokenizer.decode(&generated.ids, true)?,
        response_ids: generated.ids,
        finish_reason: generated.finish_reason,
        prompt_text: work.text.clone(),
        turn: 0,
        source: work.request.source.clone(),
        temperature: context.recipe.regenerate.temperature,
        thinking: context.recipe.target.thinking,
    })
}

fn parts_of(earlier: Option<&Manifest>) -> Vec<String> {
    let listed = earlier.and_then(|manifest| manifest.results.get(PARTS)).and_then(Value::as_array);
    listed.into_iter().flatten().filter_map(|part| part.as_str().map(str::to_string)).collect()
}

/// A part that was written but not listed before the process was killed is generated again.
fn remove_unlisted(context: &Context<'_>, parts: &[String]) -> anyhow::Result<()> {
    for entry in fs::read_dir(&context.folder)?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".parquet") && !parts.contains(&name) {
            fs::remove_file(entry.path()).with_context(|| format!("cannot remove `{}`", entry.path().display()))?;
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
}

impl Counts {
    fn add(&mut self, response: &Response) {
        self.rows += 1;
        self.tokens += response.response_ids.len();
        self.stopped += usize::from(response.finish_reason == FinishReason::Stop);
    }
}
