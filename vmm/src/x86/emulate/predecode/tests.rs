//! Against the decoder for all instructions.

use super::*;
use iced_x86::{Decoder, DecoderOptions, Instruction, MemorySize, Mnemonic, OpKind, Register};
use proptest::prelude::*;
use std::vec::Vec;

const RIP: u64 = 0xffff_ffff_8123_4567;

fn iced(bits: u32, bytes: &[u8]) -> Instruction {
    Decoder::with_ip(bits, bytes, RIP, DecoderOptions::NONE).decode()
}

fn gpr_of(register: Register) -> (Gpr, u8, Width) {
    let (gpr, shift, width) = crate::x86::emulate::machine::gpr_of(register).unwrap();
    (gpr, shift as u8, width)
}

/// The move that `i` is, in the terms of this module; `None` if it is no move that must be
/// known here.
fn expected(bits: u32, i: &Instruction) -> Option<Move> {
    let simple = matches!(i.mnemonic(), Mnemonic::Mov | Mnemonic::Movzx | Mnemonic::Movsx)
        || i.mnemonic() == Mnemonic::Movsxd && i.op0_register().is_gpr64();
    let address_width = if bits == 64 { Register::RAX } else { Register::EAX };
    let native = |r: Register| r == Register::None || r.is_gpr() && r.size() == address_width.size();
    let (base, index) = (i.memory_base(), i.memory_index());
    let relative = base == Register::RIP;
    let memory = if i.op0_kind() == OpKind::Memory { 0 } else { 1 };
    if !simple
        || i.is_invalid()
        || i.op_kind(memory) != OpKind::Memory
        || !(native(base) || relative)
        || !native(index)
        || i.segment_prefix() != Register::None
    {
        return None;
    }
    let width = Width::from_bytes(i.memory_size().size() as u64).unwrap();
    let register = |r: Register| r.is_gpr().then(|| gpr_of(r));
    let partner = match (memory, i.op_kind(1 - memory)) {
        (1, OpKind::Register) => {
            let (gpr, shift, width) = register(i.op0_register())?;
            Partner::To {
                gpr,
                shift,
                width,
                signed: matches!(i.mnemonic(), Mnemonic::Movsx | Mnemonic::Movsxd),
            }
        }
        (0, OpKind::Register) => {
            let (gpr, shift, _) = register(i.op1_register())?;
            Partner::From { gpr, shift }
        }
        _ => Partner::Immediate(i.immediate(1) & width.all_ones()),
    };
    let address = Address {
        segment: (bits == 32).then(|| match i.memory_segment() {
            Register::SS => SegmentName::Ss,
            Register::DS => SegmentName::Ds,
            other => panic!("{other:?}"),
        }),
        base: (base != Register::None && !relative).then(|| gpr_of(base).0),
        index: (index != Register::None)
            .then(|| (gpr_of(index).0, i.memory_index_scale().trailing_zeros() as u8)),
        displacement: i.memory_displacement64(),
    };
    Some(Move { length: i.len() as u8, width, address, partner })
}

/// What `predecode` says, with numbers cut to the widths in which they count.
fn found(bits: u32, bytes: &[u8]) -> Option<Move> {
    let mut found = predecode(bits, RIP, bytes)?;
    if bits == 32 {
        found.address.displacement &= 0xffff_ffff;
    }
    if let Partner::Immediate(value) = &mut found.partner {
        *value &= found.width.all_ones();
    }
    Some(found)
}

