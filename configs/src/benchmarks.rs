//! Benchmarks by name: which set is meant, where it comes from, and how its rows become what the target is asked. Each is a TOML file
//! in `configs/benchmarks/`, which is part of the binary.

use std::sync::LazyLock;

use serde::Deserialize;

/// The files, by the names that recipes use.
const FILES: [(&str, &str); 7] = [
    ("gsm8k", include_str!("../benchmarks/gsm8k.toml")),
    ("math500", include_str!("../benchmarks/math500.toml")),
    ("aime25", include_str!("../benchmarks/aime25.toml")),
    ("humaneval", include_str!("../benchmarks/humaneval.toml")),
    ("mbpp", include_str!("../benchmarks/mbpp.toml")),
    ("livecodebench", include_str!("../benchmarks/livecodebench.toml")),
    ("mt-bench", include_str!("../benchmarks/mt-bench.toml")),
];

/// A benchmark that a recipe can name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preset {
    /// What recipes and scores call it.
    pub name: String,
    /// What its authors call it.
    pub title: String,
    /// The id of the data set on the hub.
    pub dataset: String,
    /// The data set's configuration, where it has several.
    pub config: Option<String>,
    pub split: String,
    /// The files of that split, below the data set's root.
    pub files: Vec<String>,
    pub licence: String,
    /// How many prompts the whole set has; a prompt of several turns counts once.
    pub prompts: usize,
    pub form: Form,
    /// The field that names a row's category.
    pub category: Option<String>,
    /// The tokens that an answer is given where the recipe does not say.
    pub max_new_tokens: usize,
}

/// What the target is asked, in terms of the data set's own fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Form {
    /// One user turn: the first of these templates that the row has all fields for, `{field}` standing for a field's text.
    Templates(Vec<String>),
    /// The user turns are the texts in the list under this field; the target's answers go between them.
    Turns(String),
}

/// A preset's file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Typed {
    name: String,
    title: String,
    dataset: String,
    config: Option<String>,
    split: String,
    files: Vec<String>,
    licence: String,
    prompts: usize,
    templates: Option<Vec<String>>,
    turns: Option<String>,
    category: Option<String>,
    max_new_tokens: usize,
}

/// All presets, in the order in which they are usually reported.
pub fn presets() -> &'static [Preset] {
    static PRESETS: LazyLock<Vec<Preset>> = LazyLock::new(|| {
        let read = |(name, text)| {
            read(text)
                .unwrap_or_else(|fault| unreachable!("configs/benchmarks/{name}.toml, which a test reads, is faulty: {fault}"))
        };
        FILES.into_iter().map(read).collect()
    });
    &PRESETS
}

/// The preset of this name.
pub fn preset(name: &str) -> Option<&'static Preset> {
    presets().iter().find(|preset| preset.name == name)
}

fn read(text: &str) -> Result<Preset, String> {
    let typed: Typed = toml::from_str(text).map_err(|error| error.to_string())?;
    let form = match (typed.templates, typed.turns) {
        (Some(templates), None) if !templates.is_empty() => Form::Templates(templates),
        (None, Some(turns)) => Form::Turns(turns),
        _ => return Err("it needs either `templates`, at least one, or `turns`".to_string()),
    };
    if typed.files.is_empty() || typed.prompts == 0 || typed.max_new_tokens == 0 {
        return Err("`files`, `prompts` and `max_new_tokens` must not be empty or 0".to_string());
    }
    Ok(Preset {
        name: typed.name,
        title: typed.title,
        dataset: typed.dataset,
        config: typed.config,
        split: typed.split,
        files: typed.files,
        licence: typed.licence,
        prompts: typed.prompts,
        form,
        category: typed.category,
        max_new_tokens: typed.max_new_tokens,
    })
}

impl Preset {
    /// The name of a local copy: JSON Lines, with the data set's own fields or in a dialect of prompt files.
    pub fn file_name(&self) -> String {
        format!("{}.jsonl", self.name)
    }

    /// What a local copy holds, as the end of a sentence.
    pub(crate) fn contents(&self) -> String {
        let named: Vec<String> = self.files.iter().map(|file| format!("`{file}`")).collect();
        let named = named.join(", ");
        let origin = format!("of the hub dataset `{}` (licence {})", self.dataset, self.licence);
        let is_text = self.files.iter().all(|file| file.ends_with(".jsonl"));
        match (is_text, self.files.len()) {
            (true, 1) => format!("the file {named} {origin}"),
            (true, _) => format!("the files {named} {origin}, one after the other"),
            (false, _) => format!("the rows of {named} {origin} as JSON Lines, with their own fields or with `turns`"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_file_is_a_preset_of_its_name() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("benchmarks");
        let files: BTreeSet<String> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        assert_eq!(files, FILES.map(|(name, _)| format!("{name}.toml")).into());
        for (name, text) in FILES {
            assert_eq!(read(text).unwrap().name, name);
        }
        assert_eq!(preset("mt-bench").unwrap().form, Form::Turns("prompt".to_string()));
        assert_eq!(preset("MT-Bench"), None);
    }

    #[test]
    fn files_are_read_strictly() {
        let gsm8k = FILES[0].1;
        let fault = |from: &str, to: &str| {
            assert!(gsm8k.contains(from), "{from}");
            read(&gsm8k.replacen(from, to, 1)).unwrap_err()
        };
        assert!(fault("licence =", "license =").contains("unknown field `license`"));
        assert!(fault("prompts = 1319", "prompts = \"1319\"").contains("invalid type"));
        assert!(fault("split = \"test\"\n", "").contains("missing field `split`"));
        assert!(fault("templates = [", "turns = \"a\"\ntemplates = [").contains("either `templates`"));
        assert!(fault("templates = [", "templates = []\n#").contains("at least one"));
        assert!(fault("prompts = 1319", "prompts = 0").contains("must not be empty or 0"));
    }

    #[test]
    fn contents_name_files_and_what_to_do_with_them() {
        let contents = |name: &str| preset(name).unwrap().contents();
        assert_eq!(
            contents("gsm8k"),
            "the rows of `main/test-00000-of-00001.parquet` of the hub dataset `openai/gsm8k` (licence MIT) as JSON Lines, with their \
             own fields or with `turns`"
        );
        assert_eq!(contents("aime25"), "the file `test.jsonl` of the hub dataset `math-ai/aime25` (licence Apache-2.0)");
        assert!(contents("livecodebench").starts_with("the files `test.jsonl`, `test2.jsonl`, "));
        assert!(contents("livecodebench").ends_with("(licence CC), one after the other"));
    }
}
