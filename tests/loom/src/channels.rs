//! The channel of the standard library as `std::sync::mpsc` documents it, over loom's lock and condition variable: loom's own channel does
//! not tell a receiver that all senders are gone, which is what the hand-over rests on.

use std::collections::VecDeque;
// Counting references is not what is examined; loom's own counter would multiply the interleavings.
use std::sync::Arc;

use loom::sync::{Condvar, Mutex, MutexGuard};

struct Shared<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    queue: VecDeque<T>,
    sender: bool,
    receiver: bool,
}

impl<T> Shared<T> {
    /// A lock that a panicking thread held is as good as any other here, as in the standard library's channel.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

pub(crate) struct Sender<T>(Arc<Shared<T>>);
pub(crate) struct Receiver<T>(Arc<Shared<T>>);

/// The one sender and the receiver of a channel without a limit.
pub(crate) fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let state = Mutex::new(State { queue: VecDeque::new(), sender: true, receiver: true });
    let shared = Arc::new(Shared { state, changed: Condvar::new() });
    (Sender(Arc::clone(&shared)), Receiver(shared))
}

impl<T> Sender<T> {
    /// Never waits; the message comes back when the receiver is gone.
    pub(crate) fn send(&self, message: T) -> Result<(), T> {
        let mut state = self.0.lock();
        if !state.receiver {
            return Err(message);
        }
        state.queue.push_back(message);
        self.0.changed.notify_one();
        Ok(())
    }
}

impl<T> Receiver<T> {
    /// Waits for a message; what was sent before the sender went is still received.
    pub(crate) fn recv(&self) -> Result<T, ()> {
        let mut state = self.0.lock();
        loop {
            if let Some(message) = state.queue.pop_front() {
                return Ok(message);
            }
            if !state.sender {
                return Err(());
            }
            state = self.0.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.sender = false;
        self.0.changed.notify_one();
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        // Messages that nobody will read go with the receiver.
        let unread = {
            let mut state = self.0.lock();
            state.receiver = false;
            std::mem::take(&mut state.queue)
        };
        drop(unread);
    }
}
