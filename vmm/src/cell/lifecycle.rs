//! States of a cell and which step leads where.

use alloc::string::{String, ToString as _};
use bulkhead_abi::message::CellState;

/// The state of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// CPUs and memory are being taken.
    Creating,
    /// New; waits for its files.
    Loading,
    /// New; its memory is being filled from its files.
    Building,
    /// Can be started.
    Ready,
    /// Runs.
    Running,
    /// Its vCPUs are on their way out of the guest, to stay there.
    Pausing,
    /// Its vCPUs stand still.
    Paused,
    /// Is being turned off.
    Stopping,
    /// Is off; its memory is as it was left.
    Stopped,
    /// Did what cannot be carried on from.
    Failed,
    /// Off; waits for other files.
    Reloading,
    /// Off; its memory is being filled from other files.
    Rebuilding,
    /// Its memory is being filled from its files again, and then it runs.
    Restarting,
    /// Memory and CPUs are being given back; then it is gone.
    Destroying,
}

/// What can happen to a cell: requests first, then events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Request: announce a file.
    LoadBegin,
    /// Request: check the files.
    LoadFinish,
    /// Request: run it.
    Start,
    /// Request: press its power button.
    PressPower,
    /// Request: let it stand still.
    Pause,
    /// Request: let it go on.
    Resume,
    /// Request: turn it off.
    Stop,
    /// Request: take other files.
    Reload,
    /// Request: give back what it has.
    Destroy,
    /// Its CPUs and memory are there.
    Prepared,
    /// Its memory is filled.
    Built,
    /// Its memory cannot be filled from its files.
    NotBuilt,
    /// It cannot be created, or who loads it went away before it was ready.
    Abandoned,
    /// All its vCPUs stand still.
    CameToRest,
    /// All its vCPUs are off.
    TurnedOff,
    /// All its vCPUs are off, for one could not go on.
    Broke,
    /// All its vCPUs are off, and it is to begin anew.
    BeginsAnew,
}

impl Step {
    /// All steps, in the order of the book's table.
    pub const ALL: [Self; 17] = [
        Self::LoadBegin,
        Self::LoadFinish,
        Self::Start,
        Self::PressPower,
        Self::Pause,
        Self::Resume,
        Self::Stop,
        Self::Reload,
        Self::Destroy,
        Self::Prepared,
        Self::Built,
        Self::NotBuilt,
        Self::Abandoned,
        Self::CameToRest,
        Self::TurnedOff,
        Self::Broke,
        Self::BeginsAnew,
    ];

    /// The step as a word of a request, for messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::LoadBegin | Self::LoadFinish => "load",
            Self::Start => "start",
            Self::PressPower => "stop",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Stop => "stop --force",
            Self::Reload => "reload",
            Self::Destroy => "destroy",
            Self::Prepared => "prepared",
            Self::Built => "built",
            Self::NotBuilt => "not built",
            Self::Abandoned => "abandoned",
            Self::CameToRest => "came to rest",
            Self::TurnedOff => "turned off",
            Self::Broke => "failed",
            Self::BeginsAnew => "begins anew",
        }
    }

    /// The states in which the step is allowed, by the names that users see: `ready, stopped`.
    pub fn allowed(self) -> String {
        let mut names = String::new();
        for state in State::ALL.into_iter().filter(|state| state.after(self).is_some()) {
            let name = CellState::from(state).to_string();
            if names.split(", ").all(|known| known != name) {
                if !names.is_empty() {
                    names.push_str(", ");
                }
                names.push_str(&name);
            }
        }
        names
    }
}

impl State {
    /// All states, in the order of the book's table.
    pub const ALL: [Self; 14] = [
        Self::Creating,
        Self::Loading,
        Self::Building,
        Self::Ready,
        Self::Running,
        Self::Pausing,
        Self::Paused,
        Self::Stopping,
        Self::Stopped,
        Self::Failed,
        Self::Reloading,
        Self::Rebuilding,
        Self::Restarting,
        Self::Destroying,
    ];

