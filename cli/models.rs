//! Models, tokenizers and chat templates as a recipe names them.

use std::path::Path;

use anyhow::Context;
use configs::{Dtype, Recipe};
use data::chat::ChatTemplate;
use data::gguf::GgufFile;
use data::tokenizer::{SpecialTokens, Tokenizer};
use model::checkpoint::{DrafterFile, TextFiles};
use model::{ModelConfig, Transformer};
use torch::tch::{Device, Kind, Tensor, no_grad_guard};
use trainer::batch::BlockShape;

use crate::BadRecipe;
use crate::folder::local_model;

/// What turns a chat into token ids and back.
pub(crate) struct Text {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) special: SpecialTokens,
    pub(crate) template: ChatTemplate,
}

impl Text {
    /// From a model folder or a GGUF file.
    pub(crate) fn load(model: &str) -> anyhow::Result<Self> {
        let path = local_model(model)?;
        if path.is_dir() {
            let special = SpecialTokens::from_configuration(&path.join("tokenizer_config.json"))?;
            let tokenizer = Tokenizer::from_file(&path.join("tokenizer.json"))?;
            return Ok(Self { tokenizer, special, template: ChatTemplate::from_folder(&path)? });
        }
        let gguf = GgufFile::open(&path)?;
        let (tokenizer, special) = (Tokenizer::from_gguf(&gguf)?, SpecialTokens::from_gguf(&gguf));
        Ok(Self { tokenizer, special, template: ChatTemplate::from_gguf(&gguf)? })
    }

    /// A chat as the target's prompt: its text and its ids.
    pub(crate) fn prompt(&self, messages: &[data::prompts::Message], thinking: bool) -> anyhow::Result<(String, Vec<u32>)> {
        self.prompt_with_tools(messages, None, thinking)
    }

    /// The same for a target that may call tools.
    pub(crate) fn prompt_with_tools(
        &self,
        messages: &[data::prompts::Message],
        tools: Option<&serde_json::Value>,
        thinking: bool,
    ) -> anyhow::Result<(String, Vec<u32>)> {
        let text = self.template.render_with_tools(messages, tools, true, Some(thinking))?;
        let ids = self.tokenizer.encode(&text, false)?;
        Ok((text, ids))
    }

    /// The text files of a checkpoint.
    pub(crate) fn files(&self) -> TextFiles {
        TextFiles::new(&self.tokenizer, &self.special, &self.template)
    }
}

/// The shape of a model named in a recipe, without its weights.
pub(crate) fn model_config(model: &str) -> anyhow::Result<ModelConfig> {
    Ok(model::weights::open(&local_model(model)?)?.config()?)
}

/// A settled dtype as libtorch's kind.
pub(crate) fn kind(dtype: Dtype) -> Kind {
    if dtype == Dtype::Bf16 { Kind::BFloat16 } else { Kind::Float }
}

/// What `dtype = "auto"` means on a device, which the device's check has accepted.
pub(crate) fn faster_dtype(device: &str) -> Dtype {
    let faster = torch::device(device).is_ok_and(torch::bf16_is_faster);
    if faster { Dtype::Bf16 } else { Dtype::F32 }
}

/// The name of a kind in recipes and scores.
pub(crate) fn kind_name(kind: Kind) -> &'static str {
    if kind == Kind::BFloat16 { "bf16" } else { "f32" }
}

/// Loads the target onto its device.
pub(crate) fn target(recipe: &Recipe) -> anyhow::Result<Transformer> {
    target_on(recipe, torch::device(&recipe.devices.target)?)
}

/// Loads the target onto a device.
pub(crate) fn target_on(recipe: &Recipe, device: Device) -> anyhow::Result<Transformer> {
    let path = local_model(&recipe.target.model)?;
    model::weights::load(&path, kind(recipe.target.dtype), device)
        .with_context(|| format!("cannot load target `{}`", path.display()))
}

