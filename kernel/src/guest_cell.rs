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
use bulkhead_vmm::manage::platform::PlatformError;
use bulkhead_vmm::memory::address::{Gpa, Hpa};
use bulkhead_vmm::memory::guest::GuestMemory;
use bulkhead_vmm::x86::acpi::guest::GuestTables;
use bulkhead_vmm::x86::board;
use bulkhead_vmm::x86::boot::e820::FreeSpace;
use bulkhead_vmm::x86::boot::linux::{Handover, KernelLoader, LinuxEntry, LoadedKernel};
use bulkhead_vmm::x86::guest_board::{GuestBoard, StopReason};
use bulkhead_vmm::x86::state::CpuState;
use bulkhead_vmm::x86::vcpu::{Failure, VcpuCounts};
use core::sync::atomic::{AtomicUsize, Ordering};
use spin::{Mutex, Once};

/// A guest cell that exists, whether it runs or not.
pub(crate) struct GuestCell {
    /// Its devices.
    pub(crate) board: GuestBoard<HostMachine, GuestRam>,
    stage2: Stage2,
    permissions: Arc<Permissions>,
    counts: Vec<Arc<VcpuCounts>>,
    files: Mutex<Files>,
    entry: Once<LinuxEntry>,
    /// Guest minus host counter, fixed when the cell starts: its counter then shows 0.
    counter_offset: Once<u64>,
    report: Mutex<Option<FailureReport>>,
    left: AtomicUsize,
}

/// Files on their way into the cell.
#[derive(Default)]
struct Files {
    kernel: Option<KernelLoader>,
    loaded: Option<LoadedKernel>,
    /// Where the initrd goes, its size, and how much of it has come.
    initrd: Option<(Gpa, u64, u64)>,
}

/// Turns any error into the platform's.
fn error(e: impl core::fmt::Display) -> PlatformError {
    PlatformError(alloc::format!("{e}"))
}

impl GuestCell {
    /// Builds a cell from zeroed memory.
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
            files: Mutex::default(),
            entry: Once::new(),
            counter_offset: Once::new(),
            report: Mutex::new(None),
            left: AtomicUsize::new(0),
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
        *self.counter_offset.call_once(|| {
            self.board.note_start();
            host::counter().wrapping_neg()
        })
    }

    /// Announces a file.
    ///
    /// # Errors
    /// When there is no room for it.
    pub(crate) fn load_begin(&self, what: LoadKind, size: u64, memory: u64) -> Result<(), PlatformError> {
        if what == LoadKind::INITRD {
            self.kernel_complete()?;
        }
        let mut files = self.files.lock();
        match what {
            LoadKind::KERNEL => {
                files.loaded = None;
                files.initrd = None;
                files.kernel = Some(KernelLoader::new(size, FreeSpace::new(&board::memory_map(memory))));
                Ok(())
            }
            LoadKind::INITRD => {
                let Some(kernel) = files.loaded.as_mut() else {
                    return Err(error("initrd: it comes after the kernel, which decides where it goes"));
                };
                let at = kernel.place_initrd(size).map_err(error)?;
                files.initrd = Some((at, size, 0));
                Ok(())
            }
            other => {
                Err(PlatformError(alloc::format!("file kind {}: allowed are kernel and initrd", other.0)))
            }
        }
    }

    /// Takes the next bytes of a file.
    ///
    /// # Errors
    /// When the file is not what it should be.
    pub(crate) fn load_data(&self, what: LoadKind, data: &[u8]) -> Result<(), PlatformError> {
        let mut files = self.files.lock();
        let files = &mut *files;
        if what == LoadKind::KERNEL {
            let kernel = files.kernel.as_mut().ok_or_else(|| error("kernel: none was announced"))?;
            return kernel.data(data, self.board.ram()).map_err(error);
        }
        let (at, size, done) = files.initrd.as_mut().ok_or_else(|| error("initrd: none was announced"))?;
        let len = data.len() as u64;
        if len > *size - *done {
            return Err(error("initrd: more bytes came than were announced"));
        }
        let to = at.checked_add(*done).ok_or_else(|| error("initrd: its place wraps"))?;
        self.board.ram().write(to, data).map_err(|e| error(format_args!("initrd: {e}")))?;
        *done += len;
        Ok(())
    }

    /// All bytes of a kernel have come: the initrd can be placed.
    fn kernel_complete(&self) -> Result<(), PlatformError> {
        let mut files = self.files.lock();
        let Some(kernel) = files.kernel.take() else { return Ok(()) };
        files.loaded = Some(kernel.finish().map_err(error)?);
        Ok(())
    }

    /// Builds the state in which the cell starts.
    ///
    /// # Errors
    /// What is missing or does not fit.
    pub(crate) fn load_finish(&self, resources: &CellResources) -> Result<(), PlatformError> {
        self.kernel_complete()?;
        let mut files = self.files.lock();
        let kernel = files.loaded.take().ok_or_else(|| error("kernel: none was loaded"))?;
        let initrd = files.initrd.map(|(at, size, _)| (at, size));
        let vcpus = u32::try_from(resources.cpus.len()).map_err(error)?;
        let tables = GuestTables::build(vcpus).map_err(error)?;
        tables.write(self.board.ram()).map_err(error)?;
        let map = board::memory_map(resources.memory_bytes());
        let handover = Handover {
            map: &map,
            cmdline: resources.cmdline.as_bytes(),
            initrd,
            rsdp: Some(board::RSDP_ADDRESS),
        };
        let entry = kernel.build(&handover, self.board.ram()).map_err(error)?;
        self.entry.call_once(|| entry);
        Ok(())
    }

    /// Puts the boot vCPU to the kernel's first instruction.
    pub(crate) fn entry(&self, cpu: &mut dyn CpuState) {
        if let Some(entry) = self.entry.get() {
            entry.apply(cpu);
        }
    }

    /// Whether loading is finished.
    pub(crate) fn is_loaded(&self) -> bool {
        self.entry.get().is_some()
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

    /// Whether all have.
    pub(crate) fn all_left(&self) -> bool {
        self.left.load(Ordering::Acquire) == self.counts.len()
    }
}
