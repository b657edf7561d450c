//! Safetensors files: the table of tensors first, each tensor's bytes only when asked for, and writing one tensor at a time.
//!
//! No file is ever held in memory as a whole, neither when it is read nor when it is written; a tensor that is loaded comes from the file's
//! mapped pages.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use tch::{Device, Kind, Tensor};
use torch::mapped::{MappedError, read_mapped};

/// The length field before the header.
const PREFIX: u64 = 8;
/// As the reference implementation limits it.
const LONGEST_HEADER: u64 = 100_000_000;

/// Why a safetensors file cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TensorFileError {
    #[error("cannot read `{}`: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot write `{}`: {source}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    #[error("`{}` is not a whole safetensors file: {what}; fetch it again", path.display())]
    Damaged { path: PathBuf, what: String },
    #[error(
        "`{}` is truncated: tensor `{tensor}` ends at byte {needed}, but the file at {size}; fetch it again",
        path.display()
    )]
    Truncated { path: PathBuf, tensor: String, needed: u64, size: u64 },
    #[error(
        "`{}`: tensor `{tensor}` is stored as {dtype}, which is not supported; store it as F32, F16 or BF16",
        path.display()
    )]
    Dtype { path: PathBuf, tensor: String, dtype: String },
    #[error("`{}`: libtorch cannot hold tensor `{tensor}`: {message}", path.display())]
    Torch { path: PathBuf, tensor: String, message: String },
}

/// Where a tensor lies, and what it is.
#[derive(Debug, Clone)]
pub struct StoredTensor {
    pub file: PathBuf,
    pub name: String,
    pub shape: Vec<i64>,
    dtype: Dtype,
    offset: u64,
    bytes: u64,
}

/// The tensors of one file by name, all checked to lie within it.
///
/// # Errors
/// The file cannot be read, its header is damaged, or a tensor reaches beyond its end.
pub fn table(path: &Path) -> Result<BTreeMap<String, StoredTensor>, TensorFileError> {
    let io = |source| TensorFileError::Read { path: path.to_path_buf(), source };
    let damaged = |what: String| TensorFileError::Damaged { path: path.to_path_buf(), what };
    let mut file = File::open(path).map_err(io)?;
    let size = file.metadata().map_err(io)?.len();
    if size < PREFIX {
        return Err(damaged(format!("it has only {size} bytes")));
    }
    let mut length = [0; PREFIX as usize];
    file.read_exact(&mut length).map_err(io)?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST_HEADER || length > size - PREFIX {
        return Err(damaged(format!("its header would take {length} of {size} bytes")));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(io)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| damaged(format!("its header says {error}")))?;

    let data_start = PREFIX + length;
    let mut stored = BTreeMap::new();
    for (name, info) in metadata.tensors() {
        let needed = data_start.saturating_add(info.data_offsets.1 as u64);
        if needed > size {
            return Err(TensorFileError::Truncated { path: path.to_path_buf(), tensor: name, needed, size });
        }
        let entry = StoredTensor {
            file: path.to_path_buf(),
            name: name.clone(),
            shape: info.shape.iter().map(|&length| length as i64).collect(),
            dtype: info.dtype,
            offset: data_start + info.data_offsets.0 as u64,
            bytes: (info.data_offsets.1 - info.data_offsets.0) as u64,
        };
        stored.insert(name, entry);
    }
    Ok(stored)
}

impl StoredTensor {
    /// Reads the tensor onto the CPU, in the kind it is stored in.
    ///
    /// # Errors
    /// The file cannot be read, has become shorter, or the tensor's kind is none of libtorch's common ones.
    pub fn read(&self) -> Result<Tensor, TensorFileError> {
        self.load(self.kind()?, Device::Cpu)
    }

    /// Reads the tensor onto `device` as `kind`, straight from the file's pages.
    ///
    /// # Errors
    /// As [`StoredTensor::read`]; the device has no room.
    pub fn load(&self, kind: Kind, device: Device) -> Result<Tensor, TensorFileError> {
        let io = |source| TensorFileError::Read { path: self.file.clone(), source };
        let file = File::open(&self.file).map_err(io)?;
        read_mapped(&file, self.offset, &self.shape, self.kind()?, kind, device).map_err(|error| match error {
            MappedError::Io(source) => io(source),
            MappedError::Torch(error) => torch_error(&self.file, &self.name, &error),
        })
    }

