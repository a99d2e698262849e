//! The machine's ports that the root cell may not use unseen: those that reset it, turn it off
//! or put it to sleep, and its 8259s.
//!
//! Sleep is refused: the machine would come back with the hypervisor's registers lost. A write
//! that would begin it goes on without SLP_EN, and the root cell is shown what it waits for
//! then, that the machine has woken up (WAK_STS), so that it just goes on. A write that ends the
//! machine is held back until guest cells were seen to.

use super::acpi::sleep::PowerOffTypes;
use super::machine::Machine;
use crate::device::bus::{BusDevice, Instant, Width};
use crate::device::silent_pic::{self, SilentPic};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use spin::Mutex;

/// Port of the keyboard controller's commands, by which a PC can be reset.
const KEYBOARD_COMMAND: u16 = 0x64;
/// Port A of the system control: bit 0 resets the machine.
const SYSTEM_CONTROL_A: u16 = 0x92;
/// The chipset's reset control.
const RESET_CONTROL: u16 = 0xcf9;

/// SLP_EN in the upper byte of PM1 control (ACPI 6.5, 4.8.3.2.1).
const SLEEP_ENABLE: u8 = 1 << 5;
/// WAK_STS in the upper byte of PM1 status (4.8.3.1.1).
const WAKE_STATUS: u8 = 1 << 7;

/// Ports of the firmware's power management, from the FADT, and what to write there, from its
/// definition blocks.
#[derive(Debug, Clone, Copy, Default)]
pub struct PowerPorts {
    /// PM1a and PM1b status, 2 bytes each.
    pub pm1_status: [Option<u16>; 2],
    /// PM1a and PM1b control, 2 bytes each.
    pub pm1_control: [Option<u16>; 2],
    /// The sleep types that turn the machine off.
    pub off: PowerOffTypes,
    /// The reset register and its value, if it is a port.
    pub reset: Option<(u16, u8)>,
}

impl PowerPorts {
    /// All ports that the root cell must not use without the hypervisor knowing.
    pub fn trapped(&self) -> impl Iterator<Item = u16> {
        let registers = self.pm1_status.into_iter().chain(self.pm1_control).flatten();
        registers
            .flat_map(|port| [port, port.wrapping_add(1)])
            .chain(self.reset.map(|(port, _)| port))
            .chain([KEYBOARD_COMMAND, SYSTEM_CONTROL_A, RESET_CONTROL])
            .chain(silent_pic::BASES.into_iter().flat_map(|base| base..base + silent_pic::LEN))
    }
}

/// Which byte of an access to `width` bytes at `port` is that of `target`.
fn byte_of(port: u16, width: Width, target: u16) -> Option<u32> {
    let byte = u32::from(target).checked_sub(port.into())?;
    (u64::from(byte) < width.bytes()).then_some(byte)
}

/// The port of the upper byte of a register.
fn upper(register: Option<u16>) -> Option<u16> {
    register?.checked_add(1)
}

/// How the root cell ends the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineEnd {
    /// It is turned off.
    PowerOff,
    /// It is reset.
    Reset,
}

/// A write that was held back.
#[derive(Debug, Clone, Copy)]
struct HeldWrite {
    end: MachineEnd,
    port: u16,
    width: Width,
    value: u64,
}

/// Those ports, before the machine's.
#[derive(Debug)]
pub struct RootPorts {
    power: PowerPorts,
    pics: [Mutex<SilentPic>; 2],
    /// The root cell is shown WAK_STS, for it has been refused a sleep and not cleared it yet.
    woken: AtomicBool,
    refused: AtomicU64,
    held: Mutex<Option<HeldWrite>>,
    /// Whether there is one in `held`.
    ending: AtomicBool,
}

impl RootPorts {
    /// With these ports of power management.
    #[must_use]
    pub fn new(power: PowerPorts) -> Self {
        Self {
            power,
            pics: Default::default(),
            woken: AtomicBool::new(false),
            refused: AtomicU64::new(0),
            held: Mutex::new(None),
            ending: AtomicBool::new(false),
        }
    }

