//! Scores side by side: what each reaches, and how far each is from one of them, prompt by prompt.
//!
//! Two scores are compared only over the same prompts in the same order, which `prompts_hash` tells. Then prompts are resampled in
//! pairs ([`crate::bootstrap`]), so that what makes a prompt easy or hard for both drops out. A verdict is given only where the interval
//! of the difference excludes equality, and withheld where something other than the checkpoint differs (the target, the machine).
//!
//! A [`Comparison`] written as JSON is a file format: its field names are its keys. All of them are always there, with null for what
//! is not known. [`table`], [`csv`] and [`html`] show the same.

mod csv;
mod obstacles;
mod page;
mod published;
#[cfg(test)]
mod tests;
mod text;

use data::supervision::{counter_generator, purpose};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

pub use self::csv::csv;
use self::obstacles::{for_speed, for_tau, other_settings};
pub use self::page::html;
pub use self::published::{Published, PublishedRow};
pub use self::text::table;
use crate::bootstrap::{interval, ratio_interval};
use crate::score::{BenchmarkScore, PromptFigures, Score};

/// Raised whenever a key of the JSON goes or changes its meaning.
pub const SCHEMA: u32 = 1;

/// The decoder that verdicts are foremost about.
const RANKED: &str = "asynchronous";

/// What the target does alone.
const ALONE: &str = "autoregressive";

/// A score, and the name it goes by in the comparison.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Unique among the entries.
    pub label: String,
    /// The run that the score belongs to; absent for a file by itself.
    pub run: Option<String>,
    pub score: Score,
}

/// Scores side by side.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    pub schema: u32,
    /// The label that differences are taken against.
    pub against: String,
    /// One for each score, benchmark and decoder; scores in the order given, the asynchronous decoder first.
    pub rows: Vec<Row>,
    /// The fastest checkpoint on each benchmark that has one.
    pub fastest: Vec<Fastest>,
    /// Absent unless asked for.
    pub published: Option<Published>,
}

/// What one checkpoint reaches on one benchmark with one decoder. Intervals here are (low, high) and hold 95 %.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    pub label: String,
    pub run: Option<String>,
    pub checkpoint: String,
    pub kind: String,
    pub target: String,
    /// The target's.
    pub dtype: String,
    pub drafter_dtype: String,
    pub block_size: usize,
    pub layers: usize,
    /// Of the drafter, where the score says.
    pub parameters: Option<u64>,
    pub fan_out: String,
    pub concurrency: usize,
    pub temperature: f64,
    pub benchmark: String,
    pub decoder: String,
    pub prompts: usize,
    pub tokens: usize,
    pub rounds: usize,
    /// Pooled: tokens committed over rounds.
    pub tau: f64,
    pub tau_interval: Option<(f64, f64)>,
    pub tokens_per_second: f64,
    /// Over the autoregressive decoder of the same score.
    pub speedup: Option<f64>,
    pub speedup_interval: Option<(f64, f64)>,
    pub hit_rate: Option<f64>,
    /// What the drafter took on average to write the continuations of a round; absent where nothing is drafted ahead.
    pub pack_milliseconds: Option<f64>,
    /// The same tokens as autoregressive decoding: `yes`, `near-ties` (but for those) or `no`; `in distribution` where drafts are sampled,
    /// and texts agree in no more than that.
    pub identical: Option<&'static str>,
    /// From the row of the reference with the same benchmark and decoder; absent for that row and for the target alone.
    pub difference: Option<Difference>,
}

/// How a row differs from the reference's.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Difference {
    /// Prompts compared: those on which both had a round.
    pub prompts: usize,
    /// τ less the reference's, both pooled over these prompts. Absent where the prompts are others.
    pub tau: Option<Estimate>,
    /// Tokens per second over the reference's. Absent likewise, and where there are no times.
    pub speed_ratio: Option<Estimate>,
    /// Why there is no difference or no verdict, and what else to know.
    pub notes: Vec<String>,
}

/// A difference or a ratio.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    pub value: f64,
    /// Holds 95 %; absent with fewer than two prompts.
    pub interval: Option<(f64, f64)>,
    /// Absent where there is no interval, or something other than the checkpoint differs.
    pub verdict: Option<Verdict>,
}

impl Estimate {
    fn new(value: f64, interval: Option<(f64, f64)>, equal: f64) -> Self {
        Self { value, interval, verdict: interval.map(|interval| Verdict::of(interval, equal)) }
    }

    /// Without its verdict unless it `may` have one.
    fn judged(self, may: bool) -> Self {
        Self { verdict: self.verdict.filter(|_| may), ..self }
    }
}

/// What an interval shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Better,
    Worse,
    NoDifferenceShown,
}

