//! GGUF's stored kinds to f32: plain floats, the 32-element blocks (Q4_0 to Q8_0) and the 256-element K-quants.
//!
//! Every quantised kind computes `scale * q` plus or minus an offset per element; they differ in where the bits of `q` lie. Each
//! function below handles one block and says where. Additions and products happen in ggml's order, so the values are ggml's exactly.

use data::gguf::GgmlKind;
use half::{bf16, f16};
use rayon::prelude::*;

/// Elements that one task of the thread pool converts: enough to outweigh the hand-over, a multiple of every block.
const TASK_ELEMENTS: usize = 16 * 1024;

/// The values of `elements` elements stored as `kind` in `bytes`.
///
/// # Panics
/// When `bytes` is not exactly that many elements: [`data::gguf::GgufFile`] checks sizes when it opens a file.
pub fn dequantise(kind: GgmlKind, bytes: &[u8], elements: usize) -> Vec<f32> {
    let (block_elements, block_bytes) = (kind.block_elements(), kind.block_bytes());
    assert_eq!(elements % block_elements, 0, "{elements} elements are no whole number of {} blocks", kind.name());
    assert_eq!(bytes.len(), elements / block_elements * block_bytes, "{elements} elements of {}", kind.name());

    let block = block_function(kind);
    let mut values = vec![0_f32; elements];
    values.par_chunks_mut(TASK_ELEMENTS).zip(bytes.par_chunks(TASK_ELEMENTS / block_elements * block_bytes)).for_each(
        |(values, bytes)| {
            for (values, bytes) in values.chunks_exact_mut(block_elements).zip(bytes.chunks_exact(block_bytes)) {
                block(bytes, values);
            }
        },
    );
    values
}

