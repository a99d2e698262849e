//! The guest cells: requests about them, and the work that requests begin.
//!
//! What is begun and fails is put back: CPUs go to where they came from, memory is zeroed
//! and freed. A cell belongs to the connection that creates or reloads it until it is *ready*:
//! if that closes before, a new cell is destroyed and another is *stopped*.

mod requests;
mod store;
mod work;

#[cfg(test)]
pub(super) use requests::{HEAP_RESERVE, cell_heap};

use super::platform::{NodeFacts, Platform};
use crate::cell::config::{CellResources, HostRange};
use crate::cell::lifecycle::{State, Step};
use crate::cell::ownership::Ownership;
use crate::device::stream::StreamId;
use crate::hal::{CellId, CpuId};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use bulkhead_abi::message::{CellState, ErrorCode, Failure, MAX_CRASHES, Reply, console_port};
use store::{File, Store};

/// Who asks for something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Client {
    /// The boot, for a cell of the bundle.
    Boot,
    /// A connection.
    Stream(StreamId),
}

/// A late answer: to whom, to which request, what.
pub(super) type Answer = (Client, u32, Result<Reply, Failure>);

/// What is being done about a cell, a slice at a time.
#[derive(Debug)]
enum Task {
    /// Its CPUs are being taken from the root cell, until this time.
    Claim { deadline_ns: u64 },
    /// Its memory is zeroed and then filled.
    Build { cursor: Cursor, zeroed: bool },
    /// Its vCPUs are on their way to a halt, or out of the guest.
    Halt,
    /// Its memory is zeroed before it is freed; then its creation has failed, or it is
    /// destroyed.
    Wipe { cursor: Cursor, failure: Option<Failure> },
}

/// How far the zeroing of memory is.
#[derive(Debug, Clone, Copy, Default)]
struct Cursor {
    range: usize,
    offset: u64,
}

/// A guest cell.
#[derive(Debug)]
struct Cell {
    id: CellId,
    resources: CellResources,
    state: State,
    /// Whom it belongs to while it is on loan.
    creator: Option<Client>,
    /// Who waits for the task's end, and by which request.
    asker: Option<(Client, u32)>,
    task: Option<Task>,
    /// The platform knows it.
    prepared: bool,
    /// Its memory may hold something of it.
    touched: bool,
    store: Store,
    /// It has been *ready*: what it has is its own for good.
    settled: bool,
    /// It is destroyed as soon as it is off.
    doomed: bool,
    /// Why it is off.
    stopped: Option<String>,
    exit_code: Option<u32>,
    restarts: u32,
    /// When it failed and began anew, the last times.
    crashes: heapless::Vec<u64, MAX_CRASHES>,
}

impl Cell {
    /// Takes a step that was found to be allowed by [`may`](Self::may), or an event.
    fn step(&mut self, step: Step) {
        if let Some(state) = self.state.after(step) {
            if state != self.state {
                log::info!("cell '{}': {:?} -> {:?}", self.resources.name, self.state, state);
            }
            self.state = state;
        }
    }

    /// Whether a request may take `step`.
    fn may(&self, step: Step) -> Result<(), Failure> {
        if self.state.after(step).is_some() {
            return Ok(());
        }
        let (state, allowed) = (CellState::from(self.state), step.allowed());
        let why = format!("cell '{}' is {state}; {} needs: {allowed}", self.resources.name, step.name());
        Err(Failure::field(ErrorCode::STATE, "cell", state, &allowed).saying(why))
    }

    fn console_port(&self) -> Option<u32> {
        self.resources.console.then(|| console_port(self.id.0))
    }

    /// All memory that it owns: the guest's, then that of its files.
    fn memory(&self) -> impl Iterator<Item = HostRange> + '_ {
        self.resources.memory.iter().copied().chain(self.store.memory())
    }
}

/// Who waits for a cell to be in one of these states.
#[derive(Debug)]
struct Waiter {
    client: Client,
    id: u32,
    cell: CellId,
    states: Vec<CellState>,
}

/// All guest cells, and who owns what.
#[derive(Debug)]
pub(super) struct Cells {
    facts: NodeFacts,
    ownership: Ownership,
    cells: Vec<Cell>,
    answers: Vec<Answer>,
    waiters: Vec<Waiter>,
    last_cell: u32,
    last_load: u32,
    /// Which cell's memory was worked on last, so that the others get their turn.
    turn: usize,
    /// The machine is about to be turned off: until when the cell that was asked may take to turn
    /// itself off.
    shutdown: Option<Shutdown>,
}

/// How far the turning off of all cells is.
#[derive(Debug, Clone, Copy, Default)]
struct Shutdown {
    /// The cell whose power button was pressed last, and until when it may take.
    asked: Option<(CellId, u64)>,
}

