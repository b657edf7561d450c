//! Where a checkpoint came from, as far as it can still be told: the run that it lies in, its models, its scores.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use data::gguf::GgufFile;
use evaluator::score::Score;
use model::checkpoint::DrafterFile;

use crate::folder::name_of;
use crate::stages::Stage;

/// What is known beside the checkpoint itself. A checkpoint that was moved out of its run has none of it.
#[derive(Debug, Default)]
pub(super) struct Origin {
    /// `NAME/train/step-000500`.
    pub(super) checkpoint: String,
    pub(super) run: Option<PathBuf>,
    pub(super) target: Option<Model>,
    /// Of the target, where that is a hub's.
    pub(super) revision: Option<String>,
    /// What the drafter was begun as, which its licence comes from; absent as well where only its shape was taken.
    pub(super) init: Option<Model>,
    pub(super) from_scratch: bool,
    pub(super) license: Option<License>,
    /// `target cuda:0, drafter cuda:1`.
    pub(super) devices: Option<String>,
    pub(super) score: Option<Score>,
    /// Why there is no score, when there is a run.
    pub(super) unscored: Option<String>,
}

/// A model as the recipe names it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Model {
    /// A hub's id; of a local model the last part of its path, as the rest says nothing to others.
    pub(super) name: String,
    pub(super) is_on_hub: bool,
}

/// A licence as hubs write it: `other` goes with a name and a link.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct License {
    pub(super) id: String,
    pub(super) name: Option<String>,
    pub(super) link: Option<String>,
}

impl Origin {
    /// Reads the recipe and the score in the run around `folder`, a checkpoint's.
    ///
    /// # Errors
    /// The run's recipe is there and cannot be read.
    pub(super) fn of(folder: &Path, drafter: &DrafterFile) -> anyhow::Result<Origin> {
        let run = folder.parent().and_then(Path::parent).filter(|run| run.join("recipe.toml").is_file());
        let Some(run) = run else { return Ok(Origin { checkpoint: name_of(folder), ..Origin::default() }) };
        let path = run.join("recipe.toml");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read `{}`", path.display()))?;
        // Not by `configs`, which would look for prompts that nobody needs any more.
        let recipe: toml::Table = text.parse().with_context(|| format!("`{}` is no recipe", path.display()))?;
        let value = |section: &str, key: &str| Some(recipe.get(section)?.get(key)?.as_str()?.to_string());
        let from_scratch = recipe.get("drafter").and_then(|drafter| drafter.get("from_scratch")?.as_bool()).unwrap_or(false);
        let (target, init) = (value("target", "model"), value("drafter", "init").filter(|_| !from_scratch));
        let device = |key: &str| value("devices", key).map(|device| format!("{key} {device}"));
        let devices: Vec<String> = ["target", "drafter"].into_iter().filter_map(device).collect();
        let target_model = target.as_deref().map(Model::named);
        let (score, unscored) = match score(run, folder, drafter) {
            Ok(score) => (Some(score), None),
            Err(why) => (None, Some(why)),
        };
        let parts = [Some(run), folder.parent(), Some(folder)].into_iter().flatten().map(name_of);
        Ok(Origin {
            checkpoint: parts.collect::<Vec<_>>().join("/"),
            run: Some(run.to_path_buf()),
            revision: value("target", "revision").filter(|_| target_model.as_ref().is_some_and(|model| model.is_on_hub)),
            target: target_model,
            license: init.as_deref().and_then(License::of),
            init: init.as_deref().map(Model::named),
            from_scratch,
            devices: Some(devices.join(", ")).filter(|devices| !devices.is_empty()),
            score,
            unscored,
        })
    }

    /// What whoever exports should know.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.run.is_none() {
            notes.push("the checkpoint lies in no run, so that its target, licence and scores are not known".to_string());
        }
        notes.extend(self.unscored.clone());
        if self.init.is_some() && self.license.is_none() {
            notes.push("the licence of the model that the drafter was begun as is not recorded here; look it up".to_string());
        }
        notes
    }

    /// One line that names the drafter.
    pub(super) fn title(&self, drafter: &DrafterFile) -> String {
        let what = format!("{} drafter with {} layers", drafter.kind, drafter.layers);
        match &self.target {
            Some(target) => format!("{what} for {}", target.name),
            None => what,
        }
    }
}

