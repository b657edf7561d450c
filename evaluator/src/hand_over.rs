//! The hand-over between the target's thread and the drafter's: orders one way, answers the other, and how each hears of the other's end.
//!
//! The front (the target's thread) gives orders and waits for an answer to some of them. The back (the drafter's) takes them one by one
//! in their order, answers, and works on until it looks for the next one. Either may end between any two steps, because all is done, by
//! an error or by a panic, which all drop its ends of the channels. The front then hears of it at its next order or answer, and the back
//! when no order is left; so neither waits for somebody who is gone.
//!
//! Nothing here knows what is ordered. The channels are `crate::channels`, those of the standard library here; `tests/loom` takes this
//! file as it is, with channels that loom watches, and goes through all interleavings:
//! `cargo test --release --manifest-path tests/loom/Cargo.toml --target-dir target/loom`.

use crate::channels::{Receiver, Sender, channel};

/// The other side has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gone;

/// The side that orders.
pub(crate) struct Front<O, A> {
    orders: Sender<O>,
    answers: Receiver<A>,
}

/// The side that carries out.
pub(crate) struct Back<O, A> {
    orders: Receiver<O>,
    answers: Sender<A>,
}

/// Both sides of a new hand-over.
pub(crate) fn sides<O, A>() -> (Front<O, A>, Back<O, A>) {
    let (orders, incoming) = channel();
    let (outgoing, answers) = channel();
    (Front { orders, answers }, Back { orders: incoming, answers: outgoing })
}

impl<O, A> Front<O, A> {
    /// Gives an order that has no answer.
    pub(crate) fn order(&self, order: O) -> Result<(), Gone> {
        self.orders.send(order).map_err(|_| Gone)
    }

    /// Gives an order and waits for its answer.
    pub(crate) fn ask(&self, order: O) -> Result<A, Gone> {
        self.order(order)?;
        self.answers.recv().map_err(|_| Gone)
    }

    /// Ends this side, waits for the end of the other by `join`, and says how the whole ended. An error of the back is what the front's
    /// came from, so it goes first. `panicked` is the error for a back that ended by a panic.
    pub(crate) fn conclude<T, E>(
        self,
        outcome: Result<T, E>,
        join: impl FnOnce() -> std::thread::Result<Result<(), E>>,
        panicked: impl FnOnce() -> E,
    ) -> Result<T, E> {
        // The back looks for orders until nobody can send any: joined before that, it would be waited for without end.
        drop(self);
        match join() {
            Ok(Ok(())) => outcome,
            Ok(Err(error)) => Err(error),
            Err(_) => Err(panicked()),
        }
    }
}

impl<O, A> Back<O, A> {
    /// Carries out orders until the front is gone, or one fails. `carry_out` is given an order and what sends its answer; when that says
    /// [`Gone`], nobody waits for more.
    pub(crate) fn serve<E>(self, mut carry_out: impl FnMut(O, &dyn Fn(A) -> Result<(), Gone>) -> Result<(), E>) -> Result<(), E> {
        while let Ok(order) = self.orders.recv() {
            carry_out(order, &|answer| self.answers.send(answer).map_err(|_| Gone))?;
        }
        Ok(())
    }
}
