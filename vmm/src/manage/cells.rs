//! The guest cells: requests about them, and the work that requests begin.
//!
//! What is begun and fails is put back: CPUs go to where they came from, memory is zeroed
//! and freed. A cell belongs to the connection that created it until it is *ready*: if that
//! closes before, the cell is destroyed, whatever had been done by then.

mod requests;
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
use bulkhead_abi::message::{ErrorCode, Failure, LoadKind, Reply, console_port};

/// A late answer: to which connection, to which request, what.
pub(super) type Answer = (StreamId, u32, Result<Reply, Failure>);

/// What is being done about a cell, a slice at a time.
#[derive(Debug)]
enum Task {
    /// Its CPUs are being taken from the root cell, until this time.
    Claim { deadline_ns: u64 },
    /// Its memory is zeroed before it gets it.
    ZeroNew(Cursor),
    /// It is being turned off.
    Stop,
    /// Its memory is zeroed before it is freed; then its creation has failed, or it is
    /// destroyed.
    ZeroOld { cursor: Cursor, failure: Option<Failure> },
}

/// How far the zeroing of a cell's memory is.
#[derive(Debug, Clone, Copy, Default)]
struct Cursor {
    range: usize,
    offset: u64,
}

/// A file that a cell is loaded with.
#[derive(Debug)]
struct File {
    what: LoadKind,
    port: u32,
    size: u64,
    arrived: u64,
}

/// A guest cell.
#[derive(Debug)]
struct Cell {
    id: CellId,
    resources: CellResources,
    state: State,
    /// The connection it belongs to, until it is ready.
    creator: Option<StreamId>,
    /// Who waits for the task's end: connection and request.
    asker: Option<(StreamId, u32)>,
    task: Option<Task>,
    /// The platform knows it.
    prepared: bool,
    /// Its memory may hold something of it.
    touched: bool,
    files: Vec<File>,
    /// It has been *ready*: what it has is its own for good.
    settled: bool,
    /// Why it is off.
    stopped: Option<String>,
}

impl Cell {
    /// Takes a step that was found to be allowed by [`may`](Self::may), or an event.
    fn step(&mut self, step: Step) {
        if let Some(state) = self.state.after(step) {
            log::info!("cell '{}': {:?} -> {:?}", self.resources.name, self.state, state);
            self.state = state;
        }
    }

    /// Whether a request may take `step`.
    fn may(&self, step: Step) -> Result<(), Failure> {
        if self.state.after(step).is_some() {
            return Ok(());
        }
        let state = bulkhead_abi::message::CellState::from(self.state);
        let hint = if step == Step::Destroy && self.state == State::Running { "; stop it first" } else { "" };
        let why = format!(
            "cell '{}' is {state}; {} is allowed when it is: {}{hint}",
            self.resources.name,
            step.name(),
            step.allowed()
        );
        Err(Failure::field(ErrorCode::STATE, "cell", state, step.allowed()).saying(why))
    }

    fn console_port(&self) -> Option<u32> {
        self.resources.console.then(|| console_port(self.id.0))
    }
}

/// All guest cells, and who owns what.
#[derive(Debug)]
pub(super) struct Cells {
    facts: NodeFacts,
    ownership: Ownership,
    cells: Vec<Cell>,
    answers: Vec<Answer>,
    last_cell: u32,
    last_load: u32,
    /// Which cell's memory was zeroed last, so that the others get their turn.
    turn: usize,
}

impl Cells {
    pub(super) fn new(facts: NodeFacts, cpus: u32, kept_back: &[CpuId], pool: &[HostRange]) -> Self {
        Self {
            facts,
            ownership: Ownership::new(cpus, kept_back, pool),
            cells: Vec::new(),
            answers: Vec::new(),
            last_cell: 0,
            last_load: 0,
            turn: 0,
        }
    }

    /// The hypervisor's version.
    pub(super) fn version(&self) -> &str {
        &self.facts.version
    }

    /// Who owns what, and what each cell has, for tests.
    #[cfg(test)]
    pub(super) fn audit(&self) -> (&Ownership, impl Iterator<Item = (CellId, &CellResources)>) {
        (&self.ownership, self.cells.iter().map(|cell| (cell.id, &cell.resources)))
    }

    /// The answers that have become known since the last call.
    pub(super) fn take_answers(&mut self) -> Vec<Answer> {
        core::mem::take(&mut self.answers)
    }

    /// A connection is gone: cells that belong to it are destroyed by the next work.
    pub(super) fn creator_gone(&mut self, stream: StreamId) {
        for cell in &mut self.cells {
            if cell.creator == Some(stream) {
                // Work looks for cells that are not ready and belong to nobody.
                cell.creator = None;
            }
        }
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
        let known = self.cells.iter().flat_map(|cell| &cell.files).any(|f| f.port == port && f.arrived == 0);
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
        let mut cells = self.cells.iter_mut().filter(|cell| cell.state == State::Loading);
        let found = cells.find_map(|cell| {
            let at = cell.files.iter().position(|file| file.port == port)?;
            Some((cell, at))
        });
        let Some((cell, at)) = found else { return (data.len(), Some(Err(no_load(port)))) };
        let Some(file) = cell.files.get_mut(at) else { return (0, None) };
        let missing = usize::try_from(file.size - file.arrived).unwrap_or(usize::MAX);
        let piece = data.get(..missing).unwrap_or(data);
        if let Err(error) = platform.load_data(cell.id, file.what, piece) {
            let why = format!("cell '{}': {error}", cell.resources.name);
            cell.files.remove(at);
            return (piece.len(), Some(Err(Failure::new(ErrorCode::BAD_FILE, why))));
        }
        file.arrived += piece.len() as u64;
        let done = (file.arrived == file.size).then_some(Ok(Reply::Loaded { bytes: file.size }));
        (piece.len(), done)
    }

    /// What to say to who has sent less than was announced to `port`.
    pub(super) fn load_cut_short(&self, port: u32) -> Failure {
        let mut files = self.cells.iter().flat_map(|cell| cell.files.iter().map(move |file| (cell, file)));
        let found = files.find(|(_, file)| file.port == port);
        found.map_or_else(|| no_load(port), |(cell, file)| incomplete(cell, file))
    }
}

fn incomplete(cell: &Cell, file: &File) -> Failure {
    let why = format!(
        "cell '{}', {}: {} of {} bytes have arrived; allowed: all of them",
        cell.resources.name, file.what, file.arrived, file.size
    );
    Failure::new(ErrorCode::BAD_FILE, why)
}

fn no_load(port: u32) -> Failure {
    let why = format!("no file is waited for at port {port}; allowed: the port of a load that was begun");
    Failure::field(ErrorCode::NOT_FOUND, "port", port, "the port of a load that was begun").saying(why)
}
