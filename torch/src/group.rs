//! Process groups: the ranks of a run exchange tensors and words over libtorch's own c10d, Gloo between CPUs, NCCL between GPUs.
//!
//! Sources: torch/csrc/distributed/c10d in <https://github.com/pytorch/pytorch>; rendezvous as in torch/distributed/rendezvous.py there.
//! Every rank must begin the same collectives in the same order. A collective that fails is explained by what `pulse` knows: the rank
//! that said why it failed, else the ranks whose pulse stands still, else who is late. After an error the group is of no more use but
//! for `fail`, which tells the others.
//!
//! Rank 0 keeps the store (except under torchrun, whose agent does). So at its end it waits up to five seconds until every other rank
//! that lives has heard that it ends; a rank that has heard needs the store no more.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use tch::{Device, TchError, Tensor};

pub use crate::group_error::GroupError;
use crate::links::Links;
pub use crate::place::{Place, PlaceError};
use crate::pulse::STANDS_STILL;
use crate::shim::{self, Work};
use crate::to_bytes;

/// The ranks that work together, seen from one of them. May move to another thread, but is used from one at a time. At the regular end
/// of the work, when all ranks have come through their last collective, it is dropped.
pub struct Group {
    rank: usize,
    world: usize,
    device: Device,
    links: Option<Arc<Links>>,
    _one_thread: PhantomData<Cell<()>>,
}

impl Group {
    /// A world of one: no store, no threads, every collective is the identity.
    pub fn alone() -> Self {
        Self::alone_on(Device::Cpu)
    }

    fn alone_on(device: Device) -> Self {
        Self { rank: 0, world: 1, device, links: None, _one_thread: PhantomData }
    }

    /// Meets the other ranks, within `timeout`, which is also the limit of each collective. Gloo for `Device::Cpu`; NCCL for CUDA, whose
    /// device becomes this process's current one. A world of one needs no store.
    pub fn join(place: &Place, device: Device, timeout: Duration) -> Result<Self, GroupError> {
        if place.world == 1 {
            shim::set_cuda_device(device);
            return Ok(Self::alone_on(device));
        }
        check_device(device)?;
        shim::set_cuda_device(device);
        let links = Links::new(place, device, timeout)?;
        Ok(Self { rank: place.rank, world: place.world, device, links: Some(Arc::new(links)), _one_thread: PhantomData })
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn world(&self) -> usize {
        self.world
    }

    pub fn is_alone(&self) -> bool {
        self.world == 1
    }

    /// Whether this is rank 0.
    pub fn leads(&self) -> bool {
        self.rank == 0
    }

    /// Every rank's `[n]` → `[world · n]`, started now and taken by `Pending::wait`, so that it overlaps with what is computed in
    /// between. `shard_n` must not be written to before that. Alone, the result is the shard's own memory.
    pub fn start_all_gather(&self, shard_n: &Tensor) -> Result<Pending, GroupError> {
        let Some(links) = &self.links else { return Ok(Pending(Inner::Ready(shard_n.f_detach()?))) };
        let work = links.start("all_gather", |backend| backend.all_gather(shard_n))?;
        Ok(Pending(Inner::Started { work, doing: "all_gather", links: Arc::clone(links) }))
    }

    /// The sum over ranks of `[world · n]`; this rank's slice `[n]`.
    pub fn reduce_scatter(&self, whole: &Tensor) -> Result<Tensor, GroupError> {
        let Some(links) = &self.links else { return Ok(whole.f_detach_copy()?) };
        let work = links.start("reduce_scatter", |backend| backend.reduce_scatter(whole))?;
        links.finish("reduce_scatter", &work)
    }

    /// Each value becomes its sum over the ranks, the same bits on all of them.
    pub fn all_reduce_sum(&self, values: &mut [f64]) -> Result<(), GroupError> {
        let Some(links) = self.links.as_ref().filter(|_| !values.is_empty()) else { return Ok(()) };
        let tensor = Tensor::f_from_slice(values)?.f_to_device(self.device)?;
        let work = links.start("all_reduce", |backend| backend.all_reduce(&tensor))?;
        links.finish_on_host("all_reduce", &work)?;
        let sums = tensor.f_to_device(Device::Cpu)?;
        Ok(sums.f_copy_data(values, values.len())?)
    }

    /// Every rank's bytes, of any length, in the order of ranks.
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        let Some(links) = &self.links else { return Ok(vec![bytes.to_vec()]) };
        let gather = |shard: &Tensor| -> Result<Tensor, GroupError> {
            let shard = shard.f_to_device(self.device)?;
            let work = links.start("all_gather", |backend| backend.all_gather(&shard))?;
            links.finish_on_host("all_gather", &work)?;
            Ok(work.output().map_err(|error| GroupError::collective("all_gather", error))?.f_to_device(Device::Cpu)?)
        };
        let lengths = Vec::<i64>::try_from(gather(&Tensor::f_from_slice(&[bytes.len() as i64])?)?)?;
        let longest = lengths.iter().copied().max().unwrap_or_default() as usize;
        if longest == 0 {
            return Ok(vec![Vec::new(); self.world]);
        }
        let mut padded = bytes.to_vec();
        padded.resize(longest, 0);
        let all = to_bytes(&gather(&Tensor::f_from_slice(&padded)?)?)?;
        Ok(all.chunks(longest).zip(lengths).map(|(chunk, length)| chunk[..length as usize].to_vec()).collect())
    }

