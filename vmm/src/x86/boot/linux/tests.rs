use super::*;
use crate::memory::guest::{GuestMemory, fake::FakeMemory};
use crate::x86::boot::e820::{E820Entry, E820Kind};
use crate::x86::boot::plan as plan_any;
use crate::x86::boot::tests::{MIB, NOTHING, Registers, bytes, loaded, map, put};
use crate::x86::state::{ControlRegister, CpuState as _, Gpr, Segment, SegmentName};
use proptest::prelude::*;
use std::string::ToString;
use std::vec::Vec;

/// A bzImage with two setup sectors and a protected-mode part of `payload` bytes, a
/// multiple of 16.
pub(in crate::x86::boot) fn image(payload: usize) -> Vec<u8> {
    let mut file: Vec<u8> = (0..=250).cycle().take(3 * 512 + payload).collect();
    put(&mut file, 0x1f1, &[2]);
    put(&mut file, 0x1f4, &u32::try_from(payload / 16).unwrap().to_le_bytes());
    put(&mut file, 0x1fe, &[0x55, 0xaa, 0xeb, 0x6a]);
    put(&mut file, 0x202, b"HdrS\x0f\x02");
    put(&mut file, 0x211, &[1]);
    put(&mut file, 0x22c, &0x7fff_ffff_u32.to_le_bytes());
    put(&mut file, 0x230, &0x20_0000_u32.to_le_bytes());
    put(&mut file, 0x234, &[1]);
    put(&mut file, 0x236, &[1, 0]);
    put(&mut file, 0x238, &2047_u32.to_le_bytes());
    put(&mut file, 0x258, &(4 * MIB).to_le_bytes());
    put(&mut file, 0x260, &0x10_0000_u32.to_le_bytes());
    file
}

fn parse(file: &[u8]) -> Result<Header, BootError> {
    Header::parse(file.first_chunk().unwrap())
}

/// Where kernel and initrd go.
fn places(file: &[u8], map: &[E820Entry], initrd: Option<u64>) -> Result<Vec<u64>, BootError> {
    let mut plan = plan_any(&file, &Handover { map, initrd, ..NOTHING })?;
    Ok(std::iter::from_fn(|| plan.next_piece(u64::MAX)).map(|piece| piece.to.raw()).collect())
}

#[test]
fn header_fields_are_read_where_the_protocol_has_them() {
    let expected = Header {
        setup_size: 3 * 512,
        payload_size: 0x1000,
        relocatable: true,
        kernel_alignment: 0x20_0000,
        pref_address: Gpa::new(4 * MIB),
        init_size: 0x10_0000,
        cmdline_size: 2047,
        initrd_limit: 0x8000_0000,
    };
    assert_eq!(parse(&image(0x1000)), Ok(expected));
    let mut above = image(0x1000);
    put(&mut above, 0x236, &[3]);
    assert_eq!(parse(&above).unwrap().initrd_limit, 1 << 32);
    let mut old = image(0x1000);
    put(&mut old, 0x1f1, &[0]);
    assert_eq!(parse(&old).unwrap().setup_size, 5 * 512);
}

#[test]
fn each_unusable_field_is_named_with_its_value() {
    let cases: [(usize, &[u8], &str, u64); 9] = [
        (0x206, &[0x0b, 2], "version", 0x20b),
        (0x211, &[0x80], "loadflags", 0x80),
        (0x236, &[2, 0], "xloadflags", 2),
        (0x1f1, &[0x80], "setup_sects", 0x80),
        (0x1f4, &[0x20, 0, 0, 0], "syssize", 0x20),
        (0x230, &[0, 0, 0x30, 0], "kernel_alignment", 0x30_0000),
        (0x230, &[0; 4], "kernel_alignment", 0),
        (0x260, &[0xff, 0xf, 0, 0], "init_size", 0xfff),
        (0x258, &[0, 0x10, 0, 0], "pref_address", 0x1000),
    ];
    for (offset, with, name, number) in cases {
        let mut file = image(0x1000);
        put(&mut file, offset, with);
        match places(&file, &map(), None) {
            Err(BootError::Field { field, value, .. }) => assert_eq!((field, value), (name, number)),
            other => panic!("{name}: {other:?}"),
        }
    }
    let mut old = image(0x1000);
    put(&mut old, 0x206, &[0x0b, 2]);
    assert_eq!(
        parse(&old).unwrap_err().to_string(),
        "kernel: field version of the setup header is 0x20b; allowed: 0x20c (protocol 2.12) or later"
    );
}

#[test]
fn without_its_magic_numbers_it_is_no_bzimage() {
    for offset in [0x1fe, 0x202] {
        let mut file = image(0x1000);
        put(&mut file, offset, &[0]);
        assert_eq!(places(&file, &map(), None), Err(BootError::Unknown));
    }
    assert_eq!(places(&image(0x1000)[..0x28f], &map(), None), Err(BootError::Unknown));
}

