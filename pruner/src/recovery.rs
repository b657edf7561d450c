//! Recovery: the trainer's loop, with the unpruned drafter as the teacher.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use model::Transformer;
use model::checkpoint::{self, DrafterFile};
use torch::group::Group;
use trainer::backward::Objective;
use trainer::metrics::MetricSink;
use trainer::saving::{Output, step_name};
use trainer::training::{Ending, Plan, Training, train};
use trainer::watching::{StepReport, Watch};

use crate::pruning::{Context, Progress, PruneError, Settings, cannot_write};

/// What recovers, and where to.
pub(crate) struct Recovery<'a> {
    pub start: &'a Transformer,
    /// Describes the checkpoint that it becomes.
    pub drafter: DrafterFile,
    /// The folder's name while it runs, and its metrics'.
    pub name: String,
    /// The checkpoint's folder, which appears whole when it is done.
    pub folder: &'a Path,
}

/// Trains a shallower drafter against the unpruned one and saves it. Goes on where an earlier start was.
pub(crate) fn recover(
    context: &Context<'_>,
    settings: &Settings,
    recovery: Recovery<'_>,
    sink: &mut dyn MetricSink,
    progress: &mut dyn FnMut(Progress<'_>),
    stop: &AtomicBool,
) -> Result<Ending, PruneError> {
    let Recovery { start, drafter, name, folder } = recovery;
    let work = context.folder.join(&name);
    checkpoint::remove_partial(&work)?;
    fs::create_dir_all(&work).map_err(cannot_write(&work))?;
    let plan = Plan { stage: name, ..settings.recovery.clone() };
    let output = Output { folder: &work, drafter: drafter.clone(), files: context.files };
    let group = Group::alone();
    let training = Training {
        start: start.shallow_clone(),
        device: start.device(),
        examples: context.examples,
        ids: context.ids,
        held_out: &[],
        objective: Objective::Unpruned { teacher: context.teacher, how: settings.distillation },
        output,
        group: &group,
    };
    let mut report = |step: &StepReport| progress(Progress::Recovering(step));
    let mut watch = Watch { sink: Some(sink), report: &mut report, score_every: None, score: None };
    let ending = train(training, &plan, &mut watch, stop)?;
    if ending == Ending::Done {
        let last = if plan.steps == 0 { None } else { Some(work.join(step_name(plan.steps))) };
        match last {
            Some(last) => {
                let (model, file) = checkpoint::load(&last, plan.kind, context.teacher.device())?;
                checkpoint::save(folder, &model, &file, context.files, plan.kind)?;
            }
            None => checkpoint::save(folder, start, &drafter, context.files, plan.kind)?,
        }
    }
    Ok(ending)
}

/// Removes what a recovery needed. It goes last, so that a kill before leaves only something to remove.
pub(crate) fn clear(context: &Context<'_>, name: &str) -> Result<(), PruneError> {
    let work = context.folder.join(name);
    if work.exists() { fs::remove_dir_all(&work).map_err(cannot_write(&work)) } else { Ok(()) }
}
