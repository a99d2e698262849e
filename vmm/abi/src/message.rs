//! Management messages between `cellctl` and the hypervisor.
//!
//! A connection goes from a source port below [`PRIVILEGED_PORTS`] of the root cell to a
//! port of context [`HYPERVISOR_CID`]. Its first frame is a [`Request`] with
//! [`Body::Hello`], answered by [`Reply::Welcome`] or a [`Failure`]. Then:
//!
//! | port | what follows |
//! | --- | --- |
//! | [`MANAGEMENT_PORT`] | requests and their responses, one at a time |
//! | [`LOG_PORT`] | the hypervisor's log as text, from the hypervisor only |
//! | [`console_port`] of a cell | the bytes of its console, both ways |
//! | as [`Reply::LoadPort`] said | the bytes of a file; at their end one [`Response`] |
//!
//! Messages are CBOR arrays, fields by index (RFC 8949), framed by [`frame`](crate::frame).
//! Both sides ignore fields that they do not know and know by `None` those that are not
//! there; an unknown request is answered by [`ErrorCode::UNKNOWN_REQUEST`].

mod node;
mod spec;

pub use node::{Action, CellDetails, CellState, CellSummary, CpuInfo, CpuUse, ExitCount, FailureReport};
pub use node::{LastExit, MemoryRange, NodeInfo, Register, VcpuDetails};
pub use spec::{CRASH_WINDOW_NS, CellSpec, MAX_CMDLINE, MAX_CPUS, MAX_CRASHES, MAX_ORIGIN};
pub use spec::{MEMORY_UNIT, ROOT_CELL, ROOT_NAME};
pub use spec::{check_cmdline, check_cpu, check_memory, check_name};

use alloc::string::{String, ToString as _};
use alloc::vec::Vec;
use core::fmt;
use minicbor::{Decode, Encode};

/// Version of these messages. Both sides must have the same: a change that the rules of
/// CBOR by index do not cover raises it.
pub const ABI_VERSION: u32 = 2;

/// The vsock context of the hypervisor, as the root cell sees it (virtio 1.2, 5.10.4).
pub const HYPERVISOR_CID: u32 = 2;
/// Source ports below this one are taken: binding one needs a privilege.
pub const PRIVILEGED_PORTS: u32 = 1024;
/// The port of requests.
pub const MANAGEMENT_PORT: u32 = 1;
/// The port of the hypervisor's log.
pub const LOG_PORT: u32 = 2;
/// The first of the ports of consoles.
pub const CONSOLE_PORTS: u32 = 16;
/// The first of the ports of bulk streams.
pub const BULK_PORTS: u32 = 1024;

/// The port of the console of the cell with this number. Two cells whose numbers differ
/// by 1008 would share one; the hypervisor skips such a number.
pub const fn console_port(cell: u32) -> u32 {
    CONSOLE_PORTS + cell % (BULK_PORTS - CONSOLE_PORTS)
}

/// Signature of the ACPI table with the boot's token.
pub const TOKEN_TABLE: [u8; 4] = *b"BLKH";
/// Where in that table the token begins: after the header (ACPI 6.5, 5.2.6).
pub const TOKEN_OFFSET: usize = 36;
/// Bytes of the token.
pub const TOKEN_SIZE: usize = 32;

