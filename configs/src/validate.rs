//! The recipe as typed -> the recipe as validated: defaults, ranges, choices, paths. Which rule holds for which field.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::benchmarks::{Preset, preset, presets};
use crate::rules::{
    any, bad, below_one, checked, choice, chosen, count, fraction, not_negative, optional_count, positive, required,
    required_count, share, temperature, within,
};
use crate::source::{Place, Source};
use crate::typed::{self, Field, Section, Written};
use crate::{
    AnchorSees, Benchmark, Budget, Criterion, Data, Decoder, Devices, Drafter, DrafterKind, Drafts, Dtype, Engine, Evaluate,
    FanOut, Labels, Objective, PositionWeights, Prune, Recipe, RecipeError, Regenerate, Schedule, Stop, Target, Train, Truncated,
    hardware, paths,
};

/// The lowest temperature above 0: logits over much lower ones are no numbers any more.
pub const COLDEST: f64 = 0.001;

/// Slots of a block at most.
pub const LARGEST_BLOCK: usize = 1024;

/// More blocks of a round than these make a pack that costs more than any round could gain.
pub const MOST_BLOCKS: usize = 1024;

const DTYPES: &[(&str, Dtype)] = &[("auto", Dtype::Auto), ("f32", Dtype::F32), ("bf16", Dtype::Bf16)];
const LABELS: &[(&str, Labels)] = &[("in_place", Labels::InPlace), ("next", Labels::Next)];
const OBJECTIVES: &[(&str, Objective)] =
    &[("tokens", Objective::Tokens), ("target", Objective::Target), ("target_variation", Objective::TargetVariation)];
const SCHEDULES: &[(&str, Schedule)] =
    &[("constant", Schedule::Constant), ("linear", Schedule::Linear), ("cosine", Schedule::Cosine), ("wsd", Schedule::Wsd)];
const FAN_OUTS: &[(&str, FanOut)] =
    &[("rectangle", FanOut::Rectangle), ("best_first", FanOut::BestFirst), ("geometric", FanOut::Geometric)];
const CRITERIA: &[(&str, Criterion)] = &[
    ("tau", Criterion::Tau),
    ("block_influence", Criterion::BlockInfluence),
    ("language_model_loss", Criterion::LanguageModelLoss),
];
const DRAFTS: &[(&str, Drafts)] = &[("point", Drafts::Point), ("sampled", Drafts::Sampled)];
const DECODERS: &[(&str, Decoder)] =
    &[("autoregressive", Decoder::Autoregressive), ("lockstep", Decoder::Lockstep), ("asynchronous", Decoder::Asynchronous)];

/// Checks and completes what was typed; `file` is the recipe that was asked for.
pub(crate) fn validate(typed: &typed::Recipe, file: &Path) -> Result<Recipe, RecipeError> {
    let whole_file = whole_file(file);
    let name = required(&typed.name, &whole_file)?;
    checked_name(typed.name.key, name)?;
    let drafter = drafter(&typed.drafter, &whole_file)?;
    let train = train(&typed.train, drafter.block_size, &whole_file)?;
    Ok(Recipe {
        name: name.value.clone(),
        seed: any(&typed.seed, 0),
        target: target(&typed.target, &whole_file)?,
        data: data(&typed.data, &whole_file)?,
        regenerate: regenerate(&typed.regenerate.fields)?,
        prune: prune(&typed.prune, &train)?,
        evaluate: evaluate(&typed.evaluate.fields)?,
        devices: devices(&typed.devices.fields)?,
        drafter,
        train,
        file: file.to_path_buf(),
    })
}

/// Whether a name can be that of a folder and stand in tables.
pub(crate) fn checked_name(key: &str, name: &Written<String>) -> Result<(), RecipeError> {
    let is_fine = |it: char| it.is_ascii_alphanumeric() || "-_.".contains(it);
    if name.value.is_empty() || name.value.starts_with('.') || !name.value.chars().all(is_fine) {
        return Err(bad(key, &name.place, "must be letters, digits, `-`, `_` and `.`, the first not a `.`"));
    }
    Ok(())
}

