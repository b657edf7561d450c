//! A thread by which the ranks of a group know of each other whether they live, how far they are, and why one ended.
//!
//! A collective that fails says only that a connection closed or that time ran out. So every rank has a second connection to the store,
//! which a blocked operation of the first does not hold up, and on it, every half second, writes that it lives and how many
//! collectives it has begun, and reads the same of the others. All dealings with the store while the group works go through this
//! thread: a store whose machine is gone blocks without end, and must not block a rank that wants to say so.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::shim::{ShimError, Store};

const BEAT: Duration = Duration::from_millis(500);
/// The same while somebody waits for an announcement.
const GLANCE: Duration = Duration::from_millis(100);
/// After a collective has failed, a rank whose pulse stood still for this long is the cause.
pub(crate) const STANDS_STILL: Duration = Duration::from_secs(3);
/// A pulse that is late by so much stands still as well, once another does.
const LATE: Duration = Duration::from_secs(2);
/// Without a failed collective a rank is only given up after this long, since a machine may be suspended for moments.
pub(crate) const GIVEN_UP: Duration = Duration::from_secs(15);
/// The most that counts of the time between two looks at something: whatever goes beyond it this process itself did not run, being
/// stopped or on a machine that was, and that tells nothing of the others.
const LOOK: Duration = Duration::from_secs(1);
/// How long a rank that ends waits for the store to take its last word, and rank 0 for the others to hear it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why a rank works no longer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    /// It had finished.
    Left,
    /// It failed by itself.
    Cause(String),
    /// It ended because of another rank; the message names that one.
    Consequence(String),
}

impl End {
    fn encode(&self) -> Vec<u8> {
        let (letter, message) = match self {
            Self::Left => ('L', ""),
            Self::Cause(message) => ('C', message.as_str()),
            Self::Consequence(message) => ('Q', message.as_str()),
        };
        format!("{letter}{message}").into_bytes()
    }

    fn decode(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let message = text.chars().skip(1).collect();
        match text.chars().next() {
            Some('L') => Self::Left,
            Some('Q') => Self::Consequence(message),
            _ => Self::Cause(message),
        }
    }
}

/// What a rank has to say to the others.
#[derive(Debug, Clone)]
enum Word {
    Announcement(String, Vec<u8>),
    End(End),
}

/// What is known of a rank.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    beat: u64,
    /// For how long this rank has seen the same beat.
    silent: Duration,
    /// Collectives it has begun.
    pub(crate) begun: u64,
    /// Pieces of work that it is through with, each for itself.
    arrived: u64,
    /// It has read rank 0's last word.
    heard: bool,
    pub(crate) end: Option<End>,
}

#[derive(Debug)]
struct State {
    peers: Vec<Peer>,
    outbox: VecDeque<Word>,
    /// What rank 0 has announced and nobody has taken yet.
    announced: HashMap<String, Vec<u8>>,
    /// Somebody waits for an announcement.
    waiting: bool,
    /// A round has asked the store, which has not answered yet: for how long it has been seen so, and when it was last looked at.
    unanswered: Option<(Duration, Instant)>,
    stop: bool,
    /// The thread has ended, perhaps because of the store.
    ended: bool,
    store_error: Option<String>,
}

