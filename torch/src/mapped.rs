//! Tensors straight from a file's pages: mapped, converted and copied to where they are wanted, without a second copy in the process's
//! own memory.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use tch::{Device, Kind, TchError, Tensor};

/// Why bytes of a file do not become a tensor.
#[derive(Debug, thiserror::Error)]
pub enum MappedError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Torch(#[from] TchError),
}

/// A tensor of `shape` as `kind` on `device`, from the elements stored as `stored` at byte `offset` of `file`.
///
/// The pages are mapped for this one tensor and let go again, so that what has been read counts as nobody's memory. On the CPU one pass
/// converts and copies; a GPU gets the stored bytes and converts them itself. As with any mapping, a file that another process cuts short
/// while this runs ends the process.
///
/// # Errors
/// The file cannot be mapped or ends before the tensor does, or libtorch has no room for it.
pub fn read_mapped(
    file: &File,
    offset: u64,
    shape: &[i64],
    stored: Kind,
    kind: Kind,
    device: Device,
) -> Result<Tensor, MappedError> {
    let first_kind = if device == Device::Cpu { kind } else { stored };
    let mut tensor = Tensor::f_empty(shape, (first_kind, device))?;
    let size = stored.elt_size_in_bytes();
    let length = tensor.numel() * size;
    if length > 0 {
        let mapping = Mapping::new(file, offset, length)?;
        let source = if (mapping.bytes() as usize).is_multiple_of(size) {
            let mut strides = vec![1; shape.len()];
            for dimension in (1..shape.len()).rev() {
                strides[dimension - 1] = strides[dimension] * shape[dimension];
            }
            #[allow(unsafe_code)]
            // SAFETY: the mapping holds `length` bytes, which these contiguous elements fill exactly, at an address that their size
            // divides; any bytes are valid elements. The tensor is only read, and dropped before the mapping, its owner, is.
            unsafe {
                Tensor::f_from_blob(mapping.bytes(), shape, &strides, stored, Device::Cpu)?
            }
        } else {
            // The format does not ask writers to align what they write.
            #[allow(unsafe_code)]
            // SAFETY: the mapping holds so many bytes, and outlives the slice.
            let mut bytes = unsafe { std::slice::from_raw_parts(mapping.bytes(), length) };
            crate::read(&mut bytes, shape, stored)?
        };
        let _guard = tch::no_grad_guard();
        tensor.f_copy_(&source)?;
    }
    Ok(tensor.f_to_kind(kind)?)
}

/// Pages of a file, readable while this lives.
struct Mapping {
    start: *mut libc::c_void,
    /// From the start of a page, which is where mappings begin.
    before: usize,
    length: usize,
}

impl Mapping {
    /// `length` bytes, more than none, from byte `offset` on.
    fn new(file: &File, offset: u64, length: usize) -> io::Result<Self> {
        // What lies behind a file's end can be mapped too, but not read.
        let end = offset.checked_add(length as u64).filter(|&end| file.metadata().is_ok_and(|file| end <= file.len()));
        if end.is_none() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file has become shorter"));
        }
        #[allow(unsafe_code)]
        // SAFETY: sysconf only reads.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.max(1) as u64;
        let before = (offset % page) as usize;
        let start_offset = libc::off_t::try_from(offset - before as u64).map_err(io::Error::other)?;
        #[allow(unsafe_code)]
        // SAFETY: the kernel chooses a place that nothing else uses, and the descriptor is open.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), before + length, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), start_offset)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapping = Self { start, before, length: before + length };
        // All of it is read soon, once and in order: a hint, whose refusal costs nothing but time.
        #[allow(unsafe_code)]
        // SAFETY: the range is this mapping's own.
        unsafe {
            libc::madvise(mapping.start, mapping.length, libc::MADV_WILLNEED);
        }
        Ok(mapping)
    }

    fn bytes(&self) -> *const u8 {
        #[allow(unsafe_code)]
        // SAFETY: `before` is less than the mapping's length.
        unsafe {
            self.start.cast::<u8>().cast_const().add(self.before)
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        #[allow(unsafe_code)]
        // SAFETY: the range was mapped by `new`, and nothing borrowed from it is left.
        unsafe {
            libc::munmap(self.start, self.length);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::io::Write;

    /// A file with so many bytes before the bf16 values 0, 1, 2, …
    fn written(before: usize, values: i64) -> File {
        let tensor = Tensor::arange(values, (Kind::BFloat16, Device::Cpu));
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![0xff; before]).unwrap();
        file.write_all(&crate::to_bytes(&tensor).unwrap()).unwrap();
        file
    }

    #[test]
    fn any_offset_is_read_and_converted() {
        for before in [0, 2, 8, 33, 4095, 4096, 70_001] {
            let file = written(before, 256);
            for kind in [Kind::BFloat16, Kind::Float, Kind::Half] {
                let tensor = read_mapped(&file, before as u64, &[8, 32], Kind::BFloat16, kind, Device::Cpu).unwrap();
                assert_eq!((tensor.size(), tensor.kind()), (vec![8, 32], kind));
                let expected: Vec<f32> = (0..256).map(|value| value as f32).collect();
                assert_eq!(crate::to_f32s(&tensor), expected, "{before} bytes before");
            }
        }
    }

    #[test]
    fn the_tensor_outlives_its_file() {
        let file = written(0, 4);
        let tensor = read_mapped(&file, 0, &[4], Kind::BFloat16, Kind::BFloat16, Device::Cpu).unwrap();
        file.set_len(0).unwrap();
        drop(file);
        assert_eq!(crate::to_f32s(&tensor), [0.0, 1.0, 2.0, 3.0]);
    }

    #[test]
    fn nothing_is_read_and_too_little_is_an_error() {
        let file = written(4, 4);
        let read = |offset, shape: &[i64]| read_mapped(&file, offset, shape, Kind::BFloat16, Kind::Float, Device::Cpu);
        assert_eq!(read(12, &[0, 5]).unwrap().size(), [0, 5]);
        assert_eq!(crate::to_f32s(&read(10, &[]).unwrap()), [3.0]);
        for (offset, rows) in [(4, 5), (12, 1), (u64::MAX, 1), (0, 1 << 40)] {
            assert!(matches!(read(offset, &[rows]), Err(MappedError::Io(_) | MappedError::Torch(_))), "{offset}, {rows}");
        }
    }
}
