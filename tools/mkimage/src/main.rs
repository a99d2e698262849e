//! `bulkhead-mkimage`: makes and checks bundles and boot images.
//!
//! `node_toml` and `cell_toml` read what a person wrote, `toml_reader` tells them what is
//! wrong with it and where; `bundle` collects the files and makes the bundle, `inspect` shows
//! one, `iso` wraps one up with the hypervisor for GRUB, `symbols` gives its
//! backtraces names. The format itself, with its limits
//! and checks, is `bulkhead_abi::bundle`: the hypervisor reads it with the same code.
#![forbid(unsafe_code)]

mod bundle;
mod cell_toml;
mod cli;
mod inspect;
mod iso;
mod node_toml;
mod symbols;
mod toml_reader;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser as _;

use cli::{Cli, Command};
use toml_reader::Problems;

fn main() -> ExitCode {
    match run(Cli::parse().command).and_then(|output| Ok(std::io::stdout().write_all(output.as_bytes())?)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Problems start with file and line already, as editors and CI look for them.
            match error.downcast_ref::<Problems>() {
                Some(problems) => eprintln!("{problems}"),
                None => eprintln!("bulkhead-mkimage: {error:#}"),
            }
            ExitCode::FAILURE
        }
    }
}

/// Does the work and returns what is to be printed.
fn run(command: Command) -> Result<String> {
    match command {
        Command::Bundle(arguments) => bundle::make(&arguments),
        Command::Check { file } => bundle::check(&file),
        Command::Inspect { file, json } => inspect::inspect(&file, json),
        Command::Iso(arguments) => iso::make(&arguments),
        Command::Symbols { elf } => {
            let mut bytes = read(&elf)?;
            let functions = symbols::embed(&mut bytes).with_context(|| elf.display().to_string())?;
            std::fs::write(&elf, bytes).with_context(|| elf.display().to_string())?;
            Ok(format!("{}: {functions} functions\n", elf.display()))
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| path.display().to_string())
}

fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_well_formed() {
        super::Cli::command().debug_assert();
    }
}
