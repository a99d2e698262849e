//! How cells end: `run`, `stop`, `wait`.

use super::{Terminal, console, create, destroy};
use crate::client::{Client, Connector};
use crate::cpus::Hotplug;
use crate::exit::{Error, Exit};
use crate::interrupt::Interrupt;
use bulkhead_abi::message::{Body, CellDetails, CellState, CellSummary};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// The states in which a cell is off.
const OFF: [CellState; 2] = [CellState::STOPPED, CellState::FAILED];

/// Makes the cell of a file, runs it with its console here, and destroys it in the end, unless it
/// has failed or is to be kept.
pub(super) fn run<C: Connector>(
    path: &Path,
    keep: bool,
    client: &mut Client<C>,
    hotplug: &Hotplug,
    interrupt: &Interrupt,
    out: &mut Terminal<impl Write>,
) -> Result<u8, Error> {
    let cell = create::make(path, client, hotplug, interrupt)?;
    client.order(Body::Start { cell: cell.cell })?;
    interrupt.release();
    if cell.console_port.is_some() && console::follow(&cell, client, out)? == console::End::Left {
        eprintln!("cellctl: cell '{}' goes on without this console", cell.name);
        return Ok(0);
    }
    let code = outcome(&client.wait(cell.cell, OFF.to_vec(), None)?)?;
    if !keep {
        destroy::destroy(&cell, client, hotplug)?;
    }
    Ok(code)
}

/// Presses the power button of a cell, and waits until it is off.
pub(super) fn stop<C: Connector>(
    cell: &CellSummary,
    timeout: Duration,
    client: &mut Client<C>,
) -> Result<(), Error> {
    client.order(Body::PressPower { cell: cell.cell })?;
    match client.wait(cell.cell, OFF.to_vec(), Some(timeout)) {
        Ok(_) => Ok(()),
        Err(error) if error.exit == Exit::Timeout => {
            let why = format!(
                "cell '{}' has not turned itself off within {timeout:?} after its power button was pressed; \
                 stop --force turns it off",
                cell.name
            );
            Err(Error::new(Exit::Timeout, why))
        }
        Err(error) => Err(error),
    }
}

/// Waits until a cell is in a state, or off. Returns the exit code.
pub(super) fn wait<C: Connector>(
    cell: &CellSummary,
    state: Option<CellState>,
    timeout: Option<Duration>,
    client: &mut Client<C>,
) -> Result<u8, Error> {
    let states = state.map_or(OFF.to_vec(), |state| vec![state]);
    let details = client.wait(cell.cell, states, timeout).map_err(|error| {
        if error.exit != Exit::Timeout {
            return error;
        }
        let what = state.map_or("off".into(), |state| state.to_string());
        Error::new(Exit::Timeout, format!("cell '{}' is not {what} in time", cell.name))
    })?;
    if state.is_some() { Ok(0) } else { outcome(&details) }
}

/// The exit code that says how a cell that is off ended.
fn outcome(cell: &CellDetails) -> Result<u8, Error> {
    if let Some(failure) = &cell.failure {
        let why = format!("cell '{}' has failed: {}", cell.summary.name, failure.reason);
        return Err(Error::new(Exit::Failed, why));
    }
    Ok(cell.exit_code.map_or(0, |code| code.to_le_bytes()[0]))
}
