//! What can go wrong between ranks, in words for the person who started them.

use tch::Device;

use crate::shim::ShimError;

/// What helps after a rank was lost.
const AGAIN: &str = "run the same command again to go on from the last checkpoint";

#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    #[error(
        "this program was built without Gloo, by which processes work together on CPUs: `apt-get install libgloo-dev` and rebuild"
    )]
    NoGloo,
    #[error("this program was built without NCCL, by which processes work together on GPUs: build it with `--features nccl`")]
    NoNccl,
    #[error(
        "cuda:{index} is not available: this machine shows libtorch {count} CUDA devices; start at most that many processes a machine, \
         or use `cpu`"
    )]
    NoGpu { index: usize, count: i64 },
    #[error("processes cannot work together on {0:?}: use `cpu` or `cuda:N`")]
    NoBackend(Device),
    #[error(
        "rank 0 cannot keep the store at {address}: the port is in use; choose another MASTER_PORT or end the program that holds it"
    )]
    PortInUse { address: String },
    #[error(
        "the store of rank 0 at {address} cannot be reached within {seconds} s ({message}): check that rank 0 runs, that \
         MASTER_ADDR and MASTER_PORT are its own, and that no firewall stands between"
    )]
    Unreachable { address: String, seconds: f64, message: String },
    #[error("the store at {address} failed while {doing}: {message}")]
    Store { address: String, doing: String, message: String },
    #[error(
        "another process has already come to {address} as rank {rank}: every process needs a RANK of its own, and every run a MASTER_PORT"
    )]
    RankTaken { rank: usize, address: String },
    #[error("only {came} of {world} ranks came to {address} within {seconds} s: missing {}; see their logs", named(.missing))]
    Missing { came: usize, world: usize, address: String, seconds: f64, missing: Vec<usize> },
    #[error("rank {rank} failed: {message}")]
    RankFailed { rank: usize, message: String },
    /// What a rank said that itself ended because of another.
    #[error("{0}")]
    Told(String),
    #[error(
        "{} no longer {}: killed, or the machine is gone (noticed in {doing}); {AGAIN}",
        named(.ranks),
        answers(.ranks)
    )]
    RanksGone { ranks: Vec<usize>, doing: String },
    #[error(
        "the store at {address} no longer answers: {}, which keeps it, was killed, or the machine is gone (noticed in {doing}); {AGAIN}",
        if *.agent { "torchrun's agent" } else { "rank 0" }
    )]
    StoreGone { address: String, agent: bool, doing: String },
    #[error("rank {rank} has already left the group, before {doing}: the ranks did not do the same work")]
    RankLeft { rank: usize, doing: String },
    #[error(
        "time-out of {seconds} s in {doing}: {}; raise `devices.timeout` in the recipe if such waits are usual here",
        lateness(.late)
    )]
    TimeOut { seconds: f64, doing: String, late: Vec<usize> },
    #[error("{doing} failed between the ranks, all of which live: {message}")]
    Collective { doing: String, message: String },
    #[error("only rank 0 announces, and this is rank {0}")]
    NotRankZero(usize),
    #[error("there is no other rank that could announce `{0}`")]
    NobodyAnnounces(String),
}

impl GroupError {
    pub(crate) fn store(address: &str, doing: &str, error: ShimError) -> Self {
        Self::Store { address: address.to_string(), doing: doing.to_string(), message: text_of(error) }
    }

    pub(crate) fn collective(doing: &str, error: ShimError) -> Self {
        Self::Collective { doing: doing.to_string(), message: text_of(error) }
    }

    pub(crate) fn not_built(device: Device) -> Self {
        if matches!(device, Device::Cuda(_)) { Self::NoNccl } else { Self::NoGloo }
    }

    /// Whether another rank brought it about: it failed, is gone, or, though it did not fail, left while this one still needed it.
    pub fn is_of_another_rank(&self) -> bool {
        matches!(
            self,
            Self::RankFailed { .. } | Self::Told(_) | Self::RanksGone { .. } | Self::StoreGone { .. } | Self::RankLeft { .. }
        )
    }
}

/// A failure of the shim as one line.
pub(crate) fn text_of(error: ShimError) -> String {
    match error {
        ShimError::NotBuilt => "this program was built without it".to_string(),
        ShimError::Failed(message) => message,
    }
}

/// `rank 1`, or `ranks 1, 2`.
fn named(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

fn answers(ranks: &[usize]) -> &'static str {
    if ranks.len() == 1 { "answers" } else { "answer" }
}

fn lateness(late: &[usize]) -> String {
    match late {
        [] => "no rank is gone, one is stuck".to_string(),
        [_] => format!("{} has not arrived, though it lives: it is busy elsewhere, or stuck", named(late)),
        _ => format!("{} have not arrived, though they live: they are busy elsewhere, or stuck", named(late)),
    }
}
