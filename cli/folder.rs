//! A run's folder: who may write to it, how its stages stand, and what each stage's results depend on.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::Context;
use configs::Recipe;
use data::files::sha256_hex;
use data::manifest::{FILE_NAME, Manifest};

use crate::BadRecipe;
use crate::models::faster_dtype;
use crate::stages::Stage;

/// The folder `runs/NAME`, held by this process alone.
pub(crate) struct RunFolder {
    pub(crate) path: PathBuf,
    _lock: File,
}

impl RunFolder {
    /// Creates or opens the folder below the current one, locks it, settles what the recipe leaves to the machine, and writes the
    /// resolved recipe into the folder.
    pub(crate) fn open(recipe: &mut Recipe) -> anyhow::Result<Self> {
        let path = Path::new("runs").join(&recipe.name);
        fs::create_dir_all(&path).with_context(|| format!("cannot create `{}`", path.display()))?;
        let lock_path = path.join(".lock");
        let lock = File::create(&lock_path).with_context(|| format!("cannot write `{}`", lock_path.display()))?;
        if lock.try_lock().is_err() {
            anyhow::bail!(
                "`{}` is in use by another drafthorse process; wait for it or give the run another name",
                path.display()
            );
        }
        let recipe_path = path.join("recipe.toml");
        recipe.settle_dtypes(&fs::read_to_string(&recipe_path).unwrap_or_default(), faster_dtype);
        data::files::write_atomically(&recipe_path, recipe.to_toml().as_bytes())
            .with_context(|| format!("cannot write `{}`", recipe_path.display()))?;
        Ok(Self { path, _lock: lock })
    }

    /// A stage's folder, created where it is absent.
    pub(crate) fn stage(&self, stage: Stage) -> anyhow::Result<PathBuf> {
        let folder = self.path.join(stage.folder());
        fs::create_dir_all(&folder).with_context(|| format!("cannot create `{}`", folder.display()))?;
        Ok(folder)
    }

    /// Removes what `stage` and the stages after it made.
    pub(crate) fn restart(&self, stage: Stage) -> anyhow::Result<()> {
        for later in Stage::ALL.into_iter().filter(|&later| later >= stage) {
            let folder = self.path.join(later.folder());
            if folder.exists() {
                fs::remove_dir_all(&folder).with_context(|| format!("cannot remove `{}`", folder.display()))?;
            }
        }
        Ok(())
    }
}

/// What a stage's results depend on: values of the recipe, the files it reads, and the inputs of the stage before it.
pub(crate) fn inputs(recipe: &Recipe, stage: Stage, run: &RunFolder) -> anyhow::Result<BTreeMap<String, String>> {
    let mut inputs = BTreeMap::new();
    let mut take = |section: &str, left_out: &[&str]| {
        let wanted = recipe.section(section).into_iter().filter(|(key, _)| !left_out.contains(&key.as_str()));
        inputs.extend(wanted);
    };
    take("seed", &[]);
    match stage {
        Stage::Regenerate => {
            take("target", &["target.model"]);
            take("data", &["data.prompts", "data.holdout"]);
            take("regenerate", &["regenerate.batch_rows"]);
        }
        Stage::Train => {
            take("drafter", &["drafter.init"]);
            take("data", &["data.prompts"]);
            take("train", &["train.save_every", "train.keep_last", "train.recompute"]);
        }
        Stage::Prune => take("prune", &[]),
        Stage::Evaluate => {
            take("target", &["target.model"]);
            take("evaluate", &["evaluate.benchmarks"]);
        }
    }
    // Files count by what they hold, so that a moved folder stays the same run.
    match stage {
        Stage::Regenerate => {
            inputs.insert("target.model".to_string(), model_identity(&recipe.target.model)?);
            for path in &recipe.data.prompts {
                inputs.insert(format!("data.prompts {}", name_of(path)), file_hash(path)?);
            }
        }
        Stage::Train => {
            inputs.insert("drafter.init".to_string(), model_identity(&recipe.drafter.init)?);
        }
        Stage::Evaluate => {
            for benchmark in &recipe.evaluate.benchmarks {
                inputs.insert(format!("evaluate.benchmarks {}", benchmark.name), file_hash(&benchmark.path)?);
            }
        }
        Stage::Prune => {}
    }
    if let Some(before) = stage.before() {
        let hash = upstream_hash(&run.path.join(before.folder()))?;
        inputs.insert(format!("results of {}", before.name()), hash.unwrap_or_else(|| "(absent)".to_string()));
    }
    Ok(inputs)
}

/// The hash of a complete stage's inputs and results.
fn upstream_hash(folder: &Path) -> anyhow::Result<Option<String>> {
    let manifest = Manifest::read(folder)?;
    let complete = manifest.filter(|manifest| manifest.complete);
    complete
        .map(|manifest| Ok(sha256_hex(serde_json::to_vec(&(&manifest.inputs, &manifest.results))?)[..16].to_string()))
        .transpose()
}

/// A model by name and the sizes of its files: enough to notice another model without reading gigabytes.
fn model_identity(model: &str) -> anyhow::Result<String> {
    let path = local_model(model)?;
    let mut files: Vec<PathBuf> = if path.is_dir() {
        fs::read_dir(&path)
            .with_context(|| format!("cannot read `{}`", path.display()))?
            .flatten()
            .map(|entry| entry.path())
            .collect()
    } else {
        vec![path.clone()]
    };
    files.sort();
    let sizes: Vec<String> = files
        .iter()
        .filter(|file| {
            file.extension().is_some_and(|extension| extension == "safetensors" || extension == "gguf" || extension == "json")
        })
        .map(|file| format!("{}:{}", name_of(file), fs::metadata(file).map_or(0, |metadata| metadata.len())))
        .collect();
    Ok(format!("{} {}", name_of(&path), &sha256_hex(sizes.join(" "))[..16]))
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

fn file_hash(path: &Path) -> anyhow::Result<String> {
    let bytes = fs::read(path).with_context(|| format!("cannot read `{}`", path.display()))?;
    Ok(sha256_hex(bytes)[..16].to_string())
}

pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// Whether a stage's folder says that the stage is done.
pub(crate) fn is_complete(folder: &Path) -> bool {
    folder.join(FILE_NAME).exists()
        && Manifest::read(folder).is_ok_and(|manifest| manifest.is_some_and(|manifest| manifest.complete))
}
