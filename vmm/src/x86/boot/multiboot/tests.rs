use super::*;
use crate::memory::guest::GuestMemory as _;
use crate::x86::boot::plan as plan_any;
use crate::x86::boot::tests::{
    MIB, NOTHING, addressed_kernel, bytes, check_flat, loaded, map, multiboot_elf, multiboot_header, put,
    pvh_kernel,
};
use crate::x86::state::CpuState as _;

#[test]
fn the_information_has_all_that_the_kernel_is_told() {
    let handover = Handover { cmdline: b"exit=7", ..NOTHING };
    for (kernel, rip) in [(addressed_kernel(), MIB + 8), (multiboot_elf(), MIB + 12)] {
        let (entry, memory) = loaded(&kernel, Some(b"1234567"), &handover).unwrap();
        let cpu = check_flat(&entry);
        assert_eq!((cpu.rip(), cpu.gpr(Gpr::Rax)), (rip, 0x2bad_b002));
        let info = cpu.gpr(Gpr::Rbx);
        let word = |at: u64| u64::from(memory.read_u32(Gpa::new(at)).unwrap());
        let words = [0, 4, 8, 20].map(|offset| word(info + offset));
        // 640 KiB are told, 15 MiB above the first.
        assert_eq!(words, [0b10_0100_1101, 640, 15 << 10, 1]);
        assert_eq!(bytes(&memory, word(info + 16), 7), b"exit=7\0");
        let module = [0, 4, 8, 12].map(|offset| word(word(info + 24) + offset));
        assert_eq!(module, [16 * MIB - 0x1000, 16 * MIB - 0x1000 + 7, 0, 0]);
        assert_eq!(bytes(&memory, module[0], 8), b"1234567\0");
        assert_eq!(bytes(&memory, word(info + 64), 9), b"Bulkhead\0");
        // 3.3: an entry is as long as its size says, not counting the size.
        let (mut at, end) = (word(info + 48), word(info + 48) + word(info + 44));
        for entry in map() {
            let u64_at = |at| memory.read_u64(Gpa::new(at)).unwrap();
            assert_eq!((u64_at(at + 4), u64_at(at + 12)), (entry.base.raw(), entry.size));
            assert_eq!(word(at + 20), entry.kind.0.into());
            at += 4 + word(at);
        }
        assert_eq!(at, end);
        for unused in [12, 28, 32, 36, 40, 52, 56, 60, 68, 72, 112] {
            assert_eq!(word(info + unused), 0);
        }
    }
    let (entry, memory) = loaded(&addressed_kernel(), None, &handover).unwrap();
    let info = check_flat(&entry).gpr(Gpr::Rbx);
    assert_eq!(memory.read_u32(Gpa::new(info + 20)), Ok(0));
}

#[test]
fn a_kernel_is_loaded_by_the_addresses_in_its_header() {
    let file = addressed_kernel();
    let (_, memory) = loaded(&file, None, &NOTHING).unwrap();
    assert_eq!(bytes(&memory, MIB, 0x100), &file[0x40..0x140]);
    assert_eq!(bytes(&memory, MIB + 0x100, 0x100), [0; 0x100]);
    // All of the file, and nothing behind it.
    let mut all = file.clone();
    let base = 1 << 20;
    put(&mut all, 0x80, &multiboot_header(0x1_0000, &[base + 0x40, base, 0, 0, base]));
    let (_, memory) = loaded(&all, None, &NOTHING).unwrap();
    assert_eq!(bytes(&memory, MIB, 0x1c0), &all[0x40..]);
}

