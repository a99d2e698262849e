//! `cellctl`: the root cell's management tool.
//!
//! It runs as root in the root cell's Linux and talks to the hypervisor over vsock.
//! `cli` has the command line, `commands` one module per command, `client` the connection,
//! `cpus` the root cell's CPU hotplug, `interrupt` signals, `render` output. What a cell is made of
//! is read by `bulkhead_cell_file`.
#![forbid(unsafe_code)]

mod cli;
mod client;
mod commands;
mod cpus;
mod exit;
#[cfg(test)]
mod fake_node;
mod interrupt;
mod render;

use clap::Parser as _;
use exit::Exit;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Nobody is left to be told if this fails.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(Exit::Usage as u8) } else { ExitCode::SUCCESS };
        }
    };
    match commands::run(cli) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("cellctl: {error}");
            ExitCode::from(error.exit as u8)
        }
    }
}
