//! `drafthorse generate`: one answer, shown as it grows, each token coloured by how it came.

mod answer;
mod screen;

use std::io::{IsTerminal, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use configs::{Decoder, Drafts, Dtype, MOST_BLOCKS};
use data::gguf::GgufFile;
use data::prompts::Message;
use data::tokenizer::Tokenizer;
use evaluator::benchmark::decoder_name;
use evaluator::decode::{DecodeError, Event, Settings, autoregressive, lockstep};
use evaluator::fan_out::FanOut;
use evaluator::sampling::Sampler;
use evaluator::{Drafter, asynchronous};
use model::Transformer;
use model::checkpoint::DrafterFile;
use trainer::training::drafter_of;

use self::answer::Answer;
use self::screen::{Looks, Screen};
use crate::BadRecipe;
use crate::folder::{checkpoint, local_model, name_of};
use crate::models::{self, Text};
use crate::progress::Progress;

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct GenerateArgs {
    /// The model that answers: a folder with safetensors, or a .gguf file.
    #[arg(long, value_name = "MODEL")]
    target: String,
    /// The drafter: a checkpoint's folder, or a run's, of which the best checkpoint is taken, else the latest; or a drafter's .gguf file.
    /// The autoregressive decoder takes no notice of it.
    #[arg(long, value_name = "CHECKPOINT")]
    drafter: Option<PathBuf>,
    /// How: drafting ahead beside the target, drafting and verifying by turns, or the target alone. In f32 the text is the same.
    #[arg(long, value_name = "DECODER", default_value = "asynchronous", value_parser = PossibleValuesParser::new(DECODERS).map(decoder))]
    decoder: Decoder,
    /// End the answer after so many tokens.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_one)]
    max_new_tokens: usize,
    /// 0 takes the likeliest token each time.
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature)]
    temperature: f64,
    /// Sample from the likeliest tokens that together reach this probability.
    #[arg(long, value_name = "P", value_parser = share)]
    top_p: Option<f64>,
    /// Sample from so many of the likeliest tokens.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    top_k: Option<u32>,
    /// Another seed gives another answer; the same one the same. Default: 0.
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Let the target think first, where its chat template knows of it. The drafter must have been trained so.
    #[arg(long)]
    thinking: bool,
    /// What the asynchronous decoder drafts ahead: POSITIONSxCANDIDATES, or a number of blocks, which go to the likeliest outcomes.
    /// Default: 11x2.
    #[arg(long, value_name = "11x2|24", value_parser = fan_out)]
    fan_out: Option<FanOut>,
    /// What both models compute in; auto takes the faster one of their device. Only with f32 do all decoders give the same text always.
    #[arg(long, value_name = "DTYPE", default_value = "auto", value_parser = PossibleValuesParser::new(["auto", "f32", "bf16"]).map(dtype))]
    dtype: Dtype,
    /// Where the target runs: cpu or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device_target: String,
    /// Where the drafter runs. Default: where the target does.
    #[arg(long, value_name = "DEVICE")]
    device_drafter: Option<String>,
    /// What the target is told before the prompt. Default: what its chat template says by itself.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// What the target is to answer; `-` reads it from stdin, as does leaving it out where stdin is no terminal.
    prompt: Option<String>,
}

const EXAMPLES: &str = "\
After the quickstart, its drafter and what it is worth on a question of yours:
  drafthorse generate --target .models/SmolLM2-135M-Instruct.Q4_1.gguf --drafter runs/quickstart \"Why is the sky blue?\"
  drafthorse generate --target .models/SmolLM2-135M-Instruct.Q4_1.gguf --decoder autoregressive \"Why is the sky blue?\"
A pruned checkpoint, sampling, the prompt from a file:
  drafthorse generate --target MODEL --drafter runs/NAME/prune/layers-12 --temperature 0.7 --top-p 0.9 --seed 1 < question.txt

On a terminal, tokens that were drafted and accepted are green, those that the target put in place of a wrong one red, and those that
it added behind a draft accepted whole cyan; a round is underlined when its draft was not ready and the target had to wait. Elsewhere,
or with NO_COLOR set, the text is plain. The figures at the end go to stderr: τ is the number of tokens committed per round, hit rate
the share of rounds whose draft was ready. Ctrl-C ends after the round under way, a second one at once.

