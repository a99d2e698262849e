//! A kernel's file, piece by piece, to its place.

use super::header::{HEADER_END, Header};
use super::{Handover, LinuxEntry, LinuxError, entry};
use crate::memory::address::Gpa;
use crate::memory::guest::GuestMemory;
use crate::x86::boot::e820::{FOUR_GIB, FreeSpace};
use alloc::vec::Vec;

/// Below this the BIOS' own memory and holes are; kernels go above.
const ONE_MIB: u64 = 1 << 20;

/// Takes a bzImage in pieces of any size, in order.
#[derive(Debug)]
pub struct KernelLoader {
    size: u64,
    received: u64,
    first_bytes: Vec<u8>,
    space: FreeSpace,
    placed: Option<(Header, Gpa)>,
}

impl KernelLoader {
    /// Begins to load a file of `size` bytes into `space`.
    pub const fn new(size: u64, space: FreeSpace) -> Self {
        Self { size, received: 0, first_bytes: Vec::new(), space, placed: None }
    }

    /// Takes the file's next bytes. The setup part is kept only as far as it is needed;
    /// what comes behind the protected-mode part (a signature) is dropped.
    ///
    /// # Errors
    /// When the file is unusable, longer than announced, or finds no place.
    pub fn data(&mut self, bytes: &[u8], memory: &dyn GuestMemory) -> Result<(), LinuxError> {
        let offset = self.received;
        let received = offset.saturating_add(bytes.len() as u64);
        if received > self.size {
            return Err(LinuxError::Excess { have: received, announced: self.size });
        }
        let missing = HEADER_END - self.first_bytes.len();
        self.first_bytes.extend_from_slice(bytes.get(..missing).unwrap_or(bytes));
        self.received = received;
        if self.first_bytes.len() < HEADER_END {
            return Ok(());
        }
        let (header, kernel) = match self.placed {
            Some(placed) => placed,
            None => self.place()?,
        };
        self.placed = Some((header, kernel));
        // Offsets in the protected-mode part: of these bytes' start, and how many of them
        // belong to the setup part before it.
        let skip = header.setup_size.saturating_sub(offset);
        let at = offset.saturating_sub(header.setup_size);
        let rest = usize::try_from(skip).ok().and_then(|skip| bytes.get(skip..)).unwrap_or_default();
        let left = header.payload_size.saturating_sub(at);
        let payload = usize::try_from(left).ok().and_then(|left| rest.get(..left)).unwrap_or(rest);
        if !payload.is_empty() {
            memory.write(Gpa::new(kernel.raw() + at), payload)?;
        }
        Ok(())
    }

    /// Ends the file.
    ///
    /// # Errors
    /// When there is less of it than was announced or than its header needs.
    pub fn finish(self) -> Result<LoadedKernel, LinuxError> {
        let have = self.received;
        let need = self.placed.map_or(HEADER_END as u64, |(h, _)| h.setup_size + h.payload_size);
        match self.placed {
            Some((header, kernel)) if have >= need && have == self.size => {
                Ok(LoadedKernel { header, kernel, first_bytes: self.first_bytes, space: self.space })
            }
            _ => Err(LinuxError::Truncated { have, need: need.max(self.size) }),
        }
    }

    fn place(&mut self) -> Result<(Header, Gpa), LinuxError> {
        let header = Header::parse(&self.first_bytes)?;
        let need = header.setup_size + header.payload_size;
        if self.size < need {
            return Err(LinuxError::Truncated { have: self.size, need });
        }
        let (preferred, size) = (header.pref_address.raw(), header.init_size);
        let fits_preferred =
            preferred >= ONE_MIB && preferred.checked_add(size).is_some_and(|e| e <= FOUR_GIB);
        let kernel = fits_preferred.then(|| self.space.take_at(preferred, size)).flatten();
        let elsewhere = |space: &mut FreeSpace| {
            header.relocatable.then(|| space.take_lowest(size, header.kernel_alignment, ONE_MIB..FOUR_GIB))?
        };
        let kernel = kernel.or_else(|| elsewhere(&mut self.space)).ok_or(LinuxError::NoRoom {
            what: "kernel",
            size,
            place: if header.relocatable {
                "in one piece between 1 MiB and 4 GiB"
            } else {
                "at its pref_address, and it is not relocatable"
            },
        })?;
        Ok((header, kernel))
    }
}

/// A kernel that is in memory.
#[derive(Debug)]
pub struct LoadedKernel {
    pub(super) header: Header,
    pub(super) kernel: Gpa,
    pub(super) first_bytes: Vec<u8>,
    pub(super) space: FreeSpace,
}

impl LoadedKernel {
    /// What its header says.
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// Where it lies.
    pub const fn address(&self) -> Gpa {
        self.kernel
    }

    /// Finds a place for an initrd of `size` bytes, as high as the kernel can reach. The
    /// caller fills it.
    ///
    /// # Errors
    /// When there is none.
    pub fn place_initrd(&mut self, size: u64) -> Result<Gpa, LinuxError> {
        self.space.take_highest(size, self.header.initrd_limit).ok_or(LinuxError::NoRoom {
            what: "initrd",
            size,
            place: "in one piece below 4 GiB and the kernel's initrd_addr_max",
        })
    }

    /// Writes what the kernel is handed, and says how it is entered.
    ///
    /// # Errors
    /// When the command line is not one, the memory map is too long, or there is no room.
    pub fn build(self, handover: &Handover<'_>, memory: &dyn GuestMemory) -> Result<LinuxEntry, LinuxError> {
        entry::build(self, handover, memory)
    }
}