impl Verdict {
    /// Of a difference or ratio that is better the larger it is, and nothing at `equal`.
    fn of((low, high): (f64, f64), equal: f64) -> Self {
        if low > equal {
            Verdict::Better
        } else if high < equal {
            Verdict::Worse
        } else {
            Verdict::NoDifferenceShown
        }
    }

    /// As JSON and CSV have it.
    fn key(self) -> &'static str {
        match self {
            Verdict::Better => "better",
            Verdict::Worse => "worse",
            Verdict::NoDifferenceShown => "no_difference_shown",
        }
    }

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Better => "better",
            Verdict::Worse => "worse",
            Verdict::NoDifferenceShown => "no difference shown",
        }
    }
}

/// The fastest of at least two whose speeds can be compared with the reference's and whose output is that of the target alone.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fastest {
    pub benchmark: String,
    pub decoder: String,
    pub label: String,
    pub tokens_per_second: f64,
    pub speedup: Option<f64>,
    /// Those that are not shown to be slower.
    pub not_shown_slower: Vec<String>,
}

/// What can be wrong with the choice of what to compare.
#[derive(Debug, thiserror::Error)]
pub enum ComparisonError {
    #[error("there are no figures to compare: no score has a benchmark")]
    Nothing,
    #[error("`{label}` has no figures: its evaluation had no decoder or no benchmark; leave it out, or evaluate it again")]
    Empty { label: String },
    #[error("no score is called `{label}`; there are: {}", known.join(", "))]
    UnknownLabel { label: String, known: Vec<String> },
    #[error("no score has the benchmark `{name}`; there are: {}", known.join(", "))]
    UnknownBenchmark { name: String, known: Vec<String> },
}

/// Compares `entries` with the one labelled `against`, or else with the first, on the `benchmarks` named, or else on all.
///
/// A name after `against` may also be a checkpoint's, where only one entry has it.
///
/// # Errors
/// When there is no entry, or a name is none of theirs; the message lists those there are.
pub fn compare(entries: &[Entry], against: Option<&str>, benchmarks: &[String]) -> Result<Comparison, ComparisonError> {
    let reference = reference(entries, against)?;
    let mut known: Vec<&String> = Vec::new();
    for name in entries.iter().flat_map(|entry| entry.score.decoders.values()).flat_map(|decoder| decoder.benchmarks.keys()) {
        if !known.contains(&name) {
            known.push(name);
        }
    }
    if let Some(name) = benchmarks.iter().find(|name| !known.contains(name)) {
        return Err(ComparisonError::UnknownBenchmark { name: name.clone(), known: known.into_iter().cloned().collect() });
    }
    if known.is_empty() {
        return Err(ComparisonError::Nothing);
    }
    let is_empty = |entry: &&Entry| entry.score.decoders.values().all(|decoder| decoder.benchmarks.is_empty());
    if let Some(entry) = entries.iter().find(is_empty) {
        return Err(ComparisonError::Empty { label: entry.label.clone() });
    }
    known.retain(|name| benchmarks.is_empty() || benchmarks.contains(name));

    let mut rows = Vec::new();
    for entry in entries {
        for benchmark in &known {
            for decoder in decoders(&entry.score) {
                if let Some(figures) = figures(&entry.score, decoder, benchmark) {
                    let wanted = !std::ptr::eq(entry, reference) && decoder != ALONE;
                    let difference = wanted.then(|| difference(entry, reference, decoder, benchmark));
                    rows.push(Row { difference, ..row(entry, decoder, benchmark, figures) });
                }
            }
        }
    }
    let fastest = known.iter().filter_map(|benchmark| fastest(entries, &rows, benchmark)).collect();
    Ok(Comparison { schema: SCHEMA, against: reference.label.clone(), rows, fastest, published: None })
}

/// The entry that the others are compared with.
fn reference<'e>(entries: &'e [Entry], against: Option<&str>) -> Result<&'e Entry, ComparisonError> {
    let Some(label) = against else { return entries.first().ok_or(ComparisonError::Nothing) };
    if let Some(entry) = entries.iter().find(|entry| entry.label == label) {
        return Ok(entry);
    }
    let mut named = entries.iter().filter(|entry| entry.score.checkpoint == label);
    match (named.next(), named.next()) {
        (Some(entry), None) => Ok(entry),
        _ => {
            let known = entries.iter().map(|entry| entry.label.clone()).collect();
            Err(ComparisonError::UnknownLabel { label: label.to_string(), known })
        }
    }
}

/// The decoders of a score: the ranked one first, the target alone last.
fn decoders(score: &Score) -> Vec<&str> {
    let mut names: Vec<&str> = score.decoders.keys().map(String::as_str).collect();
    names.sort_by_key(|&name| (name == ALONE, name != RANKED));
    names
}

fn figures<'s>(score: &'s Score, decoder: &str, benchmark: &str) -> Option<&'s BenchmarkScore> {
    score.decoders.get(decoder)?.benchmarks.get(benchmark)
}

