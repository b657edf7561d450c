//! The figures of a run's report: picks the data out of metrics, ledger and scores, and titles each figure with what it
//! shows. A function returns nothing (or an empty list) when the run holds no data for its figure.

mod by_benchmark;
mod charts;
mod pruning;

use std::collections::BTreeMap;

use serde_json::Value;

pub(crate) use self::by_benchmark::by_benchmark;
use self::charts::{LineChart, RowBar, RowChart, Series, Span, Timeline};
pub(crate) use self::pruning::{REMOVALS, ending, layers, removals, swap};
use crate::report::TimelineRound;
use crate::svg::{escape, is_drawable, short};
use crate::table::{benchmark_names, checkpoint_name, measured, number, percent};

/// More points than this on one line are averaged: the eye sees no more, and the file stays small.
const MOST_POINTS: usize = 240;

/// The style of what is neither hit nor miss: grey.
const NEUTRAL: usize = 5;

/// How often the draft is accepted at each position, one line a checkpoint.
pub(crate) fn acceptance(scores: &[Value]) -> Option<String> {
    let mut series = Vec::new();
    for (style, score) in scores.iter().enumerate() {
        let shares = accepted_shares(score);
        let points: Vec<(f64, f64)> = shares.iter().enumerate().map(|(index, share)| ((index + 1) as f64, *share)).collect();
        if !points.is_empty() {
            series.push(Series { name: checkpoint_name(score), style, points });
        }
    }
    let ends: Vec<String> = series
        .iter()
        .filter_map(|line| {
            let (first, last) = (line.points.first()?, line.points.last()?);
            Some(format!("{} {} → {}", line.name, percent(first.1), percent(last.1)))
        })
        .collect();
    let positions = series.iter().map(|line| line.points.len()).max()?;
    let title = format!("Share of rounds that accept the draft, from position 1 to position {positions}");
    let chart = LineChart {
        label: format!("{title}: {}", ends.join("; ")),
        x_label: "position in the draft".to_owned(),
        y_label: "accepted, % of rounds".to_owned(),
        series,
        percent: true,
    };
    let note = format!("First and last position: {}. All benchmarks together, asynchronous decoder.", ends.join("; "));
    Some(figure(&title, &note, |width| charts::line_chart(&chart, width)))
}

/// Acceptance by position over all benchmarks of the asynchronous decoder, each weighted by its rounds.
fn accepted_shares(score: &Value) -> Vec<f64> {
    let mut totals: Vec<(f64, f64)> = Vec::new();
    for benchmark in benchmark_names(score) {
        let figures = measured(score, "asynchronous", &benchmark);
        let rounds = number(figures, "rounds").unwrap_or(1.0).max(0.0);
        let shares = figures["acceptance_by_position"].as_array().map(Vec::as_slice).unwrap_or_default();
        totals.resize(totals.len().max(shares.len()), (0.0, 0.0));
        for (total, share) in totals.iter_mut().zip(shares) {
            if let Some(share) = share.as_f64().filter(|share| (0.0..=1.0).contains(share)) {
                *total = (total.0 + share * rounds, total.1 + rounds);
            }
        }
    }
    totals
        .iter()
        .map(|(sum, rounds)| if *rounds > 0.0 { sum / rounds } else { f64::NAN })
        .take_while(|share| !share.is_nan())
        .collect()
}

