//! Registers of a vCPU as policy sees them.
//!
//! SVM keeps them in the VMCB and a save area, VMX in the VMCS; policy reads and writes
//! them through [`CpuState`] and cannot tell which.

/// A general-purpose register, numbered as in ModRM and REX (AMD APM vol. 3, 1.4.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are the manual's")]
pub enum Gpr {
    Rax = 0,
    Rcx = 1,
    Rdx = 2,
    Rbx = 3,
    Rsp = 4,
    Rbp = 5,
    Rsi = 6,
    Rdi = 7,
    R8 = 8,
    R9 = 9,
    R10 = 10,
    R11 = 11,
    R12 = 12,
    R13 = 13,
    R14 = 14,
    R15 = 15,
}

impl Gpr {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 16] = [
        Self::Rax,
        Self::Rcx,
        Self::Rdx,
        Self::Rbx,
        Self::Rsp,
        Self::Rbp,
        Self::Rsi,
        Self::Rdi,
        Self::R8,
        Self::R9,
        Self::R10,
        Self::R11,
        Self::R12,
        Self::R13,
        Self::R14,
        Self::R15,
    ];
}

/// A segment or system-segment register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are the manual's")]
pub enum SegmentName {
    Es,
    Cs,
    Ss,
    Ds,
    Fs,
    Gs,
    Ldtr,
    Tr,
    Gdtr,
    Idtr,
}

/// A segment register with its hidden part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Segment {
    /// The visible selector.
    pub selector: u16,
    /// Access rights in the descriptor's own places: bits 7:0 are descriptor bits 47:40
    /// (type, S, DPL, P), bits 11:8 are descriptor bits 55:52 (AVL, L, D/B, G), as in the
    /// VMCB (AMD APM vol. 2, 15.5.1).
    pub attributes: u16,
    /// The limit in bytes, after granularity.
    pub limit: u32,
    /// The base.
    pub base: u64,
}

impl Segment {
    /// L: 64-bit code.
    pub const fn is_long(&self) -> bool {
        self.attributes & 1 << 9 != 0
    }

    /// D/B: 32-bit default size.
    pub const fn is_big(&self) -> bool {
        self.attributes & 1 << 10 != 0
    }
}

/// The control registers that have a shadow or a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are the manual's")]
pub enum ControlRegister {
    Cr0,
    Cr2,
    Cr3,
    Cr4,
}

/// `CR0.PE`.
pub const CR0_PE: u64 = 1;
/// `CR0.ET`, always set.
pub const CR0_ET: u64 = 1 << 4;
/// `CR0.NE`.
pub const CR0_NE: u64 = 1 << 5;
/// `CR0.WP`.
pub const CR0_WP: u64 = 1 << 16;
/// `CR0.PG`.
pub const CR0_PG: u64 = 1 << 31;
/// `CR4.PSE`.
pub const CR4_PSE: u64 = 1 << 4;
/// `CR4.PAE`.
pub const CR4_PAE: u64 = 1 << 5;
/// `CR4.LA57`.
pub const CR4_LA57: u64 = 1 << 12;
/// `EFER.LME`.
pub const EFER_LME: u64 = 1 << 8;
/// `EFER.LMA`.
pub const EFER_LMA: u64 = 1 << 10;
/// `EFER.NXE`.
pub const EFER_NXE: u64 = 1 << 11;
/// `EFER.SVME`.
pub const EFER_SVME: u64 = 1 << 12;

/// An event to be injected at the next entry. External interrupts are none: they are offered
/// to the CPU, which takes them when it can.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Injection {
    /// A non-maskable interrupt.
    Nmi,
    /// An exception, with an error code where the vector has one.
    Exception {
        /// The vector, 0..32.
        vector: u8,
        /// The error code, for vectors that push one.
        error_code: Option<u32>,
    },
}

/// #UD, invalid opcode.
pub const UNDEFINED_OPCODE: Injection = Injection::Exception { vector: 6, error_code: None };
/// #GP(0), general protection.
pub const GENERAL_PROTECTION: Injection = Injection::Exception { vector: 13, error_code: Some(0) };

/// The registers of one vCPU, between an exit and the next entry.
pub trait CpuState {
    /// Reads a general-purpose register.
    fn gpr(&self, register: Gpr) -> u64;
    /// Writes a general-purpose register, all 64 bits.
    fn set_gpr(&mut self, register: Gpr, value: u64);
    /// The instruction pointer.
    fn rip(&self) -> u64;
    /// Sets the instruction pointer; an interrupt shadow ends.
    fn set_rip(&mut self, rip: u64);
    /// The flags.
    fn rflags(&self) -> u64;
    /// Sets the flags.
    fn set_rflags(&mut self, rflags: u64);
    /// Reads a control register, as the guest sees it.
    fn control(&self, register: ControlRegister) -> u64;
    /// Sets a control register.
    fn set_control(&mut self, register: ControlRegister, value: u64);
    /// EFER as the guest sees it.
    fn efer(&self) -> u64;
    /// Sets EFER as the guest sees it.
    fn set_efer(&mut self, efer: u64);
    /// Reads a segment register.
    fn segment(&self, name: SegmentName) -> Segment;
    /// Sets a segment register. A null or unusable segment has attributes 0.
    fn set_segment(&mut self, name: SegmentName, segment: Segment);
    /// The current privilege level, 0..=3.
    fn cpl(&self) -> u8;
    /// Sets the current privilege level, 0..=3.
    fn set_cpl(&mut self, cpl: u8);
    /// Whether the guest could take an external interrupt now: RFLAGS.IF set, no shadow.
    fn interruptible(&self) -> bool;
    /// Whether an event waits to be injected at the next entry.
    fn injection_pending(&self) -> bool;
    /// Injects an event at the next entry. There must be none waiting.
    fn inject(&mut self, event: Injection);
}