    /// The state after `step`, or `None` where that is not allowed. A cell that is destroyed
    /// while its vCPUs are on is turned off first.
    pub const fn after(self, step: Step) -> Option<Self> {
        Some(match (self, step) {
            (Self::Creating, Step::Prepared) | (Self::Loading, Step::LoadBegin) => Self::Loading,
            (Self::Loading, Step::LoadFinish) => Self::Building,
            (Self::Building, Step::NotBuilt) => Self::Loading,
            (Self::Building | Self::Rebuilding, Step::Built) => Self::Ready,
            (Self::Stopped | Self::Failed, Step::Reload)
            | (Self::Reloading, Step::LoadBegin)
            | (Self::Rebuilding, Step::NotBuilt) => Self::Reloading,
            (Self::Reloading, Step::LoadFinish) => Self::Rebuilding,
            (Self::Stopped, Step::Start)
            | (Self::Running | Self::Pausing | Self::Paused, Step::BeginsAnew) => Self::Restarting,
            (Self::Ready, Step::Start)
            | (Self::Restarting, Step::Built)
            | (Self::Running, Step::PressPower)
            | (Self::Paused, Step::Resume) => Self::Running,
            (Self::Running, Step::Pause) => Self::Pausing,
            (Self::Pausing, Step::CameToRest) => Self::Paused,
            (Self::Running | Self::Pausing | Self::Paused, Step::Stop | Step::Destroy)
            | (Self::Stopping, Step::Destroy) => Self::Stopping,
            (Self::Running | Self::Pausing | Self::Paused | Self::Stopping, Step::TurnedOff)
            | (Self::Reloading | Self::Rebuilding, Step::Abandoned)
            | (Self::Restarting, Step::Stop | Step::NotBuilt) => Self::Stopped,
            (Self::Running | Self::Pausing | Self::Paused | Self::Stopping, Step::Broke) => Self::Failed,
            (
                Self::Creating
                | Self::Loading
                | Self::Building
                | Self::Ready
                | Self::Stopped
                | Self::Failed
                | Self::Reloading
                | Self::Rebuilding
                | Self::Restarting,
                Step::Destroy,
            )
            | (Self::Creating | Self::Loading | Self::Building, Step::Abandoned) => Self::Destroying,
            _ => return None,
        })
    }

    /// Whether vCPUs of it may be in the guest, or on their way in or out.
    pub const fn is_on(self) -> bool {
        matches!(self, Self::Running | Self::Pausing | Self::Paused | Self::Stopping)
    }

    /// Whether it belongs to who creates or loads it.
    pub const fn is_on_loan(self) -> bool {
        matches!(self, Self::Creating | Self::Loading | Self::Building | Self::Reloading | Self::Rebuilding)
    }
}

impl From<State> for CellState {
    fn from(state: State) -> Self {
        match state {
            State::Creating => Self::CREATING,
            State::Loading | State::Building | State::Reloading | State::Rebuilding => Self::LOADING,
            State::Ready => Self::READY,
            State::Running => Self::RUNNING,
            State::Pausing => Self::PAUSING,
            State::Paused => Self::PAUSED,
            State::Stopping => Self::STOPPING,
            State::Stopped => Self::STOPPED,
            State::Failed => Self::FAILED,
            State::Restarting => Self::RESTARTING,
            State::Destroying => Self::DESTROYING,
        }
    }
}