/// The figures of a row; what depends on others is filled in by the caller.
fn row(entry: &Entry, decoder: &str, benchmark: &str, figures: &BenchmarkScore) -> Row {
    let score = &entry.score;
    Row {
        label: entry.label.clone(),
        run: entry.run.clone(),
        checkpoint: score.checkpoint.clone(),
        kind: score.kind.clone(),
        target: score.target.clone(),
        dtype: score.dtype.clone(),
        drafter_dtype: score.drafter_dtype.clone(),
        block_size: score.block_size,
        layers: score.layers,
        parameters: score.parameters,
        fan_out: score.fan_out.clone(),
        concurrency: score.concurrency,
        temperature: score.temperature,
        benchmark: benchmark.to_string(),
        decoder: decoder.to_string(),
        prompts: figures.prompts,
        tokens: figures.tokens,
        rounds: figures.rounds,
        tau: figures.tau_pooled,
        // One prompt has no spread, whatever a file says.
        tau_interval: figures.tau_interval.filter(|_| figures.prompts > 1),
        tokens_per_second: figures.tokens_per_second,
        speedup: figures.speedup,
        speedup_interval: figures.speedup_interval.filter(|_| figures.prompts > 1),
        hit_rate: figures.hit_rate,
        pack_milliseconds: (figures.pack_seconds > 0.0).then(|| 1e3 * figures.pack_seconds / figures.rounds.max(1) as f64),
        identical: identical(score, decoder, figures),
        difference: None,
    }
}

fn identical(score: &Score, decoder: &str, figures: &BenchmarkScore) -> Option<&'static str> {
    if score.drafts == "sampled" && score.temperature > 0.0 && decoder != ALONE {
        return Some("in distribution");
    }
    let divergences = figures.first_divergences.len();
    Some(match figures.identical_to_autoregressive? {
        true => "yes",
        false if divergences > 0 && figures.near_ties == Some(divergences) => "near-ties",
        false => "no",
    })
}

/// How `entry` differs from `reference` with one decoder on one benchmark, which `entry` has figures of.
fn difference(entry: &Entry, reference: &Entry, decoder: &str, benchmark: &str) -> Difference {
    let mut difference = Difference::default();
    let sides = (figures(&entry.score, decoder, benchmark), figures(&reference.score, decoder, benchmark));
    let (Some(ours), Some(theirs)) = sides else {
        difference.notes.push(format!("not compared: {} has no such figures", reference.label));
        return difference;
    };
    // A template shows the mode in the prompts; where it does not, the answers are others all the same.
    if let (Some(ours), Some(theirs)) = (entry.score.thinking, reference.score.thinking)
        && ours != theirs
    {
        let with = |thinking| if thinking { "with" } else { "without" };
        difference.notes.push(format!("not compared: one is {} thinking, the other {}", with(ours), with(theirs)));
        return difference;
    }
    let pairs = match pairs(ours, theirs) {
        Ok(pairs) => pairs,
        Err(reason) => {
            difference.notes.push(format!("not compared: {reason}"));
            return difference;
        }
    };
    difference.prompts = pairs.len();
    if pairs.is_empty() {
        difference.notes.push("not compared: no prompt took a round of both".to_string());
        return difference;
    }
    if pairs.len() == 1 {
        difference.notes.push("one prompt is too few for an interval".to_string());
    }
    let texts = for_tau(&entry.score, &reference.score);
    let speeds = for_speed(entry, reference, benchmark);
    let tau = |picked: &[usize]| {
        let tau_of = |side: fn(&Pair) -> PromptFigures| tau(picked.iter().map(|&index| side(&pairs[index])));
        tau_of(|pair| pair.0) - tau_of(|pair| pair.1)
    };
    let interval = (pairs.len() > 1).then(|| interval(pairs.len(), generator(2), tau));
    let of_all = tau(&(0..pairs.len()).collect::<Vec<_>>());
    difference.tau = Some(Estimate::new(of_all, interval, 0.0).judged(texts.is_empty()));
    let may_judge_speed = texts.is_empty() && speeds.is_empty();
    difference.speed_ratio = speed_ratio(&pairs, 3).map(|ratio| ratio.judged(may_judge_speed));
    let (committed, others) = (committed(&pairs, |pair| pair.0), committed(&pairs, |pair| pair.1));
    if texts.is_empty() && (committed / others - 1.0).abs() > OTHER_LENGTH {
        difference.notes.push(format!("mind: its texts have {committed} tokens, the reference's {others}"));
    }
    difference.notes.extend(other_settings(&entry.score, &reference.score).into_iter().map(|it| format!("mind: {it}")));
    difference.notes.extend(texts.into_iter().map(|reason| format!("no verdict: {reason}")));
    difference.notes.extend(speeds.into_iter().map(|reason| format!("no verdict on speed: {reason}")));
    difference
}

