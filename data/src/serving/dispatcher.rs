//! Who is asked what, and what becomes of a question whose request fails. One loop, in the caller's thread: it alone knows where each
//! question is, so each ends once.
//!
//! A question whose faults have used up its attempts is rejected only when the servers at which they happened are known to work, by an
//! answer or a probe since. Faults of a server that is dropped are not counted.

use super::endpoint::{Accepted, Endpoint, Fault, FaultKind};
use super::probe::{Failure, delay, probe};
use super::served::Served;
use super::{EndpointPhase, EndpointState, ServingError, ServingSettings};
use crate::engine::{Answer, Conversations, Question};
use std::collections::{HashMap, VecDeque};
use std::mem;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// How long the loop sleeps at most: the wish to stop is seen after this time.
const TICK: Duration = Duration::from_millis(100);

/// How often progress is told.
const PROGRESS_EVERY: Duration = Duration::from_millis(250);

/// Enough for a TLS handshake; a thousand of them are no burden.
const STACK: usize = 512 << 10;

/// A question and what it has been through.
struct Row {
    question: Arc<Question>,
    /// The faults that count.
    faults: Vec<Failed>,
    /// Not to be asked again before.
    ready_at: Instant,
}

/// One request that failed.
struct Failed {
    server: usize,
    at: Instant,
    reason: String,
}

/// What a thread has to say, and of which server.
enum Report {
    Probed(usize, Result<Accepted, Failure>),
    Asked(usize, u64, Result<(Answer, u64), Fault>),
}

/// What a loop over reports may end with.
type Step = Result<ControlFlow<()>, ServingError>;

pub(super) struct Dispatcher<'d> {
    settings: Arc<ServingSettings>,
    stop: &'d AtomicBool,
    servers: Vec<Served>,
    /// Not asked yet, or to be asked again at once.
    ready: VecDeque<Row>,
    /// To be asked again later.
    waiting: Vec<Row>,
    /// Out of attempts, until it is known whether the servers work at which they were lost.
    held: Vec<Row>,
    /// With a server, by the question's key.
    asked: HashMap<u64, Row>,
    /// Whether there was nothing to ask when last looked for.
    dry: bool,
    /// What servers are probed with.
    sample: Option<Arc<Question>>,
    /// The first server that passed, and its name for the model.
    model: Option<(String, String)>,
    reports: (Sender<Report>, Receiver<Report>),
}

/// No request outlives the loop.
impl Drop for Dispatcher<'_> {
    fn drop(&mut self) {
        self.servers.iter().for_each(|server| server.endpoint.close());
    }
}

impl<'d> Dispatcher<'d> {
    pub(super) fn new(settings: &ServingSettings, stop: &'d AtomicBool) -> Result<Self, ServingError> {
        let mut servers: Vec<Served> = Vec::new();
        for url in &settings.endpoints {
            let endpoint = Endpoint::new(url, settings)?;
            if servers.iter().any(|server| server.endpoint.url == endpoint.url) {
                return Err(ServingError::Twice(endpoint.url));
            }
            servers.push(Served::new(endpoint));
        }
        Ok(Self {
            settings: Arc::new(settings.clone()),
            stop,
            servers,
            ready: VecDeque::new(),
            waiting: Vec::new(),
            held: Vec::new(),
            asked: HashMap::new(),
            dry: false,
            sample: None,
            model: None,
            reports: channel(),
        })
    }

    pub(super) fn run(
        mut self,
        conversations: &mut dyn Conversations,
        progress: &mut dyn FnMut(&[EndpointState]),
    ) -> Result<(), ServingError> {
        let ended = self.answer_all(conversations, progress);
        self.tell(progress);
        ended
    }

