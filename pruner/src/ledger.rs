//! `ledger.jsonl`: everything that was measured and decided while pruning, a line each, written as soon as it is known.
//!
//! The stage resumes from it: what a line says is not measured again.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use configs::Criterion;
use evaluator::round_times::RoundTimes;
use serde::{Deserialize, Serialize};

use crate::criteria::Weighed;
use crate::pruning::{PruneError, cannot_write};
use crate::search::{Cost, Counted, Part};

/// One line of the ledger.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// What all the others are about; the first line.
    Begun(Begun),
    /// What some held-out responses gave in the search among the layers of a drafter of `depth` layers.
    Counted { depth: usize, part: Part },
    /// What that search computed, in rows through layers, and what a plain loop over layers would have.
    Searched { depth: usize, cost: Cost },
    /// What a drafter of `depth` layers loses without layer `layer` (an index into these layers).
    TauLoss(TauLoss),
    /// The same by exact replay: the rounds of decoding in their order, not blocks drawn at random; `blocks` is the number of rounds with
    /// all layers. Of the layers that can best be spared.
    ReplayLoss(TauLoss),
    /// What some held-out responses say of the layers of a drafter of `depth` layers by another criterion than τ.
    Weighed { depth: usize, part: Weighed },
    /// The layer taken out; `depth` is the number of layers left.
    Removed {
        depth: usize,
        layer: usize,
        /// The layer's index in the unpruned drafter.
        original_layer: usize,
        /// Replay τ, pooled, of the held-out responses before and after.
        tau_before: f64,
        tau_after: f64,
    },
    /// The drafter of `depth` layers after its recovery training.
    Recovered {
        depth: usize,
        steps: u64,
        /// Replay τ, pooled, of the held-out responses.
        tau: f64,
        /// The unpruned drafter's.
        tau_unpruned: f64,
        /// Whether that is enough to go on from.
        kept: bool,
        /// Why no layer goes after it, where none does. Ledgers that older versions wrote do not say.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        end: Option<End>,
    },
    /// What the rounds of decoding take with drafters of several depths, where pruning stops by speed. The last such line counts.
    Timed(RoundTimes),
    /// How fast decoding would be with a drafter, by these times.
    Predicted(Predicted),
    /// What can best be taken out of the pruned drafter with one removed layer back.
    SwapMeasured(Swap),
    /// What the best of them gave after recovery.
    Swapped(Swapped),
}

/// Why pruning ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// τ after recovery is below `prune.keep_tau` of the unpruned drafter's.
    Tau,
    /// The predicted speed no longer rises.
    Speed,
    /// As many layers went as were asked for.
    Asked,
    /// No more layers are left than have to stay.
    MinLayers,
}

/// The predicted speed of a drafter of `depth` layers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Predicted {
    pub depth: usize,
    /// Replay τ, pooled, of the held-out responses, and the share of their rounds whose draft would be ready.
    pub tau: f64,
    pub hit_rate: f64,
    pub tokens_per_second: f64,
}

/// One removed layer back and another out, both numbered as in the unpruned drafter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Swap {
    pub put_back: usize,
    pub take_out: usize,
    /// Mean tokens committed per held-out block, before any recovery.
    pub tau: f64,
}

/// A swap and what it was good for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Swapped {
    pub put_back: usize,
    pub take_out: usize,
    pub depth: usize,
    /// Replay τ, pooled, of the held-out responses: of the drafter without the swap, and with it after its recovery.
    pub tau_before: f64,
    pub tau: f64,
    /// Whether the swapped drafter was kept beside the other.
    pub kept: bool,
}

/// What a ledger belongs to: with anything of it changed, its measurements say nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begun {
    /// The unpruned checkpoint.
    pub parent: String,
    pub layers: usize,
    /// Hash of the first values of each of its tensors.
    pub weights: String,
    /// Hash of the held-out responses' tokens.
    pub held_out: String,
    /// Blocks drawn from each.
    pub anchors: usize,
    pub seed: u64,
    pub criterion: Criterion,
}

