//! Writing the container: metadata in the types that readers expect, the table of tensors, and their data one tensor at a time.
//!
//! As the reader, this module knows where bytes lie and not what they mean.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use super::{DEFAULT_ALIGNMENT, GgmlKind};

/// What is written as the version.
const VERSION: u32 = 3;

/// A metadata value in the type it is stored as. Readers ask for the very type: llama.cpp refuses a count that is not a `u32`.
#[derive(Debug, Clone, PartialEq)]
pub enum Entry {
    U32(u32),
    U64(u64),
    F32(f32),
    Bool(bool),
    String(String),
    Strings(Vec<String>),
    I32s(Vec<i32>),
}

/// A tensor that is to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedTensor {
    pub name: String,
    /// Row-major, outermost dimension first.
    pub shape: Vec<usize>,
    pub kind: GgmlKind,
}

impl PlannedTensor {
    /// How many bytes its data takes, or what is wrong with it: a row must be a whole number of blocks.
    pub fn bytes(&self) -> Result<u64, String> {
        let (row, block) = (self.shape.last().copied().unwrap_or(1), self.kind.block_elements());
        if !row.is_multiple_of(block) {
            return Err(format!("`{}` has rows of {row}, and {} is made of blocks of {block}", self.name, self.kind.name()));
        }
        let elements: u64 = self.shape.iter().map(|&length| length as u64).product();
        Ok(elements / block as u64 * self.kind.block_bytes() as u64)
    }
}

/// How many bytes a file with these keys and tensors takes.
///
/// # Errors
/// A tensor's rows are no whole number of its kind's blocks; in words.
pub fn size(metadata: &[(String, Entry)], tensors: &[PlannedTensor]) -> Result<u64, String> {
    let (header, bytes) = header(metadata, tensors)?;
    Ok(header.len() as u64 + bytes.iter().map(|bytes| bytes.next_multiple_of(DEFAULT_ALIGNMENT)).sum::<u64>())
}

/// Writes a whole file and syncs it. `data` gives the bytes of the tensor with that index, in the order of `tensors`.
///
/// # Errors
/// Those of `data`, and of the file system; data of another size than the tensor's shape and kind ask for, or a shape that the kind cannot
/// hold, is [`io::ErrorKind::InvalidInput`]. The file is then incomplete: write under a temporary name.
pub fn write<E: From<io::Error>>(
    path: &Path,
    metadata: &[(String, Entry)],
    tensors: &[PlannedTensor],
    mut data: impl FnMut(usize) -> Result<Vec<u8>, E>,
) -> Result<(), E> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
    let (header, sizes) = header(metadata, tensors).map_err(invalid)?;
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(&header)?;
    for (index, (tensor, size)) in tensors.iter().zip(sizes).enumerate() {
        let bytes = data(index)?;
        if bytes.len() as u64 != size {
            return Err(invalid(format!("`{}` takes {size} bytes, not {}", tensor.name, bytes.len())).into());
        }
        file.write_all(&bytes)?;
        let padding = size.next_multiple_of(DEFAULT_ALIGNMENT) - size;
        file.write_all(&vec![0; padding as usize])?;
    }
    Ok(file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?)
}

