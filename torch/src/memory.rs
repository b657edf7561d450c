//! What a device holds and how fast it multiplies: the measured sides of a run's memory and time plan.

use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};

use crate::shim;

/// The most memory that has been in use at once, in bytes.
///
/// On the CPU that is the whole process's resident memory (`VmHWM`); on CUDA what tensors held, for which the program must have been
/// built with `--features nccl`. `None` where it cannot be known.
pub fn peak_memory_bytes(device: Device) -> Option<u64> {
    match device {
        // <https://man7.org/linux/man-pages/man5/proc_pid_status.5.html>
        Device::Cpu => kibibytes(&std::fs::read_to_string("/proc/self/status").ok()?, "VmHWM:"),
        Device::Cuda(index) => shim::cuda_peak_bytes(index).ok(),
        _ => None,
    }
}

/// The line `name` of a file such as /proc/self/status or /proc/meminfo, in bytes.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// Checks that a device has room for so many more bytes, before they are asked for.
///
/// The allocator of a CPU promises memory that is not there, and whoever then writes to it is killed without a word. CUDA's refuses by
/// itself; there, and where the system does not tell, everything passes.
///
/// # Errors
/// The bytes that are free, which are fewer.
pub fn check_room(bytes: u128, device: Device) -> Result<(), u64> {
    let free = || if device == Device::Cpu { free_memory_bytes() } else { None };
    match free() {
        Some(few) if u128::from(few) < bytes => {
            // What the C library keeps of freed memory is there for us, but the system counts it as taken.
            crate::release_freed_memory();
            free().filter(|&free| u128::from(free) < bytes).map_or(Ok(()), Err)
        }
        _ => Ok(()),
    }
}

/// What a process may still take on a device; `None` where that cannot be known, as on CUDA, whose allocator refuses by itself.
pub fn free_bytes(device: Device) -> Option<u64> {
    crate::release_freed_memory();
    if device == Device::Cpu { free_memory_bytes() } else { None }
}

/// What a process may still take without others being pushed out: of the machine, and of its container where that has a limit.
fn free_memory_bytes() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = read("/proc/meminfo").and_then(|text| kibibytes(&text, "MemAvailable:"));
    let limit = read("/sys/fs/cgroup/memory.max").and_then(|text| text.trim().parse::<u64>().ok());
    let container = limit.and_then(|limit| {
        let used: u64 = read("/sys/fs/cgroup/memory.current")?.trim().parse().ok()?;
        // Pages of files, which the kernel takes back before it refuses anybody.
        let statistics = read("/sys/fs/cgroup/memory.stat")?;
        let file = statistics.lines().find_map(|line| line.strip_prefix("inactive_file ")?.trim().parse().ok()).unwrap_or(0);
        Some(limit.saturating_sub(used.saturating_sub(file)))
    });
    [machine, container].into_iter().flatten().min()
}

/// Rows, inputs and outputs of products as they occur in training.
const SHAPES: [(i64, i64, i64); 2] = [(1024, 1024, 1024), (1024, 576, 1536)];

/// The best rate at which the device multiplies matrices of this kind, in floating-point operations per second, with the threads that
/// are set, found within about so many seconds. Zero where the device cannot.
pub fn matrix_rate(kind: Kind, device: Device, seconds: f64) -> f64 {
    let budget = Duration::from_secs_f64(seconds.clamp(0.0, 3600.0)) / SHAPES.len() as u32;
    SHAPES.iter().map(|&shape| best_rate(kind, device, shape, budget)).fold(0.0, f64::max)
}

fn best_rate(kind: Kind, device: Device, (rows, inputs, outputs): (i64, i64, i64), budget: Duration) -> f64 {
    let _guard = tch::no_grad_guard();
    let (Ok(input), Ok(weight)) =
        (Tensor::f_ones([rows, inputs], (kind, device)), Tensor::f_ones([outputs, inputs], (kind, device)))
    else {
        return 0.0;
    };
    let weight = weight.transpose(0, 1);
    let finish = || {
        if let Device::Cuda(index) = device {
            tch::Cuda::synchronize(index as i64);
        }
    };
    // On CUDA one product is shorter than the launch of it, so a few are timed together.
    let repeats = if matches!(device, Device::Cuda(_)) { 16 } else { 1 };
    let (begin, mut best) = (Instant::now(), 0.0_f64);
    loop {
        let start = Instant::now();
        for _ in 0..repeats {
            if input.f_matmul(&weight).is_err() {
                return 0.0;
            }
        }
        finish();
        let operations = (2 * rows * inputs * outputs * repeats) as f64;
        best = best.max(operations / start.elapsed().as_secs_f64().max(1e-9));
        if begin.elapsed() >= budget {
            return best;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn lines_in_kibibytes_are_read_in_bytes() {
        assert_eq!(kibibytes("Name:\tx\nVmHWM:\t  205 kB\nVmRSS:\t 100 kB\n", "VmHWM:"), Some(205 * 1024));
        assert_eq!(kibibytes("Name:\tx\n", "VmHWM:"), None);
    }

    #[test]
    fn more_than_the_machine_has_is_refused_with_what_is_free() {
        let free = check_room(1 << 60, Device::Cpu).unwrap_err();
        assert!(free > 1 << 20 && free < 1 << 50, "{free}");
        assert_eq!(check_room(1 << 20, Device::Cpu), Ok(()));
        assert_eq!(check_room(1 << 60, Device::Cuda(0)), Ok(()));
    }

    #[test]
    fn the_peak_grows_with_what_is_held_and_stays() {
        let before = peak_memory_bytes(Device::Cpu).unwrap();
        let bytes = 256 << 20;
        drop(Tensor::ones([bytes], (Kind::Uint8, Device::Cpu)));
        let after = peak_memory_bytes(Device::Cpu).unwrap();
        assert!(before > 1 << 20 && after >= bytes as u64, "{before} then {after}");
    }

    #[test]
    fn a_rate_is_found_within_its_time() {
        let start = Instant::now();
        let rate = matrix_rate(Kind::Float, Device::Cpu, 0.1);
        assert!(rate > 1e8 && rate < 1e15, "{rate}");
        assert!(start.elapsed() < Duration::from_secs(20));
        assert_eq!(matrix_rate(Kind::Float, Device::Cuda(99), 0.1), 0.0);
    }
}
