//! The handlers of requests, one each. Who may ask was decided before.

use super::{Cell, Cells, Client, Store, Task, Waiter, incomplete};
use crate::cell::config::CellResources;
use crate::cell::lifecycle::{State, Step};
use crate::cell::ownership::{CpuOwner, OwnershipError};
use crate::hal::{CellId, CpuId};
use crate::manage::MAX_CONNECTIONS;
use crate::manage::connection::CONNECTION_HEAP;
use crate::manage::platform::{Platform, PlatformError};
use alloc::format;
use alloc::string::{String, ToString as _};
use alloc::vec::Vec;
use bulkhead_abi::message::{
    Action, BULK_PORTS, Body, CellDetails, CellSpec, CellState, CellSummary, CpuInfo, CpuUse, ErrorCode,
    Failure, LoadKind, MemoryRange, NodeInfo, ROOT_NAME, Reply, check_cmdline, console_port,
};

/// How long the root cell may take to park a CPU that it has turned off.
const CLAIM_TIMEOUT_NS: u64 = 1_000_000_000;

/// The most states that one request waits for.
const MAX_WAIT_STATES: usize = 16;

/// Requests that need heap are refused when less than this would be left of it: what all
/// connections together can come to hold, and some for the hypervisor itself.
pub(in crate::manage) const HEAP_RESERVE: u64 = MAX_CONNECTIONS as u64 * CONNECTION_HEAP + (1 << 20);

/// The most heap that a cell with so many CPUs needs, in bytes: its board with the console's
/// 64 KiB, permission maps and lists; a page each, or a few, for a vCPU's registers, APIC and
/// mailbox.
pub(in crate::manage) const fn cell_heap(cpus: usize) -> u64 {
    (256 << 10) + cpus as u64 * (64 << 10)
}

impl Cells {
    /// Carries out, or begins, the request `id` of `client`. Without a reply
    /// it goes on, and the answer will be among [`Cells::take_answers`].
    pub(in crate::manage) fn request(
        &mut self,
        client: Client,
        id: u32,
        body: Body,
        platform: &mut dyn Platform,
    ) -> Result<Option<Reply>, Failure> {
        self.watch(platform);
        let reply = match body {
            Body::Hello { .. } => {
                return Err(Failure::new(ErrorCode::INVALID, "the connection is open already"));
            }
            Body::NodeInfo => Reply::Node(self.node_info(platform)),
            Body::List => Reply::Cells(self.cells.iter().map(summary).collect()),
            Body::Show { cell } => Reply::Cell(self.show(cell, platform)?),
            Body::Check { spec } => {
                self.check(&spec, platform)?;
                Reply::Done
            }
            Body::Create { spec } => {
                self.create((client, id), spec, platform)?;
                return Ok(None);
            }
            Body::LoadBegin { cell, what, size } => {
                Reply::LoadPort { port: self.load_begin(cell, what, size, platform)? }
            }
            Body::LoadFinish { cell } => {
                self.load_finish(cell, platform)?;
                self.ask(cell, (client, id), "another load");
                return Ok(None);
            }
            Body::Start { cell: number } => {
                let cell = self.cell_for(number, Step::Start)?;
                if cell.state == State::Stopped {
                    if !cell.store.is_complete() {
                        let why =
                            format!("cell '{}' has not all of its files; reload it", cell.resources.name);
                        return Err(Failure::new(ErrorCode::BAD_FILE, why));
                    }
                    cell.begin_anew(Step::Start, platform)?;
                    self.ask(number, (client, id), "another start");
                    return Ok(None);
                }
                platform.start_cell(cell.id).map_err(|e| failed(cell, &e))?;
                cell.step(Step::Start);
                Reply::Done
            }
            Body::Stop { cell: number } => {
                let cell = self.cell_for(number, Step::Stop)?;
                cell.halt(platform);
                if cell.state != State::Stopped {
                    self.ask(number, (client, id), "a stop");
                    return Ok(None);
                }
                let failure = cell.came_between("a stop");
                let asker = cell.asker.take();
                self.answers.extend(asker.map(|(client, id)| (client, id, Err(failure))));
                Reply::Done
            }
            Body::Destroy { cell: number } => {
                let cell = self.cell_for(number, Step::Destroy)?;
                if cell.state.is_on() {
                    if cell.state != State::Stopping {
                        cell.halt(platform);
                    }
                    cell.doomed = true;
                } else {
                    cell.release(Step::Destroy, None, platform);
                }
                self.ask(number, (client, id), "its destruction");
                return Ok(None);
            }
            Body::Pause { cell: number } => {
                let cell = self.cell_for(number, Step::Pause)?;
                platform.pause_cell(cell.id);
                cell.step(Step::Pause);
                cell.task = Some(Task::Halt);
                self.ask(number, (client, id), "a pause");
                return Ok(None);
            }
            Body::Resume { cell } => {
                let cell = self.cell_for(cell, Step::Resume)?;
                platform.resume_cell(cell.id);
                cell.step(Step::Resume);
                Reply::Done
            }
            Body::PressPower { cell } => {
                let cell = self.cell_for(cell, Step::PressPower)?;
                platform.press_power_button(cell.id);
                Reply::Done
            }
            Body::Reload { cell, cmdline } => {
                check_cmdline(&cmdline)?;
                let cell = self.cell_for(cell, Step::Reload)?;
                cell.step(Step::Reload);
                cell.store.clear();
                cell.resources.cmdline = cmdline;
                cell.creator = Some(client);
                Reply::Done
            }
            Body::Wait { cell, states } => {
                if states.is_empty() || states.len() > MAX_WAIT_STATES {
                    let given = format!("{} states", states.len());
                    return Err(Failure::field(ErrorCode::INVALID, "states", given, "1 to 16 states"));
                }
                self.cells.iter().find(|c| c.id.0 == cell).ok_or_else(|| no_cell(cell))?;
                // The next work looks at once.
                self.waiters.push(Waiter { client, id, cell: CellId(cell), states });
                return Ok(None);
            }
        };
        Ok(Some(reply))
    }

