//! The client for serving engines against a server that misbehaves on demand: whatever it does, each question ends once, in its own
//! answer or in a reason.

#![allow(clippy::unwrap_used)]

mod campaign;
mod chats;
mod probes;
mod server;

use self::chats::*;
use self::server::{Misdeed, Reply, Seen, Server, model_of_this_test};
use data::responses::FinishReason;
use data::serving::{ApiKey, EndpointPhase, ServingError, ServingSettings, answer_all};
use serde_json::json;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn all_turns_are_answered_with_ids_or_without() {
    for (answer, has_ids) in [(with_ids as fn(&Seen) -> Reply, true), (text_alone, false)] {
        let servers = [Server::start(answer, behaved), Server::start(answer, behaved)];
        let mut chats = Chats::new(60, 3);
        let (result, states) = run(&mut chats, &settings(&[&servers[0], &servers[1]]));
        result.unwrap();
        chats.assert_all_answered(60);
        for answer in chats.ended.values().flatten() {
            assert_eq!(answer.ids, has_ids.then(|| ids_of(answer.text.as_deref().unwrap())));
            assert_eq!(answer.finish_reason, FinishReason::Stop);
        }
        assert!(servers.iter().all(|server| server.asked().len() > 40 && server.most_under_way() <= 4));
        assert_eq!(states.iter().map(|state| state.answered).sum::<u64>(), 180);
        for state in &states {
            assert_eq!(
                (&state.phase, state.model.as_deref(), state.under_way),
                (&EndpointPhase::Live, Some(model_of_this_test().as_str()), 0)
            );
            assert!(state.answers_per_second > 0.0 && state.tokens_per_second >= state.answers_per_second);
            assert_eq!(state.notes.iter().any(|note| note.contains("no token ids")), !has_ids, "{:?}", state.notes);
        }
    }
}

#[test]
fn a_proxy_does_not_stand_before_servers_of_this_machine() {
    // The environment of a process is read by all of its threads, so this takes one of its own.
    let test = ["--exact", "all_turns_are_answered_with_ids_or_without"];
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(test).env("ALL_PROXY", "http://127.0.0.1:9").env("NO_PROXY", "").env("no_proxy", "");
    let output = command.output().unwrap();
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
}

#[test]
fn a_thousand_are_asked_at_once() {
    // None is answered before a thousand have been asked.
    let asked = AtomicUsize::new(0);
    let server = Server::start(with_ids, move |seen| {
        let start = Instant::now();
        asked.fetch_add(usize::from(!seen.is_probe()), Ordering::SeqCst);
        while !seen.is_probe() && asked.load(Ordering::SeqCst) < 1000 && start.elapsed() < Duration::from_secs(12) {
            thread::sleep(Duration::from_millis(20));
        }
        Misdeed::None
    });
    let mut chats = Chats::new(1200, 1);
    let (result, _) =
        run(&mut chats, &ServingSettings { concurrency: 1000, timeout: Duration::from_secs(20), ..settings(&[&server]) });
    result.unwrap();
    chats.assert_all_answered(1200);
    assert_eq!(server.most_under_way(), 1000);
}

#[test]
fn what_may_pass_is_asked_again() {
    let misdeeds = [408, 409, 425, 429, 500, 502, 503, 504].map(status).into_iter();
    let broken = [Misdeed::Close, Misdeed::CloseMidBody, Misdeed::Body("<html>".to_owned()), Misdeed::Body("{}".to_owned())];
    let empty = Misdeed::Body(json!({ "choices": [] }).to_string());
    for misdeed in misdeeds.chain(broken).chain([empty]) {
        let server = Server::start(with_ids, once(misdeed.clone()));
        let mut chats = Chats::new(1, 1);
        let (result, states) = run(&mut chats, &settings(&[&server]));
        result.unwrap();
        chats.assert_all_answered(1);
        assert_eq!((server.asked().len(), states[0].faults), (2, 1), "{misdeed:?}");
    }
}

