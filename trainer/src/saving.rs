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
pub(crate) fn save(context: &Context<'_>, progress: &Progress, best: bool) -> Result<(), TrainError> {
    let (group, output, plan) = (context.group, &context.output, context.plan);
    let folder = output.folder.join(step_name(progress.step));
    let model = context.parameters.whole_model()?;
    let begun = if group.leads() {
        let drafter = DrafterFile {
            step: progress.step,
            training_tokens: output.drafter.training_tokens + progress.training_tokens,
            layers: model.layers.len(),
            ..output.drafter.clone()
        };
        checkpoint::begin(&folder, &model, &drafter, output.files, plan.kind)
    } else {
        Ok(())
    };
    together(group, begun.map_err(TrainError::from))?;
    drop(model);
    let share = checkpoint::partial(&folder)?.join(state::FOLDER);
    let written = state::save_share(&share, &context.parameters, &context.optimiser);
    together(group, written.map_err(|source| TrainError::Write { path: share.clone(), source }))?;
    together(group, if group.leads() { finish(context, progress, best, &folder, &share) } else { Ok(()) })
}

fn finish(context: &Context<'_>, progress: &Progress, best: bool, folder: &Path, share: &Path) -> Result<(), TrainError> {
    let (parent, name) = (context.output.folder, step_name(progress.step));
    let progress = Progress { ranks: context.group.world(), ..*progress };
    state::save_progress(share, &progress).map_err(|source| TrainError::Write { path: share.to_path_buf(), source })?;
    checkpoint::publish(folder)?;
    if best {
        checkpoint::point(parent, BEST, &name)?;
    }
    checkpoint::point(parent, LATEST, &name)?;
    let best = fs::read_link(parent.join(BEST)).ok();
    let steps: Vec<u64> = saved_steps(parent).into_iter().filter(|&step| step > 0 && step < progress.step).collect();
    let kept = context.plan.keep_last.saturating_sub(1);
    for (index, &step) in steps.iter().enumerate() {
        // Only the latest checkpoint is ever resumed, so the older ones' optimiser state is dead weight.
        let folder = parent.join(step_name(step));
        let is_kept = index + kept >= steps.len() || best.as_deref() == Some(Path::new(&step_name(step)));
        let dropped = if is_kept { folder.join(state::FOLDER) } else { folder };
        if dropped.exists() {
            fs::remove_dir_all(&dropped).map_err(|source| TrainError::Write { path: dropped, source })?;
        }
    }
    Ok(())
}
