//! A platform without hardware, for tests: it keeps books about what it was asked to do, and
//! panics when management breaks the contract of [`Platform`].

use super::platform::{CellStatus, ClaimState, Ending, HeapUse, Platform, PlatformError, StoredFile};
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
#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    Prepared,
    /// Its files are right; so many more slices, and its memory is filled.
    Planned(u32),
    Built,
    Running,
    /// Stands still after so many more looks at it.
    Pausing(u32),
    Paused,
    /// Turned off after so many more looks at it.
    Stopping(u32),
    Off(Ending),
}

/// A cell as the fake knows it.
#[derive(Debug)]
struct FakeCell {
    cpus: Vec<CpuId>,
    memory: Vec<HostRange>,
    phase: Phase,
    /// The files that it was built from.
    files: BTreeMap<LoadKind, Vec<u8>>,
    cmdline: String,
    /// How many times its power button was pressed, and whether it does something about it.
    presses: u32,
    heeds_button: bool,
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
    /// Slices that were zeroed and not written to since.
    clean: BTreeSet<u64>,
    /// What was stored, by where: one entry for each call.
    stored: BTreeMap<u64, Vec<u8>>,
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
            stored: BTreeMap::new(),
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

    /// The file that `cell` was built from.
    pub fn file(&self, cell: CellId, what: LoadKind) -> Option<&[u8]> {
        self.cells.get(&cell)?.files.get(&what).map(Vec::as_slice)
    }

    /// The command line that `cell` was built with.
    pub fn cmdline(&self, cell: CellId) -> Option<&str> {
        self.cells.get(&cell).map(|cell| cell.cmdline.as_str())
    }

    /// How many times the power button of `cell` was pressed.
    pub fn presses(&self, cell: CellId) -> u32 {
        self.cells.get(&cell).map_or(0, |cell| cell.presses)
    }

    /// A cell whose vCPUs run ends by itself.
    pub fn end_cell(&mut self, cell: CellId, ending: Ending) {
        let Some(cell) = self.cells.get_mut(&cell) else { return };
        if matches!(cell.phase, Phase::Running | Phase::Pausing(_)) {
            cell.phase = Phase::Off(ending);
        }
    }

    /// From now on `cell` turns itself off when its power button is pressed.
    pub fn heed_button(&mut self, cell: CellId) {
        self.cell(cell).heeds_button = true;
    }

    /// What was stored in `memory`, `size` bytes.
    fn read_stored(&self, file: &StoredFile) -> Vec<u8> {
        let mut bytes = Vec::new();
        for range in &file.memory {
            let (mut at, end) = (range.base.raw(), range.base.raw() + range.len);
            while let Some(piece) = self.stored.get(&at).filter(|_| at < end) {
                bytes.extend(piece);
                at += piece.len() as u64;
            }
        }
        assert!(bytes.len() as u64 >= file.size, "a file that is not all there");
        bytes.truncate(usize::try_from(file.size).expect("a small file"));
        bytes
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
        let on = |cell: &&FakeCell| {
            matches!(cell.phase, Phase::Running | Phase::Pausing(_) | Phase::Paused | Phase::Stopping(_))
        };
        let used = self.cells.values().filter(on).any(|c| slices(&c.memory).any(|s| s == base.raw()));
        assert!(!used, "{base} is zeroed while a cell that is on has it");
        self.stored.retain(|at, _| !(base.raw()..base.raw() + len).contains(at));
        self.tainted.remove(&base.raw());
        self.clean.insert(base.raw());
    }

