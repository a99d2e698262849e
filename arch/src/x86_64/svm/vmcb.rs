//! The virtual machine control block: layout only (AMD APM vol. 2, appendix B).
//!
//! Field names are the manual's. Nothing here executes anything, so it builds and is
//! tested on any host.

/// One segment register of the state save area (APM table B-2): attributes are packed to
/// 12 bits as in `vmm::x86::state::Segment`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct VmcbSegment {
    /// Selector.
    pub selector: u16,
    /// Attributes.
    pub attributes: u16,
    /// Limit in bytes.
    pub limit: u32,
    /// Base.
    pub base: u64,
}

/// The control area (APM table B-1), 1024 bytes.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[expect(missing_docs, reason = "the names are the manual's; APM table B-1 describes each")]
pub struct ControlArea {
    pub intercept_cr_read: u16,
    pub intercept_cr_write: u16,
    pub intercept_dr_read: u16,
    pub intercept_dr_write: u16,
    pub intercept_exceptions: u32,
    pub intercept_misc1: u32,
    pub intercept_misc2: u32,
    pub intercept_misc3: u32,
    reserved_018: [u8; 0x03c - 0x018],
    pub pause_filter_threshold: u16,
    pub pause_filter_count: u16,
    pub iopm_base_pa: u64,
    pub msrpm_base_pa: u64,
    pub tsc_offset: u64,
    pub guest_asid: u32,
    pub tlb_control: u8,
    reserved_05d: [u8; 3],
    pub v_tpr: u8,
    pub v_irq: u8,
    pub v_intr_prio: u8,
    pub v_intr_masking: u8,
    pub v_intr_vector: u8,
    reserved_065: [u8; 3],
    pub interrupt_shadow: u64,
    pub exitcode: u64,
    pub exitinfo1: u64,
    pub exitinfo2: u64,
    pub exitintinfo: u64,
    pub np_enable: u64,
    pub avic_apic_bar: u64,
    pub ghcb_pa: u64,
    pub eventinj: u64,
    pub n_cr3: u64,
    pub virt_ext: u64,
    pub clean: u32,
    reserved_0c4: u32,
    pub nrip: u64,
    pub fetched_count: u8,
    pub fetched_bytes: [u8; 15],
    reserved_0e0: [u8; 0x400 - 0x0e0],
}

/// The state save area (APM table B-2), from offset 0x400.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[expect(missing_docs, reason = "the names are the manual's; APM table B-2 describes each")]
pub struct SaveArea {
    pub es: VmcbSegment,
    pub cs: VmcbSegment,
    pub ss: VmcbSegment,
    pub ds: VmcbSegment,
    pub fs: VmcbSegment,
    pub gs: VmcbSegment,
    pub gdtr: VmcbSegment,
    pub ldtr: VmcbSegment,
    pub idtr: VmcbSegment,
    pub tr: VmcbSegment,
    reserved_0a0: [u8; 0x0cb - 0x0a0],
    pub cpl: u8,
    reserved_0cc: u32,
    pub efer: u64,
    reserved_0d8: [u8; 0x148 - 0x0d8],
    pub cr4: u64,
    pub cr3: u64,
    pub cr0: u64,
    pub dr7: u64,
    pub dr6: u64,
    pub rflags: u64,
    pub rip: u64,
    reserved_180: [u8; 0x1d8 - 0x180],
    pub rsp: u64,
    reserved_1e0: [u8; 0x1f8 - 0x1e0],
    pub rax: u64,
    pub star: u64,
    pub lstar: u64,
    pub cstar: u64,
    pub sfmask: u64,
    pub kernel_gs_base: u64,
    pub sysenter_cs: u64,
    pub sysenter_esp: u64,
    pub sysenter_eip: u64,
    pub cr2: u64,
    reserved_248: [u8; 0x268 - 0x248],
    pub g_pat: u64,
    pub dbgctl: u64,
    reserved_278: [u8; 0xc00 - 0x278],
}

