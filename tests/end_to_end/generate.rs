//! `drafthorse generate`: the same text whichever way it is decoded, plain for a pipe, coloured and safe on a terminal.

use std::fs;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use configs::Drafts;
use data::chat::ChatTemplate;
use data::prompts::Message;
use data::tokenizer::{SpecialTokens, Tokenizer};
use evaluator::fan_out::FanOut;
use evaluator::{Event, Sampler, Settings, autoregressive};
use model::checkpoint::{self, DrafterFile, TextFiles};
use tempfile::TempDir;
use torch::tch::{Device, Kind};

use super::{drafthorse, root, stderr, tiny};

const LIMIT: &str = "60";

/// `model/`, the tiny target; `drafter/`, a checkpoint with the same weights; `run/`, a run that has trained it.
fn models() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path());
    save_drafter(folder.path(), &drafter_file());
    let train = folder.path().join("run/train");
    fs::create_dir_all(&train).unwrap();
    std::os::unix::fs::symlink("../../drafter", train.join("step-000010")).unwrap();
    std::os::unix::fs::symlink("step-000010", train.join("latest")).unwrap();
    folder
}

fn drafter_file() -> DrafterFile {
    DrafterFile {
        kind: "d3d".to_string(),
        block_size: 4,
        labels: "next".to_string(),
        anchor_sees: "prefix".to_string(),
        mask_token: 16,
        layers: 4,
        ..DrafterFile::default()
    }
}

fn text(model: &Path) -> (Tokenizer, SpecialTokens, ChatTemplate) {
    let special = SpecialTokens::from_configuration(&model.join("tokenizer_config.json")).unwrap();
    (Tokenizer::from_file(&model.join("tokenizer.json")).unwrap(), special, ChatTemplate::from_folder(model).unwrap())
}

fn save_drafter(folder: &Path, file: &DrafterFile) {
    let model = folder.join("model");
    let (tokenizer, special, template) = text(&model);
    let weights = model::weights::load(&model, Kind::Float, Device::Cpu).unwrap();
    let files = TextFiles::new(&tokenizer, &special, &template);
    checkpoint::save(&folder.join("drafter"), &weights, file, &files, Kind::Float).unwrap();
}

/// Makes the target one that writes nothing but escapes and bells, and never ends.
fn make_it_write_controls(folder: &Path) {
    let model = folder.join("model");
    let (tokenizer, special, template) = text(&model);
    let mut weights = model::weights::load(&model, Kind::Float, Device::Cpu).unwrap();
    let _no_grad = torch::tch::no_grad_guard();
    let head = weights.embed_tokens.zeros_like();
    // One row where a hidden state points one way, the other where it points the other.
    for (control, weight) in [("\u{1b}", 9.0), ("\u{7}", -9.0)] {
        let ids = tokenizer.encode(control, false).unwrap();
        assert_eq!(ids.len(), 1);
        let _ = head.get(i64::from(ids[0])).fill_(weight);
    }
    weights.lm_head = Some(head);
    weights.config.tie_word_embeddings = false;
    let files = TextFiles::new(&tokenizer, &special, &template);
    let drafter = DrafterFile { layers: 4, ..DrafterFile::default() };
    checkpoint::save(&model, &weights, &drafter, &files, Kind::Float).unwrap();
}

const COMMAND: [&str; 6] = ["generate", "--target", "model", "--dtype", "f32", "--max-new-tokens"];

fn generate(folder: &Path, limit: &str, arguments: &[&str]) -> Command {
    let mut command = drafthorse(folder, &[&COMMAND, &[limit][..], arguments].concat());
    command.stdin(Stdio::null());
    command
}

fn output(folder: &Path, arguments: &[&str]) -> Output {
    generate(folder, LIMIT, arguments).output().unwrap()
}

