use super::*;
use crate::x86::boot::tests::{Part, elf, note, put, pvh_kernel};

#[test]
fn each_unusable_field_is_named_with_its_value() {
    let cases: [(usize, &[u8], &str, u64); 6] = [
        (4, &[3], "EI_CLASS", 3),
        (5, &[2], "EI_DATA", 2),
        (18, &[183, 0], "e_machine", 183),
        (54, &[32, 0], "e_phentsize", 32),
        (56, &[0, 0], "e_phnum", 0),
        (56, &[129, 0], "e_phnum", 129),
    ];
    for (offset, with, name, number) in cases {
        let mut file = pvh_kernel(64);
        put(&mut file, offset, with);
        match Elf::read(&&file[..]) {
            Err(BootError::Field { field, value, .. }) => assert_eq!((field, value), (name, number)),
            other => panic!("{name}: {other:?}"),
        }
    }
    let mut file = pvh_kernel(64);
    put(&mut file, 32, &[0xff; 8]);
    assert!(matches!(Elf::read(&&file[..]), Err(BootError::Truncated { .. })));
    put(&mut file, 0, b"\x7fELE");
    assert!(matches!(Elf::read(&&file[..]), Ok(None)));
    assert!(matches!(Elf::read(&&b"\x7fELF"[..]), Ok(None)));
}

/// The description of the note "ab", 7 in segments like these.
fn found(segments: &[(&[u8], u64)]) -> Option<Vec<u8>> {
    let parts: Vec<_> = segments
        .iter()
        .map(|(data, align)| Part { kind: 4, vaddr: 0, paddr: 0, memsz: 0, align: *align, data })
        .collect();
    let file = &elf(64, 0, &parts)[..];
    Elf::read(&file).unwrap().unwrap().note(&file, b"ab\0", 7).unwrap()
}

#[test]
fn notes_are_found_by_name_and_type() {
    for align in [4, 8] {
        let notes = [
            note(b"ab\0", 8, b"1", align),
            note(b"abc\0", 7, b"12345", align),
            note(b"ab\0", 7, b"right", align),
            note(b"ab\0", 7, b"late", align),
        ]
        .concat();
        assert_eq!(found(&[(&notes, align as u64)]).as_deref(), Some(&b"right"[..]));
        let other = note(b"x\0", 7, b"other", 4);
        assert_eq!(found(&[(&other, 4), (&notes, align as u64)]).as_deref(), Some(&b"right"[..]));
    }
    // Without the padding at the end.
    let short = note(b"ab\0", 7, b"right", 4);
    assert_eq!(found(&[(&short[..short.len() - 3], 1)]).as_deref(), Some(&b"right"[..]));
    assert_eq!(found(&[(&short[..short.len() - 4], 1)]), None);
}

#[test]
fn wild_notes_are_none() {
    let good = note(b"ab\0", 7, b"right", 4);
    for size in [0xffff_ffff_u32, 0xffff_fff0, 0x7fff_ffff, 1000] {
        for field in [0, 4] {
            let mut wild = note(b"ab\0", 8, b"", 4);
            put(&mut wild, field, &size.to_le_bytes());
            wild.extend(&good);
            assert_eq!(found(&[(&wild, 4)]), None);
        }
    }
}