impl Begun {
    /// What is not the same, in words; empty where all is.
    pub fn differences(&self, other: &Self) -> String {
        let fields = [
            ("the unpruned checkpoint", format!("`{}`", self.parent), format!("`{}`", other.parent)),
            ("its layers", self.layers.to_string(), other.layers.to_string()),
            ("its weights", short(&self.weights), short(&other.weights)),
            ("the held-out responses", short(&self.held_out), short(&other.held_out)),
            ("`prune.anchors`", self.anchors.to_string(), other.anchors.to_string()),
            ("the seed", self.seed.to_string(), other.seed.to_string()),
            ("`prune.criterion`", format!("{:?}", self.criterion), format!("{:?}", other.criterion)),
        ];
        let differing = fields.into_iter().filter(|(_, ours, theirs)| ours != theirs);
        differing.map(|(what, ours, theirs)| format!("{what} ({ours} there, {theirs} now)")).collect::<Vec<_>>().join(", ")
    }
}

fn short(hash: &str) -> String {
    hash.chars().take(8).collect()
}

/// The measured cost of leaving a layer out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TauLoss {
    pub depth: usize,
    pub layer: usize,
    /// Mean tokens committed per block with all layers, and without this one.
    pub tau_with: f64,
    pub tau_without: f64,
    pub tau_loss: f64,
    /// 95 % interval of the loss: paired bootstrap over responses.
    pub low: f64,
    pub high: f64,
    /// Fewer than the others have, if the layer was dropped on the way because it could no longer be the one to remove.
    pub blocks: usize,
}

/// The file and what it holds.
pub struct Ledger {
    path: PathBuf,
    pub events: Vec<Event>,
}

impl Ledger {
    /// Reads the ledger, which may not exist yet; a last line that a killed process left half-written is dropped.
    ///
    /// # Errors
    /// It cannot be read, or a line of it is no event.
    pub fn open(path: &Path) -> Result<Self, PruneError> {
        let text = match fs::read_to_string(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            text => text.map_err(|source| PruneError::Read { path: path.to_path_buf(), source })?,
        };
        // A last line without its end was cut off, even where what is there parses.
        let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
        if whole.len() < text.len() {
            data::files::write_atomically(path, whole.as_bytes()).map_err(cannot_write(path))?;
        }
        let mut events = Vec::new();
        for (number, line) in whole.lines().enumerate() {
            let event = serde_json::from_str(line).map_err(|source| PruneError::Line {
                path: path.to_path_buf(),
                line: number + 1,
                source,
            })?;
            events.push(event);
        }
        Ok(Self { path: path.to_path_buf(), events })
    }

    /// What to say when an event could not be appended.
    pub(crate) fn cannot_write(&self, source: io::Error) -> PruneError {
        PruneError::Write { path: self.path.clone(), source }
    }

    /// What to say of a ledger whose lines contradict each other or what lies beside them.
    pub(crate) fn contradicts(&self, problem: String) -> PruneError {
        PruneError::Contradiction { path: self.path.clone(), problem }
    }

    /// Appends an event.
    pub fn push(&mut self, event: Event) -> io::Result<()> {
        let mut file = OpenOptions::new().create(true).append(true).open(&self.path)?;
        file.write_all(format!("{}\n", serde_json::to_string(&event)?).as_bytes())?;
        file.sync_data()?;
        self.events.push(event);
        Ok(())
    }

    /// What was counted in the search among the layers of a drafter of `depth` layers.
    pub fn counted(&self, depth: usize) -> Counted {
        let of_depth = |event: &Event| match event {
            Event::Counted { depth: found, part } if *found == depth => Some(part.clone()),
            _ => None,
        };
        Counted::new(self.events.iter().filter_map(of_depth).collect())
    }

    /// What the ledger belongs to; `None` of one without lines, or by a version that did not say.
    pub fn begun(&self) -> Option<&Begun> {
        match self.events.first() {
            Some(Event::Begun(begun)) => Some(begun),
            _ => None,
        }
    }

    /// What another criterion said of the layers of a drafter of `depth` layers, part by part.
    pub fn weighed(&self, depth: usize) -> Vec<Weighed> {
        let of_depth = |event: &Event| match event {
            Event::Weighed { depth: found, part } if *found == depth => Some(part.clone()),
            _ => None,
        };
        self.events.iter().filter_map(of_depth).collect()
    }

    /// The losses by exact replay measured for a drafter of `depth` layers.
    pub fn replay_losses(&self, depth: usize) -> Vec<TauLoss> {
        let of_depth = |event: &Event| match event {
            Event::ReplayLoss(loss) if loss.depth == depth => Some(loss.clone()),
            _ => None,
        };
        self.events.iter().filter_map(of_depth).collect()
    }

