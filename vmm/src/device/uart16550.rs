//! The 16550A UART (PC16550D data sheet), with a [`ConsoleRing`] at the other end of its
//! line.
//!
//! The line is infinitely fast: what is written has been sent when the write returns, so
//! that the transmitter is always empty. Received bytes wait in the console and move up as
//! the FIFO has room; a FIFO below its trigger level times out at once. Divisor and
//! character format are kept and have no effect. Modem inputs say that a peer is there.

use super::bus::{BusDevice, Instant, Width, read_bytes, write_bytes};
use super::console::ConsoleRing;
use alloc::collections::VecDeque;

const FIFO_SIZE: usize = 16;

const IER_RDI: u8 = 1;
const IER_THRI: u8 = 1 << 1;
const IER_RLSI: u8 = 1 << 2;
const IER_MSI: u8 = 1 << 3;

const IIR_NONE: u8 = 1;
const IIR_MODEM_STATUS: u8 = 0;
const IIR_THR_EMPTY: u8 = 2;
const IIR_RECEIVED: u8 = 4;
const IIR_LINE_STATUS: u8 = 6;
const IIR_TIMEOUT: u8 = 0xc;
const IIR_FIFOS: u8 = 0xc0;

const FCR_ENABLE: u8 = 1;
const FCR_CLEAR_RECEIVER: u8 = 1 << 1;

const LCR_DLAB: u8 = 1 << 7;

const MCR_OUT2: u8 = 1 << 3;
const MCR_LOOP: u8 = 1 << 4;

const LSR_DR: u8 = 1;
const LSR_OE: u8 = 1 << 1;
/// THRE and TEMT.
const LSR_SENT: u8 = 0x60;

/// CTS, DSR and DCD.
const MSR_PEER: u8 = 0xb0;
const MSR_RI: u8 = 1 << 6;
const MSR_TERI: u8 = 1 << 2;

/// A 16550A and its console; 8 byte registers from the base port.
#[derive(Debug, Default)]
pub struct Uart16550 {
    console: ConsoleRing,
    received: VecDeque<u8>,
    divisor: [u8; 2],
    ier: u8,
    fcr: u8,
    lcr: u8,
    mcr: u8,
    scr: u8,
    /// LSR.OE.
    overrun: bool,
    /// The low half of MSR: which inputs have changed since it was read.
    changes: u8,
    /// The transmitter-empty interrupt waits: raised by an empty transmitter, cleared by its
    /// being read in IIR.
    sent: bool,
}

impl Uart16550 {
    /// A UART after reset, with an empty console.
    pub fn new() -> Self {
        Self { received: VecDeque::with_capacity(FIFO_SIZE), ..Self::default() }
    }

    /// Puts all registers into their state after a reset. The console keeps its bytes.
    pub fn reset(&mut self) {
        let Self { console: _, received, divisor, ier, fcr, lcr, mcr, scr, overrun, changes, sent } = self;
        received.clear();
        *divisor = [0; 2];
        for register in [ier, fcr, lcr, mcr, scr, changes] {
            *register = 0;
        }
        (*overrun, *sent) = (false, false);
        self.receive();
    }

    /// What was printed, for readers.
    pub fn console(&self) -> &ConsoleRing {
        &self.console
    }

    /// Queues input for the cell. The result is how many of `bytes`, from the first on, were
    /// accepted. The interrupt line may have changed.
    pub fn push_input(&mut self, bytes: &[u8]) -> usize {
        let accepted = self.console.push_input(bytes);
        self.receive();
        accepted
    }

    /// The level of the interrupt line. To be looked at after every access and every input.
    /// OUT2 gates it, as on a PC; loopback turns OUT2 off.
    pub fn irq_level(&self) -> bool {
        self.mcr & (MCR_OUT2 | MCR_LOOP) == MCR_OUT2 && self.interrupt() != IIR_NONE
    }

    /// The waiting interrupt of the highest priority, as IIR names it.
    fn interrupt(&self) -> u8 {
        let trigger = match self.fcr >> 6 {
            0 => 1,
            1 => 4,
            2 => 8,
            _ => 14,
        };
        if self.ier & IER_RLSI != 0 && self.overrun {
            IIR_LINE_STATUS
        } else if self.ier & IER_RDI != 0 && !self.received.is_empty() {
            if self.fcr & FCR_ENABLE == 0 || self.received.len() >= trigger {
                IIR_RECEIVED
            } else {
                IIR_TIMEOUT
            }
        } else if self.ier & IER_THRI != 0 && self.sent {
            IIR_THR_EMPTY
        } else if self.ier & IER_MSI != 0 && self.changes != 0 {
            IIR_MODEM_STATUS
        } else {
            IIR_NONE
        }
    }

