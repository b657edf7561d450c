//! Every checkpoint decodes the benchmarks: how fast is the target with it, and is the output the same.

mod ahead;

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use configs::Recipe;
use data::manifest::{Manifest, Standing, standing};
use evaluator::benchmark::{Baseline, Benchmark, Plan, decoder_name, drafts_name, evaluate};
use evaluator::decode::{DecodeError, Settings};
use evaluator::fan_out::FanOut;
use evaluator::sampling::Sampler;
use evaluator::score::{Score, read_rounds, write_rounds};
use evaluator::simulated::add_simulated;
use model::Transformer;
use model::checkpoint::{BEST, LATEST};
use serde_json::{Map, json};
use trainer::saving::{saved_steps, step_name};
use trainer::training::drafter_of;

use self::ahead::Ahead;
use super::prune::pruned_checkpoints;
use super::{Context, Stage, Status};
use crate::benchmarks::{choose, conversations};
use crate::folder::{inputs, name_of};
use crate::models::{self, Text};

/// Where what the target does alone is kept, measured once for many checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BaselineOf {
    /// The stage `evaluate`, which has the machine for itself.
    Stage,
    /// Scoring beside training, where the target is slower: its times mean nothing to the stage.
    Beside,
}

impl BaselineOf {
    fn file(self) -> &'static str {
        match self {
            Self::Stage => "autoregressive.baseline",
            Self::Beside => "autoregressive.beside-training.baseline",
        }
    }

    /// What budgets came to.
    fn budgets_file(self) -> &'static str {
        match self {
            Self::Stage => "budgets.measured",
            Self::Beside => "budgets.beside-training.measured",
        }
    }
}

/// How often a run is looked at for new checkpoints.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(2);

/// Scores the untrained, the best, the last and every pruned checkpoint that has no score yet.
pub(super) fn run(context: &Context<'_>) -> anyhow::Result<Status> {
    let recipe = context.recipe;
    context.write_manifest(Stage::Evaluate, false, Map::new())?;
    if recipe.evaluate.benchmarks.is_empty() || recipe.evaluate.decoders.is_empty() {
        context.progress.note(&format!("{:>12} no benchmark or no decoder in the recipe", "evaluate"));
        context.write_manifest(Stage::Evaluate, true, Map::new())?;
        return Ok(Status::Done);
    }
    let checkpoints = checkpoints(context)?;
    let Some(scorer) = Scorer::new(context, BaselineOf::Stage)? else { return Ok(Status::Interrupted) };
    for folder in &checkpoints {
        if scorer.score(context, folder)? == Status::Interrupted {
            return Ok(Status::Interrupted);
        }
    }
    let mut results = Map::new();
    results.insert("scores".to_string(), json!(scored_names(context, &checkpoints)));
    context.write_manifest(Stage::Evaluate, true, results)?;
    Ok(Status::Done)
}

