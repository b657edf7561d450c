//! What a server must show before it is given questions.

use super::chats::*;
use super::server::{Misdeed, Reply, Seen, Server};
use data::serving::ServingSettings;
use serde_json::json;
use std::time::Duration;

/// Refuses requests with one of these fields, with or without naming it.
fn strict(fields: &'static [&'static str], names: bool) -> impl Fn(&Seen) -> Misdeed + Send + Sync {
    move |seen| match fields.iter().find(|&&field| !seen.body[field].is_null()) {
        Some(field) if names => Misdeed::Status(422, String::new(), format!("extra field {field}")),
        Some(_) => Misdeed::Status(400, String::new(), "there are too many fields".to_owned()),
        None => Misdeed::None,
    }
}

#[test]
fn a_server_need_not_know_all_fields() {
    let fields = &["return_token_ids", "return_tokens", "repetition_penalty"];
    for names in [true, false] {
        let server = Server::start(with_ids, strict(fields, names));
        let mut chats = Chats::new(5, 1);
        let (result, states) = run(&mut chats, &settings(&[&server]));
        result.unwrap();
        chats.assert_all_answered(5);
        assert!(chats.ended.values().flatten().all(|answer| answer.ids.is_none()));
        let note = &states[0].notes[0];
        assert!(note.starts_with("does not take ") && fields.iter().all(|field| note.contains(field)), "{note}");
        assert_eq!(note.contains("repeat_penalty"), !names, "{note}");
        assert_eq!(server.asked().len(), 5);
        assert!(server.asked().iter().all(|seen| seen.body["chat_template_kwargs"] == json!({ "enable_thinking": false })));
    }
}

#[test]
fn a_server_without_a_setting_that_matters_is_not_used() {
    for field in ["chat_template_kwargs", "top_k"] {
        for names in [true, false] {
            let server = if field == "top_k" {
                Server::start(with_ids, strict(&["top_k"], names))
            } else {
                Server::start(with_ids, strict(&["chat_template_kwargs"], names))
            };
            let mut chats = Chats::new(5, 1);
            let (result, _) = run(&mut chats, &ServingSettings { temperature: 0.5, top_k: 20, ..settings(&[&server]) });
            let error = result.unwrap_err().to_string();
            assert!(
                error.contains("refuses requests with ") && error.contains(field) && error.contains("other settings"),
                "{error}"
            );
            assert!(chats.ended.is_empty() && server.asked().is_empty());
        }
    }
}

#[test]
fn a_server_that_refuses_everything_says_why() {
    let server = Server::start(with_ids, |_| status(400));
    let error = run(&mut Chats::new(5, 1), &settings(&[&server])).0.unwrap_err().to_string();
    assert!(error.contains(&format!("`{}`: status 400: words of 400", server.url)), "{error}");
    assert!(server.asked().is_empty());
}

#[test]
fn a_first_question_that_fails_is_not_held_against_the_server() {
    for (code, attempts) in [(400, 1), (413, 1), (500, 4)] {
        let server = Server::start(with_ids, move |seen| if seen.asked() == asked(0, 0) { status(code) } else { Misdeed::None });
        let mut chats = Chats::new(5, 1);
        let (result, states) = run(&mut chats, &settings(&[&server]));
        result.unwrap();
        assert!(chats.rejected(0).contains(&format!("status {code}: words of {code}")), "{}", chats.rejected(0));
        assert_eq!(chats.ended.values().flatten().filter(|answer| answer.ids.is_some()).count(), 4);
        assert_eq!((states[0].notes.len(), server.asked().len()), (0, 4 + attempts));
    }
}

#[test]
fn a_server_that_makes_other_prompts_is_not_used() {
    let other = |seen: &Seen| {
        let mut reply = with_ids(seen);
        reply.prompt_token_ids.as_mut().unwrap()[2] = 777;
        reply
    };
    let server = Server::start(other, behaved);
    let mut chats = Chats::new(5, 1);
    let error = run(&mut chats, &settings(&[&server])).0.unwrap_err().to_string();
    assert!(error.contains("at position 2 its prompt has token 777, the recorded one has token 101"), "{error}");
    assert!(chats.ended.is_empty() && server.asked().is_empty());
    // One question alone, later.
    let later = move |seen: &Seen| if seen.asked() == asked(3, 0) { other(seen) } else { with_ids(seen) };
    let server = Server::start(later, behaved);
    let mut chats = Chats::new(5, 1);
    run(&mut chats, &settings(&[&server])).0.unwrap();
    assert!(chats.rejected(300).contains("at position 2 its prompt has token 777"));
    assert_eq!((chats.ended.values().flatten().count(), server.asked().len()), (4, 5));
}

#[test]
fn a_prompt_of_another_length_is_noted_where_there_are_no_ids() {
    let counts = |seen: &Seen| Reply { token_ids: None, ..with_ids(seen) };
    let longer = move |seen: &Seen| {
        let mut reply = counts(seen);
        reply.prompt_token_ids.as_mut().unwrap().push(3);
        reply
    };
    // Ids are asked for under a field that this server refuses, so it counts and shows none.
    let server = Server::start(longer, strict(&["return_token_ids"], true));
    let (result, states) = run(&mut Chats::new(2, 1), &settings(&[&server]));
    result.unwrap();
    let recorded = question(0, 0, Vec::new()).prompt_ids.len();
    let expected = format!("counts {} tokens in a prompt of {recorded}", recorded + 1);
    assert!(states[0].notes.iter().any(|note| note.contains(&expected)), "{:?}", states[0].notes);
}

#[test]
fn the_model_is_the_only_one_or_must_be_named() {
    let several = Server::start_at(0, &["a", "b"], with_ids, behaved);
    let error = run(&mut Chats::new(1, 1), &settings(&[&several])).0.unwrap_err().to_string();
    assert!(error.contains(&several.url) && error.contains("`a`, `b`") && error.contains("regenerate.server_model"), "{error}");
    run(&mut Chats::new(1, 1), &ServingSettings { model: Some("b".to_owned()), ..settings(&[&several]) }).0.unwrap();
    assert!(several.asked().iter().all(|seen| seen.body["model"] == "b"));
    let other = Server::start_at(0, &["c"], with_ids, behaved);
    let one = Server::start_at(0, &["d"], with_ids, |_| Misdeed::Late(Duration::from_millis(5)));
    let error = run(&mut Chats::new(50, 1), &settings(&[&other, &one])).0.unwrap_err().to_string();
    assert!(error.contains("`c`") && error.contains("`d`") && error.contains("regenerate.server_model"), "{error}");
    let none = Server::start_at(0, &[], with_ids, behaved);
    let error = run(&mut Chats::new(1, 1), &settings(&[&none])).0.unwrap_err().to_string();
    assert!(error.contains("lists no models"), "{error}");
}
