//! INS and OUTS: ports on one side, memory on the other.

use super::cache::Decoded;
use super::machine::{Machine, Place, width_of};
use super::{EmulateError, MmioBus, advance, string_is_over, string_step};
use crate::device::bus::Width;
use crate::memory::address::Gpa;
use crate::memory::guest::GuestMemory;
use crate::x86::exit::PortAccess;
use crate::x86::paging::Access;
use crate::x86::state::CpuState;
use iced_x86::Mnemonic;

/// The devices at a cell's ports.
pub trait PortBus {
    /// Reads `width` at `port`.
    fn read(&mut self, port: u16, width: Width) -> u64;
    /// Writes the low `width` of `value` at `port`.
    fn write(&mut self, port: u16, width: Width, value: u64);
}

/// No device page is part of a port access: an operand there is not RAM.
struct NoDevices;

impl MmioBus for NoDevices {
    fn read(&mut self, _gpa: Gpa, width: Width) -> u64 {
        width.all_ones()
    }

    fn write(&mut self, _gpa: Gpa, _width: Width, _value: u64) {}
}

/// No page has this address.
const NO_PAGE: Gpa = Gpa::new(u64::MAX);

/// Carries out one iteration of `decoded`, the INS or OUTS at CS:RIP, which exited as `access`,
/// and moves RIP on after the last one.
///
/// # Errors
/// As [`emulate_mmio`](super::emulate_mmio).
pub fn string_port(
    cpu: &mut dyn CpuState,
    memory: &dyn GuestMemory,
    decoded: &Decoded,
    access: &PortAccess,
    bus: &mut dyn PortBus,
) -> Result<(), EmulateError> {
    let i = decoded.instruction(cpu)?;
    let input = match i.mnemonic() {
        Mnemonic::Insb | Mnemonic::Insw | Mnemonic::Insd => true,
        Mnemonic::Outsb | Mnemonic::Outsw | Mnemonic::Outsd => false,
        _ => return Err(EmulateError::Retry),
    };
    let mut devices = NoDevices;
    let mut m = Machine {
        cpu,
        memory,
        bus: &mut devices,
        device_page: NO_PAGE,
        touches_device: false,
        bytes: decoded.bytes,
        popped: 0,
    };
    if string_is_over(&m, &i) {
        return Err(EmulateError::Retry);
    }
    let (index, rights) = if input { (0, Access::Write) } else { (1, Access::Read) };
    let place = m.operand(&i, index, rights)?;
    let width = width_of(place).ok_or_else(|| m.undecodable())?;
    // Another instruction than the one that exited may stand here by now.
    if input != access.input || width != access.width {
        return Err(EmulateError::Retry);
    }
    // The port has been checked by the CPU, and DX may have changed since only by a guest
    // that writes its own registers, which it cannot.
    if input {
        let Place::Ram { .. } = place else { return Err(m.undecodable()) };
        // What RAM there is must be known before the device is read.
        m.load(place)?;
        let value = bus.read(access.port, width);
        m.store(place, value)?;
    } else {
        let value = m.load(place)?;
        bus.write(access.port, width, value);
    }
    if string_step(&mut m, &i, width.bytes())? {
        advance(cpu, u8::try_from(i.len()).unwrap_or_default());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::guest::fake::FakeMemory;
    use crate::x86::emulate::DecodeCache;
    use crate::x86::emulate::fake::FakeCpu;
    use crate::x86::state::Gpr;
    use std::vec::Vec;

    #[derive(Default)]
    struct Ports(Vec<(u16, Width, u64)>);

    impl PortBus for Ports {
        fn read(&mut self, port: u16, width: Width) -> u64 {
            self.0.push((port, width, 0));
            0x1234_5678
        }
        fn write(&mut self, port: u16, width: Width, value: u64) {
            self.0.push((port, width, value));
        }
    }

    fn run(
        code: &[u8],
        cpu: &mut FakeCpu,
        memory: &FakeMemory,
        input: bool,
        width: Width,
    ) -> (Result<(), EmulateError>, Ports) {
        memory.write(Gpa::new(0x100), code).unwrap();
        cpu.rip = 0x100;
        let access = PortAccess { port: 0x3f8, width, input, string: true, repeat: true, next_rip: 0 };
        let mut ports = Ports::default();
        let done = DecodeCache::default()
            .decode(cpu, memory, None)
            .and_then(|decoded| string_port(cpu, memory, decoded, &access, &mut ports));
        (done, ports)
    }

    #[test]
    fn outs_moves_on_after_the_last_iteration() {
        let memory = FakeMemory::new(0, 0x2000);
        memory.write(Gpa::new(0x1000), b"ab").unwrap();
        let mut cpu = FakeCpu::bits32();
        cpu.set_gpr(Gpr::Rsi, 0x1000);
        cpu.set_gpr(Gpr::Rcx, 2);
        let (done, ports) = run(&[0xf3, 0x6e], &mut cpu, &memory, false, Width::Byte);
        assert_eq!(done, Ok(()));
        assert_eq!(ports.0, [(0x3f8, Width::Byte, u64::from(b'a'))]);
        assert_eq!((cpu.rip, cpu.gpr(Gpr::Rsi), cpu.gpr(Gpr::Rcx)), (0x100, 0x1001, 1));
        let (done, ports) = run(&[0xf3, 0x6e], &mut cpu, &memory, false, Width::Byte);
        assert_eq!(done, Ok(()));
        assert_eq!(ports.0, [(0x3f8, Width::Byte, u64::from(b'b'))]);
        assert_eq!((cpu.rip, cpu.gpr(Gpr::Rsi), cpu.gpr(Gpr::Rcx)), (0x102, 0x1002, 0));
    }

    #[test]
    fn ins_writes_memory_and_honours_the_direction() {
        let memory = FakeMemory::new(0, 0x2000);
        let mut cpu = FakeCpu::bits32();
        cpu.set_gpr(Gpr::Rdi, 0x1004);
        cpu.rflags |= 1 << 10;
        let (done, _) = run(&[0x6d], &mut cpu, &memory, true, Width::Dword);
        assert_eq!(done, Ok(()));
        assert_eq!(memory.read_u32(Gpa::new(0x1004)), Ok(0x1234_5678));
        assert_eq!((cpu.rip, cpu.gpr(Gpr::Rdi)), (0x101, 0x1000));
    }

    #[test]
    fn another_instruction_is_retried_and_memory_of_nobody_reads_no_port() {
        let memory = FakeMemory::new(0, 0x2000);
        let mut cpu = FakeCpu::bits32();
        let (done, ports) = run(&[0x90], &mut cpu, &memory, true, Width::Byte);
        assert_eq!((done, ports.0.len()), (Err(EmulateError::Retry), 0));
        let (done, ports) = run(&[0x6d], &mut cpu, &memory, true, Width::Byte);
        assert_eq!((done, ports.0.len()), (Err(EmulateError::Retry), 0), "another width");
        cpu.set_gpr(Gpr::Rdi, 0x10_0000);
        let (done, ports) = run(&[0x6d], &mut cpu, &memory, true, Width::Dword);
        assert!(matches!(done, Err(EmulateError::Memory(_))));
        assert_eq!(ports.0.len(), 0);
    }
}