fn target(section: &Section<typed::Target>, whole_file: &Place) -> Result<Target, RecipeError> {
    let fields = &section.fields;
    Ok(Target {
        model: paths::model(fields.model.key, required(&fields.model, section_or(section, whole_file))?)?,
        revision: any(&fields.revision, String::from("main")),
        dtype: choice(&fields.dtype, Dtype::Auto, DTYPES)?,
        thinking: any(&fields.thinking, false),
    })
}

fn drafter(section: &Section<typed::Drafter>, whole_file: &Place) -> Result<Drafter, RecipeError> {
    let fields = &section.fields;
    let place = section_or(section, whole_file);
    if let Some(kind) = fields.kind.written.as_ref().filter(|kind| kind.value != "d3d") {
        let fault = format!("`{}` is not supported yet; supported: `d3d`", kind.value);
        return Err(bad(fields.kind.key, &kind.place, &fault));
    }
    if let (Some(_), Some(keep_layers)) = (&fields.layers.written, &fields.keep_layers.written) {
        return Err(bad(fields.keep_layers.key, &keep_layers.place, "cannot stand beside `drafter.layers`; keep one of them"));
    }
    let block_size = required(&fields.block_size, place)?;
    Ok(Drafter {
        kind: DrafterKind::D3d,
        init: paths::model(fields.init.key, required(&fields.init, place)?)?,
        layers: layers(&fields.layers)?,
        keep_layers: optional_count(&fields.keep_layers)?,
        from_scratch: any(&fields.from_scratch, false),
        block_size: within(
            &fields.block_size,
            block_size,
            |size| (2..=LARGEST_BLOCK).contains(size),
            &format!("must be at least 2, an anchor and a mask, and at most {LARGEST_BLOCK}"),
        )?,
        dtype: choice(&fields.dtype, Dtype::Auto, DTYPES)?,
        labels: choice(&fields.labels, Labels::InPlace, LABELS)?,
        anchor_sees: choice(
            &fields.anchor_sees,
            AnchorSees::Block,
            &[("block", AnchorSees::Block), ("prefix", AnchorSees::Prefix)],
        )?,
        mask_token: required(&fields.mask_token, place)?.value,
        untie_head: any(&fields.untie_head, false),
    })
}

fn layers(field: &Field<Vec<Written<usize>>>) -> Result<Option<Vec<usize>>, RecipeError> {
    let Some(written) = &field.written else { return Ok(None) };
    if written.value.is_empty() {
        return Err(bad(field.key, &written.place, "must name at least one layer; leave it out to keep all"));
    }
    for pair in written.value.windows(2) {
        if pair[0].value >= pair[1].value {
            let fault = format!("must ascend without repeats, but {} follows {}", pair[1].value, pair[0].value);
            return Err(bad(field.key, &pair[1].place, &fault));
        }
    }
    Ok(Some(written.value.iter().map(|layer| layer.value).collect()))
}

fn data(section: &Section<typed::Data>, whole_file: &Place) -> Result<Data, RecipeError> {
    let fields = &section.fields;
    let written = required(&fields.prompts, section_or(section, whole_file))?;
    if written.value.is_empty() {
        return Err(bad(fields.prompts.key, &written.place, "must name at least one file"));
    }
    let mut prompts: Vec<PathBuf> = Vec::new();
    for entry in &written.value {
        // A file that two entries name is read once.
        let new = paths::files(fields.prompts.key, entry)?.into_iter().filter(|path| !prompts.contains(path));
        let new: Vec<PathBuf> = new.collect();
        prompts.extend(new);
    }
    let one_to_learn_from = "must be at least 2, a token and the one that it predicts";
    Ok(Data {
        prompts,
        max_tokens: checked(&fields.max_tokens, 4096, |tokens| *tokens >= 2, one_to_learn_from)?,
        holdout: checked(&fields.holdout, 0.01, |part| (0.0..1.0).contains(part), "must be at least 0 and less than 1")?,
        limit: optional_count(&fields.limit)?,
        max_rejected: fraction(&fields.max_rejected, 1.0)?,
        truncated: choice(&fields.truncated, Truncated::Keep, &[("keep", Truncated::Keep), ("drop", Truncated::Drop)])?,
    })
}

