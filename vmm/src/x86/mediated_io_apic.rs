//! The machine's own I/O APIC, mediated for the root cell.
//!
//! The root cell's accesses to the page are trapped, and its redirection entries are kept
//! here. The hardware's entry is the root's with mask = root's mask or *held* or refused.
//!
//! A level-triggered interrupt is ended at the machine's local APIC as soon as it arrives,
//! because an open one would block the hypervisor's own vectors by priority. Until the root
//! ends the virtual one, its entry is held, that is masked, or the line that is still up
//! would send again at once. Then the entry is rewritten, and the I/O APIC sends again if
//! the line is still up. Order on arrival: [`MediatedIoApic::level_arrived`], then the EOI
//! of the machine's APIC, then the virtual interrupt.
//!
//! Any CPU that runs the root cell may call in; the owner keeps it under one lock. With
//! several I/O APICs in a machine every call but read and write goes to each.

use super::interrupt::{DeliveryMode, Destination};
use super::io_apic::{Entry, Half, ID_BITS, Register, Window, version};
use crate::device::bus::Width;
use alloc::vec::Vec;

/// Access to the registers of an I/O APIC by their index (Intel 82093AA data sheet, 3.2).
pub trait IoApicHardware {
    /// Reads a register.
    fn read(&mut self, register: u8) -> u32;

    /// Writes a register.
    fn write(&mut self, register: u8, value: u32);
}

/// As many entries as the register index can name.
const MAX_PINS: u8 = 120;

/// Vectors below are the hypervisor's own; no operating system gives them to devices.
const FIRST_VECTOR: u8 = 0x20;

#[derive(Debug)]
struct Pin {
    /// What the root cell wrote.
    entry: Entry,
    /// The CPU, by its APIC ID, at which an interrupt of this pin is not yet ended.
    held_for: Option<u32>,
    /// What the hardware was told.
    hardware: Entry,
}

impl Pin {
    /// Whether the root's entry would harm the hypervisor if the hardware followed it.
    fn is_refused(&self) -> bool {
        let ordinary = matches!(self.entry.mode(), DeliveryMode::FIXED | DeliveryMode::LOWEST_PRIORITY);
        !ordinary || self.entry.vector() < FIRST_VECTOR
    }
}

/// The register of half of the entry of `pin`, below [`MAX_PINS`].
fn index(pin: u8, half: Half) -> u8 {
    0x10 + 2 * pin + u8::from(half == Half::High)
}

/// An I/O APIC of the machine, as the root cell sees it: version 0x11, without an EOI
/// register.
#[derive(Debug)]
pub struct MediatedIoApic<H> {
    hardware: H,
    window: Window,
    /// IOAPICID as the root sees it; the hardware's stays as the firmware left it.
    id: u32,
    pins: Vec<Pin>,
    refused: u64,
}

impl<H: IoApicHardware> MediatedIoApic<H> {
    /// Takes over `hardware`: masks all its entries, and shows them so to the root cell.
    pub fn new(mut hardware: H) -> Self {
        let id = hardware.read(0) & ID_BITS;
        let last = hardware.read(1).to_le_bytes()[2];
        let mut pins = Vec::new();
        for pin in 0..=last.min(MAX_PINS - 1) {
            // Edge mode also clears a remote IRR that the firmware left behind.
            hardware.write(index(pin, Half::Low), Entry::RESET.low());
            hardware.write(index(pin, Half::High), Entry::RESET.high());
            pins.push(Pin { entry: Entry::RESET, held_for: None, hardware: Entry::RESET });
        }
        Self { hardware, window: Window::default(), id, pins, refused: 0 }
    }

    /// How often the root cell unmasked an entry that stays masked in hardware: one with
    /// another delivery mode than fixed or lowest priority, or a vector below 0x20.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// Reads `width` bytes at `offset` into the page.
    pub fn read(&mut self, offset: u64, width: Width) -> u64 {
        self.window.read(offset, width, |register| match register {
            Register::Id | Register::Arbitration => self.id,
            Register::Version => version(self.pins.len()),
            Register::Entry(pin, half) => match (self.pins.get(usize::from(pin)), half) {
                (Some(entry), Half::Low) => {
                    // Besides what is held: sent, but not yet arrived at its CPU.
                    let remote_irr = entry.entry.level()
                        && (entry.held_for.is_some() || has_remote_irr(&mut self.hardware, pin));
                    entry.entry.with_remote_irr(remote_irr).low()
                }
                (Some(entry), Half::High) => entry.entry.high(),
                (None, _) => u32::MAX,
            },
            Register::Reserved => u32::MAX,
        })
    }

