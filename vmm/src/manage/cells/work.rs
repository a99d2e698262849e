//! The work that requests begin, a slice at a time.

use super::{Cell, Cells, Cursor, Task};
use crate::cell::lifecycle::{State, Step};
use crate::manage::ZERO_SLICE;
use crate::manage::platform::{CellStatus, ClaimState, Platform};
use alloc::format;
use bulkhead_abi::message::{ErrorCode, Failure, Reply};

impl Cells {
    /// Does a slice. Returns whether there is more to do at once.
    pub(in crate::manage) fn work(&mut self, platform: &mut dyn Platform) -> bool {
        self.watch(platform);
        for cell in &mut self.cells {
            if cell.creator.is_none() && matches!(cell.state, State::Creating | State::Loading) {
                log::warn!("cell '{}': its creator went away before it was ready", cell.resources.name);
                cell.asker = None;
                cell.release(Step::Abandoned, None, platform);
            }
            cell.claim(&self.ownership, platform);
        }
        self.zero(platform)
    }

    /// Whether something outside is waited for.
    pub(in crate::manage) fn is_waiting(&self) -> bool {
        self.cells.iter().any(|cell| matches!(cell.task, Some(Task::Claim { .. } | Task::Stop)))
    }

    /// Looks at what the cells that run are doing.
    pub(super) fn watch(&mut self, platform: &mut dyn Platform) {
        for cell in &mut self.cells {
            if !matches!(cell.state, State::Running | State::Stopping) {
                continue;
            }
            match platform.cell_status(cell.id) {
                CellStatus::Running => continue,
                CellStatus::Stopped { reason } => {
                    cell.stopped = Some(reason);
                    cell.step(Step::TurnedOff);
                }
                CellStatus::Failed => cell.step(Step::Broke),
            }
            cell.task = None;
            self.answers.extend(cell.asker.take().map(|(stream, id)| (stream, id, Ok(Reply::Done))));
        }
    }

    /// Zeroes a slice of the memory of the next cell that wants it. Returns whether one did.
    fn zero(&mut self, platform: &mut dyn Platform) -> bool {
        let wants = |cell: &Cell| matches!(cell.task, Some(Task::ZeroNew(_) | Task::ZeroOld { .. }));
        let (count, turn) = (self.cells.len(), self.turn);
        let next = (1..=count).map(|step| (turn + step) % count);
        let Some(index) = next.into_iter().find(|index| self.cells.get(*index).is_some_and(wants)) else {
            return false;
        };
        self.turn = index;
        let Some(cell) = self.cells.get_mut(index) else { return false };
        let memory = &cell.resources.memory;
        let done = match &mut cell.task {
            Some(Task::ZeroNew(cursor)) => !cursor.zero(memory, platform),
            Some(Task::ZeroOld { cursor, .. }) => !(cell.touched && cursor.zero(memory, platform)),
            _ => false,
        };
        match cell.task.take_if(|_| done) {
            Some(Task::ZeroNew(_)) => {
                let answer = cell.prepare(platform);
                self.answers.extend(answer);
            }
            Some(Task::ZeroOld { failure, .. }) => {
                self.remove(index, failure.map_or(Ok(Reply::Done), Err), platform);
            }
            _ => {}
        }
        true
    }

    /// The end of a cell: what it had goes to where it came from.
    fn remove(&mut self, index: usize, result: Result<Reply, Failure>, platform: &mut dyn Platform) {
        let cell = self.cells.remove(index);
        self.cells.shrink_to_fit();
        self.ownership.give_back(cell.id, &cell.resources.memory);
        if cell.settled {
            self.ownership.note_change();
        }
        for cpu in &cell.resources.cpus {
            if self.ownership.comes_from_root(*cpu) {
                platform.release_cpu(*cpu);
            }
        }
        log::info!("cell '{}': gone", cell.resources.name);
        self.answers.extend(cell.asker.map(|(stream, id)| (stream, id, result)));
    }
}

impl Cell {
    /// Looks at how far the taking of its CPUs is.
    fn claim(&mut self, ownership: &crate::cell::ownership::Ownership, platform: &mut dyn Platform) {
        let Some(Task::Claim { deadline_ns }) = self.task else { return };
        for cpu in &self.resources.cpus {
            if !ownership.comes_from_root(*cpu) {
                continue;
            }
            let number = cpu.0;
            let failure = match platform.claim_state(*cpu) {
                ClaimState::Claimed => continue,
                ClaimState::Pending if platform.now_ns() < deadline_ns => return,
                ClaimState::Pending => {
                    let why = format!(
                        "cpus has {number}, which the root cell did not give away within 1 s; \
                         allowed: CPUs that are offline in it"
                    );
                    let failure = Failure::field(
                        ErrorCode::TIMEOUT,
                        "cpus",
                        number,
                        "CPUs that are offline in the root cell",
                    );
                    failure.saying(why)
                }
                ClaimState::Refused(reason) => {
                    let why = format!("cpus has {number}, which cannot be had: {reason}");
                    Failure::field(ErrorCode::PLATFORM, "cpus", number, "another").saying(why)
                }
            };
            return self.release(Step::Abandoned, Some(failure), platform);
        }
        self.task = Some(Task::ZeroNew(Cursor::default()));
    }

    /// Has the platform build it. Returns the answer to its creator, if there is one now.
    fn prepare(&mut self, platform: &mut dyn Platform) -> Option<super::Answer> {
        self.touched = true;
        match platform.prepare_cell(self.id, &self.resources) {
            Ok(()) => {
                self.prepared = true;
                self.step(Step::Prepared);
                let (stream, id) = self.asker.take()?;
                Some((stream, id, Ok(Reply::Created { cell: self.id.0 })))
            }
            Err(error) => {
                let why = format!("cell '{}' cannot be built: {error}", self.resources.name);
                self.release(Step::Abandoned, Some(Failure::new(ErrorCode::PLATFORM, why)), platform);
                None
            }
        }
    }

    /// Begins to give back all it has; `failure` is then the answer to who waits.
    pub(super) fn release(&mut self, step: Step, failure: Option<Failure>, platform: &mut dyn Platform) {
        if core::mem::take(&mut self.prepared) {
            platform.tear_down_cell(self.id);
        }
        self.files.clear();
        self.step(step);
        self.task = Some(Task::ZeroOld { cursor: Cursor::default(), failure });
    }
}

impl Cursor {
    /// Zeroes the next slice of `memory`. Returns whether there was one.
    fn zero(&mut self, memory: &[crate::cell::config::HostRange], platform: &mut dyn Platform) -> bool {
        let Some(range) = memory.get(self.range) else { return false };
        let len = ZERO_SLICE.min(range.len.saturating_sub(self.offset));
        if let Some(base) = range.base.checked_add(self.offset) {
            platform.zero(base, len);
        }
        self.offset += len;
        if self.offset >= range.len {
            *self = Self { range: self.range + 1, offset: 0 };
        }
        true
    }
}
