//! One server: its address, how a request goes to it, and what the ways in which that can fail are taken for.

use super::protocol::{self, Unusable};
use super::{API_KEY_VARIABLE, ApiKey, ServingError, ServingSettings};
use crate::engine::{Answer, Question};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use ureq::http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, LOCATION, RETRY_AFTER};
use ureq::http::{HeaderValue, Response, Uri};
use ureq::{Agent, Body, Error, Proxy};

/// A reply may not be larger, so that a mad server does not eat the memory.
const LARGEST_REPLY: u64 = 64 << 20;

/// Of what a server says, messages have this many characters at most.
const LONGEST_QUOTE: usize = 300;

/// Connecting takes no longer to a server that is there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Idle connections are closed before the server does it: uvicorn, under vLLM and SGLang, waits 5 s.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3);

/// Why a request brought no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) kind: FaultKind,
    pub(super) reason: String,
    /// How long the server asks to be left alone.
    pub(super) retry_after: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FaultKind {
    /// Asked again, the server would say the same.
    Final,
    /// As `Final`, with status 400 or 422: something in the request is not to the server's liking.
    Refused,
    /// As `Final`, and it would hardly say other things to other questions: a wrong key, address or model.
    Misdirected,
    /// The server wants to be left alone for a while.
    Busy,
    /// It may pass: a broken connection, a reply that is none, or a status that says so.
    Passing,
    TimedOut,
    /// There is nobody at the address.
    Unreachable,
}

impl Fault {
    pub(super) fn new(kind: FaultKind, reason: impl Into<String>) -> Self {
        Self { kind, reason: reason.into(), retry_after: None }
    }
}

impl From<Unusable> for Fault {
    fn from(unusable: Unusable) -> Self {
        match unusable {
            Unusable::Answer(reason) => Fault::new(FaultKind::Final, reason),
            Unusable::Reply(reason) => Fault::new(FaultKind::Passing, reason),
        }
    }
}

/// What a server was found to accept.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Accepted {
    pub(super) model: String,
    pub(super) left_out: Vec<&'static str>,
    pub(super) notes: Vec<String>,
}

/// A server's address and the connections to it.
pub(super) struct Endpoint {
    /// Without `/v1`.
    pub(super) url: String,
    /// The proxy between, as `host:port`.
    pub(super) proxy: Option<String>,
    agent: Agent,
    authorization: Option<HeaderValue>,
    key: Option<ApiKey>,
    timeout: Duration,
    closed: AtomicBool,
}

impl Endpoint {
    pub(super) fn new(url: &str, settings: &ServingSettings) -> Result<Self, ServingError> {
        let url = base_url(url)?;
        let proxy = if is_this_machine(&url) { None } else { Proxy::try_from_env() };
        let used = |proxy: &&Proxy| url.parse().is_ok_and(|uri: Uri| !proxy.is_no_proxy(&uri));
        let proxy_name = proxy.as_ref().filter(used).map(|proxy| format!("{}:{}", proxy.host(), proxy.port()));
        let key = settings.api_key.clone().filter(|key| !key.0.is_empty());
        let authorization = key.as_ref().map(|key| HeaderValue::try_from(format!("Bearer {}", key.0))).transpose();
        let mut authorization = authorization.map_err(|_| ServingError::BadKey)?;
        if let Some(value) = &mut authorization {
            value.set_sensitive(true);
        }
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(proxy)
            .user_agent(concat!("drafthorse/", env!("CARGO_PKG_VERSION")))
            .timeout_global(Some(settings.timeout))
            .timeout_connect(Some(settings.timeout.min(CONNECT_TIMEOUT)))
            .max_idle_connections(settings.concurrency)
            .max_idle_connections_per_host(settings.concurrency)
            .max_idle_age(IDLE_TIMEOUT)
            .build()
            .new_agent();
        Ok(Self { url, proxy: proxy_name, agent, authorization, key, timeout: settings.timeout, closed: AtomicBool::new(false) })
    }

    /// Ends the requests under way and lets no more begin.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.agent.clone().shutdown();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// The answer to a question, and of how many tokens it is.
    pub(super) fn answer(
        &self,
        question: &Question,
        settings: &ServingSettings,
        accepted: &Accepted,
    ) -> Result<(Answer, u64), Fault> {
        let body = protocol::request(question, settings, &accepted.model, settings.max_new_tokens, &accepted.left_out);
        let reply = self.post(&body, self.timeout)?;
        let answer = protocol::parse(&reply).and_then(|completion| completion.into_answer(&question.prompt_ids));
        answer.map_err(|unusable| self.presentable(unusable.into()))
    }

    /// The reply to the request for a completion.
    pub(super) fn post(&self, body: &[u8], timeout: Duration) -> Result<Vec<u8>, Fault> {
        let mut request = self.agent.post(format!("{}/v1/chat/completions", self.url)).header(CONTENT_TYPE, "application/json");
        if let Some(value) = &self.authorization {
            request = request.header(AUTHORIZATION, value);
        }
        let sent = request.config().timeout_global(Some(timeout)).build().send(body);
        self.reply(sent, timeout).map_err(|fault| self.presentable(fault))
    }