#[test]
fn what_will_not_pass_is_asked_once() {
    for code in [400, 402, 413, 422] {
        let server = Server::start(with_ids, move |seen| if seen.asked() == asked(3, 0) { status(code) } else { Misdeed::None });
        let mut chats = Chats::new(6, 2);
        run(&mut chats, &settings(&[&server])).0.unwrap();
        assert_eq!(chats.ended.values().filter(|result| result.is_ok()).count(), 10);
        assert_eq!(chats.rejected(300), format!("status {code}: words of {code}"));
        assert_eq!(server.asked().iter().filter(|seen| seen.asked() == asked(3, 0)).count(), 1);
    }
}

#[test]
fn a_long_message_is_cut() {
    let server = Server::start(with_ids, |seen| {
        if seen.is_probe() { Misdeed::None } else { Misdeed::Status(400, String::new(), "ä".repeat(100_000)) }
    });
    let mut chats = Chats::new(1, 1);
    run(&mut chats, &settings(&[&server])).0.unwrap();
    assert!(chats.rejected(0).starts_with("status 400: ää") && chats.rejected(0).chars().count() < 400);
}

#[test]
fn a_question_that_keeps_failing_is_rejected_when_others_do_not() {
    let server = Server::start(with_ids, |seen| if seen.asked() == asked(1, 0) { status(500) } else { Misdeed::None });
    let mut chats = Chats::new(8, 1);
    run(&mut chats, &settings(&[&server])).0.unwrap();
    let reason = chats.rejected(100);
    assert!(reason.contains("4 attempts") && reason.contains("words of 500") && reason.contains(&server.url), "{reason}");
    assert_eq!(chats.ended.values().filter(|result| result.is_ok()).count(), 7);
    assert_eq!(server.asked().iter().filter(|seen| seen.asked() == asked(1, 0)).count(), 4);
}

#[test]
fn a_question_that_keeps_failing_alone_is_rejected_when_the_server_passes_a_probe() {
    let server = Server::start(with_ids, |seen| if seen.is_probe() { Misdeed::None } else { Misdeed::Close });
    let mut chats = Chats::new(1, 1);
    run(&mut chats, &settings(&[&server])).0.unwrap();
    assert!(chats.rejected(0).contains("the connection broke"), "{}", chats.rejected(0));
}

#[test]
fn a_server_is_left_alone_for_as_long_as_it_asks() {
    let date = || {
        // Dates have whole seconds, so this is one second away at least.
        let date = chrono::Utc::now() + chrono::Duration::milliseconds(1999);
        date.format("%a, %d %b %Y %H:%M:%S GMT").to_string()
    };
    for value in ["1".to_owned(), date()] {
        for code in [429, 503] {
            let header = format!("Retry-After: {value}");
            let busy = once(Misdeed::Status(code, header, "busy".to_owned()));
            let server = Server::start(with_ids, move |seen| if seen.number == 0 { busy(seen) } else { Misdeed::None });
            let mut chats = Chats::new(2, 1);
            run(&mut chats, &ServingSettings { concurrency: 1, ..settings(&[&server]) }).0.unwrap();
            chats.assert_all_answered(2);
            let asked = server.asked();
            let wait = asked[1].at - asked[0].at;
            let is_date = value.contains("GMT");
            assert!(wait > Duration::from_millis(if is_date { 0 } else { 1000 }) && wait < Duration::from_secs(2), "{wait:?}");
            if is_date {
                break;
            }
        }
    }
    // No longer than the longest delay.
    let server = Server::start(with_ids, once(Misdeed::Status(429, "Retry-After: 3600".to_owned(), String::new())));
    let mut settings = settings(&[&server]);
    settings.pace.longest_delay = Duration::from_millis(50);
    let started = Instant::now();
    run(&mut Chats::new(1, 1), &settings).0.unwrap();
    assert!(started.elapsed() < Duration::from_secs(1));
}

#[test]
fn a_busy_server_costs_no_question() {
    let start = Instant::now();
    let server = Server::start(with_ids, move |_| {
        if start.elapsed() < Duration::from_millis(300) { status(429) } else { Misdeed::Late(Duration::from_millis(2)) }
    });
    let mut settings = settings(&[&server]);
    settings.retries = 8;
    let mut chats = Chats::new(100, 1);
    run(&mut chats, &settings).0.unwrap();
    chats.assert_all_answered(100);
}