    /// How many received bytes the UART holds.
    fn capacity(&self) -> usize {
        if self.fcr & FCR_ENABLE != 0 { FIFO_SIZE } else { 1 }
    }

    /// Moves up what waits in the console. The receiver is off the line in loopback.
    fn receive(&mut self) {
        while self.mcr & MCR_LOOP == 0 && self.received.len() < self.capacity() {
            let Some(byte) = self.console.pop_input() else { break };
            self.received.push_back(byte);
        }
    }

    fn transmit(&mut self, byte: u8) {
        if self.mcr & MCR_LOOP == 0 {
            self.console.push(&[byte]);
        } else if self.received.len() < self.capacity() {
            self.received.push_back(byte);
        } else {
            self.overrun = true;
            // A full FIFO keeps what it has; the single register is overwritten.
            if self.fcr & FCR_ENABLE == 0 {
                self.received.clear();
                self.received.push_back(byte);
            }
        }
        self.sent = true;
    }

    /// The modem inputs, MSR 7:4. In loopback they are MCR's outputs.
    fn modem_inputs(&self) -> u8 {
        if self.mcr & MCR_LOOP == 0 {
            return MSR_PEER;
        }
        // RTS → CTS, DTR → DSR, OUT1 → RI, OUT2 → DCD.
        (self.mcr & 2) << 3 | (self.mcr & 1) << 5 | (self.mcr & 0xc) << 4
    }

    fn set_mcr(&mut self, value: u8) {
        let before = self.modem_inputs();
        self.mcr = value & 0x1f;
        let after = self.modem_inputs();
        let mut changes = (before ^ after) >> 4;
        if after & MSR_RI != 0 {
            // Only the ring's end counts.
            changes &= !MSR_TERI;
        }
        self.changes |= changes;
        self.receive();
    }

    fn set_fcr(&mut self, value: u8) {
        // Turning the FIFOs on or off empties them too.
        if (value ^ self.fcr) & FCR_ENABLE != 0 || value & FCR_CLEAR_RECEIVER != 0 {
            self.received.clear();
        }
        // Without the enable bit the others are not programmed.
        self.fcr = if value & FCR_ENABLE != 0 { value & 0xc1 } else { 0 };
        self.receive();
    }

    fn read_register(&mut self, register: u64) -> u8 {
        let dlab = self.lcr & LCR_DLAB != 0;
        match register {
            0 | 1 if dlab => self.divisor[usize::from(register == 1)],
            0 => {
                let byte = self.received.pop_front().unwrap_or_default();
                self.receive();
                byte
            }
            1 => self.ier,
            2 => {
                let interrupt = self.interrupt();
                if interrupt == IIR_THR_EMPTY {
                    self.sent = false;
                }
                interrupt | if self.fcr & FCR_ENABLE != 0 { IIR_FIFOS } else { 0 }
            }
            3 => self.lcr,
            4 => self.mcr,
            5 => {
                let mut lsr = LSR_SENT;
                if !self.received.is_empty() {
                    lsr |= LSR_DR;
                }
                if core::mem::take(&mut self.overrun) {
                    lsr |= LSR_OE;
                }
                lsr
            }
            6 => self.modem_inputs() | core::mem::take(&mut self.changes),
            7 => self.scr,
            _ => 0xff,
        }
    }

    fn write_register(&mut self, register: u64, value: u8) {
        let dlab = self.lcr & LCR_DLAB != 0;
        match register {
            0 | 1 if dlab => self.divisor[usize::from(register == 1)] = value,
            0 => self.transmit(value),
            1 => {
                // The transmitter is empty: enabling its interrupt raises it.
                if value & !self.ier & IER_THRI != 0 {
                    self.sent = true;
                }
                self.ier = value & 0xf;
            }
            2 => self.set_fcr(value),
            3 => self.lcr = value,
            4 => self.set_mcr(value),
            7 => self.scr = value,
            // LSR and MSR: "not recommended" to be written; nothing is behind the other
            // offsets.
            _ => {}
        }
    }
}

impl BusDevice for Uart16550 {
    fn read(&mut self, offset: u64, width: Width, _now: Instant) -> u64 {
        read_bytes(offset, width, |register| self.read_register(register))
    }

