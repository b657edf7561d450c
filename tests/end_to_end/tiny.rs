//! A model of random weights with the sample model's tokenizer, and a recipe that takes it through all stages in seconds.

use std::fs;
use std::path::Path;

use data::chat::ChatTemplate;
use data::gguf::GgufFile;
use data::tokenizer::{SpecialTokens, Tokenizer};
use model::checkpoint::{self, DrafterFile, TextFiles};
use model::{ModelConfig, Transformer};
use torch::tch::Kind;

const LAYERS: usize = 4;

/// Writes `model/`, `prompts.jsonl`, `benchmark.jsonl` and `recipe.toml` into `folder`.
pub(crate) fn write(folder: &Path) {
    let gguf = GgufFile::open(&super::root().join(".models/SmolLM2-135M-Instruct.Q4_1.gguf")).expect("run `make setup` first");
    let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
    let template = ChatTemplate::from_gguf(&gguf).unwrap();
    let files = TextFiles::new(&tokenizer, &SpecialTokens::from_gguf(&gguf), &template);
    let config = serde_json::json!({"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 49152, "tie_word_embeddings": true,
        "eos_token_id": 2});
    let model = Transformer::random(ModelConfig::from_json(&config).unwrap(), 1, Kind::Float);
    let drafter = DrafterFile { layers: LAYERS, ..DrafterFile::default() };
    checkpoint::save(&folder.join("model"), &model, &drafter, &files, Kind::Float).unwrap();
    fs::remove_file(folder.join("model/drafter.json")).unwrap();

    let chat = |number: usize| format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"Tell me of {number}.\"}}]}}\n");
    fs::write(folder.join("prompts.jsonl"), (0..24).map(chat).collect::<String>()).unwrap();
    fs::write(folder.join("benchmark.jsonl"), (100..103).map(chat).collect::<String>()).unwrap();
    fs::write(folder.join("recipe.toml"), RECIPE).unwrap();
}

const RECIPE: &str = r#"
name = "tiny"
seed = 1
[target]
model = "./model"
dtype = "f32"
[drafter]
kind = "d3d"
init = "./model"
block_size = 4
dtype = "f32"
labels = "next"
anchor_sees = "prefix"
mask_token = 16
[data]
prompts = ["prompts.jsonl"]
max_tokens = 128
holdout = 0.2
[regenerate]
max_new_tokens = 40
batch_rows = 6
[train]
objective = "target"
anchors = 6
learning_rate = 2e-3
steps = 30
batch_responses = 4
save_every = 10
evaluate_every = 15
[prune]
remove = 1
keep_tau = 0.1
recovery_steps = 20
responses = 4
anchors = 4
[evaluate]
benchmarks = ["benchmark.jsonl"]
decoders = ["autoregressive", "lockstep", "asynchronous"]
max_new_tokens = 40
positions = 2
candidates = 2
hardware = ["h100-graphs-8b-8b"]
"#;
