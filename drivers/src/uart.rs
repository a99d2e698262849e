//! The 16550 UART, as a polled console.
// UNSAFETY: the UART is reached by port I/O.
#![expect(unsafe_code, reason = "port I/O")]

use core::fmt;
use x86_64::instructions::port::Port;

/// Where the first and the second serial port of a PC are.
const COM1: u16 = 0x3f8;
const COM2: u16 = 0x2f8;

const LINE_STATUS_THR_EMPTY: u8 = 1 << 5;
/// Polls before a byte is given up: a UART that isn't there must not stop the machine.
const POLLS_MAX: u32 = 100_000;

/// A 16550 at an I/O port.
#[derive(Debug, Clone, Copy)]
pub struct Uart(u16);

impl Uart {
    /// The first serial port of a PC. Where there is none, what is sent is lost.
    pub const fn com1() -> Self {
        Self(COM1)
    }

    /// The second serial port of a PC, likewise.
    pub const fn com2() -> Self {
        Self(COM2)
    }

    fn write_register(&self, register: u16, value: u8) {
        // SAFETY: a UART's registers, which have no effect on memory.
        unsafe { Port::new(self.0 + register).write(value) }
    }

    /// Sets 115200 baud, 8 data bits, no parity, 1 stop bit, FIFOs on, interrupts off.
    pub fn init(&self) {
        for (register, value) in [(1, 0), (3, 0x80), (0, 1), (1, 0), (3, 3), (2, 7), (4, 3)] {
            self.write_register(register, value);
        }
    }

    /// Sends a byte when the UART is ready for it.
    pub fn send(&self, byte: u8) {
        for _ in 0..POLLS_MAX {
            // SAFETY: reading the line status register has no effect on memory.
            let status = unsafe { Port::<u8>::new(self.0 + 5).read() };
            if status & LINE_STATUS_THR_EMPTY != 0 {
                break;
            }
            core::hint::spin_loop();
        }
        self.write_register(0, byte);
    }

    /// Sends a byte of a text, a line's end as terminals have it.
    pub fn send_text(&self, byte: u8) {
        if byte == b'\n' {
            self.send(b'\r');
        }
        self.send(byte);
    }
}

impl fmt::Write for Uart {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(|byte| self.send_text(byte));
        Ok(())
    }
}
