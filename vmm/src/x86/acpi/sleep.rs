//! Which sleep types turn the machine off: the objects `\_S1` to `\_S5` of the firmware's
//! definition blocks (ACPI 6.5, 7.4.2), found without interpreting them.
//!
//! Each is a named package of constants (20.2.5.1, 20.2.5.4, 20.2.3). Blocks are searched for
//! such a definition byte by byte, so one that stands in a condition is found as well.

/// Bits of SLP_TYP, 0..=7.
const TYPES: u64 = 7;

const NAME: u8 = 0x08;
const ROOT_PREFIX: u8 = b'\\';
const PARENT_PREFIX: u8 = b'^';
const PACKAGE: u8 = 0x12;

/// The sleep types that turn the machine off, for PM1a and PM1b control: bit *n* is type *n*.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PowerOffTypes(pub [u8; 2]);

impl PowerOffTypes {
    /// Searches definition blocks, headers or not. A type is in if some `\_S5` has it, and no
    /// `\_S1` to `\_S4`: what leads out of sleep again must not be taken for the end.
    pub fn find<'a>(blocks: impl Iterator<Item = &'a [u8]> + Clone) -> Self {
        let types = |state: u8| {
            let all = blocks.clone().flat_map(move |block| definitions(block, state));
            all.fold([0; 2], |set: [u8; 2], [a, b]| [set[0] | 1 << a, set[1] | 1 << b])
        };
        let mut off = types(b'5');
        for [a, b] in [b'1', b'2', b'3', b'4'].map(types) {
            off = [off[0] & !a, off[1] & !b];
        }
        Self(off)
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }
}

/// The types for PM1a and PM1b, 0..=7, of all definitions of a state in `block`.
fn definitions(block: &[u8], state: u8) -> impl Iterator<Item = [u8; 2]> {
    let starts = (0..block.len()).filter_map(|at| block.get(at..));
    starts.filter_map(move |aml| definition(aml, state))
}

fn definition(aml: &[u8], state: u8) -> Option<[u8; 2]> {
    let mut rest = aml.strip_prefix(&[NAME])?;
    while let [ROOT_PREFIX | PARENT_PREFIX, after @ ..] = rest {
        rest = after;
    }
    let package = rest.strip_prefix(&[b'_', b'S', state, b'_', PACKAGE])?;
    let (contents, _) = package.split_at_checked(package_length(package)?)?;
    let [count, elements @ ..] = contents.get(length_size(package)?..)? else { return None };
    let (first, elements) = constant(elements)?;
    // One number may hold both (as the first ACPI had it).
    let second = if *count == 1 { first >> 8 } else { constant(elements)?.0 };
    (*count >= 1).then(|| [first, second].map(|value| (value & TYPES).to_le_bytes()[0]))
}

/// How many bytes the package's length takes (20.2.4).
fn length_size(package: &[u8]) -> Option<usize> {
    Some(1 + usize::from(package.first()? >> 6))
}

/// The package's length, from the length on.
fn package_length(package: &[u8]) -> Option<usize> {
    let [first, more @ ..] = package.get(..length_size(package)?)? else { return None };
    if more.is_empty() {
        return Some(usize::from(first & 0x3f));
    }
    let high = more.iter().rev().fold(0, |length, byte| length << 8 | usize::from(*byte));
    Some(high << 4 | usize::from(first & 0xf))
}

/// A constant and what follows it.
fn constant(aml: &[u8]) -> Option<(u64, &[u8])> {
    let (operator, rest) = aml.split_first()?;
    let size = match operator {
        0x00 => return Some((0, rest)),
        0x01 => return Some((1, rest)),
        0xff => return Some((u64::MAX, rest)),
        0x0a => 1,
        0x0b => 2,
        0x0c => 4,
        0x0e => 8,
        _ => return None,
    };
    let (bytes, rest) = rest.split_at_checked(size)?;
    Some((bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)), rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use acpi_tables::Aml;
    use acpi_tables::aml::{Name, Package, Path};
    use proptest::prelude::*;
    use std::vec::Vec;

    fn find(blocks: &[&[u8]]) -> [u8; 2] {
        PowerOffTypes::find(blocks.iter().copied()).0
    }

    fn named(name: &str, values: &[u16]) -> Vec<u8> {
        let values: Vec<&dyn Aml> = values.iter().map(|value| value as &dyn Aml).collect();
        let mut aml = Vec::new();
        Name::new(Path::new(name), &Package::new(values)).to_aml_bytes(&mut aml);
        aml
    }

    #[test]
    fn what_s5_names_and_no_other_state() {
        let s3 = named("\\_S3_", &[1, 1, 0, 0]);
        let s4 = named("_S4_", &[2, 2, 0, 0]);
        let s5 = named("_S5_", &[0, 7, 0, 0]);
        assert_eq!(find(&[&s3, &s4, &s5]), [1 << 0, 1 << 7]);
        assert_eq!(find(&[&s3, &s4]), [0, 0]);
        assert!(PowerOffTypes::find([&s3[..]].into_iter()).is_empty());
        // A second \_S5, of which one is in a condition; one like \_S3 is not trusted.
        let other = named("_S5_", &[5, 1, 0, 0]);
        assert_eq!(find(&[&s3, &s5, &other]), [1 << 0 | 1 << 5, 1 << 7]);
    }

    #[test]
    fn every_form_of_constant_and_length() {
        // (after the name, types)
        let cases: [(&[u8], [u8; 2]); 8] = [
            (b"\x12\x06\x04\x01\x00\x00\x00", [1, 0]),
            (b"\x12\x06\x02\x0a\x05\x0a\x06", [5, 6]),
            (b"\x12\x08\x02\x0b\x05\x00\x0b\x06\x00", [5, 6]),
            (b"\x12\x0c\x02\x0c\x05\0\0\0\x0c\x06\0\0\0", [5, 6]),
            (b"\x12\x0c\x02\x0e\x05\0\0\0\0\0\0\0\x01", [5, 1]),
            (b"\x12\x04\x02\xff\x01", [7, 1]),
            // Both in one number.
            (b"\x12\x05\x01\x0b\x05\x06", [5, 6]),
            // A length of two bytes.
            (b"\x12\x47\x00\x04\x01\x00\x00\x00", [1, 0]),
        ];
        for (package, [a, b]) in cases {
            let block = [b"junk\x08_S5_", package].concat();
            assert_eq!(find(&[&block]), [1 << a, 1 << b], "{package:x?}");
            // Cut anywhere, it is none: a length says how much there has to be.
            for end in 0..block.len() {
                assert_eq!(find(&[&block[..end]]), [0, 0], "{package:x?}, cut at {end}");
            }
        }
        for package in [
            &b"\x12\x02\x00"[..],
            b"\x12\x03\x02\x01",
            b"\x12\x04\x02\x01\x70",
            b"\x0a\x05",
            b"\x12\xff\xff\xff\xff\x02\x00\x00",
        ] {
            assert_eq!(find(&[&[b"\x08_S5_", package].concat()]), [0, 0], "{package:x?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_searched(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let block = [b"\x08_S5_\x12", &bytes[..]].concat();
            PowerOffTypes::find([&block[..], &bytes].into_iter());
        }
    }
}
