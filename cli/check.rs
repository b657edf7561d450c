//! `drafthorse check`: the recipe as it resolves, and what carrying it out takes.

use configs::Recipe;
use model::ModelConfig;
use torch::tch::Kind;

use crate::models::{check_shapes, faster_dtype, initial_layers, kind, kind_name, layers_to_remove};

/// Validates against the models' shapes and prints the resolved recipe and the plan on stdout.
pub(crate) fn check(mut recipe: Recipe) -> anyhow::Result<()> {
    let (target, init) = check_shapes(&recipe)?;
    recipe.settle_dtypes("", faster_dtype);
    let recipe = &recipe;
    let depth = initial_layers(recipe, init.num_hidden_layers)?.len();
    let drafter = ModelConfig { num_hidden_layers: depth, ..init };
    let (target_kind, drafter_kind) = (kind(recipe.target.dtype), kind(recipe.drafter.dtype));
    print!("{}", recipe.to_toml());
    println!("\n# Plan");
    println!("# target: {}", describe(&target, target_kind));
    println!("# drafter: {}", describe(&drafter, drafter_kind));
    let train = &recipe.train;
    let block_rows = train.batch_responses.saturating_mul(train.anchors).saturating_mul(recipe.drafter.block_size);
    println!(
        "# training: {} steps, up to {} clean tokens and {block_rows} block rows a step",
        train.steps,
        train.batch_responses * recipe.data.max_tokens
    );
    let parameters = count(&drafter);
    let copy = if drafter_kind == Kind::Float { 0 } else { parameters * drafter_kind.elt_size_in_bytes() as u64 };
    let state = parameters * 16 + copy;
    println!(
        "# training state: {} (f32 masters, gradients and two moments, {} weights)",
        gigabytes(state),
        kind_name(drafter_kind)
    );
    let logits = train.chunk_rows as u64 * drafter.vocab_size as u64 * 4 * 3;
    println!("# logits of one chunk of {} rows, with their gradient: {}", train.chunk_rows, gigabytes(logits));
    println!(
        "# pruning: up to {} of {depth} layers, {} steps of recovery after each",
        layers_to_remove(recipe, depth),
        recipe.prune.recovery_steps
    );
    Ok(())
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
