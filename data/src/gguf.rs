//! The GGUF container: metadata and the table of tensors, read without trusting a single count in the file.
//!
//! This module knows where bytes lie, not what they mean: dequantisation and tensor names are the model crate's, the
//! tokenizer's metadata keys are the tokenizer module's. Versions 2 and 3, little endian.

pub mod writer;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Tensor data starts at the next multiple of this, unless `general.alignment` says otherwise.
const DEFAULT_ALIGNMENT: u64 = 32;
/// No writer nests arrays deeper than two; the limit keeps a hostile file from exhausting the stack.
const MAX_ARRAY_DEPTH: usize = 4;
const MAX_DIMENSIONS: u32 = 8;

/// Why a GGUF file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    #[error("cannot read `{}`: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("`{}` is not a GGUF file: it does not begin with `GGUF`; give a .gguf file or a model folder", .0.display())]
    NotGguf(PathBuf),
    #[error("`{}` is GGUF version {version}: versions 2 and 3, little endian, can be read; convert the model again", path.display())]
    Version { path: PathBuf, version: u32 },
    #[error(
        "`{}` is truncated: {what} needs {needed} bytes at byte {position}, but the file ends at {size}; fetch it again",
        path.display()
    )]
    Truncated { path: PathBuf, what: String, position: u64, needed: u64, size: u64 },
    #[error("`{}` is damaged: {what}; fetch or convert it again", path.display())]
    Damaged { path: PathBuf, what: String },
    #[error(
        "`{}`: tensor `{tensor}` is stored as ggml type {code}, which is not supported; use a file in F32, F16, BF16, Q8_0, \
         Q4_0, Q4_1, Q5_0, Q5_1 or a K-quant",
        path.display()
    )]
    UnknownKind { path: PathBuf, tensor: String, code: u32 },
    #[error("`{}` has no metadata key `{key}`; convert the model again with a current converter", path.display())]
    MissingKey { path: PathBuf, key: String },
    #[error("`{}`: metadata key `{key}` is not {expected}", path.display())]
    WrongType { path: PathBuf, key: String, expected: &'static str },
}

/// A metadata value; integers and floats are widened to 64 bits.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    U64(u64),
    I64(i64),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Vec<Value>),
}

impl Value {
    fn unsigned(&self) -> Option<u64> {
        match self {
            Value::U64(value) => Some(*value),
            Value::I64(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    fn integer(&self) -> Option<i64> {
        match self {
            Value::U64(value) => i64::try_from(*value).ok(),
            Value::I64(value) => Some(*value),
            _ => None,
        }
    }
}

/// How a tensor's elements are stored: plain floats, or blocks of quantised weights with their scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum GgmlKind {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
}

impl GgmlKind {
    /// Every kind that can be read.
    pub const ALL: [GgmlKind; 13] = [
        GgmlKind::F32,
        GgmlKind::F16,
        GgmlKind::BF16,
        GgmlKind::Q4_0,
        GgmlKind::Q4_1,
        GgmlKind::Q5_0,
        GgmlKind::Q5_1,
        GgmlKind::Q8_0,
        GgmlKind::Q2_K,
        GgmlKind::Q3_K,
        GgmlKind::Q4_K,
        GgmlKind::Q5_K,
        GgmlKind::Q6_K,
    ];

    /// (the number in the file, elements in a block, bytes in a block, name)
    fn facts(self) -> (u32, usize, usize, &'static str) {
        match self {
            GgmlKind::F32 => (0, 1, 4, "F32"),
            GgmlKind::F16 => (1, 1, 2, "F16"),
            GgmlKind::BF16 => (30, 1, 2, "BF16"),
            GgmlKind::Q4_0 => (2, 32, 18, "Q4_0"),
            GgmlKind::Q4_1 => (3, 32, 20, "Q4_1"),
            GgmlKind::Q5_0 => (6, 32, 22, "Q5_0"),
            GgmlKind::Q5_1 => (7, 32, 24, "Q5_1"),
            GgmlKind::Q8_0 => (8, 32, 34, "Q8_0"),
            GgmlKind::Q2_K => (10, 256, 84, "Q2_K"),
            GgmlKind::Q3_K => (11, 256, 110, "Q3_K"),
            GgmlKind::Q4_K => (12, 256, 144, "Q4_K"),
            GgmlKind::Q5_K => (13, 256, 176, "Q5_K"),
            GgmlKind::Q6_K => (14, 256, 210, "Q6_K"),
        }
    }

    fn from_code(code: u32) -> Option<GgmlKind> {
        GgmlKind::ALL.into_iter().find(|kind| kind.facts().0 == code)
    }

    /// Elements that one block holds; a row is a whole number of blocks.
    pub fn block_elements(self) -> usize {
        self.facts().1
    }

    /// Bytes that one block takes.
    pub fn block_bytes(self) -> usize {
        self.facts().2
    }

    /// The name that ggml uses, such as `Q4_K`.
    pub fn name(self) -> &'static str {
        self.facts().3
    }
}

/// One row of the table of tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorInfo {
    pub name: String,
    /// Row-major, outermost dimension first: the reverse of the order in the file.
    pub shape: Vec<usize>,
    pub kind: GgmlKind,
    /// Where the data begins, counted from the start of the file.
    pub offset: u64,
    /// How many bytes the data takes.
    pub bytes: u64,
}