    fn prepare_cell(&mut self, cell: CellId, resources: &CellResources) -> Result<(), PlatformError> {
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
            cmdline: String::new(),
            presses: 0,
            heeds_button: false,
            console: Vec::new(),
        };
        assert!(self.cells.insert(cell, fake).is_none(), "{cell} is prepared twice");
        Ok(())
    }

    fn store(&mut self, base: Hpa, data: &[u8]) {
        let end = base.raw() + data.len() as u64;
        let mut slice = base.raw() / ZERO_SLICE * ZERO_SLICE;
        while slice < end {
            self.clean.remove(&slice);
            self.tainted.insert(slice);
            slice += ZERO_SLICE;
        }
        let used = |cell: &FakeCell| slices(&cell.memory).any(|s| s < end && base.raw() < s + ZERO_SLICE);
        assert!(!self.cells.values().any(used), "a file in memory that a guest reaches");
        self.stored.retain(|at, _| !(base.raw()..end).contains(at));
        self.stored.insert(base.raw(), data.into());
    }

    fn plan_cell(
        &mut self,
        cell: CellId,
        resources: &CellResources,
        files: &[StoredFile],
    ) -> Result<(), PlatformError> {
        self.may_fail()?;
        let read: BTreeMap<_, _> = files.iter().map(|file| (file.what, self.read_stored(file))).collect();
        let kernel = read.get(&LoadKind::KERNEL).expect("there is a kernel");
        if kernel.starts_with(b"bad") {
            return Err(PlatformError("kernel: is none".into()));
        }
        let cell = self.cell(cell);
        assert!(
            matches!(cell.phase, Phase::Prepared | Phase::Planned(_) | Phase::Built | Phase::Off(_)),
            "planned while it is on"
        );
        assert_eq!(cell.memory, resources.memory);
        (cell.phase, cell.files, cell.cmdline) = (Phase::Planned(2), read, resources.cmdline.clone());
        Ok(())
    }

    fn build_cell(&mut self, cell: CellId) -> Result<bool, PlatformError> {
        self.may_fail()?;
        let memory = self.cell(cell).memory.clone();
        let cell = self.cells.get_mut(&cell).expect("only prepared cells are asked for");
        match cell.phase {
            Phase::Planned(2) => {
                assert!(slices(&memory).all(|slice| self.clean.contains(&slice)), "not zeroed");
                for slice in slices(&memory) {
                    self.clean.remove(&slice);
                    self.tainted.insert(slice);
                }
                cell.phase = Phase::Planned(1);
                Ok(true)
            }
            Phase::Planned(1) => {
                cell.phase = Phase::Built;
                Ok(false)
            }
            _ => panic!("built without a plan"),
        }
    }

    fn start_cell(&mut self, cell: CellId) -> Result<(), PlatformError> {
        self.may_fail()?;
        let cell = self.cell(cell);
        assert_eq!(cell.phase, Phase::Built);
        cell.phase = Phase::Running;
        cell.console.extend(b"hello from the cell\n");
        Ok(())
    }

    fn stop_cell(&mut self, cell: CellId) {
        let cell = self.cell(cell);
        if matches!(cell.phase, Phase::Running | Phase::Pausing(_) | Phase::Paused) {
            cell.phase = Phase::Stopping(3);
        }
    }

    fn press_power_button(&mut self, cell: CellId) {
        let cell = self.cell(cell);
        cell.presses += 1;
        if cell.heeds_button && cell.phase == Phase::Running {
            cell.phase = Phase::Off(Ending::PowerOff);
        }
    }

    fn pause_cell(&mut self, cell: CellId) {
        let cell = self.cell(cell);
        if cell.phase == Phase::Running {
            cell.phase = Phase::Pausing(2);
        }
    }

    fn resume_cell(&mut self, cell: CellId) {
        let cell = self.cell(cell);
        assert_eq!(cell.phase, Phase::Paused);
        cell.phase = Phase::Running;
    }

    fn cell_status(&mut self, cell: CellId) -> CellStatus {
        let cell = self.cell(cell);
        match cell.phase {
            Phase::Stopping(0) => cell.phase = Phase::Off(Ending::Request),
            Phase::Stopping(left) => cell.phase = Phase::Stopping(left - 1),
            Phase::Pausing(0) => cell.phase = Phase::Paused,
            Phase::Pausing(left) => cell.phase = Phase::Pausing(left - 1),
            _ => {}
        }
        match &cell.phase {
            Phase::Prepared | Phase::Planned(_) | Phase::Built => panic!("asked for before it was started"),
            Phase::Running | Phase::Stopping(_) | Phase::Pausing(_) => CellStatus::Running,
            Phase::Paused => CellStatus::Paused,
            Phase::Off(ending) => CellStatus::Off(ending.clone()),
        }
    }

    fn failure_report(&mut self, cell: CellId) -> FailureReport {
        assert_eq!(self.cell(cell).phase, Phase::Off(Ending::Failed));
        FailureReport { reason: String::from("triple fault"), ..FailureReport::default() }
    }

    fn vcpus(&mut self, cell: CellId) -> Vec<VcpuDetails> {
        let exits = || [ExitCount { reason: "hlt".into(), count: 5, time_ns: 70 }].into();
        let cpus = self.cell(cell).cpus.iter().zip(0..);
        cpus.map(|(cpu, vcpu)| VcpuDetails { vcpu, cpu: cpu.0, exits: exits() }).collect()
    }

    fn tear_down_cell(&mut self, cell: CellId) {
        let cell = self.cells.remove(&cell).expect("a prepared cell");
        let on =
            matches!(cell.phase, Phase::Running | Phase::Pausing(_) | Phase::Paused | Phase::Stopping(_));
        assert!(!on, "torn down while it is on");
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