Exit codes: 0 done, 1 failed, 2 bad usage, 3 interrupted, 130 interrupted twice.";

const DECODERS: [&str; 3] = ["asynchronous", "lockstep", "autoregressive"];

fn decoder(name: String) -> Decoder {
    let named = [Decoder::Lockstep, Decoder::Autoregressive].into_iter().find(|&decoder| decoder_name(decoder) == name);
    named.unwrap_or(Decoder::Asynchronous)
}

fn dtype(name: String) -> Dtype {
    match name.as_str() {
        "f32" => Dtype::F32,
        "bf16" => Dtype::Bf16,
        _ => Dtype::Auto,
    }
}

fn temperature(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_string())?;
    let may_be = value.is_finite() && (value == 0.0 || value >= configs::COLDEST);
    if may_be { Ok(value) } else { Err(format!("must be 0, which takes the likeliest token, or at least {}", configs::COLDEST)) }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&number| number > 0).ok_or_else(|| "must be a whole number, at least 1".to_string())
}

fn share(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_string())?;
    if value > 0.0 && value <= 1.0 { Ok(value) } else { Err("must be above 0 and at most 1".to_string()) }
}

fn fan_out(text: &str) -> Result<FanOut, String> {
    let form = || format!("write it as in 11x2 (positions and candidates) or 24 (blocks), at most {MOST_BLOCKS} blocks in all");
    let number = |text: &str| text.parse::<usize>().ok().filter(|&number| (1..=MOST_BLOCKS).contains(&number)).ok_or_else(form);
    let Some((positions, candidates)) = text.split_once('x') else {
        return Ok(FanOut::BestFirst { blocks: number(text)? });
    };
    let (positions, candidates) = (number(positions)?, number(candidates)?);
    // Full acceptance is one position more.
    if (positions + 1) * candidates > MOST_BLOCKS { Err(form()) } else { Ok(FanOut::Rectangle { positions, candidates }) }
}

fn bad(message: String) -> anyhow::Error {
    BadRecipe(message).into()
}

