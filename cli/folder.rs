//! A run's folder: who may write to it, how its stages stand, and what each stage's results depend on.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use configs::{Recipe, Stop};
use data::files::{sha256_hex, sha256_of_file};
use data::manifest::{FILE_NAME, Manifest};
use model::checkpoint::{BEST, DrafterFile, LATEST, load_drafter_file};

use crate::BadRecipe;
use crate::models::faster_dtype;
use crate::stages::Stage;

/// The folder `runs/NAME`, held by this process alone unless it only looks on.
pub(crate) struct RunFolder {
    pub(crate) path: PathBuf,
    _lock: Option<File>,
}

/// The file within a run's folder whose lock says that a process works on it.
const LOCK: &str = ".lock";

/// How long a run's lock may be held by a process that only looks whether it is held.
const GLANCE: Duration = Duration::from_secs(1);

impl RunFolder {
    /// Creates or opens the folder below the current one and locks it.
    pub(crate) fn open(name: &str) -> anyhow::Result<Self> {
        let path = Path::new("runs").join(name);
        fs::create_dir_all(&path).with_context(|| format!("cannot create `{}`", path.display()))?;
        let lock_path = path.join(LOCK);
        let lock = File::create(&lock_path).with_context(|| format!("cannot write `{}`", lock_path.display()))?;
        let begun = Instant::now();
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(Self { path, _lock: Some(lock) }),
                Err(TryLockError::WouldBlock) if begun.elapsed() < GLANCE => std::thread::sleep(GLANCE / 20),
                Err(TryLockError::WouldBlock) => anyhow::bail!(
                    "`{}` is in use by another drafthorse process; wait for it or give the run another name",
                    path.display()
                ),
                Err(TryLockError::Error(error)) => {
                    return Err(error).with_context(|| format!("cannot lock `{}`", lock_path.display()));
                }
            }
        }
    }

    /// The folder as one that another process holds.
    pub(crate) fn look_on(name: &str) -> Self {
        Self { path: Path::new("runs").join(name), _lock: None }
    }

    /// Whether any process holds the folder. Not to be asked by the one that does.
    pub(crate) fn is_in_use(&self) -> anyhow::Result<bool> {
        let path = self.path.join(LOCK);
        let lock = File::create(&path).with_context(|| format!("cannot write `{}`", path.display()))?;
        match lock.try_lock() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock `{}`", path.display())),
        }
    }

    /// Settles what the recipe leaves to the machine: as the run was begun, where it was.
    pub(crate) fn settle(&self, recipe: &mut Recipe) {
        recipe.settle_dtypes(&fs::read_to_string(self.path.join("recipe.toml")).unwrap_or_default(), faster_dtype);
    }

    /// Writes the resolved recipe into the folder; to be called once the stages' inputs are known to fit what is there.
    pub(crate) fn write_recipe(&self, recipe: &Recipe) -> anyhow::Result<()> {
        let path = self.path.join("recipe.toml");
        data::files::write_atomically(&path, recipe.to_toml().as_bytes())
            .with_context(|| format!("cannot write `{}`", path.display()))
    }

    /// The day that chat templates are told: the run's first, which is `today` when the run has none yet. Another day would be another
    /// prompt.
    pub(crate) fn date(&self, today: &str) -> anyhow::Result<String> {
        let path = self.path.join(".date");
        if let Ok(date) = fs::read_to_string(&path) {
            return Ok(date);
        }
        data::files::write_atomically(&path, today.as_bytes()).with_context(|| format!("cannot write `{}`", path.display()))?;
        Ok(today.to_string())
    }

    /// A stage's folder, created where it is absent.
    pub(crate) fn stage(&self, stage: Stage) -> anyhow::Result<PathBuf> {
        let folder = self.path.join(stage.folder());
        fs::create_dir_all(&folder).with_context(|| format!("cannot create `{}`", folder.display()))?;
        Ok(folder)
    }

    /// Removes what `stage` and the stages after it made, and what the run kept from its beginning when it begins anew.
    pub(crate) fn restart(&self, stage: Stage) -> anyhow::Result<()> {
        if stage == Stage::Regenerate {
            for name in ["recipe.toml", ".date"] {
                let path = self.path.join(name);
                if path.exists() {
                    fs::remove_file(&path).with_context(|| format!("cannot remove `{}`", path.display()))?;
                }
            }
        }
        let later = Stage::ALL.into_iter().filter(|&later| later >= stage).map(Stage::folder);
        // TensorBoard would draw the old steps over the new ones.
        let events = (stage <= Stage::Train).then_some("events");
        for name in later.chain(events) {
            let folder = self.path.join(name);
            if folder.exists() {
                fs::remove_dir_all(&folder).with_context(|| format!("cannot remove `{}`", folder.display()))?;
            }
        }
        Ok(())
    }
}

