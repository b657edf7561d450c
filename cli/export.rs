//! `drafthorse export`: a checkpoint as a folder or a file that other programs load, checked before and described beside.

mod card;
mod origin;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use data::gguf::writer::Entry;
use model::ModelConfig;
use model::checkpoint::{self, DrafterFile};
use model::export::{ExportError, LARGEST_FILE, check_tensors, stored_kind, weights_bytes, write_safetensors};
use model::gguf_export::{GgufPlan, drafter_metadata};
use model::quantise::Quantisation;
use model::weights::Source;
use serde_json::json;
use torch::tch::Kind;

use self::origin::Origin;
use crate::BadRecipe;
use crate::folder::{checkpoint, name_of};
use crate::models::{self, Text};
use crate::progress::Progress;

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ExportArgs {
    /// A checkpoint's folder (train/step-N, prune/layers-M of a run), or a run's, of which the best checkpoint is taken, else the latest.
    checkpoint: PathBuf,
    /// hf: a folder as Hugging Face's `transformers` has it, with a model card. gguf: a file for llama.cpp.
    #[arg(long, value_name = "hf|gguf", value_parser = format)]
    format: Format,
    /// What the weights are stored as, with hf. Default: as in the checkpoint.
    #[arg(long, value_name = "bf16|f32", value_parser = PossibleValuesParser::new(["bf16", "f32"]).map(kind))]
    dtype: Option<Kind>,
    /// What matrices are stored as, with gguf; norms stay f32. Default: bf16.
    #[arg(long, value_enum, value_name = "f16|bf16|q8_0", hide_possible_values = true)]
    quantisation: Option<Stored>,
    /// Where to: a folder that is not there yet or is empty, or with gguf a name that ends in .gguf.
    out: PathBuf,
}

const EXAMPLES: &str = "\
Examples:
  drafthorse export runs/NAME --format hf my-drafter                         the run's best checkpoint, with a model card
  drafthorse export runs/NAME/prune/layers-31 --format hf --dtype f32 out    a pruned one, unrounded where it is stored so
  drafthorse export runs/NAME --format gguf --quantisation q8_0 my-drafter.gguf
Then:
  drafthorse generate --target MODEL --drafter my-drafter \"Why is the sky blue?\"
  python -c 'import transformers as t; t.AutoModelForCausalLM.from_pretrained(\"my-drafter\")'

Every tensor is held against the architecture first, by name and shape. What is written appears under its name when it is whole. Both
formats hold an ordinary causal model of the target's vocabulary; that it drafts blocks, and how, stands in drafter.json or under keys
that begin with `drafthorse.`, which a decoder must know to draft with it. The model card says how.

Exit codes: 0 done, 1 failed (a damaged checkpoint, no room, a drafter that the format cannot express), 2 bad usage, 3 interrupted, which
leaves nothing behind.";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    HuggingFace,
    Gguf,
}

fn format(text: &str) -> Result<Format, String> {
    match text {
        "hf" => Ok(Format::HuggingFace),
        "gguf" => Ok(Format::Gguf),
        "dflash" => Err("a DFlash drafter reads hidden states of its target's layers and uses the target's embedding and head, and its \
                         format describes that; a d3d drafter is a whole model of its own that reads tokens, for which the format has \
                         no place. Use hf"
            .to_string()),
        _ => Err("no drafter can be written in it; the formats are hf and gguf".to_string()),
    }
}

