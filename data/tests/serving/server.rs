//! A server that speaks OpenAI's protocol and misbehaves on demand. What it answers and how it misbehaves are functions of the request,
//! so both are the same whenever they are asked for.

#![allow(clippy::unwrap_used, dead_code)]

use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// What the server says to a request for a completion.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reply {
    pub(crate) text: Option<String>,
    /// Ids of the answer, where the server is to return them.
    pub(crate) token_ids: Option<Vec<u32>>,
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
    /// `stop` when empty.
    pub(crate) finish_reason: String,
}

/// What the server does in place of a plain reply.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Misdeed {
    None,
    /// A status with headers (each a line) and a body.
    Status(u16, String, String),
    /// A reply of status 200 with this body.
    Body(String),
    /// A plain reply, after this time.
    Late(Duration),
    /// No reply until the server ends.
    Hang,
    /// Half a reply.
    CloseMidBody,
    /// No reply at all.
    Close,
    /// A reply without end.
    Endless,
    /// No reply, and no server any more.
    Die,
}

/// A request as the server saw it.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) authorization: Option<String>,
    /// Null where there is none.
    pub(crate) body: Value,
    /// How many requests of the same messages and limit came before.
    pub(crate) repetition: usize,
    /// How many requests for completions came before, probes not counted.
    pub(crate) number: usize,
    pub(crate) at: Instant,
}

impl Seen {
    /// What the last message says.
    pub(crate) fn asked(&self) -> &str {
        self.body.pointer("/messages").and_then(Value::as_array).unwrap().last().unwrap()["content"].as_str().unwrap()
    }

    /// Probes ask for one token.
    pub(crate) fn is_probe(&self) -> bool {
        self.body["max_tokens"] == 1
    }
}

type Answer = dyn Fn(&Seen) -> Reply + Send + Sync;
type Mischief = dyn Fn(&Seen) -> Misdeed + Send + Sync;

struct Shared {
    models: Vec<String>,
    answer: Box<Answer>,
    mischief: Box<Mischief>,
    is_dead: AtomicBool,
    address: std::net::SocketAddr,
    connections: Mutex<Vec<TcpStream>>,
    seen: Mutex<Vec<Seen>>,
    repetitions: Mutex<HashMap<String, usize>>,
    asked: AtomicUsize,
    under_way: AtomicUsize,
    most_under_way: AtomicUsize,
}

/// A server on a port of this machine, until dropped.
pub(crate) struct Server {
    pub(crate) url: String,
    shared: Arc<Shared>,
}

/// A name for the model that other tests' servers do not have. A port that a dead server leaves may become another's, which then must not
/// be taken for the one that died.
pub(crate) fn model_of_this_test() -> String {
    format!("model of {} in {}", thread::current().name().unwrap_or("a thread"), std::process::id())
}

impl Server {
    /// One that answers by `answer` and misbehaves by `mischief`.
    pub(crate) fn start(
        answer: impl Fn(&Seen) -> Reply + Send + Sync + 'static,
        mischief: impl Fn(&Seen) -> Misdeed + Send + Sync + 'static,
    ) -> Server {
        Server::start_at(0, &[&model_of_this_test()], answer, mischief)
    }

