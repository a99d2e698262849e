//! Files that cells are started from.

use super::BootError;
use alloc::vec;
use alloc::vec::Vec;
use thiserror::Error;

/// A file that can be read at any offset. Its content does not change.
pub trait Image {
    /// Its size in bytes.
    fn size(&self) -> u64;

    /// Reads the bytes from `offset` on, as many as `buf` has.
    ///
    /// # Errors
    /// When they cannot all be had; `buf` is then unspecified.
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), ImageError>;
}

/// Bytes of a file cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{len} bytes of the file cannot be read at {offset}")]
pub struct ImageError {
    /// Where they begin.
    pub offset: u64,
    /// How many there are.
    pub len: usize,
}

/// A file in memory.
impl Image for &[u8] {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), ImageError> {
        let start = usize::try_from(offset).ok();
        let bytes = start.and_then(|start| self.get(start..)?.get(..buf.len()));
        buf.copy_from_slice(bytes.ok_or(ImageError { offset, len: buf.len() })?);
        Ok(())
    }
}

/// Reads `N` bytes of the kernel's file at `offset`.
pub(super) fn array<const N: usize>(file: &dyn Image, offset: u64) -> Result<[u8; N], BootError> {
    check_range(file, offset, N as u64)?;
    let mut bytes = [0; N];
    file.read(offset, &mut bytes)?;
    Ok(bytes)
}

/// Reads `len` bytes of the kernel's file at `offset`.
pub(super) fn bytes(file: &dyn Image, offset: u64, len: usize) -> Result<Vec<u8>, BootError> {
    check_range(file, offset, len as u64)?;
    let mut bytes = vec![0; len];
    file.read(offset, &mut bytes)?;
    Ok(bytes)
}

/// Sees that the kernel's file has `len` bytes at `offset`.
pub(super) fn check_range(file: &dyn Image, offset: u64, len: u64) -> Result<(), BootError> {
    match (file.size(), offset.saturating_add(len)) {
        // No file ends where the sum would wrap.
        (have, need) if need > have || need == u64::MAX => Err(BootError::Truncated { have, need }),
        _ => Ok(()),
    }
}
