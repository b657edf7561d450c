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

use crate::ledger::Ledger;
use crate::pruning::{Context, Progress, PruneError, Settings, cannot_write, layers_name, recovery_name};
use crate::swapping::{swap_has_recovered, swap_recovery_name};

/// What recovers, and where to.
pub(crate) struct Recovery<'a> {
    /// Let go once the training has taken it over.
    pub start: Transformer,
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
    let (device, untrained) = (start.device(), (plan.steps == 0).then(|| start.shallow_clone()));
    let training = Training {
        start,
        device,
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
        let (model, file) = match untrained {
            Some(start) => (start, drafter),
            None => checkpoint::load(&work.join(step_name(plan.steps)), plan.kind, context.teacher.device())?,
        };
        checkpoint::save(folder, &model, &file, context.files, plan.kind)?;
    }
    Ok(ending)
}

/// Whether the recovery of this name has given its checkpoint and will not run again. That of a swap may be gone since.
pub fn is_done(folder: &Path, ledger: &Ledger, name: &str) -> bool {
    let depth = name.split('-').nth(1).and_then(|depth| depth.parse().ok());
    match depth {
        Some(depth) if name == recovery_name(depth) => folder.join(layers_name(depth)).exists(),
        Some(depth) if name == swap_recovery_name(depth) => swap_has_recovered(folder, ledger, depth),
        _ => false,
    }
}

/// Removes what a recovery needed. It goes last, so that a kill before leaves only something to remove.
pub(crate) fn clear(context: &Context<'_>, name: &str) -> Result<(), PruneError> {
    let work = context.folder.join(name);
    if work.exists() { fs::remove_dir_all(&work).map_err(cannot_write(&work)) } else { Ok(()) }
}
