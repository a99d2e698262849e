//! References that the counter is measured against: HPET and ACPI PM timer.
// UNSAFETY: reached through their registers.
#![expect(unsafe_code, reason = "MMIO and port I/O")]

use x86_64::instructions::port::Port;

/// A free-running counter of known frequency.
#[derive(Debug, Clone, Copy)]
pub enum Reference {
    /// The ACPI PM timer at a port: 3 579 545 Hz; 24 bits are used.
    PmTimer {
        /// Its port.
        port: u16,
    },
    /// The HPET's main counter; its low 32 bits are used.
    Hpet {
        /// Its registers' page.
        page: *mut u32,
        /// The length of a tick in femtoseconds.
        period_fs: u32,
    },
}

const HPET_PERIOD: usize = 0x004;
const HPET_CONFIGURATION: usize = 0x010;
const HPET_COUNTER: usize = 0x0f0;
const HPET_ENABLE: u32 = 1;
/// Hpet specification 2.3.4: no period is longer.
const HPET_PERIOD_MAX: u32 = 100_000_000;

impl Reference {
    /// The HPET whose registers are at `page`, started if it stands; `None` if that is none.
    ///
    /// # Safety
    /// `page` maps the HPET's registers, uncached and writable, for as long as it is used.
    pub unsafe fn hpet(page: *mut u32) -> Option<Self> {
        // SAFETY: a register of the page.
        let period_fs = unsafe { page.wrapping_byte_add(HPET_PERIOD).read_volatile() };
        if period_fs == 0 || period_fs > HPET_PERIOD_MAX {
            return None;
        }
        let configuration = page.wrapping_byte_add(HPET_CONFIGURATION);
        // SAFETY: as above.
        let value = unsafe { configuration.read_volatile() };
        // SAFETY: as above; it starts the counter and nothing else.
        unsafe { configuration.write_volatile(value | HPET_ENABLE) };
        Some(Self::Hpet { page, period_fs })
    }

    /// Its frequency in millihertz.
    pub fn millihertz(&self) -> u64 {
        match self {
            Self::PmTimer { .. } => 3_579_545_000,
            Self::Hpet { period_fs, .. } => 1_000_000_000_000_000_000 / u64::from(*period_fs),
        }
    }

    /// The bits that count.
    pub fn mask(&self) -> u64 {
        match self {
            Self::PmTimer { .. } => 0xff_ffff,
            Self::Hpet { .. } => 0xffff_ffff,
        }
    }

    /// The count, to be cut by [`mask`](Self::mask).
    pub fn read(&self) -> u64 {
        match self {
            // SAFETY: reads the timer's port, which the firmware has told.
            Self::PmTimer { port } => u64::from(unsafe { Port::<u32>::new(*port).read() }),
            Self::Hpet { page, .. } => {
                // SAFETY: a register of the page, see `hpet`.
                u64::from(unsafe { page.wrapping_byte_add(HPET_COUNTER).read_volatile() })
            }
        }
    }
}
