//! Responses from servers that misbehave, by a process that is killed: whatever happens, every row ends once, and in the same bytes.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::soak::Moments;
use super::{drafthorse, stderr, tiny};

#[path = "../../data/tests/serving/server.rs"]
mod server;

use self::server::{Misdeed, Reply, Seen, Server};

/// A number that is a function of what a request asks and of nothing else.
fn drawn(seen: &Seen, salt: u64) -> u64 {
    let mut hasher = DefaultHasher::new();
    (seen.body["messages"].to_string(), salt).hash(&mut hasher);
    hasher.finish()
}

/// An answer that says what it answers: in some cases with token ids, in some cut off at the limit.
fn answer(seen: &Seen) -> Reply {
    let number = drawn(seen, 0);
    let finish_reason = if number.is_multiple_of(7) { "length" } else { "stop" };
    let ids: Vec<u32> = (0..5 + number % 30).map(|index| 100 + ((number >> 3) + index * 31) as u32 % 40_000).collect();
    Reply {
        text: Some(format!("You asked {}, so {number}.", seen.asked())),
        token_ids: number.is_multiple_of(2).then_some(ids),
        prompt_token_ids: None,
        finish_reason: finish_reason.to_owned(),
    }
}

/// Faults of all kinds. Those that pass are drawn by server and repetition, the refusals by what is asked alone.
fn mischief(server: u64, dies_at: usize) -> impl Fn(&Seen) -> Misdeed + Send + Sync {
    move |seen| {
        if seen.number >= dies_at {
            return Misdeed::Die;
        }
        if seen.is_probe() {
            return Misdeed::None;
        }
        if drawn(seen, 1).is_multiple_of(29) {
            return Misdeed::Status(400, String::new(), json!({"error": {"message": "no"}}).to_string());
        }
        let status = |status| Misdeed::Status(status, "Retry-After: 0".to_owned(), String::new());
        let number = drawn(seen, 2 + server + 10 * seen.repetition as u64);
        match number % 60 {
            0 => status(429),
            1 => status(503),
            2 => Misdeed::Body(json!({ "choices": [] }).to_string()),
            3 => Misdeed::Body("{\"choices\": [{\"mess".to_owned()),
            4 => Misdeed::CloseMidBody,
            5 => Misdeed::Close,
            6 if seen.repetition == 0 => Misdeed::Hang,
            _ => Misdeed::Late(Duration::from_millis(5 + number % 40)),
        }
    }
}

const CHATS: usize = 240;

/// So many that no question is given up for faults that pass.
const RETRIES: usize = 40;

/// The tiny run with chats of one or two turns.
fn write(folder: &Path) {
    tiny::write(folder);
    let chat = |number: usize| match number % 3 {
        0 => json!({ "id": number, "turns": [format!("Tell me of {number}."), "And after that?"] }),
        _ => json!({ "id": number, "prompt": format!("What is {number}?") }),
    };
    fs::write(folder.join("prompts.jsonl"), (0..CHATS).map(|number| format!("{}\n", chat(number))).collect::<String>()).unwrap();
}

/// Three servers, one of which dies on the way.
fn servers() -> Vec<Server> {
    (0..3).map(|number| Server::start(answer, mischief(number, if number == 0 { 60 } else { usize::MAX }))).collect()
}

fn regenerate(folder: &Path, servers: &[Server], retries: usize) -> Command {
    let urls: Vec<&str> = servers.iter().map(|server| server.url.as_str()).collect();
    let endpoints = format!("regenerate.endpoints={}", json!(urls));
    let settings = ["engine=server", "concurrency=2", "timeout=2"].map(|it| format!("regenerate.{it}"));
    let settings = settings.into_iter().chain([format!("regenerate.retries={retries}")]);
    let mut command = drafthorse(folder, &["regenerate", "recipe.toml", "--set", "data.max_rejected=0.2", "--set", &endpoints]);
    settings.for_each(|setting| {
        command.args(["--set", &setting]);
    });
    command
}

/// All that regeneration leaves: parts, rejected rows, and what the manifest says of them.
fn outcome(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let responses = folder.join("runs/tiny/responses");
    let mut names: Vec<String> =
        fs::read_dir(&responses).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    assert!(
        names.iter().all(|name| name.starts_with("part-") || name == "manifest.json" || name == "rejected.jsonl"),
        "{names:?}"
    );
    let read = |name: String| {
        let bytes = fs::read(responses.join(&name)).unwrap();
        let manifest = |bytes| serde_json::from_slice::<Value>(bytes).unwrap()["results"].to_string().into_bytes();
        let bytes = if name == "manifest.json" { manifest(&bytes) } else { bytes };
        // Both name the prompt file by its whole path.
        let is_text = !name.ends_with(".parquet");
        let here = folder.display().to_string();
        (name, if is_text { String::from_utf8(bytes).unwrap().replace(&here, "HERE").into_bytes() } else { bytes })
    };
    names.into_iter().map(read).collect()
}

