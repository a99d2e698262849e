//! Access to guest memory: bounds-checked copies.
//!
//! No Rust reference into guest memory ever exists, for a guest may write there at any
//! time. Read once, then check the copy.

use super::address::Gpa;
use thiserror::Error;

/// An access to guest memory that cannot be carried out: part of it is not RAM of the
/// cell. Nothing was read or written outside the cell's RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{len} bytes at guest physical address {gpa} are not all RAM of the cell")]
pub struct GuestMemoryError {
    /// Where the access began.
    pub gpa: Gpa,
    /// How many bytes it had.
    pub len: u64,
}

/// The RAM of one cell. Copies are not atomic as a whole; an access of 1, 2, 4 or 8
/// aligned bytes is a single one.
pub trait GuestMemory {
    /// Copies from guest memory at `gpa` to `buf`.
    ///
    /// # Errors
    /// When not all of it is RAM of the cell; `buf` is then unspecified.
    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Result<(), GuestMemoryError>;

    /// Copies `data` to guest memory at `gpa`, and marks what it touched as dirty.
    ///
    /// # Errors
    /// When not all of it is RAM of the cell; nothing is then written.
    fn write(&self, gpa: Gpa, data: &[u8]) -> Result<(), GuestMemoryError>;

    /// Reads a little-endian `u16`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn read_u16(&self, gpa: Gpa) -> Result<u16, GuestMemoryError> {
        let mut b = [0; 2];
        self.read(gpa, &mut b)?;
        Ok(u16::from_le_bytes(b))
    }

    /// Reads a little-endian `u32`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn read_u32(&self, gpa: Gpa) -> Result<u32, GuestMemoryError> {
        let mut b = [0; 4];
        self.read(gpa, &mut b)?;
        Ok(u32::from_le_bytes(b))
    }

    /// Reads a little-endian `u64`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn read_u64(&self, gpa: Gpa) -> Result<u64, GuestMemoryError> {
        let mut b = [0; 8];
        self.read(gpa, &mut b)?;
        Ok(u64::from_le_bytes(b))
    }

    /// The same where it can be had without a search, for paths that have another way to go.
    /// `None` says nothing.
    fn read_u64_quickly(&self, gpa: Gpa) -> Option<u64> {
        self.read_u64(gpa).ok()
    }
}

#[cfg(test)]
pub(crate) mod fake {
    //! Guest memory for host tests: one flat block.

    use super::*;
    use core::cell::RefCell;
    use std::vec::Vec;

    /// `size` bytes of RAM from guest physical address `base`.
    #[derive(Debug, Clone, PartialEq)]
    pub(crate) struct FakeMemory {
        base: u64,
        bytes: RefCell<Vec<u8>>,
    }

    impl FakeMemory {
        /// RAM at `base..base + size`, zeroed.
        pub(crate) fn new(base: u64, size: usize) -> Self {
            Self { base, bytes: RefCell::new(std::vec![0; size]) }
        }

        fn range(&self, gpa: Gpa, len: usize) -> Result<core::ops::Range<usize>, GuestMemoryError> {
            let error = GuestMemoryError { gpa, len: len as u64 };
            let start = usize::try_from(gpa.raw().checked_sub(self.base).ok_or(error)?).map_err(|_| error)?;
            let end = start.checked_add(len).ok_or(error)?;
            if end > self.bytes.borrow().len() {
                return Err(error);
            }
            Ok(start..end)
        }
    }

    impl GuestMemory for FakeMemory {
        fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Result<(), GuestMemoryError> {
            let range = self.range(gpa, buf.len())?;
            buf.copy_from_slice(&self.bytes.borrow()[range]);
            Ok(())
        }

        fn write(&self, gpa: Gpa, data: &[u8]) -> Result<(), GuestMemoryError> {
            let range = self.range(gpa, data.len())?;
            self.bytes.borrow_mut()[range].copy_from_slice(data);
            Ok(())
        }
    }
}
