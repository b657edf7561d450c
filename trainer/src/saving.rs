//! Checkpoints of a training: all ranks put one together, rank 0 gives it its name, and old ones go.

use std::fs;
use std::path::Path;

use model::checkpoint::{self, BEST, CheckpointError, DrafterFile, LATEST, TextFiles};

use crate::state::{self, Progress};
use crate::training::{Context, TrainError, together};

/// Where checkpoints go and what stands in them beside weights.
pub struct Output<'a> {
    pub folder: &'a Path,
    /// `step` and `layers` are filled in at each save; `training_tokens` are those before this training, and each save adds its own.
    pub drafter: DrafterFile,
    pub files: &'a TextFiles,
}

/// The name of a step's checkpoint folder.
pub fn step_name(step: u64) -> String {
    format!("step-{step:06}")
}

/// The steps of the whole checkpoints in a folder, ascending.
pub fn saved_steps(folder: &Path) -> Vec<u64> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut steps: Vec<u64> =
        entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok()).collect();
    steps.sort_unstable();
    steps
}

/// The step that training in `folder` goes on after; 0 when it has no state to go on from.
///
/// # Errors
/// A checkpoint with a state whose description cannot be read.
pub fn resumed_step(folder: &Path) -> Result<u64, CheckpointError> {
    let latest = folder.join(LATEST);
    if latest.join(state::FOLDER).exists() { Ok(checkpoint::load_drafter_file(&latest)?.step) } else { Ok(0) }
}

/// Saves the step's checkpoint, moves `latest` (and `best`) to it, then clears what need not be kept.
///
/// The work is in three parts, and all ranks go on to the next only when all have done theirs: a full disk anywhere leaves the folder
/// under its partial name, which is never picked up, and every rank with the same error.
pub(crate) fn save(context: &Context<'_>, progress: &Progress) -> Result<(), TrainError> {
    let (group, output, plan) = (context.group, &context.output, context.plan);
    let folder = output.folder.join(step_name(progress.step));
    let share = checkpoint::partial(&folder)?.join(state::FOLDER);
    let model = context.parameters.whole_model(group.leads())?;
    let begun = if let Some(model) = &model {
        let drafter = DrafterFile {
            step: progress.step,
            training_tokens: output.drafter.training_tokens + progress.training_tokens,
            layers: model.layers.len(),
            ..output.drafter.clone()
        };
        checkpoint::begin(&folder, model, &drafter, output.files, plan.kind)
            .map_err(TrainError::from)
            .and_then(|()| fs::create_dir(&share).map_err(|source| TrainError::Write { path: share.clone(), source }))
    } else {
        Ok(())
    };
    together(group, begun)?;
    drop(model);
    let written = state::save_share(&share, &context.parameters, &context.optimiser);
    together(group, written.map_err(|source| TrainError::Write { path: share.clone(), source }))?;
    together(group, if group.leads() { finish(context, progress, &folder, &share) } else { Ok(()) })
}

fn finish(context: &Context<'_>, progress: &Progress, folder: &Path, share: &Path) -> Result<(), TrainError> {
    let (parent, name) = (context.output.folder, step_name(progress.step));
    let progress = Progress { ranks: context.group.world(), ..*progress };
    state::save_progress(share, &progress).map_err(|source| TrainError::Write { path: share.to_path_buf(), source })?;
    checkpoint::publish(folder)?;
    checkpoint::point(parent, LATEST, &name)?;
    point_best(parent, &progress)?;
    let best = progress.best.map(|(step, _)| step);
    let steps: Vec<u64> = saved_steps(parent).into_iter().filter(|&step| step > 0 && step < progress.step).collect();
    let kept = context.plan.keep_last.saturating_sub(1);
    for (index, &step) in steps.iter().enumerate() {
        let folder = parent.join(step_name(step));
        if index + kept < steps.len() && Some(step) != best {
            discard(&folder)?;
        } else if let state = folder.join(state::FOLDER)
            && state.exists()
        {
            // Only the latest checkpoint is ever resumed, so the older ones' optimiser state is dead weight.
            fs::remove_dir_all(&state).map_err(|source| TrainError::Write { path: state, source })?;
        }
    }
    Ok(())
}

/// Points `best` to what the progress says it is. After a kill it may have been another, of a step that is done again.
pub(crate) fn point_best(parent: &Path, progress: &Progress) -> Result<(), TrainError> {
    let link = parent.join(BEST);
    match progress.best.map(|(step, _)| step_name(step)).filter(|name| parent.join(name).exists()) {
        Some(name) if fs::read_link(&link).is_ok_and(|target| target == Path::new(&name)) => Ok(()),
        Some(name) => Ok(checkpoint::point(parent, BEST, &name)?),
        None if fs::symlink_metadata(&link).is_err() => Ok(()),
        None => fs::remove_file(&link).map_err(|source| TrainError::Write { path: link, source }),
    }
}

/// Removes a checkpoint; whoever looks for it meanwhile finds it whole or not at all.
///
/// # Errors
/// It cannot be moved or removed.
pub fn discard(folder: &Path) -> Result<(), TrainError> {
    let hidden = checkpoint::partial(folder)?;
    let write = |source| TrainError::Write { path: folder.to_path_buf(), source };
    if hidden.exists() {
        fs::remove_dir_all(&hidden).map_err(write)?;
    }
    fs::rename(folder, &hidden).and_then(|()| fs::remove_dir_all(&hidden)).map_err(write)
}
