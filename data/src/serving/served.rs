//! What is remembered of one server while it is used: whether it is given questions, and how it did.

use super::endpoint::{Accepted, Endpoint, Fault, FaultKind};
use super::probe::delay;
use super::{EndpointPhase, EndpointState, ServingSettings};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// So many faults in a row cast doubt on a server.
const FAULTS_BEFORE_DOUBT: u32 = 5;

/// Rates are of this much time.
const RATE_WINDOW: Duration = Duration::from_secs(60);

pub(super) struct Served {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) accepted: Option<Arc<Accepted>>,
    pub(super) phase: EndpointPhase,
    /// Whether a probe is under way.
    pub(super) probing: bool,
    pub(super) under_way: usize,
    /// When it was last heard to work.
    pub(super) last_success: Option<Instant>,
    /// Until then it wants to be left alone.
    pub(super) paused_until: Option<Instant>,
    /// When it may be probed again, once dropped.
    pub(super) probe_at: Instant,
    faults_in_row: u32,
    busy_in_row: u32,
    /// Probes that it passed since it last did anything else well.
    doubts_in_row: u32,
    live_since: Option<Instant>,
    /// When answers came, and of how many tokens they were.
    recent: VecDeque<(Instant, u64)>,
    answered: u64,
    rejected: u64,
    faults: u64,
    tokens: u64,
    last_fault: Option<String>,
}

impl Served {
    pub(super) fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint: Arc::new(endpoint),
            accepted: None,
            phase: EndpointPhase::New,
            probing: false,
            under_way: 0,
            last_success: None,
            paused_until: None,
            probe_at: Instant::now(),
            faults_in_row: 0,
            busy_in_row: 0,
            doubts_in_row: 0,
            live_since: None,
            recent: VecDeque::new(),
            answered: 0,
            rejected: 0,
            faults: 0,
            tokens: 0,
            last_fault: None,
        }
    }

    /// What it accepts, if it may be given a question now.
    pub(super) fn open(&self, concurrency: usize, now: Instant) -> Option<&Arc<Accepted>> {
        let is_open = self.phase == EndpointPhase::Live
            && self.under_way < concurrency
            && self.paused_until.is_none_or(|until| until <= now);
        self.accepted.as_ref().filter(|_| is_open)
    }

    pub(super) fn is_dropped(&self) -> bool {
        matches!(self.phase, EndpointPhase::Dropped(_))
    }

    /// It answered a question.
    pub(super) fn has_answered(&mut self, tokens: u64, now: Instant) {
        self.heard(now);
        self.answered += 1;
        self.tokens += tokens;
        self.recent.push_back((now, tokens));
    }

    /// It had something to say to a question that is no answer.
    pub(super) fn has_rejected(&mut self, now: Instant) {
        self.heard(now);
        self.rejected += 1;
    }

    /// A question ended here for want of an answer.
    pub(super) fn gave_up(&mut self) {
        self.rejected += 1;
    }

    fn heard(&mut self, now: Instant) {
        self.last_success = Some(now);
        self.faults_in_row = 0;
        self.busy_in_row = 0;
        self.doubts_in_row = 0;
    }

    /// It failed at a question. Whether that casts doubt on it.
    pub(super) fn has_failed(&mut self, fault: &Fault, index: usize, settings: &ServingSettings, now: Instant) -> bool {
        self.faults += 1;
        self.last_fault = Some(fault.reason.clone());
        if fault.kind == FaultKind::Busy || fault.retry_after.is_some() {
            // What was under way when it became busy says so all at once, which is one time.
            if self.paused_until.is_none_or(|until| until <= now) {
                self.busy_in_row += 1;
            }
            self.pause(delay(settings, fault.retry_after, index as u64, self.busy_in_row), now);
            return false;
        }
        self.faults_in_row += 1;
        fault.kind == FaultKind::Unreachable || self.faults_in_row >= FAULTS_BEFORE_DOUBT
    }

    fn pause(&mut self, length: Duration, now: Instant) {
        self.paused_until = self.paused_until.max(Some(now + length));
    }

    /// It passed a probe. One that passes probe after probe and nothing else is given less and less.
    pub(super) fn passed(&mut self, accepted: Accepted, index: usize, settings: &ServingSettings, now: Instant) {
        self.accepted = Some(Arc::new(accepted));
        self.phase = EndpointPhase::Live;
        self.live_since.get_or_insert(now);
        self.last_success = Some(now);
        self.faults_in_row = 0;
        self.doubts_in_row += 1;
        if self.doubts_in_row > 1 {
            self.pause(delay(settings, None, index as u64, self.doubts_in_row - 1), now);
        }
    }

    /// It did not pass a probe.
    pub(super) fn drop_for(&mut self, reason: String, probe_at: Instant) {
        self.last_fault = Some(reason.clone());
        self.phase = EndpointPhase::Dropped(reason);
        self.probe_at = probe_at;
        self.paused_until = None;
        self.busy_in_row = 0;
        self.doubts_in_row = 0;
    }

    pub(super) fn state(&mut self, now: Instant) -> EndpointState {
        while self.recent.front().is_some_and(|&(at, _)| now.duration_since(at) > RATE_WINDOW) {
            self.recent.pop_front();
        }
        let live = self.live_since.map_or(Duration::ZERO, |since| now.duration_since(since));
        let seconds = live.clamp(Duration::from_secs(1), RATE_WINDOW).as_secs_f64();
        let through = self.endpoint.proxy.iter().map(|proxy| format!("asked through the proxy {proxy}"));
        EndpointState {
            url: self.endpoint.url.clone(),
            phase: self.phase.clone(),
            model: self.accepted.as_ref().map(|accepted| accepted.model.clone()),
            notes: self.accepted.iter().flat_map(|accepted| accepted.notes.clone()).chain(through).collect(),
            under_way: self.under_way,
            answered: self.answered,
            rejected: self.rejected,
            faults: self.faults,
            last_fault: self.last_fault.clone(),
            tokens: self.tokens,
            answers_per_second: self.recent.len() as f64 / seconds,
            tokens_per_second: self.recent.iter().map(|&(_, tokens)| tokens).sum::<u64>() as f64 / seconds,
        }
    }
}