fn regenerate(fields: &typed::Regenerate) -> Result<Regenerate, RecipeError> {
    let engine = choice(&fields.engine, Engine::Builtin, &[("builtin", Engine::Builtin), ("server", Engine::Server)])?;
    let endpoints = endpoints(&fields.endpoints)?;
    match engine {
        Engine::Builtin => {
            let endpoints_written = fields.endpoints.written.as_ref().filter(|_| !endpoints.is_empty());
            let written = endpoints_written.map(|written| (fields.endpoints.key, &written.place));
            let model = fields.server_model.written.as_ref().map(|written| (fields.server_model.key, &written.place));
            if let Some((key, place)) = written.or(model) {
                return Err(bad(key, place, "is for servers: set `regenerate.engine = \"server\"` or leave it out"));
            }
        }
        Engine::Server => {
            let written = fields.endpoints.written.as_ref().map(|written| &written.place);
            let place = written.or(fields.engine.written.as_ref().map(|written| &written.place));
            if let Some(place) = place.filter(|_| endpoints.is_empty()) {
                let fault = "must name at least one server, such as `endpoints = [\"http://localhost:8000/v1\"]`";
                return Err(bad(fields.endpoints.key, place, fault));
            }
        }
    }
    Ok(Regenerate {
        engine,
        endpoints,
        server_model: fields.server_model.written.as_ref().map(|written| written.value.clone()),
        concurrency: count(&fields.concurrency, 32)?,
        timeout: count(&fields.timeout, 600)?,
        retries: any(&fields.retries, 5),
        temperature: temperature(&fields.temperature)?,
        top_p: share(&fields.top_p, 1.0)?,
        top_k: any(&fields.top_k, 0),
        max_new_tokens: count(&fields.max_new_tokens, 2048)?,
        batch_rows: optional_count(&fields.batch_rows)?,
    })
}

fn endpoints(field: &Field<Vec<Written<String>>>) -> Result<Vec<String>, RecipeError> {
    let mut endpoints: Vec<String> = Vec::new();
    for item in field.written.iter().flat_map(|written| &written.value) {
        if !["http://", "https://"].iter().any(|scheme| item.value.starts_with(scheme)) {
            let fault = format!("has `{}`, which is not an address that starts with `http://` or `https://`", item.value);
            return Err(bad(field.key, &item.place, &fault));
        }
        if endpoints.contains(&item.value) {
            let fault = format!("names `{}` twice; raise `regenerate.concurrency` instead", item.value);
            return Err(bad(field.key, &item.place, &fault));
        }
        endpoints.push(item.value.clone());
    }
    Ok(endpoints)
}

