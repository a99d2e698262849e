//! The work that requests begin, a slice at a time, and what cells do by themselves.

use super::{Cell, Cells, Cursor, Shutdown, Task, Waiter};
use crate::cell::config::HostRange;
use crate::cell::lifecycle::{State, Step};
use crate::cell::ownership::Ownership;
use crate::manage::ZERO_SLICE;
use crate::manage::platform::{CellStatus, ClaimState, Ending, Platform};
use alloc::format;
use alloc::string::ToString as _;
use alloc::vec::Vec;
use bulkhead_abi::message::{Action, CRASH_WINDOW_NS, CellState, ErrorCode, Failure, MAX_CRASHES, Reply};

/// How long a cell may take to turn itself off before the machine is.
const SHUTDOWN_TIMEOUT_NS: u64 = 30_000_000_000;

impl Cells {
    /// Does a slice. Returns whether there is more to do at once.
    pub(in crate::manage) fn work(&mut self, platform: &mut dyn Platform) -> bool {
        self.watch(platform);
        for cell in &mut self.cells {
            if cell.creator.is_none() && cell.state.is_on_loan() {
                cell.abandon(platform);
            }
            self.answers.extend(cell.claim(&self.ownership, platform));
        }
        self.turn_off_next(platform);
        let more = self.fill(platform);
        self.answer_waiters(platform);
        more
    }

    /// Whether something outside is waited for.
    pub(in crate::manage) fn is_waiting(&self) -> bool {
        self.shutdown.is_some()
            || self.cells.iter().any(|cell| matches!(cell.task, Some(Task::Claim { .. } | Task::Halt)))
    }

    /// Begins to turn off all cells, the newest first, before the machine is turned off.
    pub(in crate::manage) fn begin_shutdown(&mut self) {
        self.shutdown.get_or_insert_default();
    }

    /// The names of the cells that are on.
    pub(in crate::manage) fn names_on(&self) -> impl Iterator<Item = &str> {
        let on = |cell: &&Cell| cell.state.is_on() || cell.state == State::Restarting;
        self.cells.iter().filter(on).map(|cell| cell.resources.name.as_str())
    }

    /// Whether no cell is on.
    pub(in crate::manage) fn is_off(&self) -> bool {
        self.names_on().next().is_none()
    }

    /// Looks at what the cells that are on are doing.
    pub(super) fn watch(&mut self, platform: &mut dyn Platform) {
        let lasting = self.shutdown.is_some();
        for cell in self.cells.iter_mut().filter(|cell| cell.state.is_on()) {
            let was = cell.state;
            match platform.cell_status(cell.id) {
                CellStatus::Running => continue,
                CellStatus::Paused if was != State::Pausing => continue,
                CellStatus::Paused => cell.step(Step::CameToRest),
                CellStatus::Off(ending) => cell.ended(ending, lasting, platform),
            }
            if cell.doomed {
                cell.release(Step::Destroy, None, platform);
                continue;
            }
            if matches!(cell.task, Some(Task::Halt)) {
                cell.task = None;
            }
            let fulfilled = was == State::Stopping || cell.state == State::Paused;
            let result = if fulfilled { Ok(Reply::Done) } else { Err(cell.came_between("its end")) };
            self.answers.extend(cell.asker.take().map(|(client, id)| (client, id, result)));
        }
    }

    /// Turns off the next cell, if the machine is to be turned off.
    fn turn_off_next(&mut self, platform: &mut dyn Platform) {
        let Some(Shutdown { asked }) = &mut self.shutdown else { return };
        let on = |cell: &&mut Cell| cell.state.is_on() || cell.state == State::Restarting;
        let Some(cell) = self.cells.iter_mut().filter(on).max_by_key(|cell| cell.id) else { return };
        let now = platform.now_ns();
        match *asked {
            Some((id, deadline_ns)) if id == cell.id => {
                if now >= deadline_ns && cell.state != State::Stopping {
                    log::warn!("cell '{}': did not turn itself off and is turned off", cell.resources.name);
                    cell.halt(platform);
                }
            }
            _ => {
                *asked = Some((cell.id, now.saturating_add(SHUTDOWN_TIMEOUT_NS)));
                if cell.state == State::Running {
                    log::info!("cell '{}': its power button is pressed", cell.resources.name);
                    platform.press_power_button(cell.id);
                } else if cell.state != State::Stopping {
                    cell.halt(platform);
                }
            }
        }
    }