/// What proves that the sender is the root user of the root cell: random bytes, new at each
/// boot, in an ACPI table that Linux shows to its root user alone.
#[derive(Clone, Copy, Encode, Decode)]
#[cbor(transparent)]
pub struct Token(#[cbor(n(0), with = "minicbor::bytes")] [u8; TOKEN_SIZE]);

impl Token {
    /// The token of these bytes.
    pub const fn new(bytes: [u8; TOKEN_SIZE]) -> Self {
        Self(bytes)
    }

    /// The token in the ACPI table `table`, or `None` if that is too short or another one.
    pub fn from_table(table: &[u8]) -> Option<Self> {
        let rest = table.strip_prefix(&TOKEN_TABLE)?;
        rest.get(TOKEN_OFFSET - TOKEN_TABLE.len()..)?.first_chunk().copied().map(Self)
    }

    /// The bytes, for the table.
    pub const fn bytes(&self) -> &[u8; TOKEN_SIZE] {
        &self.0
    }

    /// Whether both are the same, in a time that does not depend on where they differ.
    pub fn matches(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }
}

impl fmt::Debug for Token {
    /// Does not show the bytes: what is printed ends up in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// A request. The id comes back in its response.
#[derive(Debug, Clone, Encode, Decode)]
pub struct Request {
    /// Chosen by the sender.
    #[n(0)]
    pub id: u32,
    /// What is wanted; `None` when it is one that the receiver does not know.
    #[n(1)]
    pub body: Option<Body>,
}

/// What a request wants.
#[derive(Debug, Clone, Encode, Decode)]
pub enum Body {
    /// Opens the connection. Answered by [`Reply::Welcome`].
    #[n(0)]
    Hello {
        /// [`ABI_VERSION`] of the sender.
        #[n(0)]
        abi: u32,
        /// The boot's token.
        #[n(1)]
        token: Token,
        /// On the log's port and a console's: whether to go on when all that there is has
        /// been sent (the default), or to close the connection then.
        #[n(2)]
        follow: Option<bool>,
    },
    /// Facts of the node. Answered by [`Reply::Node`].
    #[n(1)]
    NodeInfo,
    /// All guest cells. Answered by [`Reply::Cells`].
    #[n(2)]
    List,
    /// All about one cell, or about the root cell ([`ROOT_CELL`]). Answered by [`Reply::Cell`].
    #[n(3)]
    Show {
        /// Its number.
        #[n(0)]
        cell: u32,
    },
    /// Takes CPUs and memory for a new cell, which is then *loading*. Until it is *ready* it
    /// belongs to this connection, and is destroyed when that ends. Answered by
    /// [`Reply::Created`].
    #[n(4)]
    Create {
        /// What the cell is made of.
        #[n(0)]
        spec: CellSpec,
    },
    /// Announces a file for a cell that is *loading*; a second one of a kind replaces the
    /// first. Answered by [`Reply::LoadPort`].
    #[n(5)]
    LoadBegin {
        /// The cell's number.
        #[n(0)]
        cell: u32,
        /// Which file.
        #[n(1)]
        what: LoadKind,
        /// How many bytes it has, at least 1.
        #[n(2)]
        size: u64,
    },
    /// Checks the files, fills the cell's memory from them and makes it *ready*. Answered by
    /// [`Reply::Done`].
    #[n(6)]
    LoadFinish {
        /// The cell's number.
        #[n(0)]
        cell: u32,
    },
    /// Runs a cell that is *ready*, or fills the memory of one that is *stopped* from its files
    /// again and runs it. Answered by [`Reply::Done`].
    #[n(7)]
    Start {
        /// The cell's number.
        #[n(0)]
        cell: u32,
    },
    /// Turns a cell off at once. Answered by [`Reply::Done`] when it is *stopped*.
    #[n(8)]
    Stop {
        /// The cell's number.
        #[n(0)]
        cell: u32,
    },
    /// Turns a cell off, if it is on, zeroes and frees it. Answered by [`Reply::Done`] when its
    /// CPUs are back.
    #[n(9)]
    Destroy {
        /// The cell's number.
        #[n(0)]
        cell: u32,
    },
    /// Whether a cell could be made of this: what is there is counted, but nothing is taken, so
    /// that the CPUs need not be offline yet. Answered by [`Reply::Done`].
    #[n(10)]
    Check {
        /// What the cell would be made of.
        #[n(0)]
        spec: CellSpec,
    },
    /// Lets the vCPUs of a *running* cell stand still. Answered by [`Reply::Done`] when they do.
    #[n(11)]
    Pause {
        /// The cell's number.
        #[n(0)]
        cell: u32,
    },
    /// Lets a *paused* cell go on. Answered by [`Reply::Done`].
    #[n(12)]
    Resume {
        /// The cell's number.
        #[n(0)]
        cell: u32,
    },
    /// Presses the power button of a *running* cell; what its guest does about it is the guest's.
    /// Answered by [`Reply::Done`] at once.
    #[n(13)]
    PressPower {
        /// The cell's number.
        #[n(0)]
        cell: u32,
    },
    /// Lets a cell that is *stopped* or *failed* take other files: it is then *loading*, as a new
    /// one, and belongs to this connection. When that ends before it is *ready*, it is *stopped*.
    /// Answered by [`Reply::Done`].
    #[n(14)]
    Reload {
        /// The cell's number.
        #[n(0)]
        cell: u32,
        /// Its kernel's new command line.
        #[n(1)]
        cmdline: String,
    },
    /// Waits until a cell is in one of the states. Answered by [`Reply::Cell`] when it is.
    #[n(15)]
    Wait {
        /// The cell's number.
        #[n(0)]
        cell: u32,
        /// The states, 1 to 16.
        #[n(1)]
        states: Vec<CellState>,
    },
}

/// Which file of a cell. An open enum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cbor(transparent)]
pub struct LoadKind(#[n(0)] pub u8);

impl LoadKind {
    /// The kernel.
    pub const KERNEL: Self = Self(0);
    /// The initial file system.
    pub const INITRD: Self = Self(1);
}

impl fmt::Display for LoadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::KERNEL => f.write_str("kernel"),
            Self::INITRD => f.write_str("initrd"),
            Self(other) => write!(f, "file kind {other}"),
        }
    }
}

/// The response to one request.
#[derive(Debug, Clone, Encode, Decode)]
pub struct Response {
    /// The id of the request; 0 where there was none.
    #[n(0)]
    id: u32,
    #[n(1)]
    reply: Option<Reply>,
    #[n(2)]
    failure: Option<Failure>,
}