    /// How the root cell wants the machine to end, if it does.
    pub fn wanted_end(&self) -> Option<MachineEnd> {
        if !self.ending.load(Ordering::Acquire) {
            return None;
        }
        (*self.held.lock()).map(|held| held.end)
    }

    /// Carries out the write that was held back.
    pub fn end_machine(&self, machine: &impl Machine) {
        self.ending.store(false, Ordering::Release);
        let held = self.held.lock().take();
        if let Some(HeldWrite { port, width, value, .. }) = held {
            machine.write_port(port, width, value);
        }
    }

    /// The 8259 at `port`, with the port's offset in it.
    fn pic(&self, port: u16) -> Option<(&Mutex<SilentPic>, u64)> {
        silent_pic::BASES.into_iter().zip(&self.pics).find_map(|(base, pic)| {
            let offset = port.checked_sub(base).filter(|offset| *offset < silent_pic::LEN)?;
            Some((pic, offset.into()))
        })
    }

    /// Reads a port.
    pub fn read(&self, machine: &impl Machine, port: u16, width: Width, now: Instant) -> u64 {
        if let Some((pic, offset)) = self.pic(port) {
            return pic.lock().read(offset, width, now);
        }
        let mut value = machine.read_port(port, width);
        if self.woken.load(Ordering::Relaxed) {
            for status in self.power.pm1_status.into_iter().filter_map(upper) {
                if let Some(byte) = byte_of(port, width, status) {
                    value |= u64::from(WAKE_STATUS) << (8 * byte);
                }
            }
        }
        value
    }

    /// Writes a port.
    pub fn write(&self, machine: &impl Machine, port: u16, width: Width, value: u64, now: Instant) {
        if let Some((pic, offset)) = self.pic(port) {
            pic.lock().write(offset, width, value, now);
            return;
        }
        let bytes = value.to_le_bytes();
        let written = |target: u16| bytes.get(usize::try_from(byte_of(port, width, target)?).ok()?).copied();
        let resets = port == RESET_CONTROL && value & 4 != 0
            || port == KEYBOARD_COMMAND && value & 0xff == 0xfe
            || port == SYSTEM_CONTROL_A && value & 1 != 0
            || self.power.reset.is_some_and(|(reset, value)| written(reset) == Some(value));
        let mut end = resets.then_some(MachineEnd::Reset);
        let clears = |status| written(status).is_some_and(|byte| byte & WAKE_STATUS != 0);
        if self.power.pm1_status.into_iter().filter_map(upper).any(clears) {
            self.woken.store(false, Ordering::Relaxed);
        }
        let mut value = value;
        for (control, off) in self.power.pm1_control.into_iter().zip(self.power.off.0) {
            let Some(control) = upper(control) else { continue };
            let Some(byte) = written(control).filter(|byte| byte & SLEEP_ENABLE != 0) else { continue };
            let sleep_type = byte >> 2 & 7;
            if off >> sleep_type & 1 != 0 {
                end = Some(MachineEnd::PowerOff);
            } else if let Some(at) = byte_of(port, width, control) {
                value &= !(u64::from(SLEEP_ENABLE) << (8 * at));
                self.refuse(sleep_type);
            }
        }
        match end {
            Some(end) => {
                *self.held.lock() = Some(HeldWrite { end, port, width, value });
                self.ending.store(true, Ordering::Release);
            }
            None => machine.write_port(port, width, value),
        }
    }