/// Near-ties in bf16 make texts a little longer or shorter; beyond this share, something else did, such as another length limit.
const OTHER_LENGTH: f64 = 0.05;

/// One prompt's figures on both sides.
type Pair = (PromptFigures, PromptFigures);

/// The figures of both on every prompt that took a round of both.
///
/// # Errors
/// Why they cannot be paired.
fn pairs(ours: &BenchmarkScore, theirs: &BenchmarkScore) -> Result<Vec<Pair>, &'static str> {
    if ours.by_prompt.is_empty() || theirs.by_prompt.is_empty() || ours.prompts_hash.is_empty() || theirs.prompts_hash.is_empty()
    {
        return Err("a score without figures by prompt, as older versions wrote them");
    }
    if ours.prompts_hash != theirs.prompts_hash || ours.by_prompt.len() != theirs.by_prompt.len() {
        return Err("other prompts");
    }
    let both = ours.by_prompt.iter().copied().zip(theirs.by_prompt.iter().copied());
    Ok(both.filter(|(one, other)| one.rounds > 0 && other.rounds > 0).collect())
}

/// Tokens committed by rounds, over rounds.
fn tau(prompts: impl Iterator<Item = PromptFigures>) -> f64 {
    let (committed, rounds) = prompts.fold((0.0, 0.0), |sum, it| (sum.0 + it.committed as f64, sum.1 + it.rounds as f64));
    committed / rounds
}

/// Tokens committed by rounds, over seconds.
fn rate(prompts: impl Iterator<Item = PromptFigures>) -> f64 {
    let (committed, seconds) = prompts.fold((0.0, 0.0), |sum, it| (sum.0 + it.committed as f64, sum.1 + it.seconds));
    committed / seconds
}

fn committed(pairs: &[Pair], side: fn(&Pair) -> PromptFigures) -> f64 {
    pairs.iter().map(|pair| side(pair).committed as f64).sum()
}

/// Of resamplings; `counter` tells them apart.
fn generator(counter: u64) -> ChaCha8Rng {
    counter_generator(0, purpose::BOOTSTRAP, counter, 0)
}

/// Tokens per second of the first over the second's; `None` where either has no times.
fn speed_ratio(pairs: &[Pair], counter: u64) -> Option<Estimate> {
    let timed = |it: &PromptFigures| it.committed > 0 && it.seconds > 0.0 && it.seconds.is_finite();
    let pairs: Vec<&Pair> = pairs.iter().filter(|(one, other)| timed(one) && timed(other)).collect();
    let ratio = |picked: &[usize]| {
        let rate_of = |side: fn(&Pair) -> PromptFigures| rate(picked.iter().map(|&index| side(pairs[index])));
        rate_of(|pair| pair.0) / rate_of(|pair| pair.1)
    };
    let interval = (pairs.len() > 1).then(|| ratio_interval(pairs.len(), generator(counter), ratio));
    (!pairs.is_empty()).then(|| Estimate::new(ratio(&(0..pairs.len()).collect::<Vec<_>>()), interval, 1.0))
}

/// Ranks the rows of one benchmark.
fn fastest(entries: &[Entry], rows: &[Row], benchmark: &str) -> Option<Fastest> {
    let comparable = |row: &&Row| match &row.difference {
        None => true,
        Some(difference) => difference.speed_ratio.is_some_and(|ratio| ratio.verdict.is_some()),
    };
    let same_output = |row: &&Row| matches!(row.identical, Some("yes" | "near-ties" | "in distribution"));
    let of_benchmark = rows.iter().filter(|row| row.benchmark == benchmark && row.decoder == RANKED);
    let ranked: Vec<&Row> = of_benchmark.filter(comparable).filter(same_output).collect();
    if ranked.len() < 2 {
        return None;
    }
    let best = ranked.iter().max_by(|one, other| one.tokens_per_second.total_cmp(&other.tokens_per_second))?;
    let of = |row: &Row| {
        let entry = entries.iter().find(|entry| entry.label == row.label)?;
        figures(&entry.score, RANKED, benchmark)
    };
    let shown_slower = |row: &Row| {
        let pairs = of(row).zip(of(best)).and_then(|(row, best)| pairs(row, best).ok())?;
        Some(speed_ratio(&pairs, 3)?.verdict == Some(Verdict::Worse))
    };
    let others = ranked.iter().filter(|row| row.label != best.label);
    Some(Fastest {
        benchmark: benchmark.to_string(),
        decoder: RANKED.to_string(),
        label: best.label.clone(),
        tokens_per_second: best.tokens_per_second,
        speedup: best.speedup,
        not_shown_slower: others.filter(|row| shown_slower(row) != Some(true)).map(|row| row.label.clone()).collect(),
    })
}
