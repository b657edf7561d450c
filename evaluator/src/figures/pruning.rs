//! What the pruner's ledger says: what each layer is worth by the criterion of the search, what was removed, and the swap.

use std::collections::BTreeMap;

use serde_json::Value;

use super::charts::{Bar, BarChart, bar_chart};
use super::figure;
use crate::svg::{is_drawable, short};
use crate::table::number;

/// Layers of one figure at most; what claims more is no ledger of ours.
const MOST_LAYERS: u64 = 1000;

/// What every layer is worth, one figure for each depth that was searched, deepest first.
pub(crate) fn layers(ledger: &[Value]) -> Vec<String> {
    let mut depths: BTreeMap<u64, BTreeMap<u64, &Value>> = BTreeMap::new();
    for line in events(ledger, "tau_loss") {
        if let (Some(depth), Some(layer)) = (line["depth"].as_u64(), line["layer"].as_u64().filter(|layer| *layer < MOST_LAYERS))
        {
            depths.entry(depth).or_default().insert(layer, line);
        }
    }
    let by_tau = depths.iter().rev().map(|(depth, layers)| tau_loss(ledger, *depth, layers));
    by_tau.chain(weighed(ledger)).collect()
}

/// The layer that went from a drafter of `depth` layers. A removal is recorded with the depth it leaves behind.
fn removed(ledger: &[Value], depth: u64) -> Option<u64> {
    let of_depth = |line: &&Value| line["depth"].as_u64().and_then(|left| left.checked_add(1)) == Some(depth);
    events(ledger, "removed").find(of_depth).and_then(|line| line["layer"].as_u64())
}

fn tau_loss(ledger: &[Value], depth: u64, layers: &BTreeMap<u64, &Value>) -> String {
    let removed = removed(ledger, depth);
    let mut bars = Vec::new();
    for (layer, line) in layers {
        let Some(value) = number(line, "tau_loss") else { continue };
        let interval = number(line, "low").zip(number(line, "high"));
        let spread = interval.map_or_else(String::new, |(low, high)| format!(", interval {} to {}", short(low), short(high)));
        let blocks = number(line, "blocks").map_or_else(String::new, |blocks| format!(", {blocks} blocks"));
        bars.push(Bar {
            position: *layer as usize,
            value,
            interval,
            highlighted: removed == Some(*layer),
            hover: format!("layer {layer}: τ loss {}{spread}{blocks}", short(value)),
        });
    }
    let title = match bars.iter().find(|bar| bar.highlighted) {
        Some(bar) => {
            let sign = if bar.value < 0.0 { "+" } else { "" };
            format!("Of {depth} layers, layer {} was removed: without it τ changes by {sign}{}", bar.position, short(-bar.value))
        }
        None => format!("What removing each of {depth} layers would cost"),
    };
    let note = "τ with all layers less τ without this one; whiskers: its interval.";
    bars_figure(depth, bars, &title, "τ loss, tokens a round", note)
}

/// What another criterion than τ says of the layers; the mean over the parts of the search, each by its rows.
fn weighed(ledger: &[Value]) -> Vec<String> {
    let mut depths: BTreeMap<u64, (f64, Vec<f64>)> = BTreeMap::new();
    for line in events(ledger, "weighed") {
        let (Some(depth), Some(rows)) = (line["depth"].as_u64(), number(&line["part"], "rows")) else { continue };
        let Some(scores) = line["part"]["scores"].as_array().filter(|scores| (scores.len() as u64) < MOST_LAYERS) else {
            continue;
        };
        let (all_rows, sums) = depths.entry(depth).or_default();
        sums.resize(sums.len().max(scores.len()), 0.0);
        *all_rows += rows;
        sums.iter_mut().zip(scores).for_each(|(sum, score)| *sum += rows * score.as_f64().unwrap_or(f64::NAN));
    }
    let criterion = events(ledger, "begun").find_map(|line| line["criterion"].as_str()).unwrap_or_default();
    let (quantity, note) = match criterion {
        "language_model_loss" => (
            "loss it saves, as a language model",
            "The drafter's loss on the responses, token after token, without this layer less that with all of them.",
        ),
        _ => ("1 less the cosine of input and output", "How far this layer turns its input, on average over the rows."),
    };
    let of_depth = |(depth, (rows, sums)): (&u64, &(f64, Vec<f64>))| {
        let removed = removed(ledger, *depth);
        let bar = |(layer, sum): (usize, &f64)| {
            let value = sum / rows;
            is_drawable(value).then(|| Bar {
                position: layer,
                value,
                interval: None,
                highlighted: removed == Some(layer as u64),
                hover: format!("layer {layer}: {quantity} {}", short(value)),
            })
        };
        let bars: Vec<Bar> = sums.iter().enumerate().filter_map(bar).collect();
        let title = match bars.iter().find(|bar| bar.highlighted) {
            Some(bar) => format!("Of {depth} layers, layer {} was removed: {quantity}, {}", bar.position, short(bar.value)),
            None => format!("What each of {depth} layers is worth"),
        };
        bars_figure(*depth, bars, &title, quantity, note)
    };
    depths.iter().rev().map(of_depth).collect()
}

