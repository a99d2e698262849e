//! Node configuration as the bundle carries it, and its limits.
//!
//! `bulkhead-mkimage` fills a [`NodeConfig`] from `node.toml`; the hypervisor reads it from
//! the bundle and calls [`NodeConfig::validate`] again, since the bundle is a file that
//! anything may have written. Whether the machine *has* the CPUs and the memory named here
//! is for the hypervisor to find out.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use minicbor::{Decode, Encode};

use crate::message::CellSpec;

/// A code that a file or a peer supplies: a number with names for the known values. Unknown
/// ones stay values and print as numbers.
macro_rules! open_enum {
    ($(#[$doc:meta])* $name:ident, $unknown:literal, { $($(#[$value_doc:meta])* $value:ident = $code:literal, $text:literal;)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ::minicbor::Encode, ::minicbor::Decode)]
        #[cbor(transparent)]
        pub struct $name(#[n(0)] pub u8);

        impl $name {
            $($(#[$value_doc])* pub const $value: Self = Self($code);)+

            /// The values this version knows, in the order of their codes.
            pub const KNOWN: &'static [Self] = &[$(Self::$value),+];

            /// The value's name, `None` for a code this version doesn't know.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $(Self::$value => Some($text),)+
                    _ => None,
                }
            }

            /// The value of that name.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                Self::KNOWN.iter().copied().find(|value| value.name() == Some(name))
            }
        }

        impl ::core::fmt::Display for $name {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                match self.name() {
                    Some(name) => f.pad(name),
                    None => write!(f, concat!($unknown, " {}"), self.0),
                }
            }
        }
    };
}
pub(crate) use open_enum;

/// Longest name of a node or a cell, in bytes.
pub const NAME_MAX: usize = 32;
/// What a node or a cell can be called, for error messages.
pub const NAME_ALLOWED: &str = "1 to 32 of a-z, 0-9, - and _, the first a letter or digit";
/// Longest kernel command line in bytes: x86 Linux's `COMMAND_LINE_SIZE` less its final NUL.
pub const CMDLINE_MAX: usize = 2047;
/// What the cell pool and the root cell's memory are counted in, in bytes.
pub const MEMORY_UNIT: u64 = 2 << 20;
/// Least memory of the root cell, in bytes.
pub const ROOT_MEMORY_MIN: u64 = 64 << 20;
/// No amount of memory is larger, in bytes: what 52 bits of physical address reach.
pub const MEMORY_MAX: u64 = 1 << 52;
/// Size of the cell pool unless it is given, in bytes.
pub const POOL_DEFAULT: u64 = 512 << 20;
/// Highest CPU number that can be kept back.
pub const CPU_MAX: u32 = 4095;

open_enum! {
    /// The serial port the hypervisor logs to.
    Console, "console", {
        /// The first serial port of the machine.
        COM1 = 0, "com1";
        /// The second serial port of the machine.
        COM2 = 1, "com2";
        /// No serial port: the log is read over the management channel alone.
        NONE = 2, "none";
    }
}

open_enum! {
    /// The least important kind of message that is still logged.
    LogLevel, "log level", {
        /// Something failed.
        ERROR = 1, "error";
        /// Something is not as it should be, and the node goes on.
        WARN = 2, "warn";
        /// What a person who runs the node wants to know.
        INFO = 3, "info";
        /// What a developer wants to know.
        DEBUG = 4, "debug";
        /// Every step.
        TRACE = 5, "trace";
    }
}

/// Configuration of a node.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct NodeConfig {
    /// The node's name, as [`check_name`] has it.
    #[n(0)]
    pub name: String,
    /// The root cell.
    #[n(1)]
    pub root: RootConfig,
    /// CPUs that the root cell doesn't get at boot, each once, 1 to [`CPU_MAX`]. CPU 0 boots
    /// the root cell.
    #[n(2)]
    pub reserved_cpus: Vec<u32>,
    /// Memory kept back for guest cells, in bytes: a multiple of [`MEMORY_UNIT`]; 0 for none.
    #[n(3)]
    pub pool_bytes: u64,
    /// Where the hypervisor logs to.
    #[n(4)]
    pub console: Console,
    /// What the hypervisor logs.
    #[n(5)]
    pub log_level: LogLevel,
    /// The guest cells that the hypervisor starts before the root cell, in this order: their
    /// kernels and initial file systems are entries of the bundle. Their CPUs are among
    /// `reserved_cpus`. What is not known before the node boots is not said here: time of day and
    /// sizes of files.
    #[cbor(n(6), default)]
    pub autostart: Vec<CellSpec>,
}