impl Response {
    /// The response to the request `id`.
    pub fn new(id: u32, result: Result<Reply, Failure>) -> Self {
        match result {
            Ok(reply) => Self { id, reply: Some(reply), failure: None },
            Err(failure) => Self { id, reply: None, failure: Some(failure) },
        }
    }

    /// The id of the request.
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// What came of the request.
    ///
    /// # Errors
    /// The hypervisor's, or [`ErrorCode::UNKNOWN_REPLY`] when it answered what this side
    /// does not know.
    pub fn result(self) -> Result<Reply, Failure> {
        match (self.failure, self.reply) {
            (Some(failure), _) => Err(failure),
            (None, Some(reply)) => Ok(reply),
            (None, None) => {
                Err(Failure::new(ErrorCode::UNKNOWN_REPLY, "the answer is of a kind unknown to this side"))
            }
        }
    }
}

/// What a request brought.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Reply {
    /// The connection is open.
    #[n(0)]
    Welcome {
        /// [`ABI_VERSION`] of the hypervisor.
        #[n(0)]
        abi: u32,
        /// The hypervisor's version.
        #[n(1)]
        version: String,
    },
    /// It is done.
    #[n(1)]
    Done,
    /// Facts of the node.
    #[n(2)]
    Node(#[n(0)] NodeInfo),
    /// All guest cells, in the order of their numbers.
    #[n(3)]
    Cells(#[n(0)] Vec<CellSummary>),
    /// All about one cell.
    #[n(4)]
    Cell(#[n(0)] CellDetails),
    /// The cell is there.
    #[n(5)]
    Created {
        /// Its number, not used again.
        #[n(0)]
        cell: u32,
    },
    /// Where the file is to be sent.
    #[n(6)]
    LoadPort {
        /// The port to connect to.
        #[n(0)]
        port: u32,
    },
    /// The file has arrived, all of it.
    #[n(7)]
    Loaded {
        /// How many bytes.
        #[n(0)]
        bytes: u64,
    },
}

/// Why a request was not carried out. An open enum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Encode, Decode)]
#[cbor(transparent)]
pub struct ErrorCode(#[n(0)] pub u16);

macro_rules! error_codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal $text:literal;)*) => {
        impl ErrorCode {
            $($(#[$doc])* pub const $name: Self = Self($value);)*
        }

        impl fmt::Display for ErrorCode {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match *self {
                    $(Self::$name => f.write_str($text),)*
                    Self(other) => write!(f, "error-{other}"),
                }
            }
        }
    };
}

error_codes! {
    /// The bytes are not a message.
    MALFORMED = 1 "malformed";
    /// The request is one that the hypervisor does not know.
    UNKNOWN_REQUEST = 2 "unknown-request";
    /// The answer is one that the receiver does not know.
    UNKNOWN_REPLY = 3 "unknown-reply";
    /// The two sides speak different versions.
    VERSION = 4 "version";
    /// The sender may not ask for this.
    AUTHORITY = 5 "authority";
    /// A field has a value that is not allowed.
    INVALID = 6 "invalid";
    /// There is no such cell.
    NOT_FOUND = 7 "not-found";
    /// The name, CPU or memory belongs to somebody else.
    CONFLICT = 8 "conflict";
    /// The cell is not in a state for this.
    STATE = 9 "state";
    /// There is not enough memory or room.
    EXHAUSTED = 10 "exhausted";
    /// It took too long; what had been done was put back.
    TIMEOUT = 11 "timeout";
    /// A file of the cell is not what it should be, or not all there.
    BAD_FILE = 12 "bad-file";
    /// The hardware or its driver did not do its part.
    PLATFORM = 13 "platform";
    /// The answer does not fit into a frame.
    TOO_LONG = 14 "too-long";
}

/// Why and about what a request was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Failure {
    /// The kind, for programs.
    #[n(0)]
    pub code: ErrorCode,
    /// The sentence, for people; it stands without the fields below.
    #[n(1)]
    pub message: String,
    /// Which field of the request is to blame.
    #[n(2)]
    pub field: Option<String>,
    /// What it was.
    #[n(3)]
    pub value: Option<String>,
    /// What is allowed.
    #[n(4)]
    pub allowed: Option<String>,
}

impl Failure {
    /// A failure that is no field's fault.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), field: None, value: None, allowed: None }
    }

    /// The field `field` was `value`, and only `allowed` is.
    pub fn field(code: ErrorCode, field: &str, value: impl fmt::Display, allowed: &str) -> Self {
        let value = value.to_string();
        Self {
            code,
            message: alloc::format!("{field} is {value}; allowed: {allowed}"),
            field: Some(field.into()),
            value: Some(value),
            allowed: Some(allowed.into()),
        }
    }

    /// The same with another sentence.
    pub fn saying(self, message: impl Into<String>) -> Self {
        Self { message: message.into(), ..self }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl core::error::Error for Failure {}

#[cfg(test)]
mod tests;
