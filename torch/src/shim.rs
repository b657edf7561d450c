//! The C interface of shim/shim.cpp, wrapped so that nothing outside this file touches a raw handle.

use std::ffi::{CStr, CString, c_char, c_int};
use std::marker::{PhantomData, PhantomPinned};
use std::ptr;
use std::time::Duration;

use tch::Tensor;
use torch_sys::C_tensor;

/// A C++ object that Rust only ever points to.
#[repr(C)]
struct Opaque<T> {
    _data: [u8; 0],
    _marker: PhantomData<(*mut T, PhantomPinned)>,
}
enum StoreKind {}
enum GroupKind {}
enum WorkKind {}
type StorePtr = *mut Opaque<StoreKind>;
type GroupPtr = *mut Opaque<GroupKind>;
type WorkPtr = *mut Opaque<WorkKind>;

#[allow(unsafe_code)]
unsafe extern "C" {
    fn dh_error() -> *const c_char;
    fn dh_free(bytes: *mut u8);
    fn dh_quiet();
    fn dh_store_open(host: *const c_char, port: u16, serve: c_int, timeout_ms: i64, out: *mut StorePtr) -> c_int;
    fn dh_store_set(store: StorePtr, key: *const c_char, bytes: *const u8, length: usize) -> c_int;
    fn dh_store_add(store: StorePtr, key: *const c_char, amount: i64, out: *mut i64) -> c_int;
    fn dh_store_has(store: StorePtr, key: *const c_char, out: *mut c_int) -> c_int;
    fn dh_store_get(store: StorePtr, key: *const c_char, out: *mut *mut u8, length: *mut usize) -> c_int;
    fn dh_store_get_lines(s: StorePtr, keys: *const *const c_char, count: usize, out: *mut *mut u8, length: *mut usize) -> c_int;
    fn dh_store_free(store: StorePtr);
    fn dh_group_gloo(
        store: StorePtr,
        prefix: *const c_char,
        rank: c_int,
        world: c_int,
        host: *const c_char,
        timeout_ms: i64,
        out: *mut GroupPtr,
    ) -> c_int;
    fn dh_group_nccl(
        store: StorePtr,
        prefix: *const c_char,
        rank: c_int,
        world: c_int,
        device: c_int,
        timeout_ms: i64,
        out: *mut GroupPtr,
    ) -> c_int;
    fn dh_group_abort(group: GroupPtr) -> c_int;
    fn dh_group_shutdown(group: GroupPtr) -> c_int;
    fn dh_group_free(group: GroupPtr);
    fn dh_all_gather(group: GroupPtr, shard: *const C_tensor, out: *mut WorkPtr) -> c_int;
    fn dh_reduce_scatter(group: GroupPtr, whole: *const C_tensor, out: *mut WorkPtr) -> c_int;
    fn dh_all_reduce(group: GroupPtr, values: *const C_tensor, out: *mut WorkPtr) -> c_int;
    fn dh_work_wait(work: WorkPtr) -> c_int;
    fn dh_work_is_done(work: WorkPtr, out: *mut c_int) -> c_int;
    fn dh_work_output(work: WorkPtr, out: *mut *mut C_tensor) -> c_int;
    fn dh_work_free(work: WorkPtr);
    fn dh_fused_adamw(
        params: *const *const C_tensor,
        grads: *const *const C_tensor,
        exp_avgs: *const *const C_tensor,
        exp_avg_sqs: *const *const C_tensor,
        count: usize,
        step: f64,
        learning_rate: f64,
        beta1: f64,
        beta2: f64,
        weight_decay: f64,
        epsilon: f64,
        gradient_scale: f64,
    ) -> c_int;
    fn dh_cuda_set_device(device: c_int) -> c_int;
    fn dh_cuda_own_stream(device: c_int) -> c_int;
    fn dh_cuda_peak_bytes(device: c_int, out: *mut u64) -> c_int;
}

/// What a call across the border can end with.
#[derive(Debug)]
pub(crate) enum ShimError {
    /// The headers for it were absent when this program was compiled.
    NotBuilt,
    /// The first line of the C++ exception's message.
    Failed(String),
}

fn check(status: c_int) -> Result<(), ShimError> {
    match status {
        0 => Ok(()),
        2 => Err(ShimError::NotBuilt),
        _ => {
            #[allow(unsafe_code)]
            // SAFETY: the message belongs to this thread and stays until its next call fails.
            let message = unsafe { CStr::from_ptr(dh_error()) }.to_string_lossy();
            Err(ShimError::Failed(message.lines().next().unwrap_or_default().trim().to_string()))
        }
    }
}

/// A C string; what follows a zero byte is cut off.
fn text(value: &str) -> CString {
    let until_zero = value.split('\0').next().unwrap_or_default();
    CString::new(until_zero).unwrap_or_default()
}

fn milliseconds(timeout: Duration) -> i64 {
    i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX / 2_000_000).clamp(1, i64::MAX / 2_000_000)
}