    /// `asker` waits for what was begun with a cell; who waited before, and for what `between` has
    /// made impossible, is told so.
    fn ask(&mut self, number: u32, asker: (Client, u32), between: &str) {
        let Some(cell) = self.cells.iter_mut().find(|cell| cell.id.0 == number) else { return };
        let failure = cell.came_between(between);
        let before = cell.asker.replace(asker);
        self.answers.extend(before.map(|(client, id)| (client, id, Err(failure))));
    }

    /// The cell with this number, for which `step` is allowed.
    fn cell_for(&mut self, number: u32, step: Step) -> Result<&mut Cell, Failure> {
        let cell = self.cells.iter_mut().find(|cell| cell.id.0 == number).ok_or_else(|| no_cell(number))?;
        cell.may(step).map(|()| cell)
    }

    /// Whether a cell can be made of `spec` now, as far as its CPUs' leaving of the root cell
    /// is not to be waited for.
    fn check(&self, spec: &CellSpec, platform: &dyn Platform) -> Result<(), Failure> {
        spec.validate()?;
        if let Some(other) = self.cells.iter().find(|cell| cell.resources.name == spec.name) {
            let why = format!("name '{}' is that of {}; allowed: one that no cell has", spec.name, other.id);
            let failure = Failure::field(ErrorCode::CONFLICT, "name", &spec.name, "one that no cell has");
            return Err(failure.saying(why));
        }
        self.check_heap(cell_heap(spec.cpus.len()), platform)?;
        self.ownership.check(&spec.cpus, spec.memory).map_err(|error| self.cannot_have(&error))?;
        let (files, free) = (spec.files_memory(), self.ownership.free_bytes());
        if spec.memory.saturating_add(files) <= free {
            return Ok(());
        }
        let allowed = format!("up to {} MiB", free.saturating_sub(files) >> 20);
        let why = format!(
            "memory is {} MiB, and the pool has {} MiB free, of which the cell's files take {} MiB; allowed: {allowed}",
            spec.memory >> 20,
            free >> 20,
            files >> 20
        );
        Err(Failure::field(ErrorCode::EXHAUSTED, "memory", spec.memory, &allowed).saying(why))
    }

