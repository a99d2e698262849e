//! The local APIC's registers and the page that holds them.
//!
//! [`Register`] names one by its offset in the architectural page, which x2APIC mode keeps:
//! MSR 0x800 + offset / 16 (Intel SDM vol. 3, tables 11-1 and 11-6). [`Page`] has that very
//! layout, so that it can become the backing page of AVIC or APICv. [`VectorSet`] is one of
//! IRR and ISR in it.

use alloc::boxed::Box;

/// A register, by its offset in the page: a multiple of 16 below 0x1000. An open enum:
/// reserved offsets are values too.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Register(u16);

impl Register {
    pub(super) const ID: Self = Self(0x20);
    pub(super) const VERSION: Self = Self(0x30);
    pub(super) const TPR: Self = Self(0x80);
    pub(super) const APR: Self = Self(0x90);
    pub(super) const PPR: Self = Self(0xa0);
    pub(super) const EOI: Self = Self(0xb0);
    pub(super) const REMOTE_READ: Self = Self(0xc0);
    pub(super) const LDR: Self = Self(0xd0);
    pub(super) const DFR: Self = Self(0xe0);
    pub(super) const SVR: Self = Self(0xf0);
    pub(super) const ISR: Self = Self(0x100);
    pub(super) const TMR: Self = Self(0x180);
    pub(super) const IRR: Self = Self(0x200);
    pub(super) const ESR: Self = Self(0x280);
    pub(super) const ICR_LOW: Self = Self(0x300);
    pub(super) const ICR_HIGH: Self = Self(0x310);
    pub(super) const LVT_TIMER: Self = Self(0x320);
    pub(super) const LVT_THERMAL: Self = Self(0x330);
    pub(super) const LVT_PERF: Self = Self(0x340);
    pub(super) const LVT_LINT0: Self = Self(0x350);
    pub(super) const LVT_LINT1: Self = Self(0x360);
    pub(super) const LVT_ERROR: Self = Self(0x370);
    pub(super) const INITIAL_COUNT: Self = Self(0x380);
    pub(super) const CURRENT_COUNT: Self = Self(0x390);
    pub(super) const DIVIDE: Self = Self(0x3e0);
    /// x2APIC mode only.
    pub(super) const SELF_IPI: Self = Self(0x3f0);

    /// The local vector table.
    pub(super) const LVTS: [Self; 6] = [
        Self::LVT_TIMER,
        Self::LVT_THERMAL,
        Self::LVT_PERF,
        Self::LVT_LINT0,
        Self::LVT_LINT1,
        Self::LVT_ERROR,
    ];

    /// The register at `offset` of the page, or `None` if no register begins there.
    pub(super) fn at_offset(offset: u32) -> Option<Self> {
        let offset = u16::try_from(offset).ok()?;
        (offset < 0x1000 && offset.is_multiple_of(16)).then_some(Self(offset))
    }

    /// The register behind `msr`, or `None` outside 0x800..=0x8ff.
    pub(super) fn at_msr(msr: u32) -> Option<Self> {
        let index = u16::try_from(msr.checked_sub(0x800)?).ok()?;
        (index < 0x100).then_some(Self(index << 4))
    }

    /// Whether the register exists in xAPIC mode.
    pub(super) fn in_xapic(self) -> bool {
        self.readable_in_x2apic()
            || matches!(self, Self::APR | Self::EOI | Self::REMOTE_READ | Self::DFR | Self::ICR_HIGH)
    }

    /// Whether RDMSR finds it in x2APIC mode.
    pub(super) fn readable_in_x2apic(self) -> bool {
        matches!(self.0, 0x100..=0x270 | 0x320..=0x390)
            || matches!(
                self,
                Self::ID
                    | Self::VERSION
                    | Self::TPR
                    | Self::PPR
                    | Self::LDR
                    | Self::SVR
                    | Self::ESR
                    | Self::ICR_LOW
                    | Self::DIVIDE
            )
    }

    /// Whether WRMSR finds it in x2APIC mode.
    pub(super) fn writable_in_x2apic(self) -> bool {
        self.writable() != 0 && !matches!(self, Self::LDR | Self::DFR | Self::ICR_HIGH)
            || matches!(self, Self::EOI | Self::ESR)
    }

