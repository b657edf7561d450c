//! What holds a rank to the others, and what it can say of them when a collective fails.

use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use tch::{Device, Tensor};

use crate::group_error::{GroupError, text_of};
use crate::meeting;
use crate::place::Place;
use crate::pulse::{End, GIVEN_UP, Peer, Pulse, STANDS_STILL, View};
use crate::shim::{self, Backend, ShimError, Store, Work};

/// What holds a rank to the others.
pub(crate) struct Links {
    /// Gone first, and always there once `join` has returned.
    backend: Option<Arc<Backend>>,
    pub(crate) pulse: Arc<Pulse>,
    /// The connection that met the others; on rank 0 also the server.
    store: Store,
    pub(crate) address: String,
    serves: bool,
    agent: bool,
    rank: usize,
    device: Device,
    timeout: Duration,
    /// The error that another rank brought about, or that this one ended with.
    broken: Mutex<Option<String>>,
}

impl Links {
    /// Meets the other ranks and connects to them.
    pub(crate) fn new(place: &Place, device: Device, timeout: Duration) -> Result<Self, GroupError> {
        shim::quiet();
        let prefix = meeting::prefix(|name| std::env::var(name).ok());
        let (store, own) = meeting::meet_in_time(place, &prefix, timeout)?;
        let serves = meeting::serves(place);
        let mut links = Self {
            backend: None,
            pulse: Arc::new(Pulse::start(own, &prefix, place.rank, place.world, serves)),
            store,
            address: meeting::address(place),
            serves,
            agent: place.store_is_served,
            rank: place.rank,
            device,
            timeout,
            broken: Mutex::new(None),
        };
        let who = (place.rank, place.world);
        let backend = match device {
            Device::Cuda(index) => Backend::nccl(&links.store, &format!("{prefix}nccl"), who, index, timeout),
            _ => {
                let own = meeting::own_address(place, &links.store, &prefix);
                Backend::gloo(&links.store, &format!("{prefix}gloo"), who, own.as_deref(), timeout)
            }
        };
        match backend {
            Ok(backend) => links.backend = Some(Arc::new(backend)),
            Err(error) => {
                let error = match error {
                    ShimError::NotBuilt => GroupError::not_built(device),
                    ShimError::Failed(message) => links.explain("connecting the ranks", &message),
                };
                links.end(Some(&error.to_string()));
                return Err(error);
            }
        }
        if matches!(device, Device::Cuda(_)) {
            links.abort_when_a_rank_is_gone();
        }
        Ok(links)
    }

    pub(crate) fn start(
        &self,
        doing: &'static str,
        begin: impl FnOnce(&Backend) -> Result<Work, ShimError>,
    ) -> Result<Work, GroupError> {
        self.pulse.begin();
        let Some(backend) = &self.backend else { return Err(GroupError::not_built(self.device)) };
        begin(backend).map_err(|error| self.explain(doing, &text_of(error)))
    }

    pub(crate) fn finish(&self, doing: &'static str, work: &Work) -> Result<Tensor, GroupError> {
        let failed = |error| self.explain(doing, &text_of(error));
        work.wait().map_err(failed)?;
        work.output().map_err(failed)
    }

    /// Waits until the result is there and not only ordered before what the device does next. NCCL itself has no time-out then.
    pub(crate) fn finish_on_host(&self, doing: &'static str, work: &Work) -> Result<(), GroupError> {
        let failed = |error| self.explain(doing, &text_of(error));
        if matches!(self.device, Device::Cuda(_)) {
            let (begin, mut pause) = (Instant::now(), Duration::from_micros(20));
            while !work.is_done().map_err(failed)? {
                if begin.elapsed() > self.timeout {
                    return Err(self.explain(doing, "timed out"));
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(2));
            }
        }
        work.wait().map_err(failed)
    }

    /// Turns c10d's message, which names at most an address, into one that names the rank and the cause.
    fn explain(&self, doing: &str, message: &str) -> GroupError {
        // A pulse must be given the time to be missed.
        let deadline = Instant::now() + STANDS_STILL + Duration::from_millis(1500);
        let error = loop {
            let view = self.pulse.view(STANDS_STILL);
            if let Some(error) = self.verdict(&view, doing, true) {
                break error;
            }
            if Instant::now() >= deadline {
                if !message.to_lowercase().contains("timed out") {
                    break GroupError::Collective { doing: doing.to_string(), message: message.to_string() };
                }
                let begun = self.pulse.begun();
                let late = view.peers.iter().enumerate().filter(|(rank, peer)| *rank != self.rank && peer.begun < begun);
                let late = late.map(|(rank, _)| rank).collect();
                break GroupError::TimeOut { seconds: self.timeout.as_secs_f64(), doing: doing.to_string(), late };
            }
            self.pulse.wait(Duration::from_millis(100));
        };
        self.remember(&error);
        error
    }

