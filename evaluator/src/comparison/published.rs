//! Published figures beside measured ones: told apart by their names, and never judged against each other.

use configs::{Method, Reference};
use serde::Serialize;

use super::Comparison;

/// Published figures that belong beside a comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Published {
    /// What keeps these figures from being compared with the measured ones, in words.
    pub caution: String,
    pub rows: Vec<PublishedRow>,
}

/// One published figure.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PublishedRow {
    pub method: String,
    pub paper: String,
    pub target: String,
    pub gpus: Option<u32>,
    /// As it was published; `mean` is over several.
    pub benchmark: String,
    /// The measured benchmark of the same name; absent for means.
    pub beside: Option<String>,
    pub tau: f64,
    pub speedup: f64,
}

/// The target that most was published about.
const USUAL_TARGET: &str = "Qwen3-8B";

impl Comparison {
    /// Adds the published figures of the benchmarks compared, and the means, with the target measured or else [`USUAL_TARGET`].
    pub fn beside(mut self, reference: &Reference) -> Self {
        let mut targets: Vec<&str> = self.rows.iter().map(|row| model_name(&row.target)).collect();
        targets.dedup();
        let with_target = |method: &&Method| targets.iter().any(|target| target.eq_ignore_ascii_case(&method.target));
        let target = reference.methods.iter().find(with_target).map_or(USUAL_TARGET, |method| method.target.as_str());
        let chosen: Vec<&Method> = reference.methods.iter().filter(|method| method.target == target).collect();

        let mut benchmarks: Vec<&str> = Vec::new();
        for row in &self.rows {
            if !benchmarks.contains(&row.benchmark.as_str()) {
                benchmarks.push(&row.benchmark);
            }
        }
        let named = benchmarks.iter().map(|&benchmark| (reference.published_name(benchmark), Some(benchmark)));
        let mut rows = Vec::new();
        for (published, beside) in named.chain([("mean", None)]) {
            for method in &chosen {
                rows.extend(method.figures.get(published).map(|figures| PublishedRow {
                    method: method.name.clone(),
                    paper: method.paper.clone(),
                    target: method.target.clone(),
                    gpus: method.gpus,
                    benchmark: published.to_string(),
                    beside: beside.map(str::to_string),
                    tau: figures.tau,
                    speedup: figures.speedup,
                }));
            }
        }
        let mut gpus: Vec<u32> = chosen.iter().filter_map(|method| method.gpus).collect();
        gpus.sort_unstable();
        let gpus = match (gpus.first(), gpus.last()) {
            (Some(1), Some(1)) => " (1 GPU)".to_string(),
            (Some(fewest), Some(most)) if fewest == most => format!(" ({most} GPUs)"),
            (Some(fewest), Some(most)) => format!(" ({fewest} or {most} GPUs)"),
            _ => String::new(),
        };
        let mut caution = format!("published: other hardware{gpus}, target {target}; {}", reference.conditions);
        let others: Vec<&str> = targets.iter().copied().filter(|measured| !measured.eq_ignore_ascii_case(target)).collect();
        if !others.is_empty() {
            caution += &format!(". The target measured here is another model: {}", others.join(", "));
        }
        self.published = Some(Published { caution, rows });
        self
    }
}

/// A target's name without the ending of its file.
fn model_name(target: &str) -> &str {
    target.strip_suffix(".gguf").unwrap_or(target)
}
