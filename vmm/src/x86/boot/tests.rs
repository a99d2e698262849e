use super::*;
use crate::memory::guest::fake::FakeMemory;
use crate::x86::state::{ControlRegister, CpuState, Gpr, Injection, Segment, SegmentName};
use e820::E820Kind;
use proptest::prelude::*;
use std::collections::HashMap;
use std::vec::Vec;

pub(super) const MIB: u64 = 1 << 20;

pub(super) fn put(file: &mut [u8], offset: usize, bytes: &[u8]) {
    file[offset..offset + bytes.len()].copy_from_slice(bytes);
}

pub(super) fn bytes(memory: &FakeMemory, gpa: u64, len: usize) -> Vec<u8> {
    let mut bytes = std::vec![0; len];
    memory.read(Gpa::new(gpa), &mut bytes).unwrap();
    bytes
}

/// 16 MiB with a hole.
pub(super) fn map() -> Vec<E820Entry> {
    [
        E820Entry::new(0, 0xa_0000, E820Kind::RAM),
        E820Entry::new(0xe_0000, MIB, E820Kind::RESERVED),
        E820Entry::new(MIB, 16 * MIB, E820Kind::RAM),
    ]
    .to_vec()
}

pub(super) const NOTHING: Handover<'static> = Handover { map: &[], cmdline: b"", initrd: None, rsdp: None };

/// Starts `kernel` in 16 MiB of RAM with the map [`map`], `handover` otherwise, and an initrd of
/// these bytes.
pub(super) fn loaded(
    kernel: &[u8],
    initrd: Option<&[u8]>,
    handover: &Handover<'_>,
) -> Result<(Entry, FakeMemory), BootError> {
    let initrd_size = initrd.map(|bytes| bytes.len() as u64);
    let handover = Handover { map: &map(), initrd: initrd_size, ..*handover };
    let mut plan = plan(&kernel, &handover)?;
    let memory = FakeMemory::new(0, 16 << 20);
    while let Some(piece) = plan.next_piece(0x700) {
        let file = if piece.file == LoadKind::KERNEL { kernel } else { initrd.unwrap() };
        let start = usize::try_from(piece.offset).unwrap();
        let end = start + usize::try_from(piece.len).unwrap();
        memory.write(piece.to, &file[start..end]).unwrap();
    }
    Ok((plan.finish(&memory)?, memory))
}

/// The registers that were set.
#[derive(Default)]
pub(super) struct Registers {
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

#[test]
fn what_is_no_kernel_is_refused() {
    for size in [0, 100, 0x290, 0x4000] {
        let file = std::vec![0; size];
        assert_eq!(plan(&&file[..], &NOTHING), Err(BootError::Unknown), "{size}");
    }
}

/// A program header of an ELF file, and what it has in the file.
pub(super) struct Part<'a> {
    pub(super) kind: u32,
    pub(super) vaddr: u64,
    pub(super) paddr: u64,
    pub(super) memsz: u64,
    pub(super) align: u64,
    pub(super) data: &'a [u8],
}

