//! The probe: a server is given questions only after it has answered one, with the fields it takes, for the prompt that was meant.

use super::endpoint::{Accepted, Endpoint, Fault, FaultKind};
use super::protocol::{self, Completion};
use super::{ServingError, ServingSettings};
use crate::engine::Question;
use crate::prompts::Message;
use crate::supervision::{counter_generator, purpose};
use rand_chacha::rand_core::RngCore;
use std::thread;
use std::time::Duration;

/// A probe asks for one token; a server that cannot give it in this time is not there.
const LONGEST_PROBE: Duration = Duration::from_secs(60);

/// Why a server is not to be used.
#[derive(Debug)]
pub(super) enum Failure {
    Fault(String),
    /// The settings do not say what to ask it for.
    Settings(ServingError),
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Failure::Fault(fault.reason)
    }
}

/// Whether a server gives what the settings ask for, tried on one question.
///
/// With `patience` one that cannot be reached gets more than one chance, as one that has answered before deserves.
pub(super) fn probe(
    endpoint: &Endpoint,
    question: &Question,
    settings: &ServingSettings,
    patience: bool,
) -> Result<Accepted, Failure> {
    let probe = Probe { endpoint, settings, timeout: settings.timeout.min(LONGEST_PROBE), patience };
    let model = match &settings.model {
        Some(model) => model.clone(),
        None => probe.only_model()?,
    };
    let mut accepted = Accepted { model, left_out: Vec::new(), notes: Vec::new() };
    let mut reply = probe.ask(question, &accepted);
    if let Err(fault) = &reply
        && may_be_the_questions(fault)
    {
        accepted.left_out = probe.fields_to_leave_out(&accepted, fault)?;
        if !accepted.left_out.is_empty() {
            reply = probe.ask(question, &accepted);
        }
    }
    let completion = match reply {
        Ok(completion) => Some(completion),
        // Another question was accepted: it is this one that the server does not like, which is not held against the server.
        Err(fault) if may_be_the_questions(&fault) => None,
        Err(fault) => return Err(fault.into()),
    };
    accepted.notes = notes(&accepted.left_out, completion.as_ref(), question);
    match completion.and_then(|completion| completion.prompt_difference(&question.prompt_ids)) {
        Some(difference) => Err(Failure::Fault(difference)),
        None => Ok(accepted),
    }
}

/// Whether a server that answers like this may answer another question.
fn may_be_the_questions(fault: &Fault) -> bool {
    matches!(fault.kind, FaultKind::Final | FaultKind::Refused | FaultKind::Passing)
}

struct Probe<'p> {
    endpoint: &'p Endpoint,
    settings: &'p ServingSettings,
    timeout: Duration,
    patience: bool,
}

impl Probe<'_> {
    fn only_model(&self) -> Result<String, Failure> {
        let url = self.endpoint.url.clone();
        let mut models = self.patiently(|| self.endpoint.models(self.timeout))?;
        match (models.pop(), models.is_empty()) {
            (Some(model), true) => Ok(model),
            (None, _) => Err(Failure::Fault("it lists no models".to_owned())),
            (Some(last), false) => {
                models.push(last);
                Err(Failure::Settings(ServingError::SeveralModels { url, models }))
            }
        }
    }

    /// Asks for one token of the answer.
    fn ask(&self, question: &Question, accepted: &Accepted) -> Result<Completion, Fault> {
        let body = protocol::request(question, self.settings, &accepted.model, 1, &accepted.left_out);
        self.patiently(|| {
            let reply = self.endpoint.post(&body, self.timeout)?;
            protocol::parse(&reply).map_err(|unusable| self.endpoint.presentable(unusable.into()))
        })
    }

    /// The fields to leave out of requests to a server that failed at one; none if it takes another question with all of them.
    fn fields_to_leave_out(&self, accepted: &Accepted, refusal: &Fault) -> Result<Vec<&'static str>, Failure> {
        let greeting =
            Question { key: 0, messages: vec![Message::new("user", "Hello")], tools: None, prompt_ids: Vec::new(), counter: 0 };
        let mut trial = Accepted { left_out: Vec::new(), ..accepted.clone() };
        let mut reason = refusal.reason.clone();
        loop {
            match self.ask(&greeting, &trial) {
                Ok(_) => break,
                Err(fault) if fault.kind == FaultKind::Refused => reason = fault.reason,
                Err(fault) => return Err(fault.into()),
            }
            let left: Vec<_> =
                protocol::extras(self.settings).into_iter().filter(|extra| !trial.left_out.contains(&extra.name)).collect();
            let named = left.iter().find(|extra| reason.contains(extra.name));
            match named.or_else(|| left.first()) {
                Some(extra) => trial.left_out.push(extra.name),
                None => return Err(Failure::Fault(reason)),
            }
        }
        let needed =
            protocol::extras(self.settings).into_iter().filter(|extra| extra.needed && trial.left_out.contains(&extra.name));
        let needed: Vec<String> = needed.map(|extra| format!("`{}`", extra.name)).collect();
        if needed.is_empty() {
            return Ok(trial.left_out);
        }
        let needed = needed.join(" and ");
        Err(Failure::Fault(format!(
            "it refuses requests with {needed}, and without its answers would be of other settings: {reason}"
        )))
    }

    /// Tries again after faults that may pass. A time-out is waited for once only.
    fn patiently<T>(&self, attempt: impl Fn() -> Result<T, Fault>) -> Result<T, Fault> {
        let mut failed = 0;
        loop {
            let fault = match attempt() {
                Err(fault) => fault,
                done => return done,
            };
            let may_pass = match fault.kind {
                FaultKind::Busy | FaultKind::Passing => true,
                FaultKind::Unreachable => self.patience,
                FaultKind::Final | FaultKind::Refused | FaultKind::Misdirected | FaultKind::TimedOut => false,
            };
            if !may_pass || failed >= self.settings.retries || self.endpoint.is_closed() {
                return Err(fault);
            }
            failed += 1;
            thread::sleep(delay(self.settings, fault.retry_after, 0, failed));
        }
    }
}