    /// Whether `cpus` were kept back from the root cell, so that nobody has to give them away.
    pub(in crate::manage) fn check_kept_back(&self, cpus: &[u32]) -> Result<(), Failure> {
        let Some(cpu) = cpus.iter().find(|cpu| self.ownership.comes_from_root(CpuId(**cpu))) else {
            return Ok(());
        };
        let free = self.ownership.owners().filter(|(_, owner)| *owner == CpuOwner::Nobody);
        let allowed = match numbers(free.map(|(cpu, _)| cpu)) {
            list if list.is_empty() => "none, for none is kept back and free".into(),
            list => list,
        };
        let why = format!("cpus has {cpu}, which is the root cell's; allowed: {allowed}");
        Err(Failure::field(ErrorCode::CONFLICT, "cpus", cpu, &allowed).saying(why))
    }

    fn create(
        &mut self,
        asker: (Client, u32),
        spec: CellSpec,
        platform: &mut dyn Platform,
    ) -> Result<(), Failure> {
        self.check(&spec, platform)?;
        let id = self.next_cell();
        let (cpus, memory) =
            self.ownership.take(id, &spec.cpus, spec.memory).map_err(|error| self.cannot_have(&error))?;
        for cpu in &cpus {
            if self.ownership.comes_from_root(*cpu) {
                platform.claim_cpu(*cpu);
            }
        }
        let resources = CellResources {
            name: spec.name,
            cpus,
            memory,
            cmdline: spec.cmdline,
            console: spec.console,
            boot_wall_clock_ns: spec.wall_clock_ns.saturating_sub(platform.now_ns()),
            on_reboot: spec.on_reboot.unwrap_or(Action::RESTART),
            on_crash: spec.on_crash.unwrap_or(Action::STOP),
            origin: spec.origin,
        };
        let deadline_ns = platform.now_ns().saturating_add(CLAIM_TIMEOUT_NS);
        // No more than it takes, so that the heap's use tells what there is.
        self.cells.reserve_exact(1);
        self.cells.push(Cell {
            id,
            resources,
            state: State::Creating,
            creator: Some(asker.0),
            asker: Some(asker),
            task: Some(Task::Claim { deadline_ns }),
            prepared: false,
            touched: false,
            store: Store::default(),
            settled: false,
            doomed: false,
            stopped: None,
            exit_code: None,
            restarts: 0,
            crashes: heapless::Vec::new(),
        });
        self.last_cell = id.0;
        Ok(())
    }

    /// The next number that no cell has, nor the port of whose console.
    fn next_cell(&self) -> CellId {
        let mut next = self.last_cell;
        loop {
            next = next.wrapping_add(1);
            let taken = |cell: &Cell| console_port(cell.id.0) == console_port(next);
            if next != CellId::ROOT.0 && !self.cells.iter().any(taken) {
                return CellId(next);
            }
        }
    }

    /// The failure for what cannot be had, with owners by name.
    fn cannot_have(&self, error: &OwnershipError) -> Failure {
        match *error {
            OwnershipError::NoSuchCpu { cpu } => {
                let last = self.ownership.owners().count().saturating_sub(1);
                let allowed = format!("1 to {last}");
                let why = format!("cpus has {cpu}, which this machine has not; allowed: {allowed}");
                Failure::field(ErrorCode::INVALID, "cpus", cpu, &allowed).saying(why)
            }
            OwnershipError::CpuTaken { cpu, owner } => {
                let has = |owner: CpuOwner| !matches!(owner, CpuOwner::Cell(cell) if cell != CellId::ROOT);
                let open: Vec<_> = self.ownership.owners().skip(1).filter(|(_, o)| has(*o)).collect();
                let allowed = match numbers(open.into_iter().map(|(cpu, _)| cpu)) {
                    list if list.is_empty() => "none, all belong to guest cells".into(),
                    list => list,
                };
                let other = self.cells.iter().find(|cell| cell.id == owner);
                let (name, all) = other.map_or((String::new(), String::new()), |other| {
                    (other.resources.name.clone(), numbers(other.resources.cpus.iter().copied()))
                });
                let why = format!(
                    "cpus has {cpu}, which belongs to cell '{name}' (its CPUs: {all}); allowed: {allowed}"
                );
                Failure::field(ErrorCode::CONFLICT, "cpus", cpu, &allowed).saying(why)
            }
            OwnershipError::Memory { wanted, free } => {
                let allowed = format!("up to the {} MiB that are free", free >> 20);
                let wanted = format!("{} MiB", wanted >> 20);
                Failure::field(ErrorCode::EXHAUSTED, "memory", wanted, &allowed)
            }
        }
    }