fn kind(name: String) -> Kind {
    if name == "f32" { Kind::Float } else { Kind::BFloat16 }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Stored {
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8_0,
}

impl Stored {
    fn quantisation(self) -> Quantisation {
        match self {
            Stored::F16 => Quantisation::F16,
            Stored::Bf16 => Quantisation::Bf16,
            Stored::Q8_0 => Quantisation::Q8_0,
        }
    }
}

/// What was opened, and found to be whole.
struct Checked {
    folder: PathBuf,
    drafter: DrafterFile,
    source: Source,
    config: ModelConfig,
    text: Text,
}

/// Exports one checkpoint and gives the exit code.
pub(crate) fn export(args: &ExportArgs, progress: &Progress, stop: &AtomicBool) -> anyhow::Result<u8> {
    check_options(args)?;
    let checked = open(&args.checkpoint)?;
    let origin = Origin::of(&checked.folder, &checked.drafter)?;
    origin.notes().iter().for_each(|note| progress.note(&format!("{:>12} mind: {note}", "export")));
    let partial = checkpoint::partial(&args.out)?;
    remove(&partial)?;
    let bar = progress.bar("export", checked.config.parameter_shapes().len());
    let mut begun = 0;
    let mut goes_on = || {
        begun += 1;
        bar.set(begun, "tensors");
        !stop.load(Ordering::Relaxed)
    };
    let outcome = match args.format {
        Format::HuggingFace => write_folder(args, &checked, &origin, &partial, &mut goes_on),
        Format::Gguf => write_file(args, &checked, &origin, &partial, &mut goes_on),
    };
    drop(bar);
    match outcome {
        Ok(told) => {
            progress.note(&format!("{:>12} {}: {told}", "export", args.out.display()));
            Ok(0)
        }
        Err(error) => {
            // The first error is the one to report.
            let _ = remove(&partial);
            if !matches!(error.downcast_ref::<ExportError>(), Some(ExportError::Interrupted)) {
                return Err(error);
            }
            progress.note(&format!("{:>12} interrupted; nothing was left behind", "export"));
            Ok(3)
        }
    }
}

/// Refuses options that would have no effect, and a place that is taken.
fn check_options(args: &ExportArgs) -> anyhow::Result<()> {
    let out = args.out.display();
    let bad = |message: String| Err(BadRecipe(message).into());
    match args.format {
        Format::HuggingFace if args.quantisation.is_some() => {
            return bad("--quantisation has no effect with --format hf, whose weights are stored as --dtype says".to_string());
        }
        Format::Gguf if args.dtype.is_some() => {
            return bad("--dtype has no effect with --format gguf, whose weights are stored as --quantisation says".to_string());
        }
        Format::Gguf if args.out.extension().is_none_or(|extension| extension != "gguf") => {
            return bad(format!("--format gguf writes a file, and `{out}` does not end in .gguf; give it such a name"));
        }
        Format::Gguf if args.out.is_dir() => return bad(format!("`{out}` is a folder; give a file to be written")),
        Format::HuggingFace if args.out.exists() && !args.out.is_dir() => {
            return bad(format!("`{out}` is a file; give a folder to be written"));
        }
        _ => {}
    }
    let taken = match args.format {
        Format::Gguf => fs::metadata(&args.out).is_ok_and(|file| file.len() > 0),
        Format::HuggingFace => fs::read_dir(&args.out).is_ok_and(|mut entries| entries.next().is_some()),
    };
    if taken { bad(format!("`{out}` is there already and not empty; remove it or give another name")) } else { Ok(()) }
}

/// Opens a checkpoint, and refuses one that is damaged or no drafter.
fn open(path: &Path) -> anyhow::Result<Checked> {
    let (folder, drafter) = checkpoint(path)?;
    if folder.is_file() {
        return Err(BadRecipe(format!("`{}` is a GGUF file; export takes the checkpoint's folder", path.display())).into());
    }
    models::shape_of(&drafter, &folder)?;
    let source = model::weights::open(&folder)?;
    let config = source.config()?;
    check_tensors(&source, &config)?;
    let description = folder.join("drafter.json");
    if drafter.layers != config.num_hidden_layers {
        let (path, stated, found) = (description, drafter.layers, config.num_hidden_layers);
        return Err(checkpoint::CheckpointError::Layers { path, stated, found }.into());
    }
    if i64::from(drafter.mask_token) >= config.vocab_size {
        anyhow::bail!(
            "`{}`: `mask_token` is {}, but the drafter has {} embedding rows; it is no checkpoint as training wrote it",
            description.display(),
            drafter.mask_token,
            config.vocab_size
        );
    }
    let text = Text::load(&folder.to_string_lossy())?;
    let beyond = (config.vocab_size as u32..).take(1024).find(|&id| text.tokenizer.token_text(id).is_some());
    if let Some(id) = beyond {
        anyhow::bail!(
            "`{}` has a token {id}, but the drafter has {} embedding rows; the folder mixes two models",
            folder.join("tokenizer.json").display(),
            config.vocab_size
        );
    }
    Ok(Checked { folder, drafter, source, config, text })
}

/// Writes the folder and gives it its name; says what it holds.
fn write_folder(
    args: &ExportArgs,
    checked: &Checked,
    origin: &Origin,
    partial: &Path,
    goes_on: &mut dyn FnMut() -> bool,
) -> anyhow::Result<String> {
    let (config, text) = (&checked.config, &checked.text);
    // Whatever else a checkpoint may be stored as, bf16 is what engines compute in.
    let own = if stored_kind(&checked.source, config)? == Kind::Float { Kind::Float } else { Kind::BFloat16 };
    let kind = args.dtype.unwrap_or(own);
    let files = text.files();
    let card = card::text(&card::Described { checked, origin, kind, name: &name_of(&args.out) });
    let description = serde_json::to_value(&checked.drafter)?;
    let dtype = if kind == Kind::Float { "float32" } else { "bfloat16" };
    let texts = [
        ("config.json", pretty(&config.to_json(dtype))),
        ("generation_config.json", pretty(&generation_config(checked))),
        ("tokenizer.json", files.tokenizer),
        ("tokenizer_config.json", files.tokenizer_config),
        ("drafter.json", pretty(&description)),
        ("README.md", card),
    ];
    let bytes = weights_bytes(config, kind);
    fs::create_dir_all(partial).with_context(|| format!("cannot create `{}`", partial.display()))?;
    expect_room(partial, bytes + texts.iter().map(|(_, text)| text.len() as u64).sum::<u64>())?;
    for (name, text) in texts {
        let path = partial.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write `{}`", path.display()))?;
    }
    write_safetensors(partial, &checked.source, config, kind, LARGEST_FILE, goes_on)?;
    checkpoint::publish(&args.out)?;
    Ok(format!("{} in {}, with config, tokenizer, drafter.json and model card", size(bytes), models::kind_name(kind)))
}

/// Writes the file and gives it its name; says what it holds.
fn write_file(
    args: &ExportArgs,
    checked: &Checked,
    origin: &Origin,
    partial: &Path,
    goes_on: &mut dyn FnMut() -> bool,
) -> anyhow::Result<String> {
    let quantisation = args.quantisation.unwrap_or(Stored::Bf16).quantisation();
    let rows = checked.config.vocab_size as usize;
    let mut text = checked.text.tokenizer.to_gguf(rows, &checked.text.special)?;
    text.push(("tokenizer.chat_template".to_string(), Entry::String(checked.text.template.source().to_string())));
    let bos = "tokenizer.ggml.bos_token_id";
    if let Some(id) = checked.config.bos_token_id.filter(|_| !text.iter().any(|(key, _)| key == bos)) {
        text.push((bos.to_string(), Entry::U32(id)));
    }
    let string = |key: &str, text: String| (key.to_string(), Entry::String(text));
    let mut description =
        vec![string("general.type", "model".to_string()), string("general.name", origin.title(&checked.drafter))];
    description.extend(origin.license.iter().map(|license| string("general.license", license.id.clone())));
    description.extend(drafter_metadata(&checked.drafter)?);
    description.extend(origin.target.iter().map(|target| string("drafthorse.target", target.name.clone())));
    description.extend(origin.revision.iter().map(|revision| string("drafthorse.target_revision", revision.clone())));
    let plan = GgufPlan::new(&checked.config, quantisation, description, text)?;
    let bytes = plan.bytes()?;
    let parent = partial.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).with_context(|| format!("cannot create `{}`", parent.display()))?;
    expect_room(parent, bytes)?;
    plan.write(partial, &checked.source, goes_on)?;
    fs::rename(partial, &args.out).with_context(|| format!("cannot rename `{}`", partial.display()))?;
    let synced = fs::File::open(parent).and_then(|folder| folder.sync_all());
    synced.with_context(|| format!("cannot sync `{}`", parent.display()))?;
    Ok(format!("{} in {}, norms in F32", size(bytes), quantisation.kind().name()))
}

