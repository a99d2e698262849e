//! What each MSR does for a cell.
//!
//! One table says it for all of them; it also makes the permission maps, so that an MSR
//! that passes here passes there. What is not in it is a general-protection fault.

use crate::hal::Role;
use core::fmt::{self, Write as _};

/// What happens when a cell touches an MSR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MsrAction {
    /// The CPU's own, without an exit: it is switched with the vCPU or belongs to the CPU
    /// that the vCPU has to itself.
    Pass,
    /// Reads are the machine's, writes are dropped.
    ReadOnly,
    /// Reads as this value, writes are dropped.
    Fixed(u64),
    /// A model answers (see [`Emulated`]).
    Emulated(Emulated),
    /// #GP(0).
    Fault,
}

impl fmt::Display for MsrAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pass => f.write_str("passes"),
            Self::ReadOnly => f.write_str("reads the machine's, writes dropped"),
            Self::Fixed(value) => write!(f, "reads {value:#x}, writes dropped"),
            Self::Emulated(_) => f.write_str("emulated"),
            Self::Fault => f.write_str("#GP"),
        }
    }
}

/// The models behind emulated MSRs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Emulated {
    /// The counter: reads are the guest's; the root cell's writes are dropped, a guest
    /// cell's set the vCPU's offset.
    Counter,
    /// IA32_APIC_BASE.
    ApicBase,
    /// IA32_TSC_DEADLINE.
    Deadline,
    /// The x2APIC's registers.
    X2apic,
    /// EFER: the bits that a cell may set, SVME hidden.
    Efer,
    /// PAT, kept with the vCPU.
    Pat,
    /// The KVM clock's page.
    KvmSystemTime,
    /// The KVM wall clock's page.
    KvmWallClock,
}

/// One row of the table: a range of MSRs of the same meaning.
#[derive(Debug, Clone, Copy)]
pub struct MsrRow {
    /// First MSR.
    pub first: u32,
    /// Last MSR.
    pub last: u32,
    /// The manuals' name.
    pub name: &'static str,
    /// For the root cell.
    pub root: MsrAction,
    /// For a guest cell.
    pub guest: MsrAction,
    /// Why.
    pub why: &'static str,
}

const fn row(
    first: u32,
    last: u32,
    name: &'static str,
    root: MsrAction,
    guest: MsrAction,
    why: &'static str,
) -> MsrRow {
    MsrRow { first, last, name, root, guest, why }
}

const PASS: MsrAction = MsrAction::Pass;
const ZERO: MsrAction = MsrAction::Fixed(0);
const READ_ONLY: MsrAction = MsrAction::ReadOnly;
const FAULT: MsrAction = MsrAction::Fault;
const fn emulated(model: Emulated) -> MsrAction {
    MsrAction::Emulated(model)
}