struct Shared {
    state: Mutex<State>,
    /// Signalled by the thread after each round.
    news: Condvar,
    /// Signalled to the thread when it has something to do.
    wake: Condvar,
    begun: AtomicU64,
    arrived: AtomicU64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What another thread sees of the others' pulses at one moment.
pub(crate) struct View {
    pub(crate) peers: Vec<Peer>,
    /// Ranks without a last word whose pulse stands still, once one has for the asked time.
    pub(crate) still: Vec<usize>,
    /// The store answers no more.
    pub(crate) store_lost: bool,
}

/// The pulse of this rank.
pub(crate) struct Pulse {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    rank: usize,
    serves: bool,
}

/// The key under which a rank says that it lives.
pub(crate) fn alive_key(prefix: &str, rank: usize) -> String {
    format!("{prefix}alive/{rank}")
}

/// The keys that count last words and announcements, so that one glance tells whether there are new ones.
pub(crate) fn counter_keys(prefix: &str) -> [String; 2] {
    [format!("{prefix}ends"), format!("{prefix}announcements")]
}

impl Pulse {
    /// Starts to beat. The ranks must all have written their `alive_key`, and made the `counter_keys`.
    pub(crate) fn start(store: Store, prefix: &str, rank: usize, world: usize, serves: bool) -> Self {
        let peer = Peer { beat: 0, silent: Duration::ZERO, begun: 0, arrived: 0, heard: false, end: None };
        let state = State {
            peers: vec![peer; world],
            outbox: VecDeque::new(),
            announced: HashMap::new(),
            waiting: false,
            unanswered: None,
            stop: false,
            ended: false,
            store_error: None,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            news: Condvar::new(),
            wake: Condvar::new(),
            begun: AtomicU64::new(0),
            arrived: AtomicU64::new(0),
        });
        let mut heart = Heart {
            store,
            shared: Arc::clone(&shared),
            prefix: prefix.to_string(),
            rank,
            beat: 0,
            looked: Instant::now(),
            ends: 0,
            announcements: 0,
        };
        let thread = std::thread::Builder::new().name("pulse".to_string()).spawn(move || heart.run());
        if let Err(error) = &thread {
            let mut state = shared.lock();
            (state.ended, state.store_error) = (true, Some(format!("no thread for it: {error}")));
        }
        Self { shared, thread: Mutex::new(thread.ok()), rank, serves }
    }

    /// Counts a collective that this rank begins.
    pub(crate) fn begin(&self) {
        self.shared.begun.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn begun(&self) -> u64 {
        self.shared.begun.load(Ordering::Relaxed)
    }

    /// What is known now; a pulse stands still when it has for `threshold`.
    pub(crate) fn view(&self, threshold: Duration) -> View {
        self.view_of(&mut self.shared.lock(), threshold)
    }

    fn view_of(&self, state: &mut State, threshold: Duration) -> View {
        let unanswered_for = state.unanswered.as_mut().map_or(Duration::ZERO, |(so_far, looked)| {
            *so_far += looked.elapsed().min(LOOK);
            *looked = Instant::now();
            *so_far
        });
        let silent_for = |least: Duration| {
            let peers = state.peers.iter().enumerate();
            peers.filter(|(rank, p)| *rank != self.rank && p.end.is_none() && p.silent >= least).map(|(rank, _)| rank).collect()
        };
        let any: Vec<usize> = silent_for(threshold);
        let still = if any.is_empty() { any } else { silent_for(threshold.min(LATE)) };
        let store_lost = state.store_error.is_some() || (!self.serves && unanswered_for >= threshold);
        View { peers: state.peers.clone(), still, store_lost }
    }

    /// Waits a moment for news.
    pub(crate) fn wait(&self, at_most: Duration) {
        let state = self.shared.lock();
        if state.ended {
            drop(state);
            std::thread::sleep(at_most);
            return;
        }
        drop(self.shared.news.wait_timeout(state, at_most));
    }

    /// The thread has stopped, or this rank has said its last word.
    pub(crate) fn has_ended(&self) -> bool {
        let state = self.shared.lock();
        state.stop || state.ended
    }

    /// Announces something to all ranks. Only one rank does so.
    pub(crate) fn announce(&self, key: &str, bytes: &[u8]) -> Result<(), String> {
        self.say(Word::Announcement(key.to_string(), bytes.to_vec()))
    }

    /// Returns when the store has it.
    fn say(&self, word: Word) -> Result<(), String> {
        let mut state = self.shared.lock();
        state.outbox.push_back(word);
        self.shared.wake.notify_all();
        let deadline = Instant::now() + PATIENCE;
        while !state.outbox.is_empty() && !state.ended && Instant::now() < deadline {
            state = self.news(state, GLANCE);
        }
        if state.outbox.is_empty() {
            return Ok(());
        }
        Err(state.store_error.clone().unwrap_or_else(|| "the store does not answer".to_string()))
    }

    fn news<'a>(&self, state: MutexGuard<'a, State>, at_most: Duration) -> MutexGuard<'a, State> {
        self.shared.news.wait_timeout(state, at_most).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits until something is announced under the key, or until `give_up` makes an error of what it sees.
    pub(crate) fn await_announcement<E>(&self, key: &str, give_up: impl Fn(&View) -> Option<E>) -> Result<Vec<u8>, E> {
        let mut state = self.shared.lock();
        state.waiting = true;
        self.shared.wake.notify_all();
        let result = loop {
            // What was announced counts first: who announced it may have left since.
            if let Some(bytes) = state.announced.remove(key) {
                break Ok(bytes);
            }
            if let Some(error) = give_up(&self.view_of(&mut state, GIVEN_UP)) {
                break Err(error);
            }
            state = self.news(state, BEAT);
        };
        state.waiting = false;
        result
    }

