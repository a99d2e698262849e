//! Split virtqueues, read as hostile input (virtio 1.2, 2.7).
//!
//! The rings lie in guest memory, and the driver may be wrong, malicious, or change them
//! while they are read. So each field is read once and the copy is checked; the device's own
//! indices are never read back from the guest; and a descriptor chain is walked once, into a
//! [`Chain`] of at most as many segments as the queue has descriptors.

mod chain;
#[cfg(test)]
mod tests;

use crate::memory::address::Gpa;
use crate::memory::guest::{GuestMemory, GuestMemoryError};
use core::sync::atomic::{Ordering, fence};
use thiserror::Error;

pub use chain::Chain;

/// Size of a descriptor, in bytes.
const DESCRIPTOR_BYTES: u64 = 16;
/// `VIRTQ_DESC_F_NEXT`: the chain goes on at `next`.
const DESC_NEXT: u16 = 1;
/// `VIRTQ_DESC_F_WRITE`: the device writes here.
const DESC_WRITE: u16 = 2;
/// `VIRTQ_DESC_F_INDIRECT`: a table of descriptors.
const DESC_INDIRECT: u16 = 4;
/// `VIRTQ_AVAIL_F_NO_INTERRUPT`: the driver wants no used buffer notifications.
const AVAIL_NO_INTERRUPT: u16 = 1;

/// What is wrong with a queue. The driver is to blame; its device needs a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum QueueError {
    /// The size is none that a queue can have.
    #[error("queue size is {size}, must be a power of two from 1 to {max}")]
    Size {
        /// What the driver has set.
        size: u32,
        /// The queue's largest size.
        max: u16,
    },
    /// A part of the queue is not aligned.
    #[error("{part} is at {gpa}, must be a multiple of {align}")]
    Alignment {
        /// Which part.
        part: &'static str,
        /// Where the driver has put it.
        gpa: Gpa,
        /// What its address must be a multiple of.
        align: u64,
    },
    /// More buffers are available than the queue has descriptors.
    #[error("available index is {idx}, must be at most {size} after {next}")]
    AvailableIndex {
        /// The driver's index.
        idx: u16,
        /// The first entry that the device has not taken.
        next: u16,
        /// The queue's size.
        size: u16,
    },
    /// A descriptor index is out of range.
    #[error("descriptor index is {index}, must be below {size}")]
    DescriptorIndex {
        /// The index.
        index: u16,
        /// The queue's size.
        size: u16,
    },
    /// A chain is longer than the queue has descriptors: it must be a loop.
    #[error("descriptor chain at {head} has more than {size} descriptors")]
    Loop {
        /// The chain's first descriptor.
        head: u16,
        /// The queue's size.
        size: u16,
    },
    /// An indirect descriptor, which was not negotiated.
    #[error("descriptor {index} is indirect, must be direct")]
    Indirect {
        /// The descriptor.
        index: u16,
    },
    /// A readable descriptor comes after a writable one.
    #[error("descriptor {index} is readable, must be writable as one before it in its chain is")]
    Order {
        /// The descriptor.
        index: u16,
    },
    /// A chain has 2^32 bytes or more.
    #[error("descriptor chain at {head} has 2^32 bytes or more")]
    TooLong {
        /// The chain's first descriptor.
        head: u16,
    },
    /// A chain has less bytes than what must go into it, none at all among them.
    #[error("descriptor chain at {head} has {len} bytes, must have at least {need}")]
    TooShort {
        /// The chain's first descriptor.
        head: u16,
        /// How many bytes it has in the direction that counts.
        len: usize,
        /// How many it must have.
        need: usize,
    },
    /// A ring or a buffer is not in the cell's RAM.
    #[error(transparent)]
    Memory(#[from] GuestMemoryError),
}

/// The three parts of a queue, as the driver sets them one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The descriptor table.
    Descriptors,
    /// The available ring ("driver area").
    Driver,
    /// The used ring ("device area").
    Device,
}

/// One virtqueue.
#[derive(Debug)]
pub struct Queue {
    max_size: u16,
    /// As written by the driver; checked when the queue is made ready.
    size_written: u32,
    /// 0 while the queue is not ready.
    size: u16,
    descriptors: Gpa,
    driver: Gpa,
    device: Gpa,
    event_idx: bool,
    /// The available ring's next entry to take.
    next_avail: u16,
    /// The used ring's next entry to fill.
    next_used: u16,
    /// `next_used` when the driver's wish for an interrupt was last looked at.
    signalled: u16,
}

impl Queue {
    /// A queue of up to `max_size` descriptors, not ready.
    pub fn new(max_size: u16) -> Self {
        Self {
            max_size,
            size_written: 0,
            size: 0,
            descriptors: Gpa::default(),
            driver: Gpa::default(),
            device: Gpa::default(),
            event_idx: false,
            next_avail: 0,
            next_used: 0,
            signalled: 0,
        }
    }

    /// Back to what [`new`](Self::new) gave.
    pub fn reset(&mut self) {
        *self = Self::new(self.max_size);
    }

    /// The largest size of the queue, in descriptors.
    pub const fn max_size(&self) -> u16 {
        self.max_size
    }

    /// Whether the driver has made the queue ready.
    pub const fn is_ready(&self) -> bool {
        self.size != 0
    }

    /// Sets the size that the queue is to have when it is made ready.
    pub fn set_size(&mut self, size: u32) {
        self.size_written = size;
    }

    /// Sets the low or the high half of a part's address.
    pub fn set_address(&mut self, part: Part, high: bool, half: u32) {
        let address = match part {
            Part::Descriptors => &mut self.descriptors,
            Part::Driver => &mut self.driver,
            Part::Device => &mut self.device,
        };
        let shift = if high { 32 } else { 0 };
        *address = Gpa::new(address.raw() & !(0xffff_ffff << shift) | u64::from(half) << shift);
    }