/// An ELF file of `bits` with these program headers; its parts follow them, in order.
pub(super) fn elf(bits: u32, entry: u64, parts: &[Part<'_>]) -> Vec<u8> {
    let wide = bits == 64;
    let word = |value: u64| value.to_le_bytes()[..if wide { 8 } else { 4 }].to_vec();
    let (ehsize, phentsize, machine) = if wide { (64_u16, 56_u16, 62_u16) } else { (52, 32, 3) };
    let mut file = b"\x7fELF".to_vec();
    file.extend([if wide { 2 } else { 1 }, 1, 1]);
    file.resize(16, 0);
    file.extend([2, machine].map(u16::to_le_bytes).as_flattened());
    file.extend(1_u32.to_le_bytes());
    file.extend([entry, ehsize.into(), 0].into_iter().flat_map(word));
    file.extend([0; 4]);
    let count = u16::try_from(parts.len()).unwrap();
    file.extend([ehsize, phentsize, count, 0, 0, 0].map(u16::to_le_bytes).as_flattened());
    assert_eq!(file.len(), ehsize.into());
    let mut offset = u64::from(ehsize) + u64::from(phentsize) * parts.len() as u64;
    for part in parts {
        let filesz = part.data.len() as u64;
        file.extend(part.kind.to_le_bytes());
        file.extend(if wide { std::vec![0; 4] } else { Vec::new() });
        file.extend([offset, part.vaddr, part.paddr, filesz, part.memsz].into_iter().flat_map(word));
        file.extend(if wide { Vec::new() } else { std::vec![0; 4] });
        file.extend(word(part.align));
        offset += filesz;
    }
    parts.iter().for_each(|part| file.extend(part.data));
    file
}

/// A note in a segment of this alignment.
pub(super) fn note(name: &[u8], kind: u32, description: &[u8], align: usize) -> Vec<u8> {
    let sizes = [name.len(), description.len()].map(|len| u32::try_from(len).unwrap());
    let mut note = [sizes[0], sizes[1], kind].map(u32::to_le_bytes).as_flattened().to_vec();
    for part in [name, description] {
        note.extend(part);
        note.resize(note.len().next_multiple_of(align), 0);
    }
    note
}

/// A kernel for PVH at 2 MiB.
pub(super) fn pvh_kernel(bits: u32) -> Vec<u8> {
    let text = [0x90; 0x123];
    let notes = [
        note(b"GNU\0", 18, b"another's", 4),
        note(b"Xen\0", 6, b"linux\0", 4),
        note(b"Xen\0", 18, &(2 * MIB + 0x20).to_le_bytes()[..if bits == 64 { 8 } else { 4 }], 4),
    ]
    .concat();
    let load = |vaddr, paddr, memsz, data| Part { kind: 1, vaddr, paddr, memsz, align: 4096, data };
    // The second one shares a page with the first.
    let parts = [
        load(0xc020_0000, 2 * MIB, 0x123, &text[..]),
        load(0xc020_0200, 2 * MIB + 0x200, 0x5000, b"data"),
        Part { kind: 4, align: 4, ..load(0, 0, 0, &notes) },
    ];
    elf(bits, 0xc020_0000, &parts)
}

/// A multiboot header with these flags, and addresses or none.
pub(super) fn multiboot_header(flags: u32, addresses: &[u32]) -> Vec<u8> {
    let checksum = 0_u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags);
    let words = [&[0x1bad_b002, flags, checksum], addresses].concat();
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// A kernel that is loaded by the addresses in its multiboot header: from 0x40 of its file to
/// 1 MiB, 0x100 bytes and as many zeros, entered at 8.
pub(super) fn addressed_kernel() -> Vec<u8> {
    let mut file: Vec<u8> = (0..=255).cycle().take(0x200).collect();
    let base = 1 << 20;
    put(
        &mut file,
        0x80,
        &multiboot_header(0x1_0003, &[base + 0x40, base, base + 0x100, base + 0x200, base + 8]),
    );
    file
}

/// A kernel that is a 32-bit ELF with a multiboot header.
pub(super) fn multiboot_elf() -> Vec<u8> {
    let text = [&multiboot_header(2, &[])[..], &[0x90; 0x33]].concat();
    let part = Part { kind: 1, vaddr: 0xc010_0000, paddr: MIB, memsz: 0x2345, align: 4096, data: &text };
    elf(32, 0xc010_000c, &[part])
}

fn linux_kernel() -> Vec<u8> {
    linux::tests::image(0x1000)
}

proptest! {
    /// Any file, most of them nearly right: no panic, and all that is planned lies in the file, in
    /// RAM, and apart.
    #[test]
    fn what_is_planned_fits(
        which in 0_usize..5,
        changes in proptest::collection::vec((0_usize..0x300, prop_oneof![any::<u64>(), 0_u64..0x40, Just(MIB), Just(u64::MAX)], 0_usize..9), 0..4),
        cut in prop_oneof![4 => Just(usize::MAX), 1 => 0_usize..0x2000],
        reserved in prop_oneof![Just(0), 1_u64..0x1000],
        initrd in prop_oneof![Just(None), (0_u64..20 * MIB).prop_map(Some)],
    ) {
        let kernels = [linux_kernel(), pvh_kernel(64), pvh_kernel(32), addressed_kernel(), multiboot_elf()];
        let mut file = kernels[which].clone();
        for (at, value, len) in changes {
            for (to, from) in file.iter_mut().skip(at).zip(&value.to_le_bytes()[..len.min(8)]) {
                *to = *from;
            }
        }
        file.truncate(cut);
        let mut map = map();
        map.push(E820Entry::new(reserved << 12, (reserved << 12) + 0x1000, E820Kind::ACPI));
        let handover = Handover { map: &map, cmdline: b"a b", initrd, rsdp: None };
        if let Ok(mut plan) = plan(&&file[..], &handover) {
            let (at, bytes) = plan.block.clone();
            let mut ranges = std::vec![at.raw()..at.raw() + bytes.len() as u64];
            while let Some(piece) = plan.next_piece(u64::MAX) {
                let size = if piece.file == LoadKind::KERNEL { file.len() as u64 } else { initrd.unwrap() };
                prop_assert!(piece.offset.checked_add(piece.len).is_some_and(|end| end <= size));
                ranges.push(piece.to.raw()..piece.to.raw() + piece.len);
            }
            let memory = FakeMemory::new(0, 16 << 20);
            prop_assert!(plan.finish(&memory).is_ok());
            for (i, range) in ranges.iter().enumerate() {
                let within = |e: &&E820Entry| e.base.raw() <= range.start && range.end <= e.base.raw() + e.size;
                let apart = |other: &core::ops::Range<u64>| other.end <= range.start || range.end <= other.start;
                prop_assert!(map.iter().filter(|e| e.kind == E820Kind::RAM).any(|e| within(&e)), "{:x?}", range);
                prop_assert!(range.start >= 0x1000);
                for entry in map.iter().filter(|e| e.kind != E820Kind::RAM) {
                    prop_assert!(range.is_empty() || apart(&(entry.base.raw()..entry.base.raw() + entry.size)));
                }
                prop_assert!(range.is_empty() || ranges[..i].iter().all(apart), "{:x?}", ranges);
            }
        }
    }
}

/// What both 32-bit protocols ask of the registers (Xen, pvh.pandoc; Multiboot, 3.2).
pub(super) fn check_flat(entry: &Entry) -> Registers {
    let mut cpu = Registers::default();
    entry.apply(&mut cpu);
    assert_eq!(cpu.control(ControlRegister::Cr0) & 0x8000_0001, 1);
    assert_eq!((cpu.control(ControlRegister::Cr4), cpu.efer(), cpu.cpl()), (0, 0, 0));
    // VM, IF, TF.
    assert_eq!(cpu.rflags() & (1 << 17 | 1 << 9 | 1 << 8), 0);
    let code = cpu.segment(SegmentName::Cs);
    assert_eq!((code.base, code.limit, code.attributes & 0x1f), (0, u32::MAX, 0x1b));
    assert!(code.is_big() && !code.is_long());
    for name in [SegmentName::Ds, SegmentName::Es, SegmentName::Fs, SegmentName::Gs, SegmentName::Ss] {
        let data = cpu.segment(name);
        assert_eq!((data.base, data.limit, data.attributes & 0x1f), (0, u32::MAX, 0x13));
        assert!(data.is_big());
    }
    let task = cpu.segment(SegmentName::Tr);
    assert_eq!((task.base, task.limit, task.attributes), (0, 0x67, 0x8b));
    cpu
}