    /// Reads elements `range` of the flattened tensor, as [`StoredTensor::read`].
    ///
    /// # Errors
    /// As [`StoredTensor::read`]; the range reaches beyond the tensor.
    pub fn read_range(&self, range: Range<i64>) -> Result<Tensor, TensorFileError> {
        let io = |source| TensorFileError::Read { path: self.file.clone(), source };
        let kind = self.kind()?;
        let size = kind.elt_size_in_bytes() as u64;
        let count = range.end - range.start;
        if range.start < 0 || count < 0 || range.end as u64 * size > self.bytes {
            return Err(io(std::io::Error::other(format!("`{}` has no elements {range:?}", self.name))));
        }
        torch::read(&mut self.open_at(range.start as u64 * size).map_err(io)?, &[count], kind).map_err(io)
    }

    /// The file, `start` bytes into the tensor.
    fn open_at(&self, start: u64) -> std::io::Result<File> {
        let mut file = File::open(&self.file)?;
        file.seek(SeekFrom::Start(self.offset + start))?;
        Ok(file)
    }

    /// The kind it is stored in.
    ///
    /// # Errors
    /// It is none of libtorch's common ones.
    pub fn kind(&self) -> Result<Kind, TensorFileError> {
        kind_of(self.dtype).ok_or_else(|| TensorFileError::Dtype {
            path: self.file.clone(),
            tensor: self.name.clone(),
            dtype: format!("{:?}", self.dtype),
        })
    }
}

/// All tensors of one file, on the CPU, in the kinds they are stored in.
///
/// # Errors
/// As [`table`] and [`StoredTensor::read`].
pub fn load_safetensors(path: &Path) -> Result<BTreeMap<String, Tensor>, TensorFileError> {
    table(path)?.into_iter().map(|(name, stored)| Ok((name, stored.read()?))).collect()
}

/// Writes tensors in the kinds they have, and syncs the file to disk.
///
/// # Errors
/// The file cannot be written, or a tensor's kind has no name in the format. The file is then incomplete: write under a temporary name.
pub fn save_safetensors(path: &Path, named: &[(String, &Tensor)]) -> Result<(), TensorFileError> {
    save(path, named, None)
}

/// Writes tensors as `kind`, converting one at a time; otherwise as [`save_safetensors`].
///
/// # Errors
/// As [`save_safetensors`].
pub fn save_safetensors_as(path: &Path, named: &[(String, &Tensor)], kind: Kind) -> Result<(), TensorFileError> {
    save(path, named, Some(kind))
}

fn save(path: &Path, named: &[(String, &Tensor)], kind: Option<Kind>) -> Result<(), TensorFileError> {
    let kind_of_tensor = |tensor: &Tensor| kind.unwrap_or(tensor.kind());
    // Widest elements first keeps every tensor aligned to its element size, as the format asks.
    let mut ordered: Vec<_> = named.iter().map(|(name, tensor)| (name, *tensor)).collect();
    ordered.sort_by_key(|(_, tensor)| std::cmp::Reverse(kind_of_tensor(tensor).elt_size_in_bytes()));

    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_string(), serde_json::json!({"format": "pt"}));
    let mut end = 0;
    for (name, tensor) in &ordered {
        let kind = kind_of_tensor(tensor);
        let dtype = dtype_name(kind).ok_or_else(|| TensorFileError::Dtype {
            path: path.to_path_buf(),
            tensor: name.to_string(),
            dtype: format!("{kind:?}"),
        })?;
        let start = end;
        end += tensor.numel() * kind.elt_size_in_bytes();
        let entry = serde_json::json!({"dtype": dtype, "shape": tensor.size(), "data_offsets": [start, end]});
        header.insert(name.to_string(), entry);
    }
    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');

    let io = |source| TensorFileError::Write { path: path.to_path_buf(), source };
    let mut file = BufWriter::new(File::create(path).map_err(io)?);
    file.write_all(&(header.len() as u64).to_le_bytes()).map_err(io)?;
    file.write_all(&header).map_err(io)?;
    for (name, tensor) in ordered {
        let bytes = tensor.detach().f_to_kind(kind_of_tensor(tensor)).and_then(|tensor| torch::to_bytes(&tensor));
        file.write_all(&bytes.map_err(|error| torch_error(path, name, &error))?).map_err(io)?;
    }
    file.into_inner().map_err(|error| io(error.into_error()))?.sync_all().map_err(io)
}

