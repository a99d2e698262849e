use super::rules::{RULES, Shown};
use super::*;
use proptest::prelude::*;
use std::format;

const ROOT: CpuidView = CpuidView { topology: Topology::Machine, apic_id: 5, cr4: 0, pv_eoi: false };
const GUEST: CpuidView = CpuidView { topology: Topology::Flat { vcpus: 3 }, apic_id: 2, ..ROOT };

/// A machine that answers all-ones, but for its vendor and last leaves.
fn full(vendor: [u8; 12]) -> impl Fn(u32, u32) -> Registers {
    let [b, c, d] = words(vendor);
    move |leaf, _| match leaf {
        0 => [0x24, b, d, c],
        0x8000_0000 => [0x8000_0026, b, d, c],
        _ => [u32::MAX; 4],
    }
}

const INTEL: [u8; 12] = *b"GenuineIntel";
const AMD: [u8; 12] = *b"AuthenticAMD";

fn has(register: u32, bit: u32) -> bool {
    register & 1 << bit != 0
}

#[test]
fn rules_are_sorted_and_do_not_overlap() {
    let key = |rule: &super::rules::Rule| (rule.leaves.0, rule.subleaves.0);
    for pair in RULES.windows(2) {
        assert!(key(&pair[0]) < key(&pair[1]), "{:x?}", pair[1].leaves);
        if pair[0].leaves == pair[1].leaves {
            assert!(pair[0].subleaves.1 < pair[1].subleaves.0, "{:x?}", pair[1].leaves);
        } else {
            assert!(pair[0].leaves.1 < pair[1].leaves.0, "{:x?}", pair[1].leaves);
        }
    }
}

/// What no cell may see, whatever its CPU has: leaf, subleaf, register, bits.
const HIDDEN: &[(u32, u32, usize, &[u32])] = &[
    // DTES64, MONITOR, DS_CPL, VMX, SMX, EIST, TM2, SDBG, xTPR, PDCM, DCA.
    (1, 0, 2, &[2, 3, 4, 5, 6, 7, 8, 11, 14, 15, 18]),
    // MCE, MCA, PSN, DS, ACPI, TM, PBE.
    (1, 0, 3, &[7, 14, 18, 21, 22, 29, 31]),
    // TSC_ADJUST, SGX, HLE, RTM, RDT-M, MPX, RDT-A, PT.
    (7, 0, 1, &[1, 2, 4, 11, 12, 14, 15, 25]),
    // WAITPKG, CET_SS, TME, key locker, bus lock, ENQCMD, SGX_LC, PKS.
    (7, 0, 2, &[5, 7, 13, 23, 24, 29, 30, 31]),
    // UINTR, SRBDS_CTRL, hybrid, PCONFIG, LBR, CET_IBT, AMX, CORE_CAPABILITIES.
    (7, 0, 3, &[5, 9, 15, 16, 18, 19, 20, 22, 24, 25, 30]),
    // HRESET, LAM.
    (7, 1, 0, &[22, 26]),
    // XFD; and all supervisor states.
    (0xd, 1, 0, &[4]),
    (0xd, 1, 2, &[8, 10, 11, 12, 13, 14, 15, 16]),
    // SVM, ExtApic, OSVW, IBS, SKINIT, WDT, LWP, TCE, counters, breakpoint extension, MONITORX.
    (0x8000_0001, 0, 2, &[2, 3, 9, 10, 12, 13, 15, 17, 19, 23, 24, 26, 27, 28, 29]),
    // MCE, MCA, FFXSR.
    (0x8000_0001, 0, 3, &[7, 14, 25]),
    // RAS; power, other than the TSC.
    (0x8000_0007, 0, 1, &[0, 1, 2, 3]),
    (0x8000_0007, 0, 3, &[0, 1, 2, 7, 9, 10]),
    // INVLPGB, RDPRU, MCOMMIT, VIRT_SSBD, CPPC.
    (0x8000_0008, 0, 1, &[1, 3, 4, 8, 25, 27]),
    // UAI, AutomaticIBRS.
    (0x8000_0021, 0, 0, &[7, 8]),
];

#[test]
fn what_cells_have_no_registers_for_is_hidden_from_both_kinds_on_both_vendors() {
    for (view, vendor) in [(ROOT, INTEL), (ROOT, AMD), (GUEST, INTEL), (GUEST, AMD)] {
        for (leaf, subleaf, register, bits) in HIDDEN {
            let shown = cpuid(*leaf, *subleaf, &view, &full(vendor));
            for bit in *bits {
                assert!(!has(shown[*register], *bit), "{leaf:#x}.{subleaf}[{register}] bit {bit}");
            }
        }
        for leaf in [3, 5, 9, 0xa, 0xf, 0x10, 0x12, 0x14, 0x15, 0x8000_000a, 0x8000_001b, 0x8000_001f] {
            assert_eq!(cpuid(leaf, 0, &view, &full(vendor)), [0; 4], "{leaf:#x}");
        }
    }
}