#[test]
fn a_server_that_is_busy_for_many_at_once_is_left_alone_as_for_one() {
    let busy = |seen: &Seen| if seen.number < 16 && !seen.is_probe() { status(429) } else { Misdeed::None };
    let server = Server::start(with_ids, busy);
    let mut chats = Chats::new(40, 1);
    let started = Instant::now();
    run(&mut chats, &ServingSettings { concurrency: 16, ..settings(&[&server]) }).0.unwrap();
    chats.assert_all_answered(40);
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}

#[test]
fn a_hang_costs_the_timeout_and_no_more() {
    let server = Server::start(with_ids, once(Misdeed::Hang));
    let mut chats = Chats::new(4, 1);
    let started = Instant::now();
    let (result, states) = run(&mut chats, &ServingSettings { timeout: Duration::from_millis(300), ..settings(&[&server]) });
    result.unwrap();
    chats.assert_all_answered(4);
    assert!(states[0].last_fault.as_ref().unwrap().contains("no answer within 0.3 s"), "{states:?}");
    assert!((300..1500).contains(&(started.elapsed().as_millis() as u64)), "{:?}", started.elapsed());
}

#[test]
fn the_wish_to_stop_is_obeyed_while_requests_hang() {
    let server = Server::start(with_ids, |seen| if seen.number % 2 == 1 { Misdeed::Hang } else { Misdeed::None });
    let (stop, mut chats) = (AtomicBool::new(false), Chats::new(50, 1));
    let took = thread::scope(|scope| {
        let stopper = scope.spawn(|| {
            thread::sleep(Duration::from_millis(300));
            stop.store(true, Ordering::Relaxed);
            Instant::now()
        });
        let settings = ServingSettings { timeout: Duration::from_secs(600), ..settings(&[&server]) };
        answer_all(&mut chats, &settings, &stop, &mut |_| {}).unwrap();
        stopper.join().unwrap().elapsed()
    });
    assert!(took < Duration::from_millis(500), "{took:?}");
    assert!(!chats.under_way.is_empty());
}

#[test]
fn an_answer_that_comes_after_the_wish_to_stop_is_not_passed_on() {
    let stop = Arc::new(AtomicBool::new(false));
    let stopping = stop.clone();
    let server = Server::start(with_ids, move |seen| {
        stopping.store(!seen.is_probe(), Ordering::Relaxed);
        Misdeed::None
    });
    let mut chats = Chats::new(3, 1);
    answer_all(&mut chats, &ServingSettings { concurrency: 1, ..settings(&[&server]) }, &stop, &mut |_| {}).unwrap();
    assert!(chats.ended.is_empty() && server.asked().len() == 1);
}

#[test]
fn nothing_more_is_asked_when_there_is_enough() {
    let server = Server::start(with_ids, behaved);
    let mut chats = Chats::new(50, 1);
    chats.enough = Some(5);
    run(&mut chats, &settings(&[&server])).0.unwrap();
    assert_eq!(chats.ended.len(), 5);
    assert!(server.asked().len() < 12);
}

#[test]
fn nothing_is_sent_when_there_is_nothing_to_ask() {
    let server = Server::start(with_ids, behaved);
    run(&mut Chats::new(0, 1), &settings(&[&server])).0.unwrap();
    assert!(server.seen().is_empty());
}

#[test]
fn what_a_dead_server_was_asked_goes_to_the_others() {
    let dies =
        |seen: &Seen| if seen.number >= 20 && !seen.is_probe() { Misdeed::Die } else { Misdeed::Late(Duration::from_millis(2)) };
    let (mortal, steady) = (Server::start(with_ids, dies), Server::start(with_ids, |_| Misdeed::Late(Duration::from_millis(2))));
    let mut chats = Chats::new(200, 2);
    let mut settings = settings(&[&mortal, &steady]);
    // Not a single fault is forgiven, so this passes only if those of the dead server are not counted.
    settings.retries = 0;
    let (result, states) = run(&mut chats, &settings);
    result.unwrap();
    chats.assert_all_answered(200);
    assert!(matches!(&states[0].phase, EndpointPhase::Dropped(reason) if reason.contains("cannot be reached")), "{states:?}");
    assert_eq!(states[1].phase, EndpointPhase::Live);
}

