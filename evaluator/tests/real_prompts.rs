//! Lossless on a real model and real prompts: SmolLM2 in f32, 20 prompts of each of seven benchmarks, every decoder, every fan-out, one text
//! at a time and four. Takes an hour or two in all, minutes for one benchmark (`cargo test … -- --ignored gsm8k`): `make soak`.

#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use configs::{Drafts, Labels};
use data::chat::ChatTemplate;
use data::gguf::GgufFile;
use data::tokenizer::Tokenizer;
use evaluator::fan_out::{FanOut, Lookup, UNKNOWN_DRAFTER};
use evaluator::{DecodeError, Decoded, Drafter, Event, Sampler, Settings, asynchronous, autoregressive, lockstep};
use model::{Transformer, weights};
use tch::{Device, Kind};

/// From each benchmark.
const PROMPTS: usize = 20;
const NEW_TOKENS: usize = 128;
/// `<empty_output>`, which SmolLM2 does not use in chats.
const MASK_TOKEN: u32 = 16;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// What the quickstart trained, where it has run; else the model itself, with the mean of all other rows for the mask, which without any
/// training has two tokens a round already.
fn drafter(model: &Path) -> Drafter {
    let _no_grad = tch::no_grad_guard();
    let kind = if torch::bf16_is_faster(Device::Cpu) { Kind::BFloat16 } else { Kind::Float };
    let trained = root().join("runs/quickstart/train/latest");
    let model = if trained.exists() {
        println!("drafter: {}", std::fs::canonicalize(&trained).unwrap().display());
        model::checkpoint::load(&trained, kind, Device::Cpu).unwrap().0
    } else {
        println!("drafter: the model itself, untrained");
        let model = weights::load(model, Kind::Float, Device::Cpu).unwrap();
        let mask_row = model.embed_tokens.select(0, i64::from(MASK_TOKEN));
        mask_row.shallow_clone().copy_(&model.embed_tokens.mean_dim(0_i64, false, Kind::Float));
        let mut weights = model.named_parameters().into_iter();
        let converted = Transformer::from_source::<std::convert::Infallible>(model.config.clone(), move |_, _| {
            Ok(weights.next().unwrap().1.to_kind(kind))
        });
        converted.unwrap()
    };
    // Short blocks cost the target little; the trained drafter, whose blocks had eight slots, works with them as well.
    Drafter {
        model,
        block_size: 4,
        mask_token: MASK_TOKEN,
        labels: Labels::Next,
        anchor_sees_block: false,
        temperatures: Vec::new(),
    }
}

fn prompts(benchmarks: &Path, set: &str, model: &Path) -> Vec<Vec<u32>> {
    let gguf = GgufFile::open(model).unwrap();
    let (tokenizer, template) = (Tokenizer::from_gguf(&gguf).unwrap(), ChatTemplate::from_gguf(&gguf).unwrap());
    let conversations = data::benchmarks::read(&benchmarks.join(format!("{set}.jsonl")), None, None).unwrap().conversations;
    assert!(conversations.len() >= PROMPTS, "{set}");
    let first_turns = conversations.into_iter().take(PROMPTS);
    let ids = first_turns.map(|it| tokenizer.encode(&template.render(&it.request.messages, true, None).unwrap(), false).unwrap());
    ids.collect()
}

