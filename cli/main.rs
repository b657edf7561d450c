//! The `drafthorse` binary: one match on the subcommand.
//!
//! Progress goes to stderr, results to stdout. Exit codes: 0 done, 1 failed, 2 bad usage or recipe, 3 interrupted and resumable.

mod benchmarks;
mod check;
mod compare;
mod export;
mod folder;
mod generate;
mod inspect;
mod launch;
mod models;
mod progress;
mod stages;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use configs::Recipe;
use signal_hook::flag;
use torch::group::{Group, GroupError, Place};
use trainer::training::TrainError;

use crate::progress::{LogFormat, Progress};
use crate::stages::{Stage, Status};

/// Trains, prunes and scores diffusion drafters: small models that let a large one answer several times faster without changing a
/// token of its output.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// How progress is written to stderr.
    #[arg(long, global = true, value_enum, default_value = "text")]
    log_format: LogFormat,
}

const EXAMPLES: &str = "\
Start here:
  drafthorse run recipes/quickstart.toml                     everything, from prompts to a report
  drafthorse check recipes/quickstart.toml                   what it would do, and with how much memory
  drafthorse compare runs/quickstart                         its checkpoints side by side, with intervals
  drafthorse generate --help                                 then watch its drafter at work on a prompt of yours
  drafthorse export --help                                   and take it elsewhere

A stage that is done is skipped, one that was cut short goes on where it was, and one whose inputs changed is refused with the list
of what changed, unless --restart STAGE. Exit codes: 0 done, 1 failed, 2 bad usage or recipe, 3 interrupted and resumable; 130 ended
at once by a second Ctrl-C.";

#[derive(Subcommand)]
enum Command {
    /// Run all stages of a recipe: regenerate, train, prune, evaluate, then the report.
    Run {
        #[command(flatten)]
        recipe: RecipeArgs,
        /// Stop after this stage.
        #[arg(long, value_enum, value_name = "STAGE")]
        until: Option<Stage>,
        /// Throw away what this stage and those after it made, and do them again.
        #[arg(long, value_enum, value_name = "STAGE")]
        restart: Option<Stage>,
    },
    /// Let the target answer the prompts: the responses that a drafter is trained on.
    Regenerate(RecipeArgs),
    /// Train the drafter on the responses.
    Train(RecipeArgs),
    /// Remove the layers whose absence costs the least acceptance length, recovering after each by distillation.
    Prune(RecipeArgs),
    /// Score every checkpoint with the decoders and write the report.
    Evaluate {
        #[command(flatten)]
        recipe: RecipeArgs,
        /// Score the checkpoints of a run that another process is training, as they appear, until that process ends.
        #[arg(long)]
        follow: bool,
    },
    /// Validate a recipe, and print it resolved with what it needs. Loads no weights and writes nothing.
    Check(RecipeArgs),
    /// Answer a prompt, and show which tokens the drafter was right about.
    Generate(generate::GenerateArgs),
    /// Set scores side by side, with intervals, and a verdict only where the difference is significant.
    ///
    /// Every checkpoint of every run and score named gets a line for each benchmark and decoder: τ, tokens per second, speedup, hit rate,
    /// and whether its output is the target's. Below stands how far it is from the first, prompt by prompt.
    Compare(compare::CompareArgs),
    /// Write a checkpoint as a folder for `transformers`, with a model card, or as a GGUF file for llama.cpp.
    Export(export::ExportArgs),
    /// Print responses in words: how many and how long, and some of them with what training supervises marked.
    Inspect(inspect::InspectArgs),
    /// Start one process for each device, which then train together.
    Launch(launch::LaunchArgs),
}

