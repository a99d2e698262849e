//! The virtual I/O APIC (Intel 82093AA data sheet).
//!
//! Guest cells have one, and the root cell has one for its virtual devices. Lines are
//! asserted or not: the polarity bit is kept and ignored. What an access or a line sends is
//! given to the caller, who finds the vCPUs. The register format is shared with
//! `mediated_io_apic`.

use super::interrupt::{DeliveryMode, Destination, InterruptMessage, halves};
use crate::device::bus::Width;
use bitfield_struct::bitfield;

/// A redirection entry.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) vector: u8,
    #[bits(3)]
    mode_bits: u8,
    logical: bool,
    delivery_status: bool,
    active_low: bool,
    pub(super) remote_irr: bool,
    pub(super) level: bool,
    pub(super) masked: bool,
    #[bits(39)]
    __: u64,
    destination_bits: u8,
}

impl Entry {
    /// The bits that keep what is written: all but the reserved, delivery status and
    /// remote IRR.
    const WRITABLE: u64 = 0xff00_0000_0001_afff;

    /// As after reset: masked, all else zero.
    pub(super) const RESET: Self = Self::new().with_masked(true);

    pub(super) fn mode(self) -> DeliveryMode {
        DeliveryMode(self.mode_bits())
    }

    /// Physical 0xff is everybody.
    pub(super) fn destination(self) -> Destination {
        match (self.logical(), self.destination_bits()) {
            (true, bits) => Destination::Logical(u32::from(bits)),
            (false, 0xff) => Destination::Physical(u32::MAX),
            (false, bits) => Destination::Physical(u32::from(bits)),
        }
    }

    /// Whether it has the vector and the mode of an ordinary interrupt: the only ones that
    /// are acknowledged by an EOI.
    fn has_vector(self) -> bool {
        matches!(self.mode(), DeliveryMode::FIXED | DeliveryMode::LOWEST_PRIORITY)
    }

    pub(super) fn low(self) -> u32 {
        halves(self.into_bits()).1
    }

    pub(super) fn high(self) -> u32 {
        halves(self.into_bits()).0
    }

    /// The entry after the guest's write of one half. A remote IRR does not outlive level
    /// mode.
    pub(super) fn written(self, half: Half, value: u32) -> Self {
        let (high, low) = match half {
            Half::Low => (self.high(), value),
            Half::High => (value, self.low()),
        };
        let bits = (u64::from(high) << 32 | u64::from(low)) & Self::WRITABLE;
        let entry = Self::from_bits(bits);
        entry.with_remote_irr(self.remote_irr() && entry.level())
    }
}

/// A half of a redirection entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    Low,
    High,
}

/// A register behind the window, by its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Register {
    /// IOAPICID: bits 27:24.
    Id,
    /// IOAPICVER.
    Version,
    /// IOAPICARB.
    Arbitration,
    /// Half of the redirection entry of a pin, which may lie above the last one.
    Entry(u8, Half),
    /// Nothing.
    Reserved,
}

impl Register {
    fn at_index(index: u8) -> Self {
        match (index, index.checked_sub(0x10)) {
            (0, _) => Self::Id,
            (1, _) => Self::Version,
            (2, _) => Self::Arbitration,
            (_, Some(n)) => Self::Entry(n >> 1, if n & 1 == 0 { Half::Low } else { Half::High }),
            _ => Self::Reserved,
        }
    }
}

/// Bits of IOAPICID and IOAPICARB.
pub(super) const ID_BITS: u32 = 0x0f00_0000;

/// IOAPICVER of version 0x11, which has no EOI register, for `pins` pins.
pub(super) fn version(pins: usize) -> u32 {
    let last = u32::try_from(pins).unwrap_or(0).saturating_sub(1);
    0x11 | last << 16
}

/// The two registers of the page: IOREGSEL at 0 and IOWIN at 0x10. What is neither reads as
/// all-ones and drops writes; IOWIN is written by 32 bits or not at all.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Window {
    index: u8,
}

impl Window {
    const SELECT: u64 = 0;
    const WINDOW: u64 = 0x10;

    /// Reads from the page; `register` reads what is selected.
    pub(super) fn read(self, offset: u64, width: Width, register: impl FnOnce(Register) -> u32) -> u64 {
        let value = match offset {
            Self::SELECT => u32::from(self.index),
            Self::WINDOW => register(Register::at_index(self.index)),
            _ => u32::MAX,
        };
        u64::from(value) & width.all_ones()
    }

