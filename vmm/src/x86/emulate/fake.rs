//! A vCPU's registers for host tests.

use crate::x86::state::{
    CR0_PE, CR0_PG, CR4_PAE, ControlRegister, CpuState, EFER_LMA, EFER_LME, Gpr, Injection, Segment,
    SegmentName,
};

/// Registers in plain fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FakeCpu {
    pub(crate) gpr: [u64; 16],
    pub(crate) rip: u64,
    pub(crate) rflags: u64,
    pub(crate) control: [u64; 4],
    pub(crate) efer: u64,
    pub(crate) segments: [Segment; 10],
    pub(crate) cpl: u8,
    pub(crate) injection: Option<Injection>,
}

impl FakeCpu {
    /// Real mode: no paging, 16-bit code, all bases 0.
    pub(crate) fn bits16() -> Self {
        Self {
            gpr: [0; 16],
            rip: 0,
            rflags: 2,
            control: [0; 4],
            efer: 0,
            segments: [Segment { limit: 0xffff, attributes: 0x93, ..Segment::default() }; 10],
            cpl: 0,
            injection: None,
        }
    }

    /// Flat protected mode without paging.
    pub(crate) fn bits32() -> Self {
        let mut cpu = Self::bits16();
        cpu.control[0] = CR0_PE;
        for segment in &mut cpu.segments {
            *segment = Segment { limit: u32::MAX, attributes: 0xc93, ..Segment::default() };
        }
        cpu
    }

    /// 64-bit mode; CR3 must be set to page tables.
    pub(crate) fn bits64(cr3: u64) -> Self {
        let mut cpu = Self::bits32();
        cpu.control = [CR0_PE | CR0_PG, 0, cr3, CR4_PAE];
        cpu.efer = EFER_LME | EFER_LMA;
        cpu.segments[SegmentName::Cs as usize].attributes = 0xa9b;
        cpu
    }
}

impl CpuState for FakeCpu {
    fn gpr(&self, register: Gpr) -> u64 {
        self.gpr[register as usize]
    }
    fn set_gpr(&mut self, register: Gpr, value: u64) {
        self.gpr[register as usize] = value;
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
        self.control[register as usize]
    }
    fn set_control(&mut self, register: ControlRegister, value: u64) {
        self.control[register as usize] = value;
    }
    fn efer(&self) -> u64 {
        self.efer
    }
    fn set_efer(&mut self, efer: u64) {
        self.efer = efer;
    }
    fn segment(&self, name: SegmentName) -> Segment {
        self.segments[name as usize]
    }
    fn set_segment(&mut self, name: SegmentName, segment: Segment) {
        self.segments[name as usize] = segment;
    }
    fn cpl(&self) -> u8 {
        self.cpl
    }
    fn set_cpl(&mut self, cpl: u8) {
        self.cpl = cpl;
    }
    fn interruptible(&self) -> bool {
        self.rflags & 1 << 9 != 0
    }
    fn injection_pending(&self) -> bool {
        self.injection.is_some()
    }
    fn inject(&mut self, event: Injection) {
        self.injection = Some(event);
    }
}