    /// One with these models, at this port.
    pub(crate) fn start_at(
        port: u16,
        models: &[&str],
        answer: impl Fn(&Seen) -> Reply + Send + Sync + 'static,
        mischief: impl Fn(&Seen) -> Misdeed + Send + Sync + 'static,
    ) -> Server {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            models: models.iter().map(|&model| model.to_owned()).collect(),
            answer: Box::new(answer),
            mischief: Box::new(mischief),
            is_dead: AtomicBool::new(false),
            address,
            connections: Mutex::default(),
            seen: Mutex::default(),
            repetitions: Mutex::default(),
            asked: AtomicUsize::new(0),
            under_way: AtomicUsize::new(0),
            most_under_way: AtomicUsize::new(0),
        });
        let listening = shared.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                if listening.is_dead.load(Ordering::SeqCst) {
                    break;
                }
                let Ok(stream) = stream else { continue };
                listening.connections.lock().unwrap().push(stream.try_clone().unwrap());
                let shared = listening.clone();
                thread::Builder::new().stack_size(256 << 10).spawn(move || shared.serve(stream)).unwrap();
            }
        });
        Server { url: format!("http://{address}"), shared }
    }

    pub(crate) fn port(&self) -> u16 {
        self.shared.address.port()
    }

    /// Ends the server at once: connections break and new ones are refused.
    pub(crate) fn kill(&self) {
        self.shared.die();
    }

    /// The requests for completions that were no probes.
    pub(crate) fn asked(&self) -> Vec<Seen> {
        self.seen().into_iter().filter(|seen| seen.path == "/v1/chat/completions" && !seen.is_probe()).collect()
    }

    /// All requests.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.shared.seen.lock().unwrap().clone()
    }

    /// How many requests were under way at one time, at most.
    pub(crate) fn most_under_way(&self) -> usize {
        self.shared.most_under_way.load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Shared {
    fn die(&self) {
        if self.is_dead.swap(true, Ordering::SeqCst) {
            return;
        }
        // The listener waits in `accept`; this wakes it, and it closes.
        let _ = TcpStream::connect(self.address);
        for connection in self.connections.lock().unwrap().drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Serves the requests of a connection, one after the other.
    fn serve(&self, stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut stream = stream;
        while let Some(seen) = self.read(&mut reader) {
            self.most_under_way.fetch_max(self.under_way.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let misdeed = if seen.path == "/v1/chat/completions" { (self.mischief)(&seen) } else { Misdeed::None };
            let goes_on = self.reply(&mut stream, &seen, misdeed);
            self.under_way.fetch_sub(1, Ordering::SeqCst);
            if !goes_on || self.is_dead.load(Ordering::SeqCst) {
                break;
            }
        }
        let _ = stream.shutdown(Shutdown::Both);
    }

    fn read(&self, reader: &mut impl BufRead) -> Option<Seen> {
        let line = |reader: &mut dyn BufRead| {
            let mut line = String::new();
            reader.read_line(&mut line).ok().filter(|&read| read > 0).map(|_| line.trim_end().to_owned())
        };
        let path = line(reader)?.split(' ').nth(1)?.to_owned();
        let (mut length, mut authorization) = (0, None);
        loop {
            let header = line(reader)?;
            match header.split_once(':').map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned())) {
                Some((name, value)) if name == "content-length" => length = value.parse().ok()?,
                Some((name, value)) if name == "authorization" => authorization = Some(value),
                Some(_) => {}
                None => break,
            }
        }
        let mut bytes = vec![0; length];
        reader.read_exact(&mut bytes).ok()?;
        let body: Value = if bytes.is_empty() { Value::Null } else { serde_json::from_slice(&bytes).unwrap() };
        let repetition = {
            let mut repetitions = self.repetitions.lock().unwrap();
            let count = repetitions.entry(format!("{path} {} {}", body["messages"], body["max_tokens"])).or_default();
            *count += 1;
            *count - 1
        };
        let mut seen = Seen { path, authorization, body, repetition, number: 0, at: Instant::now() };
        let is_question = seen.path == "/v1/chat/completions" && !seen.is_probe();
        seen.number = self.asked.fetch_add(usize::from(is_question), Ordering::SeqCst);
        self.seen.lock().unwrap().push(seen.clone());
        Some(seen)
    }

    /// Whether the connection stays.
    fn reply(&self, stream: &mut TcpStream, seen: &Seen, misdeed: Misdeed) -> bool {
        let plain = || match seen.path.as_str() {
            "/v1/models" => (200, json!({ "data": self.models.iter().map(|model| json!({ "id": model })).collect::<Vec<_>>() })),
            "/v1/chat/completions" => (200, completion(seen, &(self.answer)(seen))),
            other => (404, json!({ "error": { "message": format!("there is nothing at {other}") } })),
        };
        match misdeed {
            Misdeed::None => {
                let (status, body) = plain();
                send(stream, status, "", &body.to_string())
            }
            Misdeed::Late(time) => {
                thread::sleep(time);
                send(stream, 200, "", &plain().1.to_string())
            }
            Misdeed::Status(status, headers, body) => send(stream, status, &headers, &body),
            Misdeed::Body(body) => send(stream, 200, "", &body),
            Misdeed::Hang => {
                while !self.is_dead.load(Ordering::SeqCst) && is_open(stream) {
                    thread::sleep(Duration::from_millis(5));
                }
                false
            }
            Misdeed::CloseMidBody => {
                let body = plain().1.to_string();
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
                let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body.as_bytes()[..body.len() / 2]));
                false
            }
            Misdeed::Close => false,
            Misdeed::Endless => {
                let mut goes_on = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n").is_ok();
                while goes_on && !self.is_dead.load(Ordering::SeqCst) {
                    goes_on = stream.write_all(&[b' '; 1 << 16]).is_ok();
                }
                false
            }
            Misdeed::Die => {
                self.die();
                false
            }
        }
    }
}

/// Whether the other side still listens.
fn is_open(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let peeked = stream.peek(&mut [0]);
    stream.set_nonblocking(false).unwrap();
    match peeked {
        Ok(read) => read > 0,
        Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
    }
}

fn send(stream: &mut TcpStream, status: u16, headers: &str, body: &str) -> bool {
    let headers: String = headers.lines().map(|header| format!("{header}\r\n")).collect();
    let length = body.len();
    let whole =
        format!("HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{headers}\r\n{body}");
    stream.write_all(whole.as_bytes()).is_ok()
}

/// The reply as vLLM words it.
fn completion(seen: &Seen, reply: &Reply) -> Value {
    let finish_reason = if reply.finish_reason.is_empty() { "stop" } else { &reply.finish_reason };
    let mut choice =
        json!({ "index": 0, "message": { "role": "assistant", "content": reply.text }, "finish_reason": finish_reason });
    let mut body = json!({ "id": "chatcmpl-1", "object": "chat.completion", "model": seen.body["model"] });
    // Servers return ids to those who ask for them.
    if seen.body["return_token_ids"] == true {
        if let Some(ids) = &reply.token_ids {
            choice["token_ids"] = json!(ids);
        }
        if let Some(ids) = &reply.prompt_token_ids {
            body["prompt_token_ids"] = json!(ids);
        }
    }
    body["choices"] = json!([choice]);
    let count = |ids: &Option<Vec<u32>>| ids.as_ref().map_or(1, Vec::len);
    body["usage"] = json!({ "prompt_tokens": count(&reply.prompt_token_ids), "completion_tokens": count(&reply.token_ids) });
    body
}
