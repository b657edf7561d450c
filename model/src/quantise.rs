//! f32 to the kinds that GGUF files are written in, the reverse of `dequantise`; values are rounded as ggml rounds them.

use data::gguf::GgmlKind;
use half::{bf16, f16};
use rayon::prelude::*;

/// Elements that one task of the thread pool converts, a whole number of blocks.
const TASK_ELEMENTS: usize = 16 * 1024;
/// The largest quantum of Q8_0.
const LARGEST_QUANTUM: f32 = 127.0;

/// A kind that can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantisation {
    F32,
    F16,
    Bf16,
    /// Blocks of 32 signed bytes with one f16 scale.
    Q8_0,
}

impl Quantisation {
    /// The kind as it stands in a file.
    pub fn kind(self) -> GgmlKind {
        match self {
            Quantisation::F32 => GgmlKind::F32,
            Quantisation::F16 => GgmlKind::F16,
            Quantisation::Bf16 => GgmlKind::BF16,
            Quantisation::Q8_0 => GgmlKind::Q8_0,
        }
    }
}

/// The bytes of `values`, which are a whole number of blocks.
///
/// # Errors
/// The first value that the kind cannot hold: one that is not finite, or larger than its largest.
pub fn quantise(quantisation: Quantisation, values: &[f32]) -> Result<Vec<u8>, f32> {
    let (block, size) = (quantisation.kind().block_elements(), quantisation.kind().block_bytes());
    let mut bytes = vec![0; values.len() / block * size];
    bytes.par_chunks_mut(TASK_ELEMENTS / block * size).zip(values.par_chunks(TASK_ELEMENTS)).try_for_each(
        |(bytes, values)| {
            let mut blocks = bytes.chunks_exact_mut(size).zip(values.chunks_exact(block));
            blocks.try_for_each(|(bytes, values)| match quantisation {
                Quantisation::F32 => plain(bytes, values[0], values[0].is_finite(), values[0].to_le_bytes()),
                Quantisation::F16 => {
                    let half = f16::from_f32(values[0]);
                    plain(bytes, values[0], half.is_finite(), half.to_le_bytes())
                }
                Quantisation::Bf16 => {
                    let brain = bf16::from_f32(values[0]);
                    plain(bytes, values[0], brain.is_finite(), brain.to_le_bytes())
                }
                Quantisation::Q8_0 => q8_0(bytes, values),
            })
        },
    )?;
    Ok(bytes)
}

fn plain<const N: usize>(bytes: &mut [u8], value: f32, fits: bool, stored: [u8; N]) -> Result<(), f32> {
    bytes.copy_from_slice(&stored);
    if fits { Ok(()) } else { Err(value) }
}

/// The scale is the largest magnitude over 127, stored as f16; quanta are taken by the scale before that rounding, halves away from zero.
fn q8_0(bytes: &mut [u8], values: &[f32]) -> Result<(), f32> {
    if let Some(&value) = values.iter().find(|value| !value.is_finite()) {
        return Err(value);
    }
    let largest = values.iter().fold(0_f32, |largest, value| largest.max(value.abs()));
    let scale = largest / LARGEST_QUANTUM;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let stored = f16::from_f32(scale);
    if !stored.is_finite() {
        return Err(largest);
    }
    bytes[..2].copy_from_slice(&stored.to_le_bytes());
    for (byte, value) in bytes[2..].iter_mut().zip(values) {
        *byte = (value * inverse).round() as i8 as u8;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::dequantise::dequantise;
    use safetensors::SafeTensors;

    const GOLDEN: &[u8] = include_bytes!("../../tests/golden/logits/quantise.safetensors");

    #[test]
    fn every_kind_gives_the_gguf_packages_bytes_exactly() {
        let file = SafeTensors::deserialize(GOLDEN).unwrap();
        let values = file.tensor("values").unwrap();
        let values: Vec<f32> = values.data().chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
        for quantisation in [Quantisation::F32, Quantisation::F16, Quantisation::Bf16, Quantisation::Q8_0] {
            let name = quantisation.kind().name();
            let expected = file.tensor(name).unwrap();
            assert_eq!(quantise(quantisation, &values).unwrap(), expected.data(), "{name}");
            let repeats = 3 * TASK_ELEMENTS / values.len() + 1;
            assert_eq!(
                quantise(quantisation, &values.repeat(repeats)).unwrap(),
                expected.data().repeat(repeats),
                "seams of {name}"
            );
        }
    }

    #[test]
    fn a_value_stays_within_half_a_step() {
        let values: Vec<f32> = (0..4096).map(|index| ((index * 7919 % 4096) as f32 - 2048.0) / 97.0).collect();
        let back = dequantise(GgmlKind::Q8_0, &quantise(Quantisation::Q8_0, &values).unwrap(), values.len());
        for (block, back) in values.chunks(32).zip(back.chunks(32)) {
            let step = block.iter().fold(0_f32, |largest, value| largest.max(value.abs())) / 127.0;
            // The scale itself is rounded to f16, by which up to 127 steps are off.
            let room = step * (0.5 + 127.0 / 2048.0);
            block.iter().zip(back).for_each(|(value, back)| assert!((value - back).abs() <= room, "{value} {back}"));
        }
        assert_eq!(quantise(Quantisation::Q8_0, &[0.0; 32]).unwrap(), [0; 34]);
    }

    #[test]
    fn values_that_a_kind_cannot_hold_are_named() {
        let with = |value: f32| {
            let mut values = [0.5_f32; 64];
            values[40] = value;
            values
        };
        for quantisation in [Quantisation::F32, Quantisation::F16, Quantisation::Bf16, Quantisation::Q8_0] {
            assert!(quantise(quantisation, &with(f32::NAN)).unwrap_err().is_nan(), "{quantisation:?}");
            assert_eq!(quantise(quantisation, &with(f32::INFINITY)), Err(f32::INFINITY), "{quantisation:?}");
            assert!(quantise(quantisation, &with(65504.0)).is_ok(), "{quantisation:?}");
        }
        assert_eq!(quantise(Quantisation::F16, &with(-65520.0)), Err(-65520.0));
        assert_eq!(quantise(Quantisation::Q8_0, &with(1e7)), Err(1e7));
        assert_eq!(quantise(Quantisation::Bf16, &with(3.4e38)), Err(3.4e38));
        assert!(quantise(Quantisation::Bf16, &with(3.3e38)).is_ok());
    }
}