impl Cells {
    pub(super) fn new(facts: NodeFacts, cpus: u32, kept_back: &[CpuId], pool: &[HostRange]) -> Self {
        Self {
            facts,
            ownership: Ownership::new(cpus, kept_back, pool),
            cells: Vec::new(),
            answers: Vec::new(),
            waiters: Vec::new(),
            last_cell: 0,
            last_load: 0,
            turn: 0,
            shutdown: None,
        }
    }

    /// The hypervisor's version.
    pub(super) fn version(&self) -> &str {
        &self.facts.version
    }

    /// Who owns what, and what each cell has, for tests.
    #[cfg(test)]
    pub(super) fn audit(&self) -> (&Ownership, impl Iterator<Item = (CellId, &[CpuId], Vec<HostRange>)>) {
        let cells = self.cells.iter();
        (&self.ownership, cells.map(|cell| (cell.id, &cell.resources.cpus[..], cell.memory().collect())))
    }

    /// The answers that have become known since the last call.
    pub(super) fn take_answers(&mut self) -> Vec<Answer> {
        core::mem::take(&mut self.answers)
    }

    /// A connection is gone: cells that belong to it are given up by the next work.
    pub(super) fn creator_gone(&mut self, stream: StreamId) {
        let client = Client::Stream(stream);
        for cell in &mut self.cells {
            if cell.creator == Some(client) {
                // Work looks for cells that are on loan and belong to nobody.
                cell.creator = None;
            }
        }
        self.waiters.retain(|waiter| waiter.client != client);
        self.waiters.shrink_to_fit();
    }

    /// The cell whose console is at `port`.
    pub(super) fn console(&self, port: u32) -> Result<CellId, Failure> {
        let cell = self.cells.iter().find(|cell| cell.console_port() == Some(port));
        cell.map(|cell| cell.id).ok_or_else(|| {
            let why = format!("port {port} is the console of no cell; allowed: what `show` says of a cell");
            Failure::field(ErrorCode::NOT_FOUND, "port", port, "a cell's console").saying(why)
        })
    }

    /// Whether more can come from the console of `cell`: `None` if the cell is gone.
    pub(super) fn console_alive(&self, cell: CellId) -> Option<bool> {
        let cell = self.cells.iter().find(|c| c.id == cell && c.prepared)?;
        Some(!matches!(cell.state, State::Stopped | State::Failed))
    }

    /// Whether `port` is one that a file is waited for at.
    pub(super) fn accept_load(&self, port: u32) -> Result<(), Failure> {
        let mut files = self.cells.iter().flat_map(|cell| cell.store.files());
        let known = files.any(|file| file.port == port && file.arrived == 0);
        known.then_some(()).ok_or_else(|| no_load(port))
    }

    /// Takes bytes of the file that goes to `port`. Returns how many, and when the file is
    /// complete or in vain what came of it.
    pub(super) fn load_data(
        &mut self,
        port: u32,
        data: &[u8],
        platform: &mut dyn Platform,
    ) -> (usize, Option<Result<Reply, Failure>>) {
        let waits = |cell: &&mut Cell| matches!(cell.state, State::Loading | State::Reloading);
        let mut cells = self.cells.iter_mut().filter(waits);
        let taken = cells.find_map(|cell| {
            let (count, complete) = cell.store.data(port, data, platform)?;
            let size = cell.store.files().iter().find(|file| file.port == port)?.stored.size;
            Some((count, complete.then_some(Ok(Reply::Loaded { bytes: size }))))
        });
        taken.unwrap_or_else(|| (data.len(), Some(Err(no_load(port)))))
    }

    /// What to say to who has sent less than was announced to `port`.
    pub(super) fn load_cut_short(&self, port: u32) -> Failure {
        let mut files = self.cells.iter().flat_map(|cell| cell.store.files().iter().map(move |f| (cell, f)));
        let found = files.find(|(_, file)| file.port == port);
        found.map_or_else(|| no_load(port), |(cell, file)| incomplete(cell, file))
    }
}

fn incomplete(cell: &Cell, file: &File) -> Failure {
    let why = format!(
        "cell '{}', {}: {} of {} bytes have arrived; allowed: all of them",
        cell.resources.name, file.stored.what, file.arrived, file.stored.size
    );
    Failure::new(ErrorCode::BAD_FILE, why)
}

fn no_load(port: u32) -> Failure {
    let why = format!("no file is waited for at port {port}; allowed: the port of a load that was begun");
    Failure::field(ErrorCode::NOT_FOUND, "port", port, "the port of a load that was begun").saying(why)
}