/// Answers one prompt and gives the exit code.
pub(crate) fn generate(args: &GenerateArgs, progress: &Progress, stop: &AtomicBool) -> anyhow::Result<u8> {
    check_options(args)?;
    let prompt = prompt(args)?;
    let text = Text::load(&args.target)?;
    let (target, mut drafter) = load(args, &text, progress)?;
    let settings = settings(args, &target);
    let message = |role: &str, content: &str| Message::new(role, content);
    let system = args.system.iter().map(|system| message("system", system));
    let messages: Vec<Message> = system.chain([message("user", &prompt)]).collect();
    let prompts = [text.prompt(&messages, args.thinking)?.1];
    let (length, longest) = (prompts[0].len(), target.config.max_position_embeddings.max(0) as usize);
    if length >= longest {
        return Err(bad(format!(
            "the prompt has {length} tokens with its chat template, but the target reads at most {longest} \
             (`max_position_embeddings`); shorten it"
        )));
    }
    if args.max_new_tokens > longest - length {
        let left = longest - length;
        progress
            .note(&format!("{:>12} mind: after {left} tokens the target is beyond the {longest} it was made for", "generate"));
    }

    let stdout = std::io::stdout();
    let looks = Looks::choose(stdout.is_terminal(), |name| std::env::var(name).ok());
    let mut answer = Answer::begin(&text.tokenizer, Screen::new(stdout.lock(), looks));
    let mut failure = None;
    let mut on_event = |event: Event<'_>| {
        failure = answer.take(&event).err();
        if failure.is_some() || stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let absent = || DecodeError::NoDrafter { decoder: decoder_name(args.decoder) };
    let outcome = match args.decoder {
        Decoder::Autoregressive => autoregressive(&target, &prompts, &settings, &mut on_event),
        Decoder::Lockstep => {
            drafter.as_ref().ok_or_else(absent).and_then(|drafter| lockstep(&target, drafter, &prompts, &settings, &mut on_event))
        }
        Decoder::Asynchronous => drafter
            .as_mut()
            .ok_or_else(absent)
            .and_then(|drafter| asynchronous(&target, drafter, &prompts, &settings, &mut on_event)),
    };
    let finished = answer.is_finished();
    let ended = match failure {
        Some(error) => Err(error),
        None => answer.end(looks.colours && progress.is_drawn()),
    };
    outcome?;
    match ended {
        Ok(lines) => lines.iter().for_each(|line| progress.note(&format!("{:>12} {line}", "generate"))),
        // Whoever reads has seen enough, as `head` has.
        Err(error) if is_broken_pipe(&error) => return Ok(0),
        Err(error) => return Err(error.context("cannot write the answer")),
    }
    Ok(if finished { 0 } else { 3 })
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Refuses options that would have no effect: whoever gives them expects one.
fn check_options(args: &GenerateArgs) -> anyhow::Result<()> {
    let sampling = [("--top-p", args.top_p.is_some()), ("--top-k", args.top_k.is_some()), ("--seed", args.seed.is_some())];
    if let Some((option, _)) = sampling.into_iter().find(|(_, given)| *given && args.temperature == 0.0) {
        return Err(bad(format!(
            "{option} has no effect without --temperature, which is 0: the likeliest token is taken each time"
        )));
    }
    if args.fan_out.is_some() && args.decoder != Decoder::Asynchronous {
        return Err(bad("--fan-out has no effect with this --decoder: only the asynchronous one drafts ahead".to_string()));
    }
    if args.drafter.is_none() && args.decoder != Decoder::Autoregressive {
        return Err(bad(
            "--drafter is missing: give a checkpoint's folder or a run's, or --decoder autoregressive to see the target alone"
                .to_string(),
        ));
    }
    Ok(())
}

/// The prompt, from the command line or from stdin.
fn prompt(args: &GenerateArgs) -> anyhow::Result<String> {
    let prompt = match args.prompt.as_deref() {
        Some(prompt) if prompt != "-" => prompt.to_string(),
        None if std::io::stdin().is_terminal() => {
            return Err(bad(format!(
                "there is no prompt; give one, as in: drafthorse generate --target {} … \"Why is the sky blue?\"",
                args.target
            )));
        }
        _ => {
            let mut prompt = String::new();
            std::io::stdin()
                .read_to_string(&mut prompt)
                .map_err(|error| bad(format!("cannot read the prompt from stdin: {error}")))?;
            // The end of the last line is the file's, not the question's.
            prompt.strip_suffix('\n').map(|prompt| prompt.strip_suffix('\r').unwrap_or(prompt)).unwrap_or(&prompt).to_string()
        }
    };
    if prompt.trim().is_empty() {
        return Err(bad("the prompt is empty; give one as the last argument or on stdin".to_string()));
    }
    Ok(prompt)
}

fn settings(args: &GenerateArgs, target: &Transformer) -> Settings {
    Settings {
        sampler: Sampler {
            temperature: args.temperature,
            top_p: args.top_p.unwrap_or(1.0),
            top_k: args.top_k.unwrap_or(0) as usize,
            seed: args.seed.unwrap_or(0),
        },
        stop_tokens: target.config.eos_token_id.clone(),
        max_new_tokens: args.max_new_tokens,
        concurrency: 1,
        // Drawn drafts are accepted more often when sampling, but the text would depend on the decoder.
        drafts: Drafts::Point,
        fan_out: args.fan_out.clone().unwrap_or(FanOut::Rectangle { positions: 11, candidates: 2 }),
    }
}

/// Loads the target, and the drafter where the decoder has use for one; what does not fit together is refused before.
fn load(args: &GenerateArgs, text: &Text, progress: &Progress) -> anyhow::Result<(Transformer, Option<Drafter>)> {
    let device = |option: &str, name: &str| torch::device(name).map_err(|error| bad(format!("{option}: {error}")));
    let dtype = |device: &str| if args.dtype == Dtype::Auto { models::faster_dtype(device) } else { args.dtype };
    let place = |device: &str| format!("{} on {device}", models::kind_name(models::kind(dtype(device))));

    let (path, on) = (local_model(&args.target)?, &args.device_target);
    let target_device = device("--device-target", on)?;
    let mut told = format!("{:>12} {} ({})", "generate", name_of(&path), place(on));
    let chosen = match &args.drafter {
        Some(given) if args.decoder != Decoder::Autoregressive => {
            let (folder, file) = checkpoint(given)?;
            check_fit(args, text, &folder, &file)?;
            let on = args.device_drafter.as_ref().unwrap_or(on);
            told += &format!(", drafter {} with {} layers ({})", name_of(&folder), file.layers, place(on));
            Some((folder, device("--device-drafter", on)?, dtype(on)))
        }
        _ => None,
    };
    progress.note(&format!("{told}, {}", decoder_name(args.decoder)));

    let target = model::weights::load(&path, models::kind(dtype(on)), target_device)
        .with_context(|| format!("cannot load target `{}`", path.display()))?;
    let drafter = chosen.map(|(folder, device, dtype)| {
        let (model, file) = model::checkpoint::load(&folder, models::kind(dtype), device)?;
        anyhow::Ok(drafter_of(&model, models::shape_of(&file, &folder)?))
    });
    Ok((target, drafter.transpose()?))
}

/// Refuses a drafter that was not made for this target, or for other answers than are asked for.
fn check_fit(args: &GenerateArgs, text: &Text, folder: &Path, file: &DrafterFile) -> anyhow::Result<()> {
    let name = folder.display();
    models::shape_of(file, folder)?;
    if file.thinking != args.thinking {
        let (trained, remedy) = if file.thinking { ("with", "give --thinking") } else { ("without", "leave --thinking out") };
        return Err(bad(format!(
            "`{name}` was trained on answers {trained} thinking; {remedy}, or take a drafter trained for the others"
        )));
    }
    let (drafter, target) = (models::model_config(&folder.to_string_lossy())?, models::model_config(&args.target)?);
    if drafter.vocab_size != target.vocab_size {
        return Err(bad(format!(
            "`{name}` has a vocabulary of {} and `{}` of {}; a drafter must be made for its target's",
            drafter.vocab_size, args.target, target.vocab_size
        )));
    }
    if i64::from(file.mask_token) >= drafter.vocab_size {
        return Err(bad(format!(
            "`{}`: `mask_token` is {}, but the drafter has {} embedding rows; it is no checkpoint as training wrote it",
            folder.join("drafter.json").display(),
            file.mask_token,
            drafter.vocab_size
        )));
    }
    // Vocabularies of one size may still be two. Ids that only one side names fill up its embedding.
    let theirs = if folder.is_file() {
        Tokenizer::from_gguf(&GgufFile::open(folder)?)?
    } else {
        Tokenizer::from_file(&folder.join("tokenizer.json"))?
    };
    let differing = (0..target.vocab_size as u32).find_map(|id| {
        let (ours, theirs) = (text.tokenizer.token_text(id)?, theirs.token_text(id)?);
        (ours != theirs).then(|| format!("token {id} is {theirs:?} in `{name}` and {ours:?} in `{}`", args.target))
    });
    match differing {
        Some(difference) => Err(bad(format!("{difference}; a drafter must be made for its target's vocabulary"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fan_out_is_a_rectangle_or_a_number_of_blocks() {
        assert_eq!(fan_out("11x2"), Ok(FanOut::Rectangle { positions: 11, candidates: 2 }));
        assert_eq!(fan_out("24"), Ok(FanOut::BestFirst { blocks: 24 }));
        for wrong in
            ["", "x", "0", "11x", "x2", "11x0", "11x2x3", "-3", "1025", "1024x1", "1x1024", "99999999999999999999", "a lot"]
        {
            assert!(fan_out(wrong).is_err_and(|message| message.contains("11x2")), "{wrong}");
        }
    }

    #[test]
    fn numbers_that_cannot_be_meant_are_refused() {
        assert_eq!((temperature("0.7"), share("1")), (Ok(0.7), Ok(1.0)));
        assert!(temperature("1e-300").is_err() && at_least_one("0").is_err());
        for wrong in ["nan", "inf", "-1", "warm"] {
            assert!(temperature(wrong).is_err() && share(wrong).is_err(), "{wrong}");
        }
        assert!(share("0").is_err() && share("1.5").is_err());
    }

    #[test]
    fn every_decoder_has_its_name() {
        for name in DECODERS {
            assert_eq!(decoder_name(decoder(name.to_string())), name);
        }
    }
}