/// How often a checkpoint's rounds would find their draft ready over the continuations that they may have, one line a fan-out.
pub(crate) fn hit_rates(score: &Value) -> Option<String> {
    let fan_outs = score["hit_rate_by_blocks"].as_object()?;
    let mut series = Vec::new();
    let mut rounds = 0.0_f64;
    for (style, (name, sizes)) in fan_outs.iter().enumerate() {
        let sizes = sizes.as_array().map(Vec::as_slice).unwrap_or_default();
        let point =
            |size: &Value| Some((number(size, "blocks")?, number(size, "hit_rate").filter(|rate| (0.0..=1.0).contains(rate))?));
        let mut points: Vec<(f64, f64)> = sizes.iter().filter_map(point).filter(|(blocks, _)| is_drawable(*blocks)).collect();
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        rounds = sizes.iter().filter_map(|size| number(size, "rounds")).fold(rounds, f64::max);
        if !points.is_empty() {
            series.push(Series { name: words(name), style, points });
        }
    }
    let ends: Vec<String> = series
        .iter()
        .filter_map(|line| {
            Some(format!("{} {} → {}", line.name, percent(line.points.first()?.1), percent(line.points.last()?.1)))
        })
        .collect();
    let best = |line: &&Series| line.points.last().map_or(0.0, |point| point.1);
    let first = series.iter().max_by(|one, other| best(one).total_cmp(&best(other)))?;
    let (blocks, rate) = *first.points.last()?;
    let checkpoint = checkpoint_name(score);
    let title = format!(
        "{checkpoint}: {} has a continuation ready for {} of outcomes with {} blocks",
        first.name,
        percent(rate),
        short(blocks)
    );
    let note = format!(
        "Fewest and most blocks: {}. {} rounds on held-out responses, replayed without packs.",
        ends.join("; "),
        short(rounds.clamp(0.0, 1e12))
    );
    let chart = LineChart {
        label: format!("{title}: {}", ends.join("; ")),
        x_label: "continuations of a round, blocks".to_owned(),
        y_label: "hit rate, % of outcomes".to_owned(),
        series,
        percent: true,
    };
    Some(figure(&title, &note, |width| charts::line_chart(&chart, width)))
}

/// The losses over steps: a figure for each training stage, and one for all recoveries together.
pub(crate) fn losses(metrics: &[Value]) -> String {
    let (recoveries, trainings): (Vec<String>, Vec<String>) =
        stages(metrics).into_iter().partition(|stage| stage.starts_with("recover"));
    let mut figures = String::new();
    for stage in &trainings {
        let parts =
            [("loss", "sum that is minimised"), ("loss_diffusion", "diffusion"), ("loss_autoregressive", "autoregressive")];
        let lines = parts.iter().map(|(key, name)| ((*name).to_owned(), curve(metrics, stage, key))).collect();
        figures += &curves(&format!("Loss in stage {stage}"), "loss", lines);
    }
    let lines = recoveries.iter().map(|stage| (stage.clone(), curve(metrics, stage, "loss"))).collect();
    figures + &curves(&format!("Loss of the recovery {}", recovered_from(&recoveries)), "distillation loss", lines)
}

/// What recoveries of these names came after.
fn recovered_from(recoveries: &[String]) -> &'static str {
    let of_swap = |name: &String| name.ends_with("-swapped");
    match (recoveries.iter().any(of_swap), recoveries.iter().all(of_swap)) {
        (_, true) => "after the swap",
        (true, false) => "after each removal and the swap",
        (false, false) => "after each removal",
    }
}

/// Replay τ over steps: a figure for each training stage, and one for all recoveries together.
pub(crate) fn replay_tau(metrics: &[Value]) -> String {
    let (recoveries, trainings): (Vec<String>, Vec<String>) =
        stages(metrics).into_iter().partition(|stage| stage.starts_with("recover"));
    let mut figures = String::new();
    for stage in &trainings {
        let parts = [("replay_tau_pooled", "pooled: committed ÷ rounds"), ("replay_tau_macro", "macro: mean of the responses")];
        let lines = parts.iter().map(|(key, name)| ((*name).to_owned(), curve(metrics, stage, key))).collect();
        figures += &curves(&format!("Replay τ in stage {stage}"), "τ, tokens a round", lines);
    }
    let lines = recoveries.iter().map(|stage| (stage.clone(), curve(metrics, stage, "replay_tau_pooled"))).collect();
    figures + &curves(&format!("Replay τ of the recovery {}", recovered_from(&recoveries)), "pooled τ, tokens a round", lines)
}

fn curves(subject: &str, y_label: &str, lines: Vec<(String, Vec<(f64, f64)>)>) -> String {
    let lines: Vec<(String, Vec<(f64, f64)>)> = lines.into_iter().filter(|(_, points)| !points.is_empty()).collect();
    let Some((_, points)) = lines.first() else {
        return String::new();
    };
    let (first, last) = (points[0], points[points.len() - 1]);
    let title = match points.len() {
        1 => format!("{subject}: {} at step {:.0}", short(first.1), first.0),
        _ => format!("{subject}: {} at step {:.0}, {} at step {:.0}", short(first.1), first.0, short(last.1), last.0),
    };
    let mut bucket = 1;
    let series = lines
        .into_iter()
        .enumerate()
        .map(|(style, (name, points))| {
            let size = points.len().div_ceil(MOST_POINTS);
            bucket = bucket.max(size);
            Series { name, style, points: points.chunks(size).map(mean).collect() }
        })
        .collect();
    let note = if bucket > 1 { format!("Each point is the mean of {bucket} logged steps.") } else { String::new() };
    let chart =
        LineChart { label: title.clone(), x_label: "step".to_owned(), y_label: y_label.to_owned(), series, percent: false };
    figure(&title, &note, |width| charts::line_chart(&chart, width))
}

