//! What the hypervisor tells about the node and its cells.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use minicbor::{Decode, Encode};

/// Defines an open enum: a number with names for the known values.
macro_rules! open_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $number:literal $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
        #[cbor(transparent)]
        pub struct $name(#[n(0)] pub u8);

        impl $name {
            $($(#[$value_doc])* pub const $value: Self = Self($number);)*
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match *self {
                    $(Self::$value => f.pad($text),)*
                    Self(other) => write!(f, "state-{other}"),
                }
            }
        }
    };
}

open_enum!(
    /// The state of a cell. An open enum.
    CellState {
        /// CPUs and memory are being taken.
        CREATING = 0 "creating",
        /// Waits for its files.
        LOADING = 1 "loading",
        /// Can be started.
        READY = 2 "ready",
        /// Runs.
        RUNNING = 3 "running",
        /// Is being turned off.
        STOPPING = 4 "stopping",
        /// Is off, by itself or by request.
        STOPPED = 5 "stopped",
        /// Did what cannot be carried on from; holds its CPUs and memory.
        FAILED = 6 "failed",
        /// Memory and CPUs are being given back.
        DESTROYING = 7 "destroying",
        /// Its vCPUs are being held.
        PAUSING = 8 "pausing",
        /// Its vCPUs stand still; they can go on.
        PAUSED = 9 "paused",
        /// Is off for the moment that its memory takes to be filled from its files again.
        RESTARTING = 10 "restarting",
    }
);

open_enum!(
    /// What happens to a cell at an event. An open enum.
    Action {
        /// It stays off: *stopped*, or *failed*.
        STOP = 0 "stop",
        /// It begins anew.
        RESTART = 1 "restart",
    }
);

open_enum!(
    /// To what use a CPU is put. An open enum.
    CpuUse {
        /// It is the root cell's.
        ROOT = 0 "root",
        /// It was kept back at boot, and no cell has it.
        FREE = 1 "free",
        /// It is being taken from the root cell for a guest cell, or given back.
        MOVING = 2 "moving",
        /// A guest cell has it.
        CELL = 3 "cell",
    }
);

/// One CPU of the machine.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct CpuInfo {
    /// Its number.
    #[n(0)]
    pub cpu: u32,
    /// Its use.
    #[n(1)]
    pub state: CpuUse,
    /// The guest cell that owns it.
    #[n(2)]
    pub cell: Option<u32>,
}

/// Facts of the node.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct NodeInfo {
    /// The node's name.
    #[n(0)]
    pub name: String,
    /// The hypervisor's version.
    #[n(1)]
    pub version: String,
    /// The commit it was built from.
    #[n(2)]
    pub commit: String,
    /// How it was booted: `pvh`, `grub-bios`, `grub-uefi`.
    #[n(3)]
    pub boot: String,
    /// The virtualisation it uses: `svm`, `vmx`, `el2`.
    #[n(4)]
    pub backend: String,
    /// Nanoseconds since boot.
    #[n(5)]
    pub uptime_ns: u64,
    /// Frequency of the host's counter in Hz.
    #[n(6)]
    pub counter_hz: u64,
    /// The root cell's counter minus the host's, in counts.
    #[n(7)]
    pub counter_offset: i64,
    /// The CPUs, in the order of their numbers.
    #[n(8)]
    pub cpus: Vec<CpuInfo>,
    /// How many CPUs belong to no cell.
    #[n(9)]
    pub free_cpus: u32,
    /// Bytes of memory of the root cell.
    #[n(10)]
    pub root_memory: u64,
    /// Bytes of memory for guest cells, used or not.
    #[n(11)]
    pub pool_memory: u64,
    /// Bytes of it that no cell has.
    #[n(12)]
    pub free_memory: u64,
    /// Bytes of the hypervisor's heap in use.
    #[n(13)]
    pub heap_used: u64,
    /// Bytes of the hypervisor's heap, used or not.
    #[n(14)]
    pub heap_total: u64,
    /// How many times CPUs and memory have changed their owner for good since boot: a cell
    /// became *ready*, or one that had been ready was destroyed.
    #[n(15)]
    pub generation: u64,
}

