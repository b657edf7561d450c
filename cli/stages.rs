//! The stages of a run in their order, and what is the same for each: skip when done, resume when cut short, refuse when changed.

mod evaluate;
mod prune;
mod regenerate;
mod report;
mod train;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::ValueEnum;
use configs::Recipe;
use data::manifest::{Manifest, Standing, standing};
use torch::group::Group;
use torch::tch::Device;

use crate::folder::{RunFolder, inputs, is_complete};
use crate::models::{Text, check_shapes};
use crate::progress::Progress;

/// A stage of a run; the order is the way of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Stage {
    Regenerate,
    Train,
    Prune,
    Evaluate,
}

impl Stage {
    pub(crate) const ALL: [Stage; 4] = [Stage::Regenerate, Stage::Train, Stage::Prune, Stage::Evaluate];

    /// The name in commands and manifests.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Stage::Regenerate => "regenerate",
            Stage::Train => "train",
            Stage::Prune => "prune",
            Stage::Evaluate => "evaluate",
        }
    }

    /// The folder's name within a run's.
    pub(crate) fn folder(self) -> &'static str {
        match self {
            Stage::Regenerate => "responses",
            Stage::Train => "train",
            Stage::Prune => "prune",
            Stage::Evaluate => "scores",
        }
    }

    /// The stage whose results this one reads.
    pub(crate) fn before(self) -> Option<Stage> {
        Self::ALL.into_iter().take_while(|&stage| stage != self).last()
    }
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Done,
    Interrupted,
}

/// What every stage gets.
pub(crate) struct Context<'a> {
    pub(crate) recipe: &'a Recipe,
    pub(crate) run: &'a RunFolder,
    pub(crate) progress: &'a Progress,
    pub(crate) stop: &'a AtomicBool,
    pub(crate) group: &'a Group,
    /// This rank's number on its machine.
    pub(crate) local_rank: usize,
    /// How many pieces of work the ranks have begun together.
    pub(crate) begun: &'a Cell<usize>,
    /// This stage's folder.
    pub(crate) folder: PathBuf,
    pub(crate) inputs: BTreeMap<String, String>,
}

impl Context<'_> {
    /// Writes the stage's manifest: cut short until `complete`.
    pub(crate) fn write_manifest(
        &self,
        stage: Stage,
        complete: bool,
        results: serde_json::Map<String, serde_json::Value>,
    ) -> anyhow::Result<()> {
        let manifest = Manifest { stage: stage.name().to_string(), complete, inputs: self.inputs.clone(), results };
        Ok(manifest.write(&self.folder)?)
    }

    /// The target's tokenizer and chat template, with the run's date.
    pub(crate) fn text(&self) -> anyhow::Result<Text> {
        let text = Text::load(&self.recipe.target.model)?;
        let date = self.run.date(&text.template.date())?;
        Ok(Text { template: text.template.with_date(&date)?, ..text })
    }

    /// Where this rank does its share: on the recipe's device when alone, else on one of its own of that kind.
    pub(crate) fn own_device(&self, named: &str) -> anyhow::Result<Device> {
        let device = torch::device(named)?;
        match device {
            Device::Cuda(_) if !self.group.is_alone() => Ok(torch::device(&format!("cuda:{}", self.local_rank))?),
            _ => Ok(device),
        }
    }

    /// Whether this is the rank that writes.
    pub(crate) fn leads(&self) -> bool {
        self.group.leads()
    }

    /// On rank 0, calls the others to `stage`, once everything they read is there; they wait for it in [`join`].
    pub(crate) fn begin_together(&self, stage: Stage) -> anyhow::Result<()> {
        if self.leads() && !self.group.is_alone() {
            self.group.announce(&announcement(self.begun), stage.name().as_bytes())?;
        }
        Ok(())
    }

    /// Whether the user asked to stop.
    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// What the ranks know each piece of common work by.
fn announcement(begun: &Cell<usize>) -> String {
    begun.set(begun.get() + 1);
    format!("work/{}", begun.get())
}

/// What rank 0 announces when nothing is left to do together.
const DONE: &[u8] = b"done";
const INTERRUPTED: &[u8] = b"interrupted";

/// Carries out `chosen` stages in order; the report follows the evaluation. Rank 0 does all of it; the others join in what is shared.
pub(crate) fn run(
    recipe: Recipe,
    chosen: &[Stage],
    restart: Option<Stage>,
    progress: &Progress,
    stop: &AtomicBool,
    (group, local_rank): (&Group, usize),
) -> anyhow::Result<Status> {
    let begun = Cell::new(0);
    let outcome = if group.leads() {
        lead(recipe, chosen, restart, progress, stop, (group, local_rank), &begun)
    } else {
        join(recipe, progress, stop, (group, local_rank), &begun)
    };
    if !group.is_alone() {
        match &outcome {
            Ok(_) if !group.leads() => {}
            Ok(Status::Done) => group.announce(&announcement(&begun), DONE)?,
            Ok(Status::Interrupted) => group.announce(&announcement(&begun), INTERRUPTED)?,
            // Whatever it is, the others hear of it from here.
            Err(error) => group.fail(&format!("{error:#}")),
        }
    }
    outcome
}

