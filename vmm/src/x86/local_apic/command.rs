//! The interrupt command register: what a write to it sends (Intel SDM vol. 3, 11.6.1).

use super::super::interrupt::{DeliveryMode, Destination, InterruptMessage};
use bitfield_struct::bitfield;

/// The low half of ICR.
#[bitfield(u32)]
pub(super) struct Command {
    vector: u8,
    #[bits(3)]
    mode: u8,
    logical: bool,
    delivery_status: bool,
    __: bool,
    assert: bool,
    level: bool,
    #[bits(2)]
    __: u8,
    #[bits(2)]
    shorthand: u8,
    #[bits(12)]
    __: u16,
}

/// What becomes of a command.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It goes out.
    Send(InterruptMessage),
    /// Vector 0..=15, and whether the sender itself would have received it.
    IllegalVector { to_self: bool },
    /// INIT level de-assert: newer processors do nothing.
    Nothing,
    /// A delivery mode that is reserved or not offered (SMI), or that does not go with this
    /// shorthand (table 11-3).
    Refused,
}

impl Command {
    /// Decodes; `destination` is 32 bits wide in x2APIC mode and 8 in xAPIC mode.
    pub(super) fn outcome(self, destination: u32, x2apic: bool) -> Outcome {
        let mode = DeliveryMode(self.mode());
        let destination = match self.shorthand() {
            1 => Destination::Myself,
            2 => Destination::All,
            3 => Destination::Others,
            _ if self.logical() => Destination::Logical(destination),
            _ if !x2apic && destination == 0xff => Destination::Physical(u32::MAX),
            _ => Destination::Physical(destination),
        };
        let includes_sender = matches!(destination, Destination::Myself | Destination::All);
        match mode {
            DeliveryMode::FIXED => {}
            _ if includes_sender => return Outcome::Refused,
            DeliveryMode::INIT if self.level() && !self.assert() => return Outcome::Nothing,
            DeliveryMode::LOWEST_PRIORITY
            | DeliveryMode::NMI
            | DeliveryMode::INIT
            | DeliveryMode::STARTUP => {}
            _ => return Outcome::Refused,
        }
        let has_vector = matches!(mode, DeliveryMode::FIXED | DeliveryMode::LOWEST_PRIORITY);
        if has_vector && self.vector() < 16 {
            return Outcome::IllegalVector { to_self: destination == Destination::Myself };
        }
        // The trigger bit counts for INIT alone: IPIs are edges.
        Outcome::Send(InterruptMessage { destination, mode, vector: self.vector(), level: false })
    }
}