#[test]
fn a_server_that_hangs_for_good_is_dropped() {
    let hangs = |seen: &Seen| if seen.number >= 10 { Misdeed::Hang } else { Misdeed::None };
    let (mortal, steady) = (Server::start(with_ids, hangs), Server::start(with_ids, |_| Misdeed::Late(Duration::from_millis(5))));
    let mut chats = Chats::new(300, 1);
    let mut settings = ServingSettings { timeout: Duration::from_millis(250), retries: 0, ..settings(&[&mortal, &steady]) };
    settings.pace.probe_again = Duration::from_secs(60);
    let (result, states) = run(&mut chats, &settings);
    result.unwrap();
    chats.assert_all_answered(300);
    assert!(matches!(&states[0].phase, EndpointPhase::Dropped(reason) if reason.contains("no answer within")), "{states:?}");
    assert!(mortal.asked().len() < 30, "{}", mortal.asked().len());
}

#[test]
fn faults_in_a_row_cast_doubt_on_a_server_however_often_questions_may_be_asked() {
    let fails = |seen: &Seen| if seen.number >= 3 { status(500) } else { Misdeed::None };
    let (failing, steady) =
        (Server::start(with_ids, fails), Server::start(with_ids, |_| Misdeed::Late(Duration::from_millis(5))));
    let mut chats = Chats::new(200, 1);
    let mut settings = ServingSettings { concurrency: 1, retries: 1000, ..settings(&[&failing, &steady]) };
    settings.pace.longest_delay = Duration::from_millis(1);
    run(&mut chats, &settings).0.unwrap();
    chats.assert_all_answered(200);
    // Three answers and five faults.
    assert_eq!(failing.asked().len(), 8);
}

#[test]
fn a_server_that_passes_probes_and_nothing_else_is_asked_less_and_less() {
    let server = Server::start(with_ids, |seen| if seen.is_probe() { Misdeed::None } else { status(500) });
    let mut chats = Chats::new(6, 1);
    let mut settings = ServingSettings { concurrency: 1, retries: 0, ..settings(&[&server]) };
    settings.pace.first_delay = Duration::from_millis(40);
    run(&mut chats, &settings).0.unwrap();
    assert!(chats.ended.len() == 6 && chats.ended.values().all(Result::is_err));
    let waits: Vec<Duration> = server.asked().windows(2).map(|pair| pair[1].at - pair[0].at).collect();
    for (number, wait) in waits.iter().enumerate() {
        assert!(*wait >= Duration::from_millis(20 << number), "{waits:?}");
    }
}