/// The drafter's device and compute kind.
pub(crate) fn drafter_place(recipe: &Recipe) -> anyhow::Result<(Device, Kind)> {
    let device = torch::device(&recipe.devices.drafter)?;
    Ok((device, kind(recipe.drafter.dtype)))
}

/// What a block looks like by the recipe.
pub(crate) fn block_shape(recipe: &Recipe) -> BlockShape {
    let drafter = &recipe.drafter;
    BlockShape {
        block_size: drafter.block_size,
        mask_token: drafter.mask_token,
        labels: drafter.labels,
        anchor_sees_block: drafter.anchor_sees == configs::AnchorSees::Block,
    }
}

/// The layers of the initial model that the drafter keeps.
pub(crate) fn initial_layers(recipe: &Recipe, depth: usize) -> anyhow::Result<Vec<usize>> {
    let spread = |count: usize| match count {
        1 => vec![0],
        _ => (0..count).map(|index| (index * (depth - 1) + (count - 1) / 2) / (count - 1)).collect(),
    };
    let layers = match (&recipe.drafter.layers, recipe.drafter.keep_layers) {
        (Some(layers), _) => layers.clone(),
        (None, Some(count)) if count <= depth => spread(count),
        (None, Some(count)) => {
            return Err(BadRecipe(format!("`drafter.keep_layers` is {count}, but `drafter.init` has {depth} layers")).into());
        }
        (None, None) => (0..depth).collect(),
    };
    match layers.iter().find(|&&layer| layer >= depth) {
        Some(layer) => {
            Err(BadRecipe(format!("`drafter.layers` names layer {layer}, but `drafter.init` has layers 0 to {}", depth - 1))
                .into())
        }
        None => Ok(layers),
    }
}

/// Refuses a recipe that its models cannot carry out, before any work is done.
pub(crate) fn check_shapes(recipe: &Recipe) -> anyhow::Result<(ModelConfig, ModelConfig)> {
    let (target, init) = (model_config(&recipe.target.model)?, model_config(&recipe.drafter.init)?);
    let bad = |message: String| Err(BadRecipe(message).into());
    if target.vocab_size != init.vocab_size {
        return bad(format!(
            "`drafter.init` has a vocabulary of {} and `target.model` of {}; they must be the same",
            init.vocab_size, target.vocab_size
        ));
    }
    let mask_token = recipe.drafter.mask_token;
    if i64::from(mask_token) >= init.vocab_size {
        return bad(format!(
            "`drafter.mask_token` is {mask_token}, but `drafter.init` has {} embedding rows; choose one below it that chats do not use",
            init.vocab_size
        ));
    }
    if target.eos_token_id.contains(&mask_token) || Text::load(&recipe.target.model)?.tokenizer.is_ordinary(mask_token) {
        return bad(format!(
            "`drafter.mask_token` {mask_token} stands for text or ends a response in `target.model`; choose a special token that chats do \
             not use, or an id beyond the tokenizer's but below the {} embedding rows",
            init.vocab_size
        ));
    }
    for (key, device) in [("devices.target", &recipe.devices.target), ("devices.drafter", &recipe.devices.drafter)] {
        if let Err(error) = torch::device(device) {
            return bad(format!("`{key}`: {error}"));
        }
    }
    let depth = initial_layers(recipe, init.num_hidden_layers)?.len();
    let remove = layers_to_remove(recipe, depth);
    if let Err(error) = pruner::pruning::check(remove, recipe.prune.min_layers, depth) {
        return bad(error.to_string());
    }
    if remove > 0 && recipe.data.holdout == 0.0 {
        return bad(
            "`data.holdout` is 0, but pruning measures layers on held-out responses; raise it or set `prune.remove = 0`".into()
        );
    }
    Ok((target, init))
}

/// How many layers pruning may remove: as asked, else down to `prune.min_layers`.
pub(crate) fn layers_to_remove(recipe: &Recipe, depth: usize) -> usize {
    recipe.prune.remove.unwrap_or_else(|| depth.saturating_sub(recipe.prune.min_layers))
}

