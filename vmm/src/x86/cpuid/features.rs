//! Feature bits that cells are shown, by register.
//!
//! The names are those of the manuals (Intel SDM vol. 2, CPUID; AMD APM vol. 3,
//! appendix E). A bit that means something else to each vendor is named for both.

use super::Registers;
use core::fmt;

/// The bits of one register that pass.
#[derive(Clone, Copy)]
pub(super) struct Bits {
    mask: u32,
    names: &'static [(u32, &'static str)],
}

impl Bits {
    const NONE: Self = Self::new(&[]);
    const ALL: Self = Self { mask: u32::MAX, names: &[] };

    /// The bits numbered so.
    const fn new(names: &'static [(u32, &'static str)]) -> Self {
        let mut mask = 0;
        let mut i = 0;
        while i < names.len() {
            mask |= 1 << names[i].0;
            i += 1;
        }
        Self { mask, names }
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.mask == u32::MAX {
            return f.write_str("all");
        }
        for (i, (_, name)) in self.names.iter().enumerate() {
            write!(f, "{}{name}", if i == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

/// The bits of a leaf that pass: EAX, EBX, ECX, EDX.
pub(super) struct Features(pub(super) [Bits; 4]);

impl Features {
    pub(super) fn select(&self, host: Registers) -> Registers {
        let [a, b, c, d] = &self.0;
        let [eax, ebx, ecx, edx] = host;
        [eax & a.mask, ebx & b.mask, ecx & c.mask, edx & d.mask]
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = true;
        for (name, bits) in ["EAX", "EBX", "ECX", "EDX"].into_iter().zip(&self.0) {
            if bits.mask != 0 {
                write!(f, "{}{name}: {bits}", if first { "" } else { "; " })?;
                first = false;
            }
        }
        Ok(())
    }
}

/// Leaf 1. EAX is the model, EBX has numbers.
#[rustfmt::skip]
pub(super) static BASIC: Features = Features([
    Bits::ALL,
    Bits::ALL,
    Bits::new(&[
        (0, "SSE3"), (1, "PCLMULQDQ"), (9, "SSSE3"), (12, "FMA"), (13, "CMPXCHG16B"), (17, "PCID"),
        (19, "SSE4.1"), (20, "SSE4.2"), (22, "MOVBE"), (23, "POPCNT"), (25, "AES"), (26, "XSAVE"),
        (28, "AVX"), (29, "F16C"), (30, "RDRAND"),
    ]),
    Bits::new(&[
        (0, "FPU"), (1, "VME"), (2, "DE"), (3, "PSE"), (4, "TSC"), (5, "MSR"), (6, "PAE"), (8, "CMPXCHG8B"),
        (11, "SEP"), (12, "MTRR"), (13, "PGE"), (15, "CMOV"), (16, "PAT"), (17, "PSE-36"),
        (19, "CLFLUSH"), (23, "MMX"), (24, "FXSR"), (25, "SSE"), (26, "SSE2"), (27, "SS"), (28, "HTT"),
    ]),
]);

/// Leaf 7, subleaf 0. EAX is the last subleaf.
#[rustfmt::skip]
pub(super) static STRUCTURED: Features = Features([
    Bits::ALL,
    Bits::new(&[
        (0, "FSGSBASE"), (3, "BMI1"), (5, "AVX2"), (6, "FDP_EXCPTN_ONLY"), (7, "SMEP"), (8, "BMI2"),
        (9, "ERMS"), (10, "INVPCID"), (13, "FPU CS/DS deprecated"), (16, "AVX512F"), (17, "AVX512DQ"),
        (18, "RDSEED"), (19, "ADX"), (20, "SMAP"), (21, "AVX512_IFMA"), (23, "CLFLUSHOPT"), (24, "CLWB"),
        (26, "AVX512PF"), (27, "AVX512ER"), (28, "AVX512CD"), (29, "SHA"), (30, "AVX512BW"),
        (31, "AVX512VL"),
    ]),
    Bits::new(&[
        (0, "PREFETCHWT1"), (1, "AVX512_VBMI"), (2, "UMIP"), (3, "PKU"), (6, "AVX512_VBMI2"), (8, "GFNI"),
        (9, "VAES"), (10, "VPCLMULQDQ"), (11, "AVX512_VNNI"), (12, "AVX512_BITALG"),
        (14, "AVX512_VPOPCNTDQ"), (16, "LA57"), (22, "RDPID"), (25, "CLDEMOTE"), (27, "MOVDIRI"),
        (28, "MOVDIR64B"),
    ]),
    Bits::new(&[
        (2, "AVX512_4VNNIW"), (3, "AVX512_4FMAPS"), (4, "FSRM"), (8, "AVX512_VP2INTERSECT"),
        (10, "MD_CLEAR"), (14, "SERIALIZE"), (23, "AVX512_FP16"), (26, "IBRS/IBPB"), (27, "STIBP"),
        (28, "L1D_FLUSH"), (29, "ARCH_CAPABILITIES"), (31, "SSBD"),
    ]),
]);

/// Leaf 7, subleaf 1.
#[rustfmt::skip]
pub(super) static STRUCTURED_1: Features = Features([
    Bits::new(&[
        (0, "SHA512"), (1, "SM3"), (2, "SM4"), (3, "RAO-INT"), (4, "AVX-VNNI"), (5, "AVX512_BF16"),
        (7, "CMPCCXADD"), (10, "FZRM"), (11, "FSRS"), (12, "FSRCS"), (23, "AVX-IFMA"),
    ]),
    Bits::NONE,
    Bits::NONE,
    Bits::new(&[(4, "AVX-VNNI-INT8"), (5, "AVX-NE-CONVERT"), (10, "AVX-VNNI-INT16"), (14, "PREFETCHI")]),
]);

/// Leaf 7, subleaf 2: what else SPEC_CTRL can do.
#[rustfmt::skip]
pub(super) static STRUCTURED_2: Features = Features([
    Bits::NONE,
    Bits::NONE,
    Bits::NONE,
    Bits::new(&[
        (0, "PSFD"), (1, "IPRED_CTRL"), (2, "RRSBA_CTRL"), (3, "DDPD_U"), (4, "BHI_CTRL"), (5, "MCDT_NO"),
    ]),
]);

/// Leaf 0xd, subleaf 0: the low half of [`XCR0_ALLOWED`](super::XCR0_ALLOWED), then sizes.
#[rustfmt::skip]
pub(super) static XSAVE_STATES: Features = Features([
    Bits::new(&[
        (0, "x87"), (1, "SSE"), (2, "AVX"), (5, "opmask"), (6, "ZMM_Hi256"), (7, "Hi16_ZMM"), (9, "PKRU"),
    ]),
    Bits::ALL,
    Bits::ALL,
    Bits::NONE,
]);

/// Leaf 0xd, subleaf 1: instructions, and a size; no supervisor states.
pub(super) static XSAVE_FORMS: Features = Features([
    Bits::new(&[(0, "XSAVEOPT"), (1, "XSAVEC"), (2, "XGETBV_1"), (3, "XSAVES")]),
    Bits::ALL,
    Bits::NONE,
    Bits::NONE,
]);

/// Leaf 0x80000001.
#[rustfmt::skip]
pub(super) static EXTENDED: Features = Features([
    Bits::ALL,
    Bits::ALL,
    Bits::new(&[
        (0, "LAHF"), (1, "CmpLegacy"), (4, "AltMovCr8"), (5, "LZCNT"), (6, "SSE4A"), (7, "MisAlignSse"),
        (8, "PREFETCHW"), (11, "XOP"), (16, "FMA4"), (21, "TBM"), (22, "TopologyExtensions"),
    ]),
    Bits::new(&[
        (0, "FPU"), (1, "VME"), (2, "DE"), (3, "PSE"), (4, "TSC"), (5, "MSR"), (6, "PAE"), (8, "CMPXCHG8B"),
        (11, "SYSCALL"), (12, "MTRR"), (13, "PGE"), (15, "CMOV"), (16, "PAT"), (17, "PSE36"), (20, "NX"),
        (22, "MmxExt"), (23, "MMX"), (24, "FXSR"), (26, "Page1GB"), (27, "RDTSCP"), (29, "LM"),
        (30, "3DNowExt"), (31, "3DNow"),
    ]),
]);

/// Leaf 0x80000008: address sizes in EAX, features in EBX, APIC ID sizes in ECX.
#[rustfmt::skip]
pub(super) static CAPACITY: Features = Features([
    Bits::ALL,
    Bits::new(&[
        (0, "CLZERO"), (2, "RstrFpErrPtrs"), (9, "WBNOINVD"), (12, "IBPB"), (14, "IBRS"), (15, "STIBP"),
        (16, "IbrsAlwaysOn"), (17, "StibpAlwaysOn"), (18, "IbrsPreferred"), (19, "IbrsSameMode"),
        (20, "EferLmsleUnsupported"), (24, "SSBD"), (26, "SsbdNotRequired"), (28, "PSFD"), (29, "BTC_NO"),
        (30, "IBPB_RET"),
    ]),
    Bits::ALL,
    Bits::NONE,
]);

/// Leaf 0x80000021.
#[rustfmt::skip]
pub(super) static EXTENDED_2: Features = Features([
    Bits::new(&[
        (0, "NoNestedDataBp"), (2, "LFenceAlwaysSerializing"), (6, "NullSelectClearsBase"),
        (9, "NoSmmCtlMsr"), (10, "FSRS"), (11, "FSRC"), (27, "SBPB"), (28, "IBPB_BRTYPE"), (29, "SRSO_NO"),
    ]),
    Bits::NONE,
    Bits::NONE,
    Bits::NONE,
]);

/// All of them, by leaf and subleaf.
pub(super) static NAMED: &[(&str, &Features)] = &[
    ("1", &BASIC),
    ("7, 0", &STRUCTURED),
    ("7, 1", &STRUCTURED_1),
    ("7, 2", &STRUCTURED_2),
    ("0xd, 0", &XSAVE_STATES),
    ("0xd, 1", &XSAVE_FORMS),
    ("0x80000001", &EXTENDED),
    ("0x80000008", &CAPACITY),
    ("0x80000021", &EXTENDED_2),
];
