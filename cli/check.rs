//! `drafthorse check`: the recipe as it resolves, and what carrying it out takes.

use configs::{Objective, Recipe, Stop};
use model::ModelConfig;
use torch::tch::Kind;
use trainer::training::state_bytes;

use crate::benchmarks::choose;
use crate::models::{check_shapes, faster_dtype, initial_layers, kind, kind_name, layers_to_remove};
use crate::progress::to_stdout;

/// Validates against the models' shapes and prints the resolved recipe and the plan on stdout.
pub(crate) fn check(mut recipe: Recipe) -> anyhow::Result<()> {
    let (target, init) = check_shapes(&recipe)?;
    recipe.settle_dtypes("", faster_dtype);
    let recipe = &recipe;
    let depth = initial_layers(recipe, init.num_hidden_layers)?.len();
    let drafter = ModelConfig { num_hidden_layers: depth, ..init };
    let (target_kind, drafter_kind) = (kind(recipe.target.dtype), kind(recipe.drafter.dtype));
    let mut text = recipe.to_toml();
    text += "\n# Plan\n";
    text += &format!("# target: {}\n", describe(&target, target_kind));
    text += &format!("# drafter: {}\n", describe(&drafter, drafter_kind));
    let train = &recipe.train;
    let (clean, responses) = match (train.batch_responses, train.batch_tokens) {
        // The last response may reach beyond.
        (_, Some(tokens)) => (tokens + recipe.data.max_tokens - 1, format!("{tokens} clean tokens")),
        (responses, None) => {
            let responses = responses.unwrap_or(1);
            (
                responses.saturating_mul(recipe.data.max_tokens),
                format!("{responses} responses of up to {} tokens", recipe.data.max_tokens),
            )
        }
    };
    text += &format!(
        "# training: {} steps of {responses}, {} blocks of {} in each response; up to {clean} clean tokens a step, in forwards of up to {} rows \
         (a longer response has one of its own)\n",
        train.steps, train.anchors, recipe.drafter.block_size, train.forward_rows
    );
    let state = |ranks| gigabytes(state_bytes(&drafter, ranks));
    text += &format!(
        "# training state: {} on one device, {} on each of two, {} on each of eight (f32 masters, gradients and two moments)\n",
        state(1),
        state(2),
        state(8)
    );
    let copy = count(&drafter) * drafter_kind.elt_size_in_bytes() as u64;
    text += &format!(
        "# beside it on each device, at replays and saves: the whole drafter in {}, {}\n",
        kind_name(drafter_kind),
        gigabytes(copy)
    );
    let teachers = if train.objective == Objective::Tokens { 1 } else { 2 };
    let logits = train.chunk_rows as u64 * drafter.vocab_size as u64 * 4 * teachers;
    text +=
        &format!("# logits of one chunk of {} rows, whose gradient takes their place: {}\n", train.chunk_rows, gigabytes(logits));
    text += &format!(
        "# pruning: up to {} of {depth} layers, {} steps of recovery after each{}{}\n",
        layers_to_remove(recipe, depth),
        recipe.prune.recovery_steps,
        if recipe.prune.stop == Stop::Speed { ", until the predicted speed no longer rises" } else { "" },
        if recipe.prune.swap { "; then a swap, and its recovery" } else { "" }
    );
    for benchmark in &recipe.evaluate.benchmarks {
        let chosen = choose(benchmark, recipe.evaluate.limit, recipe.seed)?;
        let set =
            benchmark.preset.map(|preset| format!(": {} of `{}`, licence {}", preset.title, preset.dataset, preset.licence));
        let from = format!("{}{}", benchmark.path.display(), set.unwrap_or_default());
        text += &format!("# benchmark {}: {}; from {from}\n", benchmark.name, chosen.describe(benchmark));
    }
    to_stdout(&text)
}

fn describe(config: &ModelConfig, kind: Kind) -> String {
    let parameters = count(config);
    format!(
        "{} with {} layers, {:.1} M parameters, {} in {}",
        config.model_type,
        config.num_hidden_layers,
        parameters as f64 / 1e6,
        gigabytes(parameters * kind.elt_size_in_bytes() as u64),
        kind_name(kind)
    )
}

fn count(config: &ModelConfig) -> u64 {
    config.parameter_shapes().iter().map(|(_, shape)| shape.iter().product::<i64>() as u64).sum()
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.2} GB", bytes as f64 / 1e9)
}
