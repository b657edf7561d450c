//! The recipe as validated: every value present and possible, every path absolute. Field names are the recipe's keys.

use std::fmt::{Display, Formatter};
use std::path::PathBuf;

use serde::{Deserialize, Serialize, Serializer};

use crate::Hardware;
use crate::benchmarks::Preset;

/// A whole run, ready to be carried out.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Recipe {
    /// Names the run's folder: letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// The seed of every random draw.
    pub seed: u64,
    pub target: Target,
    pub drafter: Drafter,
    pub data: Data,
    pub regenerate: Regenerate,
    pub train: Train,
    pub prune: Prune,
    pub evaluate: Evaluate,
    pub devices: Devices,
    /// The file this was loaded from, as it was given; not part of the recipe's text.
    #[serde(skip)]
    pub file: PathBuf,
}

/// The model whose output must not change.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Target {
    /// An absolute path to a folder or `.gguf` file, or a hub id.
    pub model: String,
    /// The branch, tag or commit of a hub id.
    pub revision: String,
    pub dtype: Dtype,
    /// Whether the chat template asks for thinking; stored in every artefact.
    pub thinking: bool,
}

/// The model that proposes blocks of tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Drafter {
    pub kind: DrafterKind,
    /// The pretrained weights it starts from: an absolute path to a folder or `.gguf` file, or a hub id.
    pub init: String,
    /// The layers of `init` to keep, ascending; all when this and `keep_layers` are absent.
    pub layers: Option<Vec<usize>>,
    /// How many layers of `init` to keep, spread evenly; never together with `layers`.
    pub keep_layers: Option<usize>,
    /// Whether only the shape of `init` is taken, and its weights are forgotten.
    pub from_scratch: bool,
    /// Tokens a block holds, the anchor included; at least 2.
    pub block_size: usize,
    pub dtype: Dtype,
    pub labels: Labels,
    pub anchor_sees: AnchorSees,
    /// The token id that stands for a token still to be proposed.
    pub mask_token: u32,
    /// Whether a head that is tied to the embedding becomes its own parameter.
    pub untie_head: bool,
}

/// The prompts, and how they are split.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Data {
    /// Prompt files, absolute, globs expanded; no file twice.
    pub prompts: Vec<PathBuf>,
    /// The most tokens that prompt and response may have together.
    pub max_tokens: usize,
    /// The fraction of responses kept from training, at least 0 and less than 1.
    pub holdout: f64,
    /// Use only so many of the prompts, drawn by seed and id.
    pub limit: Option<usize>,
    /// The fraction of prompt rows that may be rejected; more is an error.
    pub max_rejected: f64,
    /// What becomes of responses that were cut off at the limit of new tokens.
    pub truncated: Truncated,
}

/// What becomes of a response that was cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncated {
    /// It is trained on as far as it goes.
    Keep,
    /// It is left out of training and of what is held out.
    Drop,
}

/// How the target writes its responses.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Regenerate {
    pub engine: Engine,
    /// The addresses of the servers that answer, none of them twice; empty with the built-in engine.
    pub endpoints: Vec<String>,
    /// The name that the servers have for the target; absent: the only one that they list.
    pub server_model: Option<String>,
    /// Requests under way at one time, at each server.
    pub concurrency: usize,
    /// Seconds that one request to a server may take.
    pub timeout: usize,
    /// How often a question is asked again when servers fail at it in a way that may pass.
    pub retries: usize,
    /// 0 is greedy.
    pub temperature: f64,
    pub top_p: f64,
    /// 0 leaves the vocabulary whole.
    pub top_k: usize,
    pub max_new_tokens: usize,
    /// Responses that the built-in engine writes at once; when absent, as many as there is room for, within reason.
    pub batch_rows: Option<usize>,
}

/// Who writes the responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// The target, loaded by this program.
    Builtin,
    /// Servers of OpenAI's protocol that have the target.
    Server,
}

/// How the drafter is trained.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Train {
    /// Anchors drawn from a response each epoch.
    pub anchors: usize,
    /// The decay of the position weights exp(-j / gamma).
    pub gamma: f64,
    /// The weight of the next-token loss beside the block loss.
    pub ar_weight: f64,
    pub objective: Objective,
    pub position_weights: PositionWeights,
    /// The α of D-PACE: how far a slot counts whatever comes before it, from 0 to 1. Used with `position_weights = "d_pace"` alone.
    pub pace_alpha: f64,
    /// The peak of the schedule.
    pub learning_rate: f64,
    /// The peak for the mask token's embedding row, which has to find its place from nothing.
    pub mask_learning_rate: f64,
    pub steps: usize,
    /// Responses of a step, over all devices; this or `batch_tokens`, never both.
    pub batch_responses: Option<usize>,
    /// Responses of a step: as many as reach so many tokens, blocks not counted, over all devices.
    pub batch_tokens: Option<usize>,
    /// The most rows (tokens and block slots) of one forward; a larger share of a step is done in several, their gradients summed.
    pub forward_rows: usize,
    pub schedule: Schedule,
    /// The fraction of the steps over which the learning rate rises.
    pub warmup: f64,
    /// The fraction of the steps over which it falls at the end. Used with `schedule = "wsd"` alone.
    pub decay: f64,
    /// The learning rate at the last step, as a fraction of the peak.
    pub minimum_learning_rate: f64,
    pub weight_decay: f64,
    pub beta1: f64,
    pub beta2: f64,
    /// The largest norm of the gradient.
    pub clip: f64,
    /// Rows of logits computed at once.
    pub chunk_rows: usize,
    /// Whether layers run again in the backward to save memory.
    pub recompute: bool,
    pub save_every: usize,
    pub evaluate_every: usize,
    /// Held-out responses that each of these evaluations replays.
    pub evaluate_responses: usize,
    /// Checkpoints kept, the newest ones; the one with the best tau stays besides.
    pub keep_last: usize,
}