/// Texts in the order of their prompts, and one line about how they came to be.
fn timed(
    name: &str,
    decode: impl FnOnce(&mut dyn FnMut(Event<'_>) -> ControlFlow<()>) -> Result<(), DecodeError>,
) -> Vec<Vec<u32>> {
    let begun = Instant::now();
    let mut texts: Vec<Decoded> = Vec::new();
    decode(&mut |event| {
        if let Event::Text(text) = event {
            texts.push(text);
        }
        ControlFlow::Continue(())
    })
    .unwrap();
    texts.sort_by_key(|text| text.prompt);
    let rounds = || texts.iter().flat_map(|text| &text.rounds);
    let hits = rounds().filter(|round| round.lookup == Some(Lookup::Hit)).count();
    let decode_seconds: f64 = texts.iter().map(|text| text.decode_seconds).sum();
    let committed: usize = rounds().map(|round| round.committed).sum();
    // What the drafter wrote ahead for a hit, and how much of it while the target was verifying.
    let (mut packs, mut beside) = (0.0, 0.0);
    for pair in texts.iter().flat_map(|text| text.rounds.windows(2)).filter(|pair| pair[1].lookup == Some(Lookup::Hit)) {
        let (start, end) = (pair[0].pack_start, pair[0].pack_start + pair[0].pack_seconds);
        packs += pair[0].pack_seconds;
        beside += (end.min(pair[0].verify_start + pair[0].verify_seconds) - start.max(pair[0].verify_start)).max(0.0);
    }
    let ahead = match hits {
        0 => String::new(),
        _ => format!(
            ", hit rate {:.0} %, pack time on hits beside verification {:.0} %",
            100.0 * hits as f64 / rounds().count() as f64,
            100.0 * beside / packs
        ),
    };
    let all: Vec<u8> = texts.iter().flat_map(|text| &text.tokens).flat_map(|token| token.to_le_bytes()).collect();
    println!(
        "{name:28} {} {:6} tokens in {:5.0} s ({:5.1} tokens/s without prefill), τ {:.2}{ahead}",
        // Equal over decoders, fan-outs, and texts side by side.
        &data::files::sha256_hex(&all)[..8],
        texts.iter().map(|text| text.tokens.len()).sum::<usize>(),
        begun.elapsed().as_secs_f64(),
        committed as f64 / decode_seconds,
        committed as f64 / rounds().count().max(1) as f64,
    );
    texts.into_iter().map(|text| text.tokens).collect()
}

/// Every decoder and fan-out with so many texts of one benchmark side by side, against the autoregressive decoder with as many.
fn all_write_the_same_text(set: &str, concurrency: usize) {
    let benchmarks: PathBuf = root().join("../shared/benchmarks");
    let model = root().join(".models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !benchmarks.is_dir() || !model.exists() {
        eprintln!("skipped: needs {} and {}", benchmarks.display(), model.display());
        return;
    }
    let prompts = prompts(&benchmarks, set, &model);
    let target = weights::load(&model, Kind::Float, Device::Cpu).unwrap();
    let mut drafter = drafter(&model);
    println!("{set}: {} prompts, {concurrency} at once, target f32, drafter {:?}", prompts.len(), drafter.model.kind());
    let settings = Settings {
        sampler: Sampler::greedy(),
        stop_tokens: target.config.eos_token_id.clone(),
        max_new_tokens: NEW_TOKENS,
        concurrency,
        fan_out: FanOut::BestFirst { blocks: 0 },
        drafts: Drafts::Point,
    };
    let expected = timed("autoregressive", |on_event| autoregressive(&target, &prompts, &settings, on_event));
    let check = |name: &str, found: &[Vec<u32>]| {
        for (prompt, (expected, found)) in expected.iter().zip(found).enumerate() {
            let parted = expected.iter().zip(found).take_while(|(one, other)| one == other).count();
            assert!(expected == found, "{name}: {set} prompt {prompt} parts at token {parted}");
        }
        assert_eq!(found.len(), expected.len());
    };
    check("lockstep", &timed("lockstep", |on_event| lockstep(&target, &drafter, &prompts, &settings, on_event)));
    let (acceptance, rank_exponent) = UNKNOWN_DRAFTER;
    for fan_out in [
        FanOut::BestFirst { blocks: 3 },
        FanOut::Rectangle { positions: 2, candidates: 1 },
        FanOut::Geometric { blocks: 3, acceptance, rank_exponent },
    ] {
        let settings = Settings { fan_out, ..settings.clone() };
        let name = settings.fan_out.to_string();
        check(&name, &timed(&name, |on_event| asynchronous(&target, &mut drafter, &prompts, &settings, on_event)));
    }
}

/// One test for each benchmark and number of texts at once, so that the hour and a half can be spent in pieces.
macro_rules! of_benchmarks {
    ($($module:ident $set:literal)*) => {$(
        mod $module {
            #[test]
            #[ignore = "takes minutes: make soak"]
            fn soak_all_decoders_write_the_same_text_four_at_once() {
                super::all_write_the_same_text($set, 4);
            }

            #[test]
            #[ignore = "takes minutes: make soak"]
            fn soak_all_decoders_write_the_same_text_one_at_a_time() {
                super::all_write_the_same_text($set, 1);
            }
        }
    )*};
}

of_benchmarks! {
    gsm8k "gsm8k"
    math500 "math500"
    aime25 "aime25"
    humaneval "humaneval"
    mbpp "mbpp"
    livecodebench "livecodebench"
    mt_bench "mt-bench"
}
