//! The command line.

use crate::exit::EXIT_CODES;
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
    /// Runs a cell that is ready.
    Start {
        /// The cell's name.
        cell: String,
    },
    /// Turns a running cell off at once, as if by pulling its plug: its system is not asked
    /// to shut down.
    Stop {
        /// The cell's name.
        cell: String,
    },
    /// Zeroes and frees a cell that does not run, and brings its CPUs online again.
    Destroy {
        /// The cell's name.
        cell: String,
        /// Stops it first if it runs.
        #[arg(long)]
        force: bool,
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