    /// Rank 0's word to those that wait in `await_announcement`; it returns at once. A key is used once.
    pub fn announce(&self, key: &str, bytes: &[u8]) -> Result<(), GroupError> {
        if !self.leads() {
            return Err(GroupError::NotRankZero(self.rank));
        }
        let Some(links) = &self.links else { return Ok(()) };
        links.pulse.announce(key, bytes).map_err(|message| {
            let error = GroupError::Store { address: links.address.clone(), doing: format!("announcing `{key}`"), message };
            links.verdict(&links.pulse.view(STANDS_STILL), "announcing", true).unwrap_or(error)
        })
    }

    /// Waits, for as long as it takes, for rank 0 to announce something under this key; ends with an error when a rank dies or fails
    /// meanwhile (after 15 seconds without its pulse), or when rank 0 leaves.
    pub fn await_announcement(&self, key: &str) -> Result<Vec<u8>, GroupError> {
        let Some(links) = &self.links else { return Err(GroupError::NobodyAnnounces(key.to_string())) };
        let doing = format!("waiting for rank 0 to announce `{key}`");
        let found = links.pulse.await_announcement(key, |view| links.verdict(view, &doing, false));
        found.inspect_err(|error| links.remember(error))
    }

    /// Waits, for as long as it takes, until every rank has called this as often as this one: for work that each does for itself and that
    /// takes the one hours longer than the other. Ends with an error when a rank dies, fails or leaves meanwhile. `meanwhile` is called a
    /// few times a second.
    pub fn meet(&self, meanwhile: &mut dyn FnMut()) -> Result<(), GroupError> {
        let Some(links) = &self.links else { return Ok(()) };
        let met = links.pulse.arrive(meanwhile, |view| links.verdict(view, "waiting for the others to be through", true));
        met.inspect_err(|error| links.remember(error))
    }

    /// Tells the others why this rank ends with an error, and leaves the group; to be called before the process ends. The others'
    /// collectives fail with this message. Where the error came from another rank, that rank stays the one to blame.
    pub fn fail(&self, message: &str) {
        if let Some(links) = &self.links {
            links.end(Some(message));
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(links) = &self.links {
            links.end(std::thread::panicking().then_some("it panicked, see its log"));
        }
    }
}

/// A collective that was started. On CUDA `wait` makes the current stream wait, not the host.
pub struct Pending(Inner);

enum Inner {
    Ready(Tensor),
    Started { work: Work, doing: &'static str, links: Arc<Links> },
}

impl Pending {
    pub fn wait(self) -> Result<Tensor, GroupError> {
        match self.0 {
            Inner::Ready(tensor) => Ok(tensor),
            Inner::Started { work, doing, links } => links.finish(doing, &work),
        }
    }
}

fn check_device(device: Device) -> Result<(), GroupError> {
    match device {
        Device::Cuda(_) if !cfg!(feature = "nccl") => Err(GroupError::NoNccl),
        Device::Cuda(index) if (index as i64) >= tch::Cuda::device_count() => {
            Err(GroupError::NoGpu { index, count: tch::Cuda::device_count() })
        }
        Device::Cpu if !cfg!(gloo) => Err(GroupError::NoGloo),
        Device::Cpu | Device::Cuda(_) => Ok(()),
        other => Err(GroupError::NoBackend(other)),
    }
}

impl From<TchError> for GroupError {
    fn from(error: TchError) -> Self {
        let message = error.to_string().lines().next().unwrap_or_default().to_string();
        Self::Collective { doing: "preparing a collective".to_string(), message }
    }
}