/// How long to wait after the `failed`-th failure, from 1: what the server asks for, else twice as long as after the one before, and up to
/// half of it less, so that those who failed together do not return together.
pub(super) fn delay(settings: &ServingSettings, retry_after: Option<Duration>, counter: u64, failed: u32) -> Duration {
    let pace = settings.pace;
    let doubled = || {
        let full = pace.first_delay.saturating_mul(1 << (failed.clamp(1, 16) - 1)).min(pace.longest_delay);
        let drawn = counter_generator(settings.seed, purpose::RETRY_DELAY, counter, u64::from(failed)).next_u32();
        full.mul_f64(1.0 - 0.5 * f64::from(drawn) / f64::from(u32::MAX))
    };
    retry_after.unwrap_or_else(doubled).min(pace.longest_delay)
}

/// What is worth knowing of a server that passed.
fn notes(left_out: &[&'static str], completion: Option<&Completion>, question: &Question) -> Vec<String> {
    let mut notes = Vec::new();
    if !left_out.is_empty() {
        notes.push(format!("does not take {}", left_out.join(", ")));
    }
    let Some(completion) = completion else { return notes };
    if !completion.has_ids() {
        notes.push("returns no token ids: they come from the text by the recorded tokenizer".to_owned());
    }
    let recorded = question.prompt_ids.len() as u64;
    if !completion.has_prompt_ids()
        && let Some(counted) = completion.counted_prompt()
        && counted != recorded
    {
        notes.push(format!(
            "counts {counted} tokens in a prompt of {recorded}: its chat template or tokenizer may not be the recorded one"
        ));
    }
    notes
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::serving::Pace;
    use crate::serving::protocol::tests::settings;

    #[test]
    fn delays_double_up_to_the_longest_and_are_drawn_by_counter() {
        let pace = Pace { first_delay: Duration::from_secs(1), longest_delay: Duration::from_secs(20), ..Pace::default() };
        let settings = ServingSettings { pace, ..settings() };
        for (failed, full) in [(1, 1.0), (2, 2.0), (3, 4.0), (5, 16.0), (6, 20.0), (400, 20.0)] {
            let drawn: Vec<f64> = (0..50).map(|counter| delay(&settings, None, counter, failed).as_secs_f64()).collect();
            assert!(drawn.iter().all(|&delay| (full / 2.0..=full).contains(&delay)), "{drawn:?}");
            let (least, most) = (drawn.iter().copied().fold(f64::MAX, f64::min), drawn.iter().copied().fold(0.0, f64::max));
            assert!(most - least > full / 4.0, "{drawn:?}");
            assert_eq!(delay(&settings, None, 7, failed), delay(&settings, None, 7, failed));
        }
        assert_eq!(delay(&settings, Some(Duration::from_secs(3)), 7, 1), Duration::from_secs(3));
        assert_eq!(delay(&settings, Some(Duration::from_secs(3000)), 7, 1), Duration::from_secs(20));
    }
}