/// Configuration of the root cell.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct RootConfig {
    /// Memory in bytes: a multiple of [`MEMORY_UNIT`], [`ROOT_MEMORY_MIN`] at least. `None`
    /// is all that the hypervisor and the cell pool leave.
    #[n(0)]
    pub memory: Option<u64>,
    /// Kernel command line: [`CMDLINE_MAX`] bytes at most, no control characters.
    #[n(1)]
    pub cmdline: String,
}

impl Default for NodeConfig {
    fn default() -> Self {
        Self {
            name: String::from("bulkhead"),
            root: RootConfig::default(),
            reserved_cpus: Vec::new(),
            pool_bytes: POOL_DEFAULT,
            console: Console::COM1,
            log_level: LogLevel::INFO,
            autostart: Vec::new(),
        }
    }
}

/// A field of a [`NodeConfig`] that is out of its limits. Prints as field, what it was, what
/// is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {found}, must be {allowed}")]
pub struct ConfigError {
    /// Path of the field, as in `root.memory`.
    pub field: &'static str,
    /// What was found there.
    pub found: Found,
    /// What is allowed there.
    pub allowed: &'static str,
}

/// What a [`ConfigError`] found, as much of it as can be shown in a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// An amount of memory in bytes.
    Bytes(u64),
    /// A text of so many bytes.
    Text(usize),
    /// A text with this character.
    Character(char),
    /// A text that starts with this character.
    Start(char),
    /// A number, or the code of an open enum.
    Number(u32),
    /// A number for the second time.
    Again(u32),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "{bytes} bytes"),
            Self::Text(length) => write!(f, "a text of {length} bytes"),
            Self::Character(character) => write!(f, "a text with {character:?}"),
            Self::Start(character) => write!(f, "a text that starts with {character:?}"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Again(number) => write!(f, "{number} for the second time"),
        }
    }
}

impl NodeConfig {
    /// Checks every field against its limits.
    ///
    /// # Errors
    /// The first field that is out of them.
    pub fn validate(&self) -> Result<(), ConfigError> {
        // Every field is named here, so that a new one doesn't compile until someone has
        // decided on its limits. Cells are checked when they are made, each for itself.
        let Self { name, root, reserved_cpus, pool_bytes, console, log_level, autostart: _ } = self;
        let RootConfig { memory, cmdline } = root;
        check_name("name", name)?;
        if let Some(bytes) = *memory
            && !(bytes.is_multiple_of(MEMORY_UNIT) && (ROOT_MEMORY_MIN..=MEMORY_MAX).contains(&bytes))
        {
            let allowed = "a multiple of 2M from 64M to 4096T, or all";
            return Err(ConfigError { field: "root.memory", found: Found::Bytes(bytes), allowed });
        }
        check_cmdline("root.cmdline", cmdline)?;
        check_reserved_cpus(reserved_cpus)?;
        if !(pool_bytes.is_multiple_of(MEMORY_UNIT) && *pool_bytes <= MEMORY_MAX) {
            let allowed = "a multiple of 2M up to 4096T";
            return Err(ConfigError { field: "pool", found: Found::Bytes(*pool_bytes), allowed });
        }
        if console.name().is_none() {
            let allowed = "com1 (0), com2 (1) or none (2)";
            return Err(ConfigError { field: "console", found: Found::Number(console.0.into()), allowed });
        }
        if log_level.name().is_none() {
            let allowed = "error (1), warn (2), info (3), debug (4) or trace (5)";
            return Err(ConfigError {
                field: "log_level",
                found: Found::Number(log_level.0.into()),
                allowed,
            });
        }
        Ok(())
    }
}