    /// Which rank, if any, makes further work impossible. `ended` counts as such a rank that left after its work was done.
    pub(crate) fn verdict(&self, view: &View, doing: &str, ended: bool) -> Option<GroupError> {
        let doing = || doing.to_string();
        let ends = || view.peers.iter().enumerate().filter(|(rank, _)| *rank != self.rank);
        let cause = ends().find_map(|(rank, peer)| match &peer.end {
            Some(End::Cause(message)) => Some(GroupError::RankFailed { rank, message: message.clone() }),
            _ => None,
        });
        let consequence = || {
            ends().find_map(|(_, peer)| match &peer.end {
                Some(End::Consequence(message)) => Some(GroupError::Told(message.clone())),
                _ => None,
            })
        };
        let gone = || (!view.still.is_empty()).then(|| GroupError::RanksGone { ranks: view.still.clone(), doing: doing() });
        let left = || {
            let left = ends().find(|(rank, peer)| peer.end == Some(End::Left) && (ended || *rank == 0));
            left.map(|(rank, _)| GroupError::RankLeft { rank, doing: doing() })
        };
        let store = || {
            let (address, agent) = (self.address.clone(), self.agent);
            (view.store_lost && !self.serves).then(|| GroupError::StoreGone { address, agent, doing: doing() })
        };
        cause.or_else(consequence).or_else(gone).or_else(left).or_else(store)
    }

    /// Keeps what another rank brought about, so that this one is not taken for the cause when it ends.
    pub(crate) fn remember(&self, error: &GroupError) {
        if error.is_of_another_rank() {
            self.broken.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| error.to_string());
        }
    }

    /// The last word of this rank: that it failed with a message, or that it leaves.
    pub(crate) fn end(&self, failure: Option<&str>) {
        let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        let end = match (broken.as_ref(), failure) {
            (Some(of_another), _) => End::Consequence(of_another.clone()),
            (None, Some(message)) => End::Cause(message.to_string()),
            (None, None) => End::Left,
        };
        if let Some(message) = failure {
            broken.get_or_insert_with(|| message.to_string());
        }
        drop(broken);
        self.pulse.end(&end);
    }

    /// An operation of NCCL whose peer is gone keeps the device, and the host that waits for it, for ever: ends it from a thread.
    fn abort_when_a_rank_is_gone(&self) {
        let Some(backend) = &self.backend else { return };
        let (backend, pulse, rank, serves) = (Arc::downgrade(backend), Arc::clone(&self.pulse), self.rank, self.serves);
        let watch = move || {
            while backend.strong_count() > 0 && !pulse.has_ended() {
                let view = pulse.view(GIVEN_UP);
                let failed = |peer: &Peer| !matches!(peer.end, None | Some(End::Left));
                let broken = !view.still.is_empty() || (view.store_lost && !serves && view.peers[0].end.is_none());
                if broken || view.peers.iter().enumerate().any(|(other, peer)| other != rank && failed(peer)) {
                    if let Some(backend) = backend.upgrade() {
                        backend.abort();
                    }
                    return;
                }
                pulse.wait(Duration::from_millis(500));
            }
        };
        // Without the thread the time-out of the host's own waits remains.
        drop(std::thread::Builder::new().name("group guard".to_string()).spawn(watch));
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        let Some(backend) = self.backend.take() else { return };
        let broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        if !broken {
            if matches!(self.device, Device::Cuda(_)) {
                backend.shutdown();
            }
            return;
        }
        // c10d's destructor waits for what is under way, which after an error may be until the time-out.
        let (done, seen) = mpsc::channel();
        let closing = std::thread::Builder::new().name("group end".to_string()).spawn(move || {
            backend.abort();
            drop(backend);
            let _ = done.send(());
        });
        if closing.is_ok() {
            let _ = seen.recv_timeout(Duration::from_secs(2));
        }
    }
}
