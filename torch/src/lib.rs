//! Everything about libtorch that the other crates need and tch does not offer in the shape they need it: exact bytes in and
//! out, devices and kinds by name, threads and memory of the CPU, and a guard that turns a C++ exception into an error.
//!
//! This is the only crate in which `unsafe` may appear.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

pub mod fused;
pub mod group;
mod group_error;
mod links;
pub mod mapped;
mod meeting;
pub mod memory;
mod place;
mod pulse;
mod shim;

pub use tch;
use tch::{Device, Kind, TchError, Tensor};

/// What can go wrong between a recipe's words and libtorch.
#[derive(Debug, thiserror::Error)]
pub enum TorchError {
    #[error("unknown device `{0}`: use `cpu` or `cuda:N`")]
    UnknownDevice(String),
    #[error("device `{name}` is not available: this machine shows libtorch {count} CUDA devices; use `cpu` or one of them")]
    NoSuchDevice { name: String, count: i64 },
    #[error("libtorch failed while {doing}: {message}")]
    Failed { doing: String, message: String },
}

/// A device from its recipe name (`cpu`, `cuda`, `cuda:1`), checked to exist.
pub fn device(name: &str) -> Result<Device, TorchError> {
    let index = match name {
        "cpu" => return Ok(Device::Cpu),
        "cuda" => Some(0),
        _ => name.strip_prefix("cuda:").and_then(|digits| digits.parse::<usize>().ok()),
    };
    let index = index.ok_or_else(|| TorchError::UnknownDevice(name.to_string()))?;
    let count = tch::Cuda::device_count();
    if (index as i64) < count { Ok(Device::Cuda(index)) } else { Err(TorchError::NoSuchDevice { name: name.to_string(), count }) }
}

/// Lets the calling thread's work on a GPU run beside that of other threads: it gets a stream of its own, where all threads share one
/// otherwise and their work stands in a row. Work on a CPU is the thread's own anyway.
///
/// # Errors
/// Where there is no such GPU.
pub fn work_beside_others(device: Device) -> Result<(), TorchError> {
    let Device::Cuda(index) = device else { return Ok(()) };
    let failed = |message| TorchError::Failed { doing: format!("making a stream on cuda:{index}"), message };
    shim::own_cuda_stream(index).map_err(|error| match error {
        shim::ShimError::Failed(message) => failed(message),
        shim::ShimError::NotBuilt => failed("this program was built without it".to_string()),
    })
}

/// Whether the device multiplies bf16 matrices faster than f32 ones: CUDA does; a CPU must have the instructions for it, and then it is
/// timed, because some have them and still are slower (seen: AVX512-BF16 without AMX, half the rate of f32).
pub fn bf16_is_faster(device: Device) -> bool {
    if matches!(device, Device::Cuda(_)) {
        return true;
    }
    // Once for a process: a second timing might say otherwise, and two models of one command compute alike.
    static FASTER: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *FASTER.get_or_init(|| {
        let has_units =
            std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("avx512_bf16") || text.contains("amx_bf16"));
        has_units && seconds_to_multiply(Kind::BFloat16, device) < seconds_to_multiply(Kind::Float, device)
    })
}

/// The best of a few products of training's usual shape.
fn seconds_to_multiply(kind: Kind, device: Device) -> f64 {
    let (rows, inputs, outputs) = (512, 1024, 1024);
    let (input, weight) = (Tensor::ones([rows, inputs], (kind, device)), Tensor::ones([outputs, inputs], (kind, device)));
    let seconds = (0..8).map(|_| {
        let start = Instant::now();
        let _ = input.matmul(&weight.transpose(0, 1));
        start.elapsed().as_secs_f64()
    });
    seconds.fold(f64::INFINITY, f64::min)
}

/// A tensor with exactly these bytes. `half::bf16` never goes through tch's own conversion, which stores it as f16
/// (<https://github.com/LaurentMazare/tch-rs/issues/995>).
pub fn from_bytes(bytes: &[u8], shape: &[i64], kind: Kind) -> Result<Tensor, TchError> {
    Tensor::f_from_data_size(bytes, shape, kind)
}

/// Reads a tensor on the CPU straight from where its bytes come from, without a second copy of them in memory.
pub fn read(reader: &mut impl std::io::Read, shape: &[i64], kind: Kind) -> std::io::Result<Tensor> {
    let tensor = Tensor::f_empty(shape, (kind, Device::Cpu)).map_err(std::io::Error::other)?;
    let length = tensor.numel() * kind.elt_size_in_bytes();
    #[allow(unsafe_code)]
    // SAFETY: a new tensor on the CPU is contiguous, of this many bytes, and nobody else has it yet. `read_exact` only writes to the
    // slice, and any bytes are valid in it; should it fail, the tensor goes away unread.
    let bytes = unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<u8>(), length) };
    if length > 0 {
        reader.read_exact(bytes)?;
    }
    Ok(tensor)
}

/// The bytes of a tensor in row-major order, whatever its device and strides.
pub fn to_bytes(tensor: &Tensor) -> Result<Vec<u8>, TchError> {
    let tensor = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
    let elements = tensor.numel();
    let mut bytes = vec![0_u8; elements * tensor.kind().elt_size_in_bytes()];
    tensor.f_copy_data_u8(&mut bytes, elements)?;
    Ok(bytes)
}

/// Token ids as a one-dimensional Int64 tensor on `device`.
pub fn ids_tensor(ids: &[u32], device: Device) -> Tensor {
    let ids: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
    Tensor::from_slice(&ids).to_device(device)
}