    fn load_begin(
        &mut self,
        number: u32,
        what: LoadKind,
        size: u64,
        platform: &mut dyn Platform,
    ) -> Result<u32, Failure> {
        let port = self.next_load();
        self.check_heap(0, platform)?;
        let Self { cells, ownership, .. } = self;
        let cell = cells.iter_mut().find(|cell| cell.id.0 == number).ok_or_else(|| no_cell(number))?;
        cell.may(Step::LoadBegin)?;
        if what != LoadKind::KERNEL && what != LoadKind::INITRD {
            return Err(Failure::field(ErrorCode::INVALID, "what", what.0, "0 (kernel), 1 (initrd)"));
        }
        let memory = cell.resources.memory_bytes();
        if size == 0 || size > memory {
            let allowed = format!("1 to the cell's {memory} bytes of memory");
            let why = format!("{what}: size is {size} bytes; allowed: {allowed}");
            return Err(Failure::field(ErrorCode::INVALID, "size", size, &allowed).saying(why));
        }
        let id = cell.id;
        let take = |bytes| ownership.take(id, &[], bytes).map(|(_, memory)| memory);
        cell.store.begin(what, size, port, take).map_err(|_| {
            let allowed = format!("what fits into the {} MiB of the pool that are free", ownership.free_bytes() >> 20);
            let why = format!(
                "cell '{}', {what}: its {size} bytes are kept in the pool beside the cell's memory; allowed: {allowed}",
                cell.resources.name
            );
            Failure::field(ErrorCode::EXHAUSTED, "size", size, &allowed).saying(why)
        })?;
        self.last_load = port - BULK_PORTS;
        Ok(port)
    }

    /// The next port for a file that none waits at.
    fn next_load(&self) -> u32 {
        let mut next = self.last_load;
        loop {
            next = next.wrapping_add(1) % (u32::MAX - BULK_PORTS);
            let port = BULK_PORTS + next;
            if !self.cells.iter().flat_map(|cell| cell.store.files()).any(|file| file.port == port) {
                return port;
            }
        }
    }

    fn load_finish(&mut self, number: u32, platform: &mut dyn Platform) -> Result<(), Failure> {
        let cell = self.cell_for(number, Step::LoadFinish)?;
        if let Some(file) = cell.store.files().iter().find(|file| !file.is_complete()) {
            return Err(incomplete(cell, file));
        }
        if !cell.store.is_complete() {
            let why = format!("cell '{}' has no kernel; load one first", cell.resources.name);
            return Err(Failure::new(ErrorCode::BAD_FILE, why));
        }
        cell.build(Step::LoadFinish, platform)
    }

    /// Whether the heap has `needed` bytes more than what is promised already: to cells that
    /// are being made, to connections, and to the hypervisor itself.
    fn check_heap(&self, needed: u64, platform: &dyn Platform) -> Result<(), Failure> {
        let unmade = self.cells.iter().filter(|cell| !cell.prepared);
        let promised: u64 = unmade.map(|cell| cell_heap(cell.resources.cpus.len())).sum();
        let (heap, needed) = (platform.heap(), needed + promised + HEAP_RESERVE);
        let left = heap.total.saturating_sub(heap.used);
        if left >= needed {
            return Ok(());
        }
        let why = format!(
            "the hypervisor's heap has {left} of {} bytes left; {needed} are needed for this: destroy a cell first",
            heap.total
        );
        Err(Failure::new(ErrorCode::EXHAUSTED, why))
    }

