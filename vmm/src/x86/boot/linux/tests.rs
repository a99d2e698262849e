use super::*;
use crate::memory::address::Gpa;
use crate::memory::guest::{GuestMemory, fake::FakeMemory};
use crate::x86::boot::e820::{E820Entry, E820Kind, FreeSpace};
use crate::x86::state::{ControlRegister, CpuState, Gpr, Injection, Segment, SegmentName};
use proptest::prelude::*;
use std::collections::HashMap;
use std::string::ToString;
use std::vec::Vec;

const MIB: u64 = 1 << 20;

/// A bzImage with two setup sectors and a protected-mode part of `payload` bytes, a
/// multiple of 16.
fn image(payload: usize) -> Vec<u8> {
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

fn put(file: &mut [u8], offset: usize, bytes: &[u8]) {
    file[offset..offset + bytes.len()].copy_from_slice(bytes);
}

fn map() -> Vec<E820Entry> {
    [
        E820Entry::new(0, 0xa_0000, E820Kind::RAM),
        E820Entry::new(0xe_0000, MIB, E820Kind::RESERVED),
        E820Entry::new(MIB, 16 * MIB, E820Kind::RAM),
    ]
    .to_vec()
}

fn loaded(file: &[u8], space: FreeSpace, memory: &FakeMemory) -> Result<LoadedKernel, LinuxError> {
    let mut loader = KernelLoader::new(file.len() as u64, space);
    loader.data(file, memory)?;
    loader.finish()
}

fn bytes(memory: &FakeMemory, gpa: u64, len: usize) -> Vec<u8> {
    let mut bytes = std::vec![0; len];
    memory.read(Gpa::new(gpa), &mut bytes).unwrap();
    bytes
}

#[test]
fn header_fields_are_read_where_the_protocol_has_them() {
    let header = Header::parse(&image(0x1000)).unwrap();
    assert_eq!(
        header,
        Header {
            version: 0x20f,
            setup_size: 3 * 512,
            payload_size: 0x1000,
            relocatable: true,
            kernel_alignment: 0x20_0000,
            pref_address: Gpa::new(4 * MIB),
            init_size: 0x10_0000,
            cmdline_size: 2047,
            initrd_limit: 0x8000_0000,
        }
    );
    let mut above = image(0x1000);
    put(&mut above, 0x236, &[3]);
    assert_eq!(Header::parse(&above).unwrap().initrd_limit, 1 << 32);
    let mut old = image(0x1000);
    put(&mut old, 0x1f1, &[0]);
    assert_eq!(Header::parse(&old).unwrap().setup_size, 5 * 512);
}

#[test]
fn each_unusable_field_is_named_with_its_value() {
    let cases: [(usize, &[u8], &str, u64); 11] = [
        (0x1fe, &[0, 0], "boot_flag", 0),
        (0x202, b"ElfS", "header", 0x5366_6c45),
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
        match Header::parse(&file) {
            Err(LinuxError::Field { field, value, .. }) => assert_eq!((field, value), (name, number)),
            other => panic!("{name}: {other:?}"),
        }
    }
    let error = LinuxError::Field { field: "version", value: 0x20b, allowed: "0x20c or later" };
    assert_eq!(
        error.to_string(),
        "kernel: field version of the setup header is 0x20b; allowed: 0x20c or later"
    );
}

#[test]
fn a_kernel_goes_where_it_likes_to_be_or_else_to_the_lowest_aligned_place() {
    let memory = FakeMemory::new(0, 16 << 20);
    let file = image(0x1000);
    assert_eq!(loaded(&file, FreeSpace::new(&map()), &memory).unwrap().address(), Gpa::new(4 * MIB));

    let mut space = FreeSpace::new(&map());
    space.remove(Gpa::new(5 * MIB - 1), 1);
    assert_eq!(loaded(&file, space.clone(), &memory).unwrap().address(), Gpa::new(2 * MIB));

    let mut fixed = file.clone();
    put(&mut fixed, 0x234, &[0]);
    let error = loaded(&fixed, space.clone(), &memory).unwrap_err();
    assert!(matches!(error, LinuxError::NoRoom { what: "kernel", size: MIB, .. }), "{error}");

    // 1 MiB and more are free, but no aligned place of the size.
    space.remove(Gpa::new(2 * MIB), 14 * MIB);
    let error = loaded(&file, space, &memory).unwrap_err();
    assert!(matches!(error, LinuxError::NoRoom { what: "kernel", .. }), "{error}");
}

#[test]
fn an_initrd_goes_as_high_as_the_kernel_reaches() {
    let memory = FakeMemory::new(0, 16 << 20);
    let mut file = image(0x1000);
    let mut kernel = loaded(&file, FreeSpace::new(&map()), &memory).unwrap();
    assert_eq!(kernel.place_initrd(0x1001).unwrap(), Gpa::new(16 * MIB - 0x2000));
    assert_eq!(kernel.place_initrd(0x1000).unwrap(), Gpa::new(16 * MIB - 0x3000));

    put(&mut file, 0x22c, &0x7f_ffff_u32.to_le_bytes());
    let mut kernel = loaded(&file, FreeSpace::new(&map()), &memory).unwrap();
    assert_eq!(kernel.place_initrd(0x1000).unwrap(), Gpa::new(8 * MIB - 0x1000));
    let error = kernel.place_initrd(16 * MIB).unwrap_err();
    assert!(matches!(error, LinuxError::NoRoom { what: "initrd", .. }), "{error}");
}

#[test]
fn a_file_of_another_length_is_refused() {
    let memory = FakeMemory::new(0, 16 << 20);
    let file = image(0x1000);
    let space = || FreeSpace::new(&map());
    let short = loaded(&file[..file.len() - 1], space(), &memory).unwrap_err();
    assert_eq!(short, LinuxError::Truncated { have: 0x15ff, need: 0x1600 });
    let tiny = loaded(&file[..0x28f], space(), &memory).unwrap_err();
    assert_eq!(tiny, LinuxError::Truncated { have: 0x28f, need: 0x290 });

    let mut loader = KernelLoader::new(0x1600, space());
    loader.data(&file[..0x1500], &memory).unwrap();
    assert_eq!(loader.finish().unwrap_err(), LinuxError::Truncated { have: 0x1500, need: 0x1600 });

    let mut loader = KernelLoader::new(0x1600, space());
    loader.data(&file, &memory).unwrap();
    let excess = LinuxError::Excess { have: 0x1601, announced: 0x1600 };
    assert_eq!(loader.data(&[0], &memory).unwrap_err(), excess);
}

proptest! {
    #[test]
    fn pieces_of_any_size_give_the_same_memory(sizes in proptest::collection::vec(1_usize..900, 1..20), tail in 0_usize..40) {
        let mut file = image(0x800);
        file.extend(std::iter::repeat_n(0xee, tail));
        let memory = FakeMemory::new(0, 16 << 20);
        let mut loader = KernelLoader::new(file.len() as u64, FreeSpace::new(&map()));
        let mut rest = &file[..];
        for size in sizes.iter().cycle() {
            let (piece, next) = rest.split_at(rest.len().min(*size));
            loader.data(piece, &memory).unwrap();
            rest = next;
            if rest.is_empty() {
                break;
            }
        }
        let kernel = loader.finish().unwrap();
        prop_assert_eq!(bytes(&memory, kernel.address().raw(), 0x800), &file[0x600..0xe00]);
        prop_assert_eq!(bytes(&memory, kernel.address().raw() + 0x800, tail), std::vec![0; tail]);
    }
}

#[test]
fn boot_parameters_have_what_the_kernel_is_told() {
    let memory = FakeMemory::new(0, 16 << 20);
    let file = image(0x1000);
    let kernel = loaded(&file, FreeSpace::new(&map()), &memory).unwrap();
    let map = map();
    let handover = Handover {
        map: &map,
        cmdline: b"console=ttyS0",
        initrd: Some((Gpa::new(0x1_2345_6000), 0x2_0000_0007)),
        rsdp: Some(Gpa::new(0xe_0000)),
    };
    let entry = kernel.build(&handover, &memory).unwrap();
    assert_eq!(entry.rip, Gpa::new(4 * MIB + 0x200));

    let page = bytes(&memory, entry.boot_params.raw(), 4096);
    let u32_at = |offset: usize| u32::from_le_bytes(page[offset..offset + 4].try_into().unwrap());
    let u64_at = |offset: usize| u64::from_le_bytes(page[offset..offset + 8].try_into().unwrap());
    assert_eq!(u64_at(0x70), 0xe_0000);
    assert_eq!((u32_at(0x218), u32_at(0xc0)), (0x2345_6000, 1));
    assert_eq!((u32_at(0x21c), u32_at(0xc4)), (7, 2));
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
    let memory = FakeMemory::new(0, 16 << 20);
    let build = |handover: Handover<'_>| {
        let kernel = loaded(&image(0x1000), FreeSpace::new(&map()), &memory).unwrap();
        kernel.build(&handover, &memory).map(|_| ())
    };
    let line = [b'x'; 2048];
    let good = Handover { map: &map(), cmdline: &line[..2047], initrd: None, rsdp: None };
    assert_eq!(build(good), Ok(()));
    let long = Handover { cmdline: &line, ..good };
    assert_eq!(build(long), Err(LinuxError::CommandLine { length: 2048, max: 2047 }));
    let zero = Handover { cmdline: b"a\0b", ..good };
    assert_eq!(build(zero), Err(LinuxError::CommandLineZero { at: 1 }));
    let entries = std::vec![E820Entry::new(0, 1, E820Kind::RESERVED); 129];
    assert_eq!(build(Handover { map: &entries[..128], ..good }), Ok(()));
    assert_eq!(build(Handover { map: &entries, ..good }), Err(LinuxError::MapEntries { entries: 129 }));
}

