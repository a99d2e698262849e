//! A descriptor chain, copied out of guest memory and checked.

use super::{DESC_INDIRECT, DESC_NEXT, DESC_WRITE, DESCRIPTOR_BYTES, QueueError, at};
use crate::memory::address::Gpa;
use crate::memory::guest::{GuestMemory, GuestMemoryError};
use alloc::vec::Vec;
use core::ops::Range;

/// One buffer: a readable part and a writable one, each of any number of pieces. Kept and
/// used again for the next buffer, so that no buffer costs an allocation.
#[derive(Debug, Default)]
pub struct Chain {
    head: u16,
    readable: Segments,
    writable: Segments,
}

impl Chain {
    /// The chain's first descriptor, which names the buffer in the used ring.
    pub const fn head(&self) -> u16 {
        self.head
    }

    /// How many bytes the device may read.
    pub const fn readable_len(&self) -> usize {
        self.readable.len
    }

    /// How many bytes the device may write.
    pub const fn writable_len(&self) -> usize {
        self.writable.len
    }

    /// Fills `buf` from the readable part, from its byte `offset` on.
    ///
    /// # Errors
    /// [`QueueError::TooShort`], or when it is not all in RAM.
    pub fn read(&self, memory: &dyn GuestMemory, offset: usize, buf: &mut [u8]) -> Result<(), QueueError> {
        let len = buf.len();
        self.readable.visit(self.head, offset, len, |gpa, range| memory.read(gpa, &mut buf[range]))
    }

    /// Copies `data` into the writable part, from its byte `offset` on.
    ///
    /// # Errors
    /// [`QueueError::TooShort`], or when it is not all in RAM.
    pub fn write(&self, memory: &dyn GuestMemory, offset: usize, data: &[u8]) -> Result<(), QueueError> {
        self.writable.visit(self.head, offset, data.len(), |gpa, range| memory.write(gpa, &data[range]))
    }

    /// Replaces the chain by that at `head` of the `size` descriptors at `table`.
    pub(super) fn walk(
        &mut self,
        memory: &dyn GuestMemory,
        table: Gpa,
        size: u16,
        head: u16,
    ) -> Result<(), QueueError> {
        self.head = head;
        self.readable.clear();
        self.writable.clear();
        let mut index = head;
        for _ in 0..size {
            if index >= size {
                return Err(QueueError::DescriptorIndex { index, size });
            }
            let mut raw = [0; 16];
            memory.read(at(table, DESCRIPTOR_BYTES * u64::from(index), DESCRIPTOR_BYTES)?, &mut raw)?;
            let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, f0, f1, n0, n1] = raw;
            let gpa = Gpa::new(u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]));
            let len = u32::from_le_bytes([l0, l1, l2, l3]);
            let flags = u16::from_le_bytes([f0, f1]);
            if flags & DESC_INDIRECT != 0 {
                return Err(QueueError::Indirect { index });
            }
            if gpa.checked_add(u64::from(len)).is_none() {
                return Err(GuestMemoryError { gpa, len: u64::from(len) }.into());
            }
            let part = if flags & DESC_WRITE != 0 {
                &mut self.writable
            } else if self.writable.list.is_empty() {
                &mut self.readable
            } else {
                return Err(QueueError::Order { index });
            };
            part.list.push((gpa, len as usize));
            part.len += len as usize;
            if self.readable.len + self.writable.len > u32::MAX as usize {
                return Err(QueueError::TooLong { head });
            }
            if flags & DESC_NEXT == 0 {
                return match self.readable.len + self.writable.len {
                    0 => Err(QueueError::TooShort { head, len: 0, need: 1 }),
                    _ => Ok(()),
                };
            }
            index = u16::from_le_bytes([n0, n1]);
        }
        Err(QueueError::Loop { head, size })
    }
}

/// One direction's pieces, in order.
#[derive(Debug, Default)]
struct Segments {
    list: Vec<(Gpa, usize)>,
    /// The sum of their lengths.
    len: usize,
}

impl Segments {
    fn clear(&mut self) {
        self.list.clear();
        self.len = 0;
    }

    /// Calls `each` with the guest's address of every piece of the `len` bytes from `offset`
    /// on, and the piece's place among them.
    fn visit(
        &self,
        head: u16,
        offset: usize,
        len: usize,
        mut each: impl FnMut(Gpa, Range<usize>) -> Result<(), GuestMemoryError>,
    ) -> Result<(), QueueError> {
        let (mut skip, mut done) = (offset, 0);
        for &(gpa, size) in &self.list {
            if done == len {
                break;
            }
            let piece = size.saturating_sub(skip).min(len - done);
            if piece != 0 {
                each(at(gpa, skip as u64, piece as u64)?, done..done + piece)?;
                done += piece;
            }
            skip = skip.saturating_sub(size);
        }
        if done < len {
            return Err(QueueError::TooShort { head, len: self.len, need: offset.saturating_add(len) });
        }
        Ok(())
    }
}