    fn write(&mut self, offset: u64, width: Width, value: u64, _now: Instant) {
        write_bytes(offset, width, value, |register, byte| self.write_register(register, byte));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    const RBR: u64 = 0;
    const THR: u64 = 0;
    const IER: u64 = 1;
    const IIR: u64 = 2;
    const FCR: u64 = 2;
    const LCR: u64 = 3;
    const MCR: u64 = 4;
    const LSR: u64 = 5;
    const MSR: u64 = 6;
    const SCR: u64 = 7;

    /// A UART seen through its ports.
    struct Port(Uart16550);

    impl Port {
        fn new() -> Self {
            Self(Uart16550::new())
        }
        fn get(&mut self, register: u64) -> u8 {
            u8::try_from(self.0.read(register, Width::Byte, Instant { ns: 0 })).unwrap()
        }
        fn put(&mut self, register: u64, value: u8) {
            self.0.write(register, Width::Byte, value.into(), Instant { ns: 0 });
        }
        fn printed(&self) -> Vec<u8> {
            let mut buf = [0; 256];
            let (_, len) = self.0.console().read_from(0, &mut buf);
            buf[..len].to_vec()
        }
    }

    /// The steps by which Linux' 8250 driver finds out what a UART is.
    #[test]
    fn linux_finds_a_16550a() {
        let mut p = Port::new();
        // Is anything there: IER keeps its low 4 bits and has no others.
        p.put(IER, 0);
        assert_eq!(p.get(IER) & 0xf, 0);
        p.put(IER, 0xf);
        assert_eq!(p.get(IER), 0xf);
        p.put(IER, 0xff);
        assert_eq!(p.get(IER), 0xf, "no UUE bit");
        p.put(IER, 0);
        // Loopback of the modem lines.
        let mcr = p.get(MCR);
        p.put(MCR, MCR_LOOP | 0xa);
        assert_eq!(p.get(MSR) & 0xf0, 0x90);
        p.put(MCR, mcr);
        // No extended registers of a 16650.
        p.put(LCR, 0xbf);
        p.put(FCR, 0);
        p.put(LCR, 0);
        // FIFOs work.
        p.put(FCR, FCR_ENABLE);
        assert_eq!(p.get(IIR) & 0xc0, 0xc0);
        for mode in [0x80, 0xbf] {
            p.put(LCR, mode);
            assert_ne!(p.get(FCR), 0, "EFR would read as 0");
        }
        // No 64-byte FIFO of a 16750.
        p.put(LCR, 0);
        p.put(FCR, FCR_ENABLE | 0x20);
        assert_eq!(p.get(IIR) >> 5, 6);
        // A scratch register, which an 8250 has not.
        for value in [0xa5, 0x5a] {
            p.put(SCR, value);
            assert_eq!(p.get(SCR), value);
        }
    }

    /// The two tests of the transmitter's interrupt at the driver's start.
    #[test]
    fn linux_trusts_the_transmitter_interrupt() {
        let mut p = Port::new();
        p.put(FCR, FCR_ENABLE);
        p.put(IER, IER_THRI);
        assert_eq!(p.get(IIR) & 0xf, IIR_THR_EMPTY);
        p.put(IER, 0);
        p.put(IER, IER_THRI);
        assert_eq!(p.get(IIR) & 0xf, IIR_THR_EMPTY, "is asserted again");
        assert_eq!(p.get(IIR) & 0xf, IIR_NONE, "reading has cleared it");
        p.put(IER, 0);
        assert_eq!(p.get(LSR) & LSR_SENT, LSR_SENT);
    }

    #[test]
    fn the_divisor_hides_data_and_ier() {
        let mut p = Port::new();
        p.put(IER, 5);
        p.put(LCR, 0x83);
        p.put(0, 0x12);
        p.put(1, 0x34);
        assert_eq!((p.get(0), p.get(1)), (0x12, 0x34));
        p.put(LCR, 3);
        assert_eq!((p.get(IER), p.get(LCR)), (5, 3));
        assert!(p.printed().is_empty());
    }

    #[test]
    fn transmission_interrupts_once_per_emptying() {
        let mut p = Port::new();
        p.put(FCR, FCR_ENABLE);
        p.put(IER, IER_THRI);
        assert!(!p.0.irq_level(), "OUT2 gates");
        p.put(MCR, 0xb);
        assert!(p.0.irq_level());
        assert_eq!(p.get(IIR), 0xc2);
        assert!(!p.0.irq_level());
        for byte in *b"hello" {
            p.put(THR, byte);
        }
        assert!(p.0.irq_level());
        assert_eq!(p.get(IIR), 0xc2);
        assert!(!p.0.irq_level());
        p.put(THR, b'!');
        p.put(IER, 0);
        assert!(!p.0.irq_level());
        assert_eq!(p.printed(), b"hello!");
    }

    #[test]
    fn reception() {
        let mut p = Port::new();
        p.put(FCR, FCR_ENABLE | 0x80);
        p.put(MCR, 0xb);
        assert_eq!(p.0.push_input(b"abc"), 3);
        assert!(!p.0.irq_level(), "not enabled");
        p.put(IER, IER_RDI);
        assert!(p.0.irq_level());
        assert_eq!(p.get(IIR), 0xcc, "below the trigger level: timeout");
        p.0.push_input(b"defgh");
        assert_eq!(p.get(IIR), 0xc4, "8 bytes reach the level");
        assert!(p.0.irq_level(), "reading IIR does not clear it");
        for byte in *b"abcdefgh" {
            assert_eq!(p.get(LSR) & LSR_DR, LSR_DR);
            assert_eq!(p.get(RBR), byte);
        }
        assert_eq!(p.get(LSR) & LSR_DR, 0);
        assert_eq!(p.get(IIR), 0xc1);
        assert!(!p.0.irq_level());
    }

    #[test]
    fn without_fifos_bytes_come_one_by_one() {
        let mut p = Port::new();
        p.put(IER, IER_RDI);
        p.0.push_input(b"xy");
        assert_eq!((p.get(IIR), p.get(RBR)), (IIR_RECEIVED, b'x'));
        assert_eq!((p.get(IIR), p.get(RBR)), (IIR_RECEIVED, b'y'));
        assert_eq!(p.get(IIR), IIR_NONE);
    }

    #[test]
    fn clearing_the_fifo_drops_what_is_in_it_alone() {
        let mut p = Port::new();
        p.put(FCR, FCR_ENABLE);
        p.0.push_input(b"0123456789abcdefXY");
        p.put(FCR, FCR_ENABLE);
        assert_eq!(p.get(RBR), b'0', "setting the same again clears nothing");
        p.put(FCR, FCR_ENABLE | FCR_CLEAR_RECEIVER);
        assert_eq!(p.get(RBR), b'Y');
    }

    #[test]
    fn loopback_returns_data_and_modem_lines() {
        let mut p = Port::new();
        p.put(MCR, MCR_LOOP | MCR_OUT2);
        p.put(IER, IER_RDI | IER_RLSI | IER_MSI);
        p.put(THR, 0x55);
        assert!(!p.0.irq_level(), "OUT2 is off the pin in loopback");
        assert_eq!(p.get(IIR), IIR_RECEIVED);
        p.put(THR, 0x66);
        assert_eq!(p.get(IIR), IIR_LINE_STATUS);
        assert_eq!(p.get(LSR), LSR_SENT | LSR_OE | LSR_DR);
        assert_eq!(p.get(LSR), LSR_SENT | LSR_DR, "reading has cleared the overrun");
        assert_eq!(p.get(RBR), 0x66);
        assert!(p.printed().is_empty());
        // CTS and DSR have gone when loopback began; RI comes and goes.
        assert_eq!(p.get(IIR), IIR_MODEM_STATUS);
        assert_eq!(p.get(MSR), 0x83);
        p.put(MCR, MCR_LOOP | MCR_OUT2 | 4);
        assert_eq!(p.get(MSR), 0xc0, "a ring's begin is no change");
        p.put(MCR, MCR_LOOP | MCR_OUT2);
        assert_eq!(p.get(MSR), 0x84);
        assert_eq!(p.get(IIR), IIR_NONE);
    }

    #[test]
    fn reset_keeps_the_console() {
        let mut p = Port::new();
        p.put(FCR, FCR_ENABLE);
        p.put(SCR, 9);
        p.put(THR, b'a');
        p.0.push_input(b"0123456789abcdefQ");
        p.0.reset();
        assert_eq!((p.get(SCR), p.get(IIR), p.get(RBR)), (0, IIR_NONE, b'Q'));
        assert_eq!(p.printed(), b"a");
    }

    proptest! {
        /// Whatever a guest writes: nothing panics, what it prints outside loopback appears,
        /// in order, and the line is up exactly when IIR has something to say.
        #[test]
        fn any_writes(steps in proptest::collection::vec((0u64..10, any::<u8>(), any::<bool>()), 0..200)) {
            let (mut p, mut expected) = (Port::new(), Vec::new());
            for (register, value, write) in steps {
                if write {
                    if register == THR && p.0.lcr & LCR_DLAB == 0 && p.0.mcr & MCR_LOOP == 0 {
                        expected.push(value);
                    }
                    p.put(register, value);
                } else {
                    p.get(register);
                    p.0.push_input(&[value]);
                }
                let level = p.0.irq_level();
                prop_assert_eq!(level, p.0.mcr & 0x18 == 8 && p.get(IIR) & 1 == 0);
                prop_assert!(p.0.received.len() <= FIFO_SIZE);
            }
            prop_assert_eq!(p.printed(), expected);
        }
    }
}