/// The whole block, one page.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(4096))]
pub struct Vmcb {
    /// What is intercepted and injected, and how the last exit came about.
    pub control: ControlArea,
    /// The guest's registers.
    pub save: SaveArea,
}

/// The MSR permission map: two bits an MSR, 1 = intercept (APM 15.11).
#[derive(Clone)]
#[repr(C, align(4096))]
pub struct MsrPermissionMap(pub [u8; 8192]);

/// The I/O permission map: one bit a port, 1 = intercept (APM 15.10.1).
#[derive(Clone)]
#[repr(C, align(4096))]
pub struct IoPermissionMap(pub [u8; 12288]);

const _: () = {
    use core::mem::{offset_of, size_of};
    assert!(size_of::<ControlArea>() == 0x400);
    assert!(size_of::<SaveArea>() == 0xc00);
    assert!(size_of::<Vmcb>() == 0x1000);
    assert!(offset_of!(ControlArea, pause_filter_threshold) == 0x03c);
    assert!(offset_of!(ControlArea, iopm_base_pa) == 0x040);
    assert!(offset_of!(ControlArea, guest_asid) == 0x058);
    assert!(offset_of!(ControlArea, v_tpr) == 0x060);
    assert!(offset_of!(ControlArea, interrupt_shadow) == 0x068);
    assert!(offset_of!(ControlArea, exitcode) == 0x070);
    assert!(offset_of!(ControlArea, exitintinfo) == 0x088);
    assert!(offset_of!(ControlArea, np_enable) == 0x090);
    assert!(offset_of!(ControlArea, eventinj) == 0x0a8);
    assert!(offset_of!(ControlArea, n_cr3) == 0x0b0);
    assert!(offset_of!(ControlArea, clean) == 0x0c0);
    assert!(offset_of!(ControlArea, nrip) == 0x0c8);
    assert!(offset_of!(ControlArea, fetched_count) == 0x0d0);
    assert!(offset_of!(SaveArea, tr) == 0x090);
    assert!(offset_of!(SaveArea, cpl) == 0x0cb);
    assert!(offset_of!(SaveArea, efer) == 0x0d0);
    assert!(offset_of!(SaveArea, cr4) == 0x148);
    assert!(offset_of!(SaveArea, rip) == 0x178);
    assert!(offset_of!(SaveArea, rsp) == 0x1d8);
    assert!(offset_of!(SaveArea, rax) == 0x1f8);
    assert!(offset_of!(SaveArea, cr2) == 0x240);
    assert!(offset_of!(SaveArea, g_pat) == 0x268);
    assert!(size_of::<MsrPermissionMap>() == 8192);
    assert!(size_of::<IoPermissionMap>() == 12288);
};

/// Bits of `intercept_misc1` (APM table B-1, offset 00Ch).
pub mod misc1 {
    #![expect(missing_docs, reason = "the names are the manual's")]
    pub const INTR: u32 = 1 << 0;
    pub const NMI: u32 = 1 << 1;
    pub const SMI: u32 = 1 << 2;
    pub const INIT: u32 = 1 << 3;
    pub const RDPMC: u32 = 1 << 15;
    pub const CPUID: u32 = 1 << 18;
    pub const IRET: u32 = 1 << 20;
    pub const INVD: u32 = 1 << 22;
    pub const HLT: u32 = 1 << 24;
    pub const INVLPGA: u32 = 1 << 26;
    pub const IOIO_PROT: u32 = 1 << 27;
    pub const MSR_PROT: u32 = 1 << 28;
    pub const SHUTDOWN: u32 = 1 << 31;
}

