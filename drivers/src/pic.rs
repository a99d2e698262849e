//! The two 8259 interrupt controllers of a PC: the hypervisor only silences them.
// UNSAFETY: they are reached by port I/O.
#![expect(unsafe_code, reason = "port I/O")]

use x86_64::instructions::port::Port;

/// What is written where (Intel 8259A data sheet): initialization command words 1 to 4, then
/// the mask. An 8259 that is asked for a vector all the same, by a forged message, gives its
/// seventh: from these bases on, one that no exception has.
const SILENCE: [(u16, u8); 10] = [
    // Edge-triggered, cascaded, with a fourth word.
    (0x20, 0x11),
    (0xa0, 0x11),
    // The first vectors.
    (0x21, 0x20),
    (0xa1, 0x28),
    // The second is at line 2 of the first.
    (0x21, 1 << 2),
    (0xa1, 2),
    // 8086 mode, no automatic end of interrupt.
    (0x21, 1),
    (0xa1, 1),
    // All lines masked.
    (0x21, 0xff),
    (0xa1, 0xff),
];

/// Masks all lines of both controllers.
pub fn mask_all() {
    for (port, value) in SILENCE {
        // SAFETY: their registers; nothing there affects memory, and no interrupt is open.
        unsafe { Port::<u8>::new(port).write(value) };
    }
}
