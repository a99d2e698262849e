//! A guest cell as the kernel has it: stage 2, board, and what is loaded into it.

use crate::host::{self, HostMachine};
use crate::stage2::{Access, Stage2};
use alloc::sync::Arc;
use alloc::vec::Vec;
use bulkhead_abi::message::{FailureReport, LoadKind};
use bulkhead_arch::guest_ram::{GuestRam, RamRegion};
use bulkhead_arch::x86_64::svm::Permissions;
use bulkhead_vmm::cell::config::CellResources;
use bulkhead_vmm::hal::{Role, VcpuId};
use bulkhead_vmm::manage::ZERO_SLICE;
use bulkhead_vmm::manage::platform::{CellStatus, Ending, PlatformError, StoredFile};
use bulkhead_vmm::memory::address::{Gpa, Hpa};
use bulkhead_vmm::memory::guest::GuestMemory;
use bulkhead_vmm::x86::acpi::guest::GuestTables;
use bulkhead_vmm::x86::board;
use bulkhead_vmm::x86::boot::{self, Entry, Handover, Image, ImageError, Plan};
use bulkhead_vmm::x86::guest_board::{GuestBoard, StopReason};
use bulkhead_vmm::x86::state::CpuState;
use bulkhead_vmm::x86::vcpu::{Failure, VcpuCounts};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use spin::Mutex;

/// A guest cell that exists, whether it runs or not.
pub(crate) struct GuestCell {
    /// Its devices.
    pub(crate) board: GuestBoard<HostMachine, GuestRam>,
    stage2: Stage2,
    permissions: Arc<Permissions>,
    counts: Vec<Arc<VcpuCounts>>,
    /// How its memory is being filled.
    build: Mutex<Option<Build>>,
    /// The state in which it starts, once its memory is filled.
    entry: Mutex<Option<Entry>>,
    /// Guest minus host counter, set when the cell starts: its counter then shows 0.
    counter_offset: AtomicU64,
    report: Mutex<Option<FailureReport>>,
    /// How many vCPUs have left the guest for good.
    left: AtomicUsize,
    /// How many vCPUs stand still.
    resting: AtomicUsize,
}

/// The filling of a cell's memory from its files.
struct Build {
    resources: CellResources,
    files: Vec<(LoadKind, Source)>,
    plan: Plan,
}

/// A file of a cell.
struct Source {
    memory: GuestRam,
    size: u64,
}

impl Source {
    fn new(file: &StoredFile) -> Self {
        let mut at = 0;
        let mut regions = Vec::new();
        for range in &file.memory {
            regions.push(RamRegion { gpa: Gpa::new(at), hpa: range.base, len: range.len });
            at += range.len;
        }
        Self { memory: host::guest_ram(regions), size: file.size }
    }
}

impl Image for Source {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), ImageError> {
        let len = buf.len();
        self.memory.read(Gpa::new(offset), buf).map_err(|_| ImageError { offset, len })
    }
}

/// Turns any error into the platform's.
fn error(e: impl core::fmt::Display) -> PlatformError {
    PlatformError(alloc::format!("{e}"))
}

impl GuestCell {
    /// Makes a cell; its memory is filled later.
    ///
    /// # Errors
    /// When memory for its tables is not to be had, or the board has no place for its RAM.
    pub(crate) fn new(resources: &CellResources) -> Result<Self, PlatformError> {
        let mut stage2 = Stage2::new().map_err(error)?;
        let mut regions = Vec::new();
        // RAM of the board, in order, is filled from the ranges of memory, in order.
        let mut ranges = resources.memory.iter().map(|r| (r.base.raw(), r.len));
        let mut current = ranges.next();
        for range in board::ram(resources.memory_bytes()) {
            let (mut gpa, mut left) = (Gpa::new(range.start), range.end - range.start);
            while left != 0 {
                let Some((base, room)) = current else {
                    return Err(PlatformError("the board has more RAM than the cell has memory".into()));
                };
                let piece = left.min(room);
                stage2.map(gpa, Hpa::new(base), piece, Access::ALL).map_err(error)?;
                regions.push(RamRegion { gpa, hpa: Hpa::new(base), len: piece });
                current = if piece == room { ranges.next() } else { Some((base + piece, room - piece)) };
                left -= piece;
                gpa = gpa.checked_add(piece).ok_or_else(|| error("the board's RAM wraps"))?;
            }
        }
        let ram = host::guest_ram(regions);
        Ok(Self {
            board: GuestBoard::new(HostMachine, ram, resources.cpus.clone(), resources.boot_wall_clock_ns),
            stage2,
            permissions: Arc::new(host::permissions(Role::Guest, core::iter::empty())),
            counts: resources.cpus.iter().map(|_| Arc::default()).collect(),
            build: Mutex::new(None),
            entry: Mutex::new(None),
            counter_offset: AtomicU64::new(0),
            report: Mutex::new(None),
            left: AtomicUsize::new(0),
            resting: AtomicUsize::new(0),
        })
    }

    /// The root of its stage-2 tables.
    pub(crate) fn nested_root(&self) -> Hpa {
        self.stage2.root()
    }

    /// What its vCPUs may touch without an exit.
    pub(crate) fn permissions(&self) -> Arc<Permissions> {
        self.permissions.clone()
    }

