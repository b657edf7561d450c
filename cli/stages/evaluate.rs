//! Every checkpoint decodes the benchmarks: how fast is the target with it, and is the output the same.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use data::prompts;
use evaluator::benchmark::{Baseline, Benchmark, Plan, decoder_name, evaluate};
use evaluator::decode::{DecodeError, Settings};
use evaluator::sampling::Sampler;
use evaluator::score::{Score, write_rounds};
use model::checkpoint;
use serde_json::{Map, json};
use trainer::training::{drafter_of, step_name};

use super::prune::pruned_checkpoints;
use super::{Context, Stage, Status};
use crate::folder::name_of;
use crate::models::{self, Text};

/// What the target alone did, measured once for all checkpoints of the run.
const BASELINES: &str = "autoregressive.baseline";

/// Scores the untrained, the trained and every pruned checkpoint that has no score yet.
pub(super) fn run(context: &Context<'_>) -> anyhow::Result<Status> {
    let recipe = context.recipe;
    context.write_manifest(Stage::Evaluate, false, Map::new())?;
    let checkpoints = checkpoints(context)?;
    if recipe.evaluate.benchmarks.is_empty() || recipe.evaluate.decoders.is_empty() {
        context.progress.note(&format!("{:>12} no benchmark or no decoder in the recipe", "evaluate"));
        context.write_manifest(Stage::Evaluate, true, Map::new())?;
        return Ok(Status::Done);
    }
    let text = context.text()?;
    let benchmarks = benchmarks(context, &text)?;
    let target = models::target(recipe)?;
    let settings = Settings {
        sampler: Sampler {
            temperature: recipe.evaluate.temperature,
            top_p: recipe.evaluate.top_p,
            top_k: recipe.evaluate.top_k,
            seed: recipe.seed,
        },
        stop_tokens: target.config.eos_token_id.clone(),
        max_new_tokens: recipe.evaluate.max_new_tokens,
        positions: recipe.evaluate.positions,
        candidates: recipe.evaluate.candidates,
    };
    let baselines_path = context.folder.join(BASELINES);
    let mut baselines: BTreeMap<String, Baseline> = match fs::read(&baselines_path) {
        Ok(bytes) => {
            serde_json::from_slice(&bytes).with_context(|| format!("`{}` is damaged; remove it", baselines_path.display()))?
        }
        Err(_) => BTreeMap::new(),
    };
    let mut names = Vec::new();
    for folder in checkpoints {
        let name = name_of(&folder);
        names.push(name.clone());
        let score_path = context.folder.join(format!("{name}.json"));
        if score_path.exists() {
            continue;
        }
        let (model, file) = models::load_drafter(recipe, &folder)?;
        if file.thinking != recipe.target.thinking {
            anyhow::bail!(
                "`{}` was trained with thinking = {}, the recipe says {}",
                folder.display(),
                file.thinking,
                recipe.target.thinking
            );
        }
        let shape = models::block_shape(recipe);
        let mut drafter = drafter_of(&model, shape);
        let bar = context.progress.bar(&name, 1);
        let mut length = 0;
        let mut show = |done: usize, of: usize| {
            if length != of {
                length = of;
                bar.set_length(of);
            }
            bar.set(done, "texts decoded");
        };
        let plan = Plan { benchmarks: &benchmarks, decoders: &recipe.evaluate.decoders, settings: &settings };
        let outcome = evaluate(&target, Some(&mut drafter), plan, &mut baselines, &mut show, context.stop);
        data::files::write_atomically(&baselines_path, &serde_json::to_vec(&baselines)?)?;
        let evaluation = match outcome {
            Err(DecodeError::Stopped) => return Ok(Status::Interrupted),
            outcome => outcome?,
        };
        let score = Score {
            checkpoint: name.clone(),
            kind: file.kind,
            target: name_of(recipe.target.model.as_ref()),
            dtype: models::kind_name(target.kind()).to_string(),
            block_size: shape.block_size,
            layers: file.layers,
            decoders: evaluation.decoders,
        };
        write_rounds(&context.folder.join(format!("{name}.rounds.parquet")), &evaluation.rounds)?;
        score.write(&score_path)?;
        drop(bar);
        context.progress.note(&format!("{:>12} {name}: {}", "evaluate", summary(&score)));
    }
    let mut results = Map::new();
    results.insert("scores".to_string(), json!(names));
    context.write_manifest(Stage::Evaluate, true, results)?;
    Ok(Status::Done)
}

/// The untrained checkpoint, the trained one, and the pruned ones.
fn checkpoints(context: &Context<'_>) -> anyhow::Result<Vec<PathBuf>> {
    let train = context.run.path.join(Stage::Train.folder());
    let prune = context.run.path.join(Stage::Prune.folder());
    let latest =
        fs::canonicalize(train.join(checkpoint::LATEST)).context("no trained checkpoint; run the stage `train` first")?;
    let mut checkpoints = vec![train.join(step_name(0)), train.join(name_of(&latest))];
    checkpoints.extend(pruned_checkpoints(context).into_iter().map(|name| prune.join(name)));
    Ok(checkpoints)
}

/// The benchmarks' prompts as token ids, the first `limit` of each.
fn benchmarks(context: &Context<'_>, text: &Text) -> anyhow::Result<Vec<Benchmark>> {
    let recipe = context.recipe;
    let mut benchmarks = Vec::new();
    for benchmark in &recipe.evaluate.benchmarks {
        let read = prompts::read(std::slice::from_ref(&benchmark.path))?;
        if !read.rejected.is_empty() {
            let first = &read.rejected[0];
            context.progress.note(&format!(
                "{:>12} {}: {} rows left out, the first at line {}: {}",
                "evaluate",
                benchmark.name,
                read.rejected.len(),
                first.line,
                first.reason
            ));
        }
        let chosen = read.requests.iter().take(recipe.evaluate.limit.unwrap_or(usize::MAX));
        let prompts: anyhow::Result<Vec<Vec<u32>>> =
            chosen.map(|request| Ok(text.prompt(&request.messages, recipe.target.thinking)?.1)).collect();
        benchmarks.push(Benchmark { name: benchmark.name.clone(), prompts: prompts? });
    }
    Ok(benchmarks)
}

/// One line about a score.
fn summary(score: &Score) -> String {
    let mut words = Vec::new();
    for decoder in [configs::Decoder::Lockstep, configs::Decoder::Asynchronous].map(decoder_name) {
        for (set, figures) in score.decoders.get(decoder).into_iter().flat_map(|decoder| &decoder.benchmarks) {
            let speedup = figures.speedup.map_or(String::new(), |speedup| format!(", {speedup:.2}×"));
            words.push(format!(
                "{decoder} on {set} τ {:.2}, {:.1} tokens/s{speedup}",
                figures.tau_pooled, figures.tokens_per_second
            ));
        }
    }
    words.join("; ")
}