fn answer(folder: &Path, arguments: &[&str]) -> String {
    let output = output(folder, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// What the target's own decoder answers, by the library.
fn expected(folder: &Path, messages: &[(&str, &str)], sampler: Sampler) -> String {
    let model = folder.join("model");
    let (tokenizer, _, template) = text(&model);
    let target = model::weights::load(&model, Kind::Float, Device::Cpu).unwrap();
    let message = |(role, content): &(&str, &str)| Message::new(*role, *content);
    let messages: Vec<Message> = messages.iter().map(message).collect();
    let prompt = tokenizer.encode(&template.render(&messages, true, Some(false)).unwrap(), false).unwrap();
    let settings = Settings {
        sampler,
        stop_tokens: target.config.eos_token_id.clone(),
        max_new_tokens: LIMIT.parse().unwrap(),
        concurrency: 1,
        fan_out: FanOut::BestFirst { blocks: 0 },
        drafts: Drafts::Point,
    };
    let mut tokens = Vec::new();
    autoregressive(&target, &[prompt], &settings, &mut |event: Event<'_>| {
        if let Event::Text(text) = event {
            tokens = text.tokens;
        }
        ControlFlow::Continue(())
    })
    .unwrap();
    tokenizer.decode(&tokens, true).unwrap()
}

#[test]
fn a_piped_answer_is_the_targets_own_text_and_nothing_else() {
    let folder = models();
    let folder = folder.path();
    let greedy = expected(folder, &[("user", "Tell me of 7.")], Sampler::greedy());
    assert!(greedy.len() > 20, "{greedy:?}");
    let drafted: [&[&str]; 5] = [
        &["--drafter", "drafter"],
        &["--drafter", "drafter", "--fan-out", "2x3"],
        &["--drafter", "run", "--fan-out", "9"],
        &["--drafter", "run/train", "--decoder", "lockstep"],
        &["--decoder", "autoregressive"],
    ];
    for arguments in drafted {
        let output = output(folder, &[arguments, &["Tell me of 7."]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        assert_eq!(String::from_utf8_lossy(&output.stdout), greedy, "{arguments:?}");
        let said = stderr(&output);
        assert!(
            !said.contains('\u{1b}') && said.contains(&format!(" {LIMIT} tokens, ")) && said.contains(" tokens/s, "),
            "{said}"
        );
        let alone = arguments.contains(&"autoregressive");
        assert_eq!(said.contains("rounds, τ "), !alone, "{said}");
        assert_eq!(said.contains("accepted "), !alone, "{said}");
        assert_eq!(said.contains("hit rate "), !alone && !arguments.contains(&"lockstep"), "{said}");
        assert_eq!(said.contains("drafter drafter with 4 layers (f32 on cpu)"), !alone, "{said}");
    }

    let told = expected(folder, &[("system", "Be brief."), ("user", "Tell me of 7.")], Sampler::greedy());
    assert_ne!(told, greedy);
    assert_eq!(answer(folder, &["--drafter", "drafter", "--system", "Be brief.", "Tell me of 7."]), told);
    // The prompt from stdin, named or not; the end of its last line is not part of it.
    for named in [&["-"][..], &[]] {
        fs::write(folder.join("question"), "Tell me of 7.\n").unwrap();
        let mut command = generate(folder, LIMIT, &[&["--decoder", "autoregressive"], named].concat());
        let output = command.stdin(fs::File::open(folder.join("question")).unwrap()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), greedy, "{}", stderr(&output));
    }
}

#[test]
fn a_seed_gives_its_answer_again_whichever_decoder_writes_it() {
    let folder = models();
    let folder = folder.path();
    let sampled = ["--temperature", "0.9", "--top-p", "0.95", "--top-k", "40", "Tell me of 7.", "--seed"];
    let sampler = |seed| Sampler { temperature: 0.9, top_p: 0.95, top_k: 40, seed };
    let messages = [("user", "Tell me of 7.")];
    let first = expected(folder, &messages, sampler(5));
    for decoder in ["asynchronous", "lockstep", "autoregressive"] {
        assert_eq!(answer(folder, &[&["--drafter", "drafter", "--decoder", decoder], &sampled[..], &["5"]].concat()), first);
    }
    let other = answer(folder, &[&["--drafter", "drafter"], &sampled[..], &["6"]].concat());
    assert!(other != first && other == expected(folder, &messages, sampler(6)));
}

#[test]
fn what_does_not_fit_is_refused_with_what_to_do() {
    let folder = models();
    let folder = folder.path();
    let refused = |arguments: &[&str], expected: &[&str]| {
        let output = output(folder, arguments);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(expected.iter().all(|words| said.contains(words)), "{arguments:?}: {said}");
        assert!(output.stdout.is_empty() && !said.contains("panicked"), "{said}");
    };
    let drafter = ["--drafter", "drafter"];
    let with = |arguments: &[&'static str]| [&drafter, arguments].concat();
    refused(&["Hello"], &["--drafter is missing", "--decoder autoregressive"]);
    refused(&["--drafter", "model", "Hello"], &["`model`", "drafter.json", "folder of a run"]);
    refused(&["--drafter", "absent", "Hello"], &["`absent`", "drafter.json"]);
    refused(&drafter, &["the prompt is empty"]);
    refused(&with(&[" \n"]), &["the prompt is empty"]);
    refused(&with(&["--thinking", "Hello"]), &["without thinking", "leave --thinking out"]);
    refused(&with(&["--seed", "1", "Hello"]), &["--seed", "--temperature"]);
    refused(&with(&["--top-p", "1.5", "Hello"]), &["--top-p", "at most 1"]);
    refused(&with(&["--temperature", "nan", "Hello"]), &["--temperature"]);
    refused(&with(&["--fan-out", "11x", "Hello"]), &["11x2"]);
    refused(&with(&["--fan-out", "11x2", "--decoder", "lockstep", "Hello"]), &["--fan-out has no effect"]);
    refused(&with(&["--device-target", "cuda:99", "Hello"]), &["--device-target", "cuda:99"]);
    refused(&with(&["--device-drafter", "tpu", "Hello"]), &["--device-drafter", "tpu"]);
    let absent =
        drafthorse(folder, &["generate", "--target", "absent", "--decoder", "autoregressive", "Hello"]).output().unwrap();
    assert!(absent.status.code() == Some(2) && stderr(&absent).contains("`absent`"), "{}", stderr(&absent));

    let changed = |name: &str, change: &dyn Fn(&mut serde_json::Value)| {
        let path = folder.join("drafter").join(name);
        let text = fs::read_to_string(&path).unwrap();
        let mut json = serde_json::from_str(&text).unwrap();
        change(&mut json);
        fs::write(&path, json.to_string()).unwrap();
        (path, text)
    };
    let refused_when = |name: &str, change: &dyn Fn(&mut serde_json::Value), expected: &[&str]| {
        let (path, before) = changed(name, change);
        refused(&with(&["Hello"]), expected);
        fs::write(path, before).unwrap();
    };
    refused_when("drafter.json", &|json| json["thinking"] = true.into(), &["with thinking", "give --thinking"]);
    refused_when("drafter.json", &|json| json["labels"] = "later".into(), &["drafter.json", "`labels`", "\"in_place\""]);
    refused_when("drafter.json", &|json| json["kind"] = "ar".into(), &["drafter.json", "`kind`", "\"d3d\""]);
    refused_when(
        "drafter.json",
        &|json| json["mask_token"] = 49152.into(),
        &["drafter.json", "`mask_token` is 49152", "49152 embedding"],
    );
    refused_when("config.json", &|json| json["vocab_size"] = 100.into(), &["vocabulary of 100", "of 49152"]);
    let swap = |json: &mut serde_json::Value| {
        let vocabulary = json["model"]["vocab"].as_object_mut().unwrap();
        let (one, other) = (vocabulary["the"].clone(), vocabulary["is"].clone());
        vocabulary["the"] = other;
        vocabulary["is"] = one;
    };
    refused_when("tokenizer.json", &swap, &["\"the\"", "\"is\"", "vocabulary"]);
    assert!(!answer(folder, &with(&["Hello"])).is_empty());
}

#[test]
fn prompts_and_answers_beyond_what_the_target_reads_are_told() {
    let folder = models();
    let path = folder.path().join("model/config.json");
    let mut config: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let mut with_positions = |count: usize| {
        config["max_position_embeddings"] = count.into();
        fs::write(&path, config.to_string()).unwrap();
        output(folder.path(), &["--decoder", "autoregressive", "Tell me of 7."])
    };
    let refused = with_positions(5);
    let said = stderr(&refused);
    let length: usize = said.split("the prompt has ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().parse().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("reads at most 5 (`max_position_embeddings`); shorten it"), "{said}");

    assert_eq!(with_positions(length).status.code(), Some(2), "no room for one token");
    let short = with_positions(length + 3);
    let note = format!("mind: after 3 tokens the target is beyond the {} it was made for", length + 3);
    assert!(short.status.success() && stderr(&short).contains(&note), "{}", stderr(&short));
    let enough = with_positions(length + LIMIT.parse::<usize>().unwrap());
    assert!(enough.status.success() && !stderr(&enough).contains("mind:"), "{}", stderr(&enough));
    assert_eq!(enough.stdout, short.stdout, "a note, no limit");
}

#[test]
fn an_answer_that_would_not_fit_into_memory_is_refused() {
    let folder = models();
    for decoder in ["asynchronous", "lockstep", "autoregressive"] {
        let arguments = ["--drafter", "drafter", "--decoder", decoder, "Hello"];
        let output = generate(folder.path(), &usize::MAX.to_string(), &arguments).output().unwrap();
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(" GB for ") && said.contains("GB are free"), "{said}");
    }
}

#[test]
fn controls_go_through_a_pipe_and_an_interrupt_ends_after_the_round() {
    let folder = models();
    make_it_write_controls(folder.path());
    let text = answer(folder.path(), &["--drafter", "drafter", "Hello"]);
    assert!(text.len() == 60 && text.chars().all(|character| matches!(character, '\u{1b}' | '\u{7}')), "{text:?}");

    let start = || {
        let mut command = generate(folder.path(), "100000", &["--drafter", "drafter", "Hello"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdout = child.stdout.take().unwrap();
        stdout.read_exact(&mut [0; 20]).unwrap();
        (child, stdout)
    };
    let (child, mut stdout) = start();
    // The shell's own `kill`: a small system may have no other.
    assert!(Command::new("sh").args(["-c", &format!("kill -INT {}", child.id())]).status().unwrap().success());
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert!(stderr(&output).contains(&format!(" {} tokens, ", rest.len() + 20)), "{} {}", rest.len() + 20, stderr(&output));
    assert!(stderr(&output).contains("interrupted"), "{}", stderr(&output));

    // A reader who has seen enough is no failure.
    let (child, stdout) = start();
    drop(stdout);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && !stderr(&output).contains("error"), "{}", stderr(&output));
}

/// The command on a terminal of its own, and what that showed.
fn on_a_terminal(folder: &Path, variables: &[(&str, &str)], arguments: &[&str]) -> Option<(Option<i32>, String)> {
    let quoted: Vec<String> = arguments.iter().map(|argument| format!("'{argument}'")).collect();
    let command = format!("'{}' {}", env!("CARGO_BIN_EXE_drafthorse"), quoted.join(" "));
    let mut script = Command::new("script");
    script.current_dir(folder).args(["--quiet", "--return", "--command", &command, "/dev/null"]);
    script.env_remove("NO_COLOR").env("TERM", "xterm").envs(variables.iter().copied()).stdin(Stdio::null());
    match script.output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("skipped: there is no `script` (util-linux) to make a terminal with");
            None
        }
        output => {
            let output = output.unwrap();
            Some((output.status.code(), String::from_utf8(output.stdout).unwrap()))
        }
    }
}

#[test]
fn a_terminal_shows_colours_and_no_control_of_the_models() {
    let folder = models();
    make_it_write_controls(folder.path());
    let arguments = [&COMMAND[..], &[LIMIT, "--drafter", "drafter", "Hello"]].concat();
    let Some((code, shown)) = on_a_terminal(folder.path(), &[], &arguments) else { return };
    assert_eq!(code, Some(0), "{shown}");
    assert!(shown.contains("\\u{1b}") || shown.contains("\\u{7}"), "{shown:?}");
    assert!(!shown.contains('\u{7}'), "{shown:?}");
    // Every escape is one of the colours, in the answer and in the key to it, and the last ends them.
    let (mut painted, mut ended) = (0, true);
    for sequence in shown.split('\u{1b}').skip(1) {
        let rendition = sequence.strip_prefix('[').and_then(|rest| rest.split_once('m')).map(|(rendition, _)| rendition);
        assert!(
            rendition.is_some_and(|it| it.chars().all(|character| character.is_ascii_digit() || character == ';')),
            "{shown:?}"
        );
        ended = rendition == Some("0");
        painted += usize::from(!ended);
    }
    assert!(painted > 3 && ended, "{shown:?}");
    assert!(shown.contains("(green)") && shown.contains("\u{1b}[32maccepted\u{1b}[0m"), "{shown:?}");

    for plain in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let (code, shown) = on_a_terminal(folder.path(), &[plain], &arguments).unwrap();
        assert_eq!(code, Some(0), "{shown}");
        assert!(!shown.contains(['\u{1b}', '\u{7}']) && !shown.contains("(green)"), "{plain:?}: {shown:?}");
        assert!(shown.contains("\\u{1b}") || shown.contains("\\u{7}"), "{plain:?}: {shown:?}");
    }

    // Without a prompt somebody at a terminal is told how to give one, instead of being waited for.
    let (code, shown) = on_a_terminal(folder.path(), &[], &arguments[..arguments.len() - 1]).unwrap();
    assert!(code == Some(2) && shown.contains("there is no prompt") && shown.contains("Why is the sky blue?"), "{shown}");
}

#[test]
fn help_teaches_by_example() {
    let output = drafthorse(&root(), &["generate", "--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    for words in ["drafthorse generate --target", "--fan-out <11x2|24>", "runs/quickstart", "Ctrl-C", "NO_COLOR", "--seed"] {
        assert!(help.contains(words), "{words} is not in: {help}");
    }
}