fn bars_figure(depth: u64, bars: Vec<Bar>, title: &str, y_label: &str, note: &str) -> String {
    if bars.is_empty() {
        return String::new();
    }
    let chart = BarChart {
        label: title.to_owned(),
        x_label: format!("layer of the drafter of {depth} layers"),
        y_label: y_label.to_owned(),
        plain_name: "kept".to_owned(),
        highlighted_name: "removed".to_owned(),
        bars,
    };
    figure(title, note, |width| bar_chart(&chart, width))
}

/// The titles of [`removals`].
pub(crate) const REMOVALS: [&str; 8] =
    ["layers left", "layer removed", "τ before", "τ after", "steps of recovery", "τ recovered", "kept", "tokens/s predicted"];

/// The removals as rows; the last column is empty unless pruning stopped by speed. Where it did, the unpruned drafter comes first.
pub(crate) fn removals(ledger: &[Value]) -> Vec<[String; REMOVALS.len()]> {
    let nothing = || "–".to_owned();
    let left_by_removal = |depth: &Value| events(ledger, "removed").any(|line| line["depth"] == *depth);
    let unpruned = events(ledger, "predicted").find(|line| !left_by_removal(&line["depth"])).map(|line| {
        let shown = |key, decimals: usize| number(line, key).map_or_else(nothing, |number| format!("{number:.decimals$}"));
        let mut row = std::array::from_fn(|_| nothing());
        (row[0], row[1], row[REMOVALS.len() - 1]) = (shown("depth", 0), "none".to_owned(), shown("tokens_per_second", 1));
        row
    });
    let removals = events(ledger, "removed").map(|line| {
        let of_depth = |name| events(ledger, name).filter(|other| other["depth"] == line["depth"]).last();
        let (recovered, predicted) = (of_depth("recovered"), of_depth("predicted"));
        let layer = line.get("original_layer").map_or("layer", |_| "original_layer");
        let shown = |value: Option<&Value>, key, decimals: usize| {
            value.and_then(|value| number(value, key)).map_or_else(nothing, |number| format!("{number:.decimals$}"))
        };
        let kept = recovered.and_then(|line| line["kept"].as_bool());
        [
            shown(Some(line), "depth", 0),
            shown(Some(line), layer, 0),
            shown(Some(line), "tau_before", 3),
            shown(Some(line), "tau_after", 3),
            shown(recovered, "steps", 0),
            shown(recovered, "tau", 3),
            kept.map_or_else(nothing, |kept| if kept { "yes" } else { "no" }.to_owned()),
            shown(predicted, "tokens_per_second", 1),
        ]
    });
    unpruned.into_iter().chain(removals).collect()
}

/// Why pruning ended, in words; nothing of one that has not ended or does not say.
pub(crate) fn ending(ledger: &[Value]) -> Option<String> {
    let last = events(ledger, "recovered").last()?;
    let reason = match last["end"].as_str()? {
        "tau" => "too little τ was left after recovery (`prune.keep_tau`)",
        "speed" => "the predicted speed no longer rose",
        "asked" => "as many layers were removed as were asked for (`prune.remove`)",
        "min_layers" => "no fewer layers may be left (`prune.min_layers`)",
        _ => return None,
    };
    let depth = last["depth"].as_u64()?;
    Some(format!("Pruning ended at {depth} {}: {reason}.", if depth == 1 { "layer" } else { "layers" }))
}

/// What the swap in the end gave, in words.
pub(crate) fn swap(ledger: &[Value]) -> Option<String> {
    let swapped = events(ledger, "swapped").last()?;
    let number = |key| number(swapped, key);
    let ending = if swapped["kept"] == true { "it was kept beside the other" } else { "no better, so it was left" };
    Some(format!(
        "The swap in the end put layer {:.0} back and took layer {:.0} out: τ {:.3} after recovery, {:.3} without it; {ending}.",
        number("put_back")?,
        number("take_out")?,
        number("tau")?,
        number("tau_before")?
    ))
}

fn events<'a>(ledger: &'a [Value], event: &'a str) -> impl Iterator<Item = &'a Value> {
    ledger.iter().filter(move |line| line["event"].as_str() == Some(event))
}