    /// Zeroes or fills a slice of the memory of the next cell that wants it. Returns whether one
    /// did.
    fn fill(&mut self, platform: &mut dyn Platform) -> bool {
        let wants = |cell: &Cell| matches!(cell.task, Some(Task::Build { .. } | Task::Wipe { .. }));
        let (count, turn) = (self.cells.len(), self.turn);
        let next = (1..=count).map(|step| (turn + step) % count);
        let Some(index) = next.into_iter().find(|index| self.cells.get(*index).is_some_and(wants)) else {
            return false;
        };
        self.turn = index;
        let Some(cell) = self.cells.get_mut(index) else { return false };
        match &mut cell.task {
            Some(Task::Build { cursor, zeroed }) if !*zeroed => {
                cell.touched = true;
                *zeroed = !cursor.zero(cell.resources.memory.iter().copied(), platform);
            }
            Some(Task::Build { .. }) => match platform.build_cell(cell.id) {
                Ok(true) => {}
                Ok(false) => {
                    let answer = cell.built(platform);
                    if !core::mem::replace(&mut cell.settled, true) {
                        self.ownership.note_change();
                    }
                    self.answers.extend(answer);
                }
                Err(error) => {
                    let answer = cell.not_built(&error.to_string());
                    self.answers.extend(answer);
                }
            },
            Some(Task::Wipe { cursor, failure }) => {
                // The guest's memory holds nothing before it was filled.
                let untouched = if cell.touched { 0 } else { cell.resources.memory.len() };
                let memory = cell.resources.memory.iter().copied().skip(untouched);
                if !cursor.zero(memory.chain(cell.store.memory()), platform) {
                    let result = failure.take().map_or(Ok(Reply::Done), Err);
                    self.remove(index, result, platform);
                }
            }
            _ => {}
        }
        true
    }

    /// The end of a cell: what it had goes to where it came from.
    fn remove(&mut self, index: usize, result: Result<Reply, Failure>, platform: &mut dyn Platform) {
        let cell = self.cells.remove(index);
        self.cells.shrink_to_fit();
        let memory: Vec<_> = cell.memory().collect();
        self.ownership.give_back(cell.id, &memory);
        if cell.settled {
            self.ownership.note_change();
        }
        for cpu in &cell.resources.cpus {
            if self.ownership.comes_from_root(*cpu) {
                platform.release_cpu(*cpu);
            }
        }
        log::info!("cell '{}': gone", cell.resources.name);
        self.answers.extend(cell.asker.map(|(client, id)| (client, id, result)));
    }

    /// Answers those whose cell is in the state that they wait for, or gone.
    fn answer_waiters(&mut self, platform: &mut dyn Platform) {
        let done = |cells: &[Cell], waiter: &Waiter| {
            let cell = cells.iter().find(|cell| cell.id == waiter.cell);
            cell.is_none_or(|cell| waiter.states.contains(&CellState::from(cell.state)))
        };
        while let Some(at) = self.waiters.iter().position(|waiter| done(&self.cells, waiter)) {
            let Waiter { client, id, cell, .. } = self.waiters.remove(at);
            let result = self.show(cell.0, platform).map(Reply::Cell);
            self.answers.push((client, id, result));
            self.waiters.shrink_to_fit();
        }
    }
}