fn train(section: &Section<typed::Train>, block_size: usize, whole_file: &Place) -> Result<Train, RecipeError> {
    let fields = &section.fields;
    let place = section_or(section, whole_file);
    let steps = required_count(&fields.steps, place)?;
    let gamma = match block_size {
        16.. => 7.0,
        10..16 => 5.0,
        _ => 4.0,
    };
    let learning_rate = positive(&fields.learning_rate, 2e-5)?;
    let batch_tokens = optional_count(&fields.batch_tokens)?;
    let batch_responses = match (&fields.batch_tokens.written, &fields.batch_responses.written) {
        (Some(tokens), Some(_)) => {
            return Err(bad(
                fields.batch_tokens.key,
                &tokens.place,
                "cannot stand beside `train.batch_responses`; keep one of them",
            ));
        }
        (Some(_), None) => None,
        (None, _) => Some(required_count(&fields.batch_responses, place)?),
    };
    Ok(Train {
        anchors: count(&fields.anchors, 128)?,
        gamma: positive(&fields.gamma, gamma)?,
        ar_weight: not_negative(&fields.ar_weight, 1.0)?,
        objective: choice(&fields.objective, Objective::Tokens, OBJECTIVES)?,
        position_weights: choice(
            &fields.position_weights,
            PositionWeights::Exponential,
            &[("exponential", PositionWeights::Exponential), ("d_pace", PositionWeights::DPace)],
        )?,
        pace_alpha: fraction(&fields.pace_alpha, 0.5)?,
        learning_rate,
        mask_learning_rate: positive(&fields.mask_learning_rate, learning_rate)?,
        steps,
        batch_responses,
        batch_tokens,
        forward_rows: count(&fields.forward_rows, 8192)?,
        schedule: choice(&fields.schedule, Schedule::Cosine, SCHEDULES)?,
        warmup: fraction(&fields.warmup, 0.04)?,
        decay: fraction(&fields.decay, 0.2)?,
        minimum_learning_rate: fraction(&fields.minimum_learning_rate, 0.1)?,
        weight_decay: not_negative(&fields.weight_decay, 0.0)?,
        beta1: below_one(&fields.beta1, 0.9)?,
        beta2: below_one(&fields.beta2, 0.95)?,
        clip: positive(&fields.clip, 1.0)?,
        chunk_rows: count(&fields.chunk_rows, 256)?,
        recompute: any(&fields.recompute, true),
        save_every: count(&fields.save_every, steps.div_ceil(10))?,
        evaluate_every: count(&fields.evaluate_every, steps.div_ceil(10))?,
        evaluate_responses: count(&fields.evaluate_responses, 64)?,
        keep_last: count(&fields.keep_last, 2)?,
    })
}

fn prune(section: &Section<typed::Prune>, train: &Train) -> Result<Prune, RecipeError> {
    let fields = &section.fields;
    let stop = choice(&fields.stop, Stop::Tau, &[("tau", Stop::Tau), ("speed", Stop::Speed)])?;
    let keep_tau = share(&fields.keep_tau, 0.99)?;
    Ok(Prune {
        // Without the section nothing is pruned; with it, as much as the other limits allow.
        remove: if section.place.is_none() { Some(0) } else { fields.remove.written.as_ref().map(|remove| remove.value) },
        min_layers: count(&fields.min_layers, 1)?,
        // A faster drafter may draft worse, unless it is said how much.
        keep_tau: (stop == Stop::Tau || fields.keep_tau.written.is_some()).then_some(keep_tau),
        stop,
        swap: any(&fields.swap, false),
        recovery_steps: any(&fields.recovery_steps, 10_000),
        learning_rate: positive(&fields.learning_rate, train.learning_rate / 5.0)?,
        ar_weight: not_negative(&fields.ar_weight, train.ar_weight)?,
        margin: not_negative(&fields.margin, 0.5)?,
        temperature: positive(&fields.temperature, 1.0)?,
        criterion: choice(&fields.criterion, Criterion::Tau, CRITERIA)?,
        responses: count(&fields.responses, 64)?,
        anchors: count(&fields.anchors, 16)?,
    })
}

