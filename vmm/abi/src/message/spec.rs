//! What a cell is to be made of, and the limits of it.

use super::{Action, ErrorCode, Failure};
use crate::config;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use minicbor::{Decode, Encode};

/// The most CPUs of a cell.
pub const MAX_CPUS: usize = 64;
/// The most bytes of a kernel's command line: what Linux takes on x86 without its final
/// zero (`COMMAND_LINE_SIZE`).
pub const MAX_CMDLINE: usize = 2047;
/// A cell's memory is a multiple of this: 2 MiB, the size of a large page.
pub const MEMORY_UNIT: u64 = 2 << 20;

/// The most bytes of a specification's origin: the longest path in Linux.
pub const MAX_ORIGIN: usize = 4096;
/// The most failures within [`CRASH_WINDOW_NS`] after which a cell begins anew.
pub const MAX_CRASHES: usize = 5;
/// See [`MAX_CRASHES`]: a minute.
pub const CRASH_WINDOW_NS: u64 = 60_000_000_000;

/// What a cell is to be made of.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct CellSpec {
    /// Its name, as [`check_name`] has it. No two cells have the same.
    #[n(0)]
    pub name: String,
    /// Numbers of its CPUs, in the order of its vCPUs: 1 to [`MAX_CPUS`], no two the same,
    /// offline in the root cell, not 0.
    #[n(1)]
    pub cpus: Vec<u32>,
    /// Bytes of memory, a multiple of [`MEMORY_UNIT`].
    #[n(2)]
    pub memory: u64,
    /// The kernel's command line, up to [`MAX_CMDLINE`] bytes without a zero among them.
    #[n(3)]
    pub cmdline: String,
    /// Whether it has a serial console.
    #[n(4)]
    pub console: bool,
    /// The time of day when the request was sent, in nanoseconds since 1970-01-01T00:00Z.
    #[n(5)]
    pub wall_clock_ns: u64,
    /// What happens when its guest asks for a reset; it begins anew if this is not said.
    #[n(6)]
    pub on_reboot: Option<Action>,
    /// What happens when it fails; it stays *failed* if this is not said. A cell that fails more
    /// than [`MAX_CRASHES`] times a minute stays *failed* in any case.
    #[n(7)]
    pub on_crash: Option<Action>,
    /// Where its specification comes from, up to [`MAX_ORIGIN`] bytes: not looked at, only told.
    #[n(8)]
    pub origin: Option<String>,
    /// Bytes of each of its files, which are kept in the pool beside its memory: that there is
    /// room for them is looked at, but nothing is taken before they come.
    #[n(9)]
    pub files: Option<Vec<u64>>,
}

impl CellSpec {
    /// Bytes of the pool that its files take: whole units of [`MEMORY_UNIT`] each.
    pub fn files_memory(&self) -> u64 {
        let sizes = self.files.iter().flatten();
        let units = sizes.map(|size| size.checked_next_multiple_of(MEMORY_UNIT).unwrap_or(u64::MAX));
        units.fold(0, u64::saturating_add)
    }

    /// Checks all that can be checked without knowing the node.
    ///
    /// # Errors
    /// The first field that is not as said at it.
    pub fn validate(&self) -> Result<(), Failure> {
        check_name(&self.name)?;
        if self.cpus.is_empty() || self.cpus.len() > MAX_CPUS {
            return Err(invalid("cpus", format!("{} CPUs", self.cpus.len()), "1 to 64 CPUs"));
        }
        for (i, cpu) in self.cpus.iter().enumerate() {
            check_cpu(*cpu)?;
            if self.cpus.iter().take(i).any(|other| other == cpu) {
                return Err(invalid("cpus", format!("a list with {cpu} twice"), "each CPU once"));
            }
        }
        check_memory(self.memory)?;
        check_cmdline(&self.cmdline)?;
        for (field, action) in [("on_reboot", self.on_reboot), ("on_crash", self.on_crash)] {
            if let Some(action) = action.filter(|action| ![Action::STOP, Action::RESTART].contains(action)) {
                return Err(invalid(field, action, "stop, restart"));
            }
        }
        match self.origin.as_ref().map(String::len) {
            Some(len) if len > MAX_ORIGIN => {
                Err(invalid("origin", format!("{len} bytes long"), "up to 4096 bytes"))
            }
            _ => Ok(()),
        }
    }
}

/// The number of the root cell.
pub const ROOT_CELL: u32 = 0;
/// The root cell's name, which no guest cell can have.
pub const ROOT_NAME: &str = "root";

/// Checks a cell's name.
///
/// # Errors
/// When it is not what [`config::check_name`] allows, or [`ROOT_NAME`].
pub fn check_name(name: &str) -> Result<(), Failure> {
    if config::check_name("name", name).is_ok() && name != ROOT_NAME {
        return Ok(());
    }
    let allowed = format!("{}, not {ROOT_NAME:?}", config::NAME_ALLOWED);
    Err(invalid("name", format!("{name:?}"), &allowed))
}

/// Checks the number of a CPU for a guest cell.
///
/// # Errors
/// When it is 0.
pub fn check_cpu(cpu: u32) -> Result<(), Failure> {
    if cpu == 0 {
        let allowed = "CPUs other than 0";
        let why = "cpus has CPU 0, which the root cell's Linux cannot give away: it booted on it; \
                   allowed: CPUs other than 0";
        return Err(invalid("cpus", 0, allowed).saying(why));
    }
    Ok(())
}

/// Checks a size of memory in bytes.
///
/// # Errors
/// When it is 0 or not a multiple of [`MEMORY_UNIT`].
pub fn check_memory(bytes: u64) -> Result<(), Failure> {
    if bytes == 0 || !bytes.is_multiple_of(MEMORY_UNIT) {
        return Err(invalid("memory", format!("{bytes} bytes"), "a multiple of 2 MiB, not 0"));
    }
    Ok(())
}

/// Checks a kernel's command line.
///
/// # Errors
/// When it is too long or has a zero byte.
pub fn check_cmdline(cmdline: &str) -> Result<(), Failure> {
    let value = if cmdline.len() > MAX_CMDLINE {
        format!("{} bytes long", cmdline.len())
    } else if let Some(at) = cmdline.bytes().position(|b| b == 0) {
        format!("a text with a zero byte at offset {at}")
    } else {
        return Ok(());
    };
    Err(invalid("cmdline", value, "up to 2047 bytes, none of them zero"))
}

fn invalid(field: &str, value: impl core::fmt::Display, allowed: &str) -> Failure {
    Failure::field(ErrorCode::INVALID, field, value, allowed)
}
