//! SVM's exit codes and event formats, told in terms that all vendors share (AMD APM vol. 2,
//! appendix C and 15.20). Pure: built and tested on any host.

use super::vmcb::{EVENT_ERROR_CODE, EVENT_EXCEPTION, EVENT_INTR, EVENT_NMI, EVENT_TYPE, EVENT_VALID, Vmcb};
use bulkhead_vmm::device::bus::Width;
use bulkhead_vmm::memory::address::Gpa;
use bulkhead_vmm::x86::emulate::InstructionKind;
use bulkhead_vmm::x86::exit::{Exit, NestedFault, PortAccess};
use bulkhead_vmm::x86::state::Injection;

/// `EXITCODE`, an open enum: unknown codes are values too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExitCode(pub u64);

#[expect(missing_docs, reason = "the names are the manual's; APM table C-1 describes each")]
impl ExitCode {
    pub const CR8_WRITE: Self = Self(0x018);
    pub const EXCEPTION_DB: Self = Self(0x041);
    pub const EXCEPTION_AC: Self = Self(0x051);
    pub const INTR: Self = Self(0x060);
    pub const NMI: Self = Self(0x061);
    pub const INIT: Self = Self(0x063);
    pub const RDPMC: Self = Self(0x06f);
    pub const CPUID: Self = Self(0x072);
    pub const IRET: Self = Self(0x074);
    pub const INVD: Self = Self(0x076);
    pub const HLT: Self = Self(0x078);
    pub const INVLPGA: Self = Self(0x07a);
    pub const IOIO: Self = Self(0x07b);
    pub const MSR: Self = Self(0x07c);
    pub const SHUTDOWN: Self = Self(0x07f);
    pub const VMRUN: Self = Self(0x080);
    pub const VMMCALL: Self = Self(0x081);
    pub const VMLOAD: Self = Self(0x082);
    pub const VMSAVE: Self = Self(0x083);
    pub const STGI: Self = Self(0x084);
    pub const CLGI: Self = Self(0x085);
    pub const SKINIT: Self = Self(0x086);
    pub const WBINVD: Self = Self(0x089);
    pub const MONITOR: Self = Self(0x08a);
    pub const MWAIT: Self = Self(0x08b);
    pub const MWAIT_ARMED: Self = Self(0x08c);
    pub const XSETBV: Self = Self(0x08d);
    pub const NPF: Self = Self(0x400);
}

/// The low half of `VMEXIT_INVALID` (-1). Silicon writes 64 bits of it, some emulators 32.
const INVALID_LOW: u64 = 0xffff_ffff;

/// Says what the exit that a VMCB records was.
#[must_use]
pub fn decode(vmcb: &Vmcb) -> Exit {
    let control = &vmcb.control;
    let code = ExitCode(control.exitcode);
    match code {
        ExitCode::INTR => Exit::HostInterrupt,
        ExitCode::NMI => Exit::HostNmi,
        ExitCode::INIT => Exit::HostInit,
        ExitCode::IRET => Exit::NmiReturn,
        ExitCode::CPUID => Exit::Cpuid,
        ExitCode::HLT => Exit::Halt,
        ExitCode::MSR if control.exitinfo1 & 1 == 0 => Exit::ReadMsr,
        ExitCode::MSR => Exit::WriteMsr,
        ExitCode::XSETBV => Exit::SetXcr,
        ExitCode::VMMCALL => Exit::Hypercall(InstructionKind::Vmmcall),
        ExitCode::INVD => Exit::CacheInvalidate(InstructionKind::Invd),
        ExitCode::WBINVD => Exit::CacheInvalidate(InstructionKind::Wbinvd),
        ExitCode::RDPMC
        | ExitCode::INVLPGA
        | ExitCode::VMRUN
        | ExitCode::VMLOAD
        | ExitCode::VMSAVE
        | ExitCode::STGI
        | ExitCode::CLGI
        | ExitCode::SKINIT
        | ExitCode::MONITOR
        | ExitCode::MWAIT
        | ExitCode::MWAIT_ARMED => Exit::Forbidden,
        ExitCode::CR8_WRITE => Exit::WriteCr8,
        ExitCode::EXCEPTION_DB => Exit::Exception { vector: 1, error_code: 0 },
        ExitCode::EXCEPTION_AC => Exit::Exception { vector: 17, error_code: low_half(control.exitinfo1) },
        ExitCode::IOIO => port_access(control.exitinfo1, control.exitinfo2)
            .map_or(Exit::Unknown { code: code.0 }, Exit::Port),
        ExitCode::NPF => {
            let info = control.exitinfo1;
            Exit::NestedFault(NestedFault {
                gpa: Gpa::new(control.exitinfo2),
                present: info & 1 != 0,
                write: info & 1 << 1 != 0,
                execute: info & 1 << 4 != 0,
                table_walk: info & 1 << 33 != 0,
                delivery: control.exitintinfo & EVENT_VALID != 0,
            })
        }
        ExitCode::SHUTDOWN => Exit::Shutdown,
        ExitCode(other) if other & INVALID_LOW == INVALID_LOW => Exit::InvalidState,
        ExitCode(other) => Exit::Unknown { code: other },
    }
}