/// An opened GGUF file: everything but the tensors' data, which [`GgufFile::read`] fetches one tensor at a time.
#[derive(Debug, Clone)]
pub struct GgufFile {
    pub path: PathBuf,
    pub metadata: BTreeMap<String, Value>,
    /// In file order.
    pub tensors: Vec<TensorInfo>,
}

impl GgufFile {
    /// Reads metadata and the table of tensors.
    ///
    /// # Errors
    /// The file cannot be read, is not GGUF, is cut short (in the header or in any tensor's data), or is inconsistent.
    pub fn open(path: &Path) -> Result<GgufFile, GgufError> {
        let io = |source| GgufError::Io { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let mut header = Header { path, reader: BufReader::new(file), position: 0, size };

        if size < 4 || header.bytes::<4>("the magic number")? != *b"GGUF" {
            return Err(GgufError::NotGguf(path.to_path_buf()));
        }
        let version = header.u32("the version")?;
        if !(2..=3).contains(&version) {
            return Err(GgufError::Version { path: path.to_path_buf(), version });
        }
        let tensor_count = header.u64("the number of tensors")?;
        let key_count = header.u64("the number of metadata keys")?;
        // The shortest key is an empty name (8 bytes), a type (4) and a one-byte value; the shortest tensor entry has an empty
        // name (8), no dimensions (4), a type (4) and an offset (8).
        header.expect_room("the metadata", key_count, 13)?;
        header.expect_room("the table of tensors", tensor_count, 24)?;

        let mut metadata = BTreeMap::new();
        for index in 0..key_count {
            let key = header.string(&format!("the name of metadata key {index} of {key_count}"))?;
            let what = format!("metadata key `{key}`");
            let code = header.u32(&what)?;
            let value = header.value(&what, code, 0)?;
            if metadata.insert(key, value).is_some() {
                return Err(header.damaged(format!("{what} occurs twice")));
            }
        }
        let alignment = match metadata.get("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(value) => value
                .unsigned()
                .filter(|alignment| alignment.is_power_of_two())
                .ok_or_else(|| header.damaged("`general.alignment` is not a power of two".to_string()))?,
        };

        let mut names = BTreeSet::new();
        let mut tensors = Vec::new();
        for index in 0..tensor_count {
            let tensor = header.tensor(index, tensor_count)?;
            if !names.insert(tensor.name.clone()) {
                return Err(header.damaged(format!("tensor `{}` occurs twice", tensor.name)));
            }
            tensors.push(tensor);
        }

        // Offsets in the file count from the start of the data, which is known only now.
        let data_start = header.position.checked_next_multiple_of(alignment);
        for tensor in &mut tensors {
            let what = format!("tensor `{}`", tensor.name);
            let start = data_start.and_then(|start| start.checked_add(tensor.offset));
            tensor.offset = start.ok_or_else(|| header.damaged(format!("the offset of {what} overflows")))?;
            if tensor.offset.checked_add(tensor.bytes).is_none_or(|end| end > size) {
                return Err(header.truncated(&what, tensor.offset, tensor.bytes));
            }
        }
        Ok(GgufFile { path: path.to_path_buf(), metadata, tensors })
    }

    /// The data of one tensor, as stored.
    ///
    /// # Errors
    /// The file cannot be read, or has become shorter since it was opened.
    pub fn read(&self, tensor: &TensorInfo) -> Result<Vec<u8>, GgufError> {
        let io = |source: std::io::Error| GgufError::Io { path: self.path.clone(), source };
        let mut file = File::open(&self.path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        if tensor.offset.checked_add(tensor.bytes).is_none_or(|end| end > size) {
            return Err(GgufError::Truncated {
                path: self.path.clone(),
                what: format!("tensor `{}`", tensor.name),
                position: tensor.offset,
                needed: tensor.bytes,
                size,
            });
        }
        file.seek(SeekFrom::Start(tensor.offset)).map_err(io)?;
        let mut bytes = vec![0; tensor.bytes as usize];
        file.read_exact(&mut bytes).map_err(io)?;
        Ok(bytes)
    }

    /// The tensor of that name in GGUF's own naming, if there is one.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Whether the metadata has this key, of whatever type.
    pub fn has(&self, key: &str) -> bool {
        self.metadata.contains_key(key)
    }

    /// A string; an error when the key is missing or of another type, as in all getters below.
    pub fn string(&self, key: &str) -> Result<&str, GgufError> {
        self.get(key, "a string", |value| match value {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// A whole number that is not negative.
    pub fn unsigned(&self, key: &str) -> Result<u64, GgufError> {
        self.get(key, "a whole number", Value::unsigned)
    }

    /// A floating-point number.
    pub fn float(&self, key: &str) -> Result<f64, GgufError> {
        self.get(key, "a floating-point number", |value| match value {
            Value::F64(number) => Some(*number),
            _ => None,
        })
    }

    /// A truth value.
    pub fn boolean(&self, key: &str) -> Result<bool, GgufError> {
        self.get(key, "a truth value", |value| match value {
            Value::Bool(truth) => Some(*truth),
            _ => None,
        })
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Result<Vec<&str>, GgufError> {
        self.get(key, "an array of strings", |value| match value {
            Value::Array(items) => items
                .iter()
                .map(|item| match item {
                    Value::String(text) => Some(text.as_str()),
                    _ => None,
                })
                .collect(),
            _ => None,
        })
    }

    /// An array of whole numbers of any sign.
    pub fn integers(&self, key: &str) -> Result<Vec<i64>, GgufError> {
        self.get(key, "an array of whole numbers", |value| match value {
            Value::Array(items) => items.iter().map(Value::integer).collect(),
            _ => None,
        })
    }

    fn get<'a, T>(&'a self, key: &str, expected: &'static str, pick: impl Fn(&'a Value) -> Option<T>) -> Result<T, GgufError> {
        let value =
            self.metadata.get(key).ok_or_else(|| GgufError::MissingKey { path: self.path.clone(), key: key.to_string() })?;
        pick(value).ok_or_else(|| GgufError::WrongType { path: self.path.clone(), key: key.to_string(), expected })
    }
}

/// A cursor over the header that knows how many bytes are left, so that no length is believed before it is checked.
struct Header<'a> {
    path: &'a Path,
    reader: BufReader<File>,
    position: u64,
    size: u64,
}

impl Header<'_> {
    fn truncated(&self, what: &str, position: u64, needed: u64) -> GgufError {
        GgufError::Truncated { path: self.path.to_path_buf(), what: what.to_string(), position, needed, size: self.size }
    }

    fn damaged(&self, what: String) -> GgufError {
        GgufError::Damaged { path: self.path.to_path_buf(), what }
    }

    /// Fails unless `count` items of at least `least` bytes each can still follow.
    fn expect_room(&self, what: &str, count: u64, least: u64) -> Result<(), GgufError> {
        let needed = count.saturating_mul(least);
        if needed > self.size - self.position { Err(self.truncated(what, self.position, needed)) } else { Ok(()) }
    }

    fn fill(&mut self, what: &str, buffer: &mut [u8]) -> Result<(), GgufError> {
        let needed = buffer.len() as u64;
        self.expect_room(what, needed, 1)?;
        self.reader.read_exact(buffer).map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof => self.truncated(what, self.position, needed),
            _ => GgufError::Io { path: self.path.to_path_buf(), source },
        })?;
        self.position += needed;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        let mut buffer = [0; N];
        self.fill(what, &mut buffer)?;
        Ok(buffer)
    }

    fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.bytes(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.bytes(what)?))
    }

    fn string(&mut self, what: &str) -> Result<String, GgufError> {
        let length = self.u64(what)?;
        self.expect_room(what, length, 1)?;
        let mut buffer = vec![0; length as usize];
        self.fill(what, &mut buffer)?;
        String::from_utf8(buffer).map_err(|_| self.damaged(format!("{what} is not UTF-8")))
    }

    fn value(&mut self, what: &str, code: u32, depth: usize) -> Result<Value, GgufError> {
        Ok(match code {
            0 => Value::U64(u64::from(self.bytes::<1>(what)?[0])),
            1 => Value::I64(i64::from(i8::from_le_bytes(self.bytes(what)?))),
            2 => Value::U64(u64::from(u16::from_le_bytes(self.bytes(what)?))),
            3 => Value::I64(i64::from(i16::from_le_bytes(self.bytes(what)?))),
            4 => Value::U64(u64::from(self.u32(what)?)),
            5 => Value::I64(i64::from(i32::from_le_bytes(self.bytes(what)?))),
            6 => Value::F64(f64::from(f32::from_le_bytes(self.bytes(what)?))),
            7 => match self.bytes::<1>(what)?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                other => return Err(self.damaged(format!("{what} is a truth value, but holds {other}"))),
            },
            8 => Value::String(self.string(what)?),
            9 => self.array(what, depth)?,
            10 => Value::U64(self.u64(what)?),
            11 => Value::I64(i64::from_le_bytes(self.bytes(what)?)),
            12 => Value::F64(f64::from_le_bytes(self.bytes(what)?)),
            _ => return Err(self.damaged(format!("{what} has the unknown type {code}"))),
        })
    }

    fn array(&mut self, what: &str, depth: usize) -> Result<Value, GgufError> {
        if depth >= MAX_ARRAY_DEPTH {
            return Err(self.damaged(format!("{what} nests arrays deeper than {MAX_ARRAY_DEPTH}")));
        }
        let code = self.u32(what)?;
        let count = self.u64(what)?;
        let least = match code {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            9 => 12,
            _ => 8,
        };
        self.expect_room(what, count, least)?;
        (0..count).map(|_| self.value(what, code, depth + 1)).collect::<Result<_, _>>().map(Value::Array)
    }

    /// One row of the table of tensors; its offset still counts from the start of the data.
    fn tensor(&mut self, index: u64, count: u64) -> Result<TensorInfo, GgufError> {
        let name = self.string(&format!("the name of tensor {index} of {count}"))?;
        let what = format!("the entry of tensor `{name}`");
        let dimensions = self.u32(&what)?;
        if dimensions > MAX_DIMENSIONS {
            return Err(self.damaged(format!("{what} claims {dimensions} dimensions")));
        }
        let mut shape = (0..dimensions).map(|_| self.u64(&what)).collect::<Result<Vec<u64>, _>>()?;
        let code = self.u32(&what)?;
        let offset = self.u64(&what)?;

        let kind = GgmlKind::from_code(code).ok_or_else(|| GgufError::UnknownKind {
            path: self.path.to_path_buf(),
            tensor: name.clone(),
            code,
        })?;
        let block_elements = kind.block_elements() as u64;
        let row = shape.first().copied().unwrap_or(1);
        if !row.is_multiple_of(block_elements) {
            return Err(
                self.damaged(format!("{what} has rows of {row}, not a multiple of {block_elements} as {} needs", kind.name()))
            );
        }
        let elements = shape.iter().try_fold(1_u64, |product, &length| product.checked_mul(length));
        let bytes = elements.and_then(|elements| (elements / block_elements).checked_mul(kind.block_bytes() as u64));
        let bytes = bytes.ok_or_else(|| self.damaged(format!("{what} has the impossible shape {shape:?}")))?;
        shape.reverse();
        Ok(TensorInfo { name, shape: shape.into_iter().map(|length| length as usize).collect(), kind, offset, bytes })
    }
}

#[cfg(test)]
mod tests;