fn evaluate(fields: &typed::Evaluate) -> Result<Evaluate, RecipeError> {
    let folder = &fields.benchmark_folder;
    let benchmark_folder = folder.written.as_ref().map(|written| paths::folder(folder.key, written)).transpose()?;
    let benchmarks = benchmarks(&fields.benchmarks, benchmark_folder.as_deref())?;
    if let (Some(every), true) = (&fields.every.written, benchmarks.is_empty()) {
        return Err(bad(
            fields.every.key,
            &every.place,
            "scores checkpoints, but `evaluate.benchmarks` names nothing to score them on",
        ));
    }
    let (concurrency, hardware) = (count(&fields.concurrency, 1)?, hardware::load(&fields.hardware)?);
    if let (Some(written), 2.., false) = (&fields.hardware.written, concurrency, hardware.is_empty()) {
        let fault =
            format!("times texts that are decoded one at a time, but `evaluate.concurrency` is {concurrency}; keep one of them");
        return Err(bad(fields.hardware.key, &written.place, &fault));
    }
    let fan_out = choice(&fields.fan_out, FanOut::Rectangle, FAN_OUTS)?;
    if let (Some(written), true) = (&fields.candidates.written, fan_out == FanOut::Rectangle) {
        let (positions, candidates) = (count(&fields.positions, 11)?, count(&fields.candidates, 2)?);
        // Full acceptance is one position more.
        if positions.saturating_add(1).saturating_mul(candidates) > MOST_BLOCKS {
            let fault =
                format!("times `evaluate.positions` makes more than {MOST_BLOCKS} blocks, full acceptance included; give fewer");
            return Err(bad(fields.candidates.key, &written.place, &fault));
        }
    }
    // As long as the set that asks for most.
    let max_new_tokens = benchmarks.iter().filter_map(|benchmark| Some(benchmark.preset?.max_new_tokens)).max();
    Ok(Evaluate {
        benchmarks,
        benchmark_folder,
        decoders: decoders(&fields.decoders)?,
        fan_out,
        positions: count(&fields.positions, 11)?,
        candidates: count(&fields.candidates, 2)?,
        budget: budget(&fields.budget, fan_out)?,
        concurrency,
        limit: optional_count(&fields.limit)?,
        every: optional_count(&fields.every)?,
        max_new_tokens: count(&fields.max_new_tokens, max_new_tokens.unwrap_or(2048))?,
        temperature: temperature(&fields.temperature)?,
        top_p: share(&fields.top_p, 1.0)?,
        top_k: any(&fields.top_k, 0),
        hardware,
        drafts: drafts(fields)?,
    })
}

fn budget(field: &Field<Budget>, fan_out: FanOut) -> Result<Option<Budget>, RecipeError> {
    match (&field.written, fan_out) {
        (None, FanOut::Rectangle) => Ok(None),
        (Some(written), FanOut::Rectangle) => Err(bad(
            field.key,
            &written.place,
            "cannot stand beside `evaluate.fan_out = \"rectangle\"`, whose size is `evaluate.positions` and `evaluate.candidates`; leave it \
             out or choose `best_first` or `geometric`",
        )),
        (_, FanOut::BestFirst | FanOut::Geometric) => {
            let is_some = |budget: &Budget| match budget {
                Budget::Blocks(blocks) => *blocks >= 1,
                Budget::Auto => true,
                Budget::Milliseconds(milliseconds) => *milliseconds > 0.0,
            };
            checked(field, Budget::Blocks(24), is_some, "must be at least 1 block or more than 0 ms").map(Some)
        }
    }
}

fn drafts(fields: &typed::Evaluate) -> Result<Drafts, RecipeError> {
    let drafts = choice(&fields.drafts, Drafts::Point, DRAFTS)?;
    match &fields.drafts.written {
        Some(written) if drafts == Drafts::Sampled && temperature(&fields.temperature)? == 0.0 => {
            let fault = "cannot be `sampled` while `evaluate.temperature` is 0, where nothing is left to chance; \
                         raise the temperature or take `point`";
            Err(bad(fields.drafts.key, &written.place, fault))
        }
        _ => Ok(drafts),
    }
}

