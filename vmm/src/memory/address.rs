//! Address newtypes with checked arithmetic.
//!
//! A number that names memory says in whose terms: guest virtual ([`Gva`]), guest
//! physical ([`Gpa`]), host physical ([`Hpa`]), hypervisor virtual ([`Hva`]). The four
//! never mix, and nothing here wraps: an addition that leaves 64 bits is `None`.

use core::fmt;

/// Size of the smallest page, in bytes.
pub const PAGE_SIZE: u64 = 4096;

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// The address `raw`.
            pub const fn new(raw: u64) -> Self {
                Self(raw)
            }

            /// The address as a number.
            pub const fn raw(self) -> u64 {
                self.0
            }

            /// The address `bytes` further on, or `None` past 2^64.
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(raw) => Some(Self(raw)),
                    None => None,
                }
            }

            /// How many bytes `self` lies above `base`, or `None` below it.
            pub const fn checked_offset_from(self, base: Self) -> Option<u64> {
                self.0.checked_sub(base.0)
            }

            /// The first byte of the 4 KiB page that holds the address.
            pub const fn page_base(self) -> Self {
                Self(self.0 & !(PAGE_SIZE - 1))
            }

            /// The offset in its 4 KiB page, 0..4096.
            pub const fn page_offset(self) -> u64 {
                self.0 & (PAGE_SIZE - 1)
            }

            /// Whether the address is a multiple of `align`, a power of two.
            pub const fn is_aligned(self, align: u64) -> bool {
                self.0 & (align - 1) == 0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address!(
    /// A guest virtual address.
    Gva
);
address!(
    /// A guest physical address.
    Gpa
);
address!(
    /// A host physical address.
    Hpa
);
address!(
    /// A hypervisor virtual address.
    Hva
);

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;

    #[test]
    fn arithmetic_never_wraps() {
        assert_eq!(Gpa::new(u64::MAX).checked_add(1), None);
        assert_eq!(Gpa::new(1).checked_offset_from(Gpa::new(2)), None);
        assert_eq!(Gpa::new(0x1fff).page_base(), Gpa::new(0x1000));
        assert_eq!(Gpa::new(0x1fff).page_offset(), 0xfff);
        assert_eq!(format!("{:?} {}", Hpa::new(16), Hpa::new(16)), "Hpa(0x10) 0x10");
    }
}