/// Bits of `intercept_misc2` (APM table B-1, offset 010h).
pub mod misc2 {
    #![expect(missing_docs, reason = "the names are the manual's")]
    pub const VMRUN: u32 = 1 << 0;
    pub const VMMCALL: u32 = 1 << 1;
    pub const VMLOAD: u32 = 1 << 2;
    pub const VMSAVE: u32 = 1 << 3;
    pub const STGI: u32 = 1 << 4;
    pub const CLGI: u32 = 1 << 5;
    pub const SKINIT: u32 = 1 << 6;
    pub const WBINVD: u32 = 1 << 9;
    pub const MONITOR: u32 = 1 << 10;
    pub const MWAIT: u32 = 1 << 11;
    pub const MWAIT_ARMED: u32 = 1 << 12;
    pub const XSETBV: u32 = 1 << 13;
}

/// Bits of `clean` (APM 15.15.3): a set bit says that the group has not changed in memory
/// since the last `VMRUN` of this block on this CPU.
pub mod clean {
    #![expect(missing_docs, reason = "the names are the manual's")]
    pub const I: u32 = 1 << 0;
    pub const IOPM: u32 = 1 << 1;
    pub const ASID: u32 = 1 << 2;
    pub const TPR: u32 = 1 << 3;
    pub const NP: u32 = 1 << 4;
    pub const CRX: u32 = 1 << 5;
    pub const DRX: u32 = 1 << 6;
    pub const DT: u32 = 1 << 7;
    pub const SEG: u32 = 1 << 8;
    pub const CR2: u32 = 1 << 9;
    pub const LBR: u32 = 1 << 10;
    pub const AVIC: u32 = 1 << 11;
    pub const ALL: u32 = 0xfff;
}

/// Bit of `v_intr_prio`: `V_IRQ` is taken whatever `V_TPR` is (APM table B-1, offset 060h, bit 20).
pub const V_IGN_TPR: u8 = 1 << 4;
/// Valid bit of `eventinj` and `exitintinfo` (APM 15.20).
pub const EVENT_VALID: u64 = 1 << 31;
/// Error-code-valid bit of `eventinj` and `exitintinfo`.
pub const EVENT_ERROR_CODE: u64 = 1 << 11;
/// Event type: external interrupt.
pub const EVENT_INTR: u64 = 0 << 8;
/// Event type: NMI.
pub const EVENT_NMI: u64 = 2 << 8;
/// Event type: exception.
pub const EVENT_EXCEPTION: u64 = 3 << 8;
/// Mask of the event type.
pub const EVENT_TYPE: u64 = 7 << 8;

/// `tlb_control`: flush nothing (APM table 15-9).
pub const TLB_FLUSH_NONE: u8 = 0;
/// `tlb_control`: flush everything (APM table 15-9).
pub const TLB_FLUSH_ALL: u8 = 1;
/// `tlb_control`: flush this guest's entries; needs CPUID 8000_000A EDX.6.
pub const TLB_FLUSH_ASID: u8 = 3;

impl MsrPermissionMap {
    /// A map that intercepts every access.
    pub const fn all() -> Self {
        Self([0xff; 8192])
    }

    /// Lets the guest read and/or write `msr` without an exit. An MSR outside of the three
    /// ranges of the map is always intercepted; then nothing changes.
    pub fn allow(&mut self, msr: u32, read: bool, write: bool) {
        let base = match msr {
            0..=0x1fff => 0,
            0xc000_0000..=0xc000_1fff => 0x800,
            0xc001_0000..=0xc001_1fff => 0x1000,
            _ => return,
        };
        let index = (msr & 0x1fff) as usize;
        let (byte, shift) = (base + index / 4, index % 4 * 2);
        let bits = u8::from(read) | u8::from(write) << 1;
        self.0[byte] &= !(bits << shift);
    }
}

impl IoPermissionMap {
    /// A map that intercepts every port.
    pub const fn all() -> Self {
        Self([0xff; 12288])
    }

    /// A map that intercepts nothing but what lies beyond the last port.
    pub const fn none() -> Self {
        let mut map = [0; 12288];
        // An access at port 0xffff of more than one byte tests the bits after the last port.
        map[8192] = 0xff;
        Self(map)
    }