    fn refuse(&self, sleep_type: u8) {
        self.woken.store(true, Ordering::Relaxed);
        let count = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
        // Every power of two: enough to see, too little to flood.
        if count.is_power_of_two() {
            log::warn!("root cell: refused sleep of type {sleep_type}, which is not off ({count} so far)");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hal::CpuId;
    use std::collections::BTreeMap;
    use std::sync::Mutex as StdMutex;

    const NOW: Instant = Instant { ns: 0 };
    /// Status, control, the second status, the second control, reset.
    const POWER: PowerPorts = PowerPorts {
        pm1_status: [Some(0x600), Some(0x700)],
        pm1_control: [Some(0x604), Some(0x704)],
        off: PowerOffTypes([1 << 5, 1 << 6]),
        reset: Some((0xcf9, 6)),
    };

    /// A machine whose ports keep what was written to them.
    #[derive(Default)]
    struct Ports(StdMutex<BTreeMap<u16, u8>>);

    impl Ports {
        fn byte(&self, port: u16) -> Option<u8> {
            self.0.lock().unwrap().get(&port).copied()
        }
    }

    impl Machine for Ports {
        fn counter(&self) -> u64 {
            0
        }
        fn counter_hz(&self) -> u64 {
            1
        }
        fn ns(&self) -> u64 {
            0
        }
        fn wall_clock_base_ns(&self) -> u64 {
            0
        }
        fn cpuid(&self, _: u32, _: u32) -> [u32; 4] {
            [0; 4]
        }
        fn read_msr(&self, _: u32) -> u64 {
            0
        }
        fn read_port(&self, port: u16, width: Width) -> u64 {
            let bytes = (port..).take(usize::try_from(width.bytes()).unwrap());
            bytes
                .zip(0..)
                .fold(0, |value, (port, n)| value | u64::from(self.byte(port).unwrap_or_default()) << (8 * n))
        }
        fn write_port(&self, port: u16, width: Width, value: u64) {
            let bytes = value.to_le_bytes().into_iter().take(usize::try_from(width.bytes()).unwrap());
            self.0.lock().unwrap().extend((port..).zip(bytes));
        }
        fn kick(&self, _: CpuId) {}
    }

    /// Writes, and tells whether SLP_EN of PM1a or PM1b reached the machine.
    fn sleeps(port: u16, width: Width, value: u64) -> (bool, bool) {
        let (machine, ports) = (Ports::default(), RootPorts::new(POWER));
        ports.write(&machine, port, width, value, NOW);
        let enabled = |port| machine.byte(port).is_some_and(|byte| byte & SLEEP_ENABLE != 0);
        assert!(!enabled(0x605) && !enabled(0x705), "not before guests were seen to");
        let off = ports.wanted_end() == Some(MachineEnd::PowerOff);
        ports.end_machine(&machine);
        let slept = enabled(0x605) || enabled(0x705);
        assert_eq!((off, ports.wanted_end()), (slept, None));
        (slept, ports.woken.load(Ordering::Relaxed))
    }

    #[test]
    fn only_off_reaches_the_machine() {
        for sleep_type in 0..8u64 {
            let high = sleep_type << 2 | u64::from(SLEEP_ENABLE);
            // However the byte is written: alone, with the lower one, and in wider accesses.
            for (port, width, shift) in [
                (0x605, Width::Byte, 0),
                (0x604, Width::Word, 8),
                (0x605, Width::Word, 0),
                (0x604, Width::Dword, 8),
                (0x602, Width::Dword, 24),
            ] {
                let off = sleep_type == 5;
                assert_eq!(sleeps(port, width, high << shift), (off, !off), "{sleep_type} at {port:#x}");
                let off = sleep_type == 6;
                assert_eq!(sleeps(port + 0x100, width, high << shift), (off, !off), "{sleep_type}, PM1b");
            }
            // Without SLP_EN nothing is refused.
            assert_eq!(sleeps(0x604, Width::Word, sleep_type << 10 | 1), (false, false));
        }
    }

    #[test]
    fn a_reset_is_held_back_however_it_is_asked_for() {
        for (port, value, resets) in [
            (0xcf9, 6, true),
            (0xcf9, 2, false),
            (0x64, 0xfe, true),
            (0x64, 0xd1, false),
            (0x92, 1, true),
            (0x92, 2, false),
        ] {
            let (machine, ports) = (Ports::default(), RootPorts::new(POWER));
            ports.write(&machine, port, Width::Byte, value, NOW);
            assert_eq!(ports.wanted_end(), resets.then_some(MachineEnd::Reset), "{value:#x} at {port:#x}");
            assert_eq!(machine.byte(port).is_some(), !resets);
            ports.end_machine(&machine);
            assert_eq!(machine.byte(port).map(u64::from), Some(value));
        }
    }

    #[test]
    fn nothing_else_of_the_write_is_lost() {
        let (machine, ports) = (Ports::default(), RootPorts::new(POWER));
        ports.write(&machine, 0x604, Width::Word, 0x2401, NOW);
        assert_eq!((machine.byte(0x604), machine.byte(0x605)), (Some(1), Some(0x04)));
    }

    #[test]
    fn a_refused_sleep_looks_like_one_that_ended_at_once() {
        let (machine, ports) = (Ports::default(), RootPorts::new(POWER));
        let read = |port, width| ports.read(&machine, port, width, NOW);
        assert_eq!(read(0x600, Width::Word), 0);
        ports.write(&machine, 0x604, Width::Word, 0x2401, NOW);
        assert_eq!(read(0x600, Width::Word), 0x8000);
        assert_eq!(read(0x601, Width::Byte), 0x80);
        assert_eq!(read(0x600, Width::Dword), 0x8000);
        assert_eq!(read(0x600, Width::Byte), 0);
        assert_eq!(read(0x602, Width::Word), 0, "PM1 enable");
        assert_eq!(read(0x700, Width::Word), 0x8000);
        ports.write(&machine, 0x600, Width::Word, 0x100, NOW);
        assert_eq!(read(0x601, Width::Byte) & 0x80, 0x80, "writing 0 clears nothing");
        ports.write(&machine, 0x600, Width::Word, 0x8000, NOW);
        assert_eq!(read(0x700, Width::Word), 0);
        // The machine was told, too.
        assert_eq!(machine.byte(0x601), Some(0x80));
    }

    #[test]
    fn without_names_for_off_all_sleep_is_refused() {
        let ports = RootPorts::new(PowerPorts { off: PowerOffTypes::default(), ..POWER });
        let machine = Ports::default();
        for sleep_type in 0..8u64 {
            ports.write(&machine, 0x604, Width::Word, sleep_type << 10 | 0x2000, NOW);
            assert_eq!(machine.byte(0x605).unwrap_or_default() & SLEEP_ENABLE, 0);
        }
        assert_eq!(ports.refused.load(Ordering::Relaxed), 8);
    }

    #[test]
    fn the_machines_8259s_are_out_of_reach() {
        let (machine, ports) = (Ports::default(), RootPorts::new(POWER));
        for (port, value) in [(0x20, 0x11), (0x21, 8), (0x21, 4), (0x21, 1), (0x21, 0xfb), (0xa1, 0xee)] {
            ports.write(&machine, port, Width::Byte, value, NOW);
        }
        assert!(machine.0.lock().unwrap().is_empty());
        let read = |port| ports.read(&machine, port, Width::Byte, NOW);
        assert_eq!([read(0x20), read(0x21), read(0xa0), read(0xa1)], [0, 0xfb, 0, 0xee]);
    }

    #[test]
    fn what_is_looked_at_is_trapped() {
        let trapped: std::vec::Vec<_> = POWER.trapped().collect();
        for port in [0x20, 0x21, 0xa0, 0xa1, 0x600, 0x601, 0x604, 0x605, 0x704, 0x705, 0xcf9, 0x64, 0x92] {
            assert!(trapped.contains(&port), "{port:#x}");
        }
        assert!(!trapped.contains(&0x602) && !trapped.contains(&0x608));
    }
}