/// Copies bytes that C++ allocated, and frees them.
fn taken(bytes: *mut u8, length: usize) -> Vec<u8> {
    #[allow(unsafe_code)]
    // SAFETY: the shim just allocated at least `length` bytes there and gave them away.
    unsafe {
        let copy = std::slice::from_raw_parts(bytes, length).to_vec();
        dh_free(bytes);
        copy
    }
}

/// Keeps c10d's own reports off stderr, unless TORCH_CPP_LOG_LEVEL asks for them.
pub(crate) fn quiet() {
    #[allow(unsafe_code)]
    // SAFETY: sets one integer, before there are process groups.
    unsafe {
        dh_quiet();
    }
}

/// One connection to a `TCPStore`; the one that serves also holds the server. Blocks while another thread uses it.
pub(crate) struct Store(StorePtr);

#[allow(unsafe_code)]
// SAFETY: TCPStore guards each operation by a mutex (`activeOpLock_`).
unsafe impl Send for Store {}
#[allow(unsafe_code)]
// SAFETY: as above.
unsafe impl Sync for Store {}

#[allow(unsafe_code)]
// SAFETY, in all methods: the handle is alive for as long as `self`, and the strings and slices outlive the call.
impl Store {
    pub(crate) fn open(host: &str, port: u16, serve: bool, timeout: Duration) -> Result<Self, ShimError> {
        let mut out = ptr::null_mut();
        check(unsafe { dh_store_open(text(host).as_ptr(), port, c_int::from(serve), milliseconds(timeout), &raw mut out) })?;
        Ok(Self(out))
    }

    pub(crate) fn set(&self, key: &str, bytes: &[u8]) -> Result<(), ShimError> {
        check(unsafe { dh_store_set(self.0, text(key).as_ptr(), bytes.as_ptr(), bytes.len()) })
    }

    pub(crate) fn add(&self, key: &str, amount: i64) -> Result<i64, ShimError> {
        let mut sum = 0;
        check(unsafe { dh_store_add(self.0, text(key).as_ptr(), amount, &raw mut sum) })?;
        Ok(sum)
    }

    pub(crate) fn has(&self, key: &str) -> Result<bool, ShimError> {
        let mut found = 0;
        check(unsafe { dh_store_has(self.0, text(key).as_ptr(), &raw mut found) })?;
        Ok(found != 0)
    }

    /// The value of a key that exists.
    pub(crate) fn get(&self, key: &str) -> Result<Vec<u8>, ShimError> {
        let (mut bytes, mut length) = (ptr::null_mut(), 0);
        check(unsafe { dh_store_get(self.0, text(key).as_ptr(), &raw mut bytes, &raw mut length) })?;
        Ok(taken(bytes, length))
    }

    /// The values, each one line of text, of keys that exist.
    pub(crate) fn get_lines(&self, keys: &[String]) -> Result<Vec<String>, ShimError> {
        let keys: Vec<CString> = keys.iter().map(|key| text(key)).collect();
        let pointers: Vec<*const c_char> = keys.iter().map(|key| key.as_ptr()).collect();
        let (mut bytes, mut length) = (ptr::null_mut(), 0);
        check(unsafe { dh_store_get_lines(self.0, pointers.as_ptr(), pointers.len(), &raw mut bytes, &raw mut length) })?;
        Ok(String::from_utf8_lossy(&taken(bytes, length)).lines().map(str::to_string).collect())
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        #[allow(unsafe_code)]
        // SAFETY: the handle is used no more.
        unsafe {
            dh_store_free(self.0);
        }
    }
}

/// A c10d process group.
pub(crate) struct Backend(GroupPtr);

#[allow(unsafe_code)]
// SAFETY: c10d's groups have no thread affinity; `Group` starts collectives from one thread only, and `abort`, the one call that comes
// from another, is made for that.
unsafe impl Send for Backend {}
#[allow(unsafe_code)]
// SAFETY: as above.
unsafe impl Sync for Backend {}

#[allow(unsafe_code)]
// SAFETY, in all methods: the handle is alive for as long as `self`, and tensors and strings outlive the call; the shim itself holds on
// to the tensors of a collective for as long as that runs.
impl Backend {
    /// `host` is where the others reach this rank; `None` leaves that to c10d.
    pub(crate) fn gloo(
        store: &Store,
        prefix: &str,
        (rank, world): (usize, usize),
        host: Option<&str>,
        timeout: Duration,
    ) -> Result<Self, ShimError> {
        let (mut out, prefix, host) = (ptr::null_mut(), text(prefix), text(host.unwrap_or_default()));
        let timeout = milliseconds(timeout);
        check(unsafe {
            dh_group_gloo(store.0, prefix.as_ptr(), rank as c_int, world as c_int, host.as_ptr(), timeout, &raw mut out)
        })?;
        Ok(Self(out))
    }

    /// On this thread's current device, which is `device`.
    pub(crate) fn nccl(
        store: &Store,
        prefix: &str,
        (rank, world): (usize, usize),
        device: usize,
        timeout: Duration,
    ) -> Result<Self, ShimError> {
        let (mut out, prefix, timeout) = (ptr::null_mut(), text(prefix), milliseconds(timeout));
        check(unsafe {
            dh_group_nccl(store.0, prefix.as_ptr(), rank as c_int, world as c_int, device as c_int, timeout, &raw mut out)
        })?;
        Ok(Self(out))
    }