    /// Writes `width` bytes at `offset` into the page. An entry that is written, masked or
    /// sent elsewhere is no longer held: its EOI may never come, or with another vector.
    pub fn write(&mut self, offset: u64, width: Width, value: u64) {
        match self.window.write(offset, width, value) {
            Some((Register::Id, value)) => self.id = value & ID_BITS,
            Some((Register::Entry(pin, half), value)) => self.write_entry(pin, half, value),
            _ => {}
        }
    }

    fn write_entry(&mut self, number: u8, half: Half, value: u32) {
        let Some(pin) = self.pins.get_mut(usize::from(number)) else { return };
        let old = pin.entry;
        pin.entry = old.written(half, value);
        if half == Half::Low || pin.entry != old {
            pin.held_for = None;
        }
        if half == Half::Low && !pin.entry.masked() && pin.is_refused() {
            self.refused += 1;
        }
        // An interrupt on its way with the old vector will not end the entry with the new
        // one, which then would never send again: edge mode ends it now.
        let moved = pin.hardware.level() && pin.hardware.vector() != pin.entry.vector();
        if moved && has_remote_irr(&mut self.hardware, number) {
            self.hardware.write(index(number, Half::Low), Entry::RESET.low());
        }
        self.sync(number);
    }

    /// A level-triggered interrupt arrived with `vector` at the CPU with `apic_id`, and is
    /// not yet ended there. Holds every unmasked level-triggered entry with this vector whose
    /// destination `includes` that CPU; returns whether there was one.
    pub fn level_arrived(
        &mut self,
        vector: u8,
        apic_id: u32,
        includes: &dyn Fn(Destination) -> bool,
    ) -> bool {
        let mut found = false;
        self.update(|pin| {
            let entry = pin.entry;
            let sends = entry.level() && !entry.masked() && entry.vector() == vector;
            if sends && includes(entry.destination()) {
                found = true;
                // The first of several destinations to get it keeps it.
                pin.held_for.get_or_insert(apic_id);
            }
        });
        found
    }

    /// The root cell's CPU with `apic_id` has ended the level-triggered `vector`.
    pub fn eoi(&mut self, vector: u8, apic_id: u32) {
        self.update(|pin| {
            if pin.entry.vector() == vector {
                pin.held_for.take_if(|cpu| *cpu == apic_id);
            }
        });
    }

    /// The root cell's CPU with `apic_id` forgets what it had in service: on INIT, when its
    /// local APIC is disabled, and when it leaves the cell.
    pub fn release_all_for(&mut self, apic_id: u32) {
        self.update(|pin| {
            pin.held_for.take_if(|cpu| *cpu == apic_id);
        });
    }

    /// Changes what is held, and tells the hardware where it matters.
    fn update(&mut self, mut change: impl FnMut(&mut Pin)) {
        for number in 0..MAX_PINS {
            let Some(pin) = self.pins.get_mut(usize::from(number)) else { break };
            let old = pin.held_for;
            change(pin);
            if pin.held_for != old {
                self.sync(number);
            }
        }
    }

    /// Brings the hardware's entry to what it must be: the mask set before and cleared after
    /// the destination changes, so that no mixture of two entries is ever unmasked.
    fn sync(&mut self, number: u8) {
        let Some(pin) = self.pins.get_mut(usize::from(number)) else { return };
        let masked = pin.entry.masked() || pin.held_for.is_some() || pin.is_refused();
        let entry = pin.entry.with_masked(masked);
        let mut put = |half, old: u32, new: u32| {
            if old != new {
                self.hardware.write(index(number, half), new);
            }
        };
        if masked {
            put(Half::Low, pin.hardware.low(), entry.low());
        }
        put(Half::High, pin.hardware.high(), entry.high());
        if !masked {
            put(Half::Low, pin.hardware.low(), entry.low());
        }
        pin.hardware = entry;
    }
}

/// Whether the hardware has sent a level-triggered interrupt of `pin` that is not yet ended.
fn has_remote_irr(hardware: &mut impl IoApicHardware, pin: u8) -> bool {
    let low = hardware.read(index(pin, Half::Low));
    let entry = Entry::from_bits(u64::from(low));
    entry.level() && entry.remote_irr()
}

#[cfg(test)]
mod tests;
