//! The bus: which device answers an address.
//!
//! A device model sees offsets into its own range and accesses that the bus has already
//! checked: naturally sized, within the range. Addresses that belong to nobody read as
//! all-ones and drop writes, as on a PC.

/// Size of one access, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Width {
    /// 8 bits.
    Byte = 1,
    /// 16 bits.
    Word = 2,
    /// 32 bits.
    Dword = 4,
    /// 64 bits; memory only.
    Qword = 8,
}

impl Width {
    /// The width of `bytes` bytes: 1, 2, 4 or 8.
    pub const fn from_bytes(bytes: u64) -> Option<Self> {
        match bytes {
            1 => Some(Self::Byte),
            2 => Some(Self::Word),
            4 => Some(Self::Dword),
            8 => Some(Self::Qword),
            _ => None,
        }
    }

    /// The number of bytes.
    pub const fn bytes(self) -> u64 {
        self as u64
    }

    /// A value of all-ones of this width: what an address without a device reads as.
    pub const fn all_ones(self) -> u64 {
        match self {
            Self::Byte => 0xff,
            Self::Word => 0xffff,
            Self::Dword => 0xffff_ffff,
            Self::Qword => u64::MAX,
        }
    }
}

/// The time at which an access happens, as the cell's devices see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instant {
    /// Nanoseconds since the cell's clock began (for the root cell: since boot).
    pub ns: u64,
}

/// A device with registers in ports or memory. No lock of the bus is held while it runs,
/// only its own.
pub trait BusDevice {
    /// Reads `width` bytes at `offset` into the device's range; what is not a register
    /// reads as all-ones or as the device's specification says.
    fn read(&mut self, offset: u64, width: Width, now: Instant) -> u64;

    /// Writes the low `width` bytes of `value` at `offset`; what is not a register is
    /// dropped.
    fn write(&mut self, offset: u64, width: Width, value: u64, now: Instant);
}

/// Reads from a device whose registers are bytes: an access of several bytes is one of each.
pub(super) fn read_bytes(offset: u64, width: Width, mut byte: impl FnMut(u64) -> u8) -> u64 {
    (0..width.bytes()).fold(0, |value, n| value | u64::from(byte(offset.wrapping_add(n))) << (8 * n))
}

/// Writes to a device whose registers are bytes: an access of several bytes is one of each,
/// from the lowest offset up.
pub(super) fn write_bytes(offset: u64, width: Width, value: u64, mut byte: impl FnMut(u64, u8)) {
    for (n, b) in (0..width.bytes()).zip(value.to_le_bytes()) {
        byte(offset.wrapping_add(n), b);
    }
}
