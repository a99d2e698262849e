//! States of a cell and which step leads where.

use bulkhead_abi::message::CellState;

/// The state of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// CPUs and memory are being taken.
    Creating,
    /// Waits for its files.
    Loading,
    /// Can be started.
    Ready,
    /// Runs.
    Running,
    /// Is being turned off.
    Stopping,
    /// Is off; its memory is as it was left.
    Stopped,
    /// Did what cannot be carried on from.
    Failed,
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
    /// Request: turn it off.
    Stop,
    /// Request: give back what it has.
    Destroy,
    /// Its CPUs and memory are there.
    Prepared,
    /// It cannot be created, or its creator went away before it was ready.
    Abandoned,
    /// All its vCPUs are off.
    TurnedOff,
    /// All its vCPUs are parked, for one could not go on.
    Broke,
}

impl Step {
    /// The step as a word of a request, for messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::LoadBegin | Self::LoadFinish => "load",
            Self::Start => "start",
            Self::Stop => "stop",
            Self::Destroy => "destroy",
            Self::Prepared => "prepared",
            Self::Abandoned => "abandoned",
            Self::TurnedOff => "turned off",
            Self::Broke => "failed",
        }
    }

    /// The states in which the step is allowed, for messages.
    pub const fn allowed(self) -> &'static str {
        match self {
            Self::LoadBegin | Self::LoadFinish => "loading",
            Self::Start => "ready",
            Self::Stop => "running",
            Self::Destroy => "loading, ready, stopped, failed",
            Self::Prepared => "creating",
            Self::Abandoned => "creating, loading",
            Self::TurnedOff | Self::Broke => "running, stopping",
        }
    }
}

impl State {
    /// The state after `step`, or `None` where that is not allowed.
    ///
    /// A running cell cannot be destroyed, so that nobody loses one by a slip: stop it
    /// first. A stopped one cannot be started, for its memory is no longer what was loaded.
    pub const fn after(self, step: Step) -> Option<Self> {
        Some(match (self, step) {
            (Self::Creating, Step::Prepared) | (Self::Loading, Step::LoadBegin) => Self::Loading,
            (Self::Loading, Step::LoadFinish) => Self::Ready,
            (Self::Ready, Step::Start) => Self::Running,
            (Self::Running, Step::Stop) => Self::Stopping,
            (Self::Running | Self::Stopping, Step::TurnedOff) => Self::Stopped,
            (Self::Running | Self::Stopping, Step::Broke) => Self::Failed,
            (Self::Loading | Self::Ready | Self::Stopped | Self::Failed, Step::Destroy)
            | (Self::Creating | Self::Loading, Step::Abandoned) => Self::Destroying,
            _ => return None,
        })
    }
}

impl From<State> for CellState {
    fn from(state: State) -> Self {
        match state {
            State::Creating => Self::CREATING,
            State::Loading => Self::LOADING,
            State::Ready => Self::READY,
            State::Running => Self::RUNNING,
            State::Stopping => Self::STOPPING,
            State::Stopped => Self::STOPPED,
            State::Failed => Self::FAILED,
            State::Destroying => Self::DESTROYING,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString as _;
    use std::vec::Vec;

    const STEPS: [Step; 9] = [
        Step::LoadBegin,
        Step::LoadFinish,
        Step::Start,
        Step::Stop,
        Step::Destroy,
        Step::Prepared,
        Step::Abandoned,
        Step::TurnedOff,
        Step::Broke,
    ];

    /// Each pair of state and step, in the order of `STEPS`.
    #[test]
    fn the_life_cycle_is_this_table() {
        use State::{Creating, Destroying, Failed, Loading, Ready, Running, Stopped, Stopping};
        const NO: Option<State> = None;
        let (gone, off, bad) = (Some(Destroying), Some(Stopped), Some(Failed));
        #[rustfmt::skip]
        let table = [
            //           LoadBegin      LoadFinish   Start          Stop            Destroy Prepared       Abandoned Off  Broke
            (Creating,   [NO,            NO,          NO,            NO,             NO,     Some(Loading), gone,     NO,  NO]),
            (Loading,    [Some(Loading), Some(Ready), NO,            NO,             gone,   NO,            gone,     NO,  NO]),
            (Ready,      [NO,            NO,          Some(Running), NO,             gone,   NO,            NO,       NO,  NO]),
            (Running,    [NO,            NO,          NO,            Some(Stopping), NO,     NO,            NO,       off, bad]),
            (Stopping,   [NO,            NO,          NO,            NO,             NO,     NO,            NO,       off, bad]),
            (Stopped,    [NO,            NO,          NO,            NO,             gone,   NO,            NO,       NO,  NO]),
            (Failed,     [NO,            NO,          NO,            NO,             gone,   NO,            NO,       NO,  NO]),
            (Destroying, [NO,            NO,          NO,            NO,             NO,     NO,            NO,       NO,  NO]),
        ];
        for (state, row) in table {
            for (step, expected) in STEPS.into_iter().zip(row) {
                assert_eq!(state.after(step), expected, "{state:?} {step:?}");
            }
        }
        // What messages say is allowed is what is allowed.
        for (column, step) in STEPS.into_iter().enumerate() {
            let states = table.iter().filter(|(_, row)| row[column].is_some());
            let names: Vec<_> = states.map(|(state, _)| CellState::from(*state).to_string()).collect();
            assert_eq!(step.allowed(), names.join(", "), "{step:?}");
        }
    }
}