/// What a stage's results depend on: values of the recipe, the files it reads, and the inputs of the stage before it.
pub(crate) fn inputs(recipe: &Recipe, stage: Stage, run: &RunFolder) -> anyhow::Result<BTreeMap<String, String>> {
    let mut inputs = values(recipe, stage);
    files(recipe, stage, &mut inputs)?;
    // Scores are made while training as well; they belong to checkpoints, which go together with them when their stage begins anew.
    if let Some(before) = stage.before().filter(|_| stage != Stage::Evaluate) {
        let hash = upstream_hash(&run.path.join(before.folder()))?;
        inputs.insert(format!("results of {}", before.name()), hash.unwrap_or_else(|| "(absent)".to_string()));
    }
    Ok(inputs)
}

/// Of a stage's inputs, the values of the recipe.
pub(crate) fn values(recipe: &Recipe, stage: Stage) -> BTreeMap<String, String> {
    let mut inputs = BTreeMap::new();
    let mut take = |section: &str, left_out: &[&str]| {
        let wanted = recipe.section(section).into_iter().filter(|(key, _)| !left_out.contains(&key.as_str()));
        inputs.extend(wanted);
    };
    take("seed", &[]);
    match stage {
        Stage::Regenerate => {
            take("target", &["target.model"]);
            take("data", &["data.prompts", "data.holdout", "data.max_rejected", "data.truncated"]);
            // Where servers are and how many are asked changes no answer; which engine writes it may.
            let how = ["batch_rows", "endpoints", "concurrency", "timeout", "retries"].map(|name| format!("regenerate.{name}"));
            take("regenerate", &how.each_ref().map(String::as_str));
        }
        Stage::Train => {
            take("drafter", &["drafter.init"]);
            take("data", &["data.prompts", "data.max_rejected"]);
            take("train", &["train.save_every", "train.keep_last", "train.recompute", "train.chunk_rows", "train.forward_rows"]);
        }
        Stage::Prune => {
            take("prune", &[]);
            // Speed is predicted for decoding as evaluation does it, on these devices.
            if recipe.prune.stop == Stop::Speed {
                take("evaluate", &["evaluate.benchmarks", "evaluate.benchmark_folder", "evaluate.every", "evaluate.hardware"]);
                take("devices", &["devices.timeout"]);
                take("target", &["target.model"]);
            }
        }
        Stage::Evaluate => {
            take("target", &["target.model"]);
            // A block is what the checkpoints were trained on, or other figures.
            take(
                "drafter",
                &["drafter.init", "drafter.layers", "drafter.keep_layers", "drafter.from_scratch", "drafter.untie_head"],
            );
            // What is simulated from the rounds is worked out anew whenever the report is written.
            take("evaluate", &["evaluate.benchmarks", "evaluate.benchmark_folder", "evaluate.every", "evaluate.hardware"]);
            // Speed is measured against the target on the same device.
            take("devices", &["devices.timeout"]);
        }
    }
    inputs
}

/// Of a stage's inputs, the files that the recipe names. They count by what they hold, so that a moved folder stays the same run.
fn files(recipe: &Recipe, stage: Stage, inputs: &mut BTreeMap<String, String>) -> anyhow::Result<()> {
    match stage {
        Stage::Regenerate => {
            inputs.insert("target.model".to_string(), model_identity(&recipe.target.model)?);
            for (index, path) in recipe.data.prompts.iter().enumerate() {
                inputs.insert(format!("data.prompts {index} {}", name_of(path)), file_hash(path)?);
            }
        }
        Stage::Train => {
            inputs.insert("drafter.init".to_string(), model_identity(&recipe.drafter.init)?);
        }
        Stage::Evaluate => {
            inputs.insert("target.model".to_string(), model_identity(&recipe.target.model)?);
            for benchmark in &recipe.evaluate.benchmarks {
                // The same rows in another form are other prompts.
                let form = benchmark.preset.map(|preset| format!(" as {}", &sha256_hex(format!("{:?}", preset.form))[..8]));
                let rows = file_hash(&benchmark.path)?;
                inputs.insert(format!("evaluate.benchmarks {}", benchmark.name), rows + form.as_deref().unwrap_or_default());
            }
        }
        Stage::Prune if recipe.prune.stop == Stop::Speed => {
            inputs.insert("target.model".to_string(), model_identity(&recipe.target.model)?);
        }
        Stage::Prune => {}
    }
    Ok(())
}

/// The hash of a complete stage's inputs and results.
fn upstream_hash(folder: &Path) -> anyhow::Result<Option<String>> {
    let manifest = Manifest::read(folder)?;
    let complete = manifest.filter(|manifest| manifest.complete);
    complete
        .map(|manifest| Ok(sha256_hex(serde_json::to_vec(&(&manifest.inputs, &manifest.results))?)[..16].to_string()))
        .transpose()
}

