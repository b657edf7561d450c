//! Answers from servers that speak OpenAI's protocol: vLLM, SGLang, llama.cpp and others. Each server is probed before it is given
//! anything and dropped when it dies; what it was asked goes to the others. A question ends in one answer or in one reason for which
//! there is none, and nothing partial is ever passed on.
//!
//! Requests run on threads of their own, one each; the caller's thread alone hands out questions and takes in answers.
//!
//! A proxy that the environment names (`ALL_PROXY`, `HTTPS_PROXY`, `HTTP_PROXY`) is used unless `NO_PROXY` says otherwise, but never for
//! a server on this machine.

mod dispatcher;
mod endpoint;
mod probe;
mod protocol;
mod served;

use self::dispatcher::Dispatcher;
use crate::engine::Conversations;
use std::fmt;
use std::io;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use thiserror::Error;

/// The environment variable that callers read [`ServingSettings::api_key`] from; messages name it.
pub const API_KEY_VARIABLE: &str = "DRAFTHORSE_API_KEY";

/// What is asked of which servers, and how.
#[derive(Debug, Clone)]
pub struct ServingSettings {
    /// Addresses as people write them: `http://host:8000`, with or without `/v1`.
    pub endpoints: Vec<String>,
    /// The name that the servers have for the model; `None` takes the only one that they list.
    pub model: Option<String>,
    /// Requests under way at one time, at each server.
    pub concurrency: usize,
    /// How long one request may take, from connecting to the last byte.
    pub timeout: Duration,
    /// How often a question is asked again after faults that may pass, at all servers together.
    pub retries: u32,
    pub temperature: f64,
    pub top_p: f64,
    /// 0 is off.
    pub top_k: u32,
    pub max_new_tokens: u32,
    /// What the chat template is told as `enable_thinking`.
    pub thinking: bool,
    pub seed: u64,
    pub api_key: Option<ApiKey>,
    /// The ids that end an answer; servers that take such a list stop at these beside their own.
    pub stop_tokens: Vec<u32>,
    pub pace: Pace,
}

/// How long to wait before trying something again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Before a question's first repetition; each further one waits up to twice as long as the one before.
    pub first_delay: Duration,
    /// No wait is longer, whatever a server's `Retry-After` says.
    pub longest_delay: Duration,
    /// Before a dropped server is probed again, while others answer.
    pub probe_again: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            first_delay: Duration::from_millis(500),
            longest_delay: Duration::from_secs(60),
            probe_again: Duration::from_secs(30),
        }
    }
}

/// A key that servers ask for. It goes into one header of each request and nowhere else: what servers say is searched for it before it is
/// shown.
#[derive(Clone)]
pub struct ApiKey(String);

impl ApiKey {
    pub fn new(key: impl Into<String>) -> Self {
        Self(key.into())
    }

    /// The text without the key, should it have it.
    fn redact(&self, text: &str) -> String {
        if self.0.is_empty() { text.to_owned() } else { text.replace(&self.0, "[key]") }
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ApiKey(hidden)")
    }
}

/// Why servers cannot answer.
#[derive(Debug, Error)]
pub enum ServingError {
    #[error("no server is given; set `regenerate.endpoints` to the addresses of one or more, such as `http://localhost:8000/v1`")]
    NoEndpoints,
    #[error("`{url}` is not the address of a server: {reason}")]
    BadUrl { url: String, reason: &'static str },
    #[error("server `{0}` is given twice; raise the concurrency instead")]
    Twice(String),
    #[error("a concurrency of 0 asks nothing; it must be 1 or more")]
    NoConcurrency,
    #[error("the key in {API_KEY_VARIABLE} has characters that no HTTP header can carry")]
    BadKey,
    #[error("server `{url}` has several models: {}; set `regenerate.server_model` to one of them", names(.models))]
    SeveralModels { url: String, models: Vec<String> },
    #[error(
        "the servers have different models: `{}` at `{}`, `{}` at `{}`; set `regenerate.server_model`, or start the servers with one name \
         for the model",
        .first.1, .first.0, .other.1, .other.0
    )]
    DifferentModels { first: (String, String), other: (String, String) },
    #[error("no server is left: {}", faults(.0))]
    AllDropped(Vec<(String, String)>),
    #[error("cannot start a thread for a request: {0}; lower the concurrency or raise the limit (`ulimit -u`)")]
    Thread(io::Error),
}

fn names(models: &[String]) -> String {
    models.iter().map(|model| format!("`{model}`")).collect::<Vec<_>>().join(", ")
}

fn faults(dropped: &[(String, String)]) -> String {
    dropped.iter().map(|(url, fault)| format!("`{url}`: {fault}")).collect::<Vec<_>>().join("; ")
}

/// How a server does, for display.
#[derive(Debug, Clone, PartialEq)]
pub struct EndpointState {
    /// Its address, without `/v1`.
    pub url: String,
    pub phase: EndpointPhase,
    /// The name by which it is asked, once that is known.
    pub model: Option<String>,
    /// What is worth knowing of it, such as that it returns no token ids.
    pub notes: Vec<String>,
    pub under_way: usize,
    pub answered: u64,
    /// Questions that ended here without an answer.
    pub rejected: u64,
    /// Requests that failed in a way that may pass.
    pub faults: u64,
    pub last_fault: Option<String>,
    /// Tokens of all its answers, as far as it tells their number.
    pub tokens: u64,
    /// Over the last minute.
    pub answers_per_second: f64,
    /// Over the last minute.
    pub tokens_per_second: f64,
}

/// Whether a server is given questions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndpointPhase {
    /// Not yet known to answer.
    New,
    Live,
    /// Probed again after faults; it is given nothing meanwhile.
    Doubted,
    /// For this reason; probed again from time to time while others are live.
    Dropped(String),
}

/// Asks the servers until there is nothing more to ask, `stop` is set, or `conversations` wants no more.
///
/// `progress` is called several times a second, with the servers in the order of the settings. After `stop` is set nothing is passed on
/// any more, and this returns within about a tenth of a second, whatever the servers do.
///
/// Ids that a server returns are passed on as they are: whether they end with the stop token is for the caller to see, since servers
/// differ in that.
///
/// # Errors
/// When settings cannot be used, a server does not say by which model it wants to be asked, or no server is left. Questions that were
/// under way then have got no answer.
pub fn answer_all(
    conversations: &mut dyn Conversations,
    settings: &ServingSettings,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(&[EndpointState]),
) -> Result<(), ServingError> {
    if settings.endpoints.is_empty() {
        return Err(ServingError::NoEndpoints);
    }
    if settings.concurrency == 0 {
        return Err(ServingError::NoConcurrency);
    }
    Dispatcher::new(settings, stop)?.run(conversations, progress)
}