    /// The losses measured for a drafter of `depth` layers.
    pub fn losses(&self, depth: usize) -> Vec<TauLoss> {
        let of_depth = |event: &Event| match event {
            Event::TauLoss(loss) if loss.depth == depth => Some(loss.clone()),
            _ => None,
        };
        self.events.iter().filter_map(of_depth).collect()
    }

    /// The original index of the layer whose removal left `depth` layers.
    pub fn removed(&self, depth: usize) -> Option<usize> {
        self.events.iter().find_map(|event| match event {
            Event::Removed { depth: found, original_layer, .. } if *found == depth => Some(*original_layer),
            _ => None,
        })
    }

    /// τ of the drafter of `depth` layers after its recovery, and whether that was enough to go on; `None` before its recovery.
    pub fn recovered(&self, depth: usize) -> Option<(f64, bool)> {
        self.events.iter().find_map(|event| match event {
            Event::Recovered { depth: found, tau, kept, .. } if *found == depth => Some((*tau, *kept)),
            _ => None,
        })
    }
}

impl Ledger {
    /// The times that speeds are predicted from.
    pub fn times(&self) -> Option<&RoundTimes> {
        self.events.iter().rev().find_map(|event| if let Event::Timed(times) = event { Some(times) } else { None })
    }

    /// The predicted speed of a drafter of `depth` layers.
    pub fn predicted(&self, depth: usize) -> Option<Predicted> {
        self.events.iter().find_map(|event| match event {
            Event::Predicted(predicted) if predicted.depth == depth => Some(*predicted),
            _ => None,
        })
    }

    /// The swaps measured.
    pub fn swaps(&self) -> Vec<Swap> {
        self.events
            .iter()
            .filter_map(|event| if let Event::SwapMeasured(swap) = event { Some(swap.clone()) } else { None })
            .collect()
    }

    /// What the best of them gave.
    pub fn swapped(&self) -> Option<&Swapped> {
        self.events.iter().find_map(|event| if let Event::Swapped(swapped) = event { Some(swapped) } else { None })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn loss(layer: usize) -> Event {
        let tau = TauLoss { depth: 4, layer, tau_with: 2.5, tau_without: 2.25, tau_loss: 0.25, low: 0.125, high: 0.5, blocks: 8 };
        Event::TauLoss(tau)
    }

    #[test]
    fn a_half_written_last_line_is_dropped_and_the_rest_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.jsonl");
        let mut ledger = Ledger::open(&path).unwrap();
        ledger.push(loss(0)).unwrap();
        ledger.push(Event::Removed { depth: 3, layer: 0, original_layer: 2, tau_before: 2.5, tau_after: 2.0 }).unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"event\":\"tau_l").unwrap();
        let mut ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.events.len(), 2);
        ledger.push(loss(1)).unwrap();
        let ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.losses(4).len(), 2);
        assert_eq!(ledger.removed(3), Some(2));
        assert_eq!(ledger.recovered(3), None);
    }

    #[test]
    fn a_broken_line_in_the_middle_is_an_error_with_its_number() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.jsonl");
        fs::write(&path, "nonsense\n{\"event\":\"tau_loss\"}\n").unwrap();
        let message = Ledger::open(&path).map(|_| ()).unwrap_err().to_string();
        assert!(message.contains("line 1") && !message.contains("cannot write"), "{message}");
        assert_eq!(message.matches("ledger.jsonl").count(), 1, "{message}");
    }

    #[test]
    fn a_ledger_that_cannot_be_read_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let message = Ledger::open(folder.path()).map(|_| ()).unwrap_err().to_string();
        assert!(message.starts_with("cannot read `"), "{message}");
    }

    #[test]
    fn a_recovery_that_does_not_say_why_pruning_ended_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.jsonl");
        let older = r#"{"event":"recovered","depth":3,"steps":5,"tau":2.0,"tau_unpruned":2.5,"kept":true}"#;
        fs::write(&path, format!("{older}\n")).unwrap();
        let mut ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.recovered(3), Some((2.0, true)));
        let end = Some(End::MinLayers);
        ledger.push(Event::Recovered { depth: 2, steps: 5, tau: 1.5, tau_unpruned: 2.5, kept: true, end }).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(&format!("{older}\n")) && text.ends_with("\"end\":\"min_layers\"}\n"), "{text}");
        assert_eq!(Ledger::open(&path).unwrap().events, ledger.events);
    }
}
