//! The CPU's local APIC, in xAPIC or x2APIC mode (AMD APM vol. 2, chapter 16).
// UNSAFETY: reached through its page or its MSRs.
#![expect(unsafe_code, reason = "MMIO and MSRs")]

use core::arch::x86_64::__cpuid;
use x86_64::registers::model_specific::Msr;

const APIC_BASE: u32 = 0x1b;
const APIC_BASE_ENABLE: u64 = 1 << 11;
const APIC_BASE_X2APIC: u64 = 1 << 10;
const TSC_DEADLINE: u32 = 0x6e0;

/// Registers, by their offset in the page; in x2APIC mode MSR 800h + offset / 16.
mod reg {
    pub(super) const ID: u32 = 0x020;
    pub(super) const TPR: u32 = 0x080;
    pub(super) const EOI: u32 = 0x0b0;
    pub(super) const LOGICAL_DESTINATION: u32 = 0x0d0;
    pub(super) const DESTINATION_FORMAT: u32 = 0x0e0;
    pub(super) const SPURIOUS: u32 = 0x0f0;
    pub(super) const ISR: u32 = 0x100;
    pub(super) const TMR: u32 = 0x180;
    pub(super) const ICR_LOW: u32 = 0x300;
    pub(super) const ICR_HIGH: u32 = 0x310;
    pub(super) const LVT_TIMER: u32 = 0x320;
    pub(super) const LVT_THERMAL: u32 = 0x330;
    pub(super) const LVT_PERFORMANCE: u32 = 0x340;
    pub(super) const LVT_LINT0: u32 = 0x350;
    pub(super) const LVT_LINT1: u32 = 0x360;
    pub(super) const LVT_ERROR: u32 = 0x370;
    pub(super) const TIMER_INITIAL: u32 = 0x380;
    pub(super) const TIMER_CURRENT: u32 = 0x390;
    pub(super) const TIMER_DIVIDE: u32 = 0x3e0;
}

const MASKED: u32 = 1 << 16;
const SOFTWARE_ENABLE: u32 = 1 << 8;
const MODE_DEADLINE: u32 = 2 << 17;
const DELIVERY_NMI: u32 = 4 << 8;
const DELIVERY_INIT: u32 = 5 << 8;
const DELIVERY_STARTUP: u32 = 6 << 8;
const LEVEL_ASSERT: u32 = 1 << 14;
const DELIVERY_PENDING: u32 = 1 << 12;
/// Divide configuration: by 1.
const DIVIDE_BY_1: u32 = 0b1011;

/// How the registers are reached.
#[derive(Debug, Clone, Copy)]
enum Access {
    Mmio(*mut u32),
    X2apic,
}

/// The local APIC of whichever CPU uses the value.
#[derive(Debug, Clone, Copy)]
pub struct LocalApic {
    access: Access,
    deadline: bool,
}

// SAFETY: the page's address means each CPU's own APIC; no state is shared through it.
unsafe impl Send for LocalApic {}
// SAFETY: as above; all access is by single volatile loads and stores.
unsafe impl Sync for LocalApic {}

/// Whether the CPU has x2APIC mode (CPUID 1 ECX.21).
pub fn has_x2apic() -> bool {
    __cpuid(1).ecx & 1 << 21 != 0
}

/// Where the xAPIC's registers are, a page.
pub fn page() -> u64 {
    // SAFETY: every CPU of x86-64 has this MSR; reading changes nothing.
    unsafe { Msr::new(APIC_BASE).read() & 0x000f_ffff_ffff_f000 }
}

impl LocalApic {
    /// The local APICs of this machine: in x2APIC mode where CPUs have it, else through
    /// `page`, the virtual address of [`page()`].
    ///
    /// # Safety
    /// `page` maps the registers, uncached and writable, for good, on every CPU.
    pub unsafe fn new(page: *mut u32) -> Self {
        let access = if has_x2apic() { Access::X2apic } else { Access::Mmio(page) };
        Self { access, deadline: __cpuid(1).ecx & 1 << 24 != 0 }
    }