/// Scores the checkpoints of a run that another process is training, as they appear, until that process ends.
///
/// It leaves the run's lock alone and reads its folders only; scores go where the stage `evaluate` finds them later.
pub(super) fn follow(context: &Context<'_>) -> anyhow::Result<Status> {
    let Some(scorer) = Scorer::new(context, BaselineOf::Beside)? else { return Ok(Status::Interrupted) };
    context.progress.note(&format!("{:>12} following {}", "evaluate", context.run.path.display()));
    loop {
        // Asked first, so that what was written before the other process ended is still seen.
        let ended = !context.run.is_in_use()?;
        let train = context.run.path.join(Stage::Train.folder());
        let prune = context.run.path.join(Stage::Prune.folder());
        let trained = saved_steps(&train).into_iter().map(|step| train.join(step_name(step)));
        let all: Vec<PathBuf> = trained.chain(pruned_checkpoints(context).into_iter().map(|name| prune.join(name))).collect();
        for folder in all {
            match scorer.score(context, &folder) {
                Ok(Status::Interrupted) => return Ok(Status::Interrupted),
                Ok(Status::Done) => {}
                // Training clears old checkpoints away, maybe while they are being read.
                Err(_) if !folder.exists() => {
                    let name = name_of(&folder);
                    context.progress.note(&format!("{:>12} {name} was cleared away before it could be scored", "evaluate"));
                }
                Err(error) => return Err(error),
            }
        }
        if ended {
            context.progress.note(&format!("{:>12} no process works on the run any more: all is scored", "evaluate"));
            return Ok(Status::Done);
        }
        let waited = Instant::now();
        while waited.elapsed() < FOLLOW_INTERVAL {
            if context.stopping() {
                return Ok(Status::Interrupted);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// What scoring needs, loaded once: the target and the benchmarks.
pub(super) struct Scorer {
    target: Transformer,
    benchmarks: Vec<Benchmark>,
    settings: Settings,
    folder: PathBuf,
    baselines: PathBuf,
    ahead: Ahead,
}

impl Scorer {
    /// Refuses scores that were made by another recipe. `None` when the user asked to stop while another process was scoring.
    pub(super) fn new(context: &Context<'_>, baseline: BaselineOf) -> anyhow::Result<Option<Self>> {
        let recipe = context.recipe;
        let folder = context.run.stage(Stage::Evaluate)?;
        let Some(lock) = lock(context, &folder)? else { return Ok(None) };
        let inputs = inputs(recipe, Stage::Evaluate, context.run)?;
        let stage = Stage::Evaluate.name();
        if let Standing::Fresh = standing(&folder, stage, &inputs)? {
            Manifest { stage: stage.to_string(), complete: false, inputs, results: Map::new() }.write(&folder)?;
        }
        drop(lock);
        let text = Rc::new(context.text()?);
        let target = models::target(recipe)?;
        let settings = settings(recipe, &target);
        let baselines = folder.join(baseline.file());
        let ahead = Ahead::new(folder.join(baseline.budgets_file()));
        Ok(Some(Self { benchmarks: benchmarks(context, &text)?, target, settings, folder, baselines, ahead }))
    }

    /// Scores one checkpoint unless it has a score already.
    pub(super) fn score(&self, context: &Context<'_>, checkpoint: &Path) -> anyhow::Result<Status> {
        let recipe = context.recipe;
        let name = name_of(checkpoint);
        let score_path = self.folder.join(format!("{name}.json"));
        if score_path.exists() {
            return Ok(Status::Done);
        }
        // For one checkpoint at a time: a process that follows a run and the run itself take turns.
        let Some(_lock) = lock(context, &self.folder)? else { return Ok(Status::Interrupted) };
        if score_path.exists() {
            return Ok(Status::Done);
        }
        let baselines_path = &self.baselines;
        let mut baselines: BTreeMap<String, Baseline> = match fs::read(baselines_path) {
            Ok(bytes) => {
                serde_json::from_slice(&bytes).with_context(|| format!("`{}` is damaged; remove it", baselines_path.display()))?
            }
            Err(_) => BTreeMap::new(),
        };
        let (model, file) = models::load_drafter(recipe, checkpoint)?;
        if file.thinking != recipe.target.thinking {
            anyhow::bail!(
                "`{}` was trained with thinking = {}, the recipe says {}",
                checkpoint.display(),
                file.thinking,
                recipe.target.thinking
            );
        }
        let shape = models::block_shape(recipe);
        let mut drafter = drafter_of(&model, shape);
        let ahead = self.ahead.of(context, (&name, &mut drafter), &self.target, &self.benchmarks, &self.settings)?;
        let settings = Settings { fan_out: ahead.fan_out, ..self.settings.clone() };
        if context.stopping() {
            return Ok(Status::Interrupted);
        }
        let bar = context.progress.bar(&name, 1);
        let mut length = 0;
        let mut show = |done: usize, of: usize| {
            if length != of {
                length = of;
                bar.set_length(of);
            }
            bar.set(done, "texts decoded");
        };
        let plan = Plan { benchmarks: &self.benchmarks, decoders: &recipe.evaluate.decoders, settings: &settings };
        let outcome = evaluate(&self.target, Some(&mut drafter), plan, &mut baselines, &mut show, context.stop);
        data::files::write_atomically(baselines_path, &serde_json::to_vec(&baselines)?)?;
        let evaluation = match outcome {
            Err(DecodeError::Stopped) => return Ok(Status::Interrupted),
            outcome => outcome?,
        };
        let mut score = Score {
            checkpoint: name.clone(),
            kind: file.kind,
            target: name_of(recipe.target.model.as_ref()),
            thinking: Some(recipe.target.thinking),
            dtype: models::kind_name(self.target.kind()).to_string(),
            drafter_dtype: models::kind_name(model.kind()).to_string(),
            block_size: shape.block_size,
            layers: file.layers,
            parameters: Some(model.named_parameters().iter().map(|(_, tensor)| tensor.numel() as u64).sum()),
            fan_out: match &ahead.budget {
                Some(budget) => format!("{} ({})", settings.fan_out, budget.asked),
                None => settings.fan_out.to_string(),
            },
            budget: ahead.budget,
            calibration: ahead.calibration,
            hit_rate_by_blocks: ahead.hit_rate_by_blocks,
            concurrency: self.settings.concurrency,
            temperature: self.settings.sampler.temperature,
            sampling: sampling(&self.settings),
            drafts: drafts_name(self.settings.drafts).to_string(),
            decoders: evaluation.decoders,
        };
        add_simulated(&mut score, &evaluation.rounds, &recipe.evaluate.hardware)?;
        write_rounds(&self.folder.join(format!("{name}.rounds.parquet")), &evaluation.rounds)?;
        score.write(&score_path)?;
        drop(bar);
        context.progress.note(&format!("{:>12} {name}: {}", "evaluate", summary(&score)));
        Ok(Status::Done)
    }
}

/// How a recipe decodes benchmarks, but for the fan-out, of which each drafter gets its own.
pub(super) fn settings(recipe: &Recipe, target: &Transformer) -> Settings {
    Settings {
        sampler: Sampler {
            temperature: recipe.evaluate.temperature,
            top_p: recipe.evaluate.top_p,
            top_k: recipe.evaluate.top_k,
            seed: recipe.seed,
        },
        stop_tokens: target.config.eos_token_id.clone(),
        max_new_tokens: recipe.evaluate.max_new_tokens,
        concurrency: recipe.evaluate.concurrency,
        fan_out: FanOut::BestFirst { blocks: 0 },
        drafts: recipe.evaluate.drafts,
    }
}

/// Brings what a score on disk simulates in line with the recipe's hardware, from the rounds that lie beside it. Decoding them again for
/// another profile would give the same.
pub(super) fn simulate(folder: &Path, name: &str, profiles: &[configs::Hardware]) -> anyhow::Result<()> {
    let path = folder.join(format!("{name}.json"));
    let before = Score::read(&path)?;
    let mut score = before.clone();
    let rounds = if profiles.is_empty() { Vec::new() } else { read_rounds(&folder.join(format!("{name}.rounds.parquet")))? };
    add_simulated(&mut score, &rounds, profiles)?;
    if score != before {
        score.write(&path)?;
    }
    Ok(())
}

/// Takes the lock of the folder of scores, waiting while another process has it; `None` when the user asked to stop meanwhile.
fn lock(context: &Context<'_>, folder: &Path) -> anyhow::Result<Option<File>> {
    let path = folder.join(".lock");
    let file = File::create(&path).with_context(|| format!("cannot write `{}`", path.display()))?;
    let mut told = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::WouldBlock) if context.stopping() => return Ok(None),
            Err(TryLockError::WouldBlock) => {
                if !told {
                    context
                        .progress
                        .note(&format!("{:>12} another process scores a checkpoint of this run; waiting", "evaluate"));
                    told = true;
                }
                std::thread::sleep(Duration::from_millis(200));
            }
            Err(TryLockError::Error(error)) => return Err(error).with_context(|| format!("cannot lock `{}`", path.display())),
        }
    }
}

/// The untrained checkpoint, the best and the last of training, and the pruned ones.
fn checkpoints(context: &Context<'_>) -> anyhow::Result<Vec<PathBuf>> {
    let train = context.run.path.join(Stage::Train.folder());
    let prune = context.run.path.join(Stage::Prune.folder());
    let linked = |link: &str| fs::canonicalize(train.join(link)).map(|folder| train.join(name_of(&folder)));
    let latest = linked(LATEST).context("no trained checkpoint; run the stage `train` first")?;
    let mut checkpoints = vec![train.join(step_name(0))];
    checkpoints.extend(linked(BEST).ok().filter(|best| *best != latest));
    checkpoints.push(latest);
    checkpoints.extend(pruned_checkpoints(context).into_iter().map(|name| prune.join(name)));
    Ok(checkpoints)
}

/// The names of all scores: of `checkpoints`, and of those that were scored while training and are gone since, in the order of training.
fn scored_names(context: &Context<'_>, checkpoints: &[PathBuf]) -> Vec<String> {
    let entries = fs::read_dir(&context.folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".json")?.to_string()))
        .filter(|name| name.starts_with("step-"))
        .collect();
    names.sort_unstable();
    let others = checkpoints.iter().map(|folder| name_of(folder)).filter(|name| !name.starts_with("step-"));
    names.into_iter().chain(others).collect()
}

/// The benchmarks as their conversations.
fn benchmarks(context: &Context<'_>, text: &Rc<Text>) -> anyhow::Result<Vec<Benchmark>> {
    let recipe = context.recipe;
    let mut benchmarks = Vec::new();
    for benchmark in &recipe.evaluate.benchmarks {
        let chosen = choose(benchmark, recipe.evaluate.limit, recipe.seed)?;
        context.progress.note(&format!("{:>12} {}: {}", "evaluate", benchmark.name, chosen.describe(benchmark)));
        benchmarks.push(conversations(&benchmark.name, chosen, text, recipe.target.thinking)?);
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

/// How tokens are chosen beside the temperature, and how many, as far as it changes what is measured.
fn sampling(settings: &Settings) -> String {
    let Sampler { temperature, top_p, top_k, .. } = &settings.sampler;
    let chosen = if *temperature > 0.0 { format!("top-p {top_p}, top-k {top_k}, ") } else { String::new() };
    format!("{chosen}at most {} new tokens", settings.max_new_tokens)
}