/// Checks the name of a node or a cell.
///
/// # Errors
/// `field` with what is wrong about it: 1 to [`NAME_MAX`] of `a-z`, `0-9`, `-` and `_`, the
/// first a letter or digit.
pub fn check_name(field: &'static str, name: &str) -> Result<(), ConfigError> {
    let wrong = name.chars().find(|c| !matches!(c, 'a'..='z' | '0'..='9' | '-' | '_'));
    let found = match (wrong, name.chars().next()) {
        (Some(character), _) => Found::Character(character),
        (None, Some(first @ ('-' | '_'))) => Found::Start(first),
        (None, _) if name.is_empty() || name.len() > NAME_MAX => Found::Text(name.len()),
        (None, _) => return Ok(()),
    };
    Err(ConfigError { field, found, allowed: NAME_ALLOWED })
}

/// Checks a kernel's command line.
///
/// # Errors
/// `field` with what is wrong about it: [`CMDLINE_MAX`] bytes at most, no control characters.
pub fn check_cmdline(field: &'static str, cmdline: &str) -> Result<(), ConfigError> {
    let allowed = "at most 2047 bytes without control characters";
    let found = match cmdline.chars().find(|c| c.is_control()) {
        Some(character) => Found::Character(character),
        None if cmdline.len() > CMDLINE_MAX => Found::Text(cmdline.len()),
        None => return Ok(()),
    };
    Err(ConfigError { field, found, allowed })
}

fn check_reserved_cpus(cpus: &[u32]) -> Result<(), ConfigError> {
    let allowed = "numbers from 1 to 4095, each once (CPU 0 boots the root cell)";
    let mut sorted = cpus.to_vec();
    sorted.sort_unstable();
    let twice = sorted.windows(2).find_map(|pair| match *pair {
        [a, b] if a == b => Some(a),
        _ => None,
    });
    let found = match cpus.iter().find(|cpu| !(1..=CPU_MAX).contains(*cpu)) {
        Some(&cpu) => Found::Number(cpu),
        None => match twice {
            Some(cpu) => Found::Again(cpu),
            None => return Ok(()),
        },
    };
    Err(ConfigError { field: "reserved_cpus", found, allowed })
}

/// What [`parse_size`] takes, for error messages.
pub const SIZE_ALLOWED: &str = "a number of bytes or a size such as 64K, 512M or 1G";

