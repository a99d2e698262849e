//! The command line.

use crate::exit::EXIT_CODES;
use bulkhead_abi::message::CellState;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use std::time::Duration;

/// Manages the cells of a Bulkhead node, from its root cell, as root.
#[derive(Debug, Parser)]
#[command(version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Prints data as JSON.
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Checks a cell file, and the kernel and initrd that it names, without a node.
    Check {
        /// NAME.cell.toml
        file: PathBuf,
    },
    /// Makes a cell: checks its file, takes its CPUs offline, reserves, loads; it is then ready.
    Create {
        /// NAME.cell.toml
        file: PathBuf,
    },
    /// Runs a cell that is ready, or one that is stopped from its files again.
    Start {
        /// The cell's name.
        cell: String,
    },
    /// Makes a cell, runs it, attaches to its console, and ends as its guest does; then the cell
    /// is destroyed. One that has failed is left to be looked at.
    #[command(after_help = "\
        The exit code is the low 8 bits of what the guest wrote to its exit port; 0 when it turned \
        itself off, 10 when it failed. Ctrl-] leaves it running.")]
    Run {
        /// NAME.cell.toml
        file: PathBuf,
        /// Does not destroy it in the end.
        #[arg(long)]
        keep: bool,
    },
    /// Lets the CPUs of a cell stand still. Its time goes on.
    Pause {
        /// The cell's name.
        cell: String,
    },
    /// Lets a paused cell go on.
    Resume {
        /// The cell's name.
        cell: String,
    },
    /// Presses a cell's power button and waits until it has turned itself off.
    Stop {
        /// The cell's name.
        cell: String,
        /// How long it may take: 500ms, 5s, 2m.
        #[arg(long, value_name = "TIME", value_parser = duration, default_value = "30s")]
        timeout: Duration,
        /// Turns it off at once, as if by pulling its plug.
        #[arg(long, conflicts_with = "timeout")]
        force: bool,
    },
    /// Waits until a cell is in a state; without --for, until it is off.
    #[command(after_help = "\
        Without --for the exit code tells how it ended: the low 8 bits of what the guest wrote to \
        its exit port; 0 when it turned itself off or was stopped, 10 when it failed.")]
    Wait {
        /// The cell's name.
        cell: String,
        /// The state.
        #[arg(long = "for", value_name = "STATE", value_parser = state)]
        state: Option<CellState>,
        /// How long at most: 500ms, 5s, 2m.
        #[arg(long, value_name = "TIME", value_parser = duration)]
        timeout: Option<Duration>,
    },
    /// Gives other files to a cell that is stopped or failed; it is then ready.
    Reload {
        /// The cell's name.
        cell: String,
        /// NAME.cell.toml; the one that it was made of if left out.
        file: Option<PathBuf>,
    },
    /// Turns a cell off if it is on, zeroes and frees it, and brings its CPUs online again.
    Destroy {
        /// The cell's name.
        cell: String,
    },
    /// Lists the guest cells.
    List,
    /// Shows all about a cell: its state, why it failed, exits of its vCPUs.
    Show {
        /// The cell's name; "root" is the root cell.
        cell: String,
    },
    /// Attaches to a cell's console: shows the last 64 KiB, then goes on; Ctrl-] leaves.
    #[command(after_help = "\
        Without --until and --timeout it also ends when the cell does, and when input that is no \
        terminal has ended and the console has been silent for a second.")]
    Console(ConsoleArgs),
    /// Prints the hypervisor's log.
    Log {
        /// Goes on with what comes.
        #[arg(long, short)]
        follow: bool,
    },
    /// Shows the node: version, CPUs, memory.
    Node,
}

/// How a session with a console ends.
#[derive(Debug, Args)]
pub(crate) struct ConsoleArgs {
    /// The cell's name.
    pub(crate) cell: String,
    /// Ends with success when the console shows this text; what it showed before counts.
    /// Without it at the end the exit code is 8.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) until: Option<String>,
    /// Ends after this time: 500ms, 5s, 2m.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) timeout: Option<Duration>,
}

/// Reads the name of a state that one can wait for.
fn state(text: &str) -> Result<CellState, String> {
    let states = [
        CellState::LOADING,
        CellState::READY,
        CellState::RUNNING,
        CellState::PAUSED,
        CellState::STOPPED,
        CellState::FAILED,
    ];
    states.into_iter().find(|state| state.to_string() == text).ok_or_else(|| {
        let names: Vec<_> = states.iter().map(ToString::to_string).collect();
        format!("allowed: {}", names.join(", "))
    })
}

/// Reads a time such as `5s`.
fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit_ms = match text.strip_prefix(digits) {
        Some("ms") => 1,
        Some("s") => 1000,
        Some("m") => 60_000,
        _ => return Err("allowed: a whole number and ms, s or m, such as 5s".into()),
    };
    let ms = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit_ms));
    ms.map(Duration::from_millis).ok_or_else(|| "allowed: a whole number of ms up to 2^64".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent_and_says_the_exit_codes() {
        let mut command = Cli::command();
        command.clone().debug_assert();
        let help = command.render_long_help().to_string();
        assert!(help.contains("  8  it took too long"), "{help}");
    }

    #[test]
    fn times_have_a_unit() {
        assert_eq!(duration("5s"), Ok(Duration::from_secs(5)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        for bad in ["5", "s", "", "1.5s", "-1s", "5 s", "5h", "99999999999999999999s"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