#[test]
fn a_kernel_goes_where_it_likes_to_be_or_else_to_the_lowest_aligned_place() {
    let file = image(0x1000);
    assert_eq!(places(&file, &map(), None), Ok([4 * MIB].to_vec()));

    let mut map = map();
    map.push(E820Entry::new(5 * MIB - 1, 5 * MIB, E820Kind::RESERVED));
    assert_eq!(places(&file, &map, None), Ok([2 * MIB].to_vec()));

    let mut fixed = file.clone();
    put(&mut fixed, 0x234, &[0]);
    let error = places(&fixed, &map, None).unwrap_err();
    assert!(matches!(error, BootError::NoRoom { what: "kernel", size: MIB, .. }), "{error}");

    // 1 MiB and more are free, but no aligned place of the size.
    map.push(E820Entry::new(2 * MIB, 16 * MIB, E820Kind::RESERVED));
    let error = places(&file, &map, None).unwrap_err();
    assert!(matches!(error, BootError::NoRoom { what: "kernel", .. }), "{error}");
}

#[test]
fn an_initrd_goes_as_high_as_the_kernel_reaches() {
    let mut file = image(0x1000);
    assert_eq!(places(&file, &map(), Some(0x1001)).unwrap()[1], 16 * MIB - 0x2000);

    put(&mut file, 0x22c, &0x7f_ffff_u32.to_le_bytes());
    assert_eq!(places(&file, &map(), Some(0x1000)).unwrap()[1], 8 * MIB - 0x1000);
    let error = places(&file, &map(), Some(16 * MIB)).unwrap_err();
    assert!(matches!(error, BootError::NoRoom { what: "initrd", .. }), "{error}");
}

#[test]
fn a_file_without_all_of_its_kernel_is_refused() {
    let file = image(0x1000);
    let short = places(&file[..file.len() - 1], &map(), None).unwrap_err();
    assert_eq!(short, BootError::Truncated { have: 0x15ff, need: 0x1600 });
}

proptest! {
    #[test]
    fn pieces_of_any_size_give_the_same_memory(sizes in proptest::collection::vec(1_u64..900, 1..20), tail in 0_usize..40) {
        let mut file = image(0x800);
        file.extend(std::iter::repeat_n(0xee, tail));
        let memory = FakeMemory::new(0, 16 << 20);
        let mut plan = plan_any(&&file[..], &Handover { map: &map(), ..NOTHING }).unwrap();
        for size in sizes.iter().cycle() {
            let Some(piece) = plan.next_piece(*size) else { break };
            prop_assert!((1..=*size).contains(&piece.len));
            let start = usize::try_from(piece.offset).unwrap();
            memory.write(piece.to, &file[start..start + usize::try_from(piece.len).unwrap()]).unwrap();
        }
        prop_assert_eq!(bytes(&memory, 4 * MIB, 0x800), &file[0x600..0xe00]);
        prop_assert_eq!(bytes(&memory, 4 * MIB + 0x800, tail), std::vec![0; tail]);
    }
}

#[test]
fn boot_parameters_have_what_the_kernel_is_told() {
    let file = image(0x1000);
    let handover = Handover { cmdline: b"console=ttyS0", rsdp: Some(Gpa::new(0xe_0000)), ..NOTHING };
    let (entry, memory) = loaded(&file, Some(b"1234567"), &handover).unwrap();
    let mut cpu = Registers::default();
    entry.apply(&mut cpu);
    assert_eq!(cpu.rip(), 4 * MIB + 0x200);

    let page = bytes(&memory, cpu.gpr(Gpr::Rsi), 4096);
    let u32_at = |offset: usize| u32::from_le_bytes(page[offset..offset + 4].try_into().unwrap());
    let u64_at = |offset: usize| u64::from_le_bytes(page[offset..offset + 8].try_into().unwrap());
    assert_eq!(u64_at(0x70), 0xe_0000);
    assert_eq!((u32_at(0x218), u32_at(0xc0)), ((16 << 20) - 0x1000, 0));
    assert_eq!((u32_at(0x21c), u32_at(0xc4)), (7, 0));
    assert_eq!(bytes(&memory, u32_at(0x218).into(), 8), b"1234567\0");
    assert_eq!(page[0x210], 0xff);
    assert_eq!(page[0x211], 1);
    assert_eq!(page[0x1f1..0x210], file[0x1f1..0x210]);
    assert_eq!(u32_at(0x214), 4 << 20);
    assert_eq!(u64_at(0x258), 4 * MIB);
    // The header of this file ends at 0x202 + 0x6a; then nothing up to the map.
    assert_eq!(page[0x26b], file[0x26b]);
    assert!(page[0x26c..0x2d0].iter().all(|byte| *byte == 0));
    assert!(page[..0x70].iter().all(|byte| *byte == 0));
    assert_eq!(page[0x1e8], 3);
    assert_eq!((u64_at(0x2d0), u64_at(0x2d8), u32_at(0x2e0)), (0, 0xa_0000, 1));
    assert_eq!((u64_at(0x2e4), u64_at(0x2ec), u32_at(0x2f4)), (0xe_0000, 0x2_0000, 2));
    assert_eq!(bytes(&memory, u64::from(u32_at(0x228)), 14), b"console=ttyS0\0");
}