/// All MSRs that are not a fault, ascending.
pub const MSR_TABLE: &[MsrRow] = &[
    row(
        0x10,
        0x10,
        "TSC",
        emulated(Emulated::Counter),
        emulated(Emulated::Counter),
        "set by offset; the root cell's counter is the machine's and stays so",
    ),
    row(
        0x11,
        0x11,
        "KVM_WALL_CLOCK",
        emulated(Emulated::KvmWallClock),
        emulated(Emulated::KvmWallClock),
        "the clock by its first numbers, which CPUID shows too",
    ),
    row(
        0x12,
        0x12,
        "KVM_SYSTEM_TIME",
        emulated(Emulated::KvmSystemTime),
        emulated(Emulated::KvmSystemTime),
        "as KVM_WALL_CLOCK",
    ),
    row(
        0x1b,
        0x1b,
        "APIC_BASE",
        emulated(Emulated::ApicBase),
        emulated(Emulated::ApicBase),
        "belongs to the virtual local APIC",
    ),
    row(0x48, 0x49, "SPEC_CTRL/PRED_CMD", PASS, PASS, "mitigations of the CPU that the vCPU has to itself"),
    row(0x8b, 0x8b, "PATCH_LEVEL", READ_ONLY, ZERO, "microcode is loaded by the firmware alone"),
    row(0xfe, 0xfe, "MTRRcap", READ_ONLY, ZERO, "nested paging carries memory types"),
    row(0x174, 0x176, "SYSENTER_CS/ESP/EIP", PASS, PASS, "switched with the vCPU"),
    row(
        0x200,
        0x20f,
        "MTRRphysBase/Mask",
        READ_ONLY,
        FAULT,
        "the machine's, for all cells at once; a guest cell has none",
    ),
    row(0x250, 0x250, "MTRRfix64K", READ_ONLY, FAULT, "as MTRRphysBase"),
    row(0x258, 0x259, "MTRRfix16K", READ_ONLY, FAULT, "as MTRRphysBase"),
    row(0x268, 0x26f, "MTRRfix4K", READ_ONLY, FAULT, "as MTRRphysBase"),
    row(
        0x277,
        0x277,
        "PAT",
        emulated(Emulated::Pat),
        emulated(Emulated::Pat),
        "kept with the vCPU; reserved types fault",
    ),
    row(
        0x2ff,
        0x2ff,
        "MTRRdefType",
        READ_ONLY,
        MsrAction::Fixed(0x806),
        "a guest cell has no ranges: all is write-back, and stage 2 decides",
    ),
    row(
        0x6e0,
        0x6e0,
        "TSC_DEADLINE",
        emulated(Emulated::Deadline),
        emulated(Emulated::Deadline),
        "belongs to the virtual local APIC",
    ),
    row(
        0x800,
        0x8ff,
        "x2APIC",
        emulated(Emulated::X2apic),
        emulated(Emulated::X2apic),
        "belongs to the virtual local APIC",
    ),
    row(
        0x4b56_4d00,
        0x4b56_4d00,
        "KVM_WALL_CLOCK_NEW",
        emulated(Emulated::KvmWallClock),
        emulated(Emulated::KvmWallClock),
        "stock kernels then know the time",
    ),
    row(
        0x4b56_4d01,
        0x4b56_4d01,
        "KVM_SYSTEM_TIME_NEW",
        emulated(Emulated::KvmSystemTime),
        emulated(Emulated::KvmSystemTime),
        "stock kernels then know the counter's frequency",
    ),
    row(
        0xc000_0080,
        0xc000_0080,
        "EFER",
        emulated(Emulated::Efer),
        emulated(Emulated::Efer),
        "SVME is the hypervisor's",
    ),
    row(0xc000_0081, 0xc000_0084, "STAR/LSTAR/CSTAR/SFMASK", PASS, PASS, "switched with the vCPU"),
    row(0xc000_0100, 0xc000_0102, "FS_BASE/GS_BASE/KERNEL_GS_BASE", PASS, PASS, "switched with the vCPU"),
    row(0xc000_0103, 0xc000_0103, "TSC_AUX", PASS, PASS, "the hypervisor does not use it"),
    row(0xc001_0010, 0xc001_0010, "SYSCFG", READ_ONLY, ZERO, "memory encryption stays as it is"),
    row(0xc001_0015, 0xc001_0015, "HWCR", READ_ONLY, ZERO, "Linux reads it to know about its TSC"),
    row(0xc001_001f, 0xc001_001f, "NB_CFG", ZERO, ZERO, "Linux reads it"),
    row(0xc001_0055, 0xc001_0055, "INT_PENDING", ZERO, ZERO, "Linux tests it for a C1E that stops timers"),
    row(0xc001_0058, 0xc001_0058, "MMIO_CFG_BASE", READ_ONLY, ZERO, "Linux looks for PCI there"),
    row(0xc001_0140, 0xc001_0141, "OSVW", ZERO, ZERO, "errata that the firmware has dealt with"),
    row(0xc001_1020, 0xc001_1020, "LS_CFG", ZERO, ZERO, "Linux would set mitigations the firmware has"),
    row(0xc001_1022, 0xc001_1022, "DC_CFG", ZERO, ZERO, "as LS_CFG"),
    row(0xc001_1029, 0xc001_1029, "DE_CFG", ZERO, ZERO, "LFENCE is not promised to be serializing"),
];

