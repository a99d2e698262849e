//! The ACPI fixed hardware of a guest cell (ACPI 6.5, 4.8.3): power button, sleep control
//! and power-management timer.
//!
//! The machine is always in ACPI mode. The timer's own interrupt (TMR_STS) does not exist:
//! the timer is there for kernels that calibrate by it.

use super::bus::{BusDevice, Instant, Width, read_bytes, write_bytes};

/// The first port.
pub const BASE: u16 = 0x600;
/// The number of ports.
pub const LEN: u16 = 12;
/// The port of the PM1a event registers: status and enable, 2 bytes each.
pub const PM1A_EVENT: u16 = BASE;
/// The port of the PM1a control register, 2 bytes.
pub const PM1A_CONTROL: u16 = BASE + 4;
/// The port of the timer, 4 bytes, all 32 bits valid (TMR_VAL_EXT).
pub const PM_TIMER: u16 = BASE + 8;
/// SLP_TYP of S5, to be named by the object `\_S5`.
pub const SLEEP_TYPE_S5: u8 = 5;

/// The timer's frequency in Hz.
const PM_TIMER_HZ: u128 = 3_579_545;
/// PWRBTN_STS and PWRBTN_EN.
const POWER_BUTTON: u16 = 1 << 8;
/// The enable bits there are: TMR, GBL and PWRBTN.
const ENABLE_MASK: u16 = 1 | 1 << 5 | POWER_BUTTON;
/// SCI_EN in the low byte of PM1 control.
const SCI_EN: u8 = 1;
/// SLP_EN in the high byte of PM1 control.
const SLP_EN: u8 = 1 << 5;

/// The registers from port [`BASE`] on.
#[derive(Debug, Default)]
pub struct AcpiPm {
    status: u16,
    enable: u16,
    sleep_type: u8,
    power_off: bool,
}

impl AcpiPm {
    /// The registers after reset.
    pub fn new() -> Self {
        Self::default()
    }

    /// Presses and releases the power button.
    pub fn press_power_button(&mut self) {
        self.status |= POWER_BUTTON;
    }

    /// The level of the system control interrupt (SCI).
    pub fn sci_level(&self) -> bool {
        self.status & self.enable != 0
    }

    /// Whether the cell has asked to be powered off (S5) since the last call.
    pub fn take_power_off(&mut self) -> bool {
        core::mem::take(&mut self.power_off)
    }

    fn read_byte(&self, offset: u64, now: Instant) -> u8 {
        let [status_low, status_high] = self.status.to_le_bytes();
        let [enable_low, enable_high] = self.enable.to_le_bytes();
        let ticks = u128::from(now.ns) * PM_TIMER_HZ / 1_000_000_000;
        let timer = ticks.to_le_bytes();
        match offset {
            0 => status_low,
            1 => status_high,
            2 => enable_low,
            3 => enable_high,
            4 => SCI_EN,
            // SLP_EN reads as 0.
            5 => self.sleep_type << 2,
            8 => timer[0],
            9 => timer[1],
            10 => timer[2],
            11 => timer[3],
            _ => 0xff,
        }
    }

    fn write_byte(&mut self, offset: u64, value: u8) {
        let low = u16::from(value);
        match offset {
            0 => self.status &= !low,
            1 => self.status &= !(low << 8),
            2 => self.enable = (self.enable & 0xff00 | low) & ENABLE_MASK,
            3 => self.enable = (self.enable & 0x00ff | low << 8) & ENABLE_MASK,
            5 => {
                self.sleep_type = value >> 2 & 7;
                if value & SLP_EN != 0 && self.sleep_type == SLEEP_TYPE_S5 {
                    self.power_off = true;
                }
            }
            _ => {}
        }
    }
}

impl BusDevice for AcpiPm {
    fn read(&mut self, offset: u64, width: Width, now: Instant) -> u64 {
        read_bytes(offset, width, |offset| self.read_byte(offset, now))
    }

    fn write(&mut self, offset: u64, width: Width, value: u64, _now: Instant) {
        write_bytes(offset, width, value, |offset, byte| self.write_byte(offset, byte));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant { ns: 0 };

    #[test]
    fn the_power_button_raises_sci_until_its_status_is_cleared() {
        let mut pm = AcpiPm::new();
        pm.press_power_button();
        assert!(!pm.sci_level());
        assert_eq!(pm.read(0, Width::Word, NOW), 0x100);
        pm.write(2, Width::Word, 0xffff, NOW);
        assert_eq!(pm.read(2, Width::Word, NOW), 0x121);
        assert!(pm.sci_level());
        pm.write(0, Width::Word, 0xfeff, NOW);
        assert!(pm.sci_level(), "writing 0 clears nothing");
        pm.write(0, Width::Word, 0x100, NOW);
        assert!(!pm.sci_level());
        assert_eq!(pm.read(0, Width::Dword, NOW), 0x121_0000);
    }

    #[test]
    fn only_s5_powers_off() {
        let mut pm = AcpiPm::new();
        assert_eq!(pm.read(4, Width::Word, NOW), 1, "ACPI mode");
        for sleep_type in 0..8u64 {
            // ACPICA writes the type first, then the type with the enable bit.
            pm.write(4, Width::Word, sleep_type << 10 | 1, NOW);
            assert!(!pm.take_power_off());
            pm.write(4, Width::Word, sleep_type << 10 | 1 << 13 | 1, NOW);
            assert_eq!(pm.read(4, Width::Word, NOW), sleep_type << 10 | 1);
            assert_eq!(pm.take_power_off(), sleep_type == 5);
            assert!(!pm.take_power_off());
        }
    }

    #[test]
    fn the_timer_counts_at_its_frequency_and_wraps_at_32_bits() {
        let mut pm = AcpiPm::new();
        let mut at = |s: u64| pm.read(8, Width::Dword, Instant { ns: s * 1_000_000_000 });
        assert_eq!(at(0), 0);
        assert_eq!(at(1), 3_579_545);
        assert_eq!(at(1200), 1200 * 3_579_545 % (1 << 32));
        assert_eq!(at(18_000_000_000), (18_000_000_000u128 * 3_579_545 % (1 << 32)) as u64);
        assert_eq!(pm.read(6, Width::Word, NOW), 0xffff);
    }
}
