//! What a cell is made of.

use crate::hal::CpuId;
use crate::memory::address::Hpa;
use alloc::string::String;
use alloc::vec::Vec;
use bulkhead_abi::message::Action;

/// A range of host memory: whole units of [`MEMORY_UNIT`](bulkhead_abi::message::MEMORY_UNIT).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostRange {
    /// Its first byte.
    pub base: Hpa,
    /// Its bytes.
    pub len: u64,
}

/// All that a guest cell is built from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CellResources {
    /// Its name, for messages.
    pub name: String,
    /// Its CPUs: the one at index *n* runs vCPU *n*.
    pub cpus: Vec<CpuId>,
    /// Its memory. Guest RAM is these ranges one after the other; where the board's memory
    /// map has a hole, RAM goes on behind it.
    pub memory: Vec<HostRange>,
    /// The kernel's command line.
    pub cmdline: String,
    /// Whether it has a serial console.
    pub console: bool,
    /// The time of day when the node booted, by who asked for the cell, in nanoseconds since
    /// 1970-01-01T00:00Z.
    pub boot_wall_clock_ns: u64,
    /// What happens when its guest asks for a reset.
    pub on_reboot: Action,
    /// What happens when it fails.
    pub on_crash: Action,
    /// Where its specification comes from, for people.
    pub origin: Option<String>,
}

impl CellResources {
    /// Bytes of memory.
    pub fn memory_bytes(&self) -> u64 {
        self.memory.iter().map(|range| range.len).sum()
    }
}
