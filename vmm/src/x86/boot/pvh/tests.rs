use super::*;
use crate::memory::guest::GuestMemory as _;
use crate::x86::boot::plan as plan_any;
use crate::x86::boot::tests::{
    MIB, NOTHING, Part, bytes, check_flat, elf, loaded, map, note, put, pvh_kernel,
};
use crate::x86::state::CpuState as _;

#[test]
fn the_start_info_has_all_that_the_kernel_is_told() {
    for bits in [32, 64] {
        let handover = Handover { cmdline: b"exit=7", rsdp: Some(Gpa::new(0xe_0000)), ..NOTHING };
        let (entry, memory) = loaded(&pvh_kernel(bits), Some(b"1234567"), &handover).unwrap();
        let cpu = check_flat(&entry);
        assert_eq!(cpu.rip(), 2 * MIB + 0x20);
        assert_eq!(bytes(&memory, 2 * MIB + 0x122, 2), [0x90, 0]);
        assert_eq!(bytes(&memory, 2 * MIB + 0x200, 5), b"data\0");

        let info = cpu.gpr(Gpr::Rbx);
        let u32_at = |at| memory.read_u32(Gpa::new(at)).unwrap();
        let u64_at = |at| memory.read_u64(Gpa::new(at)).unwrap();
        let words = [0, 4, 8, 12, 48, 52].map(|offset| u32_at(info + offset));
        assert_eq!(words, [0x336e_c578, 1, 0, 1, 3, 0]);
        let (modules, rsdp) = (u64_at(info + 16), u64_at(info + 32));
        assert_eq!(rsdp, 0xe_0000);
        let module = [0, 8, 16, 24].map(|offset| u64_at(modules + offset));
        assert_eq!(module, [16 * MIB - 0x1000, 7, 0, 0]);
        assert_eq!(bytes(&memory, module[0], 8), b"1234567\0");
        assert_eq!(bytes(&memory, u64_at(info + 24), 7), b"exit=7\0");
        for (i, entry) in map().iter().enumerate() {
            let at = u64_at(info + 40) + 24 * i as u64;
            assert_eq!((u64_at(at), u64_at(at + 8)), (entry.base.raw(), entry.size));
            assert_eq!((u32_at(at + 16), u32_at(at + 20)), (entry.kind.0, 0));
        }
    }
    let (entry, memory) = loaded(&pvh_kernel(64), None, &NOTHING).unwrap();
    let info = check_flat(&entry).gpr(Gpr::Rbx);
    assert_eq!(memory.read_u32(Gpa::new(info + 12)), Ok(0));
    assert_eq!(memory.read_u64(Gpa::new(info + 32)), Ok(0));
}

#[test]
fn an_entry_point_that_is_not_loaded_is_refused() {
    for (description, value) in [
        (&[0x23, 1, 0x20, 0][..], 2 * MIB + 0x123),
        (&[0, 0, 0x20, 0, 1, 0, 0, 0], (1 << 32) + 2 * MIB),
        (&[0, 0, 0x20], 2 * MIB),
    ] {
        let notes = note(b"Xen\0", 18, description, 4);
        let text = Part { kind: 1, vaddr: 0, paddr: 2 * MIB, memsz: 0x200, align: 1, data: &[0; 0x123] };
        let file =
            elf(64, 0, &[text, Part { kind: 4, vaddr: 0, paddr: 0, memsz: 0, align: 4, data: &notes }]);
        match plan_any(&&file[..], &Handover { map: &map(), ..NOTHING }) {
            Err(BootError::Field { part: "PVH note", value: got, .. }) => assert_eq!(got, value),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_segment_that_cannot_be_is_refused() {
    let said = |offset: usize, value: u64, map: &[_]| {
        let mut file = pvh_kernel(64);
        // The second program header.
        put(&mut file, 64 + 56 + offset, &value.to_le_bytes());
        plan_any(&&file[..], &Handover { map, ..NOTHING }).unwrap_err()
    };
    let map = map();
    let field = |error| match error {
        BootError::Field { field, value, .. } => (field, value),
        other => panic!("{other:?}"),
    };
    assert_eq!(field(said(32, 0x5001, &map)), ("p_filesz", 0x5001));
    assert_eq!(field(said(24, 2 * MIB + 0x122, &map)), ("p_paddr", 2 * MIB + 0x122));
    assert!(matches!(said(8, u64::MAX, &map), BootError::Truncated { need: u64::MAX, .. }));
    for at in [16 * MIB - 0x4fff, 0, 0xe_0000, u64::MAX] {
        assert_eq!(said(24, at, &map), BootError::Taken { at, size: 0x5000 });
    }
    let size = u64::MAX - 2 * MIB;
    assert_eq!(said(40, size, &map), BootError::Taken { at: 2 * MIB + 0x200, size });
}