/// What each command does in each state, as Markdown for the book: the state that the cell is in at
/// once, or a dash where the command is refused.
#[must_use]
pub fn life_cycle_markdown() -> String {
    const COMMANDS: [Step; 7] =
        [Step::Start, Step::Pause, Step::Resume, Step::PressPower, Step::Stop, Step::Reload, Step::Destroy];
    let mut text = String::from("| state |");
    let mut line = String::from("\n| --- |");
    for command in COMMANDS {
        text += &alloc::format!(" `{}` |", command.name());
        line += " --- |";
    }
    text += &line;
    // States that users know by one name answer all of these alike.
    let inner = [State::Building, State::Reloading, State::Rebuilding];
    for state in State::ALL.into_iter().filter(|state| !inner.contains(state)) {
        text += &alloc::format!("\n| *{}* |", CellState::from(state));
        for command in COMMANDS {
            let after = state.after(command).map(|after| CellState::from(after).to_string());
            text += &alloc::format!(" {} |", after.as_deref().unwrap_or("–"));
        }
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    /// Each pair of state and step, in the order of their `ALL`: `.` is not allowed, else the
    /// first letters of the state after it.
    #[test]
    fn the_life_cycle_is_this_table() {
        #[rustfmt::skip]
        let table = [
            //               begin  finish start  press  pause  resume stop   reload destroy prep.  built  not b. aband. rest   off    broke  anew
            ("Creating",   [".",   ".",   ".",   ".",   ".",   ".",   ".",   ".",   "Des",  "Loa", ".",   ".",   "Des", ".",   ".",   ".",   "."]),
            ("Loading",    ["Loa", "Bui", ".",   ".",   ".",   ".",   ".",   ".",   "Des",  ".",   ".",   ".",   "Des", ".",   ".",   ".",   "."]),
            ("Building",   [".",   ".",   ".",   ".",   ".",   ".",   ".",   ".",   "Des",  ".",   "Rea", "Loa", "Des", ".",   ".",   ".",   "."]),
            ("Ready",      [".",   ".",   "Run", ".",   ".",   ".",   ".",   ".",   "Des",  ".",   ".",   ".",   ".",   ".",   ".",   ".",   "."]),
            ("Running",    [".",   ".",   ".",   "Run", "Pausi", ".", "Stoppi", ".", "Stoppi", ".", ".",  ".",   ".",   ".",   "Stoppe", "Fai", "Res"]),
            ("Pausing",    [".",   ".",   ".",   ".",   ".",   ".",   "Stoppi", ".", "Stoppi", ".", ".",  ".",   ".",   "Pause", "Stoppe", "Fai", "Res"]),
            ("Paused",     [".",   ".",   ".",   ".",   ".",   "Run", "Stoppi", ".", "Stoppi", ".", ".",  ".",   ".",   ".",   "Stoppe", "Fai", "Res"]),
            ("Stopping",   [".",   ".",   ".",   ".",   ".",   ".",   ".",   ".",   "Stoppi", ".", ".",   ".",   ".",   ".",   "Stoppe", "Fai", "."]),
            ("Stopped",    [".",   ".",   "Res", ".",   ".",   ".",   ".",   "Rel", "Des",  ".",   ".",   ".",   ".",   ".",   ".",   ".",   "."]),
            ("Failed",     [".",   ".",   ".",   ".",   ".",   ".",   ".",   "Rel", "Des",  ".",   ".",   ".",   ".",   ".",   ".",   ".",   "."]),
            ("Reloading",  ["Rel", "Reb", ".",   ".",   ".",   ".",   ".",   ".",   "Des",  ".",   ".",   ".",   "Stoppe", ".", ".",  ".",   "."]),
            ("Rebuilding", [".",   ".",   ".",   ".",   ".",   ".",   ".",   ".",   "Des",  ".",   "Rea", "Rel", "Stoppe", ".", ".",  ".",   "."]),
            ("Restarting", [".",   ".",   ".",   ".",   ".",   ".",   "Stoppe", ".", "Des", ".",   "Run", "Stoppe", ".", ".",  ".",   ".",   "."]),
            ("Destroying", [".",   ".",   ".",   ".",   ".",   ".",   ".",   ".",   ".",    ".",   ".",   ".",   ".",   ".",   ".",   ".",   "."]),
        ];
        assert_eq!(table.len(), State::ALL.len());
        for (state, (name, row)) in State::ALL.into_iter().zip(table) {
            assert_eq!(std::format!("{state:?}"), name);
            for (step, expected) in Step::ALL.into_iter().zip(row) {
                let after = state.after(step).map_or(".".into(), |after| std::format!("{after:?}"));
                assert!(after.starts_with(expected), "{state:?} {step:?}: {after}, not {expected}");
            }
        }
    }

    #[test]
    fn messages_say_what_is_allowed() {
        let allowed: Vec<_> = [Step::Start, Step::Stop, Step::LoadBegin, Step::PressPower]
            .into_iter()
            .map(Step::allowed)
            .collect();
        let want = ["ready, stopped", "running, pausing, paused, restarting", "loading", "running"];
        assert_eq!(allowed, want);
    }

    #[test]
    fn a_cell_that_is_on_can_always_be_turned_off_and_one_on_loan_given_up() {
        for state in State::ALL {
            assert_eq!(state.is_on(), state.after(Step::TurnedOff).is_some(), "{state:?}");
            assert_eq!(state.is_on_loan(), state.after(Step::Abandoned).is_some(), "{state:?}");
            assert_eq!(state != State::Destroying, state.after(Step::Destroy).is_some(), "{state:?}");
        }
    }
}