/// A model by the names, sizes and contents of its files; of the weights only samples are read, for they may be hundreds of gigabytes.
fn model_identity(model: &str) -> anyhow::Result<String> {
    let path = local_model(model)?;
    let mut files: Vec<PathBuf> = if path.is_dir() {
        let entries = fs::read_dir(&path).with_context(|| format!("cannot read `{}`", path.display()))?;
        entries.flatten().map(|entry| entry.path()).collect()
    } else {
        vec![path.clone()]
    };
    files.sort();
    let mut parts = Vec::new();
    for file in files {
        let hash = match file.extension().and_then(|extension| extension.to_str()) {
            Some("json" | "jinja") => file_hash(&file)?,
            Some("safetensors" | "gguf") => sampled_hash(&file).with_context(|| format!("cannot read `{}`", file.display()))?,
            _ => continue,
        };
        parts.push(format!("{} {hash}", name_of(&file)));
    }
    Ok(format!("{} {}", name_of(&path), &sha256_hex(parts.join("\n"))[..16]))
}

/// The hash of a file's length and of small pieces spread evenly over it.
fn sampled_hash(path: &Path) -> std::io::Result<String> {
    const PIECES: u64 = 64;
    const PIECE: u64 = 4096;
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut sampled = length.to_le_bytes().to_vec();
    for piece in 0..PIECES {
        file.seek(SeekFrom::Start(length.saturating_sub(PIECE) / (PIECES - 1) * piece))?;
        (&mut file).take(PIECE).read_to_end(&mut sampled)?;
    }
    Ok(sha256_hex(sampled)[..16].to_string())
}

/// The folder or file of a model named in a recipe.
pub(crate) fn local_model(model: &str) -> anyhow::Result<PathBuf> {
    let path = PathBuf::from(model);
    if path.exists() {
        return Ok(path);
    }
    let message = format!(
        "model `{model}` is neither a folder nor a .gguf file here, and downloading from a hub is not supported yet; download it and \
         name its folder (relative to the recipe, starting with `./`)"
    );
    Err(BadRecipe(message).into())
}

/// The drafter's checkpoint that a path stands for: itself, or the best or latest one of a run or of its folder of checkpoints.
pub(crate) fn checkpoint(path: &Path) -> anyhow::Result<(PathBuf, DrafterFile)> {
    let train = path.join(Stage::Train.folder());
    let linked = [&train, path].into_iter().flat_map(|folder| [BEST, LATEST].map(|link| folder.join(link)));
    let is_drafter = |path: &PathBuf| path.is_file() || path.join("drafter.json").exists();
    let found = std::iter::once(path.to_path_buf()).chain(linked).find(is_drafter);
    let Some(folder) = found else {
        return Err(BadRecipe(format!(
            "`{}` is neither a drafter's checkpoint, which holds a drafter.json, nor the folder of a run that has trained one",
            path.display()
        ))
        .into());
    };
    // By its own name, not that of a link which may move on.
    let folder = fs::canonicalize(&folder).with_context(|| format!("cannot read `{}`", folder.display()))?;
    let file = load_drafter_file(&folder)?;
    Ok((folder, file))
}

fn file_hash(path: &Path) -> anyhow::Result<String> {
    Ok(sha256_of_file(path)?[..16].to_string())
}

pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// Whether a stage's folder says that the stage is done.
pub(crate) fn is_complete(folder: &Path) -> bool {
    folder.join(FILE_NAME).exists()
        && Manifest::read(folder).is_ok_and(|manifest| manifest.is_some_and(|manifest| manifest.complete))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// What the results of pruning depend on, with a target of these weights.
    fn inputs_of_pruning(folder: &Path, weights: &str, settings: &[&str]) -> BTreeMap<String, String> {
        let model = folder.join("target");
        fs::create_dir_all(&model).unwrap();
        fs::write(model.join("model.safetensors"), weights).unwrap();
        let recipe = folder.join("recipe.toml");
        fs::write(
            &recipe,
            "name = \"n\"\n[target]\nmodel = \"./target\"\n[drafter]\nkind = \"d3d\"\ninit = \"./target\"\nblock_size = 4\n\
             mask_token = 23\n[data]\nprompts = [\"recipe.toml\"]\n[train]\nsteps = 5\nbatch_responses = 4\n",
        )
        .unwrap();
        let settings: Vec<String> = settings.iter().map(|setting| (*setting).to_string()).collect();
        let recipe = configs::load(&recipe, &settings).unwrap();
        let run = RunFolder { path: folder.join("run"), _lock: None };
        inputs(&recipe, Stage::Prune, &run).unwrap()
    }

    #[test]
    fn pruning_depends_on_the_target_where_it_stops_by_speed() {
        let folder = tempfile::tempdir().unwrap();
        let of = |weights: &str, settings: &[&str]| inputs_of_pruning(folder.path(), weights, settings);
        let (by_speed, dtype) = ("prune.stop=speed", "target.dtype=bf16");
        assert_eq!(of("one", &["target.dtype=f32"]), of("another", &[dtype]), "τ needs no target");
        assert_ne!(of("one", &[by_speed]), of("another", &[by_speed]));
        assert_ne!(of("one", &[by_speed, "target.dtype=f32"]), of("one", &[by_speed, dtype]));
        assert_eq!(of("one", &[by_speed]), of("one", &[by_speed]));
    }
}