    /// Waits until all ranks have called this as often as this one, or until `give_up` makes an error of what it sees. `meanwhile` is called
    /// every now and then.
    pub(crate) fn arrive<E>(&self, meanwhile: &mut dyn FnMut(), give_up: impl Fn(&View) -> Option<E>) -> Result<(), E> {
        let arrived = self.shared.arrived.fetch_add(1, Ordering::Relaxed) + 1;
        let mut state = self.shared.lock();
        state.waiting = true;
        self.shared.wake.notify_all();
        let result = loop {
            // Who has arrived counts first: the others may have gone on and left since.
            if state.peers.iter().enumerate().all(|(rank, peer)| rank == self.rank || peer.arrived >= arrived) {
                break Ok(());
            }
            if let Some(error) = give_up(&self.view_of(&mut state, GIVEN_UP)) {
                break Err(error);
            }
            drop(state);
            meanwhile();
            state = self.news(self.shared.lock(), BEAT);
        };
        state.waiting = false;
        result
    }

    /// Says the last word, and stops. Where this process serves the store, waits a little until all others have heard it, so that the
    /// store is not gone before. Only the first last word counts.
    pub(crate) fn end(&self, end: &End) {
        let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        let sent = self.say(Word::End(end.clone()));
        let mut state = self.shared.lock();
        let deadline = Instant::now() + PATIENCE;
        while self.serves && sent.is_ok() && !state.ended && Instant::now() < deadline {
            let still = self.view_of(&mut state, STANDS_STILL).still;
            let waits_for =
                |(rank, peer): (usize, &Peer)| rank != self.rank && !peer.heard && peer.end.is_none() && !still.contains(&rank);
            if !state.peers.iter().enumerate().any(waits_for) {
                break;
            }
            state = self.news(state, GLANCE);
        }
        state.stop = true;
        self.shared.wake.notify_all();
        // A thread that the store blocks is left behind: it holds nothing that others need.
        let deadline = Instant::now() + Duration::from_secs(1);
        while !state.ended && Instant::now() < deadline {
            state = self.news(state, GLANCE);
        }
        let ended = state.ended;
        drop(state);
        if ended {
            let _ = thread.join();
        }
    }
}

/// The thread's side.
struct Heart {
    store: Store,
    shared: Arc<Shared>,
    prefix: String,
    rank: usize,
    beat: u64,
    /// When the store answered last.
    looked: Instant,
    /// Last words and announcements that have been read.
    ends: usize,
    announcements: usize,
}

impl Heart {
    fn run(&mut self) {
        loop {
            if let Err(error) = self.round() {
                let message = match error {
                    ShimError::Failed(message) => message,
                    ShimError::NotBuilt => "there is no store in this program".to_string(),
                };
                self.shared.lock().store_error = Some(message);
                break;
            }
            let state = self.shared.lock();
            if state.stop && state.outbox.is_empty() {
                break;
            }
            if state.outbox.is_empty() && !state.stop {
                let pause = if state.waiting { GLANCE } else { BEAT };
                drop(self.shared.wake.wait_timeout(state, pause));
            }
        }
        self.shared.lock().ended = true;
        self.shared.news.notify_all();
    }