fn mean(points: &[(f64, f64)]) -> (f64, f64) {
    let count = points.len() as f64;
    (points.iter().map(|point| point.0).sum::<f64>() / count, points.iter().map(|point| point.1).sum::<f64>() / count)
}

fn stages(metrics: &[Value]) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for stage in metrics.iter().filter_map(|line| line["stage"].as_str()) {
        if !found.iter().any(|known| known == stage) {
            found.push(stage.to_owned());
        }
    }
    found
}

/// (step, value) in the order of steps. A step that was repeated after an interruption counts once, as it went last.
fn curve(metrics: &[Value], stage: &str, key: &str) -> Vec<(f64, f64)> {
    let mut points = BTreeMap::new();
    for line in metrics.iter().filter(|line| line["stage"].as_str() == Some(stage)) {
        if let (Some(step), Some(value)) = (line["step"].as_u64(), number(line, key)) {
            points.insert(step, value);
        }
    }
    points.into_iter().map(|(step, value)| (step as f64, value)).collect()
}

/// Why rounds of the asynchronous decoder had no continuation ready, by cause, for every checkpoint.
pub(crate) fn misses(scores: &[Value]) -> Option<String> {
    let mut causes: Vec<(String, Vec<RowBar>)> = Vec::new();
    let mut sums: BTreeMap<String, f64> = BTreeMap::new();
    for (style, score) in scores.iter().enumerate() {
        let (counts, rounds) = miss_counts(score);
        for (cause, count) in counts {
            *sums.entry(cause.clone()).or_default() += count;
            let share = if rounds > 0.0 { format!(" ({:.1} % of rounds)", count / rounds * 100.0) } else { String::new() };
            let bar = RowBar { style, length: count, text: format!("{}{share}", short(count)) };
            match causes.iter_mut().find(|(known, _)| *known == cause) {
                Some((_, bars)) => bars.push(bar),
                None => causes.push((cause, vec![bar])),
            }
        }
    }
    causes.sort_by(|left, right| sums[&right.0].total_cmp(&sums[&left.0]));
    let (most, _) = causes.first()?;
    let title = format!("Most frequent cause of a miss: {}", words(most));
    let chart = RowChart {
        label: title.clone(),
        names: scores.iter().map(checkpoint_name).collect(),
        groups: causes.into_iter().map(|(cause, bars)| (words(&cause), bars)).collect(),
    };
    Some(figure(&title, "Rounds by cause, all benchmarks together, asynchronous decoder.", |width| {
        charts::row_chart(&chart, width)
    }))
}

fn miss_counts(score: &Value) -> (Vec<(String, f64)>, f64) {
    let (mut counts, mut rounds): (Vec<(String, f64)>, f64) = (Vec::new(), 0.0);
    for benchmark in benchmark_names(score) {
        let figures = measured(score, "asynchronous", &benchmark);
        rounds += number(figures, "rounds").unwrap_or(0.0);
        let Some(misses) = figures["misses"].as_object() else { continue };
        for cause in misses.keys() {
            let Some(count) = number(&figures["misses"], cause).filter(|count| *count >= 0.0) else { continue };
            match counts.iter_mut().find(|(known, _)| known == cause) {
                Some((_, sum)) => *sum += count,
                None => counts.push((cause.clone(), count)),
            }
        }
    }
    (counts, rounds)
}