#[test]
fn what_is_emulated_is_shown_on_a_machine_without_it() {
    let bare = |leaf, _| match leaf {
        0 => [0xd, 0, 0, 0],
        0x8000_0000 => [0x8000_0008, 0, 0, 0],
        _ => [0; 4],
    };
    for view in [ROOT, GUEST] {
        let [_, _, ecx, edx] = cpuid(1, 0, &view, &bare);
        assert!(has(ecx, 21) && has(ecx, 24) && has(ecx, 31), "x2APIC, TSC_DEADLINE, HYPERVISOR");
        assert!(has(edx, 9), "APIC");
        assert_eq!(cpuid(6, 0, &view, &bare), [4, 0, 0, 0], "ARAT");
        assert_eq!(cpuid(0x8000_0007, 0, &view, &bare), [0, 0, 0, 0x100], "TscInvariant");
    }
}

#[test]
fn bits_that_mirror_cr4_need_the_feature_too() {
    let on = CpuidView { cr4: 1 << 18 | 1 << 22, ..ROOT };
    for (view, mirrored) in [(ROOT, false), (on, true)] {
        assert_eq!(has(cpuid(1, 0, &view, &full(AMD))[2], 27), mirrored, "OSXSAVE");
        assert_eq!(has(cpuid(7, 0, &view, &full(AMD))[2], 4), mirrored, "OSPKE");
    }
    let none = |leaf, _| if leaf == 0 { [0xd, 0, 0, 0] } else { [0; 4] };
    assert!(!has(cpuid(1, 0, &on, &none)[2], 27));
    assert!(!has(cpuid(7, 0, &on, &none)[2], 4));
}

#[test]
fn the_hypervisor_says_kvm_and_bulkhead() {
    let text = |[_, b, c, d]: Registers| [b, c, d].map(u32::to_le_bytes).concat();
    let kvm = cpuid(0x4000_0000, 0, &GUEST, &full(INTEL));
    assert_eq!((kvm[0], &text(kvm)[..]), (0x4000_0001, &b"KVMKVMKVM\0\0\0"[..]));
    assert_eq!(cpuid(0x4000_0001, 0, &GUEST, &full(INTEL)), [0x100_0009, 0, 0, 0]);
    let eoi = CpuidView { pv_eoi: true, ..GUEST };
    assert_eq!(cpuid(0x4000_0001, 0, &eoi, &full(INTEL)), [0x100_0049, 0, 0, 0]);
    let own = cpuid(0x4000_0100, 0, &GUEST, &full(INTEL));
    assert_eq!((own[0], &text(own)[..]), (0x4000_0101, &b"BulkheadHV\0\0"[..]));
    assert_eq!(format!("{}", cpuid(0x4000_0101, 0, &GUEST, &full(INTEL))[0]), "256", "0.1.0");
    for leaf in [0x4000_0002, 0x4000_0010, 0x4000_0102, 0x4000_0200, 0x4fff_ffff] {
        assert_eq!(cpuid(leaf, 0, &GUEST, &full(INTEL)), [0; 4]);
    }
}

#[test]
fn leaves_behind_the_last_answer_as_the_vendors_do() {
    let machine = |vendor: [u8; 12]| {
        let [b, c, d] = words(vendor);
        move |leaf, _| match leaf {
            0 => [2, b, d, c],
            0x8000_0000 => [0x8000_0004, b, d, c],
            leaf => [leaf; 4],
        }
    };
    for leaf in [3, 0x18, 0x3fff_ffff, 0x5000_0000, 0x8000_0005, 0xc000_0000, u32::MAX] {
        assert_eq!(cpuid(leaf, 0, &ROOT, &machine(INTEL)), [2; 4], "{leaf:#x}");
        assert_eq!(cpuid(leaf, 0, &ROOT, &machine(AMD)), [0; 4], "{leaf:#x}");
    }
}