    /// Whether it is in x2APIC mode.
    pub fn is_x2apic(&self) -> bool {
        matches!(self.access, Access::X2apic)
    }

    /// Whether the timer is armed by a value of the counter rather than by a count.
    pub fn has_deadline_timer(&self) -> bool {
        self.deadline
    }

    fn read(&self, register: u32) -> u32 {
        match self.access {
            // SAFETY: inside of the page that `new`'s caller vouched for.
            Access::Mmio(page) => unsafe { page.wrapping_byte_add(register as usize).read_volatile() },
            #[expect(clippy::cast_possible_truncation, reason = "all registers but ICR have 32 bits")]
            // SAFETY: `new` has seen that the CPU has x2APIC; reading has no effect on memory.
            Access::X2apic => unsafe { Msr::new(0x800 + (register >> 4)).read() as u32 },
        }
    }

    fn write(&self, register: u32, value: u32) {
        match self.access {
            // SAFETY: inside of the page that `new`'s caller vouched for.
            Access::Mmio(page) => unsafe { page.wrapping_byte_add(register as usize).write_volatile(value) },
            // SAFETY: the registers written here have no effect on memory.
            Access::X2apic => unsafe { Msr::new(0x800 + (register >> 4)).write(u64::from(value)) },
        }
    }

    /// Sets up the APIC of the CPU it is called on: enabled, everything masked but LINT1,
    /// whose NMIs are the hypervisor's; timer at the bus clock, to `timer_vector`.
    pub fn init(&self, spurious_vector: u8, timer_vector: u8) {
        let mut base = Msr::new(APIC_BASE);
        // SAFETY: reads it.
        let mut value = unsafe { base.read() } | APIC_BASE_ENABLE;
        // SAFETY: turns the APIC on where it is; from there to x2APIC is a legal step.
        unsafe { base.write(value) };
        if self.is_x2apic() {
            value |= APIC_BASE_X2APIC;
            // SAFETY: the CPU has x2APIC mode.
            unsafe { base.write(value) };
        }
        self.write(reg::TPR, 0);
        self.write(reg::SPURIOUS, SOFTWARE_ENABLE | u32::from(spurious_vector));
        for lvt in [reg::LVT_THERMAL, reg::LVT_PERFORMANCE, reg::LVT_LINT0, reg::LVT_ERROR] {
            self.write(lvt, MASKED);
        }
        self.write(reg::LVT_LINT1, DELIVERY_NMI);
        let mode = if self.deadline { MODE_DEADLINE } else { 0 };
        self.write(reg::LVT_TIMER, mode | u32::from(timer_vector));
        self.write(reg::TIMER_DIVIDE, DIVIDE_BY_1);
        // What the firmware may have left in service.
        for _ in 0..256 {
            if (0..8).all(|word| self.read(reg::ISR + word * 16) == 0) {
                break;
            }
            self.eoi();
        }
    }

    /// The CPU's APIC ID.
    pub fn id(&self) -> u32 {
        let id = self.read(reg::ID);
        if self.is_x2apic() { id } else { id >> 24 }
    }

    /// Sets by which logical destinations the CPU is found: LDR, and whether by the flat model
    /// or that of clusters. In x2APIC mode this cannot be set: `false`.
    pub fn set_logical_id(&self, ldr: u32, flat: bool) -> bool {
        if self.is_x2apic() {
            return false;
        }
        self.write(reg::DESTINATION_FORMAT, if flat { u32::MAX } else { u32::MAX >> 4 });
        self.write(reg::LOGICAL_DESTINATION, ldr);
        true
    }

    /// Ends the interrupt in service.
    pub fn eoi(&self) {
        self.write(reg::EOI, 0);
    }