#[test]
fn each_unusable_field_is_named_with_its_value() {
    let base = 1 << 20;
    let good = [base + 0x40, base, base + 0x100, base + 0x200, base + 8];
    let with = |index: usize, value: u32| {
        let mut addresses = good;
        addresses[index] = value;
        addresses
    };
    let cases: [(u32, [u32; 5], &str, u64); 10] = [
        (0x1_0004, good, "flags", 0x1_0004),
        (0x1_8000, good, "flags", 0x1_8000),
        (0, good, "flags", 0),
        (0x1_0000, with(1, base + 0x41), "load_addr", MIB + 0x41),
        (0x1_0000, with(0, base + 0x81), "load_addr", MIB),
        (0x1_0000, with(2, base - 1), "load_end_addr", MIB - 1),
        (0x1_0000, with(3, base + 0xff), "bss_end_addr", MIB + 0xff),
        (0x1_0000, with(4, base - 1), "entry_addr", MIB - 1),
        (0x1_0000, with(4, base + 0x100), "entry_addr", MIB + 0x100),
        (0x1_0000, with(4, 0), "entry_addr", 0),
    ];
    for (flags, addresses, name, number) in cases {
        let mut file = addressed_kernel();
        put(&mut file, 0x80, &multiboot_header(flags, &addresses));
        match plan_any(&&file[..], &Handover { map: &map(), ..NOTHING }) {
            Err(BootError::Field { field, value, .. }) => assert_eq!((field, value), (name, number)),
            other => panic!("{name}: {other:?}"),
        }
    }
    let said = |file: &[u8]| plan_any(&file, &Handover { map: &map(), ..NOTHING }).map(|_| ());
    let mut file = addressed_kernel();
    put(&mut file, 0x80, &multiboot_header(0x1_0000, &with(2, base + 0x1c1)));
    put(&mut file, 0x80 + 24, &[0; 4]);
    assert_eq!(said(&file), Err(BootError::Truncated { have: 0x200, need: 0x201 }));
    put(&mut file, 0x80, &multiboot_header(0x1_0000, &with(3, 16 << 20 | 1)));
    assert_eq!(said(&file), Err(BootError::Taken { at: MIB, size: 15 * MIB + 1 }));
    // Bits that need not be understood.
    put(&mut file, 0x80, &multiboot_header(0xffff_0003, &good));
    assert_eq!(said(&file), Ok(()));
    let mut outside = multiboot_elf();
    put(&mut outside, 24, &[0; 4]);
    assert!(matches!(said(&outside), Err(BootError::Field { field: "e_entry", value: 0, .. })));
}

#[test]
fn the_header_is_found_where_the_specification_has_it() {
    let header = multiboot_header(3, &[]);
    let file = |at: usize| {
        let mut file = std::vec![0; at];
        file.extend(&header);
        file.resize(10_000, 0);
        file
    };
    for at in [0, 4, 0x100, 8180] {
        let found = recognise(&&file(at)[..]).unwrap().unwrap();
        assert_eq!((found.offset, found.flags), (at as u64, 3));
    }
    for at in [2, 8184, 8192, 9000] {
        assert!(recognise(&&file(at)[..]).unwrap().is_none());
    }
    let mut wrong = file(0);
    wrong[8] ^= 1;
    assert!(recognise(&&wrong[..]).unwrap().is_none());
    // The addresses have to be within the 8192 bytes too.
    let mut late = file(8180);
    put(&mut late, 8180, &multiboot_header(0x1_0003, &[0; 5]));
    assert_eq!(
        plan_any(&&late[..], &Handover { map: &map(), ..NOTHING }),
        Err(BootError::Truncated { have: 8192, need: 8212 })
    );
}

#[test]
fn a_note_for_pvh_comes_first() {
    let handover = Handover { map: &map(), ..NOTHING };
    let mut file = pvh_kernel(32);
    file.resize(file.len().next_multiple_of(4), 0);
    file.extend(multiboot_header(0, &[]));
    assert!(recognise(&&file[..]).unwrap().is_some());
    assert_eq!(plan_any(&&file[..], &handover).unwrap().protocol(), "PVH");
    assert_eq!(plan_any(&&multiboot_elf()[..], &handover).unwrap().protocol(), "multiboot 1");
}