    /// One exchange with the store, during which the state is not locked.
    fn round(&mut self) -> Result<(), ShimError> {
        let (outgoing, mut peers) = {
            let mut state = self.shared.lock();
            state.unanswered = Some((Duration::ZERO, Instant::now()));
            (state.outbox.clone(), state.peers.clone())
        };
        // Before the words: who reads that a rank has left shall know by then how far it came.
        self.beat += 1;
        let counts = [&self.shared.begun, &self.shared.arrived].map(|count| count.load(Ordering::Relaxed));
        let (heard, [begun, arrived]) = (u8::from(peers[0].end.is_some()), counts);
        self.store.set(&alive_key(&self.prefix, self.rank), format!("{} {begun} {heard} {arrived}", self.beat).as_bytes())?;
        let [ends_key, announcements_key] = counter_keys(&self.prefix);
        for word in &outgoing {
            match word {
                Word::End(end) => {
                    self.store.set(&self.end_key(self.rank), &end.encode())?;
                    self.store.add(&ends_key, 1)?;
                }
                Word::Announcement(key, bytes) => {
                    let number = self.store.add(&announcements_key, 0)? as usize;
                    self.store.set(&self.announced_key(number, "key"), key.as_bytes())?;
                    self.store.set(&self.announced_key(number, "bytes"), bytes)?;
                    self.store.add(&announcements_key, 1)?;
                }
            }
        }
        let mut keys: Vec<String> = (0..peers.len()).map(|rank| alive_key(&self.prefix, rank)).collect();
        keys.extend([ends_key, announcements_key]);
        let lines = self.store.get_lines(&keys)?;
        let passed = self.looked.elapsed().min(LOOK);
        self.looked = Instant::now();
        for (peer, line) in peers.iter_mut().zip(&lines) {
            let mut numbers = line.split(' ').map(|number| number.parse::<u64>().unwrap_or_default());
            let beat = numbers.next().unwrap_or_default();
            peer.silent = if beat == peer.beat { peer.silent + passed } else { Duration::ZERO };
            peer.beat = beat;
            peer.begun = numbers.next().unwrap_or_default();
            peer.heard = numbers.next().unwrap_or_default() == 1;
            peer.arrived = numbers.next().unwrap_or_default();
        }
        let counted = |index: usize| lines.get(index).and_then(|line| line.parse().ok()).unwrap_or_default();
        let (ends, announcements): (usize, usize) = (counted(peers.len()), counted(peers.len() + 1));
        if ends != self.ends {
            for (rank, peer) in peers.iter_mut().enumerate().filter(|(_, peer)| peer.end.is_none()) {
                let key = self.end_key(rank);
                if self.store.has(&key)? {
                    peer.end = Some(End::decode(&self.store.get(&key)?));
                }
            }
            self.ends = ends;
        }
        // All are read as they come: once this rank has heard that rank 0 ends, the store may be gone.
        let mut announced = Vec::new();
        for number in self.announcements..announcements {
            let key = String::from_utf8_lossy(&self.store.get(&self.announced_key(number, "key"))?).into_owned();
            announced.push((key, self.store.get(&self.announced_key(number, "bytes"))?));
        }
        self.announcements = self.announcements.max(announcements);

        let mut state = self.shared.lock();
        state.outbox.drain(..outgoing.len());
        state.peers = peers;
        state.unanswered = None;
        state.announced.extend(announced);
        drop(state);
        self.shared.news.notify_all();
        Ok(())
    }

    fn end_key(&self, rank: usize) -> String {
        format!("{}end/{rank}", self.prefix)
    }

    fn announced_key(&self, number: usize, part: &str) -> String {
        format!("{}announced/{number}/{part}", self.prefix)
    }
}
