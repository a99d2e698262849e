use super::*;
use crate::memory::guest::fake::FakeMemory;
use crate::x86::emulate::fake::FakeCpu;

const P: u64 = ENTRY_P;
const RW: u64 = ENTRY_RW;
const US: u64 = ENTRY_US;
const PS: u64 = ENTRY_PS;
const ALL: u64 = P | RW | US;

/// A cell with 64 KiB of RAM for tables; the first table of a walk is at 0x1000.
fn ram() -> FakeMemory {
    FakeMemory::new(0, 0x10000)
}

fn put(memory: &FakeMemory, table: u64, index: u64, entry: u64) {
    memory.write(Gpa::new(table + index * 8), &entry.to_le_bytes()).unwrap();
}

fn put32(memory: &FakeMemory, table: u64, index: u64, entry: u32) {
    memory.write(Gpa::new(table + index * 4), &entry.to_le_bytes()).unwrap();
}

fn error(result: Result<Gpa, TranslateError>) -> u32 {
    match result {
        Err(TranslateError::PageFault { error_code }) => error_code,
        other => panic!("expected a page fault: {other:?}"),
    }
}

fn go(cpu: &FakeCpu, memory: &FakeMemory, gva: u64, access: Access) -> Result<Gpa, TranslateError> {
    translate(cpu, memory, Gva::new(gva), access)
}

#[test]
fn without_paging_addresses_are_the_low_32_bits() {
    let cpu = FakeCpu::bits32();
    assert_eq!(go(&cpu, &ram(), 0x1_2345_6789, Access::Write), Ok(Gpa::new(0x2345_6789)));
}

#[test]
fn two_levels_with_4_kib_and_4_mib_pages() {
    let memory = ram();
    let mut cpu = FakeCpu::bits32();
    cpu.control = [CR0_PG | 1, 0, 0x1018, 0];
    put32(&memory, 0x1000, 0x300, 0x2000 | ALL as u32);
    put32(&memory, 0x2000, 5, 0xfee0_0000 | ALL as u32);
    assert_eq!(go(&cpu, &memory, 0xc000_5123, Access::Read), Ok(Gpa::new(0xfee0_0123)));
    // PSE-36: address bits 39:32 in bits 20:13.
    put32(&memory, 0x1000, 1, 0x0080_0000 | 0x12 << 13 | (ALL | PS) as u32);
    cpu.control[ControlRegister::Cr4 as usize] = CR4_PSE;
    assert_eq!(go(&cpu, &memory, 0x0061_2345, Access::Write), Ok(Gpa::new(0x12_00a1_2345)));
    put32(&memory, 0x1000, 1, 0x0080_0000 | 1 << 21 | (ALL | PS) as u32);
    assert_eq!(error(go(&cpu, &memory, 0x0061_2345, Access::Read)), ERROR_P | ERROR_RSVD);
    // Without CR4.PSE the bit is ignored and the entry points to a table.
    put32(&memory, 0x1000, 1, 0x3000 | (ALL | PS) as u32);
    put32(&memory, 0x3000, 0x212, 0x7000 | ALL as u32);
    cpu.control[ControlRegister::Cr4 as usize] = 0;
    assert_eq!(go(&cpu, &memory, 0x0061_2345, Access::Read), Ok(Gpa::new(0x7345)));
}

#[test]
fn pae_with_4_kib_and_2_mib_pages_and_reserved_bits() {
    let memory = ram();
    let mut cpu = FakeCpu::bits32();
    cpu.control = [CR0_PG | 1, 0, 0x1020, CR4_PAE];
    put(&memory, 0x1020, 3, 0x2000 | P);
    put(&memory, 0x2000, 1, 0x3000 | ALL);
    put(&memory, 0x3000, 0, 0x9_0000_0000 | ALL);
    put(&memory, 0x2000, 2, 0x7_0020_0000 | ALL | PS);
    assert_eq!(go(&cpu, &memory, 0xc020_0456, Access::Write), Ok(Gpa::new(0x9_0000_0456)));
    assert_eq!(go(&cpu, &memory, 0xc041_2345, Access::Write), Ok(Gpa::new(0x7_0021_2345)));
    assert_eq!(error(go(&cpu, &memory, 0x1000, Access::Write)), ERROR_W);
    put(&memory, 0x2000, 2, 0x7_0020_0000 | 1 << 13 | ALL | PS);
    assert_eq!(error(go(&cpu, &memory, 0xc041_2345, Access::Read)), ERROR_P | ERROR_RSVD);
    put(&memory, 0x3000, 0, 1 << 52 | ALL);
    assert_eq!(error(go(&cpu, &memory, 0xc020_0456, Access::Read)), ERROR_P | ERROR_RSVD);
    for bit in [1, 2, 5, 8, 63] {
        put(&memory, 0x1020, 3, 0x2000 | P | 1 << bit);
        assert_eq!(error(go(&cpu, &memory, 0xc020_0456, Access::Read)), ERROR_P | ERROR_RSVD, "bit {bit}");
    }
}

