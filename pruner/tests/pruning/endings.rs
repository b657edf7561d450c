//! How pruning ends: by the predicted speed, and with a swap.

use evaluator::calibration::{MOST_ROUNDS, calibrate, deal, fan_out};
use evaluator::replay::hit_rates;
use evaluator::round_times::{DrafterTimes, RoundTimes};
use pruner::ledger::{End, Predicted, Swap, Swapped};
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
    let mut told = Vec::new();
    let mut tell = |event: &Progress<'_>| {
        if let Progress::Predicted { predicted, before } = event {
            assert_eq!(told.last(), before.as_ref());
            told.push(*predicted);
        }
    };
    assert_eq!(run_told(folder, teacher, usize::MAX, examples(15).split_off(12), change, &mut tell).unwrap(), Ending::Done);
    let predicted = |event: &Event| if let Event::Predicted(predicted) = event { Some(*predicted) } else { None };
    let predicted: Vec<Predicted> = events(folder).iter().filter_map(predicted).collect();
    assert_eq!(told, predicted, "what is known is told as well");
    predicted
}

/// Why pruning ended, as the recoveries say: none but the last of them does.
fn end(folder: &Path) -> End {
    let ends: Vec<Option<End>> = events(folder)
        .iter()
        .filter_map(|event| if let Event::Recovered { end, .. } = event { Some(*end) } else { None })
        .collect();
    let (last, others) = ends.split_last().unwrap();
    assert!(others.iter().all(Option::is_none), "{ends:?}");
    last.unwrap()
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
        assert_eq!(end(folder.path()), if fell { End::Speed } else { End::MinLayers });
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
fn the_ledger_says_why_pruning_ended_and_a_swap_of_nothing_is_told() {
    let teacher = with_useless_layer(&trained(Labels::Next), 2);
    let end_with = |remove: usize, min_layers: usize, keep_tau: f64| {
        let folder = tempfile::tempdir().unwrap();
        let change = |settings: &mut Settings| {
            (settings.remove, settings.min_layers, settings.keep_tau, settings.swap) = (remove, min_layers, keep_tau, true);
            settings.recovery.steps = 0;
        };
        let mut skipped = false;
        let mut tell = |event: &Progress<'_>| skipped |= matches!(event, Progress::SwapSkipped);
        run_told(folder.path(), &teacher, usize::MAX, examples(15).split_off(12), change, &mut tell).unwrap();
        (end(folder.path()), skipped)
    };
    assert_eq!(end_with(1, 1, 0.0), (End::Asked, false));
    assert_eq!(end_with(1, 3, 0.0), (End::MinLayers, false));
    assert_eq!(end_with(2, 1, 1.0), (End::Tau, false), "the useless layer goes, the next one does not");
    assert_eq!(end_with(1, 1, 2.0), (End::Tau, true));
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
    // Whoever follows the run sees no checkpoint of the swap before it is kept.
    let mut tell = |_: &Progress<'_>| assert!(!folder.join("layers-03-swapped").exists());
    assert_eq!(run_told(folder, &teacher, usize::MAX, held_out(), change, &mut tell).unwrap(), Ending::Done);
    let weights = || fs::read(folder.join("layers-03-swapped/model.safetensors")).unwrap();
    let (once, lines) = (weights(), fs::read(folder.join("ledger.jsonl")).unwrap());
    // As a kill between the ledger's line and the checkpoint's last name leaves it.
    fs::rename(folder.join("layers-03-swapped"), folder.join("swap-03")).unwrap();
    assert_eq!(run_with(folder, &teacher, usize::MAX, held_out(), change).unwrap(), Ending::Done);
    assert!(weights() == once && fs::read(folder.join("ledger.jsonl")).unwrap() == lines && !folder.join("swap-03").exists());
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
        assert!(
            found.q_proj.weight.equal(&expected.q_proj.weight) && found.down_proj.weight.equal(&expected.down_proj.weight),
            "layer {layer}"
        );
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
    let names = || {
        let entries = fs::read_dir(folder.path()).unwrap();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(names(), ["layers-03", "ledger.jsonl"]);
    // As a kill before its removal leaves it, now and by an older version.
    for left in ["swap-03", "layers-03-swapped"] {
        fs::create_dir(folder.path().join(left)).unwrap();
        assert_eq!(run_with(folder.path(), &teacher, usize::MAX, examples(15).split_off(12), change).unwrap(), Ending::Done);
        assert_eq!(names(), ["layers-03", "ledger.jsonl"]);
    }
}
