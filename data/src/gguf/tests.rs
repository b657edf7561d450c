//! GGUF files written byte by byte: whole ones, and every way to damage them that the reader must survive.
#![allow(clippy::unwrap_used)]

use super::*;

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn entry(out: &mut Vec<u8>, name: &str, shape: &[u64], code: u32, offset: u64) {
    text(out, name);
    out.extend((shape.len() as u32).to_le_bytes());
    shape.iter().for_each(|length| out.extend(length.to_le_bytes()));
    out.extend(code.to_le_bytes());
    out.extend(offset.to_le_bytes());
}

fn start(version: u32, tensors: u64, keys: u64) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(version.to_le_bytes());
    out.extend(tensors.to_le_bytes());
    out.extend(keys.to_le_bytes());
    out
}

/// Four keys and two tensors: F32 [2, 3] and Q8_0 [1, 32].
fn sample() -> Vec<u8> {
    let mut out = start(3, 2, 4);
    text(&mut out, "name");
    out.extend(8_u32.to_le_bytes());
    text(&mut out, "tiny");
    text(&mut out, "epsilon");
    out.extend(6_u32.to_le_bytes());
    out.extend(0.5_f32.to_le_bytes());
    text(&mut out, "types");
    out.extend(9_u32.to_le_bytes());
    out.extend(5_u32.to_le_bytes());
    out.extend(2_u64.to_le_bytes());
    out.extend((-1_i32).to_le_bytes());
    out.extend(7_i32.to_le_bytes());
    text(&mut out, "flag");
    out.extend(7_u32.to_le_bytes());
    out.push(1);
    entry(&mut out, "plain", &[3, 2], 0, 0);
    entry(&mut out, "quantised", &[32, 1], 8, 32);
    out.resize(out.len().next_multiple_of(32), 0);
    (0..6).for_each(|value| out.extend((value as f32).to_le_bytes()));
    out.resize(out.len().next_multiple_of(32), 0);
    out.extend([9; 34]);
    out
}

fn open(bytes: &[u8]) -> Result<GgufFile, GgufError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    std::fs::write(&path, bytes).unwrap();
    GgufFile::open(&path)
}

#[test]
fn a_whole_file_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    std::fs::write(&path, sample()).unwrap();
    let file = GgufFile::open(&path).unwrap();

    assert_eq!(file.string("name").unwrap(), "tiny");
    assert_eq!(file.float("epsilon").unwrap(), 0.5);
    assert_eq!(file.integers("types").unwrap(), [-1, 7]);
    assert!(file.boolean("flag").unwrap());
    assert!(matches!(file.unsigned("absent"), Err(GgufError::MissingKey { .. })));
    assert!(matches!(file.unsigned("name"), Err(GgufError::WrongType { .. })));

    assert_eq!(file.tensor("plain").unwrap().shape, [2, 3]);
    let values: Vec<u8> = (0..6).flat_map(|value| (value as f32).to_le_bytes()).collect();
    assert_eq!(file.read(file.tensor("plain").unwrap()).unwrap(), values);
    assert_eq!(file.read(file.tensor("quantised").unwrap()).unwrap(), [9; 34]);
}

#[test]
fn every_truncation_is_an_error() {
    let whole = sample();
    assert!(open(&whole).is_ok());
    for length in 4..whole.len() {
        let error = open(&whole[..length]).unwrap_err();
        assert!(matches!(error, GgufError::Truncated { .. }), "at {length}: {error}");
    }
    let message = open(&whole[..whole.len() - 1]).unwrap_err().to_string();
    assert!(message.contains("tiny.gguf") && message.contains("tensor `quantised`"), "{message}");
}

#[test]
fn no_single_byte_can_make_the_reader_panic_or_allocate_without_bound() {
    let whole = sample();
    for index in 0..whole.len() {
        for value in [0, 1, 0x7f, 0xff] {
            let mut bytes = whole.clone();
            bytes[index] = value;
            let _ = open(&bytes);
        }
    }
}

#[test]
fn foreign_files_are_refused() {
    assert!(matches!(open(b"PK"), Err(GgufError::NotGguf(_))));
    assert!(matches!(open(b"\x08\0\0\0\0\0\0\0{}"), Err(GgufError::NotGguf(_))));
    assert!(matches!(open(&start(1, 0, 0)), Err(GgufError::Version { version: 1, .. })));
    assert!(matches!(open(&start(3_u32.swap_bytes(), 0, 0)), Err(GgufError::Version { .. })));
    assert!(matches!(GgufFile::open(Path::new("absent.gguf")), Err(GgufError::Io { .. })));
}

#[test]
fn counts_are_not_believed() {
    assert!(matches!(open(&start(3, u64::MAX, 0)), Err(GgufError::Truncated { .. })));
    assert!(matches!(open(&start(3, 0, u64::MAX)), Err(GgufError::Truncated { .. })));
    let mut long_string = start(3, 0, 1);
    long_string.extend(u64::MAX.to_le_bytes());
    long_string.extend([0; 16]);
    assert!(matches!(open(&long_string), Err(GgufError::Truncated { .. })));
}

#[test]
fn deep_arrays_are_refused() {
    let mut bytes = start(3, 0, 1);
    text(&mut bytes, "deep");
    bytes.extend(9_u32.to_le_bytes());
    for _ in 0..100 {
        bytes.extend(9_u32.to_le_bytes());
        bytes.extend(1_u64.to_le_bytes());
    }
    let message = open(&bytes).unwrap_err().to_string();
    assert!(message.contains("nests arrays"), "{message}");
}

#[test]
fn impossible_tensors_are_refused() {
    let one = |shape: &[u64], code| {
        let mut bytes = start(3, 1, 0);
        entry(&mut bytes, "odd", shape, code, 0);
        open(&bytes).unwrap_err()
    };
    assert!(matches!(one(&[32], 99), GgufError::UnknownKind { code: 99, .. }));
    assert!(matches!(one(&[33], 8), GgufError::Damaged { .. }));
    assert!(matches!(one(&[], 8), GgufError::Damaged { .. }));
    assert!(matches!(one(&[u64::MAX, u64::MAX], 0), GgufError::Damaged { .. }));
    assert!(matches!(one(&[1 << 62], 0), GgufError::Damaged { .. }));
    assert!(matches!(one(&[1 << 60], 0), GgufError::Truncated { .. }));
}