/// The registers that were set.
#[derive(Default)]
struct Registers {
    gpr: HashMap<Gpr, u64>,
    rip: u64,
    rflags: u64,
    control: HashMap<ControlRegister, u64>,
    efer: u64,
    segments: HashMap<SegmentName, Segment>,
    cpl: Option<u8>,
}

impl CpuState for Registers {
    fn gpr(&self, register: Gpr) -> u64 {
        self.gpr[&register]
    }
    fn set_gpr(&mut self, register: Gpr, value: u64) {
        self.gpr.insert(register, value);
    }
    fn rip(&self) -> u64 {
        self.rip
    }
    fn set_rip(&mut self, rip: u64) {
        self.rip = rip;
    }
    fn rflags(&self) -> u64 {
        self.rflags
    }
    fn set_rflags(&mut self, rflags: u64) {
        self.rflags = rflags;
    }
    fn control(&self, register: ControlRegister) -> u64 {
        self.control[&register]
    }
    fn set_control(&mut self, register: ControlRegister, value: u64) {
        self.control.insert(register, value);
    }
    fn efer(&self) -> u64 {
        self.efer
    }
    fn set_efer(&mut self, efer: u64) {
        self.efer = efer;
    }
    fn segment(&self, name: SegmentName) -> Segment {
        self.segments[&name]
    }
    fn set_segment(&mut self, name: SegmentName, segment: Segment) {
        self.segments.insert(name, segment);
    }
    fn cpl(&self) -> u8 {
        self.cpl.unwrap()
    }
    fn set_cpl(&mut self, cpl: u8) {
        self.cpl = Some(cpl);
    }
    fn interruptible(&self) -> bool {
        false
    }
    fn injection_pending(&self) -> bool {
        false
    }
    fn inject(&mut self, _event: Injection) {}
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
    let memory = FakeMemory::new(0, 16 << 20);
    let kernel = loaded(&image(0x1000), FreeSpace::new(&map()), &memory).unwrap();
    let handover = Handover { map: &map(), cmdline: b"", initrd: None, rsdp: None };
    let entry = kernel.build(&handover, &memory).unwrap();
    let mut cpu = Registers::default();
    entry.apply(&mut cpu);

