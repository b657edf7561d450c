//! Loading takes the memory of the weights as they are computed with, and no second copy of them. The test starts itself once for each
//! measurement, in a process that does nothing else.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use model::tensor_file::save_safetensors;
use model::{ModelConfig, weights};
use tch::{Device, Kind, Tensor};

/// The model that the measuring process is to load, and as which kind.
const FOLDER: &str = "DRAFTHORSE_LOADING_FOLDER";
const KIND: &str = "DRAFTHORSE_LOADING_KIND";

const MB: f64 = 1e6;
/// Threads' stacks, tables of tensors and the like.
const SLACK: f64 = 8.0;

/// The embedding and the head are most of it, as in small models: a second copy of one of them shows.
fn config() -> ModelConfig {
    ModelConfig::from_json(&serde_json::json!({
        "model_type": "qwen2", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 64000, "tie_word_embeddings": false,
    }))
    .unwrap()
}

/// Seeded numbers in the shape of the model, stored as `kind`.
fn write(folder: &Path, kind: Kind) {
    tch::manual_seed(7);
    let random = |shape: &[i64]| Tensor::rand(shape, (Kind::Float, Device::Cpu)).to_kind(kind);
    let tensors: Vec<(String, Tensor)> =
        config().parameter_shapes().into_iter().map(|(name, shape)| (name, random(&shape))).collect();
    let named: Vec<(String, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
    save_safetensors(&folder.join("model.safetensors"), &named).unwrap();
    std::fs::write(folder.join("config.json"), config().to_json("float32").to_string()).unwrap();
}

/// A line of the process's status, in MB.
fn status(name: &str) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() * 1024.0 / MB
}

/// Loads, and says by how much the process grew: what is its own at the largest (`RssAnon`, looked at every half millisecond, as the system
/// keeps no record of it) and in the end, and all that was resident at the largest, pages of files included (`VmHWM`).
#[test]
#[ignore = "started by the other test"]
fn load_and_measure() {
    let kind = if std::env::var(KIND).unwrap() == "Float" { Kind::Float } else { Kind::BFloat16 };
    let folder = std::env::var(FOLDER).unwrap();
    // libtorch's own, before anything is loaded.
    let _ = Tensor::ones([512, 512], (Kind::Float, Device::Cpu)).to_kind(Kind::BFloat16).sum(Kind::Float);
    let (own_before, all_before) = (status("RssAnon"), status("VmRSS"));
    let (done, largest_kb) = (AtomicBool::new(false), AtomicU64::new(0));
    let model = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                largest_kb.fetch_max((status("RssAnon") * 1000.0) as u64, Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        let model = weights::load(Path::new(&folder), kind, Device::Cpu).unwrap();
        done.store(true, Ordering::Relaxed);
        model
    });
    let own_after = status("RssAnon");
    assert_eq!(model.kind(), kind);
    let own_largest = (largest_kb.load(Ordering::Relaxed) as f64 / 1000.0).max(own_after);
    println!(
        "grew {:.1} at most {:.1} in the end {:.1} with files",
        own_largest - own_before,
        own_after - own_before,
        status("VmHWM") - all_before
    );
}

/// By how many MB a process grows that loads the model as `kind`: see [`load_and_measure`].
fn measured(folder: &Path, kind: Kind) -> [f64; 3] {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "load_and_measure", "--ignored", "--nocapture"]);
    let output = command.env(FOLDER, folder).env(KIND, format!("{kind:?}")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let line = said.lines().find_map(|line| line.find("grew ").map(|place| &line[place..])).unwrap();
    let words: Vec<&str> = line.split(' ').collect();
    [words[1], words[4], words[8]].map(|word| word.parse().unwrap())
}

#[test]
fn a_model_is_never_in_memory_twice() {
    let elements: i64 = config().parameter_shapes().iter().map(|(_, shape)| shape.iter().product::<i64>()).sum();
    let largest: i64 = config().parameter_shapes().iter().map(|(_, shape)| shape.iter().product()).max().unwrap();
    for (stored, computed) in [(Kind::Float, Kind::Float), (Kind::BFloat16, Kind::Float), (Kind::Float, Kind::BFloat16)] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), stored);
        let weights = elements as f64 * computed.elt_size_in_bytes() as f64 / MB;
        let page_of_one = largest as f64 * stored.elt_size_in_bytes() as f64 / MB;
        let [most, end, with_files] = measured(folder.path(), computed);
        println!(
            "{stored:?} loaded as {computed:?}, {weights:.0} MB of weights: {most:.0} MB at most, {end:.0} in the end; with pages of \
             the file {with_files:.0}"
        );
        assert!(weights > 150.0 && end > 0.98 * weights, "{end} MB were seen of {weights}");
        assert!(most < 1.1 * weights + SLACK, "{stored:?} as {computed:?}: {most} MB for {weights} MB of weights");
        // The pages of one tensor at a time.
        assert!(with_files < 1.02 * weights + page_of_one + SLACK, "{stored:?} as {computed:?}: {with_files} MB for {weights}");
    }
}