#[test]
fn when_all_are_dead_each_is_named_with_what_it_died_of() {
    let refusing = Server::start(with_ids, behaved);
    refusing.kill();
    let failing = Server::start(with_ids, |seen| if seen.number >= 3 { status(500) } else { Misdeed::None });
    let mut chats = Chats::new(20, 1);
    let (result, _) = run(&mut chats, &settings(&[&refusing, &failing]));
    let error = result.unwrap_err();
    assert!(matches!(error, ServingError::AllDropped(_)));
    let error = error.to_string();
    for part in [&refusing.url, "cannot be reached", &failing.url, "status 500: words of 500"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(chats.ended.values().all(Result::is_ok) && !chats.under_way.is_empty());
}

#[test]
fn a_server_that_comes_back_is_used_again() {
    let first = Server::start(with_ids, |seen| if seen.number >= 5 { Misdeed::Die } else { Misdeed::None });
    let steady = Server::start(with_ids, |_| Misdeed::Late(Duration::from_millis(20)));
    let port = first.port();
    let (mut chats, settings) = (Chats::new(500, 1), settings(&[&first, &steady]));
    let mut second = None;
    let mut was_dropped = false;
    answer_all(&mut chats, &settings, &AtomicBool::new(false), &mut |states| {
        if matches!(states[0].phase, EndpointPhase::Dropped(_)) && second.is_none() {
            was_dropped = true;
            second =
                Some(Server::start_at(port, &[&model_of_this_test()], with_ids, |_| Misdeed::Late(Duration::from_millis(20))));
        }
    })
    .unwrap();
    chats.assert_all_answered(500);
    assert!(was_dropped && second.unwrap().asked().len() > 20);
}

#[test]
fn the_key_is_sent_and_never_shown() {
    const KEY: &str = "sk-very-secret";
    let echo = |code| {
        let echo = json!({ "error": { "message": format!("the key Bearer {KEY} is bad") } }).to_string();
        move |seen: &Seen| {
            if seen.is_probe() && code != 401 { Misdeed::None } else { Misdeed::Status(code, String::new(), echo.clone()) }
        }
    };
    let mut shown = Vec::new();
    for code in [401, 400, 500] {
        let server = Server::start(with_ids, echo(code));
        let settings = ServingSettings { api_key: Some(ApiKey::new(KEY)), ..settings(&[&server]) };
        let mut chats = Chats::new(3, 1);
        let (result, states) = run(&mut chats, &settings);
        shown.extend([format!("{result:?}"), format!("{states:?}"), format!("{:?}", chats.ended), format!("{settings:?}")]);
        shown.extend(result.err().map(|error| error.to_string()));
        let seen = server.seen();
        assert!(!seen.is_empty() && seen.iter().all(|seen| seen.authorization.as_deref() == Some("Bearer sk-very-secret")));
    }
    assert!(shown.iter().all(|shown| !shown.contains("secret")), "{shown:?}");
    assert!(shown.iter().any(|shown| shown.contains("status 401") && shown.contains("DRAFTHORSE_API_KEY")));
    assert!(shown.iter().any(|shown| shown.contains("status 400: the key Bearer [key] is bad")));
    let server = Server::start(with_ids, behaved);
    let error = run(&mut Chats::new(1, 1), &ServingSettings { api_key: Some(ApiKey::new("se\ncret")), ..settings(&[&server]) }).0;
    assert!(matches!(error, Err(ServingError::BadKey)));
    run(&mut Chats::new(1, 1), &settings(&[&server])).0.unwrap();
    assert!(server.seen().iter().all(|seen| seen.authorization.is_none()));
}

#[test]
fn a_server_that_forgets_its_model_costs_few_questions() {
    let forgets = |seen: &Seen| if seen.number >= 10 { status(404) } else { Misdeed::None };
    let server = Server::start(with_ids, forgets);
    let mut chats = Chats::new(300, 1);
    let error = run(&mut chats, &settings(&[&server])).0.unwrap_err().to_string();
    assert!(error.contains("status 404"), "{error}");
    assert!(chats.ended.values().filter(|result| result.is_err()).count() <= 4);
}

#[test]
fn a_reply_without_end_is_cut_off_and_a_redirection_not_followed() {
    let server = Server::start(with_ids, |seen| if seen.is_probe() { Misdeed::None } else { Misdeed::Endless });
    let mut chats = Chats::new(1, 1);
    run(&mut chats, &ServingSettings { retries: 0, ..settings(&[&server]) }).0.unwrap();
    assert!(chats.rejected(0).contains("more than 64 MiB"), "{}", chats.rejected(0));
    let elsewhere = Server::start(with_ids, behaved);
    let location = format!("Location: {}/v1/chat/completions", elsewhere.url);
    let server = Server::start(with_ids, move |_| Misdeed::Status(307, location.clone(), String::new()));
    let error = run(&mut Chats::new(1, 1), &settings(&[&server])).0.unwrap_err().to_string();
    assert!(error.contains("status 307") && error.contains(&elsewhere.url) && elsewhere.seen().is_empty(), "{error}");
}

#[test]
fn settings_that_ask_for_nothing_are_refused() {
    let server = Server::start(with_ids, behaved);
    let none = ServingSettings { endpoints: Vec::new(), ..settings(&[]) };
    assert!(matches!(run(&mut Chats::new(1, 1), &none).0, Err(ServingError::NoEndpoints)));
    let idle = ServingSettings { concurrency: 0, ..settings(&[&server]) };
    assert!(matches!(run(&mut Chats::new(1, 1), &idle).0, Err(ServingError::NoConcurrency)));
    let mut twice = settings(&[&server, &server]);
    twice.endpoints[1].push_str("/v1/");
    assert!(matches!(run(&mut Chats::new(1, 1), &twice).0, Err(ServingError::Twice(_))));
    let bad = ServingSettings { endpoints: vec!["host:8000".to_owned()], ..settings(&[]) };
    let error = run(&mut Chats::new(1, 1), &bad).0.unwrap_err().to_string();
    assert!(error.contains("`host:8000`"), "{error}");
}