/// Bytes among which moves and their prefixes are frequent.
fn code() -> impl Strategy<Value = Vec<u8>> {
    let prefix = prop_oneof![
        4 => Just(std::vec![]),
        2 => Just(std::vec![0x66]),
        1 => any::<u8>().prop_map(|b| std::vec![b]),
        1 => prop::sample::select(&[0x67, 0xf0, 0xf2, 0xf3, 0x2e, 0x65, 0x66][..]).prop_map(|b| std::vec![b]),
    ];
    let rex = prop_oneof![Just(std::vec![]), (0x40u8..0x50).prop_map(|b| std::vec![b])];
    let opcode = prop_oneof![
        8 => prop::sample::select(
            &[0x88, 0x89, 0x8a, 0x8b, 0xa0, 0xa1, 0xa2, 0xa3, 0xc6, 0xc7, 0x63, 0x8c, 0x8e][..]
        ).prop_map(|b| std::vec![b]),
        4 => prop::sample::select(&[0xb6, 0xb7, 0xbe, 0xbf, 0xc3, 0x22][..]).prop_map(|b| std::vec![0x0f, b]),
        2 => any::<u8>().prop_map(|b| std::vec![b]),
    ];
    // ModRM and SIB of the rare forms: no base, no index, RIP.
    let modrm = prop_oneof![
        any::<[u8; 2]>(),
        (any::<u8>(), any::<u8>()).prop_map(|(m, s)| [m & 0xf8 | 4, s & 0xf8 | 5]),
        (any::<u8>(), any::<u8>()).prop_map(|(m, s)| [m & 0xc0 | 4, s & 0xc7 | 0x20]),
        any::<u8>().prop_map(|m| [m & 0x38 | 5, 0]),
        any::<u8>().prop_map(|m| [m & 0xc7, 0xff]),
    ];
    (prefix, rex, opcode, modrm, any::<[u8; 12]>(), 1usize..16).prop_map(|(a, b, c, d, e, len)| {
        let mut bytes = [&a[..], &b, &c, &d, &e].concat();
        bytes.truncate(len);
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    /// What is accepted is what the decoder for all instructions says, and what it rejects is
    /// not accepted.
    #[test]
    fn never_says_anything_else(bits in prop::sample::select(&[16u32, 32, 64][..]), bytes in code()) {
        if let Some(found) = found(bits, &bytes) {
            let i = iced(bits, &bytes);
            prop_assert_eq!(expected(bits, &i), Some(found), "{:?} {:x?}", i.code(), bytes);
        }
    }

    /// The common moves are known, so that the test above means something.
    #[test]
    fn knows_all_common_moves(bits in prop::sample::select(&[32u32, 64][..]), bytes in code()) {
        let i = iced(bits, &bytes);
        let plain = match bytes.strip_prefix(&[0x66]).unwrap_or(&bytes) {
            [rex, opcode, ..] if bits == 64 && rex & 0xf0 == 0x40 => *opcode,
            [opcode, ..] => *opcode,
            [] => 0,
        };
        let opcode = matches!(plain, 0x88..=0x8b | 0xa0..=0xa3 | 0xc6 | 0xc7 | 0x63 | 0x0f);
        if let (true, Some(expected)) = (opcode, expected(bits, &i)) {
            prop_assert_eq!(found(bits, &bytes), Some(expected), "{:?} {:x?}", i.code(), bytes);
        }
    }

    #[test]
    fn random_bytes(bits in prop::sample::select(&[16u32, 32, 64][..]), bytes in any::<[u8; 15]>()) {
        if let Some(found) = found(bits, &bytes) {
            prop_assert_eq!(expected(bits, &iced(bits, &bytes)), Some(found));
        }
    }
}

#[test]
fn one_of_each() {
    for (bits, bytes) in [
        (64, &[0x89, 0x07][..]),
        (32, &[0x8a, 0x27]),
        (64, &[0x66, 0x41, 0xc7, 0x44, 0x24, 0x10, 1, 2]),
        (64, &[0x48, 0xc7, 0x05, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0x80]),
        (64, &[0x4c, 0x0f, 0xbf, 0xac, 0xcd, 0, 0, 0, 0x80]),
        (32, &[0xa3, 0x20, 0, 0xe0, 0xfe]),
        (64, &[0xa1, 8, 7, 6, 5, 4, 3, 2, 1]),
    ] {
        let i = iced(bits, bytes);
        assert_eq!(i.len(), bytes.len());
        assert_ne!(i.memory_size(), MemorySize::Unknown);
        assert_eq!(found(bits, bytes), Some(expected(bits, &i).unwrap()), "{bytes:x?}");
        for short in 0..bytes.len() {
            assert_eq!(found(bits, &bytes[..short]), None, "{bytes:x?} cut to {short}");
        }
        assert_eq!(found(16, bytes), None);
    }
}
