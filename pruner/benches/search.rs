//! What the search for the layer to remove costs on the quickstart's drafter, against a plain loop over its layers: `make bench` after
//! `make quickstart`. Same blocks, same drafter, same threads, one after the other; both must name the same layer.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use data::responses::read_folder;
use data::supervision::Example;
use pruner::choosing::least_harmful;
use pruner::search::{Blocks, Committed, Counted, committed, count};
use tch::{Device, Kind};
use trainer::batch::BlockShape;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const RESPONSES: usize = 64;
const ANCHORS: usize = 8;
const SEED: u64 = 1;

fn main() -> Outcome<()> {
    let run = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runs/quickstart");
    let checkpoint = run.join("train/latest");
    if !checkpoint.exists() {
        println!("skipped: `{}` is not there; `make quickstart` makes it", checkpoint.display());
        return Ok(());
    }
    let kind = if torch::bf16_is_faster(Device::Cpu) { Kind::BFloat16 } else { Kind::Float };
    let (model, file) = model::checkpoint::load(&checkpoint, kind, Device::Cpu)?;
    let labels = if file.labels == "next" { configs::Labels::Next } else { configs::Labels::InPlace };
    let anchor_sees_block = file.anchor_sees == "block";
    let shape = BlockShape { block_size: file.block_size, mask_token: file.mask_token, labels, anchor_sees_block };
    let responses = read_folder(&run.join("responses"))?;
    let examples: Vec<Example> =
        responses.iter().filter_map(|row| Example::new(&row.prompt_ids, &row.response_ids, 256)).take(RESPONSES).collect();
    let (blocks, depth) = (Blocks::draw(&examples, shape, ANCHORS, SEED), model.layers.len());
    println!("{depth} layers, {} responses of {ANCHORS} blocks, {kind:?}, {} threads", examples.len(), tch::get_num_threads());

    let started = Instant::now();
    let mut counted = Counted::default();
    count(&model, &blocks, &mut counted, SEED, &mut |_| ControlFlow::Continue(()));
    let (seconds, cost) = (started.elapsed().as_secs_f64(), blocks.cost(&counted, depth));
    let losses = counted.losses(depth, SEED);
    let layer = least_harmful(&losses);
    println!(
        "search: layer {layer}, τ loss {:.3}; {} token-layers in {seconds:.0} s; running after each part: {}",
        losses[layer].tau_loss,
        cost.token_layers,
        counted.running_by_part().iter().map(usize::to_string).collect::<Vec<_>>().join(" ")
    );

    let started = Instant::now();
    let tau = |counts: Committed| {
        let (tokens, blocks) = counts.iter().fold((0, 0), |sum, each| (sum.0 + each.0, sum.1 + each.1));
        tokens as f64 / blocks as f64
    };
    let with = tau(committed(&model, &blocks));
    let without = (0..depth).map(|layer| {
        let kept: Vec<usize> = (0..depth).filter(|&index| index != layer).collect();
        tau(committed(&model.with_layers(&kept), &blocks))
    });
    let without: Vec<f64> = without.collect();
    let plain_seconds = started.elapsed().as_secs_f64();
    let best = (0..depth).fold(0, |best, layer| if without[layer] > without[best] { layer } else { best });
    println!(
        "plain:  layer {best}, τ loss {:.3}; {} token-layers in {plain_seconds:.0} s",
        with - without[best],
        cost.plain_token_layers
    );
    println!(
        "search / plain: {:.2} of the token-layers, {:.2} of the time",
        cost.token_layers as f64 / cost.plain_token_layers as f64,
        seconds / plain_seconds
    );
    if best == layer { Ok(()) } else { Err(format!("the search names layer {layer}, the plain loop {best}").into()) }
}