    /// Intercepts (or not) `port`.
    pub fn set(&mut self, port: u16, intercepted: bool) {
        let bit = 1 << (port & 7);
        let byte = &mut self.0[usize::from(port >> 3)];
        if intercepted {
            *byte |= bit;
        } else {
            *byte &= !bit;
        }
    }
}

impl Vmcb {
    /// A block of zeros.
    pub const fn zeroed() -> Self {
        const SEGMENT: VmcbSegment = VmcbSegment { selector: 0, attributes: 0, limit: 0, base: 0 };
        Self {
            control: ControlArea {
                intercept_cr_read: 0,
                intercept_cr_write: 0,
                intercept_dr_read: 0,
                intercept_dr_write: 0,
                intercept_exceptions: 0,
                intercept_misc1: 0,
                intercept_misc2: 0,
                intercept_misc3: 0,
                reserved_018: [0; 0x24],
                pause_filter_threshold: 0,
                pause_filter_count: 0,
                iopm_base_pa: 0,
                msrpm_base_pa: 0,
                tsc_offset: 0,
                guest_asid: 0,
                tlb_control: 0,
                reserved_05d: [0; 3],
                v_tpr: 0,
                v_irq: 0,
                v_intr_prio: 0,
                v_intr_masking: 0,
                v_intr_vector: 0,
                reserved_065: [0; 3],
                interrupt_shadow: 0,
                exitcode: 0,
                exitinfo1: 0,
                exitinfo2: 0,
                exitintinfo: 0,
                np_enable: 0,
                avic_apic_bar: 0,
                ghcb_pa: 0,
                eventinj: 0,
                n_cr3: 0,
                virt_ext: 0,
                clean: 0,
                reserved_0c4: 0,
                nrip: 0,
                fetched_count: 0,
                fetched_bytes: [0; 15],
                reserved_0e0: [0; 0x320],
            },
            save: SaveArea {
                es: SEGMENT,
                cs: SEGMENT,
                ss: SEGMENT,
                ds: SEGMENT,
                fs: SEGMENT,
                gs: SEGMENT,
                gdtr: SEGMENT,
                ldtr: SEGMENT,
                idtr: SEGMENT,
                tr: SEGMENT,
                reserved_0a0: [0; 0x2b],
                cpl: 0,
                reserved_0cc: 0,
                efer: 0,
                reserved_0d8: [0; 0x70],
                cr4: 0,
                cr3: 0,
                cr0: 0,
                dr7: 0,
                dr6: 0,
                rflags: 0,
                rip: 0,
                reserved_180: [0; 0x58],
                rsp: 0,
                reserved_1e0: [0; 0x18],
                rax: 0,
                star: 0,
                lstar: 0,
                cstar: 0,
                sfmask: 0,
                kernel_gs_base: 0,
                sysenter_cs: 0,
                sysenter_esp: 0,
                sysenter_eip: 0,
                cr2: 0,
                reserved_248: [0; 0x20],
                g_pat: 0,
                dbgctl: 0,
                reserved_278: [0; 0x988],
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn msr_map_bits() {
        let mut map = MsrPermissionMap::all();
        map.allow(0xc000_0080, true, false);
        // APM 15.11: MSR C000_0000h starts at byte 800h, two bits each, low bit read.
        assert_eq!(map.0[0x800 + 0x20], 0xfe);
        map.allow(0x1b, true, true);
        assert_eq!(map.0[6], 0x3f);
        map.allow(0x1234_5678, true, true);
        assert_eq!(map.0.iter().filter(|b| **b != 0xff).count(), 2);
    }

    #[test]
    fn io_map_bits() {
        let mut map = IoPermissionMap::none();
        map.set(0xcf9, true);
        assert_eq!(map.0[0xcf9 / 8], 2);
        map.set(0xcf9, false);
        assert_eq!(map.0[0xcf9 / 8], 0);
        assert_eq!(map.0[0x10000 / 8], 0xff);
        assert!(IoPermissionMap::all().0.iter().all(|b| *b == 0xff));
    }
}