#[expect(clippy::cast_possible_truncation, reason = "an error code has 32 bits")]
fn low_half(value: u64) -> u32 {
    value as u32
}

/// EXITINFO1 and EXITINFO2 of an I/O exit (APM 15.10.2).
fn port_access(info1: u64, info2: u64) -> Option<PortAccess> {
    let width = Width::from_bytes(info1 >> 4 & 7)?;
    Some(PortAccess {
        #[expect(clippy::cast_possible_truncation, reason = "bits 31:16 are the port")]
        port: (info1 >> 16) as u16,
        width,
        input: info1 & 1 != 0,
        string: info1 & 1 << 2 != 0,
        repeat: info1 & 1 << 3 != 0,
        next_rip: info2,
    })
}

/// `EVENTINJ` for an event.
#[must_use]
pub const fn encode_event(event: Injection) -> u64 {
    match event {
        Injection::Nmi => EVENT_VALID | EVENT_NMI | 2,
        Injection::Exception { vector, error_code: None } => EVENT_VALID | EVENT_EXCEPTION | vector as u64,
        Injection::Exception { vector, error_code: Some(code) } => {
            EVENT_VALID | EVENT_EXCEPTION | EVENT_ERROR_CODE | vector as u64 | (code as u64) << 32
        }
    }
}

/// Whether `EXITINTINFO` tells of an external interrupt, offered by `V_IRQ`, whose delivery did
/// not come to its end.
#[must_use]
pub const fn is_interrupted_interrupt(info: u64) -> bool {
    info & (EVENT_VALID | EVENT_TYPE) == EVENT_VALID | EVENT_INTR
}