/// Target and drafter side by side over a few rounds.
pub(crate) fn timeline(rounds: &[TimelineRound]) -> Option<String> {
    let finite = |round: &&TimelineRound| is_drawable(round.verify_start) && is_drawable(round.verify_end);
    let rounds: Vec<&TimelineRound> = rounds.iter().filter(finite).collect();
    if rounds.is_empty() {
        return None;
    }
    let mut causes: Vec<&str> = Vec::new();
    for round in &rounds {
        if !["hit", "first"].contains(&round.outcome.as_str()) && !causes.contains(&round.outcome.as_str()) {
            causes.push(&round.outcome);
        }
    }
    // Hits and first rounds keep their colours whatever causes of a miss there are.
    let style = |outcome: &str| match outcome {
        "hit" => 0,
        "first" => NEUTRAL,
        _ => 1 + causes.iter().position(|cause| *cause == outcome).unwrap_or(0) % (NEUTRAL - 1),
    };
    let milliseconds = |start: f64, end: f64| format!("{:.1}", (end - start) * 1000.0);
    let mut spans = Vec::new();
    for (index, round) in rounds.iter().enumerate() {
        let (number, how, style_of_round) = (index + 1, outcome_name(&round.outcome), style(&round.outcome));
        let (start, end) = (round.verify_start, round.verify_end);
        let text = format!("+{}", round.committed);
        let hover =
            format!("round {number}, {how}: verified for {} ms, {} tokens committed", milliseconds(start, end), round.committed);
        spans.push(Span { lane: 0, start, end, style: style_of_round, hollow: false, text, hover });

        let (start, end) = (round.draft_start, round.draft_end);
        let hover = format!("draft of round {number}, {how}: {} ms", milliseconds(start, end));
        spans.push(Span { lane: 1, start, end, style: style_of_round, hollow: false, text: String::new(), hover });

        // What a pack was worth shows in the round after it.
        let next = rounds.get(index + 1).map_or("first", |next| next.outcome.as_str());
        let (sign, fate) = match next {
            "first" => ("", "not looked up here"),
            "hit" => ("✓", "used"),
            _ => ("×", "thrown away"),
        };
        let (start, end, hollow) = (round.pack_start, round.pack_end, next != "hit");
        let hover = format!("pack for round {}, {fate}: {} ms", number + 1, milliseconds(start, end));
        spans.push(Span { lane: 1, start, end, style: style(next), hollow, text: sign.to_owned(), hover });
    }
    let hits = rounds.iter().filter(|round| round.outcome == "hit").count();
    let firsts = rounds.iter().filter(|round| round.outcome == "first").count();
    let committed: usize = rounds.iter().map(|round| round.committed).sum();
    let (ready, missed) = (count_of(hits, "draft was", "drafts were"), rounds.len() - firsts - hits);
    let verb = if missed == 1 { "was" } else { "were" };
    let title = format!("{} rounds, {committed} tokens: {ready} ready, {missed} {verb} missed", rounds.len());
    let usual = [("hit", hits), ("first", firsts)];
    let shown = usual.into_iter().filter(|(_, count)| *count > 0).map(|(outcome, _)| outcome).chain(causes.iter().copied());
    let chart = Timeline {
        label: format!("Timeline of {title}"),
        lanes: vec!["target verifies".to_owned(), "drafter drafts".to_owned()],
        legend: shown.map(|outcome| (style(outcome), outcome_name(outcome))).collect(),
        spans,
    };
    let note = "Target: tokens committed by each verification. Drafter: packs for the round to come, used (✓) or thrown away (×, hollow), \
                and after a miss the draft that the target waits for.";
    Some(figure(&title, note, |width| charts::timeline(&chart, width)))
}

fn outcome_name(outcome: &str) -> String {
    match outcome {
        "hit" => "hit".to_owned(),
        "first" => "first of a text".to_owned(),
        _ => format!("miss: {}", words(outcome)),
    }
}

fn count_of(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// A key such as `wrong_candidate`, in words.
fn words(key: &str) -> String {
    key.replace('_', " ")
}

/// A titled figure, drawn twice: for wide screens, and for phones, where a shrunk drawing could not be read.
pub(crate) fn figure(title: &str, note: &str, draw: impl Fn(f64) -> String) -> String {
    let note = if note.is_empty() { String::new() } else { format!("<small>{}</small>", escape(note)) };
    let (title, wide, narrow) = (escape(title), draw(912.0), draw(358.0));
    format!(
        "<figure><figcaption>{title}{note}</figcaption>\n<div class=\"wide\">{wide}</div>\n<div class=\"narrow\">{narrow}</div></figure>\n"
    )
}