#[test]
fn bad_handovers_are_refused() {
    let said = |handover: Handover<'_>| plan_any(&&image(0x1000)[..], &handover).map(|_| ());
    let line = [b'x'; 2048];
    let good = Handover { map: &map(), cmdline: &line[..2047], ..NOTHING };
    assert_eq!(said(good), Ok(()));
    let long = Handover { cmdline: &line, ..good };
    assert_eq!(said(long), Err(BootError::CommandLine { length: 2048, max: 2047 }));
    let zero = Handover { cmdline: b"a\0b", ..good };
    assert_eq!(said(zero), Err(BootError::CommandLineZero { at: 1 }));
    let mut entries = map();
    entries.resize(129, E820Entry::new(0, 1, E820Kind::RESERVED));
    assert_eq!(said(Handover { map: &entries[..128], ..good }), Ok(()));
    assert_eq!(said(Handover { map: &entries, ..good }), Err(BootError::MapEntries { entries: 129 }));
}

/// What the descriptor at `selector` of the GDT at `gdt` says, as the CPU would load it.
fn load_segment(memory: &FakeMemory, gdt: u64, selector: u16) -> Segment {
    let d = memory.read_u64(Gpa::new(gdt + u64::from(selector))).unwrap();
    let attributes = u16::try_from(d >> 40 & 0xff | (d >> 52 & 0xf) << 8).unwrap();
    let limit = u32::try_from(d & 0xffff | (d >> 48 & 0xf) << 16).unwrap();
    let limit = if attributes & 1 << 11 != 0 { limit << 12 | 0xfff } else { limit };
    let mut base = d >> 16 & 0xff_ffff | d >> 56 << 24;
    // S = 0: a system descriptor, whose base goes on in the next place.
    if attributes & 1 << 4 == 0 {
        base |= memory.read_u64(Gpa::new(gdt + u64::from(selector) + 8)).unwrap() << 32;
    }
    Segment { selector, attributes, limit, base }
}

/// A walk of 4-level tables with 2 MiB pages.
fn walk(memory: &FakeMemory, root: u64, address: u64) -> Option<u64> {
    let entry = |table: u64, shift: u32| {
        let entry = memory.read_u64(Gpa::new((table & !0xfff) + (address >> shift & 0x1ff) * 8)).unwrap();
        (entry & 0b11 == 0b11).then_some(entry)
    };
    let directory = entry(entry(entry(root, 39)?, 30)?, 21)?;
    assert_ne!(directory & 1 << 7, 0, "a large page");
    Some(directory & !0x1f_ffff | address & 0x1f_ffff)
}

#[test]
fn first_registers_are_what_the_64_bit_protocol_and_entry_checks_ask_for() {
    let (entry, memory) = loaded(&image(0x1000), None, &NOTHING).unwrap();
    let mut cpu = Registers::default();
    entry.apply(&mut cpu);

    // boot.rst: 64-bit mode with paging, interrupts off, RSI the boot parameters, CS
    // __BOOT_CS execute/read, the others __BOOT_DS read/write, flat.
    assert_eq!(cpu.rflags() & 1 << 9, 0);
    assert_eq!(cpu.efer(), 0x500);
    assert_eq!(cpu.control(ControlRegister::Cr0) & 0x8000_0001, 0x8000_0001);
    assert_eq!(cpu.control(ControlRegister::Cr4), 1 << 5);
    assert_eq!(cpu.rip(), 4 * MIB + 0x200);
    assert_eq!(cpu.cpl(), 0);
    let gdt = cpu.segment(SegmentName::Gdtr).base;
    let code = cpu.segment(SegmentName::Cs);
    assert_eq!((code.selector, code.limit, code.base), (0x10, u32::MAX, 0));
    assert!(code.is_long() && !code.is_big());
    for name in [SegmentName::Ds, SegmentName::Es, SegmentName::Fs, SegmentName::Gs, SegmentName::Ss] {
        let data = cpu.segment(name);
        assert_eq!((data.selector, data.limit, data.base), (0x18, u32::MAX, 0));
        assert_eq!(data, load_segment(&memory, gdt, data.selector));
    }
    assert_eq!(code, load_segment(&memory, gdt, code.selector));
    // Intel SDM vol. 3, 27.3.1.2: TR is a busy 64-bit TSS, and LDTR may be unusable.
    let task = cpu.segment(SegmentName::Tr);
    assert_eq!((task.attributes, task.limit), (0x8b, 0x67));
    assert_eq!(task, load_segment(&memory, gdt, task.selector));
    assert_eq!(cpu.segment(SegmentName::Gdtr).limit, u32::from(task.selector) + 15);
    assert_eq!(cpu.segment(SegmentName::Ldtr).attributes, 0);

    let root = cpu.control(ControlRegister::Cr3);
    for address in [0, cpu.rip(), cpu.gpr(Gpr::Rsi), 0x7fff_f123, 0xffff_ffff] {
        assert_eq!(walk(&memory, root, address), Some(address));
    }
    assert_eq!(walk(&memory, root, 1 << 32), None);
    assert_eq!(walk(&memory, root, 1 << 39), None);
}
