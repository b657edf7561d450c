//! Milliseconds of one cached forward of a model of SmolLM2-135M's shape, by rows, kind and threads: `make bench`.
//!
//! The floor of few rows is the time to read the weights once, which `read` measures on the same machine in the same run.

use std::time::Instant;

use model::{CachedAttention, KvCache, ModelConfig, Piece, Transformer};
use tch::{Device, Kind, Tensor};

const HELD: usize = 100;

fn milliseconds(repeats: usize, mut body: impl FnMut()) -> f64 {
    body();
    let mut times: Vec<f64> = (0..repeats)
        .map(|_| {
            let start = Instant::now();
            body();
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[repeats / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let _no_grad = tch::no_grad_guard();
    let json = serde_json::json!({"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": true});
    for kind in [Kind::Float, Kind::BFloat16] {
        let model = Transformer::random(ModelConfig::from_json(&json)?, 1, kind);
        for threads in [1, torch::available_cores()] {
            torch::set_num_threads(threads);
            let read = milliseconds(7, || {
                for (_, tensor) in model.named_parameters() {
                    let _ = tensor.abs().max();
                }
            });
            print!("{kind:?}, {threads} threads: read {read:.0} ms; rows");
            for rows in [1_usize, 8, 24, 96] {
                let mut cache = KvCache::new(&model.config, 1, HELD + rows, kind, Device::Cpu);
                cache.set_length(0, HELD);
                let ids = Tensor::arange(rows as i64, (Kind::Int64, Device::Cpu));
                let positions = &ids + HELD as i64;
                let hidden = milliseconds(7, || {
                    let mut attention = CachedAttention::new(&cache, vec![Piece::causal(0, 0..rows, Device::Cpu)]);
                    let _ = model.forward(&ids, &positions, &mut attention);
                });
                let hidden_td = Tensor::ones([rows as i64, 576], (kind, Device::Cpu));
                let head = milliseconds(7, || {
                    let _ = model.logits(&hidden_td);
                });
                print!("  {rows}: {hidden:.1} + head {head:.1}");
            }
            println!();
        }
    }
    Ok(())
}