/// A guest cell in short.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct CellSummary {
    /// Its number, not used again.
    #[n(0)]
    pub cell: u32,
    /// Its name.
    #[n(1)]
    pub name: String,
    /// Its state.
    #[n(2)]
    pub state: CellState,
    /// Its CPUs, in the order of its vCPUs.
    #[n(3)]
    pub cpus: Vec<u32>,
    /// Bytes of its memory.
    #[n(4)]
    pub memory: u64,
    /// The port of its console, if it has one.
    #[n(5)]
    pub console_port: Option<u32>,
}

/// A range of the machine's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct MemoryRange {
    /// Host physical address of its first byte.
    #[n(0)]
    pub base: u64,
    /// Its bytes.
    #[n(1)]
    pub len: u64,
}

/// All about a guest cell.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct CellDetails {
    /// In short.
    #[n(0)]
    pub summary: CellSummary,
    /// Where its memory is, in the order of guest physical addresses.
    #[n(1)]
    pub memory: Vec<MemoryRange>,
    /// Its kernel's command line.
    #[n(2)]
    pub cmdline: String,
    /// Why it is off, if it is.
    #[n(3)]
    pub stopped: Option<String>,
    /// Why it failed, if it did.
    #[n(4)]
    pub failure: Option<FailureReport>,
    /// Its vCPUs, in the order of their numbers.
    #[n(5)]
    pub vcpus: Vec<VcpuDetails>,
    /// What it wrote to its exit port, if that is how it ended.
    #[n(6)]
    pub exit_code: Option<u32>,
    /// How many times it has begun anew since it was created.
    #[n(7)]
    pub restarts: Option<u32>,
    /// What happens when its guest asks for a reset.
    #[n(8)]
    pub on_reboot: Option<Action>,
    /// What happens when it fails.
    #[n(9)]
    pub on_crash: Option<Action>,
    /// [`CellSpec::origin`](super::CellSpec::origin).
    #[n(10)]
    pub origin: Option<String>,
    /// Bytes of the pool that hold its files.
    #[n(11)]
    pub files_memory: Option<u64>,
}

/// Why a cell failed, and what it was doing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Encode, Decode)]
pub struct FailureReport {
    /// The reason, as a sentence.
    #[n(0)]
    pub reason: String,
    /// The vCPU that failed.
    #[n(1)]
    pub vcpu: u32,
    /// Its registers at that time.
    #[n(2)]
    pub registers: Vec<Register>,
    /// Its last exits, the oldest first.
    #[n(3)]
    pub exits: Vec<LastExit>,
}

/// One register.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Register {
    /// The manual's name for it.
    #[n(0)]
    pub name: String,
    /// Its value.
    #[n(1)]
    pub value: u64,
}

/// One exit that has happened.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct LastExit {
    /// When, in nanoseconds since the node's boot.
    #[n(0)]
    pub time_ns: u64,
    /// The reason's name.
    #[n(1)]
    pub reason: String,
    /// The instruction pointer.
    #[n(2)]
    pub pc: u64,
    /// What the hardware said about it; its meaning depends on the reason.
    #[n(3)]
    pub detail: u64,
}

/// One vCPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Encode, Decode)]
pub struct VcpuDetails {
    /// Its number in the cell.
    #[n(0)]
    pub vcpu: u32,
    /// The CPU it runs on.
    #[n(1)]
    pub cpu: u32,
    /// Its exits since the cell was made, by reason; reasons that did not occur are left out.
    #[n(2)]
    pub exits: Vec<ExitCount>,
}

/// How often and how long a vCPU left the guest for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct ExitCount {
    /// The reason's name.
    #[n(0)]
    pub reason: String,
    /// How often.
    #[n(1)]
    pub count: u64,
    /// How long it was away in all, in nanoseconds.
    #[n(2)]
    pub time_ns: u64,
}
