//! The table of all leaves: what is shown of each, and why.

use super::features::{
    EXTENDED_2, Features, STRUCTURED, STRUCTURED_1, STRUCTURED_2, XSAVE_FORMS, XSAVE_STATES,
};
use super::{
    BULKHEAD_BASE, BULKHEAD_SIGNATURE, KVM_BASE, KVM_CLOCKSOURCE, KVM_CLOCKSOURCE_STABLE, KVM_CLOCKSOURCE2,
    KVM_PV_EOI, Query, Registers, XCR0_ALLOWED, topology, words,
};
use core::fmt;

/// What of a leaf is shown.
#[derive(Clone, Copy)]
pub(super) enum Shown {
    /// Zeros.
    Nothing,
    /// What the machine answers.
    Host,
    /// Of the machine's answer, these features.
    Features(&'static Features),
    /// Something else.
    Computed(fn(&Query<'_>) -> Registers),
}

/// What is done for some leaves.
pub(super) struct Rule {
    /// First and last leaf.
    pub(super) leaves: (u32, u32),
    /// First and last subleaf; the CPU ignores the subleaf where a leaf has none.
    pub(super) subleaves: (u32, u32),
    pub(super) shown: Shown,
    name: &'static str,
    why: &'static str,
}

const fn leaf(leaf: u32, name: &'static str, shown: Shown, why: &'static str) -> Rule {
    Rule { leaves: (leaf, leaf), subleaves: (0, u32::MAX), shown, name, why }
}

impl Rule {
    const fn up_to(mut self, last: u32) -> Self {
        self.leaves.1 = last;
        self
    }

    const fn subleaves(mut self, first: u32, last: u32) -> Self {
        self.subleaves = (first, last);
        self
    }
}

use Shown::{Computed, Host, Nothing};

/// The rule for a leaf; what has none is not shown.
pub(super) fn rule(leaf: u32, subleaf: u32) -> Option<&'static Rule> {
    let within = |range: (u32, u32), value| range.0 <= value && value <= range.1;
    RULES.iter().find(|rule| within(rule.leaves, leaf) && within(rule.subleaves, subleaf))
}

/// In the order of leaves, without overlap.
#[rustfmt::skip]
pub(super) static RULES: &[Rule] = &[
    leaf(0, "vendor and last leaf", Host, "the vendor passes, so that kernels work around this CPU's errata"),
    leaf(1, "model and features", Computed(topology::basic),
        "see the features below; x2APIC, TSC_DEADLINE, HYPERVISOR and APIC are emulated; OSXSAVE mirrors CR4; the APIC ID is the vCPU's"),
    leaf(2, "caches and TLBs", Host, "they are the CPU's"),
    leaf(3, "serial number", Nothing, "a cell can move"),
    leaf(4, "caches", Computed(topology::intel_caches), "the CPU's; in a guest cell level 3 is shared by all vCPUs"),
    leaf(5, "MONITOR", Nothing, "waiting vCPUs have to leave the CPU to the hypervisor"),
    leaf(6, "power", Computed(always_running_timer),
        "only ARAT: the virtual timer never stops; without the bit Linux wants a PIT. Power is the hypervisor's"),
    leaf(7, "structured features", Computed(structured),
        "see below; not shown: TSC_ADJUST, TSX, MPX, CET, PT, PKS, AMX, WAITPKG, LAM (they need registers that cells do not get)").subleaves(0, 0),
    leaf(7, "structured features 1", Shown::Features(&STRUCTURED_1), "as above").subleaves(1, 1),
    leaf(7, "structured features 2", Shown::Features(&STRUCTURED_2), "SPEC_CTRL is the cell's own").subleaves(2, 2),
    leaf(7, "structured features", Nothing, "unknown").subleaves(3, u32::MAX),
    leaf(9, "direct cache access", Nothing, "the platform is the hypervisor's"),
    leaf(0xa, "performance counters", Nothing, "the counters are the hypervisor's"),
    leaf(0xb, "topology", Computed(topology::levels), "the root cell sees the machine's, a guest cell one socket of single-threaded cores"),
    leaf(0xd, "XSAVE states", Shown::Features(&XSAVE_STATES), "those that XSETBV accepts; the size is for the vCPU's XCR0").subleaves(0, 0),
    leaf(0xd, "XSAVE forms", Shown::Features(&XSAVE_FORMS), "no supervisor states, so XSS is zero").subleaves(1, 1),
    leaf(0xd, "XSAVE state", Computed(xsave_state), "where it lies, for the states shown").subleaves(2, u32::MAX),
    leaf(0xf, "resource monitoring, allocation", Nothing, "dividing the machine is the hypervisor's").up_to(0x10),
    leaf(0x12, "SGX", Nothing, "needs memory that cells do not get"),
    leaf(0x14, "processor trace", Nothing, "it writes to physical memory"),
    leaf(0x15, "TSC and crystal", Nothing, "the KVM clock tells the TSC's frequency; Linux would take the crystal's for the APIC timer's"),
    leaf(0x16, "nominal frequencies", Nothing, "informative, and a cell can move"),
    leaf(0x17, "SoC vendor", Nothing, "the platform is the hypervisor's"),
    leaf(0x18, "TLBs", Host, "they are the CPU's"),
    leaf(0x19, "key locker", Nothing, "its keys can be neither saved nor restored"),
    leaf(0x1a, "hybrid, PCONFIG, LBR, AMX", Nothing, "the features are not shown").up_to(0x1e),
    leaf(0x1f, "topology", Computed(topology::levels), "as 0xb"),
    leaf(0x20, "history reset, counters, AVX10", Nothing, "the features are not shown").up_to(0x24),
    leaf(KVM_BASE, "KVM's signature", Computed(kvm_signature),
        "Linux looks for KVMKVMKVM before it takes kvmclock, or x2APIC without interrupt remapping"),
    leaf(KVM_BASE + 1, "KVM's features", Computed(kvm_features),
        "CLOCKSOURCE, CLOCKSOURCE2, CLOCKSOURCE_STABLE_BIT; PV_EOI where the local APIC does it; no hints"),
    leaf(BULKHEAD_BASE, "Bulkhead's signature", Computed(bulkhead_signature), "BulkheadHV"),
    leaf(BULKHEAD_BASE + 1, "Bulkhead's version", Computed(bulkhead_version), "EAX: major << 16, minor << 8, patch"),
    leaf(0x8000_0000, "vendor and last leaf", Host, "as 0"),
    leaf(0x8000_0001, "extended features", Computed(topology::extended),
        "see below; not shown: SVM, SKINIT, IBS, MONITORX, counters, OSVW, FFXSR, TCE, machine checks"),
    leaf(0x8000_0002, "name", Host, "it is the CPU's").up_to(0x8000_0004),
    leaf(0x8000_0005, "caches and TLBs", Host, "they are the CPU's").up_to(0x8000_0006),
    leaf(0x8000_0007, "power and RAS", Computed(invariant_tsc),
        "only TscInvariant: its frequency is guaranteed. Power and machine checks are the hypervisor's"),
    leaf(0x8000_0008, "address sizes", Computed(topology::capacity), "see below; the number of cores is the cell's"),
    leaf(0x8000_000a, "SVM", Nothing, "cells cannot nest"),
    leaf(0x8000_0019, "TLBs, speed of SSE", Host, "they are the CPU's").up_to(0x8000_001a),
    leaf(0x8000_001b, "IBS, LWP", Nothing, "the counters are the hypervisor's").up_to(0x8000_001c),
    leaf(0x8000_001d, "caches", Computed(topology::amd_caches), "as 4"),
    leaf(0x8000_001e, "processor IDs", Computed(topology::amd_ids), "as 0xb"),
    leaf(0x8000_001f, "memory encryption, QoS", Nothing, "the keys and the machine's division are the hypervisor's").up_to(0x8000_0020),
    leaf(0x8000_0021, "extended features 2", Shown::Features(&EXTENDED_2), "see below; not shown: AutomaticIBRS, UAI (EFER bits)"),
    leaf(0x8000_0022, "counters, encryption", Nothing, "the counters are the hypervisor's").up_to(0x8000_0023),
    leaf(0x8000_0026, "topology", Nothing, "0xb says it"),
];

/// Leaf 6: ARAT.
fn always_running_timer(_: &Query<'_>) -> Registers {
    [1 << 2, 0, 0, 0]
}

/// Leaf 7, subleaf 0.
fn structured(query: &Query<'_>) -> Registers {
    const PKU: u32 = 1 << 3;
    const OSPKE: u32 = 1 << 4;
    const CR4_PKE: u64 = 1 << 22;
    let [last, ebx, ecx, edx] = STRUCTURED.select(query.host());
    let on = ecx & PKU != 0 && query.view.cr4 & CR4_PKE != 0;
    [last.min(2), ebx, if on { ecx | OSPKE } else { ecx }, edx]
}

/// Leaf 0xd, from subleaf 2 on.
fn xsave_state(query: &Query<'_>) -> Registers {
    match XCR0_ALLOWED.checked_shr(query.subleaf) {
        Some(states) if states & 1 != 0 => query.host(),
        _ => [0; 4],
    }
}

/// Leaf 0x80000007: TscInvariant.
fn invariant_tsc(_: &Query<'_>) -> Registers {
    [0, 0, 0, 1 << 8]
}

fn kvm_signature(_: &Query<'_>) -> Registers {
    let [b, c, d] = words(*b"KVMKVMKVM\0\0\0");
    [KVM_BASE + 1, b, c, d]
}

fn kvm_features(query: &Query<'_>) -> Registers {
    let eoi = if query.view.pv_eoi { KVM_PV_EOI } else { 0 };
    [KVM_CLOCKSOURCE | KVM_CLOCKSOURCE2 | KVM_CLOCKSOURCE_STABLE | eoi, 0, 0, 0]
}

fn bulkhead_signature(_: &Query<'_>) -> Registers {
    let [b, c, d] = words(BULKHEAD_SIGNATURE);
    [BULKHEAD_BASE + 1, b, c, d]
}

fn bulkhead_version(_: &Query<'_>) -> Registers {
    let parts =
        [env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR"), env!("CARGO_PKG_VERSION_PATCH")];
    let version = parts.iter().fold(0, |sum, part| sum << 8 | part.parse::<u8>().map_or(0, u32::from));
    [version, 0, 0, 0]
}

/// The table of all leaves in Markdown.
#[derive(Debug, Clone, Copy)]
pub struct Table;

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| leaf | subleaf | what | shown | why |\n| --- | --- | --- | --- | --- |")?;
        for Rule { leaves, subleaves, shown, name, why } in RULES {
            write!(f, "| {:#x}", leaves.0)?;
            if leaves.1 != leaves.0 {
                write!(f, "–{:#x}", leaves.1)?;
            }
            match *subleaves {
                (0, u32::MAX) => write!(f, " | any")?,
                (first, u32::MAX) => write!(f, " | from {first}")?,
                (first, _) => write!(f, " | {first}")?,
            }
            let shown = match shown {
                Nothing => "nothing",
                Host => "all",
                Shown::Features(_) => "some",
                Computed(_) => "computed",
            };
            writeln!(f, " | {name} | {shown} | {why} |")?;
        }
        writeln!(f, "\n| leaf | features shown where the CPU has them |\n| --- | --- |")?;
        for (leaf, features) in super::features::NAMED {
            writeln!(f, "| {leaf} | {features} |")?;
        }
        Ok(())
    }
}