fn block_function(kind: GgmlKind) -> fn(&[u8], &mut [f32]) {
    match kind {
        GgmlKind::F32 => |bytes, values| values[0] = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        GgmlKind::F16 => |bytes, values| values[0] = half_at(bytes, 0),
        GgmlKind::BF16 => |bytes, values| values[0] = bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        GgmlKind::Q4_0 => q4_0,
        GgmlKind::Q4_1 => q4_1,
        GgmlKind::Q5_0 => q5_0,
        GgmlKind::Q5_1 => q5_1,
        GgmlKind::Q8_0 => q8_0,
        GgmlKind::Q2_K => q2_k,
        GgmlKind::Q3_K => q3_k,
        GgmlKind::Q4_K => q4_k,
        GgmlKind::Q5_K => q5_k,
        GgmlKind::Q6_K => q6_k,
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Nibble `index` of runs of `run` bytes, each of which holds first its low and then its high nibbles.
fn nibble(bytes: &[u8], index: usize, run: usize) -> u8 {
    let byte = bytes[index / (2 * run) * run + index % run];
    if (index / run).is_multiple_of(2) { byte & 0x0f } else { byte >> 4 }
}

/// Bit pair `index` of runs of 32 bytes, each of which holds its four bit pairs from the lowest to the highest.
fn bit_pair(bytes: &[u8], index: usize) -> u8 {
    bytes[index / 128 * 32 + index % 32] >> (2 * (index / 32 % 4)) & 3
}

/// Scale (f16), 16 bytes of nibbles offset by 8.
fn q4_0(bytes: &[u8], values: &mut [f32]) {
    let (scale, quants) = (half_at(bytes, 0), &bytes[2..]);
    for (index, value) in values.iter_mut().enumerate() {
        *value = scale * f32::from(nibble(quants, index, 16) as i8 - 8);
    }
}

/// Scale and minimum (f16), 16 bytes of nibbles.
fn q4_1(bytes: &[u8], values: &mut [f32]) {
    let (scale, minimum, quants) = (half_at(bytes, 0), half_at(bytes, 2), &bytes[4..]);
    for (index, value) in values.iter_mut().enumerate() {
        *value = scale * f32::from(nibble(quants, index, 16)) + minimum;
    }
}

/// Scale (f16), 32 fifth bits, 16 bytes of nibbles; offset by 16.
fn q5_0(bytes: &[u8], values: &mut [f32]) {
    let (scale, high, quants) = (half_at(bytes, 0), &bytes[2..6], &bytes[6..]);
    for (index, value) in values.iter_mut().enumerate() {
        *value = scale * f32::from((nibble(quants, index, 16) | fifth_bit(high, index)) as i8 - 16);
    }
}

/// Scale and minimum (f16), 32 fifth bits, 16 bytes of nibbles.
fn q5_1(bytes: &[u8], values: &mut [f32]) {
    let (scale, minimum, high, quants) = (half_at(bytes, 0), half_at(bytes, 2), &bytes[4..8], &bytes[8..]);
    for (index, value) in values.iter_mut().enumerate() {
        *value = scale * f32::from(nibble(quants, index, 16) | fifth_bit(high, index)) + minimum;
    }
}

fn fifth_bit(bits: &[u8], index: usize) -> u8 {
    (bits[index / 8] >> (index % 8) & 1) << 4
}

/// Scale (f16), 32 signed bytes.
fn q8_0(bytes: &[u8], values: &mut [f32]) {
    let scale = half_at(bytes, 0);
    for (value, &quant) in values.iter_mut().zip(&bytes[2..]) {
        *value = f32::from(quant as i8) * scale;
    }
}

/// 16 bytes of a 4-bit scale and a 4-bit minimum for 16 elements each, 64 bytes of bit pairs, scale of the scales and scale of the
/// minima (f16).
fn q2_k(bytes: &[u8], values: &mut [f32]) {
    let (scales, quants) = (&bytes[..16], &bytes[16..80]);
    let (scale, minimum) = (half_at(bytes, 80), half_at(bytes, 82));
    for (index, value) in values.iter_mut().enumerate() {
        let packed = scales[index / 16];
        *value = scale * f32::from(packed & 0x0f) * f32::from(bit_pair(quants, index)) - minimum * f32::from(packed >> 4);
    }
}

/// 32 bytes of inverted third bits, 64 bytes of bit pairs, 12 bytes of sixteen 6-bit scales offset by 32, scale of the scales (f16).
///
/// The scales' low nibbles fill 8 bytes, their high bit pairs the other 4.
fn q3_k(bytes: &[u8], values: &mut [f32]) {
    let (high, quants, scales, scale) = (&bytes[..32], &bytes[32..96], &bytes[96..108], half_at(bytes, 108));
    for (index, value) in values.iter_mut().enumerate() {
        let group = index / 16;
        let group_scale = nibble(&scales[..8], group, 8) | (scales[8 + group % 4] >> (2 * (group / 4)) & 3) << 4;
        let borrow = if high[index % 32] >> (index / 32) & 1 == 1 { 0 } else { 4 };
        *value = scale * f32::from(group_scale as i8 - 32) * f32::from(bit_pair(quants, index) as i8 - borrow);
    }
}

/// Scale of the scales and scale of the minima (f16), 12 bytes of eight 6-bit scales and minima, 128 bytes of nibbles.
fn q4_k(bytes: &[u8], values: &mut [f32]) {
    let (scale, minimum, packed, quants) = (half_at(bytes, 0), half_at(bytes, 2), &bytes[4..16], &bytes[16..]);
    for (index, value) in values.iter_mut().enumerate() {
        let (group_scale, group_minimum) = scale_and_minimum(packed, index / 32);
        *value = scale * f32::from(group_scale) * f32::from(nibble(quants, index, 32)) - minimum * f32::from(group_minimum);
    }
}

/// As [`q4_k`], with 32 bytes of fifth bits before the nibbles.
fn q5_k(bytes: &[u8], values: &mut [f32]) {
    let (scale, minimum, packed) = (half_at(bytes, 0), half_at(bytes, 2), &bytes[4..16]);
    let (high, quants) = (&bytes[16..48], &bytes[48..]);
    for (index, value) in values.iter_mut().enumerate() {
        let (group_scale, group_minimum) = scale_and_minimum(packed, index / 32);
        let quant = nibble(quants, index, 32) | (high[index % 32] >> (index / 32) & 1) << 4;
        *value = scale * f32::from(group_scale) * f32::from(quant) - minimum * f32::from(group_minimum);
    }
}

/// The first four scales and minima are the low six bits of bytes 0..4 and 4..8; the other four have their low nibbles in bytes 8..12
/// and their high bit pairs at the top of the first eight.
fn scale_and_minimum(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        (packed[group] & 0x3f, packed[group + 4] & 0x3f)
    } else {
        let low = packed[group + 4];
        (low & 0x0f | packed[group - 4] >> 2 & 0x30, low >> 4 | packed[group] >> 2 & 0x30)
    }
}

/// 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales, scale of the scales (f16); offset by 32.
fn q6_k(bytes: &[u8], values: &mut [f32]) {
    let (low, high, scales, scale) = (&bytes[..128], &bytes[128..192], &bytes[192..208], half_at(bytes, 208));
    for (index, value) in values.iter_mut().enumerate() {
        let quant = (nibble(low, index, 64) | bit_pair(high, index) << 4) as i8 - 32;
        *value = scale * f32::from(scales[index / 16] as i8) * f32::from(quant);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use safetensors::SafeTensors;

    const GOLDEN: &[u8] = include_bytes!("../../tests/golden/logits/dequantise.safetensors");

    fn golden(kind: GgmlKind) -> (Vec<u8>, Vec<f32>) {
        let file = SafeTensors::deserialize(GOLDEN).unwrap();
        let bytes = file.tensor(&format!("{}.bytes", kind.name())).unwrap().data().to_vec();
        let values = file.tensor(&format!("{}.values", kind.name())).unwrap();
        let values = values.data().chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
        (bytes, values)
    }

    #[test]
    fn every_kind_gives_the_gguf_packages_values_exactly() {
        for kind in GgmlKind::ALL {
            let (bytes, expected) = golden(kind);
            let found = dequantise(kind, &bytes, expected.len());
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(found.to_bits(), expected.to_bits(), "{} element {index}: {found} for {expected}", kind.name());
            }
        }
    }

    #[test]
    fn tasks_join_without_seams() {
        let (bytes, values) = golden(GgmlKind::Q6_K);
        let repeats = 3 * TASK_ELEMENTS / values.len();
        let found = dequantise(GgmlKind::Q6_K, &bytes.repeat(repeats), values.len() * repeats);
        assert_eq!(found, values.repeat(repeats));
    }
}
