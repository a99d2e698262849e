//! Linux bzImage by the 64-bit boot protocol (Linux, Documentation/arch/x86/boot.rst).
//!
//! A kernel's file comes in pieces, from the root cell over a stream or from memory in
//! one: [`KernelLoader`] reads its [`Header`], chooses where the kernel goes, and writes
//! its protected-mode part straight there. [`LoadedKernel`] then finds room for an
//! initrd, and writes what the kernel is handed: boot parameters, command line, page
//! tables and a GDT. [`LinuxEntry`] has the registers of its first instruction.
//!
//! Everything is placed below 4 GiB, and a file is never trusted: whatever is wrong with
//! it is a [`LinuxError`] and at worst has filled memory of its own cell.

mod entry;
mod header;
mod loader;

pub use entry::{Handover, LinuxEntry};
pub use header::Header;
pub use loader::{KernelLoader, LoadedKernel};

use crate::memory::guest::GuestMemoryError;
use thiserror::Error;

/// Why a kernel cannot be loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum LinuxError {
    /// A field of the setup header has a value that cannot be used.
    #[error("kernel: field {field} of the setup header is {value:#x}; allowed: {allowed}")]
    Field {
        /// The field's name in the boot protocol.
        field: &'static str,
        /// What the file has there.
        value: u64,
        /// What could be used.
        allowed: &'static str,
    },
    /// The file ends too early.
    #[error("kernel: the file has {have} bytes, but {need} are needed")]
    Truncated {
        /// How many bytes there are.
        have: u64,
        /// How many there should be at least.
        need: u64,
    },
    /// More bytes came than were announced.
    #[error("kernel: {have} bytes came, but only {announced} were announced")]
    Excess {
        /// How many bytes came.
        have: u64,
        /// How many were announced.
        announced: u64,
    },
    /// There is no free RAM of the size and place needed.
    #[error("{what}: no {size} bytes of free RAM {place}")]
    NoRoom {
        /// For what.
        what: &'static str,
        /// How many bytes.
        size: u64,
        /// Where they would have to be.
        place: &'static str,
    },
    /// The command line is longer than the kernel takes.
    #[error("command line: {length} bytes; the kernel takes 0 to {max}")]
    CommandLine {
        /// Its length.
        length: u64,
        /// The header's `cmdline_size`.
        max: u32,
    },
    /// The command line has a zero byte in it, where the kernel would stop reading.
    #[error("command line: byte {at} is zero; allowed: any other value")]
    CommandLineZero {
        /// The offset of the first zero byte.
        at: usize,
    },
    /// The memory map does not fit the boot parameters.
    #[error("memory map: {entries} entries; the boot protocol takes 0 to 128")]
    MapEntries {
        /// How many entries there are.
        entries: usize,
    },
    /// A place that the memory map calls RAM is none.
    #[error(transparent)]
    Memory(#[from] GuestMemoryError),
}

#[cfg(test)]
mod tests;