/// Bytes that a size names: a decimal number, with `K`, `M`, `G` or `T` behind it for
/// powers of 1024. `None` if it is not of this form or doesn't fit.
#[must_use]
pub fn parse_size(text: &str) -> Option<u64> {
    let (digits, unit) = match text.as_bytes().last()? {
        b'K' => (text.strip_suffix('K')?, 1 << 10),
        b'M' => (text.strip_suffix('M')?, 1 << 20),
        b'G' => (text.strip_suffix('G')?, 1 << 30),
        b'T' => (text.strip_suffix('T')?, 1 << 40),
        _ => (text, 1),
    };
    // `u64::from_str` would take a sign too.
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;
    use alloc::vec;

    use super::*;

    fn error(change: impl FnOnce(&mut NodeConfig)) -> String {
        let mut config = NodeConfig::default();
        change(&mut config);
        config.validate().expect_err("a limit is broken").to_string()
    }

    #[test]
    fn the_default_is_valid() {
        assert_eq!(NodeConfig::default().validate(), Ok(()));
    }

    #[test]
    fn values_at_the_limits_are_valid() {
        let config = NodeConfig {
            name: "a-9_".repeat(8),
            root: RootConfig { memory: Some(ROOT_MEMORY_MIN), cmdline: "x".repeat(CMDLINE_MAX) },
            reserved_cpus: vec![CPU_MAX, 1],
            pool_bytes: 0,
            console: Console::NONE,
            log_level: LogLevel::TRACE,
            autostart: Vec::new(),
        };
        assert_eq!(config.validate(), Ok(()));
    }

    #[test]
    fn each_error_says_field_value_and_what_is_allowed() {
        let cpus = "must be numbers from 1 to 4095, each once (CPU 0 boots the root cell)";
        let name = "must be 1 to 32 of a-z, 0-9, - and _, the first a letter or digit";
        let memory = "must be a multiple of 2M from 64M to 4096T, or all";
        let cmdline = "must be at most 2047 bytes without control characters";
        let pool = "must be a multiple of 2M up to 4096T";
        for (got, want) in [
            (error(|c| c.name.clear()), alloc::format!("name is a text of 0 bytes, {name}")),
            (error(|c| c.name = "a".repeat(33)), alloc::format!("name is a text of 33 bytes, {name}")),
            (error(|c| c.name = "aB".into()), alloc::format!("name is a text with 'B', {name}")),
            (error(|c| c.name = "-a".into()), alloc::format!("name is a text that starts with '-', {name}")),
            (error(|c| c.name = "_".into()), alloc::format!("name is a text that starts with '_', {name}")),
            (
                error(|c| c.root.memory = Some(ROOT_MEMORY_MIN - MEMORY_UNIT)),
                alloc::format!("root.memory is 65011712 bytes, {memory}"),
            ),
            (
                error(|c| c.root.memory = Some(ROOT_MEMORY_MIN + 1)),
                alloc::format!("root.memory is 67108865 bytes, {memory}"),
            ),
            (
                error(|c| c.root.memory = Some(MEMORY_MAX + MEMORY_UNIT)),
                alloc::format!("root.memory is 4503599629467648 bytes, {memory}"),
            ),
            (
                error(|c| c.root.cmdline = "x".repeat(2048)),
                alloc::format!("root.cmdline is a text of 2048 bytes, {cmdline}"),
            ),
            (
                error(|c| c.root.cmdline = "a\0b".into()),
                alloc::format!("root.cmdline is a text with '\\0', {cmdline}"),
            ),
            (error(|c| c.reserved_cpus = vec![1, 0]), alloc::format!("reserved_cpus is 0, {cpus}")),
            (error(|c| c.reserved_cpus = vec![4096]), alloc::format!("reserved_cpus is 4096, {cpus}")),
            (
                error(|c| c.reserved_cpus = vec![3, 1, 3]),
                alloc::format!("reserved_cpus is 3 for the second time, {cpus}"),
            ),
            (error(|c| c.pool_bytes = 4096), alloc::format!("pool is 4096 bytes, {pool}")),
            (
                error(|c| c.pool_bytes = MEMORY_MAX + MEMORY_UNIT),
                alloc::format!("pool is 4503599629467648 bytes, {pool}"),
            ),
            (
                error(|c| c.console = Console(3)),
                "console is 3, must be com1 (0), com2 (1) or none (2)".into(),
            ),
            (
                error(|c| c.log_level = LogLevel(0)),
                "log_level is 0, must be error (1), warn (2), info (3), debug (4) or trace (5)".into(),
            ),
        ] {
            assert_eq!(got, want);
        }
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", Some(0)),
            ("4096", Some(4096)),
            ("64K", Some(64 << 10)),
            ("512M", Some(512 << 20)),
            ("1G", Some(1 << 30)),
            ("2T", Some(2 << 40)),
            ("18446744073709551615", Some(u64::MAX)),
            ("18446744073709551616", None),
            ("16777216T", None),
            ("", None),
            ("M", None),
            ("+1M", None),
            ("-1", None),
            ("1.5G", None),
            ("1 G", None),
            ("1g", None),
            ("1MB", None),
            ("1Ü", None),
        ] {
            assert_eq!(parse_size(text), bytes, "{text:?}");
        }
    }

    #[test]
    fn open_enums_name_what_they_know() {
        assert_eq!(Console::from_name("com2"), Some(Console::COM2));
        assert_eq!(Console::from_name("com3"), None);
        assert_eq!(LogLevel(9).to_string(), "log level 9");
        assert_eq!(LogLevel::WARN.to_string(), "warn");
    }
}