    /// Whether the interrupt `vector` is in service: has arrived from this APIC and has not
    /// been ended.
    pub fn is_in_service(&self, vector: u8) -> bool {
        self.vector_bit(reg::ISR, vector)
    }

    /// Whether the interrupt `vector`, in service, came level-triggered.
    pub fn is_level(&self, vector: u8) -> bool {
        self.vector_bit(reg::TMR, vector)
    }

    /// The bit of `vector` in the eight registers from `first` on.
    fn vector_bit(&self, first: u32, vector: u8) -> bool {
        self.read(first + u32::from(vector / 32) * 16) >> (vector % 32) & 1 != 0
    }

    fn command(&self, destination: u32, low: u32) {
        match self.access {
            Access::X2apic => {
                let value = u64::from(destination) << 32 | u64::from(low);
                // SAFETY: sends a message that the callers below have composed.
                unsafe { Msr::new(0x800 + (reg::ICR_LOW >> 4)).write(value) };
            }
            Access::Mmio(_) => {
                while self.read(reg::ICR_LOW) & DELIVERY_PENDING != 0 {
                    core::hint::spin_loop();
                }
                self.write(reg::ICR_HIGH, destination << 24);
                self.write(reg::ICR_LOW, low);
            }
        }
    }

    /// Sends `vector` to the CPU with `apic_id`. What was written before is seen there when
    /// it arrives.
    pub fn send(&self, apic_id: u32, vector: u8) {
        // In x2APIC mode the write to ICR is not serializing (Intel SDM vol. 3, 11.12.3).
        core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
        self.command(apic_id, LEVEL_ASSERT | u32::from(vector));
    }

    /// Sends a non-maskable interrupt.
    pub fn send_nmi(&self, apic_id: u32) {
        self.command(apic_id, LEVEL_ASSERT | DELIVERY_NMI);
    }

    /// Sends INIT.
    pub fn send_init(&self, apic_id: u32) {
        self.command(apic_id, LEVEL_ASSERT | DELIVERY_INIT);
    }

    /// Sends start-up at `page` × 4 KiB.
    pub fn send_startup(&self, apic_id: u32, page: u8) {
        self.command(apic_id, LEVEL_ASSERT | DELIVERY_STARTUP | u32::from(page));
    }

    /// Arms the timer for a value of the counter. Only with [`has_deadline_timer`](Self::has_deadline_timer).
    pub fn arm_deadline(&self, counter: u64) {
        // 0 would disarm it.
        // SAFETY: CPUID shows the MSR; it has no effect on memory.
        unsafe { Msr::new(TSC_DEADLINE).write(counter.max(1)) };
    }

    /// Arms the timer to fire after `ticks` of the bus clock, at least 1. Only without
    /// [`has_deadline_timer`](Self::has_deadline_timer).
    pub fn arm_ticks(&self, ticks: u32) {
        self.write(reg::TIMER_INITIAL, ticks.max(1));
    }

    /// Starts the timer from its highest count, masked, to measure how fast it counts; the
    /// mode is one-shot until [`init`](Self::init) sets it up again.
    pub fn start_count(&self) {
        self.write(reg::LVT_TIMER, MASKED);
        self.write(reg::TIMER_INITIAL, u32::MAX);
    }

    /// Ends what [`start_count`](Self::start_count) began.
    pub fn stop_count(&self) {
        self.write(reg::TIMER_INITIAL, 0);
    }

    /// Disarms the timer.
    pub fn disarm(&self) {
        if self.deadline {
            // SAFETY: as in `arm_deadline`.
            unsafe { Msr::new(TSC_DEADLINE).write(0) };
        } else {
            self.write(reg::TIMER_INITIAL, 0);
        }
    }

    /// Ticks of the bus clock left until the timer fires, 0 when it is not armed.
    pub fn ticks_left(&self) -> u32 {
        self.read(reg::TIMER_CURRENT)
    }
}