    /// The bits that keep what is written; 0 for read-only registers, and for those whose
    /// value does not matter.
    pub(super) fn writable(self) -> u32 {
        match self {
            Self::TPR | Self::SELF_IPI => 0xff,
            Self::LDR | Self::ICR_HIGH => 0xff00_0000,
            Self::DFR => 0xf000_0000,
            // Vector, enable, focus checking; no EOI-broadcast suppression.
            Self::SVR => 0x3ff,
            Self::ICR_LOW => 0x000c_cfff,
            Self::LVT_TIMER => 0x0007_00ff,
            Self::LVT_THERMAL | Self::LVT_PERF => 0x0001_07ff,
            Self::LVT_LINT0 | Self::LVT_LINT1 => 0x0001_a7ff,
            Self::LVT_ERROR => 0x0001_00ff,
            Self::INITIAL_COUNT => u32::MAX,
            Self::DIVIDE => 0xb,
            _ => 0,
        }
    }

    /// The bits that may be written as one in x2APIC mode: the writable ones, and the
    /// read-only ones that are not reserved (delivery status, remote IRR).
    pub(super) fn unreserved(self) -> u32 {
        const DELIVERY_STATUS: u32 = 1 << 12;
        const REMOTE_IRR: u32 = 1 << 14;
        self.writable()
            | match self {
                Self::LVT_LINT0 | Self::LVT_LINT1 => DELIVERY_STATUS | REMOTE_IRR,
                Self::LVT_TIMER | Self::LVT_THERMAL | Self::LVT_PERF | Self::LVT_ERROR | Self::ICR_LOW => {
                    DELIVERY_STATUS
                }
                _ => 0,
            }
    }
}

/// One register and the 12 bytes behind it that nobody may use.
#[derive(Clone, Copy)]
#[repr(C)]
struct Slot {
    value: u32,
    reserved: [u32; 3],
}

#[repr(C, align(4096))]
struct Slots([Slot; 256]);

const _: () = assert!(size_of::<Slots>() == 4096);

/// The 4 KiB register page.
pub(super) struct Page(Box<Slots>);

impl Page {
    /// A page of zeros.
    pub(super) fn new() -> Self {
        Self(Box::new(Slots([Slot { value: 0, reserved: [0; 3] }; 256])))
    }

    /// Writes zero everywhere.
    pub(super) fn clear(&mut self) {
        self.0.0.fill(Slot { value: 0, reserved: [0; 3] });
    }

    pub(super) fn get(&self, register: Register) -> u32 {
        self.0.0[usize::from(register.0 >> 4 & 0xff)].value
    }

    pub(super) fn set(&mut self, register: Register, value: u32) {
        self.0.0[usize::from(register.0 >> 4 & 0xff)].value = value;
    }

    /// The bit of `vector` in the eight registers from `base` on.
    pub(super) fn vector(&self, base: Register, vector: u8) -> bool {
        self.get(word(base, vector)) >> (vector & 31) & 1 != 0
    }

    pub(super) fn set_vector(&mut self, base: Register, vector: u8, on: bool) {
        let register = word(base, vector);
        let bit = 1 << (vector & 31);
        let old = self.get(register);
        self.set(register, if on { old | bit } else { old & !bit });
    }
}

fn word(base: Register, vector: u8) -> Register {
    Register(base.0 + (u16::from(vector >> 5) << 4))
}

/// The vectors in IRR or ISR, with a summary, so that the highest is found without a scan:
/// this is asked at every entry.
pub(super) struct VectorSet {
    base: Register,
    /// Bit n: the nth register is not zero.
    summary: u8,
}

impl VectorSet {
    /// The empty set whose registers begin at `base`.
    pub(super) const fn new(base: Register) -> Self {
        Self { base, summary: 0 }
    }

    pub(super) fn insert(&mut self, page: &mut Page, vector: u8) {
        page.set_vector(self.base, vector, true);
        self.summary |= 1 << (vector >> 5);
    }

    pub(super) fn remove(&mut self, page: &mut Page, vector: u8) {
        page.set_vector(self.base, vector, false);
        if page.get(word(self.base, vector)) == 0 {
            self.summary &= !(1 << (vector >> 5));
        }
    }

    /// The highest vector in the set.
    pub(super) fn highest(&self, page: &Page) -> Option<u8> {
        let group = self.summary.checked_ilog2()?;
        #[expect(clippy::cast_possible_truncation, reason = "a bit number of u8 is below 8")]
        let first = (group as u8) << 5;
        let bit = page.get(word(self.base, first)).checked_ilog2()?;
        #[expect(clippy::cast_possible_truncation, reason = "a bit number of u32 is below 32")]
        Some(first + bit as u8)
    }
}