    /// The names of the models that the server lists.
    pub(super) fn models(&self, timeout: Duration) -> Result<Vec<String>, Fault> {
        let mut request = self.agent.get(format!("{}/v1/models", self.url));
        if let Some(value) = &self.authorization {
            request = request.header(AUTHORIZATION, value);
        }
        let sent = request.config().timeout_global(Some(timeout)).build().call();
        let models = self
            .reply(sent, timeout)
            .and_then(|body| protocol::models(&body).map_err(|reason| Fault::new(FaultKind::Passing, reason)));
        let models = models.map_err(|fault| self.presentable(fault))?;
        Ok(models.iter().map(|model| self.redact(model)).collect())
    }

    fn reply(&self, sent: Result<Response<Body>, Error>, timeout: Duration) -> Result<Vec<u8>, Fault> {
        let mut response = sent.map_err(|error| self.connection_fault(&error, timeout))?;
        let status = response.status().as_u16();
        let headers = response.headers().clone();
        let body = response.body_mut().with_config().limit(LARGEST_REPLY).read_to_vec();
        if (200..300).contains(&status) {
            return body.map_err(|error| self.connection_fault(&error, timeout));
        }
        // A body that breaks off only costs the explanation.
        Err(status_fault(status, &headers, &body.map(|body| protocol::message_in(&body)).unwrap_or_default()))
    }

    fn connection_fault(&self, error: &Error, timeout: Duration) -> Fault {
        let (kind, reason) = match error {
            Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
                (FaultKind::Unreachable, "cannot be connected to in time".to_owned())
            }
            Error::Timeout(_) => (FaultKind::TimedOut, format!("no answer within {} s", timeout.as_secs_f64())),
            Error::HostNotFound => (FaultKind::Unreachable, "there is no host of this name".to_owned()),
            Error::ConnectionFailed | Error::ConnectProxyFailed(_) => (FaultKind::Unreachable, error.to_string()),
            Error::Io(io) => match io.kind() {
                ErrorKind::ConnectionRefused
                | ErrorKind::HostUnreachable
                | ErrorKind::NetworkUnreachable
                | ErrorKind::NotConnected => (FaultKind::Unreachable, format!("cannot be reached: {io}")),
                _ => (FaultKind::Passing, format!("the connection broke: {io}")),
            },
            Error::BodyExceedsLimit(_) => (FaultKind::Passing, format!("its reply has more than {} MiB", LARGEST_REPLY >> 20)),
            other => (FaultKind::Passing, format!("the connection broke: {other}")),
        };
        let through = self.proxy.as_ref().map(|proxy| format!(" (through the proxy {proxy}; set NO_PROXY to go without)"));
        Fault::new(kind, reason + &through.unwrap_or_default())
    }

    fn redact(&self, text: &str) -> String {
        self.key.as_ref().map_or_else(|| text.to_owned(), |key| key.redact(text))
    }

    /// The fault without the key, on one line and not too long.
    pub(super) fn presentable(&self, fault: Fault) -> Fault {
        let mut reason = self.redact(&fault.reason).split_whitespace().collect::<Vec<_>>().join(" ");
        if let Some((end, _)) = reason.char_indices().nth(LONGEST_QUOTE) {
            reason.truncate(end);
            reason.push('…');
        }
        Fault { reason, ..fault }
    }
}

/// What a status other than 2xx is taken for.
fn status_fault(status: u16, headers: &HeaderMap, message: &str) -> Fault {
    let header = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let retry_after = header(RETRY_AFTER).and_then(retry_after);
    let (kind, hint) = match status {
        300..400 => (
            FaultKind::Misdirected,
            format!(" to `{}`, where requests are not sent on to", header(LOCATION).unwrap_or("nowhere")),
        ),
        400 | 422 => (FaultKind::Refused, String::new()),
        401 | 403 => (FaultKind::Misdirected, format!(" (the key comes from {API_KEY_VARIABLE})")),
        404 | 405 => (FaultKind::Misdirected, " (is this the server's address, and its name for the model?)".to_owned()),
        429 | 503 => (FaultKind::Busy, String::new()),
        408 | 409 | 425 => (FaultKind::Passing, String::new()),
        500.. => (FaultKind::Passing, String::new()),
        _ => (FaultKind::Final, String::new()),
    };
    let message = if message.is_empty() { String::new() } else { format!(": {message}") };
    Fault { kind, reason: format!("status {status}{hint}{message}"), retry_after }
}

/// Seconds or a date.
fn retry_after(value: &str) -> Option<Duration> {
    if let Ok(seconds) = value.trim().parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let date = chrono::DateTime::parse_from_rfc2822(value.trim()).ok()?;
    (date.to_utc() - chrono::Utc::now()).to_std().ok()
}