/// The drafter before training, in f32 on the CPU: the initial model's layers, its mask row set to the mean of the other rows, its head untied
/// if asked.
pub(crate) fn initial_drafter(recipe: &Recipe) -> anyhow::Result<Transformer> {
    let path = local_model(&recipe.drafter.init)?;
    let _no_grad = no_grad_guard();
    let loaded = if recipe.drafter.from_scratch {
        Transformer::from_scratch(model_config(&recipe.drafter.init)?, recipe.seed)
    } else {
        model::weights::load(&path, Kind::Float, Device::Cpu)
            .with_context(|| format!("cannot load drafter `{}`", path.display()))?
    };
    let mut drafter = loaded.with_layers(&initial_layers(recipe, loaded.layers.len())?);
    if recipe.drafter.untie_head && drafter.lm_head.is_none() {
        drafter.lm_head = Some(drafter.embed_tokens.copy());
        drafter.config.tie_word_embeddings = false;
    }
    let rows = drafter.config.vocab_size;
    let mask = i64::from(recipe.drafter.mask_token);
    let row: Tensor = drafter.embed_tokens.select(0, mask);
    let others = drafter.embed_tokens.sum_dim_intlist(0_i64, false, Kind::Float) - &row;
    row.shallow_clone().copy_(&(others / (rows - 1) as f64));
    Ok(drafter)
}

/// The description of a drafter that this recipe makes.
pub(crate) fn drafter_file(recipe: &Recipe, layers: usize) -> DrafterFile {
    let labels = match recipe.drafter.labels {
        configs::Labels::InPlace => "in_place",
        configs::Labels::Next => "next",
    };
    let anchor_sees = match recipe.drafter.anchor_sees {
        configs::AnchorSees::Block => "block",
        configs::AnchorSees::Prefix => "prefix",
    };
    DrafterFile {
        kind: "d3d".to_string(),
        anchor_sees: anchor_sees.to_string(),
        block_size: recipe.drafter.block_size,
        labels: labels.to_string(),
        mask_token: recipe.drafter.mask_token,
        recipe_hash: data::files::sha256_hex(recipe.to_toml())[..16].to_string(),
        thinking: recipe.target.thinking,
        layers,
        ..DrafterFile::default()
    }
}

/// What a block looks like by a checkpoint's own description, which lies in `folder`.
pub(crate) fn shape_of(file: &DrafterFile, folder: &Path) -> anyhow::Result<BlockShape> {
    let unknown = |key: &str, value: &str, known: &str| {
        let path = folder.join("drafter.json");
        BadRecipe(format!("`{}`: `{key}` is {value:?}, which this version cannot decode; it knows {known}", path.display()))
    };
    if file.kind != "d3d" {
        return Err(unknown("kind", &file.kind, "\"d3d\"").into());
    }
    let labels = match file.labels.as_str() {
        "in_place" => configs::Labels::InPlace,
        "next" => configs::Labels::Next,
        other => return Err(unknown("labels", other, "\"in_place\" and \"next\"").into()),
    };
    let anchor_sees_block = match file.anchor_sees.as_str() {
        "block" => true,
        "prefix" => false,
        other => return Err(unknown("anchor_sees", other, "\"block\" and \"prefix\"").into()),
    };
    if !(2..=configs::LARGEST_BLOCK).contains(&file.block_size) {
        let (path, largest) = (folder.join("drafter.json"), configs::LARGEST_BLOCK);
        return Err(BadRecipe(format!(
            "`{}`: `block_size` is {}, but must be from 2 to {largest}",
            path.display(),
            file.block_size
        ))
        .into());
    }
    Ok(BlockShape { block_size: file.block_size, mask_token: file.mask_token, labels, anchor_sees_block })
}

/// Loads a drafter's checkpoint for drafting.
pub(crate) fn load_drafter(recipe: &Recipe, folder: &Path) -> anyhow::Result<(Transformer, DrafterFile)> {
    let (device, kind) = drafter_place(recipe)?;
    Ok(model::checkpoint::load(folder, kind, device)?)
}
