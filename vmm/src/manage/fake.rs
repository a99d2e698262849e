//! A platform without hardware, for tests: it keeps books about what it was asked to do, and
//! panics when management breaks the contract of [`Platform`].

use super::platform::{CellStatus, ClaimState, HeapUse, Platform, PlatformError};
use crate::cell::config::{CellResources, HostRange};
use crate::hal::{CellId, CpuId};
use crate::manage::ZERO_SLICE;
use crate::memory::address::Hpa;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use bulkhead_abi::message::{ExitCount, FailureReport, LoadKind, VcpuDetails};

/// What is said by whoever fails because [`FakePlatform::fail_after`] says so.
pub const FAILURE: &str = "the fake was told to fail";

/// How far a fake cell is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Prepared,
    Loaded,
    Running,
    /// Turned off after so many more looks at it.
    Stopping(u32),
    Stopped,
    Failed,
}

/// A cell as the fake knows it.
#[derive(Debug)]
struct FakeCell {
    cpus: Vec<CpuId>,
    memory: Vec<HostRange>,
    phase: Phase,
    /// Size and what has arrived, per file.
    files: BTreeMap<LoadKind, (u64, Vec<u8>)>,
    console: Vec<u8>,
}

/// A platform that only keeps books.
#[derive(Debug)]
pub struct FakePlatform {
    /// The time.
    pub now_ns: u64,
    /// CPUs that the root cell's system has turned off.
    pub offline: BTreeSet<u32>,
    /// How many more calls that can fail will not; then one fails. `None`: all go well.
    pub fail_after: Option<u32>,
    /// The hypervisor's log.
    pub log: Vec<u8>,
    /// The heap's use.
    pub heap: HeapUse,
    claims: BTreeSet<CpuId>,
    /// Slices of memory that hold something of a cell, by their first bytes.
    tainted: BTreeSet<u64>,
    /// Slices that were zeroed and not given to a cell since.
    clean: BTreeSet<u64>,
    cells: BTreeMap<CellId, FakeCell>,
}

impl Default for FakePlatform {
    fn default() -> Self {
        Self {
            now_ns: 0,
            offline: BTreeSet::new(),
            fail_after: None,
            log: b"booted\n".to_vec(),
            heap: HeapUse { used: 0, total: 64 << 20 },
            claims: BTreeSet::new(),
            tainted: BTreeSet::new(),
            clean: BTreeSet::new(),
            cells: BTreeMap::new(),
        }
    }
}

impl FakePlatform {
    /// Whether memory of `range` holds something of a cell.
    pub fn is_tainted(&self, range: HostRange) -> bool {
        slices(&[range]).any(|slice| self.tainted.contains(&slice))
    }

    /// The CPUs that were taken, or are being taken, from the root cell.
    pub fn claims(&self) -> impl Iterator<Item = CpuId> + '_ {
        self.claims.iter().copied()
    }

    /// The cells there are.
    pub fn cells(&self) -> impl Iterator<Item = CellId> + '_ {
        self.cells.keys().copied()
    }

    /// The file of `cell`, as far as it has arrived.
    pub fn file(&self, cell: CellId, what: LoadKind) -> Option<&[u8]> {
        self.cells.get(&cell)?.files.get(&what).map(|(_, data)| data.as_slice())
    }

    /// A cell that runs does what cannot be carried on from.
    pub fn break_cell(&mut self, cell: CellId) {
        if let Some(cell) = self.cells.get_mut(&cell).filter(|cell| cell.phase == Phase::Running) {
            cell.phase = Phase::Failed;
        }
    }

    /// A cell that runs prints `text` on its console.
    pub fn print(&mut self, cell: CellId, text: &str) {
        self.cell(cell).console.extend(text.bytes());
    }

    /// One call that can fail.
    fn may_fail(&mut self) -> Result<(), PlatformError> {
        match &mut self.fail_after {
            None => Ok(()),
            Some(0) => {
                self.fail_after = None;
                Err(PlatformError(FAILURE.into()))
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
        }
    }

    fn cell(&mut self, id: CellId) -> &mut FakeCell {
        self.cells.get_mut(&id).expect("only prepared cells are asked for")
    }
}

fn slices(memory: &[HostRange]) -> impl Iterator<Item = u64> + '_ {
    let slices = |range: &HostRange| {
        let base = range.base.raw();
        (0..range.len / ZERO_SLICE).map(move |n| base + n * ZERO_SLICE)
    };
    memory.iter().flat_map(slices)
}

fn read(ring: &[u8], position: u64, buf: &mut [u8]) -> (u64, usize) {
    let rest = usize::try_from(position).ok().and_then(|at| ring.get(at..)).unwrap_or_default();
    let count = rest.len().min(buf.len());
    buf[..count].copy_from_slice(&rest[..count]);
    (position + count as u64, count)
}

impl Platform for FakePlatform {
    fn now_ns(&self) -> u64 {
        self.now_ns
    }

    fn heap(&self) -> HeapUse {
        self.heap
    }

    fn claim_cpu(&mut self, cpu: CpuId) {
        assert!(self.claims.insert(cpu), "{cpu} is claimed twice");
    }

    fn claim_state(&mut self, cpu: CpuId) -> ClaimState {
        assert!(self.claims.contains(&cpu), "{cpu} was not claimed");
        if let Err(PlatformError(reason)) = self.may_fail() {
            ClaimState::Refused(reason)
        } else if self.offline.contains(&cpu.0) {
            ClaimState::Claimed
        } else {
            ClaimState::Pending
        }
    }

