//! `bulkhead-mkimage`: makes and checks bundles and boot images.
//!
//! `node_toml` reads what a person wrote, `toml_reader` tells them what is wrong with it and where;
//! `autostart` checks the cells that start with the node, `bundle` collects the files and makes the
//! bundle, `inspect` shows one, `iso` wraps one up with the hypervisor for GRUB, `symbols` gives its
//! backtraces names. The format itself, with its limits and checks, is `bulkhead_abi::bundle`: the
//! hypervisor reads it with the same code. Cell files are read as `cellctl` does it.
#![forbid(unsafe_code)]

mod autostart;
mod bundle;
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
use bulkhead_cell_file::BadFile;
use clap::Parser as _;

use cli::{Cli, Command};
use toml_reader::Problems;

fn main() -> ExitCode {
    match run(Cli::parse().command).and_then(|output| Ok(std::io::stdout().write_all(output.as_bytes())?)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Problems start with file and line already, as editors and CI look for them.
            if error.is::<Problems>() || error.is::<BadFile>() {
                eprintln!("{error}");
            } else {
                eprintln!("bulkhead-mkimage: {error:#}");
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