/// Positions or row numbers as a one-dimensional Int64 tensor on `device`.
pub fn index_tensor(indices: &[usize], device: Device) -> Tensor {
    let indices: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
    Tensor::from_slice(&indices).to_device(device)
}

/// The values of a tensor of any shape, read back as f32.
pub fn to_f32s(tensor: &Tensor) -> Vec<f32> {
    let tensor = tensor.detach().to_device(Device::Cpu).to_kind(Kind::Float).contiguous();
    let mut values = vec![0_f32; tensor.numel()];
    let count = values.len();
    tensor.copy_data(&mut values, count);
    values
}

/// The values of an integer tensor of any shape, read back as token ids.
pub fn to_ids(tensor: &Tensor) -> Vec<u32> {
    let tensor = tensor.detach().to_device(Device::Cpu).to_kind(Kind::Int64).contiguous();
    let mut values = vec![0_i64; tensor.numel()];
    let count = values.len();
    tensor.copy_data(&mut values, count);
    values.into_iter().map(|value| value as u32).collect()
}

/// Sets the CPU threads that libtorch uses for operations started from *this* thread.
///
/// The setting is per thread, so that a target and a drafter on two threads each keep their own cores.
pub fn set_num_threads(threads: usize) {
    tch::set_num_threads(threads.max(1) as i32);
}

/// Tells the C library to keep freed memory for the next tensor instead of giving it back to the system.
///
/// By default every tensor above some size is mapped afresh, and the kernel clears each of its pages again: 7 % of a training step of
/// the quickstart (5.9 against 5.5 s). To be called once, before the first tensor. Does nothing where the C library is not glibc.
pub fn keep_freed_memory() {
    #[cfg(target_env = "gnu")]
    {
        /// What the heap grows by at a time.
        const GROWTH: libc::c_int = 64 << 20;
        #[allow(unsafe_code)]
        // SAFETY: mallopt only sets parameters of the allocator, and is called before other threads exist.
        unsafe {
            libc::mallopt(libc::M_MMAP_MAX, 0);
            libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
            libc::mallopt(libc::M_TOP_PAD, GROWTH);
        }
    }
}

/// Gives memory that was freed back to the system in spite of [`keep_freed_memory`]: to be called once something large is gone for good
/// whose place nothing of its size will take.
pub fn release_freed_memory() {
    #[cfg(target_env = "gnu")]
    {
        #[allow(unsafe_code)]
        // SAFETY: malloc_trim only touches pages that no allocation uses, under the allocator's own locks.
        unsafe {
            libc::malloc_trim(0);
        }
    }
}

/// The cores that this process may use.
pub fn available_cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Runs `body` and turns a panic in it, such as tch makes of a C++ exception, into an error that says what was being done.
///
/// Inside the hot forward the panicking tensor methods keep formulas readable; this guard stands at the edge of each step.
pub fn guarded<T>(doing: &str, body: impl FnOnce() -> T) -> Result<T, TorchError> {
    catch_unwind(AssertUnwindSafe(body)).map_err(|panic| {
        let message = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("a panic without a message");
        // libtorch appends a C++ stack trace after the first line, which tells a user nothing.
        let message = message.lines().next().unwrap_or_default().to_string();
        TorchError::Failed { doing: doing.to_string(), message }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_stream_of_its_own_is_refused_where_there_is_no_gpu() {
        assert!(work_beside_others(Device::Cpu).is_ok());
        if tch::Cuda::device_count() == 0 {
            let message = work_beside_others(Device::Cuda(0)).unwrap_err().to_string();
            assert!(message.contains("making a stream on cuda:0"), "{message}");
        }
    }

    #[test]
    fn bf16_bytes_survive_both_ways() {
        let bytes = [0x80, 0x3f, 0x00, 0xc0]; // 1.0 and -2.0 in bf16.
        let tensor = from_bytes(&bytes, &[2], Kind::BFloat16).unwrap();
        assert_eq!(to_f32s(&tensor), [1.0, -2.0]);
        assert_eq!(to_bytes(&tensor).unwrap(), bytes);
    }

    #[test]
    fn a_tensor_is_read_from_its_bytes_and_too_few_are_an_error() {
        let bytes: Vec<u8> = [1.5_f32, -2.0, 8.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(to_f32s(&read(&mut bytes.as_slice(), &[3, 1], Kind::Float).unwrap()), [1.5, -2.0, 8.0]);
        assert_eq!(read(&mut bytes.as_slice(), &[0, 5], Kind::Float).unwrap().size(), [0, 5]);
        assert!(read(&mut bytes.as_slice(), &[4], Kind::Float).is_err());
    }

    #[test]
    fn bytes_are_in_row_major_order_for_any_strides() {
        let tensor = Tensor::from_slice(&[1_i64, 2, 3, 4, 5, 6]).view([2, 3]);
        assert_eq!(to_ids(&tensor.transpose(0, 1)), [1, 4, 2, 5, 3, 6]);
        assert_eq!(to_bytes(&tensor.transpose(0, 1)).unwrap()[8], 4);
    }

    #[test]
    fn a_cpp_exception_becomes_an_error() {
        let error =
            guarded("adding", || Tensor::ones([2], (Kind::Float, Device::Cpu)) + Tensor::ones([3], (Kind::Float, Device::Cpu)))
                .unwrap_err();
        assert!(error.to_string().starts_with("libtorch failed while adding: "), "{error}");
    }

    #[test]
    fn devices_are_checked() {
        assert_eq!(device("cpu").unwrap(), Device::Cpu);
        assert!(matches!(device("tpu"), Err(TorchError::UnknownDevice(_))));
        assert!(matches!(device("cuda:99"), Err(TorchError::NoSuchDevice { .. })));
    }
}