/// How layers are removed and the drafter recovers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prune {
    /// Layers to remove; absent: as many as `keep_tau` and `min_layers` allow. 0 when the recipe has no such section.
    pub remove: Option<usize>,
    /// Never fewer layers than these.
    pub min_layers: usize,
    /// The fraction of the unpruned drafter's tau that has to stay; absent: any.
    pub keep_tau: Option<f64>,
    /// What ends it beside `keep_tau` and `min_layers`.
    pub stop: Stop,
    /// Whether, at the end, a removed layer is put back and another taken out, and the result kept if its tau is better.
    pub swap: bool,
    /// Steps of recovery after each removal.
    pub recovery_steps: usize,
    pub learning_rate: f64,
    pub ar_weight: f64,
    /// By how much the right token's logit leads in the corrected teacher.
    pub margin: f64,
    /// The temperature of the distillation.
    pub temperature: f64,
    /// What tells which layer goes.
    pub criterion: Criterion,
    /// Held-out responses that a layer's worth is measured on.
    pub responses: usize,
    /// Anchors in each of these responses.
    pub anchors: usize,
}

/// How checkpoints are scored.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Evaluate {
    pub benchmarks: Vec<Benchmark>,
    /// Where the local copies of benchmarks named by a preset are: NAME.jsonl in this absolute folder.
    pub benchmark_folder: Option<PathBuf>,
    pub decoders: Vec<Decoder>,
    /// Which outcomes of a verification are drafted ahead.
    pub fan_out: FanOut,
    /// Rejection positions that have continuations in a rectangle.
    pub positions: usize,
    /// Continuations a rejection position has in a rectangle.
    pub candidates: usize,
    /// The most continuations of a round where they are not a rectangle, whose size `positions` and `candidates` give; then absent.
    pub budget: Option<Budget>,
    /// Texts decoded side by side.
    pub concurrency: usize,
    /// Score on so many prompts of each benchmark, drawn by the seed, in proportion from the categories where it has some; absent: on all.
    pub limit: Option<usize>,
    /// Steps of training after which a checkpoint is scored at once; absent: checkpoints are scored after training.
    pub every: Option<usize>,
    pub max_new_tokens: usize,
    /// 0 is greedy.
    pub temperature: f64,
    pub top_p: f64,
    /// 0 leaves the vocabulary whole.
    pub top_k: usize,
    /// Machines on which the rounds that happened are timed by a simulated clock; only for texts decoded one at a time.
    pub hardware: Vec<Hardware>,
    /// How drafted tokens are chosen; `sampled` needs a temperature above 0.
    pub drafts: Drafts,
}

/// Prompts to score on; written in a recipe as the preset's name, or as the path of a file of one's own.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(into = "PathBuf")]
pub struct Benchmark {
    /// The preset's name, else the file's without its extension.
    pub name: String,
    /// The local file, absolute.
    pub path: PathBuf,
    /// What is known of the set, where the recipe names one that is known.
    pub preset: Option<&'static Preset>,
}

impl From<Benchmark> for PathBuf {
    fn from(benchmark: Benchmark) -> Self {
        benchmark.preset.map_or(benchmark.path, |preset| PathBuf::from(&preset.name))
    }
}

/// Where the models run: `cpu` or `cuda:N`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Devices {
    pub target: String,
    pub drafter: String,
    /// Seconds that one process waits for another in an exchange before it gives up.
    pub timeout: usize,
}

/// What a model computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// bf16 on GPUs and on CPUs that multiply bf16 matrices faster, else f32. [`Recipe::settle_dtypes`] puts the one in its place.
    Auto,
    F32,
    Bf16,
}

/// What the anchor of a block attends to besides itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AnchorSees {
    /// What precedes it, and the masks of its block, as published.
    Block,
    /// Only what precedes it, as the same token in the text does. With labels `next` its prediction is then the initial model's own.
    Prefix,
}

