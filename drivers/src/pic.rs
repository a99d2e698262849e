//! The two 8259 interrupt controllers of a PC: the hypervisor only silences them.
// UNSAFETY: they are reached by port I/O.
#![expect(unsafe_code, reason = "port I/O")]

use x86_64::instructions::port::Port;

/// Data ports of the first and the second controller: operation control word 1, the mask.
const DATA: [u16; 2] = [0x21, 0xa1];

/// Masks all lines of both controllers.
pub fn mask_all() {
    for port in DATA {
        // SAFETY: a mask register; nothing there affects memory.
        unsafe { Port::<u8>::new(port).write(0xff) };
    }
}
