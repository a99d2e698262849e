//! `NAME.cell.toml`: what a cell is made of.
//!
//! ```toml
//! name = "web"
//! cpus = 2                  # so many, or their numbers: [2, 3]
//! memory = "256M"
//!
//! [boot]
//! kernel = "vmlinuz"        # paths are relative to this file
//! initrd = "initrd.img"     # may be left out
//! cmdline = "console=ttyS0" # may be left out
//!
//! [console]                 # may be left out
//! serial = true
//!
//! [on]                      # may be left out
//! reboot = "restart"        # or "stop": what happens when its guest asks for a reset
//! crash = "keep"            # or "restart": what happens when it fails
//! ```
//!
//! All mistakes of a file are told at once, each with its line.
//!
//! `reader` says what is wrong and where, `keys` reads each key, `suggestion` guesses what an
//! unknown one was meant to be, `images` checks the files that a cell boots from, `cpus` finds CPUs
//! for a count.
#![forbid(unsafe_code)]

mod cpus;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
mod images;
mod keys;
mod reader;
mod suggestion;

use bulkhead_abi::message::{Action, CellSpec};
pub use cpus::{CpuChoice, TooFew};
use std::fs;
use std::path::{Path, PathBuf};

/// A cell file, or a file that it names, is wrong: all mistakes, a line each, with their places.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadFile(String);

/// A cell file that was read and found right.
#[derive(Debug, PartialEq, Eq)]
pub struct CellFile {
    /// The cell's name.
    pub name: String,
    /// Its CPUs.
    pub cpus: CpuChoice,
    /// Bytes of memory.
    pub memory: u64,
    /// Where its kernel is.
    pub kernel: PathBuf,
    /// Where its initial file system is.
    pub initrd: Option<PathBuf>,
    /// Its kernel's command line.
    pub cmdline: String,
    /// Whether it has a serial console.
    pub console: bool,
    /// What happens when its guest asks for a reset.
    pub on_reboot: Action,
    /// What happens when it fails.
    pub on_crash: Action,
    /// Where it was read from.
    pub path: PathBuf,
}

impl CellFile {
    /// Reads and checks a cell file.
    ///
    /// # Errors
    /// When it cannot be read, or all that is wrong with it.
    pub fn read(path: &Path) -> Result<Self, BadFile> {
        let source = fs::read_to_string(path)
            .map_err(|e| BadFile(format!("{}: cannot be read: {e}", path.display())))?;
        Self::parse(path, &source)
    }

    /// Checks what `source`, read from `path`, says.
    ///
    /// # Errors
    /// All that is wrong with it.
    pub fn parse(path: &Path, source: &str) -> Result<Self, BadFile> {
        reader::read(path, source)
    }

    /// The request for this cell with these CPUs; `files` is what
    /// [`check_images`](Self::check_images) has said.
    pub fn spec(&self, cpus: Vec<u32>, wall_clock_ns: u64, files: Vec<u64>) -> CellSpec {
        CellSpec {
            name: self.name.clone(),
            cpus,
            memory: self.memory,
            cmdline: self.cmdline.clone(),
            console: self.console,
            wall_clock_ns,
            on_reboot: Some(self.on_reboot),
            on_crash: Some(self.on_crash),
            files: Some(files),
            origin: std::path::absolute(&self.path).ok().and_then(|path| path.to_str().map(Into::into)),
        }
    }
}

#[cfg(test)]
mod tests;
