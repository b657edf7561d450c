//! What stands between two scores besides their checkpoints.

use super::{ALONE, Entry, Estimate, figures, pairs, speed_ratio};
use crate::score::Score;

/// Why the texts differ whatever the checkpoint.
pub(super) fn for_tau(ours: &Score, theirs: &Score) -> Vec<String> {
    let mut reasons = Vec::new();
    if ours.target != theirs.target {
        reasons.push(format!("other target ({}, the reference's {})", ours.target, theirs.target));
    }
    if ours.temperature != theirs.temperature {
        reasons.push(format!("other temperature ({}, the reference's {})", ours.temperature, theirs.temperature));
    }
    if ours.sampling != theirs.sampling {
        reasons.push(format!("sampled otherwise ({}, the reference {})", said(&ours.sampling), said(&theirs.sampling)));
    }
    if ours.drafts != theirs.drafts {
        reasons.push(format!("drafts are {}, the reference's {}", said(&ours.drafts), said(&theirs.drafts)));
    }
    reasons
}

fn said(text: &str) -> &str {
    if text.is_empty() { "not said how" } else { text }
}

/// Why the speeds differ whatever the checkpoint, beside [`for_tau`].
pub(super) fn for_speed(entry: &Entry, reference: &Entry, benchmark: &str) -> Vec<String> {
    let (ours, theirs) = (&entry.score, &reference.score);
    let mut reasons = Vec::new();
    if ours.dtype != theirs.dtype {
        reasons.push(format!("other dtype ({}, the reference's {})", ours.dtype, theirs.dtype));
    }
    if ours.concurrency != theirs.concurrency {
        reasons.push(format!("{} texts at once, the reference {}", ours.concurrency, theirs.concurrency));
    }
    let alone = figures(ours, ALONE, benchmark).zip(figures(theirs, ALONE, benchmark));
    let ratio = alone.and_then(|(ours, theirs)| pairs(ours, theirs).ok()).and_then(|pairs| speed_ratio(&pairs, 4));
    match ratio {
        // Checkpoints of one run share the measurement, and then this is 1 exactly. That no difference is shown is not enough: it must be
        // shown to be small.
        Some(Estimate { interval: Some((low, high)), .. }) if low > 1.0 - EQUALLY_FAST && high < 1.0 + EQUALLY_FAST => {}
        Some(Estimate { value, interval: Some((low, high)), .. }) => reasons.push(format!(
            "the target alone ran {value:.2}× ({low:.2}× to {high:.2}×) as fast as for the reference: another machine, or not as \
             idle; look at the speedups"
        )),
        _ if entry.run.is_some() && entry.run == reference.run => {}
        _ => reasons.push("nothing shows that both were measured on the same machine".to_string()),
    }
    reasons
}

/// The target alone is as fast on both sides if its speeds are shown to be no further apart than this share.
const EQUALLY_FAST: f64 = 0.1;

/// What was set otherwise for the drafters, which a difference is due to as much as to the checkpoints.
pub(super) fn other_settings(ours: &Score, theirs: &Score) -> Vec<String> {
    let dtype = |score: &Score| said(&score.drafter_dtype).to_string();
    let settings = [("fan-out", fan_out(ours), fan_out(theirs)), ("dtype of the drafter", dtype(ours), dtype(theirs))];
    let differing = settings.into_iter().filter(|(_, ours, theirs)| ours != theirs);
    differing.map(|(what, ours, theirs)| format!("other {what} ({ours}, the reference's {theirs})")).collect()
}

/// As it was asked for: what a budget of time comes to depends on the checkpoint.
fn fan_out(score: &Score) -> String {
    match (&score.budget, score.fan_out.split_once(',')) {
        (Some(budget), Some((policy, _))) => format!("{policy}, budget {}", budget.asked),
        _ => score.fan_out.clone(),
    }
}
