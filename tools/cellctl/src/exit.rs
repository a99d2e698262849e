//! Errors and the exit codes that programs know them by.

use bulkhead_abi::message::{ErrorCode, Failure};
use bulkhead_cell_file::BadFile;
use std::fmt;

macro_rules! exits {
    ($($name:ident = $code:literal $text:literal,)*) => {
        /// Why `cellctl` ends without success.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Exit {
            $(#[doc = $text] $name = $code,)*
        }

        /// The table of exit codes, for the help.
        pub(crate) const EXIT_CODES: &str = concat!(
            "Exit codes:\n  0  done\n",
            $("  ", $code, "  ", $text, "\n",)*
        );
    };
}

exits! {
    Other = 1 "something else went wrong: a file cannot be read, a CPU cannot be switched",
    Usage = 2 "the command line is wrong",
    BadFile = 3 "the cell file, or a file that it names, is wrong",
    NoNode = 4 "the hypervisor cannot be reached: this is no root cell, or you are not root",
    NotFound = 5 "there is no such cell",
    Conflict = 6 "the cell is in another state, or what it wants is not free",
    Refused = 7 "the hypervisor could not do it, or does not know how",
    Timeout = 8 "it took too long",
    Failed = 10 "the cell has failed",
    Interrupted = 9 "a signal has interrupted it, and what had been done was put back",
}

/// What went wrong, for people, and its exit code.
#[derive(Debug)]
pub(crate) struct Error {
    pub(crate) exit: Exit,
    message: String,
}

impl Error {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into() }
    }

    /// The same, and something that went wrong while putting things back.
    pub(crate) fn and(self, other: Result<(), Self>) -> Self {
        match other {
            Ok(()) => self,
            Err(other) => Self { message: format!("{self}\nand then: {other}"), ..self },
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let exit = match failure.code {
            ErrorCode::AUTHORITY => Exit::NoNode,
            ErrorCode::NOT_FOUND => Exit::NotFound,
            ErrorCode::CONFLICT | ErrorCode::STATE | ErrorCode::EXHAUSTED | ErrorCode::INVALID => {
                Exit::Conflict
            }
            ErrorCode::BAD_FILE => Exit::BadFile,
            ErrorCode::TIMEOUT => Exit::Timeout,
            _ => Exit::Refused,
        };
        Self::new(exit, failure.message)
    }
}

impl From<BadFile> for Error {
    fn from(error: BadFile) -> Self {
        Self::new(Exit::BadFile, error.to_string())
    }
}