/// What a rank other than 0 does: whatever rank 0 calls it to.
fn join(
    mut recipe: Recipe,
    progress: &Progress,
    stop: &AtomicBool,
    (group, local_rank): (&Group, usize),
    begun: &Cell<usize>,
) -> anyhow::Result<Status> {
    let run = RunFolder::look_on(&recipe.name);
    loop {
        match group.await_announcement(&announcement(begun))?.as_slice() {
            DONE => return Ok(Status::Done),
            INTERRUPTED => return Ok(Status::Interrupted),
            name => {
                run.settle(&mut recipe);
                let stage = if name == Stage::Regenerate.name().as_bytes() { Stage::Regenerate } else { Stage::Train };
                let folder = run.path.join(stage.folder());
                if !folder.exists() {
                    anyhow::bail!(
                        "rank {} does not see `{}`, which rank 0 writes to; all ranks need the same file system and current folder",
                        group.rank(),
                        folder.display()
                    );
                }
                let inputs = BTreeMap::new();
                let context = Context { recipe: &recipe, run: &run, progress, stop, group, local_rank, begun, folder, inputs };
                if stage == Stage::Regenerate {
                    regenerate::join(&context)?;
                } else {
                    train::run(&context)?;
                }
            }
        }
    }
}

/// Scores the checkpoints of a run while another process makes them.
pub(crate) fn follow(mut recipe: Recipe, progress: &Progress, stop: &AtomicBool) -> anyhow::Result<Status> {
    check_shapes(&recipe)?;
    let run = RunFolder::look_on(&recipe.name);
    if !run.path.join("recipe.toml").exists() {
        let message = format!("there is no run `{}` here to follow; start it first", run.path.display());
        return Err(crate::BadRecipe(message).into());
    }
    if recipe.evaluate.benchmarks.is_empty() || recipe.evaluate.decoders.is_empty() {
        return Err(crate::BadRecipe("the recipe names no benchmark or no decoder to score with".to_string()).into());
    }
    run.settle(&mut recipe);
    let (begun, folder) = (Cell::new(0), run.path.join(Stage::Evaluate.folder()));
    let (recipe, group) = (&recipe, &Group::alone());
    evaluate::follow(&Context {
        recipe,
        run: &run,
        progress,
        stop,
        group,
        local_rank: 0,
        begun: &begun,
        folder,
        inputs: BTreeMap::new(),
    })
}

fn lead(
    mut recipe: Recipe,
    chosen: &[Stage],
    restart: Option<Stage>,
    progress: &Progress,
    stop: &AtomicBool,
    (group, local_rank): (&Group, usize),
    begun: &Cell<usize>,
) -> anyhow::Result<Status> {
    let run = RunFolder::open(&recipe.name)?;
    if let Some(stage) = restart {
        run.restart(stage)?;
    }
    run.settle(&mut recipe);
    let recipe = &recipe;
    let path = run.path.display();
    progress.note(&format!("run `{}` in {path}: the recipe with every default is in {path}/recipe.toml", recipe.name));
    for &stage in chosen {
        if let Some(before) = stage.before()
            && !is_complete(&run.path.join(before.folder()))
        {
            anyhow::bail!(
                "stage `{}` needs `{}` to be done first: drafthorse {} RECIPE",
                stage.name(),
                before.name(),
                before.name()
            );
        }
        let inputs = inputs(recipe, stage, &run)?;
        let folder = run.stage(stage)?;
        data::files::remove_temporaries(&folder)?;
        model::checkpoint::remove_partial(&folder)?;
        let manifest = match standing(&folder, stage.name(), &inputs)? {
            Standing::Complete(_) => {
                if stage == Stage::Regenerate {
                    regenerate::remove_work(&folder)?;
                }
                progress.note(&format!("{:>12} is done", stage.name()));
                continue;
            }
            Standing::Resume(manifest) => {
                progress.note(&format!("{:>12} goes on where it was", stage.name()));
                Some(manifest)
            }
            Standing::Fresh => None,
        };
        run.write_recipe(recipe)?;
        let context = Context { recipe, run: &run, progress, stop, group, local_rank, begun, folder, inputs };
        // What the ranks do not share, rank 0 does with all cores of its machine, which the launcher has divided among them.
        let share = torch::tch::get_num_threads();
        if !group.is_alone() && !matches!(stage, Stage::Regenerate | Stage::Train) {
            torch::set_num_threads(torch::available_cores());
        }
        let status = match stage {
            Stage::Regenerate => regenerate::run(&context, manifest.as_ref())?,
            Stage::Train => train::run(&context)?,
            Stage::Prune => prune::run(&context)?,
            Stage::Evaluate => evaluate::run(&context)?,
        };
        torch::tch::set_num_threads(share);
        if status == Status::Interrupted || context.stopping() && Some(&stage) != chosen.last() {
            return Ok(Status::Interrupted);
        }
    }
    if chosen.contains(&Stage::Evaluate) {
        report::write(recipe, &run, progress)?;
    }
    Ok(Status::Done)
}
