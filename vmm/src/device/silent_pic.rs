//! The two 8259 interrupt controllers of a PC (Intel 8259A data sheet), with nothing at their
//! lines and nobody at their output.
//!
//! A kernel that looks for them finds them and sets them up, and that is all: interrupts come
//! by APICs. The machine's own stay as the hypervisor has left them, for a forged message can
//! make one give a vector, and what vector is up to whoever sets it up.

use super::bus::{BusDevice, Instant, Width, read_bytes, write_bytes};

/// The command ports of the two; each one's data port comes after it.
pub const BASES: [u16; 2] = [0x20, 0xa0];
/// The number of ports of each.
pub const LEN: u16 = 2;

/// ICW1: a single 8259, so there is no ICW3.
const SINGLE: u8 = 1 << 1;
/// ICW1: there is an ICW4.
const FOURTH: u8 = 1;
/// This command is ICW1.
const INITIALISE: u8 = 1 << 4;

/// One 8259; its command port is at offset 0, its data port at offset 1.
#[derive(Debug, Default)]
pub struct SilentPic {
    mask: u8,
    /// Initialization words still to come at the data port.
    words: u8,
}

impl SilentPic {
    fn write_byte(&mut self, offset: u64, byte: u8) {
        match offset {
            0 if byte & INITIALISE != 0 => {
                self.mask = 0;
                self.words = 1 + u8::from(byte & SINGLE == 0) + u8::from(byte & FOURTH != 0);
            }
            1 if self.words > 0 => self.words -= 1,
            1 => self.mask = byte,
            _ => {}
        }
    }
}

impl BusDevice for SilentPic {
    fn read(&mut self, offset: u64, width: Width, _now: Instant) -> u64 {
        read_bytes(offset, width, |offset| match offset {
            // What is requested or in service: nothing.
            0 => 0,
            1 => self.mask,
            _ => 0xff,
        })
    }

    fn write(&mut self, offset: u64, width: Width, value: u64, _now: Instant) {
        write_bytes(offset, width, value, |offset, byte| self.write_byte(offset, byte));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant { ns: 0 };

    fn write(pic: &mut SilentPic, bytes: &[(u64, u8)]) {
        for (offset, byte) in bytes {
            pic.write(*offset, Width::Byte, u64::from(*byte), NOW);
        }
    }

    #[test]
    fn a_kernel_that_probes_finds_the_mask_it_wrote() {
        let mut pic = SilentPic::default();
        write(&mut pic, &[(1, 0xfb)]);
        assert_eq!(pic.read(1, Width::Byte, NOW), 0xfb);
        assert_eq!(pic.read(0, Width::Word, NOW), 0xfb00);
        assert_eq!(pic.read(0, Width::Dword, NOW), 0xffff_fb00);
    }

    #[test]
    fn initialization_words_are_not_taken_for_the_mask() {
        // (ICW1, how many words follow it)
        for (first, words) in [(0x10, 2), (0x11, 3), (0x12, 1), (0x13, 2)] {
            let mut pic = SilentPic::default();
            write(&mut pic, &[(1, 0xaa), (0, first)]);
            for _ in 0..words {
                assert_eq!(pic.read(1, Width::Byte, NOW), 0, "ICW1 {first:#x} clears the mask");
                write(&mut pic, &[(1, 0x55)]);
            }
            write(&mut pic, &[(1, 0xfe)]);
            assert_eq!(pic.read(1, Width::Byte, NOW), 0xfe, "ICW1 {first:#x}");
        }
    }

    #[test]
    fn other_commands_change_nothing() {
        let mut pic = SilentPic::default();
        // End of interrupt, read ISR, poll.
        write(&mut pic, &[(1, 0xaa), (0, 0x20), (0, 0x0b), (0, 0x0c)]);
        assert_eq!((pic.read(0, Width::Byte, NOW), pic.read(1, Width::Byte, NOW)), (0, 0xaa));
    }
}
