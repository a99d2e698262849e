//! What policy needs from the hardware, and the identifiers both sides share.

use core::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id!(
    /// A pCPU: its place in the machine's CPU list, from 0 without gaps. The boot CPU is 0.
    CpuId,
    "cpu"
);
id!(
    /// A vCPU of one cell, from 0 without gaps.
    VcpuId,
    "vcpu"
);
id!(
    /// A cell. The root cell is 0; numbers of guest cells are not used again before 2^32
    /// cells have been created.
    CellId,
    "cell"
);

impl CellId {
    /// The root cell.
    pub const ROOT: Self = Self(0);
}

/// What a cell is to the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The root cell: it has the machine.
    Root,
    /// A guest cell.
    Guest,
}