    pub(crate) fn abort(&self) {
        let _ = check(unsafe { dh_group_abort(self.0) });
    }

    pub(crate) fn shutdown(&self) {
        let _ = check(unsafe { dh_group_shutdown(self.0) });
    }

    pub(crate) fn all_gather(&self, shard: &Tensor) -> Result<Work, ShimError> {
        Work::started(|out| unsafe { dh_all_gather(self.0, shard.as_ptr(), out) })
    }

    pub(crate) fn reduce_scatter(&self, whole: &Tensor) -> Result<Work, ShimError> {
        Work::started(|out| unsafe { dh_reduce_scatter(self.0, whole.as_ptr(), out) })
    }

    pub(crate) fn all_reduce(&self, values: &Tensor) -> Result<Work, ShimError> {
        Work::started(|out| unsafe { dh_all_reduce(self.0, values.as_ptr(), out) })
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        #[allow(unsafe_code)]
        // SAFETY: the handle is used no more.
        unsafe {
            dh_group_free(self.0);
        }
    }
}

/// A collective under way, with its tensors.
pub(crate) struct Work(WorkPtr);

#[allow(unsafe_code)]
// SAFETY: c10d's works and tensors have no thread affinity.
unsafe impl Send for Work {}

#[allow(unsafe_code)]
// SAFETY, in all methods: the handle is alive for as long as `self`.
impl Work {
    fn started(start: impl FnOnce(*mut WorkPtr) -> c_int) -> Result<Self, ShimError> {
        let mut out = ptr::null_mut();
        check(start(&raw mut out))?;
        Ok(Self(out))
    }

    /// On the CPU blocks until it is done; on CUDA makes the current stream wait.
    pub(crate) fn wait(&self) -> Result<(), ShimError> {
        check(unsafe { dh_work_wait(self.0) })
    }

    pub(crate) fn is_done(&self) -> Result<bool, ShimError> {
        let mut done = 0;
        check(unsafe { dh_work_is_done(self.0, &raw mut done) })?;
        Ok(done != 0)
    }

    pub(crate) fn output(&self) -> Result<Tensor, ShimError> {
        let mut tensor = ptr::null_mut();
        check(unsafe { dh_work_output(self.0, &raw mut tensor) })?;
        // SAFETY: the shim made the tensor with `new`, as torch-sys does.
        Ok(unsafe { Tensor::from_ptr(tensor) })
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        #[allow(unsafe_code)]
        // SAFETY: the handle is used no more; a collective that still runs keeps its own references.
        unsafe {
            dh_work_free(self.0);
        }
    }
}

/// The numbers of one AdamW step.
pub(crate) struct AdamWNumbers {
    pub(crate) step: f64,
    pub(crate) learning_rate: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) weight_decay: f64,
    pub(crate) epsilon: f64,
    pub(crate) gradient_scale: f64,
}

/// `lists` are parameters, gradients, first and second moments, of equal lengths.
pub(crate) fn fused_adamw(lists: [&[Tensor]; 4], numbers: &AdamWNumbers) -> Result<(), ShimError> {
    let pointers = lists.map(|list| list.iter().map(Tensor::as_ptr).collect::<Vec<_>>());
    let [params, grads, exp_avgs, exp_avg_sqs] = &pointers;
    let n = numbers;
    #[allow(unsafe_code)]
    // SAFETY: the caller has checked that the lists are equally long, and the tensors outlive the call.
    check(unsafe {
        dh_fused_adamw(
            params.as_ptr(),
            grads.as_ptr(),
            exp_avgs.as_ptr(),
            exp_avg_sqs.as_ptr(),
            params.len(),
            n.step,
            n.learning_rate,
            n.beta1,
            n.beta2,
            n.weight_decay,
            n.epsilon,
            n.gradient_scale,
        )
    })
}

/// Makes a CUDA device this thread's current one, where this program was built to do so; NCCL and new streams take it.
pub(crate) fn set_cuda_device(device: tch::Device) {
    if let tch::Device::Cuda(index) = device {
        #[allow(unsafe_code)]
        // SAFETY: sets one integer of this thread.
        let _ = check(unsafe { dh_cuda_set_device(index as c_int) });
    }
}

/// Lets this thread's work on a CUDA device go to a stream of its own.
pub(crate) fn own_cuda_stream(device: usize) -> Result<(), ShimError> {
    #[allow(unsafe_code)]
    // SAFETY: plain numbers; what it changes is this thread's.
    check(unsafe { dh_cuda_own_stream(device as c_int) })
}

/// The most bytes that tensors have held on a CUDA device at once.
pub(crate) fn cuda_peak_bytes(device: usize) -> Result<u64, ShimError> {
    let mut bytes = 0;
    #[allow(unsafe_code)]
    // SAFETY: writes one integer.
    check(unsafe { dh_cuda_peak_bytes(device as c_int, &raw mut bytes) })?;
    Ok(bytes)
}
