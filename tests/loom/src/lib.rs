//! All interleavings of the hand-over between the target's thread and the drafter's, whichever side ends first, when, and how.
//!
//! loom runs each case once for every order in which the two threads can take their steps, and fails by itself when both wait. The code
//! under test is the evaluator's own file; only its channels are replaced.
#![cfg(test)]

mod channels;
#[path = "../../../evaluator/src/hand_over.rs"]
mod hand_over;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
// What is noted for the judgement is no part of the hand-over, so loom need not look at it.
use std::sync::{Arc, Mutex};

use hand_over::{Back, Front, Gone, sides};

/// What the front does: a draft, then, as when another text begins beside the first, an order without an answer, and a draft again.
const SCRIPT: [Order; 3] = [Order::Draft(0), Order::Start(1), Order::Draft(2)];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Has no answer.
    Start(usize),
    /// Has an answer, and work behind it.
    Draft(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Error,
    Panic,
}

/// Where a side fails: in front of this order or, with `answered`, behind its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct End {
    at: usize,
    answered: bool,
    how: How,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    Gone,
    OfFront,
    OfBack,
    PanicOfBack,
}

impl From<Gone> for Failure {
    fn from(_: Gone) -> Self {
        Self::Gone
    }
}

fn answer_to(number: usize) -> usize {
    number + 100
}

/// Fails as planned, if now is when.
fn fail_if(end: Option<End>, at: usize, answered: bool, failure: Failure) -> Result<(), Failure> {
    match end {
        Some(end) if (end.at, end.answered) == (at, answered) => match end.how {
            How::Error => Err(failure),
            // Unlike `panic!`, this does not print.
            How::Panic => std::panic::resume_unwind(Box::new("on purpose")),
        },
        _ => Ok(()),
    }
}

fn run_front(front: &Front<Order, usize>, end: Option<End>) -> Result<(), Failure> {
    for (index, &order) in SCRIPT.iter().enumerate() {
        fail_if(end, index, false, Failure::OfFront)?;
        match order {
            Order::Start(_) => front.order(order)?,
            Order::Draft(number) => assert_eq!(front.ask(order)?, answer_to(number), "the answer to another order"),
        }
    }
    fail_if(end, SCRIPT.len(), false, Failure::OfFront)
}

/// Orders are written down as they come.
fn run_back(back: Back<Order, usize>, end: Option<End>, seen: &Mutex<Vec<Order>>) -> Result<(), Failure> {
    back.serve(|order, answer| {
        let mut seen = seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let index = seen.len();
        seen.push(order);
        drop(seen);
        fail_if(end, index, false, Failure::OfBack)?;
        if let Order::Draft(number) = order {
            assert_eq!(answer(answer_to(number)), Ok(()), "the front waits for each answer");
        }
        fail_if(end, index, true, Failure::OfBack)
    })
}

/// Goes through all interleavings of one case, where `None` is a side that does all its work, and gives how many there are.
fn check(front_end: Option<End>, back_end: Option<End>) -> usize {
    let runs = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&runs);
    loom::model(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        let (front, back) = sides();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&seen);
        let worker = loom::thread::spawn(move || catch_unwind(AssertUnwindSafe(|| run_back(back, back_end, &noted))));
        let join = || worker.join().expect("panics are caught within");
        // The front is moved in, so that a panic drops it on its way out, as in a scope of threads, which then joins.
        let ran = catch_unwind(AssertUnwindSafe(move || {
            let outcome = run_front(&front, front_end);
            (front, outcome)
        }));
        let ended = match ran {
            Ok((front, outcome)) => Some((outcome, front.conclude(outcome, join, || Failure::PanicOfBack))),
            Err(panic) if panic.is::<&str>() => {
                let _ = join();
                None
            }
            // An assertion.
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let seen = seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        judge(front_end, back_end, &seen, ended);
    });
    runs.load(Ordering::Relaxed)
}

/// What must hold at the end, whatever the order of steps was. `ended` is how the front itself ended and how all of it did; `None` when
/// the front panicked.
fn judge(
    front_end: Option<End>,
    back_end: Option<End>,
    seen: &[Order],
    ended: Option<(Result<(), Failure>, Result<(), Failure>)>,
) {
    assert_eq!(seen, &SCRIPT[..seen.len()], "orders come in order, and none is left out");
    match back_end.filter(|end| end.at < seen.len()) {
        Some(end) => {
            assert_eq!(seen.len(), end.at + 1, "the back went on behind its failure");
            if let Some((outcome, concluded)) = ended {
                let cause = if end.how == How::Error { Failure::OfBack } else { Failure::PanicOfBack };
                assert_eq!(concluded, Err(cause), "the cause is told, not what it led to");
                assert!(matches!(outcome, Ok(()) | Err(Failure::Gone | Failure::OfFront)));
            }
        }
        None => {
            assert_eq!(seen.len(), front_end.map_or(SCRIPT.len(), |end| end.at), "orders were lost");
            let expected = match front_end {
                None => Some(Ok(())),
                Some(end) => (end.how == How::Error).then_some(Err(Failure::OfFront)),
            };
            assert_eq!(ended, expected.map(|outcome| (outcome, outcome)));
        }
    }
}

#[test]
fn whichever_side_ends_when_and_how_the_other_hears_of_it_and_no_order_is_lost() {
    let ways = [How::Error, How::Panic];
    let in_front = |at| ways.map(|how| Some(End { at, answered: false, how }));
    let behind = |at| ways.map(|how| Some(End { at, answered: true, how }));
    let front_ends = || std::iter::once(None).chain((0..=SCRIPT.len()).flat_map(in_front));
    let back_ends = || std::iter::once(None).chain((0..SCRIPT.len()).flat_map(|at| in_front(at).into_iter().chain(behind(at))));
    let interleavings: usize = front_ends().flat_map(|front| back_ends().map(move |back| check(front, back))).sum();
    println!("{} cases, {interleavings} interleavings", front_ends().count() * back_ends().count());
}