/// What `msr` does for a cell of the role `role`.
#[must_use]
pub fn msr_action(msr: u32, role: Role) -> MsrAction {
    let next = MSR_TABLE.partition_point(|row| row.first <= msr);
    match next.checked_sub(1).and_then(|i| MSR_TABLE.get(i)) {
        Some(row) if msr <= row.last => match role {
            Role::Root => row.root,
            Role::Guest => row.guest,
        },
        _ => FAULT,
    }
}

/// The table as Markdown, for the docs.
#[must_use]
pub fn msr_table_markdown() -> alloc::string::String {
    let mut text = alloc::string::String::from(
        "| MSR | name | root cell | guest cell | why |\n| --- | --- | --- | --- | --- |\n",
    );
    for r in MSR_TABLE {
        let range = if r.first == r.last {
            alloc::format!("{:#x}", r.first)
        } else {
            alloc::format!("{:#x}–{:#x}", r.first, r.last)
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| {range} | {} | {} | {} | {} |", r.name, r.root, r.guest, r.why);
    }
    text
}

/// Whether each byte of `pat` is a memory type (AMD APM vol. 2, 7.8.1).
#[must_use]
pub fn pat_is_valid(pat: u64) -> bool {
    pat.to_le_bytes().iter().all(|kind| matches!(kind, 0 | 1 | 4..=7))
}

/// Whether a CPU that supports the components `supported` (CPUID leaf 0xd) takes `value` as
/// XCR0 (Intel SDM vol. 1, 13.3; AMD APM vol. 2, 11.5.2).
#[must_use]
pub const fn xcr0_is_valid(value: u64, supported: u64) -> bool {
    const X87: u64 = 1;
    const SSE: u64 = 1 << 1;
    const AVX: u64 = 1 << 2;
    const MPX: u64 = 3 << 3;
    const AVX512: u64 = 7 << 5;
    const AMX: u64 = 3 << 17;
    const fn all_or_none(value: u64, group: u64) -> bool {
        value & group == 0 || value & group == group
    }
    value & X87 != 0
        && value & !supported == 0
        && (value & AVX == 0 || value & SSE != 0)
        && all_or_none(value, MPX)
        && all_or_none(value, AVX512)
        && (value & AVX512 == 0 || value & AVX != 0)
        && all_or_none(value, AMX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_ascending_and_disjoint() {
        for pair in MSR_TABLE.windows(2) {
            assert!(pair[0].first <= pair[0].last && pair[0].last < pair[1].first, "{:#x}", pair[1].first);
        }
    }

    #[test]
    fn what_reaches_beyond_the_cell_never_passes() {
        // Everything that passes is listed here by hand; a new row must come here too.
        let passing: std::vec::Vec<_> = MSR_TABLE
            .iter()
            .filter(|r| r.root == PASS || r.guest == PASS)
            .flat_map(|r| r.first..=r.last)
            .collect();
        assert_eq!(
            passing,
            [
                0x48,
                0x49,
                0x174,
                0x175,
                0x176,
                0xc000_0081,
                0xc000_0082,
                0xc000_0083,
                0xc000_0084,
                0xc000_0100,
                0xc000_0101,
                0xc000_0102,
                0xc000_0103
            ]
        );
        for msr in [0xc001_0114, 0xc001_0117, 0x3b, 0x1a0, 0x400, 0xc001_0111, 0x79, 0] {
            assert_eq!(msr_action(msr, Role::Root), FAULT, "{msr:#x}");
            assert_eq!(msr_action(msr, Role::Guest), FAULT, "{msr:#x}");
        }
    }

    #[test]
    fn xcr0_rules() {
        let all = 0x6_02e7 | 0x18;
        for (value, ok) in
            [(1, true), (3, true), (7, true), (5, false), (0, false), (2, false), (0xe7, true), (0x67, false)]
        {
            assert_eq!(xcr0_is_valid(value, all), ok, "{value:#x}");
        }
        assert!(!xcr0_is_valid(7, 3), "not supported");
        assert!(!xcr0_is_valid(0xf, all), "half of MPX");
    }

    #[test]
    fn pat_rules() {
        assert!(pat_is_valid(0x0007_0406_0007_0406));
        assert!(!pat_is_valid(0x0007_0406_0007_0402));
        assert!(!pat_is_valid(0x0800_0406_0007_0406));
    }
}
