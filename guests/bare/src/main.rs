//! A guest without an operating system: says on COM1 by which protocol it was booted and what it
//! was handed, and ends with the number N of `exit=N` on its command line.

#![no_std]
#![no_main]
// UNSAFETY: a boot loader hands over addresses, and ports have no owner here.
#![expect(unsafe_code, reason = "memory and ports of a bare machine")]

use core::fmt::{self, Write as _};
use x86_64::instructions::port::Port;

core::arch::global_asm!(include_str!("start.s"), main = sym main);

/// The serial port, its line status register, and the port that ends the guest.
const COM1: u16 = 0x3f8;
const LINE_STATUS: u16 = COM1 + 5;
const EXIT: u16 = 0xf4;
/// What EAX has when a multiboot loader was here.
const MULTIBOOT: u32 = 0x2bad_b002;

/// COM1.
struct Serial;

impl fmt::Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // SAFETY: reading the line status of a serial port changes no memory.
            while unsafe { Port::<u8>::new(LINE_STATUS).read() } & 0x20 == 0 {}
            // SAFETY: nor does sending a byte.
            unsafe { Port::new(COM1).write(byte) };
        }
        Ok(())
    }
}

/// What was handed over.
struct Handover {
    protocol: &'static str,
    cmdline: u64,
    map_entries: u64,
    /// Address and size.
    module: Option<(u64, u64)>,
}

/// The little-endian number of `N` bytes at `address`.
fn number<const N: usize>(address: u64) -> u64 {
    (0..N as u64).rev().fold(0, |value, at| value << 8 | u64::from(byte(address + at)))
}

/// The byte at `address`, which is below 4 GiB.
fn byte(address: u64) -> u8 {
    // SAFETY: the first 4 GiB are mapped, and reading RAM that the loader has named harms nobody.
    unsafe { core::ptr::with_exposed_provenance::<u8>(usize::try_from(address).unwrap_or(0)).read_volatile() }
}

/// `hvm_start_info` (xen/include/public/arch-x86/hvm/start_info.h).
fn pvh(info: u64) -> Handover {
    assert_eq!(number::<4>(info), 0x336e_c578, "the start info's magic number");
    let modules = number::<8>(info + 16);
    Handover {
        protocol: "PVH",
        cmdline: number::<8>(info + 24),
        map_entries: number::<4>(info + 48),
        module: (number::<4>(info + 12) > 0).then(|| (number::<8>(modules), number::<8>(modules + 8))),
    }
}

/// The Multiboot Specification's information structure (0.6.96, 3.3).
fn multiboot(info: u64) -> Handover {
    let end = number::<4>(info + 48) + number::<4>(info + 44);
    let (mut at, mut map_entries) = (number::<4>(info + 48), 0);
    while at < end {
        at += 4 + number::<4>(at);
        map_entries += 1;
    }
    let module = number::<4>(info + 24);
    let start_and_size = || (number::<4>(module), number::<4>(module + 4) - number::<4>(module));
    Handover {
        protocol: "multiboot 1",
        cmdline: number::<4>(info + 16),
        map_entries,
        module: (number::<4>(info + 20) > 0).then(start_and_size),
    }
}

extern "C" fn main(magic: u32, info: u32) -> ! {
    let handover = if magic == MULTIBOOT { multiboot(info.into()) } else { pvh(info.into()) };
    let cmdline = || (handover.cmdline..).map(byte).take_while(|byte| *byte != 0);
    let _ = write!(Serial, "bare: booted by {}\r\nbare: command line '", handover.protocol);
    for byte in cmdline() {
        let _ = Serial.write_char(byte.into());
    }
    let _ = write!(Serial, "'\r\nbare: {} entries in the memory map\r\n", handover.map_entries);
    if let Some((at, size)) = handover.module {
        let sum: u64 = (at..at + size).map(|at| u64::from(byte(at))).sum();
        let _ = write!(Serial, "bare: a module of {size} bytes, sum {sum}\r\n");
    }
    let mut starts = cmdline().enumerate().map(|(at, _)| handover.cmdline + at as u64);
    let exit = starts.find(|at| (*at..).map(byte).take(5).eq(*b"exit="));
    let digits = exit.into_iter().flat_map(|at| (at + 5..).map(byte).take_while(u8::is_ascii_digit));
    end(digits.fold(0, |value: u32, digit| value.wrapping_mul(10).wrapping_add((digit - b'0').into())))
}

fn end(code: u32) -> ! {
    // SAFETY: ends the guest.
    unsafe { Port::new(EXIT).write(code) };
    loop {
        x86_64::instructions::hlt();
    }
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    let _ = write!(Serial, "bare: {info}\r\n");
    end(u32::MAX)
}
