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
        Device::Cpu => high_water_mark(&std::fs::read_to_string("/proc/self/status").ok()?),
        Device::Cuda(index) => shim::cuda_peak_bytes(index).ok(),
        _ => None,
    }
}

/// `VmHWM` of a /proc/PID/status, in bytes (<https://man7.org/linux/man-pages/man5/proc_pid_status.5.html>).
fn high_water_mark(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
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
    fn the_high_water_mark_is_read_in_bytes() {
        assert_eq!(high_water_mark("Name:\tx\nVmHWM:\t  205 kB\nVmRSS:\t 100 kB\n"), Some(205 * 1024));
        assert_eq!(high_water_mark("Name:\tx\n"), None);
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