/// A known name always means the preset, whatever files there are, so that a recipe means the same wherever it is run; a file of that
/// name is reached as `./NAME`. Everything else is a path.
fn benchmarks(field: &Field<Vec<Written<String>>>, folder: Option<&Path>) -> Result<Vec<Benchmark>, RecipeError> {
    let mut benchmarks: Vec<Benchmark> = Vec::new();
    for written in field.written.iter().flat_map(|written| &written.value) {
        let benchmark = match preset(&written.value) {
            Some(preset) => local_copy(field.key, written, preset, folder)?,
            None => own_file(field.key, written)?,
        };
        if benchmarks.iter().any(|other| other.name == benchmark.name) {
            let fault = format!("names two benchmarks `{}`, which scores could not tell apart; rename a file", benchmark.name);
            return Err(bad(field.key, &written.place, &fault));
        }
        benchmarks.push(benchmark);
    }
    Ok(benchmarks)
}

fn local_copy(
    key: &str,
    written: &Written<String>,
    preset: &'static Preset,
    folder: Option<&Path>,
) -> Result<Benchmark, RecipeError> {
    let (name, file, contents) = (&preset.name, preset.file_name(), preset.contents());
    let Some(folder) = folder else {
        let fault = format!(
            "names `{name}`, but not where its local copy is: set `evaluate.benchmark_folder` to a folder with `{file}`, which is \
             {contents}"
        );
        return Err(bad(key, &written.place, &fault));
    };
    let path = folder.join(file);
    if !path.is_file() {
        let fault = format!("names `{name}`, but there is no local copy of it: put {contents} there as `{}`", path.display());
        return Err(bad(key, &written.place, &fault));
    }
    Ok(Benchmark { name: name.clone(), path, preset: Some(preset) })
}

fn own_file(key: &'static str, written: &Written<String>) -> Result<Benchmark, RecipeError> {
    let path = paths::file(key, written).map_err(|error| match error {
        RecipeError::NoFile { path, .. } => {
            let known: Vec<String> = presets().iter().map(|preset| format!("`{}`", preset.name)).collect();
            let fault =
                format!("names no file, `{}` is not there, and no benchmark that is known: {}", path.display(), known.join(", "));
            bad(key, &written.place, &fault)
        }
        error => error,
    })?;
    let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    Ok(Benchmark { name, path, preset: None })
}

fn decoders(field: &Field<Vec<Written<String>>>) -> Result<Vec<Decoder>, RecipeError> {
    let Some(written) = &field.written else { return Ok(DECODERS.iter().map(|(_, decoder)| *decoder).collect()) };
    if written.value.is_empty() {
        return Err(bad(field.key, &written.place, "must name at least one decoder"));
    }
    let mut decoders = Vec::new();
    for item in &written.value {
        let decoder = chosen(field.key, item, DECODERS)?;
        if decoders.contains(&decoder) {
            return Err(bad(field.key, &item.place, &format!("names `{}` twice", item.value)));
        }
        decoders.push(decoder);
    }
    Ok(decoders)
}

fn devices(fields: &typed::Devices) -> Result<Devices, RecipeError> {
    Ok(Devices { target: device(&fields.target)?, drafter: device(&fields.drafter)?, timeout: count(&fields.timeout, 600)? })
}

fn device(field: &Field<String>) -> Result<String, RecipeError> {
    let is_device = |name: &String| {
        let index = name.strip_prefix("cuda:").filter(|index| index.chars().all(|digit| digit.is_ascii_digit()));
        name == "cpu" || index.is_some_and(|index| index.parse::<u8>().is_ok())
    };
    checked(field, String::from("cpu"), is_device, "must be `cpu` or `cuda:N`")
}

fn section_or<'a, T>(section: &'a Section<T>, whole_file: &'a Place) -> &'a Place {
    section.place.as_ref().filter(|place| !place.source.is_override).unwrap_or(whole_file)
}

fn whole_file(file: &Path) -> Place {
    let source = Source { name: file.display().to_string(), text: String::new(), folder: PathBuf::new(), is_override: false };
    Place::new(&Arc::new(source), None)
}