impl Model {
    fn named(recipe_value: &str) -> Model {
        // Recipes are kept with paths made absolute.
        let is_on_hub = !recipe_value.starts_with('/');
        let name = if is_on_hub { recipe_value.to_string() } else { name_of(Path::new(recipe_value)) };
        Model { name, is_on_hub }
    }
}

impl License {
    /// What a local model says of its licence: in the head of its README.md, or in its metadata.
    fn of(model: &str) -> Option<License> {
        let path = Path::new(model);
        if path.is_file() {
            let id = GgufFile::open(path).ok()?.string("general.license").ok()?.to_string();
            return Some(License { id, ..License::default() });
        }
        License::of_card(&fs::read_to_string(path.join("README.md")).ok()?)
    }

    /// From the YAML between the first two lines of three dashes.
    fn of_card(card: &str) -> Option<License> {
        let head = card.strip_prefix("---")?.split("\n---").next()?;
        let value = |key: &str| {
            let line = head.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
            let value = line?.trim().trim_matches(['"', '\'']);
            (!value.is_empty()).then(|| value.to_string())
        };
        Some(License { id: value("license")?, name: value("license_name"), link: value("license_link") })
    }
}

/// The score of a checkpoint, or in words why there is none.
fn score(run: &Path, folder: &Path, drafter: &DrafterFile) -> Result<Score, String> {
    let path = run.join(Stage::Evaluate.folder()).join(format!("{}.json", name_of(folder)));
    if !path.is_file() {
        return Err(format!(
            "the checkpoint is not scored; `drafthorse evaluate {}` scores the best, the last and pruned ones",
            run.display()
        ));
    }
    let score = Score::read(&path).map_err(|error| error.to_string())?;
    if (score.layers, score.block_size) == (drafter.layers, drafter.block_size) {
        Ok(score)
    } else {
        Err(format!("`{}` is the score of another checkpoint, and left out", path.display()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_licence_is_read_where_models_state_it() {
        let license = |card: &str| License::of_card(card);
        let plain = License { id: "apache-2.0".to_string(), ..License::default() };
        assert_eq!(license("---\nlicense: apache-2.0\ntags:\n- a\n---\n# A\n"), Some(plain.clone()));
        assert_eq!(license("---\ntags:\n- a\nlicense: \"apache-2.0\"\n---\n"), Some(plain.clone()));
        let other =
            license("---\nlicense: other\nlicense_name: tongyi-qianwen\nlicense_link: https://a.b/LICENSE\n---\n").unwrap();
        assert_eq!((other.id.as_str(), other.name.as_deref()), ("other", Some("tongyi-qianwen")));
        assert_eq!(other.link.as_deref(), Some("https://a.b/LICENSE"));
        assert_eq!(license("# A\n\nlicense: mit\n"), None);
        assert_eq!(license("---\nlicense:\n---\n"), None);
        assert_eq!(license("---\ntags: []\n---\nlicense: mit\n"), None);

        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("README.md"), "---\nlicense: apache-2.0\n---\n").unwrap();
        assert_eq!(License::of(&folder.path().display().to_string()), Some(plain.clone()));
        assert_eq!(License::of("Qwen/Qwen3-8B"), None);
        let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/.models/SmolLM2-135M-Instruct.Q4_1.gguf");
        assert_eq!(License::of(sample), Some(plain));
    }

    #[test]
    fn models_are_named_without_the_paths_of_this_machine() {
        let model = |name: &str, is_on_hub| Model { name: name.to_string(), is_on_hub };
        assert_eq!(Model::named("Qwen/Qwen3-8B"), model("Qwen/Qwen3-8B", true));
        assert_eq!(Model::named("/home/me/models/Qwen3-8B"), model("Qwen3-8B", false));
    }

    #[test]
    fn a_checkpoint_outside_of_a_run_is_exported_without_what_the_run_knew() {
        let folder = tempfile::tempdir().unwrap();
        let origin = Origin::of(&folder.path().join("step-000010"), &DrafterFile::default()).unwrap();
        assert_eq!(origin.checkpoint, "step-000010");
        assert!(origin.target.is_none() && origin.notes()[0].contains("lies in no run"));
    }
}