/// What `transformers` generates with by default: the tokens that begin, end and fill up.
fn generation_config(checked: &Checked) -> serde_json::Value {
    let mut json = json!({ "eos_token_id": checked.config.eos_token_id });
    if let [single] = checked.config.eos_token_id[..] {
        json["eos_token_id"] = single.into();
    }
    let pad = checked.text.special.pad.as_deref().and_then(|token| checked.text.tokenizer.token_id(token));
    for (key, id) in [("bos_token_id", checked.config.bos_token_id), ("pad_token_id", pad)] {
        if let Some(id) = id {
            json[key] = id.into();
        }
    }
    json
}

/// Refuses to begin what would not fit.
fn expect_room(folder: &Path, needed: u64) -> anyhow::Result<()> {
    let stat = rustix::fs::statvfs(folder).with_context(|| format!("cannot read `{}`", folder.display()))?;
    check_room(folder, needed, stat.f_bavail.saturating_mul(stat.f_frsize))
}

fn check_room(folder: &Path, needed: u64, free: u64) -> anyhow::Result<()> {
    let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    anyhow::ensure!(
        needed <= free,
        "the export takes {}, and where `{}` is, {} are free; make room, or give a place on another disk",
        size(needed),
        parent.display(),
        size(free)
    );
    Ok(())
}

fn size(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes < 1e6 => format!("{:.0} kB", bytes / 1e3),
        bytes if bytes < 1e9 => format!("{:.0} MB", bytes / 1e6),
        bytes => format!("{:.1} GB", bytes / 1e9),
    }
}

fn pretty(json: &serde_json::Value) -> String {
    format!("{json:#}\n")
}

/// Removes what a killed export left, or this one.
fn remove(partial: &Path) -> anyhow::Result<()> {
    let removed = match fs::symlink_metadata(partial) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Ok(found) if found.is_dir() => fs::remove_dir_all(partial),
        _ => fs::remove_file(partial),
    };
    removed.with_context(|| format!("cannot remove `{}`", partial.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_told_with_both_sizes() {
        assert!(check_room(Path::new("a/.out.partial"), 5_000_000_000, 5_000_000_000).is_ok());
        let refused = check_room(Path::new("a/.out.partial"), 16_400_000_000, 5_300_000).map_err(|error| error.to_string());
        let expected = "the export takes 16.4 GB, and where `a` is, 5 MB are free; make room, or give a place on another disk";
        assert_eq!(refused, Err(expected.to_string()));
    }

    #[test]
    fn formats_that_cannot_hold_a_drafter_are_refused_with_the_reason() {
        assert_eq!((format("hf"), format("gguf")), (Ok(Format::HuggingFace), Ok(Format::Gguf)));
        assert!(format("dflash").is_err_and(|reason| reason.contains("hidden states") && reason.contains("Use hf")));
        assert!(format("onnx").is_err_and(|reason| reason.contains("hf and gguf")));
    }
}