    /// Writes to the page; returns the selected register and its new value if IOWIN was
    /// written.
    pub(super) fn write(&mut self, offset: u64, width: Width, value: u64) -> Option<(Register, u32)> {
        let (_, value) = halves(value);
        match (offset, width) {
            (Self::SELECT, _) => {
                self.index = value.to_le_bytes()[0];
                None
            }
            (Self::WINDOW, Width::Dword) => Some((Register::at_index(self.index), value)),
            _ => None,
        }
    }
}

/// Number of pins of a virtual I/O APIC.
pub const PINS: usize = 24;

#[derive(Debug, Clone, Copy)]
struct Pin {
    entry: Entry,
    asserted: bool,
}

impl Pin {
    /// What the pin sends now if its line is up and level-triggered and nothing forbids it.
    fn service(&mut self) -> Option<InterruptMessage> {
        (self.asserted && self.entry.level() && !self.entry.remote_irr()).then(|| self.send()).flatten()
    }

    /// SMI and external interrupts have nobody to go to and are dropped, as reserved modes
    /// are.
    fn send(&mut self) -> Option<InterruptMessage> {
        let entry = self.entry;
        let offered = entry.has_vector() || matches!(entry.mode(), DeliveryMode::NMI | DeliveryMode::INIT);
        if entry.masked() || !offered {
            return None;
        }
        let level = entry.level() && entry.has_vector();
        self.entry.set_remote_irr(level);
        Some(InterruptMessage {
            destination: entry.destination(),
            mode: entry.mode(),
            vector: entry.vector(),
            level,
        })
    }
}

/// A virtual I/O APIC.
#[derive(Debug)]
pub struct IoApic {
    window: Window,
    id: u32,
    gsi_base: u32,
    pins: [Pin; PINS],
}

impl IoApic {
    /// The state after reset: all pins masked, all lines down. `id` is 4 bits wide; pin n is
    /// global system interrupt `gsi_base` + n.
    pub fn new(id: u8, gsi_base: u32) -> Self {
        Self {
            window: Window::default(),
            id: u32::from(id) << 24 & ID_BITS,
            gsi_base,
            pins: [Pin { entry: Entry::RESET, asserted: false }; PINS],
        }
    }

    /// The global system interrupt of pin 0.
    pub fn gsi_base(&self) -> u32 {
        self.gsi_base
    }

    /// The line of `pin` goes up or down; a pin that does not exist has no line.
    ///
    /// An edge that comes while the entry is masked is lost, as the data sheet says.
    pub fn set_line(&mut self, pin: usize, asserted: bool) -> Option<InterruptMessage> {
        let pin = self.pins.get_mut(pin)?;
        let rises = asserted && !pin.asserted;
        pin.asserted = asserted;
        if pin.entry.level() {
            pin.service()
        } else if rises {
            pin.send()
        } else {
            None
        }
    }

    /// A local APIC has ended `vector`, which was level-triggered. Lines that are still up
    /// send again, to `sink`.
    pub fn eoi(&mut self, vector: u8, sink: &mut dyn FnMut(InterruptMessage)) {
        for pin in &mut self.pins {
            if pin.entry.remote_irr() && pin.entry.vector() == vector {
                pin.entry.set_remote_irr(false);
                pin.service().into_iter().for_each(&mut *sink);
            }
        }
    }

    /// Reads `width` bytes at `offset` into the page.
    pub fn read(&self, offset: u64, width: Width) -> u64 {
        self.window.read(offset, width, |register| match register {
            Register::Id | Register::Arbitration => self.id,
            Register::Version => version(PINS),
            Register::Entry(pin, half) => match (self.pins.get(usize::from(pin)), half) {
                (Some(pin), Half::Low) => pin.entry.low(),
                (Some(pin), Half::High) => pin.entry.high(),
                (None, _) => u32::MAX,
            },
            Register::Reserved => u32::MAX,
        })
    }