    fn answer_all(
        &mut self,
        conversations: &mut dyn Conversations,
        progress: &mut dyn FnMut(&[EndpointState]),
    ) -> Result<(), ServingError> {
        let Some(first) = conversations.next() else { return Ok(()) };
        self.take(first);
        for index in 0..self.servers.len() {
            self.probe(index)?;
        }
        let mut told = None;
        while !self.is_done(conversations) && !self.stopped() {
            let now = Instant::now();
            if told.is_none_or(|told| now.duration_since(told) >= PROGRESS_EVERY) {
                told = Some(now);
                self.tell(progress);
            }
            self.wake(now)?;
            self.hand_out(conversations, now)?;
            let Ok(report) = self.reports.1.recv_timeout(self.until_next(Instant::now())) else { continue };
            if self.stopped() || self.settle(report, conversations)?.is_break() {
                break;
            }
        }
        Ok(())
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn tell(&mut self, progress: &mut dyn FnMut(&[EndpointState])) {
        let now = Instant::now();
        let states: Vec<EndpointState> = self.servers.iter_mut().map(|server| server.state(now)).collect();
        progress(&states);
    }

    fn take(&mut self, question: Question) {
        let question = Arc::new(question);
        self.sample.get_or_insert_with(|| question.clone());
        self.ready.push_back(Row { question, faults: Vec::new(), ready_at: Instant::now() });
    }

    /// Whether all questions are answered and there are no more.
    fn is_done(&mut self, conversations: &mut dyn Conversations) -> bool {
        let is_idle = self.ready.is_empty() && self.waiting.is_empty() && self.held.is_empty() && self.asked.is_empty();
        is_idle && !self.refill(conversations)
    }

    /// Whether there is a question that is ready.
    fn refill(&mut self, conversations: &mut dyn Conversations) -> bool {
        if self.ready.is_empty() && !self.dry {
            match conversations.next() {
                Some(question) => self.take(question),
                None => self.dry = true,
            }
        }
        !self.ready.is_empty()
    }

    /// Does what was put off until now.
    fn wake(&mut self, now: Instant) -> Result<(), ServingError> {
        self.ready.extend(self.waiting.extract_if(.., |row| row.ready_at <= now));
        for index in 0..self.servers.len() {
            let server = &self.servers[index];
            if server.is_dropped() && !server.probing && server.probe_at <= now {
                self.probe(index)?;
            }
        }
        Ok(())
    }

    /// How long nothing needs doing unless a report comes.
    fn until_next(&self, now: Instant) -> Duration {
        let pauses = self.servers.iter().filter_map(|server| server.paused_until).filter(|&until| until > now);
        let next = self.waiting.iter().map(|row| row.ready_at).chain(pauses).min();
        // A wait that rounds to nothing would make the loop spin.
        next.map_or(TICK, |next| next.saturating_duration_since(now).clamp(Duration::from_millis(1), TICK))
    }

    fn hand_out(&mut self, conversations: &mut dyn Conversations, now: Instant) -> Result<(), ServingError> {
        while self.servers.iter().any(|server| server.open(self.settings.concurrency, now).is_some())
            && !self.stopped()
            && self.refill(conversations)
        {
            let Some(row) = self.ready.pop_front() else { break };
            self.ask(row, now)?;
        }
        Ok(())
    }

    /// Gives a question to the server that failed at it least often, and among those to the one with the least to do.
    fn ask(&mut self, row: Row, now: Instant) -> Result<(), ServingError> {
        let faults_at = |index: usize| row.faults.iter().filter(|fault| fault.server == index).count();
        let open = self.servers.iter().enumerate().filter_map(|(index, server)| {
            server
                .open(self.settings.concurrency, now)
                .map(|accepted| (faults_at(index), server.under_way, index, accepted.clone()))
        });
        let Some((_, _, index, accepted)) = open.min_by_key(|&(faults, under_way, index, _)| (faults, under_way, index)) else {
            self.ready.push_front(row);
            return Ok(());
        };
        let (endpoint, settings, question) = (self.servers[index].endpoint.clone(), self.settings.clone(), row.question.clone());
        let key = question.key;
        let lost = Report::Asked(index, key, Err(Fault::new(FaultKind::Passing, "the request's thread panicked")));
        self.start(lost, move || Report::Asked(index, key, endpoint.answer(&question, &settings, &accepted)))?;
        self.servers[index].under_way += 1;
        self.asked.insert(key, row);
        Ok(())
    }

    fn probe(&mut self, index: usize) -> Result<(), ServingError> {
        let Some(question) = self.sample.clone() else { return Ok(()) };
        let server = &mut self.servers[index];
        server.probing = true;
        let patience = server.phase == EndpointPhase::Doubted;
        let (endpoint, settings) = (server.endpoint.clone(), self.settings.clone());
        let lost = Report::Probed(index, Err(Failure::Fault("the probe's thread panicked".to_owned())));
        self.start(lost, move || Report::Probed(index, probe(&endpoint, &question, &settings, patience)))
    }

    /// Does this on a thread and reports what came of it, or else that it was lost.
    fn start(&self, lost: Report, work: impl FnOnce() -> Report + Send + 'static) -> Result<(), ServingError> {
        let sender = self.reports.0.clone();
        let run = move || {
            // Nobody listens any more when the loop has ended.
            let _ = sender.send(catch_unwind(AssertUnwindSafe(work)).unwrap_or(lost));
        };
        thread::Builder::new().name("request".to_owned()).stack_size(STACK).spawn(run).map_err(ServingError::Thread)?;
        Ok(())
    }

    fn settle(&mut self, report: Report, conversations: &mut dyn Conversations) -> Step {
        match report {
            Report::Probed(index, result) => self.settle_probe(index, result, conversations),
            Report::Asked(index, key, result) => self.settle_question(index, key, result, conversations),
        }
    }

    fn settle_question(
        &mut self,
        index: usize,
        key: u64,
        result: Result<(Answer, u64), Fault>,
        conversations: &mut dyn Conversations,
    ) -> Step {
        let now = Instant::now();
        let Some(mut row) = self.asked.remove(&key) else { return Ok(ControlFlow::Continue(())) };
        let server = &mut self.servers[index];
        server.under_way -= 1;
        let fault = match result {
            Ok((answer, tokens)) => {
                server.has_answered(tokens, now);
                self.dry = false;
                return Ok(conversations.answer(key, Ok(answer)));
            }
            Err(fault) => fault,
        };
        if matches!(fault.kind, FaultKind::Final | FaultKind::Refused | FaultKind::Misdirected) {
            server.has_rejected(now);
            if fault.kind == FaultKind::Misdirected {
                self.doubt(index)?;
            }
            self.dry = false;
            return Ok(conversations.answer(key, Err(fault.reason)));
        }
        if server.is_dropped() {
            self.ready.push_front(row);
            return Ok(ControlFlow::Continue(()));
        }
        let is_doubtful = server.has_failed(&fault, index, &self.settings, now);
        row.faults.push(Failed { server: index, at: now, reason: fault.reason });
        if is_doubtful {
            self.doubt(index)?;
        }
        let failed = row.faults.len() as u32;
        if failed > self.settings.retries {
            return self.give_up(row, conversations);
        }
        // A server's wish to be left alone is the server's: meanwhile another may take the question.
        row.ready_at = now + delay(&self.settings, None, row.question.counter, failed);
        self.waiting.push(row);
        Ok(ControlFlow::Continue(()))
    }

    /// Rejects a question that is out of attempts, or holds it until it is known that the servers work.
    fn give_up(&mut self, row: Row, conversations: &mut dyn Conversations) -> Step {
        let is_unproven = |fault: &&Failed| self.servers[fault.server].last_success < Some(fault.at);
        let unproven: Vec<usize> = row.faults.iter().filter(is_unproven).map(|fault| fault.server).collect();
        if !unproven.is_empty() {
            self.held.push(row);
            for index in unproven {
                self.doubt(index)?;
            }
            return Ok(ControlFlow::Continue(()));
        }
        let Some(Failed { server, reason, .. }) = row.faults.last() else { return Ok(ControlFlow::Continue(())) };
        let server = &mut self.servers[*server];
        server.gave_up();
        let reason = format!("no answer in {} attempts; the last, at `{}`: {reason}", row.faults.len(), server.endpoint.url);
        self.dry = false;
        Ok(conversations.answer(row.question.key, Err(reason)))
    }

    /// Gives a server nothing more until it has passed a probe.
    fn doubt(&mut self, index: usize) -> Result<(), ServingError> {
        if self.servers[index].phase != EndpointPhase::Live {
            return Ok(());
        }
        self.servers[index].phase = EndpointPhase::Doubted;
        self.probe(index)
    }

    fn settle_probe(&mut self, index: usize, result: Result<Accepted, Failure>, conversations: &mut dyn Conversations) -> Step {
        let now = Instant::now();
        let server = &mut self.servers[index];
        server.probing = false;
        let failure = match result {
            Ok(accepted) => match self.model.as_ref().filter(|(_, model)| *model != accepted.model) {
                None => {
                    self.model.get_or_insert_with(|| (server.endpoint.url.clone(), accepted.model.clone()));
                    server.passed(accepted, index, &self.settings, now);
                    None
                }
                Some(first) => {
                    let other = (server.endpoint.url.clone(), accepted.model);
                    Some(Failure::Settings(ServingError::DifferentModels { first: first.clone(), other }))
                }
            },
            Err(failure) => Some(failure),
        };
        match failure {
            None => {}
            // What is wrong from the start is for the user to put right; later it is a server that changed.
            Some(Failure::Settings(error)) if server.phase == EndpointPhase::New => return Err(error),
            Some(Failure::Settings(error)) => self.drop_server(index, error.to_string(), now),
            Some(Failure::Fault(reason)) => self.drop_server(index, reason, now),
        }
        if self.servers.iter().all(|server| server.is_dropped() && !server.probing) {
            let fault = |server: &Served| match &server.phase {
                EndpointPhase::Dropped(reason) => (server.endpoint.url.clone(), reason.clone()),
                _ => (server.endpoint.url.clone(), String::new()),
            };
            return Err(ServingError::AllDropped(self.servers.iter().map(fault).collect()));
        }
        // What was held may be decided now.
        for row in mem::take(&mut self.held) {
            if row.faults.len() as u32 <= self.settings.retries {
                self.ready.push_front(row);
            } else if self.give_up(row, conversations)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn drop_server(&mut self, index: usize, reason: String, now: Instant) {
        self.servers[index].drop_for(reason, now + self.settings.pace.probe_again);
        let rows = self.ready.iter_mut().chain(&mut self.waiting).chain(&mut self.held).chain(self.asked.values_mut());
        rows.for_each(|row| row.faults.retain(|fault| fault.server != index));
    }
}
