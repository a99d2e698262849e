//! What management needs done: effects only, carried out by the kernel.
//!
//! Nothing here blocks: what takes long is begun by one call and asked for by another, or
//! done in slices. [`Node`](super::Node) calls from [`work`](super::Node::work) alone, from
//! one CPU at a time, and keeps the order that each method states. A cell's CPUs and memory
//! are `Node`'s to account for; a platform never moves them by itself.

use crate::cell::config::{CellResources, HostRange};
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
    /// All vCPUs stand still, as [`Platform::pause_cell`] wanted.
    Paused,
    /// All vCPUs are off.
    Off(Ending),
}

/// How a cell came to be off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// By [`Platform::stop_cell`].
    Request,
    /// The guest turned itself off.
    PowerOff,
    /// The guest asked for a reset.
    Reset,
    /// The guest wrote this to its exit port.
    Exit(u32),
    /// A vCPU did what cannot be carried on from; [`Platform::failure_report`] says what.
    Failed,
}

/// A file of a cell, in memory that its cell owns and no guest reaches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredFile {
    /// Which file.
    pub what: LoadKind,
    /// Where it is: it fills these ranges one after the other, the last one in part.
    pub memory: Vec<HostRange>,
    /// Its bytes, at least 1.
    pub size: u64,
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
    /// multiples of 4 KiB. No vCPU that is on reaches them.
    fn zero(&mut self, base: Hpa, len: u64);

    /// Makes a cell that does not run yet: stage 2, vCPUs, devices. Its CPUs are claimed or
    /// were free. Its memory is filled later.
    ///
    /// # Errors
    /// When something is not to be had; nothing of the cell is then left.
    fn prepare_cell(&mut self, cell: CellId, resources: &CellResources) -> Result<(), PlatformError>;

    /// Copies `data` to pool memory at `base` that a cell owns and no guest reaches.
    fn store(&mut self, base: Hpa, data: &[u8]);

    /// Checks the files of a prepared cell none of whose vCPUs is on, and plans how its memory is
    /// filled from them. The plan replaces an earlier one.
    ///
    /// # Errors
    /// What is wrong with which file.
    fn plan_cell(
        &mut self,
        cell: CellId,
        resources: &CellResources,
        files: &[StoredFile],
    ) -> Result<(), PlatformError>;

    /// Fills the cell's memory, which is all zero, as planned: a slice of up to
    /// [`ZERO_SLICE`](super::ZERO_SLICE) a call, and in the end puts devices and vCPUs into the
    /// state in which the cell starts. Returns whether more is to be done.
    ///
    /// # Errors
    /// When it cannot be filled; it may be planned again.
    fn build_cell(&mut self, cell: CellId) -> Result<bool, PlatformError>;

    /// Starts a cell that was built, once for each time.
    ///
    /// # Errors
    /// When it cannot; the cell is then as before.
    fn start_cell(&mut self, cell: CellId) -> Result<(), PlatformError>;

    /// Turns off all vCPUs of a cell that was started; [`cell_status`](Self::cell_status)
    /// tells when they are.
    fn stop_cell(&mut self, cell: CellId);

    /// Presses the power button of a cell that runs.
    fn press_power_button(&mut self, cell: CellId);

    /// Lets all vCPUs of a cell that runs stand still; [`cell_status`](Self::cell_status)
    /// tells when they do.
    fn pause_cell(&mut self, cell: CellId);

    /// Lets the vCPUs of a cell that stands still go on.
    fn resume_cell(&mut self, cell: CellId);

    /// What a cell that was started is doing. Once it is off, it stays so until it is started
    /// again.
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