    /// Writes `width` bytes at `offset` into the page. A line that is up and thereby unmasked
    /// sends, to `sink`.
    pub fn write(&mut self, offset: u64, width: Width, value: u64, sink: &mut dyn FnMut(InterruptMessage)) {
        match self.window.write(offset, width, value) {
            Some((Register::Id, value)) => self.id = value & ID_BITS,
            Some((Register::Entry(pin, half), value)) => {
                if let Some(pin) = self.pins.get_mut(usize::from(pin)) {
                    pin.entry = pin.entry.written(half, value);
                    pin.service().into_iter().for_each(sink);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    const MASK: u64 = 1 << 16;
    const LEVEL: u64 = 1 << 15;
    const REMOTE_IRR: u64 = 1 << 14;

    /// Writes a register by its index and returns what was sent.
    fn put(apic: &mut IoApic, index: u64, value: u64) -> Vec<InterruptMessage> {
        let mut sent = Vec::new();
        apic.write(0, Width::Dword, index, &mut |m| sent.push(m));
        apic.write(0x10, Width::Dword, value, &mut |m| sent.push(m));
        sent
    }

    fn get(apic: &mut IoApic, index: u64) -> u64 {
        assert_eq!(put(apic, index, 0xffff_ffff_ffff), [], "only for entries that stay masked");
        apic.read(0x10, Width::Dword)
    }

    fn peek(apic: &mut IoApic, index: u64) -> u64 {
        apic.write(0, Width::Byte, index, &mut |_| panic!("nothing to send"));
        apic.read(0x10, Width::Dword)
    }

    fn eoi(apic: &mut IoApic, vector: u8) -> Vec<InterruptMessage> {
        let mut sent = Vec::new();
        apic.eoi(vector, &mut |m| sent.push(m));
        sent
    }

    fn fixed(vector: u8, level: bool) -> InterruptMessage {
        let destination = Destination::Physical(0);
        InterruptMessage { destination, mode: DeliveryMode::FIXED, vector, level }
    }

    #[test]
    fn registers_and_their_writable_bits() {
        let mut apic = IoApic::new(3, 48);
        assert_eq!(apic.gsi_base(), 48);
        assert_eq!((peek(&mut apic, 0), peek(&mut apic, 2)), (0x0300_0000, 0x0300_0000));
        for pin in 0..24 {
            assert_eq!(peek(&mut apic, 0x10 + 2 * pin), MASK, "masked after reset");
            assert_eq!(peek(&mut apic, 0x11 + 2 * pin), 0);
        }
        let table = [
            (0, 0x0f00_0000),
            (1, 0x0017_0011),
            (2, 0x0f00_0000),
            (3, 0xffff_ffff),
            (0x0f, 0xffff_ffff),
            (0x10, 0x1_afff),
            (0x11, 0xff00_0000),
            (0x3f, 0xff00_0000),
            (0x40, 0xffff_ffff),
            (0xff, 0xffff_ffff),
        ];
        for (index, expected) in table {
            assert_eq!(get(&mut apic, index), expected, "index {index:#x}");
        }
    }

    #[test]
    fn holes_and_widths() {
        let mut apic = IoApic::new(0, 0);
        let mut none = |_: InterruptMessage| panic!("nothing to send");
        apic.write(0, Width::Byte, 0x10, &mut none);
        assert_eq!(apic.read(0, Width::Dword), 0x10);
        apic.write(0x10, Width::Word, 0x30, &mut none);
        apic.write(0x40, Width::Dword, 0x30, &mut none);
        assert_eq!(apic.read(0x10, Width::Dword), MASK);
        assert_eq!(apic.read(0x10, Width::Byte), 0);
        assert_eq!(apic.read(0x40, Width::Dword), 0xffff_ffff);
        assert_eq!(apic.read(0x20, Width::Word), 0xffff);
    }

    #[test]
    fn level_lines_send_until_they_are_down() {
        let mut apic = IoApic::new(0, 0);
        assert_eq!(put(&mut apic, 0x14, LEVEL | 0x41), []);
        assert_eq!(apic.set_line(2, true), Some(fixed(0x41, true)));
        assert_eq!(peek(&mut apic, 0x14), LEVEL | REMOTE_IRR | 0x41);
        assert_eq!((apic.set_line(2, false), apic.set_line(2, true)), (None, None), "remote IRR");
        assert_eq!(eoi(&mut apic, 0x42), []);
        assert_eq!(eoi(&mut apic, 0x41), [fixed(0x41, true)]);
        assert_eq!(apic.set_line(2, false), None);
        assert_eq!(eoi(&mut apic, 0x41), []);
        assert_eq!(peek(&mut apic, 0x14), LEVEL | 0x41);
        assert_eq!(eoi(&mut apic, 0x41), []);
    }

    #[test]
    fn unmasking_serves_levels_and_not_edges() {
        let mut apic = IoApic::new(0, 0);
        assert_eq!(put(&mut apic, 0x10, MASK | LEVEL | 0x41), []);
        assert_eq!((apic.set_line(0, true), apic.set_line(1, true)), (None, None));
        assert_eq!(put(&mut apic, 0x10, LEVEL | 0x41), [fixed(0x41, true)]);
        assert_eq!(put(&mut apic, 0x10, LEVEL | 0x41), []);
        assert_eq!(put(&mut apic, 0x12, 0x42), []);
        assert_eq!(apic.set_line(1, true), None, "no new edge");
        assert_eq!(apic.set_line(1, false), None);
        assert_eq!(apic.set_line(1, true), Some(fixed(0x42, false)));
        assert_eq!(apic.set_line(24, true), None);
    }

    #[test]
    fn edge_mode_clears_remote_irr() {
        let mut apic = IoApic::new(0, 0);
        assert_eq!(put(&mut apic, 0x10, LEVEL | 0x41), []);
        assert_eq!(apic.set_line(0, true), Some(fixed(0x41, true)));
        assert_eq!(put(&mut apic, 0x10, MASK | 0x41), []);
        assert_eq!(put(&mut apic, 0x10, MASK | LEVEL | 0x41), []);
        assert_eq!(put(&mut apic, 0x10, LEVEL | 0x41), [fixed(0x41, true)]);
    }

    #[test]
    fn destinations_and_modes() {
        use DeliveryMode as M;
        use Destination as D;
        let table = [
            (0x0_0031, 0x05, Some((D::Physical(5), M::FIXED))),
            (0x0_0031, 0xff, Some((D::Physical(u32::MAX), M::FIXED))),
            (0x0_0831, 0xff, Some((D::Logical(0xff), M::FIXED))),
            (0x0_0931, 0x03, Some((D::Logical(3), M::LOWEST_PRIORITY))),
            (0x0_0231, 0x05, None),
            (0x0_0331, 0x05, None),
            (0x0_0431, 0x05, Some((D::Physical(5), M::NMI))),
            (0x0_0531, 0x05, Some((D::Physical(5), M::INIT))),
            (0x0_0631, 0x05, None),
            (0x0_0731, 0x05, None),
        ];
        for (low, high, expected) in table {
            let mut apic = IoApic::new(0, 0);
            assert_eq!(put(&mut apic, 0x11, high << 24), []);
            assert_eq!(put(&mut apic, 0x10, low), []);
            let sent = apic.set_line(0, true).map(|m| (m.destination, m.mode));
            assert_eq!(sent, expected, "entry {high:#x} {low:#x}");
        }
        let mut apic = IoApic::new(0, 0);
        assert_eq!(put(&mut apic, 0x10, LEVEL | 0x431), []);
        assert!(apic.set_line(0, true).is_some_and(|m| !m.level), "an NMI has no EOI");
        assert_eq!(peek(&mut apic, 0x10), LEVEL | 0x431);
    }

    #[derive(Debug, Clone)]
    enum Op {
        Line(usize, bool),
        Mask(usize, bool),
        Eoi(usize),
    }

    proptest! {
        /// No level interrupt is lost or repeated: a pin has been sent and not ended exactly
        /// if that is what its line, mask and EOIs so far ask for.
        #[test]
        fn levels_are_neither_lost_nor_repeated(
            ops in prop::collection::vec((0..3usize, 0..3usize, any::<bool>()).prop_map(|(kind, pin, on)| {
                match kind { 0 => Op::Line(pin, on), 1 => Op::Mask(pin, on), _ => Op::Eoi(pin) }
            }), 0..60)
        ) {
            let vector = |pin: usize| 0x40 + u8::try_from(pin).unwrap();
            let mut apic = IoApic::new(0, 0);
            let (mut up, mut masked, mut outstanding) = ([false; 3], [true; 3], [false; 3]);
            for op in ops {
                let sent = match op {
                    Op::Line(pin, on) => {
                        up[pin] = on;
                        apic.set_line(pin, on).into_iter().collect()
                    }
                    Op::Mask(pin, on) => {
                        masked[pin] = on;
                        let low = LEVEL | u64::from(on) << 16 | u64::from(vector(pin));
                        put(&mut apic, 0x10 + 2 * pin as u64, low)
                    }
                    Op::Eoi(pin) => {
                        outstanding[pin] = false;
                        eoi(&mut apic, vector(pin))
                    }
                };
                let mut expected = Vec::new();
                for pin in 0..3 {
                    if up[pin] && !masked[pin] && !outstanding[pin] {
                        outstanding[pin] = true;
                        expected.push(fixed(vector(pin), true));
                    }
                }
                prop_assert_eq!(sent, expected);
            }
        }
    }
}
