//! Arithmetic and its flags (AMD APM vol. 3; Intel SDM vol. 1, 3.4.3.1).
//!
//! Flags that the manuals leave undefined are cleared (AF of logic) or kept (bit tests).

use crate::device::bus::Width;

const CF: u64 = 1;
const PF: u64 = 1 << 2;
const AF: u64 = 1 << 4;
const ZF: u64 = 1 << 6;
const SF: u64 = 1 << 7;
const OF: u64 = 1 << 11;

/// An operation on two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Binary {
    Add,
    Adc,
    Sub,
    Sbb,
    And,
    Or,
    Xor,
}

/// An operation on one operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unary {
    Inc,
    Dec,
    Neg,
    Not,
}

/// What a bit test does to its bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BitOperation {
    Test,
    Set,
    Reset,
    Complement,
}

/// `flags` with `bit` set or cleared.
fn with(flags: u64, bit: u64, set: bool) -> u64 {
    if set { flags | bit } else { flags & !bit }
}

/// The result of `a op b` cut to `width`, and the flags after it.
pub(super) fn binary(op: Binary, width: Width, a: u64, b: u64, flags: u64) -> (u64, u64) {
    let mask = width.all_ones();
    let (a, b) = (a & mask, b & mask);
    let carry_in = u64::from(flags & CF != 0 && matches!(op, Binary::Adc | Binary::Sbb));
    let (result, carry, overflow) = match op {
        Binary::Add | Binary::Adc => {
            let sum = u128::from(a) + u128::from(b) + u128::from(carry_in);
            let result = a.wrapping_add(b).wrapping_add(carry_in) & mask;
            (result, sum > u128::from(mask), (a ^ result) & (b ^ result))
        }
        Binary::Sub | Binary::Sbb => {
            let result = a.wrapping_sub(b).wrapping_sub(carry_in) & mask;
            (result, u128::from(a) < u128::from(b) + u128::from(carry_in), (a ^ b) & (a ^ result))
        }
        Binary::And => (a & b, false, 0),
        Binary::Or => (a | b, false, 0),
        Binary::Xor => (a ^ b, false, 0),
    };
    let sign = mask ^ mask >> 1;
    let logic = matches!(op, Binary::And | Binary::Or | Binary::Xor);
    let mut flags = with(flags, CF, carry);
    flags = with(flags, PF, (result & 0xff).count_ones().is_multiple_of(2));
    flags = with(flags, AF, !logic && (a ^ b ^ result) & 0x10 != 0);
    flags = with(flags, ZF, result == 0);
    flags = with(flags, SF, result & sign != 0);
    (result, with(flags, OF, overflow & sign != 0))
}

/// The result of `op a` cut to `width`, and the flags after it.
pub(super) fn unary(op: Unary, width: Width, a: u64, flags: u64) -> (u64, u64) {
    let keep_carry = |(result, new): (u64, u64)| (result, new & !CF | flags & CF);
    match op {
        Unary::Inc => keep_carry(binary(Binary::Add, width, a, 1, flags)),
        Unary::Dec => keep_carry(binary(Binary::Sub, width, a, 1, flags)),
        Unary::Neg => binary(Binary::Sub, width, 0, a, flags),
        Unary::Not => (!a & width.all_ones(), flags),
    }
}

/// `a` with the bit `index` (modulo the width) changed, and the flags with CF as it was.
pub(super) fn bit(op: BitOperation, width: Width, a: u64, index: u64, flags: u64) -> (u64, u64) {
    let bit = 1u64 << (index % (width.bytes() * 8));
    let result = match op {
        BitOperation::Test => a,
        BitOperation::Set => a | bit,
        BitOperation::Reset => a & !bit,
        BitOperation::Complement => a ^ bit,
    };
    (result, with(flags, CF, a & bit != 0))
}