    // boot.rst: 64-bit mode with paging, interrupts off, RSI the boot parameters, CS
    // __BOOT_CS execute/read, the others __BOOT_DS read/write, flat.
    assert_eq!(cpu.rflags & 1 << 9, 0);
    assert_eq!(cpu.efer, 0x500);
    assert_eq!(cpu.control(ControlRegister::Cr0) & 0x8000_0001, 0x8000_0001);
    assert_eq!(cpu.control(ControlRegister::Cr4), 1 << 5);
    assert_eq!(cpu.gpr(Gpr::Rsi), entry.boot_params.raw());
    assert_eq!(cpu.cpl(), 0);
    let gdt = cpu.segment(SegmentName::Gdtr).base;
    let code = cpu.segment(SegmentName::Cs);
    assert_eq!((code.selector, code.limit, code.base), (0x10, u32::MAX, 0));
    assert!(code.is_long() && !code.is_big());
    for name in [SegmentName::Ds, SegmentName::Es, SegmentName::Ss] {
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
    for address in [0, entry.rip.raw(), entry.boot_params.raw(), 0x7fff_f123, 0xffff_ffff] {
        assert_eq!(walk(&memory, root, address), Some(address));
    }
    assert_eq!(walk(&memory, root, 1 << 32), None);
    assert_eq!(walk(&memory, root, 1 << 39), None);
}
