//! How pruning ends: by the predicted speed, and with a swap.

use evaluator::calibration::{MOST_ROUNDS, calibrate, deal, fan_out};
use evaluator::replay::hit_rates;
use evaluator::round_times::{DrafterTimes, RoundTimes};
use pruner::ledger::{Predicted, Swap, Swapped};
use pruner::speed::SpeedModel;

use super::*;

/// How the recipe's defaults evaluate, with 4 continuations.
fn evaluate() -> configs::Evaluate {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recipe.toml");
    fs::write(
        &path,
        "name = \"n\"\n[target]\nmodel = \"owner/target\"\n[drafter]\nkind = \"d3d\"\ninit = \"owner/drafter\"\nblock_size = 4\n\
         mask_token = 23\n[data]\nprompts = [\"recipe.toml\"]\n[train]\nsteps = 5\nbatch_responses = 4\n\
         [evaluate]\nfan_out = \"best_first\"\nbudget = 4\n",
    )
    .unwrap();
    configs::load(&path, &[]).unwrap().evaluate
}

/// Times by which a drafter of 4 layers drafts in `slowest` seconds and each layer less saves a share of them.
fn speed(slowest: f64, saved: f64) -> SpeedModel {
    let times = |layers: usize| {
        let seconds = slowest * (1.0 - saved * (4 - layers) as f64);
        DrafterTimes { layers, blocks: 4, pack_seconds: 2.0 * seconds, draft_seconds: seconds }
    };
    let drafters = (1..=4).map(times).collect();
    SpeedModel {
        times: RoundTimes { texts: 1, context: 20, verify_seconds: 0.01, shared_device: false, drafters },
        evaluate: evaluate(),
    }
}

/// Prunes up to 3 of the 4 layers without recovery; gives what was predicted.
fn predictions(folder: &Path, teacher: &Transformer, model: &SpeedModel) -> Vec<Predicted> {
    let change = |settings: &mut Settings| {
        (settings.remove, settings.speed) = (3, Some(model.clone()));
        settings.recovery.steps = 0;
    };
    assert_eq!(run_with(folder, teacher, usize::MAX, examples(15).split_off(12), change).unwrap(), Ending::Done);
    let predicted = |event: &Event| if let Event::Predicted(predicted) = event { Some(*predicted) } else { None };
    events(folder).iter().filter_map(predicted).collect()
}

#[test]
fn pruning_by_speed_ends_where_the_predicted_speed_no_longer_rises() {
    let teacher = with_useless_layer(&trained(Labels::Next), 2);
    let held_out = examples(15).split_off(12);
    let depths = |saved: f64| {
        let folder = tempfile::tempdir().unwrap();
        let model = speed(0.1, saved);
        let predicted = predictions(folder.path(), &teacher, &model);
        for predicted in &predicted {
            let again = model.times.tokens_per_second(predicted.depth, predicted.tau, predicted.hit_rate);
            assert_eq!(again, Some(predicted.tokens_per_second));
        }
        // All but the last are faster than the one before.
        let (last, rising) = predicted.split_last().unwrap();
        assert!(rising.windows(2).all(|pair| pair[1].tokens_per_second > pair[0].tokens_per_second), "{predicted:?}");
        let fell = rising.last().is_some_and(|before| last.tokens_per_second <= before.tokens_per_second);
        let kept: Vec<bool> = events(folder.path())
            .iter()
            .filter_map(|event| if let Event::Recovered { kept, .. } = event { Some(*kept) } else { None })
            .collect();
        assert_eq!(kept.iter().filter(|&&kept| !kept).count(), usize::from(fell));
        assert_eq!(kept.last(), Some(&!fell));
        let before = events(folder.path());
        assert_eq!(predictions(folder.path(), &teacher, &model), predicted, "nothing is measured again");
        assert_eq!(events(folder.path()), before);
        (predicted.iter().map(|it| it.depth).collect::<Vec<_>>(), fell, predicted)
    };
    // Nothing is saved: not even the useless layer's going makes it faster.
    assert_eq!(depths(0.0).0, [4, 3]);
    // A little is saved: the useless layer goes, and the next one costs more than it saves.
    let (found, fell, predicted) = depths(0.01);
    assert_eq!((found, fell), (vec![4, 3, 2], true));
    assert_eq!((predicted[0].tau, predicted[0].hit_rate), (predicted[1].tau, predicted[1].hit_rate), "a useless layer");
    assert!(predicted[2].tau < predicted[1].tau);
    // Nearly all is saved: down to one layer.
    assert_eq!(depths(0.33).0, [4, 3, 2, 1]);

    // The hit rate is the evaluator's own.
    let mut drafter = drafter_of(&teacher, shape(Labels::Next));
    let (to_calibrate, to_count) = deal(&held_out);
    let calibration = calibrate(&drafter, &to_calibrate, MOST_ROUNDS).unwrap();
    drafter.temperatures.clone_from(&calibration.as_ref().unwrap().temperatures);
    let hits = hit_rates(&drafter, &to_count, &[fan_out(&evaluate(), 4, calibration.as_ref())], MOST_ROUNDS).unwrap();
    assert!(predicted[0].hit_rate == hits[0].share() && hits[0].share() > 0.0, "{hits:?}");
}