    /// Checks size and addresses, and makes the queue ready, from index 0.
    ///
    /// # Errors
    /// [`QueueError::Size`] or [`QueueError::Alignment`] (virtio 1.2, 2.7); the queue is then
    /// not ready. That it lies in RAM is found out when it is used.
    pub fn make_ready(&mut self) -> Result<(), QueueError> {
        self.make_unready();
        let size = u16::try_from(self.size_written)
            .ok()
            .filter(|size| size.is_power_of_two() && *size <= self.max_size)
            .ok_or(QueueError::Size { size: self.size_written, max: self.max_size })?;
        for (part, gpa, align) in [
            ("descriptor table", self.descriptors, 16),
            ("available ring", self.driver, 2),
            ("used ring", self.device, 4),
        ] {
            if !gpa.is_aligned(align) {
                return Err(QueueError::Alignment { part, gpa, align });
            }
        }
        self.size = size;
        Ok(())
    }

    /// Takes the queue out of use.
    pub fn make_unready(&mut self) {
        self.size = 0;
        (self.next_avail, self.next_used, self.signalled) = (0, 0, 0);
    }

    /// Whether `VIRTIO_F_EVENT_IDX` was negotiated.
    pub fn set_event_idx(&mut self, negotiated: bool) {
        self.event_idx = negotiated;
    }

    /// Takes the next available buffer into `chain`; `false` when there is none, as in a
    /// queue that is not ready.
    ///
    /// # Errors
    /// What is wrong with the ring or the chain.
    pub fn pop(&mut self, memory: &dyn GuestMemory, chain: &mut Chain) -> Result<bool, QueueError> {
        if self.available(memory)? == 0 {
            return Ok(false);
        }
        // The entry was written before the index that was just read.
        fence(Ordering::Acquire);
        let slot = self.next_avail & self.mask();
        let head = memory.read_u16(at(self.driver, 4 + 2 * u64::from(slot), 2)?)?;
        chain.walk(memory, self.descriptors, self.size, head)?;
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(true)
    }

    /// Gives the buffer that began with descriptor `head` back, with `written` bytes of it
    /// written.
    ///
    /// # Errors
    /// When the used ring is not in RAM.
    pub fn push_used(&mut self, memory: &dyn GuestMemory, head: u16, written: u32) -> Result<(), QueueError> {
        let slot = self.next_used & self.mask();
        let [h0, h1] = head.to_le_bytes();
        let [w0, w1, w2, w3] = written.to_le_bytes();
        memory.write(at(self.device, 4 + 8 * u64::from(slot), 8)?, &[h0, h1, 0, 0, w0, w1, w2, w3])?;
        // The driver must see the entry, and the buffer, before the index.
        fence(Ordering::Release);
        self.next_used = self.next_used.wrapping_add(1);
        memory.write(at(self.device, 2, 2)?, &self.next_used.to_le_bytes())?;
        Ok(())
    }

    /// Asks to be notified of the next buffer that becomes available, and returns whether
    /// there is one already.
    ///
    /// # Errors
    /// When a ring is not in RAM, or the available index is out of range.
    pub fn arm(&mut self, memory: &dyn GuestMemory) -> Result<bool, QueueError> {
        if self.event_idx && self.is_ready() {
            let avail_event = at(self.device, 4 + 8 * u64::from(self.size), 2)?;
            memory.write(avail_event, &self.next_avail.to_le_bytes())?;
            // Either the driver sees the event index or the device sees its new entry.
            fence(Ordering::SeqCst);
        }
        Ok(self.available(memory)? != 0)
    }

    /// Whether the driver wants an interrupt for the buffers given back since the last call.
    ///
    /// # Errors
    /// When the available ring is not in RAM.
    pub fn wants_interrupt(&mut self, memory: &dyn GuestMemory) -> Result<bool, QueueError> {
        let new = self.next_used;
        let old = core::mem::replace(&mut self.signalled, new);
        if new == old {
            return Ok(false);
        }
        // Either the driver sees the used index or the device sees its wish.
        fence(Ordering::SeqCst);
        if self.event_idx {
            let used_event = memory.read_u16(at(self.driver, 4 + 2 * u64::from(self.size), 2)?)?;
            // virtio 1.2, 2.7.7.2: the index that the driver waits for is among the new ones.
            Ok(new.wrapping_sub(used_event).wrapping_sub(1) < new.wrapping_sub(old))
        } else {
            Ok(memory.read_u16(at(self.driver, 0, 2)?)? & AVAIL_NO_INTERRUPT == 0)
        }
    }

    fn available(&self, memory: &dyn GuestMemory) -> Result<u16, QueueError> {
        if !self.is_ready() {
            return Ok(0);
        }
        let idx = memory.read_u16(at(self.driver, 2, 2)?)?;
        let available = idx.wrapping_sub(self.next_avail);
        if available > self.size {
            return Err(QueueError::AvailableIndex { idx, next: self.next_avail, size: self.size });
        }
        Ok(available)
    }

    /// Turns a free-running index into a ring's slot.
    const fn mask(&self) -> u16 {
        self.size.wrapping_sub(1)
    }
}

/// `offset` bytes into the part of a queue at `base`, for an access of `len` bytes.
fn at(base: Gpa, offset: u64, len: u64) -> Result<Gpa, GuestMemoryError> {
    base.checked_add(offset).ok_or(GuestMemoryError { gpa: base, len: offset.saturating_add(len) })
}