/// Everything before the tensors' data, filled up to where that begins; and how many bytes each of them takes.
fn header(metadata: &[(String, Entry)], tensors: &[PlannedTensor]) -> Result<(Vec<u8>, Vec<u64>), String> {
    let mut out = b"GGUF".to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, entry) in metadata {
        text(&mut out, key);
        value(&mut out, entry);
    }
    let (mut offset, mut sizes) = (0_u64, Vec::with_capacity(tensors.len()));
    for tensor in tensors {
        let size = tensor.bytes()?;
        text(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().rev().for_each(|&length| out.extend((length as u64).to_le_bytes()));
        out.extend(tensor.kind.facts().0.to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += size.next_multiple_of(DEFAULT_ALIGNMENT);
        sizes.push(size);
    }
    out.resize(out.len().next_multiple_of(DEFAULT_ALIGNMENT as usize), 0);
    Ok((out, sizes))
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A value with the number of its type before it.
fn value(out: &mut Vec<u8>, entry: &Entry) {
    let mut plain = |code: u32, bytes: &[u8]| {
        out.extend(code.to_le_bytes());
        out.extend(bytes);
    };
    match entry {
        Entry::U32(number) => plain(4, &number.to_le_bytes()),
        Entry::F32(number) => plain(6, &number.to_le_bytes()),
        Entry::Bool(truth) => plain(7, &[u8::from(*truth)]),
        Entry::U64(number) => plain(10, &number.to_le_bytes()),
        Entry::String(string) => {
            plain(8, &[]);
            text(out, string);
        }
        Entry::Strings(strings) => {
            plain(9, &8_u32.to_le_bytes());
            out.extend((strings.len() as u64).to_le_bytes());
            strings.iter().for_each(|string| text(out, string));
        }
        Entry::I32s(numbers) => {
            plain(9, &5_u32.to_le_bytes());
            out.extend((numbers.len() as u64).to_le_bytes());
            numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::gguf::{GgufFile, Value};

    fn planned(name: &str, shape: &[usize], kind: GgmlKind) -> PlannedTensor {
        PlannedTensor { name: name.to_string(), shape: shape.to_vec(), kind }
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small.gguf");
        let metadata = [
            ("count", Entry::U32(7), Value::U64(7)),
            ("large", Entry::U64(1 << 40), Value::U64(1 << 40)),
            ("base", Entry::F32(0.5), Value::F64(0.5)),
            ("flag", Entry::Bool(true), Value::Bool(true)),
            ("name", Entry::String("Ġé".to_string()), Value::String("Ġé".to_string())),
            (
                "words",
                Entry::Strings(vec!["a".to_string(), String::new()]),
                Value::Array(vec![Value::String("a".to_string()), Value::String(String::new())]),
            ),
            ("types", Entry::I32s(vec![-1, 3]), Value::Array(vec![Value::I64(-1), Value::I64(3)])),
        ];
        let entries = metadata.clone().map(|(key, entry, _)| (key.to_string(), entry));
        let tensors = [
            planned("one", &[3], GgmlKind::F32),
            planned("two", &[2, 64], GgmlKind::Q8_0),
            planned("three", &[5, 1], GgmlKind::BF16),
        ];
        let contents: [Vec<u8>; 3] = [vec![1; 12], (0..136).collect(), vec![3; 10]];
        write::<io::Error>(&path, &entries, &tensors, |index| Ok(contents[index].clone())).unwrap();
        let file = GgufFile::open(&path).unwrap();
        assert_eq!(file.metadata.len(), metadata.len());
        for (key, _, value) in &metadata {
            assert_eq!(&file.metadata[*key], value, "{key}");
        }
        for ((planned, found), content) in tensors.iter().zip(&file.tensors).zip(&contents) {
            assert_eq!((&planned.name, &planned.shape, planned.kind), (&found.name, &found.shape, found.kind));
            assert!(found.offset.is_multiple_of(DEFAULT_ALIGNMENT));
            assert_eq!(&file.read(found).unwrap(), content);
        }
        assert_eq!(size(&entries, &tensors).unwrap(), std::fs::metadata(&path).unwrap().len());
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small.gguf");
        let try_write = |tensor: PlannedTensor, bytes: usize| {
            write::<io::Error>(&path, &[], &[tensor], |_| Ok(vec![0; bytes])).map_err(|error| error.to_string())
        };
        assert_eq!(
            try_write(planned("odd", &[2, 48], GgmlKind::Q8_0), 102).unwrap_err(),
            "`odd` has rows of 48, and Q8_0 is made of blocks of 32"
        );
        assert_eq!(try_write(planned("short", &[2], GgmlKind::F32), 7).unwrap_err(), "`short` takes 8 bytes, not 7");
        assert!(try_write(planned("whole", &[2], GgmlKind::F32), 8).is_ok());
    }
}