fn torch_error(path: &Path, tensor: &str, error: &tch::TchError) -> TensorFileError {
    // libtorch appends a C++ stack trace after the first line.
    let message = error.to_string().lines().next().unwrap_or_default().to_string();
    TensorFileError::Torch { path: path.to_path_buf(), tensor: tensor.to_string(), message }
}

/// The format's dtypes that libtorch computes with, by both names.
const KINDS: [(Dtype, &str, Kind); 8] = [
    (Dtype::F64, "F64", Kind::Double),
    (Dtype::F32, "F32", Kind::Float),
    (Dtype::F16, "F16", Kind::Half),
    (Dtype::BF16, "BF16", Kind::BFloat16),
    (Dtype::I64, "I64", Kind::Int64),
    (Dtype::I32, "I32", Kind::Int),
    (Dtype::U8, "U8", Kind::Uint8),
    (Dtype::BOOL, "BOOL", Kind::Bool),
];

fn kind_of(dtype: Dtype) -> Option<Kind> {
    KINDS.iter().find(|(known, _, _)| *known == dtype).map(|(_, _, kind)| *kind)
}

fn dtype_name(kind: Kind) -> Option<&'static str> {
    KINDS.iter().find(|(_, _, known)| *known == kind).map(|(_, name, _)| *name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn sample(folder: &Path) -> PathBuf {
        let path = folder.join("sample.safetensors");
        let floats = Tensor::from_slice(&[1.5_f32, -2.0, 3.0, 4.0, 5.0, 6.0]).view([2, 3]);
        let ids = Tensor::from_slice(&[7_i64, -8]);
        let flags = Tensor::from_slice(&[true, false, true]);
        let brain = floats.to_kind(Kind::BFloat16).transpose(0, 1);
        let named = [("flags", &flags), ("floats", &floats), ("ids", &ids), ("brain", &brain)];
        save_safetensors(&path, &named.map(|(name, tensor)| (name.to_string(), tensor))).unwrap();
        path
    }

    #[test]
    fn what_is_saved_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let loaded = load_safetensors(&sample(folder.path())).unwrap();
        assert_eq!(torch::to_f32s(&loaded["floats"]), [1.5, -2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!((loaded["brain"].kind(), loaded["brain"].size()), (Kind::BFloat16, vec![3, 2]));
        assert_eq!(torch::to_f32s(&loaded["brain"]), [1.5, 4.0, -2.0, 5.0, 3.0, 6.0]);
        assert_eq!(loaded["ids"].int64_value(&[1]), -8);
        assert_eq!(torch::to_f32s(&loaded["flags"]), [1.0, 0.0, 1.0]);
    }

    #[test]
    fn the_reference_implementation_reads_it_back() {
        let folder = tempfile::tempdir().unwrap();
        let bytes = std::fs::read(sample(folder.path())).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("ids").unwrap().data()[..8], 7_i64.to_le_bytes());
        assert_eq!(file.tensor("brain").unwrap().dtype(), Dtype::BF16);
    }

    #[test]
    fn conversion_happens_on_the_way_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("converted.safetensors");
        let tensor = Tensor::from_slice(&[1.0_f32, 2.0]);
        save_safetensors_as(&path, &[("one".to_string(), &tensor)], Kind::BFloat16).unwrap();
        let loaded = load_safetensors(&path).unwrap();
        assert_eq!((loaded["one"].kind(), torch::to_f32s(&loaded["one"])), (Kind::BFloat16, vec![1.0, 2.0]));
    }

    #[test]
    fn every_truncation_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = sample(folder.path());
        let whole = std::fs::read(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            let message = table(&path).unwrap_err().to_string();
            assert!(message.contains("sample.safetensors"), "{message}");
        }
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert!(matches!(table(&path), Err(TensorFileError::Truncated { tensor, .. }) if tensor == "flags"));
    }
}