/// How drafted tokens are chosen, and with that how they are verified. Both ways leave the target's distribution as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Drafts {
    /// The drafter's likeliest tokens; kept while the target chooses the same.
    Point,
    /// Drawn from the drafter's distributions; kept by the rejection rule.
    Sampled,
}

/// What is measured of every layer to choose the one that goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Criterion {
    /// How much acceptance length falls without it.
    Tau,
    /// How little it turns its input: 1 less the cosine of input and output.
    BlockInfluence,
    /// How much the drafter's loss on the responses, as a language model, rises without it.
    LanguageModelLoss,
}

/// What ends pruning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// Too little acceptance length left.
    Tau,
    /// The predicted speed of decoding, from tau, hit rate and measured times, stops rising.
    Speed,
}

/// Which token a slot of a block predicts: slot j the token at anchor + j, or the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Labels {
    InPlace,
    Next,
}

/// What the drafter's predictions are trained towards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// The tokens of the responses.
    Tokens,
    /// The target's distribution after each token of the responses, by forward KL divergence; the target is in memory while training.
    Target,
    /// The same by total variation, which is the share of sampled drafts that verification would refuse.
    TargetVariation,
}

/// How the slots of a block share its loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PositionWeights {
    /// exp(-j / gamma), as published.
    Exponential,
    /// By how many tokens are kept when the slot is right, as the drafter is now (arXiv 2605.18810).
    DPace,
}

/// How the learning rate moves after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    Constant,
    Linear,
    Cosine,
    /// Warm-up, stable, decay: constant until the last `decay` of the steps, then linear.
    Wsd,
}

/// What a drafter is built like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DrafterKind {
    D3d,
}

/// Which outcomes of a verification are drafted ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FanOut {
    /// The best candidates at each of the first positions, as published.
    Rectangle,
    /// The likeliest outcomes by the drafter's own probabilities.
    BestFirst,
    /// Fewer from position to position, by the drafter's acceptance alone.
    Geometric,
}

/// How many continuations a round may have; written in a recipe as a number, `"auto"`, or a time such as `"8 ms"`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    Blocks(usize),
    /// As many as are written while the target verifies, as measured on the machine.
    Auto,
    /// As many as are written in so many milliseconds, as measured on the machine.
    Milliseconds(f64),
}

impl Budget {
    /// From what stands in a recipe as a string.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        if text == "auto" {
            return Some(Self::Auto);
        }
        let number: f64 = text.strip_suffix("ms")?.trim_end().parse().ok()?;
        number.is_finite().then_some(Self::Milliseconds(number))
    }
}

/// As in a recipe, without quotes.
impl Display for Budget {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Blocks(blocks) => write!(formatter, "{blocks}"),
            Self::Auto => write!(formatter, "auto"),
            Self::Milliseconds(milliseconds) => write!(formatter, "{milliseconds} ms"),
        }
    }
}

impl Serialize for Budget {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Blocks(blocks) => serializer.serialize_u64(*blocks as u64),
            Self::Auto | Self::Milliseconds(_) => serializer.collect_str(self),
        }
    }
}

/// How drafter and target take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Decoder {
    Autoregressive,
    Lockstep,
    Asynchronous,
}

impl Recipe {
    /// The resolved recipe: every field with its value. Loading it gives an equal recipe, but for `file`.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_else(|error| unreachable!("a validated recipe holds only what TOML can: {error}"))
    }

    /// Replaces every `dtype = "auto"`: by what an earlier resolved recipe of the same run has there (`stored`, empty when there is
    /// none), else by `choose` for the model's device. A run keeps its choice, so that it resumes as it began.
    pub fn settle_dtypes(&mut self, stored: &str, choose: impl Fn(&str) -> Dtype) {
        let stored = stored.parse::<toml::Table>().unwrap_or_default();
        let models = [
            ("target", &mut self.target.dtype, &self.devices.target),
            ("drafter", &mut self.drafter.dtype, &self.devices.drafter),
        ];
        for (section, dtype, device) in models {
            if *dtype == Dtype::Auto {
                *dtype = match stored.get(section).and_then(|section| section.get("dtype")).and_then(toml::Value::as_str) {
                    Some("f32") => Dtype::F32,
                    Some("bf16") => Dtype::Bf16,
                    _ => choose(device),
                };
            }
        }
    }

    /// The fields of one section as (key path, value in TOML), in the recipe's order; of a key outside all sections, its
    /// own. Fields that are absent are left out, and an unknown name gives nothing.
    pub fn section(&self, name: &str) -> Vec<(String, String)> {
        let tree = toml::Table::try_from(self)
            .unwrap_or_else(|error| unreachable!("a validated recipe holds only what TOML can: {error}"));
        match tree.get(name) {
            Some(toml::Value::Table(section)) => {
                section.iter().map(|(key, value)| (format!("{name}.{key}"), value.to_string())).collect()
            }
            Some(value) => vec![(name.to_string(), value.to_string())],
            None => Vec::new(),
        }
    }
}
