//! Everything at once: several servers, some of which die for good, and faults drawn by a seed. Whatever is drawn, each question ends
//! exactly once, and an answer is that of its own question.

use super::chats::*;
use super::server::{Misdeed, Reply, Seen, Server};
use data::serving::{EndpointPhase, Pace};
use serde_json::json;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::thread;
use std::time::Duration;

/// A number that is a function of these.
fn drawn(seed: u64, server: u64, text: &str, repetition: usize) -> u64 {
    let mut hasher = DefaultHasher::new();
    (seed, server, text, repetition).hash(&mut hasher);
    hasher.finish()
}

/// After how many questions a server dies: of three the first, and the second in every other campaign.
fn dies_at(seed: u64, server: u64) -> usize {
    match server {
        0 => 30,
        1 if seed.is_multiple_of(2) => 60,
        _ => usize::MAX,
    }
}

/// Whether servers hang at times, so that time-outs are short.
fn hangs(seed: u64) -> bool {
    seed.is_multiple_of(4)
}

/// Questions that a server will never answer: refused, or ended for another reason.
fn is_refused(seed: u64, text: &str) -> bool {
    drawn(seed, 99, text, 0).is_multiple_of(23)
}

fn mischief(seed: u64, server: u64) -> impl Fn(&Seen) -> Misdeed + Send + Sync {
    move |seen| {
        if seen.number >= dies_at(seed, server) {
            return Misdeed::Die;
        }
        if seen.is_probe() {
            return Misdeed::None;
        }
        if is_refused(seed, seen.asked()) {
            return status(400);
        }
        match drawn(seed, server, seen.asked(), seen.repetition) % 40 {
            0 => status(429),
            1 => Misdeed::Status(503, "Retry-After: 0".to_owned(), "later".to_owned()),
            2 => status(500),
            3 => Misdeed::Body(json!({ "choices": [] }).to_string()),
            4 => Misdeed::Body("{\"choices\": [{\"message\": ".to_owned()),
            5 => Misdeed::Close,
            6 => Misdeed::CloseMidBody,
            7 if seen.repetition == 0 && hangs(seed) => Misdeed::Hang,
            8..20 => Misdeed::Late(Duration::from_millis(drawn(seed, server, seen.asked(), 7) % 5)),
            _ => Misdeed::None,
        }
    }
}

fn campaign(seed: u64) {
    const CHATS: u64 = 150;
    let answers: [fn(&Seen) -> Reply; 3] = [with_ids, text_alone, with_ids];
    let model = format!("model of campaign {seed} in {}", std::process::id());
    let start = |server: u64| Server::start_at(0, &[&model], answers[server as usize], mischief(seed, server));
    let servers: Vec<Server> = (0..3).map(start).collect();
    let mut settings = settings(&servers.iter().collect::<Vec<_>>());
    settings.timeout = Duration::from_millis(if hangs(seed) { 700 } else { 10_000 });
    settings.retries = 6;
    settings.concurrency = 8;
    settings.seed = seed;
    settings.pace = Pace {
        first_delay: Duration::from_millis(1),
        longest_delay: Duration::from_millis(20),
        probe_again: Duration::from_millis(50),
    };
    let mut chats = Chats::new(CHATS, 2);
    let (result, states) = run(&mut chats, &settings);
    result.unwrap();
    let mut rejected = 0;
    for chat in 0..CHATS {
        for turn in 0..2 {
            let ended = chats.ended.get(&(chat * 100 + turn));
            let text = asked(chat, turn);
            match ended {
                Some(Ok(answer)) => {
                    assert!(!is_refused(seed, &text));
                    assert_eq!(answer.text.as_deref(), Some(answer_to(&text).as_str()));
                    assert!(answer.ids.as_ref().is_none_or(|ids| *ids == ids_of(&answer_to(&text))));
                }
                // With six more attempts no other question is out of luck.
                Some(Err(reason)) => {
                    assert!(is_refused(seed, &text) && reason == "status 400: words of 400", "{text}: {reason}");
                    rejected += 1;
                }
                // Its first turn was rejected.
                None => assert!(turn == 1 && chats.ended[&(chat * 100)].is_err()),
            }
            if is_refused(seed, &text) && !hangs(seed) {
                let asked = |server: &Server| server.asked().iter().filter(|seen| seen.asked() == text).count();
                let asked: Vec<usize> = servers.iter().map(asked).collect();
                // A server that dies may take its refusal with it.
                let deaths = 1 + usize::from(seed.is_multiple_of(2));
                assert!(asked[2] <= 1 && asked.iter().sum::<usize>() <= 1 + deaths, "{text} was asked again: {asked:?}");
            }
        }
    }
    assert!(rejected > 0);
    for (server, state) in states.iter().enumerate() {
        let is_dead = servers[server].asked().len() > dies_at(seed, server as u64);
        // The last answer may come before the last probe has failed.
        let is_dropped = matches!(state.phase, EndpointPhase::Dropped(_));
        assert!(if is_dead { state.phase != EndpointPhase::Live } else { !is_dropped }, "{seed}: {state:?}");
    }
    assert_eq!(states.iter().map(|state| state.answered + state.rejected).sum::<u64>(), chats.ended.len() as u64);
}

#[test]
fn each_question_ends_once_in_every_mix() {
    let seeds: Vec<u64> = (0..36).collect();
    thread::scope(|scope| {
        for lane in seeds.chunks(9) {
            scope.spawn(move || lane.iter().for_each(|&seed| campaign(seed)));
        }
    });
}
