//! What CPUID shows to a cell, leaf by leaf.
//!
//! Both kinds of cells see the machine's own CPU as a KVM guest would: vendor, model and
//! what its user-mode code can use pass; what the hypervisor emulates (x2APIC, the
//! deadline timer, a constant TSC, the KVM clock) is shown even where the CPU lacks it;
//! what needs registers that a cell does not get (performance counters, machine checks,
//! virtualization, power management) is hidden. Features are shown by name:
//! one that nobody has looked at stays hidden.
//!
//! [`cpuid`] is the policy; [`Table`] prints it for the book.

mod features;
mod rules;
#[cfg(test)]
mod tests;
mod topology;

pub use rules::Table;

use rules::Shown;

/// First of KVM's leaves.
pub const KVM_BASE: u32 = 0x4000_0000;
/// First of Bulkhead's own leaves: the last of them, and a signature of 12 bytes.
pub const BULKHEAD_BASE: u32 = 0x4000_0100;
/// What EBX, ECX and EDX of [`BULKHEAD_BASE`] spell.
pub const BULKHEAD_SIGNATURE: [u8; 12] = *b"BulkheadHV\0\0";
/// `KVM_FEATURE_CLOCKSOURCE`: kvmclock by its old MSRs.
const KVM_CLOCKSOURCE: u32 = 1;
/// `KVM_FEATURE_CLOCKSOURCE2`: kvmclock.
const KVM_CLOCKSOURCE2: u32 = 1 << 3;
/// `KVM_FEATURE_PV_EOI`.
const KVM_PV_EOI: u32 = 1 << 6;
/// `KVM_FEATURE_CLOCKSOURCE_STABLE_BIT`.
const KVM_CLOCKSOURCE_STABLE: u32 = 1 << 24;

/// XCR0 bits that a cell may set, where its CPU has them: x87, SSE, AVX, AVX-512 (three
/// bits) and PKRU. The run loop refuses the others to XSETBV.
pub const XCR0_ALLOWED: u64 = 0x2e7;

/// EAX, EBX, ECX and EDX.
pub type Registers = [u32; 4];

/// How the vCPUs of a cell relate to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topology {
    /// As the machine's CPUs do: the root cell, whose vCPUs are the pCPUs of same ID.
    Machine,
    /// One socket of so many cores with one thread each.
    Flat {
        /// How many, at least 1.
        vcpus: u32,
    },
}

/// What CPUID depends on besides the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuidView {
    /// How the cell's vCPUs relate.
    pub topology: Topology,
    /// The vCPU's APIC ID.
    pub apic_id: u32,
    /// The vCPU's CR4, as it sees it.
    pub cr4: u64,
    /// Whether the cell's local APICs do paravirtual EOI.
    pub pv_eoi: bool,
}

/// One question, with what answers may depend on.
struct Query<'a> {
    leaf: u32,
    subleaf: u32,
    view: &'a CpuidView,
    host: &'a dyn Fn(u32, u32) -> Registers,
}

impl Query<'_> {
    /// What the machine answers.
    fn host(&self) -> Registers {
        (self.host)(self.leaf, self.subleaf)
    }

    fn vendor(&self) -> [u32; 3] {
        let [_, b, c, d] = (self.host)(0, 0);
        [b, d, c]
    }

    fn is_intel(&self) -> bool {
        self.vendor() == words(*b"GenuineIntel")
    }
}

/// What `leaf` and `subleaf` show to the vCPU of `view`. `host` executes CPUID on this
/// CPU, with the guest's XCR0 in place.
pub fn cpuid(leaf: u32, subleaf: u32, view: &CpuidView, host: &dyn Fn(u32, u32) -> Registers) -> Registers {
    let mut query = Query { leaf, subleaf, view, host };
    let is_hypervisors = leaf >> 28 == 4;
    if !is_hypervisors {
        let extended = leaf & 0x8000_0000;
        let [last, ..] = host(extended, 0);
        // Beyond the last leaf an Intel CPU answers as for its last basic one (SDM vol. 2,
        // CPUID), others with zeros (APM vol. 3, E.2).
        if leaf > last {
            if !query.is_intel() {
                return [0; 4];
            }
            [query.leaf, ..] = host(0, 0);
        }
    }
    match rules::rule(query.leaf, query.subleaf).map(|rule| rule.shown) {
        None | Some(Shown::Nothing) => [0; 4],
        Some(Shown::Host) => query.host(),
        Some(Shown::Features(shown)) => shown.select(query.host()),
        Some(Shown::Computed(answer)) => answer(&query),
    }
}

/// Twelve characters as the three registers that spell them.
fn words(text: [u8; 12]) -> [u32; 3] {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = text;
    [[a, b, c, d], [e, f, g, h], [i, j, k, l]].map(u32::from_le_bytes)
}