#[test]
fn the_root_cell_sees_the_machines_topology_and_a_guest_cell_a_flat_one() {
    let machine = |leaf, subleaf| match leaf {
        0 => full(AMD)(0, 0),
        0x8000_0000 => full(AMD)(0x8000_0000, 0),
        1 => [0, 0x0910_0800, 0, 1 << 28],
        // A cache of level 1 shared by 2, of level 3 shared by 16, of 64 cores.
        4 | 0x8000_001d if subleaf == 3 => [63 << 26 | 15 << 14 | 3 << 5 | 3, 1, 2, 3],
        4 | 0x8000_001d => [63 << 26 | 1 << 14 | 1 << 5 | 1, 1, 2, 3],
        0xb => [subleaf, 16, 0x100, 5],
        0x8000_0001 => [0, 0, 1 << 1 | 1 << 22, 0],
        0x8000_0008 => [0x30_3028, 0, 0x2_700f, 0],
        0x8000_001e => [5, 6, 7, 0],
        _ => [0; 4],
    };
    let root = |leaf, subleaf| cpuid(leaf, subleaf, &ROOT, &machine);
    assert_eq!(root(1, 0)[1], 0x0510_0800);
    assert_eq!(root(0xb, 1), [1, 16, 0x100, 5]);
    for (leaf, subleaf) in [(4, 0), (4, 3), (0x8000_001d, 3), (0x8000_001e, 0)] {
        assert_eq!(root(leaf, subleaf), machine(leaf, subleaf));
    }
    assert_eq!(root(0x8000_0008, 0), [0x3028, 0, 0x700f, 0]);

    let guest = |leaf, subleaf| cpuid(leaf, subleaf, &GUEST, &machine);
    assert_eq!(guest(1, 0)[1], 0x0203_0800);
    assert!(has(guest(1, 0)[3], 28), "HTT");
    // Three vCPUs span four APIC IDs.
    assert_eq!(guest(4, 0), [3 << 26 | 1 << 5 | 1, 1, 2, 3]);
    assert_eq!(guest(4, 3), [3 << 26 | 3 << 14 | 3 << 5 | 3, 1, 2, 3]);
    assert_eq!(guest(0x8000_001d, 3), [3 << 14 | 3 << 5 | 3, 1, 2, 3]);
    assert_eq!(guest(0xb, 0), [0, 1, 0x100, 2]);
    assert_eq!(guest(0xb, 1), [2, 3, 0x201, 2]);
    assert_eq!(guest(0xb, 2), [0, 0, 2, 2]);
    assert_eq!(guest(0x8000_0008, 0), [0x3028, 0, 0x2002, 0]);
    assert_eq!(guest(0x8000_001e, 0), [2, 2, 0, 0]);
    assert!(has(guest(0x8000_0001, 0)[2], 1), "CmpLegacy");

    let single = CpuidView { topology: Topology::Flat { vcpus: 1 }, apic_id: 0, ..GUEST };
    let single = |leaf, subleaf| cpuid(leaf, subleaf, &single, &machine);
    assert!(!has(single(1, 0)[3], 28) && !has(single(0x8000_0001, 0)[2], 1));
    assert_eq!(single(0xb, 1), [0, 1, 0x201, 0]);
}

#[test]
fn xsave_states_are_those_that_xsetbv_accepts() {
    let machine = full(INTEL);
    let [low, _, _, high] = cpuid(0xd, 0, &GUEST, &machine);
    assert_eq!(u64::from(low) | u64::from(high) << 32, XCR0_ALLOWED);
    for state in 2..64 {
        let shown = cpuid(0xd, state, &GUEST, &machine) != [0; 4];
        assert_eq!(shown, XCR0_ALLOWED & 1 << state != 0, "{state}");
    }
    assert_eq!(cpuid(0xd, u32::MAX, &GUEST, &machine), [0; 4]);
}

#[test]
fn the_table_names_every_leaf_and_feature() {
    let table = format!("{Table}");
    for rule in RULES {
        assert!(table.contains(&format!("| {:#x}", rule.leaves.0)));
    }
    assert!(table.contains("| 0x5 | any | MONITOR | nothing | "));
    assert!(table.contains("| 7, 2 | EDX: PSFD IPRED_CTRL RRSBA_CTRL "));
    assert!(table.lines().filter(|line| !line.is_empty()).all(|l| l.starts_with("| ") && l.ends_with(" |")));
}

proptest! {
    #[test]
    fn a_machine_never_adds_what_nobody_has_looked_at(
        answer in any::<[u32; 4]>(), vcpus in 1_u32.., apic_id: u32, cr4: u64, subleaf: u32,
    ) {
        let machine = |leaf, _| match leaf {
            0 => [0x24, 0, 0, 0],
            0x8000_0000 => [0x8000_0026, 0, 0, 0],
            _ => answer,
        };
        for topology in [Topology::Machine, Topology::Flat { vcpus }] {
            let view = CpuidView { topology, apic_id, cr4, pv_eoi: false };
            for leaf in (0..=0x25).chain(0x4000_0000..=0x4000_0110).chain(0x8000_0000..=0x8000_0027) {
                let shown = cpuid(leaf, subleaf, &view, &machine);
                match rules::rule(leaf, subleaf).map(|rule| rule.shown) {
                    None | Some(Shown::Nothing) => prop_assert_eq!(shown, [0; 4]),
                    Some(Shown::Host) => prop_assert_eq!(shown, machine(leaf, subleaf)),
                    Some(Shown::Features(features)) => prop_assert_eq!(shown, features.select(answer)),
                    // Has tests of its own; no value must be out of its range.
                    Some(Shown::Computed(_)) => {}
                }
            }
        }
    }
}