    pub(super) fn show(&self, number: u32, platform: &mut dyn Platform) -> Result<CellDetails, Failure> {
        if number == CellId::ROOT.0 {
            return Ok(self.show_root(platform));
        }
        let cell = self.cells.iter().find(|cell| cell.id.0 == number).ok_or_else(|| no_cell(number))?;
        let ranges = cell.resources.memory.iter();
        Ok(CellDetails {
            summary: summary(cell),
            memory: ranges.map(|range| MemoryRange { base: range.base.raw(), len: range.len }).collect(),
            cmdline: cell.resources.cmdline.clone(),
            stopped: cell.stopped.clone(),
            failure: (cell.state == State::Failed).then(|| platform.failure_report(cell.id)),
            vcpus: if cell.prepared { platform.vcpus(cell.id) } else { Vec::new() },
            exit_code: cell.exit_code,
            restarts: Some(cell.restarts),
            on_reboot: Some(cell.resources.on_reboot),
            on_crash: Some(cell.resources.on_crash),
            origin: cell.resources.origin.clone(),
            files_memory: Some(cell.store.memory().map(|range| range.len).sum()),
        })
    }

    /// The root cell, of which management owns nothing but knows what it has.
    fn show_root(&self, platform: &mut dyn Platform) -> CellDetails {
        let owned = self.ownership.owners().filter(|(_, owner)| *owner == CpuOwner::Cell(CellId::ROOT));
        CellDetails {
            summary: CellSummary {
                cell: CellId::ROOT.0,
                name: ROOT_NAME.into(),
                state: CellState::RUNNING,
                cpus: owned.map(|(cpu, _)| cpu.0).collect(),
                memory: self.facts.root_memory,
                console_port: None,
            },
            memory: Vec::new(),
            cmdline: String::new(),
            stopped: None,
            failure: None,
            vcpus: platform.vcpus(CellId::ROOT),
            exit_code: None,
            restarts: None,
            on_reboot: None,
            on_crash: None,
            origin: None,
            files_memory: None,
        }
    }

    fn node_info(&self, platform: &dyn Platform) -> NodeInfo {
        let cpus: Vec<_> = self.ownership.owners().map(|(cpu, owner)| self.cpu_info(cpu, owner)).collect();
        let free_cpus = cpus.iter().filter(|cpu| cpu.state == CpuUse::FREE).fold(0, |count, _| count + 1);
        let (facts, heap) = (self.facts.clone(), platform.heap());
        NodeInfo {
            name: facts.name,
            version: facts.version,
            commit: facts.commit,
            boot: facts.boot,
            backend: facts.backend,
            uptime_ns: platform.now_ns(),
            counter_hz: facts.counter_hz,
            counter_offset: facts.counter_offset,
            cpus,
            free_cpus,
            root_memory: facts.root_memory,
            pool_memory: self.ownership.pool_bytes(),
            free_memory: self.ownership.free_bytes(),
            heap_used: heap.used,
            heap_total: heap.total,
            generation: self.ownership.generation(),
        }
    }

    fn cpu_info(&self, cpu: CpuId, owner: CpuOwner) -> CpuInfo {
        let (state, cell) = match owner {
            CpuOwner::Nobody => (CpuUse::FREE, None),
            CpuOwner::Cell(CellId::ROOT) => (CpuUse::ROOT, None),
            CpuOwner::Cell(id) => {
                let moving = |cell: &Cell| matches!(cell.state, State::Creating | State::Destroying);
                let moving = self.cells.iter().any(|cell| cell.id == id && moving(cell));
                (if moving { CpuUse::MOVING } else { CpuUse::CELL }, Some(id.0))
            }
        };
        CpuInfo { cpu: cpu.0, state, cell }
    }
}

fn summary(cell: &Cell) -> CellSummary {
    CellSummary {
        cell: cell.id.0,
        name: cell.resources.name.clone(),
        state: cell.state.into(),
        cpus: cell.resources.cpus.iter().map(|cpu| cpu.0).collect(),
        memory: cell.resources.memory_bytes(),
        console_port: cell.console_port(),
    }
}

/// Numbers of CPUs as a list for people: `1, 3`.
fn numbers(cpus: impl Iterator<Item = CpuId>) -> String {
    cpus.map(|cpu| cpu.0.to_string()).collect::<Vec<_>>().join(", ")
}

fn failed(cell: &Cell, error: &PlatformError) -> Failure {
    Failure::new(ErrorCode::PLATFORM, format!("cell '{}': {error}", cell.resources.name))
}

fn no_cell(number: u32) -> Failure {
    let why = format!("there is no cell with the number {number}; allowed: what `list` says");
    Failure::field(ErrorCode::NOT_FOUND, "cell", number, "what `list` says").saying(why)
}