    /// The counters of a vCPU.
    pub(crate) fn counts(&self, vcpu: VcpuId) -> Arc<VcpuCounts> {
        let index = usize::try_from(vcpu.0).unwrap_or(usize::MAX);
        self.counts.get(index).cloned().unwrap_or_default()
    }

    /// Guest minus host counter.
    pub(crate) fn counter_offset(&self) -> u64 {
        self.counter_offset.load(Ordering::Relaxed)
    }

    /// Checks the files that its memory is to be filled from.
    ///
    /// # Errors
    /// What is missing or wrong.
    pub(crate) fn plan(&self, resources: &CellResources, files: &[StoredFile]) -> Result<(), PlatformError> {
        let files: Vec<_> = files.iter().map(|file| (file.what, Source::new(file))).collect();
        let file = |kind| files.iter().find(|(what, _)| *what == kind).map(|(_, file)| file);
        let kernel = file(LoadKind::KERNEL).ok_or_else(|| error("no kernel was loaded"))?;
        let handover = Handover {
            map: &board::memory_map(resources.memory_bytes()),
            cmdline: resources.cmdline.as_bytes(),
            initrd: file(LoadKind::INITRD).map(|file| file.size),
            rsdp: Some(board::RSDP_ADDRESS),
        };
        let plan = boot::plan(kernel, &handover).map_err(error)?;
        log::debug!("cell '{}': the kernel is started by {}", resources.name, plan.protocol());
        *self.build.lock() = Some(Build { resources: resources.clone(), files, plan });
        *self.entry.lock() = None;
        Ok(())
    }

    /// Fills the next part of its memory as planned; in the end it can be started. Returns whether
    /// there is more to do.
    ///
    /// # Errors
    /// What does not fit.
    pub(crate) fn build(&self) -> Result<bool, PlatformError> {
        let mut slot = self.build.lock();
        let build = slot.as_mut().ok_or_else(|| error("nothing is planned"))?;
        let ram = self.board.ram();
        if let Some(piece) = build.plan.next_piece(ZERO_SLICE) {
            let file = build.files.iter().find(|(what, _)| *what == piece.file);
            let (_, file) = file.ok_or_else(|| error("a planned file is missing"))?;
            let mut bytes = alloc::vec![0; usize::try_from(piece.len).map_err(error)?];
            file.read(piece.offset, &mut bytes).map_err(error)?;
            ram.write(piece.to, &bytes).map_err(error)?;
            return Ok(true);
        }
        let Some(Build { resources, plan, .. }) = slot.take() else {
            return Err(error("nothing is planned"));
        };
        let vcpus = u32::try_from(resources.cpus.len()).map_err(error)?;
        let tables = GuestTables::build(vcpus).map_err(error)?;
        tables.write(ram).map_err(error)?;
        let entry = plan.finish(ram).map_err(error)?;
        *self.entry.lock() = Some(entry);
        Ok(false)
    }

    /// Its vCPUs are about to be run, for the first time or again.
    ///
    /// # Errors
    /// When its memory was not filled since the last time.
    pub(crate) fn begin(&self) -> Result<(), PlatformError> {
        if self.entry.lock().is_none() {
            return Err(error("the cell has no kernel yet"));
        }
        self.board.reset();
        *self.report.lock() = None;
        self.left.store(0, Ordering::Relaxed);
        self.board.note_start();
        self.counter_offset.store(host::counter().wrapping_neg(), Ordering::Relaxed);
        Ok(())
    }

    /// Puts the boot vCPU to the kernel's first instruction.
    pub(crate) fn entry(&self, cpu: &mut dyn CpuState) {
        if let Some(entry) = self.entry.lock().take() {
            entry.apply(cpu);
        }
    }

    /// A vCPU has failed; the first report counts.
    pub(crate) fn fail(&self, report: FailureReport, vcpu: VcpuId, failure: Failure) {
        log::warn!("cell failed at {vcpu}: {}", report.reason);
        self.report.lock().get_or_insert(report);
        self.board.stop(StopReason::Failed { vcpu: vcpu.0, failure });
    }

    /// Why it failed.
    pub(crate) fn report(&self) -> Option<FailureReport> {
        self.report.lock().clone()
    }

    /// A vCPU has left the guest for good.
    pub(crate) fn vcpu_left(&self) {
        self.left.fetch_add(1, Ordering::Release);
    }

    /// A vCPU stands still.
    pub(crate) fn vcpu_rests(&self) {
        self.resting.fetch_add(1, Ordering::Release);
    }

    /// A vCPU that stood still goes on.
    pub(crate) fn vcpu_goes_on(&self) {
        self.resting.fetch_sub(1, Ordering::Release);
    }

    /// What it is doing, once it was started.
    pub(crate) fn status(&self) -> CellStatus {
        if self.left.load(Ordering::Acquire) == self.counts.len() {
            return match self.board.stop_reason() {
                Some(StopReason::Failed { .. }) => CellStatus::Off(Ending::Failed),
                Some(StopReason::PowerOff) => CellStatus::Off(Ending::PowerOff),
                Some(StopReason::Reset) => CellStatus::Off(Ending::Reset),
                Some(StopReason::Exit(code)) => CellStatus::Off(Ending::Exit(code)),
                Some(StopReason::Request) | None => CellStatus::Off(Ending::Request),
            };
        }
        if self.board.is_held() && self.resting.load(Ordering::Acquire) == self.counts.len() {
            return CellStatus::Paused;
        }
        CellStatus::Running
    }
}
