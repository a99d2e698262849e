//! The log: a ring of the last 64 KiB of lines, and a serial port until the root cell owns it.
//!
//! The port is COM1 until the bundle is read, for a machine on which that fails has to say so
//! somewhere. Then it is the one that the bundle names, which gets what was logged so far, or
//! none.
//!
//! A line is `[seconds.nanoseconds] cpuN LEVEL text`. One lock guards ring and port; it is
//! held for a line at a time and taken inside all others. A panic does not wait for it.

use crate::memory::word;
use crate::{counter, percpu};
use bulkhead_abi::config::Console;
use bulkhead_drivers::uart::Uart;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use log::{Level, LevelFilter, Log, Metadata, Record};
use spin::mutex::{SpinMutex, SpinMutexGuard};

const RING_SIZE: usize = 64 << 10;

struct Ring {
    bytes: [u8; RING_SIZE],
    /// How many bytes were ever written.
    end: u64,
}

static RING: SpinMutex<Ring> = SpinMutex::new(Ring { bytes: [0; RING_SIZE], end: 0 });
static SERIAL_RELEASED: AtomicBool = AtomicBool::new(false);
/// The serial port of the log, as the code of a [`Console`].
static CONSOLE: AtomicU8 = AtomicU8::new(Console::COM1.0);

impl Ring {
    fn index(position: u64) -> usize {
        word(position % RING_SIZE as u64)
    }
}

impl Write for Ring {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for &byte in text.as_bytes() {
            self.bytes[Self::index(self.end)] = byte;
            self.end += 1;
        }
        Ok(())
    }
}

/// What a line is written to.
struct Sink<'a> {
    ring: Option<SpinMutexGuard<'a, Ring>>,
    serial: Option<Uart>,
}

impl Write for Sink<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if let Some(ring) = &mut self.ring {
            ring.write_str(text)?;
        }
        self.serial.as_mut().map_or(Ok(()), |serial| serial.write_str(text))
    }
}

struct Logger;

impl Log for Logger {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let serial = serial().filter(|_| !SERIAL_RELEASED.load(Ordering::Relaxed));
        let sink = Sink { ring: Some(RING.lock()), serial };
        write_line(sink, record.level(), record.args());
    }

    fn flush(&self) {}
}

fn write_line(mut sink: Sink<'_>, level: Level, text: &fmt::Arguments<'_>) {
    let now = counter::nanoseconds_since_boot();
    let cpu = percpu::try_this().map_or(0, |cpu| cpu.id.0);
    let (seconds, nanoseconds) = (now / 1_000_000_000, now % 1_000_000_000);
    // Neither the ring nor the port fails.
    let _ = writeln!(sink, "[{seconds:5}.{nanoseconds:09}] cpu{cpu} {level:5} {text}");
}

/// Begins to log, at level `info`.
pub(crate) fn init() {
    Uart::com1().init();
    if log::set_logger(&Logger).is_ok() {
        log::set_max_level(LevelFilter::Info);
    }
}

/// Sets the level from the command line's `log=LEVEL`.
pub(crate) fn set_level(level: &str) {
    match level.parse() {
        Ok(level) => log::set_max_level(level),
        Err(_) => log::warn!("log={level}: allowed are off, error, warn, info, debug, trace"),
    }
}

/// The log's serial port, whoever owns it now.
fn serial() -> Option<Uart> {
    match Console(CONSOLE.load(Ordering::Relaxed)) {
        Console::COM1 => Some(Uart::com1()),
        Console::COM2 => Some(Uart::com2()),
        _ => None,
    }
}

/// Moves the log to `console`, another than COM1 from the log's beginning.
pub(crate) fn set_console(console: Console) {
    let ring = RING.lock();
    CONSOLE.store(console.0, Ordering::Relaxed);
    if let Some(serial) = serial().filter(|_| console != Console::COM1) {
        serial.init();
        for position in ring.end.saturating_sub(RING_SIZE as u64)..ring.end {
            serial.send_text(ring.bytes[Ring::index(position)]);
        }
    }
}

/// From now on the serial port is the root cell's; only a panic still uses it.
pub(crate) fn release_serial() {
    let _line_is_out = RING.lock();
    SERIAL_RELEASED.store(true, Ordering::Relaxed);
}

/// Takes the serial port back, from a root cell that has failed.
pub(crate) fn reclaim_serial() {
    SERIAL_RELEASED.store(false, Ordering::Relaxed);
}

/// Copies what the log holds from `position` (0 for all) on. Returns the position of the
/// first byte copied, which is later than asked for when that has been overwritten, and
/// how many were copied.
pub(crate) fn read_from(position: u64, buffer: &mut [u8]) -> (u64, usize) {
    let ring = RING.lock();
    let start = position.clamp(ring.end.saturating_sub(RING_SIZE as u64), ring.end);
    let count = buffer.len().min(word(ring.end - start));
    for (at, byte) in (start..).zip(&mut buffer[..count]) {
        *byte = ring.bytes[Ring::index(at)];
    }
    (start, count)
}

/// The console for a panic: the serial port, whoever owns it, and the ring if its lock comes
/// free.
pub(crate) fn emergency() -> impl Write {
    let ring = (0..1_000_000).find_map(|_| {
        core::hint::spin_loop();
        RING.try_lock()
    });
    Sink { ring, serial: serial() }
}
