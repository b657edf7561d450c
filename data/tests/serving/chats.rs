//! The side that asks in these tests, which checks that each question ends once; and what the servers answer.

use super::server::{Misdeed, Reply, Seen, Server};
use data::engine::{Answer, Conversations, Question};
use data::prompts::Message;
use data::serving::{EndpointState, Pace, ServingError, ServingSettings, answer_all};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

pub(crate) const STOP_TOKEN: u32 = 2;

/// Chats of one turn or more; the next turn is asked when the one before is answered.
#[derive(Default)]
pub(crate) struct Chats {
    turns: u64,
    to_ask: VecDeque<Question>,
    pub(crate) under_way: HashSet<u64>,
    pub(crate) ended: BTreeMap<u64, Result<Answer, String>>,
    /// So many answers are enough.
    pub(crate) enough: Option<usize>,
    is_closed: bool,
}

impl Chats {
    pub(crate) fn new(chats: u64, turns: u64) -> Self {
        let mut all = Chats { turns, ..Chats::default() };
        (0..chats).for_each(|chat| all.to_ask.push_back(question(chat, 0, Vec::new())));
        all
    }

    pub(crate) fn rejected(&self, key: u64) -> &str {
        self.ended[&key].as_ref().unwrap_err()
    }

    /// All keys have their own answers.
    pub(crate) fn assert_all_answered(&self, chats: u64) {
        for (key, result) in &self.ended {
            let answer = result.as_ref().unwrap();
            assert_eq!(answer.text.as_deref().unwrap(), answer_to(&asked(key / 100, key % 100)));
        }
        assert_eq!(self.ended.len() as u64, chats * self.turns);
    }
}

impl Conversations for Chats {
    fn next(&mut self) -> Option<Question> {
        let question = self.to_ask.pop_front()?;
        assert!(self.under_way.insert(question.key));
        Some(question)
    }

    fn answer(&mut self, key: u64, answer: Result<Answer, String>) -> ControlFlow<()> {
        assert!(!self.is_closed, "an answer after the end");
        assert!(self.under_way.remove(&key), "question {key} was not under way");
        let (chat, turn) = (key / 100, key % 100);
        if let (Ok(answer), true) = (&answer, turn + 1 < self.turns) {
            let before: Vec<Message> =
                vec![Message::new("user", asked(chat, turn)), Message::new("assistant", answer.text.clone().unwrap_or_default())];
            self.to_ask.push_back(question(chat, turn + 1, before));
        }
        assert!(self.ended.insert(key, answer).is_none(), "question {key} ended twice");
        let is_enough = self.enough.is_some_and(|enough| self.ended.len() >= enough);
        if is_enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

pub(crate) fn asked(chat: u64, turn: u64) -> String {
    format!("question {chat}, turn {turn}")
}

pub(crate) fn answer_to(asked: &str) -> String {
    format!("answer to {asked}")
}

pub(crate) fn question(chat: u64, turn: u64, mut messages: Vec<Message>) -> Question {
    messages.push(Message::new("user", asked(chat, turn)));
    let prompt_ids = prompt_ids(&json!(messages));
    Question { key: chat * 100 + turn, messages, tools: None, prompt_ids, counter: chat * 100 + turn }
}

/// The template and the tokenizer of these tests: a token for each byte.
pub(crate) fn prompt_ids(messages: &Value) -> Vec<u32> {
    let text = |message: &Value| format!("{}:{}\n", message["role"].as_str().unwrap(), message["content"].as_str().unwrap());
    messages.as_array().unwrap().iter().map(text).collect::<String>().bytes().map(u32::from).collect()
}

pub(crate) fn ids_of(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).chain([STOP_TOKEN]).collect()
}

/// As vLLM answers: text, ids and the prompt's ids.
pub(crate) fn with_ids(seen: &Seen) -> Reply {
    let text = answer_to(seen.asked());
    let token_ids = Some(ids_of(&text));
    Reply { text: Some(text), token_ids, prompt_token_ids: Some(prompt_ids(&seen.body["messages"])), ..Reply::default() }
}

/// As servers without ids answer.
pub(crate) fn text_alone(seen: &Seen) -> Reply {
    Reply { text: Some(answer_to(seen.asked())), ..Reply::default() }
}

pub(crate) fn behaved(_: &Seen) -> Misdeed {
    Misdeed::None
}

pub(crate) fn status(status: u16) -> Misdeed {
    Misdeed::Status(status, String::new(), json!({ "error": { "message": format!("words of {status}") } }).to_string())
}

/// Misbehaves when a question is asked first, and no more.
pub(crate) fn once(misdeed: Misdeed) -> impl Fn(&Seen) -> Misdeed + Send + Sync {
    move |seen| if seen.repetition == 0 && !seen.is_probe() { misdeed.clone() } else { Misdeed::None }
}

pub(crate) fn settings(servers: &[&Server]) -> ServingSettings {
    ServingSettings {
        endpoints: servers.iter().map(|server| server.url.clone()).collect(),
        model: None,
        concurrency: 4,
        timeout: Duration::from_secs(5),
        retries: 3,
        temperature: 0.0,
        top_p: 1.0,
        top_k: 0,
        max_new_tokens: 64,
        thinking: false,
        seed: 1,
        api_key: None,
        stop_tokens: vec![STOP_TOKEN],
        pace: Pace {
            first_delay: Duration::from_millis(5),
            longest_delay: Duration::from_secs(3),
            probe_again: Duration::from_millis(100),
        },
    }
}

/// Asks all, and says how the servers did in the end.
pub(crate) fn run(chats: &mut Chats, settings: &ServingSettings) -> (Result<(), ServingError>, Vec<EndpointState>) {
    let mut last = Vec::new();
    let result = answer_all(chats, settings, &AtomicBool::new(false), &mut |states| last = states.to_vec());
    chats.is_closed = true;
    if result.is_ok() && chats.enough.is_none() {
        assert!(chats.under_way.is_empty() && chats.to_ask.is_empty());
    }
    (result, last)
}