#[test]
fn a_swap_takes_a_useless_layer_out_in_place_of_a_useful_one() {
    let teacher = with_useless_layer(&trained(Labels::Next), 2);
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let held_out = || examples(15).split_off(12);
    let change = |settings: &mut Settings| {
        settings.swap = true;
        settings.recovery.steps = 0;
    };
    assert!(matches!(run_with(folder, &teacher, 1, held_out(), change).unwrap(), Ending::Stopped { .. }));
    // The wrong layer goes, as if the search had found it.
    let mut ledger = Ledger::open(&folder.join("ledger.jsonl")).unwrap();
    ledger.push(Event::Removed { depth: 3, layer: 0, original_layer: 0, tau_before: 1.0, tau_after: 1.0 }).unwrap();
    assert_eq!(run_with(folder, &teacher, usize::MAX, held_out(), change).unwrap(), Ending::Done);
    let events = events(folder);
    let measured: Vec<&Swap> =
        events.iter().filter_map(|event| if let Event::SwapMeasured(swap) = event { Some(swap) } else { None }).collect();
    assert_eq!(measured.iter().map(|swap| (swap.put_back, swap.take_out)).collect::<Vec<_>>(), [(0, 2)]);
    let Some(Event::Swapped(Swapped { depth: 3, tau_before, tau, kept: true, .. })) = events.last() else { panic!("{events:?}") };
    let whole = evaluator::replay(&drafter_of(&teacher, shape(Labels::Next)), &held_out(), 4).unwrap().tau_pooled;
    assert!(*tau == whole && *tau_before < whole, "{tau} {tau_before} {whole}");
    let (model, file) = model::checkpoint::load(&folder.join("layers-03-swapped"), Kind::Float, tch::Device::Cpu).unwrap();
    assert_eq!((model.layers.len(), file.layers, &file.removed_layers), (3, 3, &vec![2]));
    assert_eq!(file.parent.as_deref(), Some("layers-03"));
    for (found, (layer, expected)) in model.layers.iter().zip([0, 1, 3].map(|layer| (layer, &teacher.layers[layer]))) {
        assert!(found.q_proj.equal(&expected.q_proj) && found.down_proj.equal(&expected.down_proj), "layer {layer}");
    }
    assert!(folder.join("layers-03").exists(), "what it was swapped from stays");
}

#[test]
fn a_swap_that_is_no_better_leaves_nothing_behind() {
    let teacher = with_useless_layer(&trained(Labels::Next), 2);
    let folder = tempfile::tempdir().unwrap();
    let change = |settings: &mut Settings| (settings.swap, settings.recovery.steps) = (true, 0);
    assert_eq!(run_with(folder.path(), &teacher, usize::MAX, examples(15).split_off(12), change).unwrap(), Ending::Done);
    let events = events(folder.path());
    let Some(Event::Swapped(Swapped { put_back: 2, tau_before, tau, kept: false, .. })) = events.last() else {
        panic!("{events:?}")
    };
    assert!(tau < tau_before);
    let mut names: Vec<String> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["layers-03", "ledger.jsonl"]);
}
