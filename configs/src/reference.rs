//! Published figures that scores are shown beside: facts from papers, kept as TOML in `configs/references/` and built in.

use std::collections::BTreeMap;

use serde::Deserialize;

/// The figures that go by one name, such as `d3d`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reference {
    /// What was the same for all of them, in words.
    pub conditions: String,
    /// Published names of benchmarks by the names they have here, where these differ.
    #[serde(default)]
    pub aliases: BTreeMap<String, String>,
    /// A method has one entry a target.
    pub methods: Vec<Method>,
}

/// What one method reached with one target.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Method {
    pub name: String,
    /// Title and number of the paper that the method is from.
    pub paper: String,
    pub target: String,
    /// How many it ran on, where that was published.
    pub gpus: Option<u32>,
    /// By the published name of the benchmark; `mean` is over several of them.
    pub figures: BTreeMap<String, PublishedFigures>,
}

/// One method's figures on one benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedFigures {
    /// Over plain autoregressive decoding.
    pub speedup: f64,
    /// Tokens committed per forward of the target, correction or bonus token included.
    pub tau: f64,
}

/// Why built-in figures cannot be given.
#[derive(Debug, thiserror::Error)]
pub enum ReferenceError {
    #[error("no published figures go by the name `{name}`; there are: {}", known.join(", "))]
    Unknown { name: String, known: Vec<&'static str> },
    #[error("the built-in figures `{name}` are damaged: {cause}")]
    Damaged { name: String, cause: toml::de::Error },
}

/// Names and texts of what is built in.
const BUILT_IN: [(&str, &str); 1] = [("d3d", include_str!("../references/d3d.toml"))];

impl Reference {
    /// The published figures of this name.
    ///
    /// # Errors
    /// [`ReferenceError::Unknown`] lists the names there are.
    pub fn named(name: &str) -> Result<Self, ReferenceError> {
        let unknown = || ReferenceError::Unknown { name: name.to_string(), known: BUILT_IN.map(|(known, _)| known).to_vec() };
        let (_, text) = BUILT_IN.iter().find(|(known, _)| *known == name).ok_or_else(unknown)?;
        toml::from_str(text).map_err(|cause| ReferenceError::Damaged { name: name.to_string(), cause })
    }

    /// The published name of a benchmark that is called `name` here.
    pub fn published_name<'a>(&'a self, name: &'a str) -> &'a str {
        self.aliases.get(name).map_or(name, String::as_str)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_built_in_reference_can_be_read() {
        for (name, _) in BUILT_IN {
            assert!(!Reference::named(name).unwrap().methods.is_empty(), "{name}");
        }
        let error = Reference::named("d4d").unwrap_err().to_string();
        assert_eq!(error, "no published figures go by the name `d4d`; there are: d3d");
    }

    #[test]
    fn the_published_mean_is_that_of_the_seven_benchmarks() {
        let reference = Reference::named("d3d").unwrap();
        let of = |name: &str, target: &str| {
            reference.methods.iter().find(|method| method.name == name && method.target == target).unwrap().clone()
        };
        let mut figures = of("D3D", "Qwen3-8B").figures;
        let mean = figures.remove("mean").unwrap();
        let average = |of: fn(&PublishedFigures) -> f64| figures.values().map(of).sum::<f64>() / 7.0;
        assert_eq!(figures.len(), 7);
        assert!((average(|it| it.speedup) - mean.speedup).abs() < 0.01 && (average(|it| it.tau) - mean.tau).abs() < 0.01);
        assert_eq!(of("DSpark", "Qwen3-32B").figures["mean"], PublishedFigures { speedup: 3.92, tau: 5.48 });
        assert_eq!(reference.published_name("livecodebench"), "livecodebench-v6");
        assert_eq!(reference.published_name("gsm8k"), "gsm8k");
    }
}