#[derive(Args)]
struct RecipeArgs {
    /// The recipe, a TOML file; or the folder of a run, which holds its own. What it makes goes to runs/NAME below the current folder.
    recipe: PathBuf,
    /// Override one value, for example `--set train.steps=100`; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// An error that is the user's to mend in the recipe or on the command line: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct BadRecipe(pub(crate) String);

fn main() -> ExitCode {
    let cli = Cli::parse();
    torch::keep_freed_memory();
    // A launched rank hears of a second signal by the end of its launcher; it may get the first one twice, from both.
    let launched = match launch::end_with_launcher() {
        Ok(launched) => launched,
        Err(error) => {
            eprintln!("error: cannot watch for the end of the launcher: {error}");
            return ExitCode::from(1);
        }
    };
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // The second signal ends the process at once, for whoever cannot wait for the step to finish.
        let at_once =
            if launched { Ok(()) } else { flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop)).map(drop) };
        if let Err(error) = at_once.and_then(|()| flag::register(signal, Arc::clone(&stop))) {
            eprintln!("error: cannot watch for signals: {error}");
            return ExitCode::from(1);
        }
    }
    // A panic inside libtorch calls becomes an error at the edge of each step; the default hook would print it a second time.
    std::panic::set_hook(Box::new(|_| {}));
    let progress = Progress::new(cli.log_format);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| dispatch(&cli.command, &progress, &stop)));
    match outcome {
        Ok(Ok(code)) => ExitCode::from(code),
        Ok(Err(error)) => {
            progress.error(&format!("{error:#}"));
            let bad_usage = error.is::<configs::RecipeError>() || error.is::<BadRecipe>() || error.is::<launch::BadLaunch>();
            // The launcher is to name the rank that failed, not those that ended because of it.
            let because_of_another = launched
                && (error.downcast_ref::<TrainError>().is_some_and(TrainError::is_of_another_rank)
                    || error.downcast_ref::<GroupError>().is_some_and(GroupError::is_of_another_rank));
            ExitCode::from(match (bad_usage, because_of_another) {
                (true, _) => 2,
                (false, true) => launch::BECAUSE_OF_ANOTHER,
                (false, false) => 1,
            })
        }
        Err(panic) => {
            let message = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
            progress.error(&format!(
                "a defect in drafthorse: {}; please report it with the command",
                message.unwrap_or("no message")
            ));
            ExitCode::from(1)
        }
    }
}

/// Carries out a command and gives the exit code.
fn dispatch(command: &Command, progress: &Progress, stop: &AtomicBool) -> anyhow::Result<u8> {
    let one = |args: &RecipeArgs, stage| carry_out(args, &[stage], None, progress, stop);
    let status = match command {
        Command::Run { recipe, until, restart } => {
            let last = until.unwrap_or(Stage::Evaluate);
            let chosen: Vec<Stage> = Stage::ALL.into_iter().filter(|&stage| stage <= last).collect();
            carry_out(recipe, &chosen, *restart, progress, stop)?
        }
        Command::Regenerate(args) => one(args, Stage::Regenerate)?,
        Command::Train(args) => one(args, Stage::Train)?,
        Command::Prune(args) => one(args, Stage::Prune)?,
        Command::Evaluate { recipe, follow: false } => one(recipe, Stage::Evaluate)?,
        Command::Evaluate { recipe, follow: true } => stages::follow(load(recipe)?, progress, stop)?,
        Command::Check(args) => {
            check::check(load(args)?)?;
            Status::Done
        }
        Command::Generate(args) => return generate::generate(args, progress, stop),
        Command::Compare(args) => {
            compare::compare(args)?;
            Status::Done
        }
        Command::Export(args) => return export::export(args, progress, stop),
        Command::Inspect(args) => {
            inspect::inspect(args)?;
            Status::Done
        }
        Command::Launch(args) => {
            let devices = torch::tch::Cuda::device_count().max(0) as usize;
            return launch::launch(args, devices, progress, stop);
        }
    };
    match status {
        Status::Done => Ok(0),
        Status::Interrupted => {
            progress.note("interrupted; finished work is saved. Run the same command again to go on from there");
            Ok(3)
        }
    }
}

/// The recipe as typed on the command line.
fn load(args: &RecipeArgs) -> anyhow::Result<Recipe> {
    let path = if args.recipe.is_dir() { args.recipe.join("recipe.toml") } else { args.recipe.clone() };
    Ok(configs::load(&path, &args.set)?)
}

/// Carries out stages, together with the other ranks when this process was launched as one of several.
fn carry_out(
    args: &RecipeArgs,
    stages: &[Stage],
    restart: Option<Stage>,
    progress: &Progress,
    stop: &AtomicBool,
) -> anyhow::Result<Status> {
    let recipe = load(args)?;
    let place = Place::from_environment(|name| std::env::var(name).ok()).map_err(|error| BadRecipe(error.to_string()))?;
    // Before the ranks meet, so that each refuses the recipe by itself.
    models::check_shapes(&recipe)?;
    let (group, local_rank) = match place.filter(|place| place.world > 1) {
        Some(place) => {
            // One device a rank, whichever the recipe names.
            let cuda = recipe.devices.drafter.starts_with("cuda");
            let device = if cuda { format!("cuda:{}", place.local_rank) } else { recipe.devices.drafter.clone() };
            let timeout = Duration::from_secs(recipe.devices.timeout as u64);
            (Group::join(&place, torch::device(&device)?, timeout)?, place.local_rank)
        }
        None => (Group::alone(), 0),
    };
    stages::run(recipe, stages, restart, progress, stop, (&group, local_rank))
}