/// The event in `EXITINTINFO`, if it must be injected again. A software interrupt need not: RIP
/// still points at its instruction, which is executed anew. Nor need an external one: it waits
/// in IRR until it was taken.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "fields of the register")]
pub const fn decode_event(info: u64) -> Option<Injection> {
    if info & EVENT_VALID == 0 {
        return None;
    }
    let vector = info as u8;
    match info & EVENT_TYPE {
        EVENT_NMI => Some(Injection::Nmi),
        EVENT_EXCEPTION => {
            // INT3 and INTO are re-executed like INTn (APM 15.20).
            if vector == 3 || vector == 4 {
                return None;
            }
            let error_code = if info & EVENT_ERROR_CODE != 0 { Some((info >> 32) as u32) } else { None };
            Some(Injection::Exception { vector, error_code })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit(code: u64, info1: u64, info2: u64) -> Exit {
        let mut vmcb = Vmcb::zeroed();
        vmcb.control.exitcode = code;
        vmcb.control.exitinfo1 = info1;
        vmcb.control.exitinfo2 = info2;
        decode(&vmcb)
    }

    #[test]
    fn every_intercepted_code_has_its_meaning() {
        assert_eq!(exit(0x72, 0, 0), Exit::Cpuid);
        assert_eq!(exit(0x7c, 0, 0), Exit::ReadMsr);
        assert_eq!(exit(0x7c, 1, 0), Exit::WriteMsr);
        assert_eq!(exit(0x7f, 0, 0), Exit::Shutdown);
        for code in [0x6f, 0x7a, 0x80, 0x82, 0x83, 0x84, 0x85, 0x86, 0x8a, 0x8b, 0x8c] {
            assert_eq!(exit(code, 0, 0), Exit::Forbidden, "{code:#x}");
        }
        assert_eq!(exit(0x1234, 0, 0), Exit::Unknown { code: 0x1234 });
    }

    #[test]
    fn invalid_is_known_in_both_widths() {
        assert_eq!(exit(u64::MAX, 0, 0), Exit::InvalidState);
        assert_eq!(exit(0xffff_ffff, 0, 0), Exit::InvalidState);
    }

    #[test]
    fn port_accesses() {
        // out 0x80, al as an emulator reports it, without address-size bits.
        let want = PortAccess {
            port: 0x80,
            width: Width::Byte,
            input: false,
            string: false,
            repeat: false,
            next_rip: 0x102,
        };
        assert_eq!(exit(0x7b, 0x0080_0010, 0x102), Exit::Port(want));
        assert_eq!(
            exit(0x7b, 0x0cf8_004d, 0),
            Exit::Port(PortAccess {
                port: 0xcf8,
                width: Width::Dword,
                input: true,
                string: true,
                repeat: true,
                next_rip: 0
            })
        );
        assert_eq!(exit(0x7b, 0x0080_0000, 0), Exit::Unknown { code: 0x7b }, "no width");
    }

    #[test]
    fn nested_faults() {
        let Exit::NestedFault(f) = exit(0x400, 0x1_0000_0007, 0xfec0_0010) else { panic!() };
        assert!(f.present && f.write && !f.execute && !f.table_walk);
        assert_eq!(f.gpa, Gpa::new(0xfec0_0010));
        let Exit::NestedFault(f) = exit(0x400, 0x2_0000_0014, 0) else { panic!() };
        assert!(!f.present && f.execute && f.table_walk && !f.delivery);
        // The push of an interrupt's frame, and of `int 0x21`'s, to what is no RAM.
        for event in [0x8000_0021, 0x8000_0421] {
            let mut vmcb = Vmcb::zeroed();
            (vmcb.control.exitcode, vmcb.control.exitinfo1) = (0x400, 0x1_0000_0006);
            vmcb.control.exitintinfo = event;
            let Exit::NestedFault(f) = decode(&vmcb) else { panic!() };
            assert!(f.delivery && f.write, "{event:#x}");
        }
    }

    #[test]
    fn events_survive_the_round_trip() {
        for event in [
            Injection::Nmi,
            Injection::Exception { vector: 14, error_code: Some(0x17) },
            Injection::Exception { vector: 6, error_code: None },
        ] {
            assert_eq!(decode_event(encode_event(event)), Some(event));
        }
        assert_eq!(decode_event(0x8000_0421), None, "int 0x21 is executed again");
        assert_eq!(decode_event(0x8000_0303), None, "int3 is executed again");
        assert_eq!(decode_event(0x8000_0031), None, "interrupt 0x31 is offered again");
        assert_eq!(decode_event(0x306), None, "not valid");
        assert!(is_interrupted_interrupt(0x8000_0031));
        for info in [0x31, 0x8000_0306, 0x8000_0202, 0x8000_0421] {
            assert!(!is_interrupted_interrupt(info), "{info:#x}");
        }
    }
}
