//! What the run's metrics hold of recoveries, in line with what the prune folder holds.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::Context as _;
use pruner::ledger::Ledger;
use pruner::recovery::is_done;
use serde_json::Value;
use trainer::metrics::JsonLines;
use trainer::saving::resumed_step;

/// Drops the lines of steps that are done again or belong to a pruning that is gone: those of recoveries that are not done, from the step
/// on that the one under way resumes from. Goes by what the metrics hold, for an earlier pruning may have removed more layers than this one.
pub(super) fn rewind(metrics: &Path, folder: &Path, ledger: &Ledger) -> anyhow::Result<()> {
    let text = match fs::read_to_string(metrics) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        text => text.with_context(|| format!("cannot read `{}`", metrics.display()))?,
    };
    // A line that a killed process left half-written names no stage, and goes with any rewinding.
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let stages: BTreeSet<String> = lines.filter_map(|line| Some(line["stage"].as_str()?.to_string())).collect();
    for name in stages.iter().filter(|name| name.starts_with("recover-") && !is_done(folder, ledger, name)) {
        JsonLines::rewind(metrics, name, resumed_step(&folder.join(name))?)
            .with_context(|| format!("cannot write `{}`", metrics.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeMap;

    use pruner::ledger::{Event, Swapped};

    use super::*;

    /// Lines that are left of each stage, of two steps each.
    fn left(folders: &[&str], swap_kept: Option<bool>) -> BTreeMap<String, usize> {
        let run = tempfile::tempdir().unwrap();
        let (metrics, prune) = (run.path().join("metrics.jsonl"), run.path().join("prune"));
        let stages = ["train", "recover-03", "recover-02", "recover-02-swapped"];
        let lines: Vec<String> = (1..=2)
            .flat_map(|step| stages.map(|stage| format!("{{\"stage\":\"{stage}\",\"step\":{step},\"loss\":1.0}}\n")))
            .collect();
        fs::write(&metrics, lines.concat()).unwrap();
        folders.iter().for_each(|name| fs::create_dir_all(prune.join(name)).unwrap());
        let mut ledger = Ledger::open(&run.path().join("ledger.jsonl")).unwrap();
        if let Some(kept) = swap_kept {
            let swapped = Swapped { put_back: 0, take_out: 1, depth: 2, tau_before: 2.0, tau: 2.0, kept };
            ledger.push(Event::Swapped(swapped)).unwrap();
        }
        rewind(&metrics, &prune, &ledger).unwrap();
        let mut left = BTreeMap::new();
        for line in fs::read_to_string(&metrics).unwrap().lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            *left.entry(line["stage"].as_str().unwrap().to_string()).or_default() += 1;
        }
        left
    }

    fn counts(expected: &[&str]) -> BTreeMap<String, usize> {
        expected.iter().map(|stage| (stage.to_string(), 2)).collect()
    }

    #[test]
    fn recoveries_without_a_checkpoint_are_dropped_however_many_layers_go_now() {
        assert_eq!(left(&[], None), counts(&["train"]));
        assert_eq!(left(&["layers-03"], None), counts(&["train", "recover-03"]));
        let all = ["layers-03", "layers-02", "layers-02-swapped"];
        assert_eq!(left(&all, Some(true)), counts(&["train", "recover-03", "recover-02", "recover-02-swapped"]));
    }

    #[test]
    fn a_swap_keeps_its_steps_once_it_has_recovered_even_if_it_was_no_better() {
        let (pruned, all) = (["layers-03", "layers-02"], counts(&["train", "recover-03", "recover-02", "recover-02-swapped"]));
        assert_eq!(left(&pruned, Some(false)), all);
        assert_eq!(left(&["layers-03", "layers-02", "swap-02"], None), all);
        assert_eq!(left(&pruned, None), counts(&["train", "recover-03", "recover-02"]));
        // It was kept, and somebody removed it: it recovers again.
        assert_eq!(left(&pruned, Some(true)), counts(&["train", "recover-03", "recover-02"]));
    }
}