/// `value` of `width`, sign-extended to 64 bits.
pub(super) fn sign_extend(width: Width, value: u64) -> u64 {
    let unused = 64 - width.bytes() * 8;
    (value.cast_signed() << unused >> unused).cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The flags that arithmetic sets.
    const STATUS: u64 = CF | PF | AF | ZF | SF | OF;

    /// `value` of `width` as a signed number.
    fn signed(width: Width, value: u64) -> i128 {
        let bits = width.bytes() * 8;
        let value = i128::from(value & width.all_ones());
        if value >> (bits - 1) != 0 { value - (1 << bits) } else { value }
    }

    fn widths() -> impl Strategy<Value = Width> {
        prop_oneof![Just(Width::Byte), Just(Width::Word), Just(Width::Dword), Just(Width::Qword)]
    }

    /// Numbers among which those at the edges are frequent.
    fn numbers() -> impl Strategy<Value = u64> {
        prop_oneof![
            any::<u64>(),
            0u64..3,
            Just(0x7f),
            Just(0x80),
            Just(0x8000),
            Just(0x8000_0000),
            Just(1 << 63),
            Just(u64::MAX)
        ]
    }

    proptest! {
        /// Against the definitions: carry is what the unsigned result does not fit,
        /// overflow what the signed one does not fit.
        #[test]
        fn sums_and_differences(w in widths(), a in numbers(), b in numbers(), cf: bool, kind in 0..4) {
            let op = [Binary::Add, Binary::Adc, Binary::Sub, Binary::Sbb][kind as usize];
            let c = i128::from(cf && kind & 1 != 0);
            let (ua, ub) = (i128::from(a & w.all_ones()), i128::from(b & w.all_ones()));
            let (unsigned, real, low) = if kind < 2 {
                (ua + ub + c, signed(w, a) + signed(w, b) + c, (ua & 15) + (ub & 15) + c)
            } else {
                (ua - ub - c, signed(w, a) - signed(w, b) - c, (ua & 15) - (ub & 15) - c)
            };
            let (result, flags) = binary(op, w, a, b, 0x202 | u64::from(cf));
            prop_assert_eq!(i128::from(result), unsigned.rem_euclid(1 << (w.bytes() * 8)));
            prop_assert_eq!(flags & CF != 0, i128::from(result) != unsigned);
            prop_assert_eq!(flags & OF != 0, signed(w, result) != real);
            prop_assert_eq!(flags & AF != 0, !(0..16).contains(&low));
            prop_assert_eq!(flags & ZF != 0, result == 0);
            prop_assert_eq!(flags & SF != 0, signed(w, result) < 0);
            prop_assert_eq!(flags & PF != 0, (0..8).filter(|n| result >> n & 1 != 0).count() % 2 == 0);
            prop_assert_eq!(flags & !STATUS, 0x202);
        }

        #[test]
        fn logic_clears_carry_and_overflow(w in widths(), a in numbers(), b in numbers(), flags in 0u64..0x1000) {
            for (op, expected) in [(Binary::And, a & b), (Binary::Or, a | b), (Binary::Xor, a ^ b)] {
                let (result, after) = binary(op, w, a, b, flags);
                prop_assert_eq!(result, expected & w.all_ones());
                prop_assert_eq!(after & (CF | OF | AF), 0);
                prop_assert_eq!(after & ZF != 0, result == 0);
                prop_assert_eq!(after & SF != 0, signed(w, result) < 0);
                prop_assert_eq!(after & !STATUS, flags & !STATUS);
            }
        }

        #[test]
        fn one_operand(w in widths(), a in numbers(), flags in 0u64..0x1000) {
            let cut = a & w.all_ones();
            let (inc, after) = unary(Unary::Inc, w, a, flags);
            prop_assert_eq!(inc, cut.wrapping_add(1) & w.all_ones());
            prop_assert_eq!(after & CF, flags & CF);
            prop_assert_eq!(after & OF != 0, signed(w, inc) != signed(w, a) + 1);
            let (dec, after) = unary(Unary::Dec, w, a, flags);
            prop_assert_eq!(dec, cut.wrapping_sub(1) & w.all_ones());
            prop_assert_eq!(after & CF, flags & CF);
            prop_assert_eq!(after & OF != 0, signed(w, dec) != signed(w, a) - 1);
            let (neg, after) = unary(Unary::Neg, w, a, flags);
            prop_assert_eq!(after & CF != 0, cut != 0);
            prop_assert_eq!(after & OF != 0, signed(w, neg) != -signed(w, a));
            prop_assert_eq!(unary(Unary::Not, w, a, flags), (cut ^ w.all_ones(), flags));
        }

        #[test]
        fn bits(w in widths(), a in numbers(), n in 0u64..200, flags in 0u64..0x1000) {
            let (n_in, a) = (n % (w.bytes() * 8), a & w.all_ones());
            let was = a >> n_in & 1;
            for (op, now) in [(BitOperation::Test, was), (BitOperation::Set, 1), (BitOperation::Reset, 0),
                (BitOperation::Complement, 1 - was)]
            {
                let (result, after) = bit(op, w, a, n, flags);
                prop_assert_eq!(result, a & !(1 << n_in) | now << n_in);
                prop_assert_eq!(after, flags & !CF | was);
            }
        }

        #[test]
        fn sign_extension(w in widths(), a in numbers()) {
            prop_assert_eq!(i128::from(sign_extend(w, a).cast_signed()), signed(w, a));
        }
    }
}
