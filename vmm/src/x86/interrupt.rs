//! Interrupt messages: what travels between APICs (Intel SDM vol. 3, 11.6 and 11.11; AMD
//! APM vol. 2, 16.5).

use core::fmt;

/// Delivery mode of an interrupt message, bits 10:8 of ICR, LVTs and redirection entries.
/// An open enum: reserved encodings are values too.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeliveryMode(pub u8);

impl DeliveryMode {
    /// The vector given, at every CPU of the destination.
    pub const FIXED: Self = Self(0);
    /// The vector given, at one CPU of the destination.
    pub const LOWEST_PRIORITY: Self = Self(1);
    /// System management interrupt.
    pub const SMI: Self = Self(2);
    /// Non-maskable interrupt.
    pub const NMI: Self = Self(4);
    /// INIT.
    pub const INIT: Self = Self(5);
    /// Start-up; reserved in redirection entries.
    pub const STARTUP: Self = Self(6);
    /// As an 8259 would; not in ICR.
    pub const EXT_INT: Self = Self(7);
}

impl fmt::Debug for DeliveryMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::FIXED => f.write_str("Fixed"),
            Self::LOWEST_PRIORITY => f.write_str("LowestPriority"),
            Self::SMI => f.write_str("Smi"),
            Self::NMI => f.write_str("Nmi"),
            Self::INIT => f.write_str("Init"),
            Self::STARTUP => f.write_str("StartUp"),
            Self::EXT_INT => f.write_str("ExtInt"),
            Self(other) => write!(f, "DeliveryMode({other})"),
        }
    }
}

/// To whom a message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Destination {
    /// The CPU with this APIC ID; 0xff (a message of 8-bit form) or 0xffff_ffff is everybody.
    Physical(u32),
    /// The CPUs whose logical destination register matches.
    Logical(u32),
    /// The sender (shorthand).
    Myself,
    /// Everybody (shorthand).
    All,
    /// Everybody but the sender (shorthand).
    Others,
}

/// One interrupt message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct InterruptMessage {
    /// To whom.
    pub destination: Destination,
    /// How.
    pub mode: DeliveryMode,
    /// Which vector, for the modes that have one.
    pub vector: u8,
    /// Level-triggered: the receiver's TMR bit is set, and its EOI is told to the I/O APIC.
    pub level: bool,
}

/// The upper and the lower half of a register that is accessed by halves.
pub(super) fn halves(value: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = value.to_be_bytes();
    (u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([e, f, g, h]))
}