impl Cell {
    /// Looks at how far the taking of its CPUs is, and makes it when that is done. Returns the
    /// answer to its creator then.
    fn claim(&mut self, ownership: &Ownership, platform: &mut dyn Platform) -> Option<super::Answer> {
        let Some(Task::Claim { deadline_ns }) = self.task else { return None };
        for cpu in &self.resources.cpus {
            if !ownership.comes_from_root(*cpu) {
                continue;
            }
            let number = cpu.0;
            let failure = match platform.claim_state(*cpu) {
                ClaimState::Claimed => continue,
                ClaimState::Pending if platform.now_ns() < deadline_ns => return None,
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
            self.release(Step::Abandoned, Some(failure), platform);
            return None;
        }
        if let Err(error) = platform.prepare_cell(self.id, &self.resources) {
            let why = format!("cell '{}' cannot be built: {error}", self.resources.name);
            self.release(Step::Abandoned, Some(Failure::new(ErrorCode::PLATFORM, why)), platform);
            return None;
        }
        self.prepared = true;
        self.task = None;
        self.step(Step::Prepared);
        let (client, id) = self.asker.take()?;
        Some((client, id, Ok(Reply::Created { cell: self.id.0 })))
    }

    /// Begins to fill its memory from its files.
    ///
    /// # Errors
    /// What is wrong with a file; nothing has then changed.
    pub(super) fn build(&mut self, step: Step, platform: &mut dyn Platform) -> Result<(), Failure> {
        let files = self.store.stored();
        platform.plan_cell(self.id, &self.resources, &files).map_err(|error| {
            Failure::new(ErrorCode::BAD_FILE, format!("cell '{}': {error}", self.resources.name))
        })?;
        self.step(step);
        self.task = Some(Task::Build { cursor: Cursor::default(), zeroed: false });
        Ok(())
    }

    /// Its memory is filled. Returns the answer to who waits for that.
    fn built(&mut self, platform: &mut dyn Platform) -> Option<super::Answer> {
        self.task = None;
        self.creator = None;
        let result = match self.state {
            State::Restarting => match platform.start_cell(self.id) {
                Ok(()) => Ok(Reply::Done),
                Err(error) => return self.not_built(&error.to_string()),
            },
            _ => Ok(Reply::Done),
        };
        self.step(Step::Built);
        self.asker.take().map(|(client, id)| (client, id, result))
    }

    /// Its memory cannot be filled. Returns the answer to who waits for that.
    fn not_built(&mut self, error: &str) -> Option<super::Answer> {
        self.task = None;
        let why = format!("cell '{}': {error}", self.resources.name);
        if self.state == State::Restarting {
            log::warn!("{why}");
            self.stopped = Some(error.into());
        }
        self.step(Step::NotBuilt);
        let (client, id) = self.asker.take()?;
        Some((client, id, Err(Failure::new(ErrorCode::BAD_FILE, why))))
    }

    /// It is off by itself or by request. With `lasting` it does not begin anew.
    fn ended(&mut self, ending: Ending, lasting: bool, platform: &mut dyn Platform) {
        let wanted = self.state == State::Stopping || self.doomed || lasting;
        let (reason, step, anew) = match ending {
            Ending::Request => ("stopped by request".into(), Step::TurnedOff, false),
            Ending::PowerOff => ("the guest turned itself off".into(), Step::TurnedOff, false),
            Ending::Reset => {
                let anew = self.resources.on_reboot == Action::RESTART;
                ("the guest asked for a reset".into(), Step::TurnedOff, anew)
            }
            Ending::Exit(code) => {
                self.exit_code = Some(code);
                (format!("the guest wrote {code} to its exit port"), Step::TurnedOff, false)
            }
            Ending::Failed => {
                let reason = platform.failure_report(self.id).reason;
                (reason, Step::Broke, self.resources.on_crash == Action::RESTART)
            }
        };
        log::info!("cell '{}': {reason}", self.resources.name);
        if anew && !wanted && (step != Step::Broke || self.may_crash_again(platform.now_ns())) {
            match self.begin_anew(Step::BeginsAnew, platform) {
                Ok(()) => return,
                Err(failure) => log::warn!("{failure}"),
            }
        }
        self.stopped = Some(reason);
        self.step(step);
    }

    /// Begins to fill its memory again, to run it then.
    ///
    /// # Errors
    /// What is wrong with a file.
    pub(super) fn begin_anew(&mut self, step: Step, platform: &mut dyn Platform) -> Result<(), Failure> {
        self.build(step, platform)?;
        self.stopped = None;
        self.exit_code = None;
        self.restarts = self.restarts.saturating_add(1);
        Ok(())
    }

    /// Notes a failure, unless there were too many of late.
    fn may_crash_again(&mut self, now: u64) -> bool {
        self.crashes.retain(|then| now.saturating_sub(*then) < CRASH_WINDOW_NS);
        let may = self.crashes.push(now).is_ok();
        if !may {
            log::warn!(
                "cell '{}': it has failed more than {MAX_CRASHES} times within a minute and stays so",
                self.resources.name
            );
        }
        may
    }

    /// Turns it off: one that is on, or about to run again.
    pub(super) fn halt(&mut self, platform: &mut dyn Platform) {
        if self.state == State::Restarting {
            self.task = None;
            self.stopped = Some("stopped by request".into());
        } else {
            platform.stop_cell(self.id);
            self.task = Some(Task::Halt);
        }
        self.step(Step::Stop);
    }

    /// Who created or reloaded it went away before it was ready.
    fn abandon(&mut self, platform: &mut dyn Platform) {
        log::warn!("cell '{}': its creator went away before it was ready", self.resources.name);
        self.asker = None;
        if self.state.after(Step::Abandoned) == Some(State::Stopped) {
            self.task = None;
            self.stopped = Some("its reloading was given up".into());
            self.step(Step::Abandoned);
        } else {
            self.release(Step::Abandoned, None, platform);
        }
    }

    /// Begins to give back all it has; `failure` is then the answer to who waits.
    pub(super) fn release(&mut self, step: Step, failure: Option<Failure>, platform: &mut dyn Platform) {
        if core::mem::take(&mut self.prepared) {
            platform.tear_down_cell(self.id);
        }
        self.creator = None;
        self.step(step);
        self.task = Some(Task::Wipe { cursor: Cursor::default(), failure });
    }

    /// What who waits for something is told when it did not come about.
    pub(super) fn came_between(&self, what: &str) -> Failure {
        let why = format!("cell '{}': {what} came between", self.resources.name);
        Failure::new(ErrorCode::STATE, why)
    }
}

impl Cursor {
    /// Zeroes the next slice of `memory`. Returns whether there was one.
    fn zero(&mut self, memory: impl Iterator<Item = HostRange>, platform: &mut dyn Platform) -> bool {
        let Some(range) = { memory }.nth(self.range) else { return false };
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