/// The address without `/v1`, checked.
fn base_url(written: &str) -> Result<String, ServingError> {
    let bad = |reason| ServingError::BadUrl { url: without_login(written), reason };
    let uri: Uri = written.trim().parse().map_err(|_| bad("it cannot be read as a URL"))?;
    let scheme = uri.scheme_str().filter(|scheme| ["http", "https"].contains(scheme));
    let scheme = scheme.ok_or_else(|| bad("it must begin with `http://` or `https://`"))?;
    let authority = uri.authority().ok_or_else(|| bad("it names no host"))?;
    if authority.as_str().contains('@') {
        return Err(bad("a key does not belong there; put it into the environment variable DRAFTHORSE_API_KEY"));
    }
    if authority.host().is_empty() {
        return Err(bad("it names no host"));
    }
    if uri.query().is_some() || written.contains('#') {
        return Err(bad("it must end with its path, after which `/chat/completions` is put"));
    }
    let path = uri.path().trim_end_matches('/');
    Ok(format!("{scheme}://{authority}{}", path.strip_suffix("/v1").unwrap_or(path).trim_end_matches('/')))
}

/// What stands before `@` may be a password.
fn without_login(url: &str) -> String {
    match url.rsplit_once('@') {
        Some((before, after)) => {
            format!("{}…@{after}", before.split_once("://").map_or(String::new(), |(scheme, _)| format!("{scheme}://")))
        }
        None => url.to_owned(),
    }
}

fn is_this_machine(url: &str) -> bool {
    let Ok(uri) = url.parse::<Uri>() else { return false };
    let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let is_local = |address: IpAddr| address.is_loopback() || address.is_unspecified();
    host == "localhost" || host.ends_with(".localhost") || host.parse().is_ok_and(is_local)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn addresses_are_taken_as_people_write_them() {
        for written in
            ["http://host:8000", "http://host:8000/", "http://host:8000/v1", " http://host:8000/v1/ ", "http://host:8000//"]
        {
            assert_eq!(base_url(written).unwrap(), "http://host:8000", "{written}");
        }
        assert_eq!(base_url("https://host/models/qwen/v1").unwrap(), "https://host/models/qwen");
        assert_eq!(base_url("http://[::1]:8000").unwrap(), "http://[::1]:8000");
    }

    #[test]
    fn bad_addresses_are_named_without_what_may_be_a_password() {
        for (written, named, reason) in [
            ("host:8000", "`host:8000`", "http://"),
            ("ftp://host", "`ftp://host`", "http://"),
            ("", "``", "URL"),
            ("http://", "`http://`", "URL"),
            ("http://host/v1?key=1", "`http://host/v1?key=1`", "path"),
            ("http://me:secret@host", "`http://…@host`", "DRAFTHORSE_API_KEY"),
            ("http://me:sec ret@host", "`http://…@host`", "URL"),
        ] {
            let error = base_url(written).unwrap_err().to_string();
            assert!(error.contains(named) && error.contains(reason), "{error}");
            assert!(!error.contains("ret"), "{error}");
        }
    }

    #[test]
    fn no_proxy_stands_before_this_machine() {
        for url in ["http://localhost:1", "http://127.0.0.2", "http://[::1]:8000", "http://0.0.0.0:8000", "http://a.localhost"] {
            assert!(is_this_machine(url), "{url}");
        }
        for url in ["http://localhost.org", "http://10.0.0.1", "http://host"] {
            assert!(!is_this_machine(url), "{url}");
        }
    }

    #[test]
    fn waits_are_given_in_seconds_or_as_a_date() {
        assert_eq!(retry_after(" 7 "), Some(Duration::from_secs(7)));
        let soon = chrono::Utc::now() + chrono::Duration::seconds(30);
        let wait = retry_after(&soon.format("%a, %d %b %Y %H:%M:%S GMT").to_string()).unwrap();
        assert!((28..=30).contains(&wait.as_secs()), "{wait:?}");
        assert_eq!(retry_after("Sun, 06 Nov 1994 08:49:37 GMT"), None);
        assert_eq!(retry_after("soon"), None);
    }

    #[test]
    fn only_listed_statuses_are_tried_again() {
        let kind = |status| status_fault(status, &HeaderMap::new(), "").kind;
        for status in [408, 409, 425, 500, 502, 504, 599] {
            assert_eq!(kind(status), FaultKind::Passing, "{status}");
        }
        assert_eq!((kind(429), kind(503)), (FaultKind::Busy, FaultKind::Busy));
        assert_eq!((kind(400), kind(422)), (FaultKind::Refused, FaultKind::Refused));
        for status in [402, 406, 410, 413, 418, 431, 451] {
            assert_eq!(kind(status), FaultKind::Final, "{status}");
        }
        for status in [301, 307, 401, 403, 404, 405] {
            assert_eq!(kind(status), FaultKind::Misdirected, "{status}");
        }
    }
}