    fn release_cpu(&mut self, cpu: CpuId) {
        assert!(self.claims.remove(&cpu), "{cpu} was not claimed");
        let used = self.cells.values().any(|cell| cell.cpus.contains(&cpu));
        assert!(!used, "{cpu} is released while a cell has it");
    }

    fn zero(&mut self, base: Hpa, len: u64) {
        assert!(len <= ZERO_SLICE && base.is_aligned(4096) && len.is_multiple_of(4096));
        assert!(len == ZERO_SLICE, "the fake counts whole slices");
        let used = self.cells.values().any(|cell| slices(&cell.memory).any(|slice| slice == base.raw()));
        assert!(!used, "{base} is zeroed while a cell has it");
        self.tainted.remove(&base.raw());
        self.clean.insert(base.raw());
    }

    fn prepare_cell(&mut self, cell: CellId, resources: &CellResources) -> Result<(), PlatformError> {
        assert!(slices(&resources.memory).all(|slice| self.clean.contains(&slice)), "not zeroed");
        for slice in slices(&resources.memory) {
            self.clean.remove(&slice);
            self.tainted.insert(slice);
        }
        for other in self.cells.values() {
            assert!(!other.cpus.iter().any(|cpu| resources.cpus.contains(cpu)), "a CPU with two owners");
            assert!(!slices(&other.memory).any(|s| slices(&resources.memory).any(|t| s == t)));
        }
        self.may_fail()?;
        let fake = FakeCell {
            cpus: resources.cpus.clone(),
            memory: resources.memory.clone(),
            phase: Phase::Prepared,
            files: BTreeMap::new(),
            console: Vec::new(),
        };
        assert!(self.cells.insert(cell, fake).is_none(), "{cell} is prepared twice");
        Ok(())
    }

    fn load_begin(&mut self, cell: CellId, what: LoadKind, size: u64) -> Result<(), PlatformError> {
        self.cell(cell).files.remove(&what);
        self.may_fail()?;
        self.cell(cell).files.insert(what, (size, Vec::new()));
        Ok(())
    }

    fn load_data(&mut self, cell: CellId, what: LoadKind, data: &[u8]) -> Result<(), PlatformError> {
        if let Err(error) = self.may_fail() {
            self.cell(cell).files.remove(&what);
            return Err(error);
        }
        let file = self.cell(cell).files.get_mut(&what);
        let (size, arrived) = file.expect("data only for a file that was announced");
        arrived.extend(data);
        assert!(arrived.len() as u64 <= *size, "more than was announced");
        Ok(())
    }

    fn load_finish(&mut self, cell: CellId) -> Result<(), PlatformError> {
        self.may_fail()?;
        let cell = self.cell(cell);
        assert_eq!(cell.phase, Phase::Prepared);
        assert!(cell.files.values().all(|(size, data)| data.len() as u64 == *size), "incomplete");
        let kernel = cell.files.get(&LoadKind::KERNEL).expect("there is a kernel");
        if kernel.1.starts_with(b"bad") {
            return Err(PlatformError("kernel: is none".into()));
        }
        cell.phase = Phase::Loaded;
        Ok(())
    }

    fn start_cell(&mut self, cell: CellId) -> Result<(), PlatformError> {
        self.may_fail()?;
        let cell = self.cell(cell);
        assert_eq!(cell.phase, Phase::Loaded);
        cell.phase = Phase::Running;
        cell.console.extend(b"hello from the cell\n");
        Ok(())
    }

    fn stop_cell(&mut self, cell: CellId) {
        let cell = self.cell(cell);
        if cell.phase == Phase::Running {
            cell.phase = Phase::Stopping(3);
        }
    }

    fn cell_status(&mut self, cell: CellId) -> CellStatus {
        let cell = self.cell(cell);
        match cell.phase {
            Phase::Stopping(0) => cell.phase = Phase::Stopped,
            Phase::Stopping(left) => cell.phase = Phase::Stopping(left - 1),
            _ => {}
        }
        match cell.phase {
            Phase::Prepared | Phase::Loaded => panic!("asked for before it was started"),
            Phase::Running | Phase::Stopping(_) => CellStatus::Running,
            Phase::Stopped => CellStatus::Stopped { reason: "by request".into() },
            Phase::Failed => CellStatus::Failed,
        }
    }

    fn failure_report(&mut self, cell: CellId) -> FailureReport {
        assert_eq!(self.cell(cell).phase, Phase::Failed);
        FailureReport { reason: String::from("triple fault"), ..FailureReport::default() }
    }

    fn vcpus(&mut self, cell: CellId) -> Vec<VcpuDetails> {
        let exits = || [ExitCount { reason: "hlt".into(), count: 5, time_ns: 70 }].into();
        let cpus = self.cell(cell).cpus.iter().zip(0..);
        cpus.map(|(cpu, vcpu)| VcpuDetails { vcpu, cpu: cpu.0, exits: exits() }).collect()
    }

    fn tear_down_cell(&mut self, cell: CellId) {
        let cell = self.cells.remove(&cell).expect("a prepared cell");
        assert!(!matches!(cell.phase, Phase::Running | Phase::Stopping(_)), "torn down while it runs");
    }

    fn console_read(&mut self, cell: CellId, position: u64, buf: &mut [u8]) -> (u64, usize) {
        read(&self.cell(cell).console, position, buf)
    }

    fn console_write(&mut self, cell: CellId, data: &[u8]) -> usize {
        // Like a terminal with echo, and a small FIFO.
        let data = &data[..data.len().min(16)];
        self.cell(cell).console.extend(data);
        data.len()
    }

    fn log_read(&mut self, position: u64, buf: &mut [u8]) -> (u64, usize) {
        read(&self.log, position, buf)
    }
}
