//! What management needs done: effects only, carried out by the kernel.
//!
//! Nothing here blocks: what takes long is begun by one call and asked for by another, or
//! done in slices. [`Node`](super::Node) calls from [`work`](super::Node::work) alone, from
//! one CPU at a time, and keeps the order that each method states. A cell's CPUs and memory
//! are `Node`'s to account for; a platform never moves them by itself.

use crate::cell::config::CellResources;
use crate::hal::{CellId, CpuId};
use crate::memory::address::Hpa;
use alloc::string::String;
use alloc::vec::Vec;
use bulkhead_abi::message::{FailureReport, LoadKind, VcpuDetails};
use thiserror::Error;

/// Why the platform could not do its part, as a sentence without a full stop.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct PlatformError(pub String);

/// How far the taking of a CPU from the root cell is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimState {
    /// The root cell has not parked it yet.
    Pending,
    /// It has left the root cell and waits for a guest cell.
    Claimed,
    /// It cannot be had, for this reason; it stays with the root cell.
    Refused(String),
}

/// What a guest cell that was started is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CellStatus {
    /// A vCPU of it runs, or is on its way out of the guest.
    Running,
    /// All vCPUs are parked: it was turned off, by itself or by [`Platform::stop_cell`].
    Stopped {
        /// Who or what turned it off.
        reason: String,
    },
    /// All vCPUs are parked: it did what cannot be carried on from.
    Failed,
}

/// Facts of the node that do not change after boot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeFacts {
    /// The node's name.
    pub name: String,
    /// The hypervisor's version.
    pub version: String,
    /// The commit it was built from.
    pub commit: String,
    /// How it was booted: `pvh`, `grub-bios`, `grub-uefi`.
    pub boot: String,
    /// The virtualisation it uses: `svm`, `vmx`, `el2`.
    pub backend: String,
    /// Frequency of the host's counter in Hz.
    pub counter_hz: u64,
    /// The root cell's counter minus the host's.
    pub counter_offset: i64,
    /// Bytes of memory of the root cell.
    pub root_memory: u64,
}

/// Use of the hypervisor's heap, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeapUse {
    /// In use.
    pub used: u64,
    /// In all.
    pub total: u64,
}

/// The effects of management.
pub trait Platform {
    /// Nanoseconds since boot; never goes back.
    fn now_ns(&self) -> u64;

    /// Use of the heap.
    fn heap(&self) -> HeapUse;

    /// Begins to take `cpu`, which the root cell's system has turned off, from the root
    /// cell. Followed by [`claim_state`](Self::claim_state) until that is not pending, or by
    /// [`release_cpu`](Self::release_cpu).
    fn claim_cpu(&mut self, cpu: CpuId);

    /// How far the taking of `cpu` is.
    fn claim_state(&mut self, cpu: CpuId) -> ClaimState;

    /// Gives `cpu` back to the root cell, in which it then waits to be started; also ends
    /// a claim that is pending. No cell has it.
    fn release_cpu(&mut self, cpu: CpuId);

    /// Zeroes `len` bytes of pool memory at `base`: up to [`ZERO_SLICE`](super::ZERO_SLICE),
    /// multiples of 4 KiB. No cell maps them.
    fn zero(&mut self, base: Hpa, len: u64);

    /// Builds a cell that does not run yet: stage 2, vCPUs, devices. Its CPUs are claimed or
    /// were free, its memory is zeroed.
    ///
    /// # Errors
    /// When something is not to be had; nothing of the cell is then left.
    fn prepare_cell(&mut self, cell: CellId, resources: &CellResources) -> Result<(), PlatformError>;

    /// Announces a file of `size` bytes, at least 1, for a prepared cell; replaces one of
    /// the same kind.
    ///
    /// # Errors
    /// When the cell has no use or no room for it; says which file.
    fn load_begin(&mut self, cell: CellId, what: LoadKind, size: u64) -> Result<(), PlatformError>;

    /// Takes the next bytes of the file, never more than announced.
    ///
    /// # Errors
    /// When the cell has no room for it; says which file, which is then void.
    fn load_data(&mut self, cell: CellId, what: LoadKind, data: &[u8]) -> Result<(), PlatformError>;

    /// Checks the files, of which all bytes have arrived, and builds the state in which the
    /// cell starts.
    ///
    /// # Errors
    /// What is wrong with which file. Files may be loaded again and this tried again.
    fn load_finish(&mut self, cell: CellId) -> Result<(), PlatformError>;

    /// Starts a cell whose loading is finished, once.
    ///
    /// # Errors
    /// When it cannot; the cell is then as before.
    fn start_cell(&mut self, cell: CellId) -> Result<(), PlatformError>;

    /// Turns off all vCPUs of a cell that was started; [`cell_status`](Self::cell_status)
    /// tells when they are.
    fn stop_cell(&mut self, cell: CellId);

    /// What a cell that was started is doing. Once it is not running, it stays so.
    fn cell_status(&mut self, cell: CellId) -> CellStatus;

    /// Why a failed cell failed.
    fn failure_report(&mut self, cell: CellId) -> FailureReport;

    /// Exits of each vCPU of a prepared cell.
    fn vcpus(&mut self, cell: CellId) -> Vec<VcpuDetails>;

    /// Takes a prepared cell apart; none of its vCPUs runs. Its CPUs are released and its
    /// memory zeroed afterwards.
    fn tear_down_cell(&mut self, cell: CellId);

    /// Copies console output of a prepared cell from `position`, counted in bytes since the
    /// cell was prepared, or from the oldest byte still held, to `buf`. Returns the position
    /// behind what was copied, and how many bytes that were; 0 when there are none yet.
    fn console_read(&mut self, cell: CellId, position: u64, buf: &mut [u8]) -> (u64, usize);

    /// Offers input to the console of a prepared cell. Returns how many bytes it took.
    fn console_write(&mut self, cell: CellId, data: &[u8]) -> usize;

    /// Copies the hypervisor's log as [`console_read`](Self::console_read) does a console.
    fn log_read(&mut self, position: u64, buf: &mut [u8]) -> (u64, usize);
}