/// Four levels with the entry `leaf` at their end, and the address that they are for.
fn four_levels(leaf: u64) -> (FakeMemory, u64) {
    let memory = ram();
    put(&memory, 0x1000, 256, 0x2000 | ALL);
    put(&memory, 0x2000, 1, 0x3000 | ALL);
    put(&memory, 0x3000, 2, 0x4000 | ALL);
    put(&memory, 0x4000, 3, leaf);
    (memory, 0xffff_8000_4040_3abc)
}

#[test]
fn four_levels_with_all_page_sizes() {
    let (memory, gva) = four_levels(0xf_ffff_ffff_f000 | ALL);
    let cpu = FakeCpu::bits64(0x1fff);
    assert_eq!(go(&cpu, &memory, gva, Access::Write), Ok(Gpa::new(0xf_ffff_ffff_fabc)));
    put(&memory, 0x3000, 2, 0x80_0060_0000 | ALL | PS | 1 << 12);
    assert_eq!(go(&cpu, &memory, gva, Access::Write), Ok(Gpa::new(0x80_0060_3abc)));
    put(&memory, 0x3000, 2, 0x80_0060_0000 | ALL | PS | 1 << 20);
    assert_eq!(error(go(&cpu, &memory, gva, Access::Read)), ERROR_P | ERROR_RSVD);
    put(&memory, 0x2000, 1, 0x100_0000_0000 | ALL | PS);
    assert_eq!(go(&cpu, &memory, gva, Access::Write), Ok(Gpa::new(0x100_0040_3abc)));
    put(&memory, 0x2000, 1, 0x100_0000_0000 | ALL | PS | 1 << 29);
    assert_eq!(error(go(&cpu, &memory, gva, Access::Read)), ERROR_P | ERROR_RSVD);
    put(&memory, 0x1000, 256, 0x2000 | ALL | PS);
    assert_eq!(error(go(&cpu, &memory, gva, Access::Read)), ERROR_P | ERROR_RSVD);
    let bad = Gva::new(0x0000_8000_0000_0000);
    assert_eq!(translate(&cpu, &memory, bad, Access::Read), Err(TranslateError::NotCanonical { gva: bad }));
}

#[test]
fn five_levels_take_57_bits() {
    let (memory, gva) = four_levels(0x5000 | ALL);
    put(&memory, 0x6000, 0x1ff, 0x1000 | ALL);
    put(&memory, 0x6000, 1, 0x1000 | ALL);
    let mut cpu = FakeCpu::bits64(0x6000);
    cpu.control[ControlRegister::Cr4 as usize] |= CR4_LA57;
    assert_eq!(go(&cpu, &memory, gva, Access::Read), Ok(Gpa::new(0x5abc)));
    assert_eq!(go(&cpu, &memory, gva & 0xffff_ffff_ffff | 1 << 48, Access::Read), Ok(Gpa::new(0x5abc)));
    assert!(matches!(go(&cpu, &memory, 1 << 57, Access::Read), Err(TranslateError::NotCanonical { .. })));
}

#[test]
fn rights() {
    let (nx, wp, smep, smap) = (ENTRY_NX, CR0_WP, CR4_SMEP, CR4_SMAP);
    let (p, w, u, r, i) = (ERROR_P, ERROR_W, ERROR_U, ERROR_RSVD, ERROR_ID);
    use Access::{Execute, Read, Write};
    // leaf entry, CPL, CR0, CR4, EFER, RFLAGS.AC, access → error code
    let table = [
        (P, 0, wp, 0, 0, false, Read, None),
        (P, 0, wp, 0, 0, false, Write, Some(p | w)),
        (P, 0, 0, 0, 0, false, Write, None),
        (P | RW, 3, wp, 0, 0, false, Read, Some(p | u)),
        (P | US, 3, 0, 0, 0, false, Write, Some(p | w | u)),
        (ALL, 3, wp, 0, 0, false, Write, None),
        (ALL, 3, wp, smep | smap, 0, false, Execute, None),
        (0, 3, wp, 0, 0, false, Write, Some(w | u)),
        (0, 0, wp, 0, EFER_NXE, false, Execute, Some(i)),
        (0, 0, wp, 0, 0, false, Execute, Some(0)),
        (P | nx, 0, 0, 0, EFER_NXE, false, Execute, Some(p | i)),
        (P | nx, 0, 0, 0, EFER_NXE, false, Read, None),
        (P | nx, 0, 0, 0, 0, false, Read, Some(p | r)),
        (ALL, 0, 0, smep, 0, false, Execute, Some(p | i)),
        (P | RW, 0, 0, smep, 0, false, Execute, None),
        (ALL, 0, 0, smap, 0, false, Read, Some(p)),
        (ALL, 0, 0, smap, 0, false, Write, Some(p | w)),
        (ALL, 0, 0, smap, 0, true, Write, None),
        (P | RW, 0, 0, smap, 0, false, Write, None),
        (ALL, 0, 0, 0, 0, false, Execute, None),
    ];
    for (n, (leaf, cpl, cr0, cr4, efer, ac, access, expected)) in table.into_iter().enumerate() {
        let (memory, gva) = four_levels(0x5000 | leaf);
        let mut cpu = FakeCpu::bits64(0x1000);
        cpu.cpl = cpl;
        cpu.control[ControlRegister::Cr0 as usize] |= cr0;
        cpu.control[ControlRegister::Cr4 as usize] |= cr4;
        cpu.efer |= efer;
        cpu.rflags |= if ac { RFLAGS_AC } else { 0 };
        let expected = match expected {
            None => Ok(Gpa::new(0x5abc)),
            Some(error_code) => Err(TranslateError::PageFault { error_code }),
        };
        assert_eq!(go(&cpu, &memory, gva, access), expected, "row {n}");
    }
}