fn killed_and_left_alone(kills: usize) {
    let [alone, killed] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    write(alone.path());
    write(killed.path());
    let begun = Instant::now();
    let first = servers();
    let output = regenerate(alone.path(), &first, RETRIES).output().unwrap();
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    let whole = begun.elapsed();
    for server in &first {
        assert!(said.contains(&format!("server {} is live", server.url)), "{said}");
    }
    let died = said.lines().find(|line| line.contains(&format!("server {}: ", first[0].url)) && line.contains(" answers, "));
    assert!(died.is_some_and(|line| line.contains("cannot be reached")), "{said}");
    let expected = outcome(alone.path());
    let results: Value = serde_json::from_slice(&expected.iter().find(|(name, _)| name == "manifest.json").unwrap().1).unwrap();
    let number = |name: &str| results[name].as_u64().unwrap() as usize;
    assert_eq!(number("rows_read"), CHATS);
    assert_eq!(number("rows_used") + number("rows_rejected"), CHATS);
    for name in ["rows_rejected", "finished_by_length", "finished_by_stop", "ids_from_engine", "ids_from_tokenizer"] {
        assert!(number(name) > 0, "{name}: {results}");
    }

    let second = servers();
    let mut moments = Moments(11);
    let (mut parts, mut deaths) = (Vec::new(), 0);
    while deaths < kills {
        let mut child = regenerate(killed.path(), &second, RETRIES).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        thread::sleep(Duration::from_millis(150 + moments.below((whole.as_millis() as u64).min(4000) / 4)));
        if child.try_wait().unwrap().is_some() {
            // Done before all kills: once more from the beginning.
            fs::remove_dir_all(killed.path().join("runs")).unwrap();
            continue;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        deaths += 1;
        let folder = fs::read_dir(killed.path().join("runs/tiny/responses"));
        let is_part = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("part-");
        parts.push(folder.map_or(0, |folder| folder.flatten().filter(is_part).count()).to_string());
    }
    println!(
        "regeneration by servers: {:.1} s left alone; {deaths} kills, parts after each: {}",
        whole.as_secs_f64(),
        parts.join(" ")
    );
    assert!(parts.iter().any(|count| count != "0"), "no kill found a part on disk");
    let output = regenerate(killed.path(), &second, RETRIES).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(expected.len(), outcome(killed.path()).len());
    for ((name, expected), (other, found)) in expected.iter().zip(&outcome(killed.path())) {
        assert_eq!(name, other);
        assert!(expected == found, "{name} differs: {}", String::from_utf8_lossy(&expected[..expected.len().min(600)]));
    }
}

#[test]
fn regeneration_by_servers_killed_at_ten_moments_ends_as_left_alone() {
    killed_and_left_alone(10);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn soak_regeneration_by_servers_killed_at_a_hundred_moments_ends_as_left_alone() {
    killed_and_left_alone(100);
}

#[test]
fn a_run_whose_servers_are_not_there_says_so_and_keeps_what_it_has() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let dying = [Server::start(answer, mischief(0, 40))];
    let output = regenerate(folder.path(), &dying, 3).output().unwrap();
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("no server is left") && said.contains(&dying[0].url), "{said}");

    let living = [Server::start(answer, mischief(1, usize::MAX))];
    let output = regenerate(folder.path(), &living, 6).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let asked: usize = living[0].asked().len();
    assert!(asked < CHATS * 4 / 3 * 2, "{asked}");

    // A process that was killed just before the end leaves the work behind; the next one clears it away.
    let responses = folder.path().join("runs/tiny/responses");
    fs::create_dir(responses.join("requests")).unwrap();
    fs::write(responses.join("requests/prepared.json"), "{}").unwrap();
    let output = regenerate(folder.path(), &living, 6).output().unwrap();
    assert!(output.status.success() && stderr(&output).contains("is done"), "{}", stderr(&output));
    assert!(!responses.join("requests").exists());

    // What servers wrote is not continued by the target itself.
    let mut other = drafthorse(folder.path(), &["regenerate", "recipe.toml", "--set", "data.max_rejected=0.2"]);
    let output = other.output().unwrap();
    let said = stderr(&output);
    assert!(!output.status.success() && said.contains("regenerate.engine"), "{said}");
}