#[test]
fn rights_are_those_of_every_level() {
    for take in [RW, US] {
        let (memory, gva) = four_levels(0x5000 | ALL);
        put(&memory, 0x2000, 1, 0x3000 | (ALL & !take));
        let mut cpu = FakeCpu::bits64(0x1000);
        cpu.cpl = 3;
        assert_eq!(error(go(&cpu, &memory, gva, Access::Write)), ERROR_P | ERROR_W | ERROR_U);
    }
    let (memory, gva) = four_levels(0x5000 | ALL);
    put(&memory, 0x1000, 256, 0x2000 | ALL | ENTRY_NX);
    let mut cpu = FakeCpu::bits64(0x1000);
    cpu.efer |= EFER_NXE;
    assert_eq!(error(go(&cpu, &memory, gva, Access::Execute)), ERROR_P | ERROR_ID);
}

#[test]
fn a_table_outside_ram_is_told_apart() {
    let (memory, gva) = four_levels(0x5000 | ALL);
    put(&memory, 0x2000, 1, 0x8000_0000 | ALL);
    let cpu = FakeCpu::bits64(0x1000);
    assert_eq!(
        go(&cpu, &memory, gva, Access::Read),
        Err(TranslateError::Memory(GuestMemoryError { gpa: Gpa::new(0x8000_0010), len: 8 }))
    );
}

mod short_way {
    use super::*;
    use crate::x86::state::CR0_PE;
    use proptest::prelude::*;

    /// An entry for a table at `next`, with one bit that matters changed now and then.
    fn entry(next: u64) -> impl Strategy<Value = u64> {
        let odd = prop::sample::select(&[0, 1, 2, 7, 12, 13, 21, 29, 63][..]);
        prop_oneof![
            4 => Just(next | ALL),
            2 => odd.prop_map(move |bit| (next | ALL) ^ 1 << bit),
            1 => Just(next & !0x3fff_ffff | ALL | PS),
            1 => Just(next | P | RW),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(5_000))]

        /// The short way says what the walk says, or nothing.
        #[test]
        fn is_the_walk(entries in (entry(0x2000), entry(0x3000), entry(0x4000), entry(0x40_0000_5000)),
            user: bool, wp: bool, la57 in prop::bool::weighted(0.1), smep: bool, smap: bool, nxe: bool, ac: bool,
            lma in prop::bool::weighted(0.9),
            flip in prop::option::of(45u32..64),
            access in prop::sample::select(&[Access::Read, Access::Write, Access::Execute][..]))
        {
            let (memory, gva) = four_levels(entries.3);
            put(&memory, 0x1000, 256, entries.0);
            put(&memory, 0x2000, 1, entries.1);
            put(&memory, 0x3000, 2, entries.2);
            let gva = gva ^ flip.map_or(0, |bit| 1 << bit);
            let mut cpu = FakeCpu::bits64(0x1000);
            cpu.cpl = if user { 3 } else { 0 };
            let when = |on, bit| if on { bit } else { 0 };
            cpu.control[0] = CR0_PE | CR0_PG | when(wp, CR0_WP);
            cpu.control[ControlRegister::Cr4 as usize] |=
                when(smep, CR4_SMEP) | when(smap, CR4_SMAP) | when(la57, CR4_LA57);
            cpu.efer = when(lma, EFER_LMA) | when(nxe, EFER_NXE);
            cpu.rflags |= when(ac, RFLAGS_AC);
            let walked = walk(&cpu, &memory, Gva::new(gva), access);
            if let Some(gpa) = super::super::four_levels(&cpu, &memory, Gva::new(gva), access) {
                prop_assert_eq!(walked, Ok(gpa));
            } else {
                // What is given to the walk for its rights alone: read-only pages that the
                // supervisor may write, and pages of the user under SMEP or SMAP.
                let plain = lma && !la57 && (access != Access::Write || wp) && !(smep || smap);
                prop_assert!(!plain || walked.is_err());
            }
        }
    }
}
