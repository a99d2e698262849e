mod strings;

use super::fake::FakeCpu;
use super::*;
use crate::memory::guest::fake::FakeMemory;
use crate::x86::state::SegmentName;
use std::format;
use std::vec::Vec;

/// RAM ends here and the device begins.
const DEVICE: u64 = 0xd_0000;
const CODE: u64 = 0x8000;
const DATA: u64 = 0x9000;

/// A page of plain device memory that remembers how it was touched.
#[derive(Debug, Clone, PartialEq)]
struct Bus {
    bytes: [u8; 4096],
    log: Vec<(char, u64, u64)>,
}

impl MmioBus for Bus {
    fn read(&mut self, gpa: Gpa, width: Width) -> u64 {
        self.log.push(('r', gpa.raw(), width.bytes()));
        let at = (gpa.raw() - DEVICE) as usize;
        let mut bytes = [0; 8];
        bytes[..width as usize].copy_from_slice(&self.bytes[at..at + width as usize]);
        u64::from_le_bytes(bytes)
    }
    fn write(&mut self, gpa: Gpa, width: Width, value: u64) {
        self.log.push(('w', gpa.raw(), width.bytes()));
        let at = (gpa.raw() - DEVICE) as usize;
        self.bytes[at..at + width as usize].copy_from_slice(&value.to_le_bytes()[..width as usize]);
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Board {
    cpu: FakeCpu,
    memory: FakeMemory,
    bus: Bus,
}

impl Board {
    /// A vCPU of `bits` about to execute `code`. The device holds 0x8182…88 at its start;
    /// RAX is 0x1111_1111_1111_1111 and so on; RDI and RBX point to the device, RSI and RSP
    /// to RAM. 64-bit mode has the first 4 GiB mapped as they are.
    fn new(bits: u32, code: &[u8]) -> Self {
        let memory = FakeMemory::new(0, DEVICE as usize);
        let mut cpu = match bits {
            16 => FakeCpu::bits16(),
            32 => FakeCpu::bits32(),
            _ => FakeCpu::bits64(0x1000),
        };
        if bits == 64 {
            memory.write(Gpa::new(0x1000), &0x2007u64.to_le_bytes()).unwrap();
            for gib in 0..4u64 {
                memory.write(Gpa::new(0x2000 + gib * 8), &(gib << 30 | 0x87).to_le_bytes()).unwrap();
            }
        }
        for n in 0..16 {
            cpu.gpr[n as usize] = (n % 15 + 1) * 0x1111_1111_1111_1111;
        }
        cpu.gpr[Gpr::Rcx as usize] = 3;
        for (gpr, value) in
            [(Gpr::Rbx, DEVICE), (Gpr::Rdi, DEVICE), (Gpr::Rsi, DATA), (Gpr::Rsp, DATA + 0x800)]
        {
            cpu.gpr[gpr as usize] = value;
        }
        cpu.rip = CODE;
        memory.write(Gpa::new(CODE), code).unwrap();
        memory.write(Gpa::new(DATA), &[0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8]).unwrap();
        let mut bytes = [0; 4096];
        bytes[..8].copy_from_slice(&0x8182_8384_8586_8788u64.to_le_bytes());
        Self { cpu, memory, bus: Bus { bytes, log: Vec::new() } }
    }

    /// Carries out an instruction, and does so once more as the exit of its first access to
    /// the device, which must make no difference.
    fn run(&mut self) -> Result<(), EmulateError> {
        let mut again = self.clone();
        let result = self.run_as(NestedFault { write: true, ..read_of(DEVICE + 0xfff) });
        if let Some((kind, gpa, _)) = self.bus.log.get(again.bus.log.len()) {
            let exact = again.run_as(NestedFault { write: *kind == 'w', ..read_of(*gpa) });
            assert_eq!((exact, &again), (result, &*self));
        }
        result
    }

    fn run_as(&mut self, fault: NestedFault) -> Result<(), EmulateError> {
        let mut cache = DecodeCache::default();
        let decoded = cache.decode(&self.cpu, &self.memory, None)?;
        emulate_mmio(&mut self.cpu, &self.memory, decoded, &fault, &mut self.bus)
    }

    fn get(&self, gpr: Gpr) -> u64 {
        self.cpu.gpr[gpr as usize]
    }

    fn device(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bus.bytes[at..at + 8].try_into().unwrap())
    }
}

fn read_of(gpa: u64) -> NestedFault {
    let gpa = Gpa::new(gpa);
    NestedFault { gpa, write: false, execute: false, table_walk: false, delivery: false, present: false }
}

const RAX: u64 = 0x1111_1111_1111_1111;
const RDX: u64 = 0x3333_3333_3333_3333;
const OLD: u64 = 0x8182_8384_8586_8788;

/// Runs `code` in 64-bit mode; expects it to complete, and RAX, RDX and the device's first 8
/// bytes to be as given.
#[track_caller]
fn check(code: &[u8], rax: u64, rdx: u64, device: u64) {
    let mut board = Board::new(64, code);
    assert_eq!(board.run(), Ok(()));
    assert_eq!(board.cpu.rip, CODE + code.len() as u64, "rip");
    let got = [board.get(Gpr::Rax), board.get(Gpr::Rdx), board.device(0)];
    assert_eq!(got, [rax, rdx, device], "{got:x?}");
}

#[test]
fn moves_in_64_bit_mode() {
    // mov al/ax/eax/rax, [rdi]
    check(&[0x8a, 0x07], 0x1111_1111_1111_1188, RDX, OLD);
    check(&[0x66, 0x8b, 0x07], 0x1111_1111_1111_8788, RDX, OLD);
    check(&[0x8b, 0x07], 0x8586_8788, RDX, OLD);
    check(&[0x48, 0x8b, 0x07], OLD, RDX, OLD);
    // mov ah, [rdi]; mov [rdi], dh; mov [rdi], dl with REX
    check(&[0x8a, 0x27], 0x1111_1111_1111_8811, RDX, OLD);
    check(&[0x88, 0x37], RAX, RDX, OLD & !0xff | 0x33);
    check(&[0x40, 0x88, 0x17], RAX, RDX, OLD & !0xff | 0x33);
    // mov [rdi+1], eax: unaligned
    check(&[0x89, 0x47, 0x01], RAX, RDX, 0x8182_8311_1111_1188);
    check(&[0x48, 0x89, 0x07], RAX, RDX, RAX);
    // mov dword [rdi], 0xfffffffe; mov qword [rdi], -2; mov byte, mov word
    check(&[0xc7, 0x07, 0xfe, 0xff, 0xff, 0xff], RAX, RDX, 0x8182_8384_ffff_fffe);
    check(&[0x48, 0xc7, 0x07, 0xfe, 0xff, 0xff, 0xff], RAX, RDX, 0xffff_ffff_ffff_fffe);
    check(&[0xc6, 0x07, 0x42], RAX, RDX, OLD & !0xff | 0x42);
    check(&[0x66, 0xc7, 0x07, 0x34, 0x12], RAX, RDX, OLD & !0xffff | 0x1234);
    // movabs eax, [0xd0000]; movabs [0xd0004], al
    check(&[0xa1, 0, 0, 0xd, 0, 0, 0, 0, 0], 0x8586_8788, RDX, OLD);
    check(&[0xa2, 4, 0, 0xd, 0, 0, 0, 0, 0], RAX, RDX, 0x8182_8311_8586_8788);
    // mov eax, [rip + DEVICE - CODE - 6]
    let mut relative = [0x8b, 0x05, 0, 0, 0, 0];
    relative[2..].copy_from_slice(&((DEVICE - CODE - 6) as u32).to_le_bytes());
    check(&relative, 0x8586_8788, RDX, OLD);
    // mov eax, [rbx + rcx*2 - 6]; the same with 32-bit addresses
    check(&[0x8b, 0x44, 0x4b, 0xfa], 0x8586_8788, RDX, OLD);
    check(&[0x67, 0x8b, 0x44, 0x4b, 0xfa], 0x8586_8788, RDX, OLD);
    // movnti [rdi], rax
    check(&[0x48, 0x0f, 0xc3, 0x07], RAX, RDX, RAX);
    // mov [rdi], cs (selector 0)
    check(&[0x8c, 0x0f], RAX, RDX, OLD & !0xffff);
}

#[test]
fn extending_and_swapping_moves() {
    // movzx eax, byte; movzx eax, word; movzx rax, word
    check(&[0x0f, 0xb6, 0x07], 0x88, RDX, OLD);
    check(&[0x0f, 0xb7, 0x07], 0x8788, RDX, OLD);
    check(&[0x48, 0x0f, 0xb7, 0x07], 0x8788, RDX, OLD);
    // movsx ax, byte; movsx eax, byte; movsx rax, word; movsxd rax, dword
    check(&[0x66, 0x0f, 0xbe, 0x07], 0x1111_1111_1111_ff88, RDX, OLD);
    check(&[0x0f, 0xbe, 0x07], 0xffff_ff88, RDX, OLD);
    check(&[0x48, 0x0f, 0xbf, 0x07], 0xffff_ffff_ffff_8788, RDX, OLD);
    check(&[0x48, 0x63, 0x07], 0xffff_ffff_8586_8788, RDX, OLD);
    // movbe ax, [rdi]; movbe rax, [rdi]; movbe [rdi], eax
    check(&[0x66, 0x0f, 0x38, 0xf0, 0x07], 0x1111_1111_1111_8887, RDX, OLD);
    check(&[0x48, 0x0f, 0x38, 0xf0, 0x07], OLD.swap_bytes(), RDX, OLD);
    check(&[0x0f, 0x38, 0xf0, 0x07], 0x8887_8685, RDX, OLD);
    check(&[0x0f, 0x38, 0xf1, 0x07], RAX, RDX, 0x8182_8384_1111_1111);
}

#[test]
fn read_modify_write() {
    // xchg [rdi], eax; lock xadd [rdi], eax
    check(&[0x87, 0x07], 0x8586_8788, RDX, 0x8182_8384_1111_1111);
    check(&[0xf0, 0x0f, 0xc1, 0x07], 0x8586_8788, RDX, 0x8182_8384_9697_9899);
    // cmpxchg [rdi], edx, unequal: EAX takes the old value
    check(&[0x0f, 0xb1, 0x17], 0x8586_8788, RDX, OLD);
    let mut equal = Board::new(64, &[0xf0, 0x0f, 0xb1, 0x17]);
    equal.cpu.gpr[0] = 0x1_8586_8788;
    assert_eq!(equal.run(), Ok(()));
    assert_eq!((equal.get(Gpr::Rax), equal.device(0)), (0x1_8586_8788, 0x8182_8384_3333_3333));
    assert_eq!(equal.cpu.rflags, 2 | 1 << 6 | 1 << 2);
    // add [rdi], eax; add eax, [rdi]; and dword [rdi], 0x0f; or byte [rdi], 1; xor rax, [rdi]
    check(&[0x01, 0x07], RAX, RDX, 0x8182_8384_9697_9899);
    check(&[0x03, 0x07], 0x9697_9899, RDX, OLD);
    check(&[0x83, 0x27, 0x0f], RAX, RDX, 0x8182_8384_0000_0008);
    check(&[0x80, 0x0f, 1], RAX, RDX, OLD | 1);
    check(&[0x48, 0x33, 0x07], RAX ^ OLD, RDX, OLD);
    // sub rax, [rdi]; and [rdi], -16 as 64 bits
    check(&[0x48, 0x2b, 0x07], RAX.wrapping_sub(OLD), RDX, OLD);
    check(&[0x48, 0x83, 0x27, 0xf0], RAX, RDX, OLD & !0xf);
    // inc word; dec qword; neg byte; lock not dword
    check(&[0x66, 0xff, 0x07], RAX, RDX, OLD + 1);
    check(&[0x48, 0xff, 0x0f], RAX, RDX, OLD - 1);
    check(&[0xf6, 0x1f], RAX, RDX, OLD & !0xff | 0x78);
    check(&[0xf0, 0xf7, 0x17], RAX, RDX, OLD ^ 0xffff_ffff);
    // btr dword [rdi], 3; lock bts dword [rdi], 0; btc dword [rdi], 33 (modulo 32)
    check(&[0x0f, 0xba, 0x37, 3], RAX, RDX, OLD & !8);
    check(&[0xf0, 0x0f, 0xba, 0x2f, 0], RAX, RDX, OLD | 1);
    check(&[0x0f, 0xba, 0x3f, 33], RAX, RDX, OLD ^ 2);
}

#[test]
fn flags_without_a_result() {
    let (_, compared) = alu::binary(Binary::Sub, Width::Dword, OLD, RAX, 2);
    // cmp [rdi], eax; test byte [rdi], 0x77; bt dword [rdi], 3; bt dword [rdi], 2
    for (code, flags) in [
        (&[0x39, 0x07][..], compared),
        (&[0xf6, 0x07, 0x77], 2 | RFLAGS_ZF | 1 << 2),
        (&[0x0f, 0xba, 0x27, 3], 2 | 1),
        (&[0x0f, 0xba, 0x27, 2], 2),
    ] {
        let mut board = Board::new(64, code);
        board.cpu.rflags |= RFLAGS_RF;
        assert_eq!(board.run(), Ok(()));
        assert!(board.bus.log.iter().all(|(kind, ..)| *kind == 'r'), "{code:x?}");
        assert_eq!(board.cpu.rflags, flags, "{code:x?}");
    }
    // adc eax, [rdi] with carry
    let mut board = Board::new(64, &[0x13, 0x07]);
    board.cpu.rflags |= 1;
    assert_eq!(board.run(), Ok(()));
    assert_eq!(board.get(Gpr::Rax), 0x9697_989a);
}

#[test]
fn a_bit_number_in_a_register_reaches_beyond_the_operand() {
    // bts [rdi], eax
    let mut board = Board::new(64, &[0x0f, 0xab, 0x07]);
    board.cpu.gpr[0] = 32 * 3 + 5;
    assert_eq!(board.run(), Ok(()));
    assert_eq!(board.bus.log, [('r', DEVICE + 12, 4), ('w', DEVICE + 12, 4)]);
    assert_eq!(board.device(12), 1 << 5);
    let mut board = Board::new(64, &[0x48, 0x0f, 0xa3, 0x47, 0x10]);
    board.cpu.gpr[0] = (-1i64) as u64;
    assert_eq!(board.run(), Ok(()));
    assert_eq!(board.bus.log, [('r', DEVICE + 8, 8)]);
}

#[test]
fn segments_and_modes() {
    // Real mode: mov ax, [bx+si+2] with DS at the device; es mov [0x10], al
    let mut board = Board::new(16, &[0x8b, 0x40, 0x02]);
    board.cpu.gpr[Gpr::Rbx as usize] = 0x10_fffe;
    board.cpu.gpr[Gpr::Rsi as usize] = 0x2;
    board.cpu.segments[SegmentName::Ds as usize].base = DEVICE;
    assert_eq!(board.run(), Ok(()));
    assert_eq!(board.bus.log, [('r', DEVICE + 2, 2)]);
    assert_eq!(board.get(Gpr::Rax) & 0xffff, 0x8586);

    let mut board = Board::new(16, &[0x26, 0xa2, 0x10, 0x00]);
    board.cpu.segments[SegmentName::Es as usize].base = DEVICE;
    assert_eq!(board.run(), Ok(()));
    assert_eq!(board.bus.log, [('w', DEVICE + 0x10, 1)]);
    assert_eq!(board.cpu.rip, CODE + 4);

    // Code at a CS base; 16-bit code with 32-bit operand and address.
    let mut board = Board::new(16, &[0x66, 0x67, 0x89, 0x07]);
    board.cpu.rip = 0x100;
    board.cpu.segments[SegmentName::Cs as usize].base = CODE - 0x100;
    assert_eq!(board.run(), Ok(()));
    assert_eq!(board.bus.log, [('w', DEVICE, 4)]);
    assert_eq!(board.cpu.rip, 0x104);

    // 32-bit: addresses wrap at 4 GiB, 48 is DEC and no REX.
    let mut board = Board::new(32, &[0x8b, 0x05, 0x00, 0x00, 0x0d, 0x80]);
    board.cpu.segments[SegmentName::Ds as usize].base = 0x8000_0000;
    assert_eq!(board.run(), Ok(()));
    assert_eq!(board.get(Gpr::Rax), 0x8586_8788);

    // 64-bit: GS has its base, DS has none.
    let mut board = Board::new(64, &[0x65, 0x8b, 0x04, 0x25, 8, 0, 0, 0]);
    board.cpu.segments[SegmentName::Gs as usize].base = DEVICE - 8;
    board.cpu.segments[SegmentName::Ds as usize].base = 0x1000;
    assert_eq!(board.run(), Ok(()));
    assert_eq!(board.get(Gpr::Rax), 0x8586_8788);

    // Compatibility mode in long mode is 32-bit code.
    let mut board = Board::new(64, &[0x40, 0x8b, 0x07]);
    board.cpu.segments[SegmentName::Cs as usize].attributes = 0xc9b;
    board.cpu.rip = CODE + 1;
    assert_eq!(board.run(), Ok(()));
    assert_eq!((board.get(Gpr::Rax), board.cpu.rip), (0x8586_8788, CODE + 3));
}

#[test]
fn a_pair_of_registers_is_compared() {
    // lock cmpxchg8b [rdi]
    let code = [0xf0, 0x0f, 0xc7, 0x0f];
    let mut board = Board::new(64, &code);
    board.cpu.rflags |= RFLAGS_ZF | 1;
    assert_eq!(board.run(), Ok(()));
    assert_eq!((board.get(Gpr::Rdx), board.get(Gpr::Rax)), (OLD >> 32, OLD & 0xffff_ffff));
    assert_eq!((board.device(0), board.cpu.rflags), (OLD, 2 | 1));
    // Now they are equal; the upper halves of the registers do not count.
    board.cpu.rip = CODE;
    board.cpu.gpr[Gpr::Rdx as usize] |= 5 << 32;
    assert_eq!(board.run(), Ok(()));
    assert_eq!((board.device(0), board.cpu.rflags), (3 << 32 | DEVICE, 2 | 1 | RFLAGS_ZF));
    assert_eq!(board.get(Gpr::Rdx) >> 32, 5);
}

#[test]
fn the_stack() {
    // push qword [rdi]; pop qword [rdi]
    let mut board = Board::new(64, &[0xff, 0x37]);
    assert_eq!(board.run(), Ok(()));
    assert_eq!(board.get(Gpr::Rsp), DATA + 0x7f8);
    assert_eq!(board.memory.read_u64(Gpa::new(DATA + 0x7f8)), Ok(OLD));
    let mut board = Board::new(64, &[0x8f, 0x07]);
    board.memory.write(Gpa::new(DATA + 0x800), &RDX.to_le_bytes()).unwrap();
    assert_eq!(board.run(), Ok(()));
    assert_eq!((board.get(Gpr::Rsp), board.device(0)), (DATA + 0x808, RDX));
    // pop dword [esp]: the address is formed after the stack pointer has moved
    let mut board = Board::new(32, &[0x8f, 0x04, 0x24]);
    board.cpu.gpr[Gpr::Rsp as usize] = DEVICE - 4;
    board.memory.write(Gpa::new(DEVICE - 4), &0x1234_5678u32.to_le_bytes()).unwrap();
    assert_eq!(board.run(), Ok(()));
    assert_eq!((board.get(Gpr::Rsp), board.device(0) as u32), (DEVICE, 0x1234_5678));
}

#[test]
fn faults_leave_everything_as_it_was() {
    // movsb from the device to a page that is not there; to one that is read-only
    for (entry, error_code) in [(0u64, 2), (0x4000_0085, 3)] {
        let mut board = Board::new(64, &[0xa4]);
        board.cpu.control[0] |= crate::x86::state::CR0_WP;
        board.memory.write(Gpa::new(0x2008), &entry.to_le_bytes()).unwrap();
        board.cpu.gpr[Gpr::Rsi as usize] = DEVICE;
        board.cpu.gpr[Gpr::Rdi as usize] = 0x4000_0123;
        let before = board.cpu.clone();
        let error = board.run().unwrap_err();
        let event = Injection::Exception { vector: 14, error_code: Some(error_code) };
        assert_eq!(error, EmulateError::Inject { event, cr2: Some(0x4000_0123) });
        assert_eq!(board.cpu, before);
        assert!(board.bus.log.is_empty(), "a device register was read for nothing");
        assert_eq!(error.deliver(&mut board.cpu), Ok(()));
        assert_eq!(board.cpu.control(ControlRegister::Cr2), 0x4000_0123);
        assert_eq!(board.cpu.injection, Some(event));
    }
    // push qword [rdi] with a stack pointer that is not canonical
    let mut board = Board::new(64, &[0xff, 0x37]);
    board.cpu.gpr[Gpr::Rsp as usize] = 1 << 63;
    assert_eq!(board.run(), Err(EmulateError::Inject { event: STACK_FAULT, cr2: None }));
    // movsb to an address that is not canonical
    let mut board = Board::new(64, &[0xa4]);
    board.cpu.gpr[Gpr::Rsi as usize] = DEVICE;
    board.cpu.gpr[Gpr::Rdi as usize] = 1 << 63;
    assert_eq!(board.run(), Err(EmulateError::Inject { event: GENERAL_PROTECTION, cr2: None }));
}

#[test]
fn changed_instructions_are_tried_again() {
    // mov eax, [rsi]; mov eax, 1; movsd between RAM and RAM
    for code in [&[0x8b, 0x06][..], &[0xb8, 1, 0, 0, 0], &[0xa5]] {
        let mut board = Board::new(64, code);
        board.cpu.gpr[Gpr::Rdi as usize] = DATA + 0x100;
        let before = board.cpu.clone();
        assert_eq!(board.run(), Err(EmulateError::Retry), "{code:x?}");
        assert_eq!(board.cpu, before);
        assert_eq!(EmulateError::Retry.deliver(&mut board.cpu), Ok(()));
        assert_eq!(board.cpu, before);
    }
}

#[test]
fn a_move_is_carried_out_where_its_fault_was() {
    // mov [rdi + 4], edx, whose page the guest's tables no longer have: the CPU had them.
    let mut board = Board::new(64, &[0x89, 0x57, 0x04]);
    board.cpu.gpr[Gpr::Rdi as usize] = 0x4000_0000;
    let write = NestedFault { write: true, ..read_of(DEVICE + 4) };
    assert_eq!(board.run_as(write), Ok(()));
    assert_eq!(board.bus.log, [('w', DEVICE + 4, 4)]);
    // A read, a fault elsewhere, or one at the end of the page: the tables are asked.
    for (fault, rdi) in [
        (read_of(DEVICE + 4), 0x4000_0000),
        (NestedFault { write: true, ..read_of(DEVICE + 8) }, 0x4000_0000),
        (NestedFault { write: true, ..read_of(DEVICE + 0xffe) }, 0x4000_0ffa),
    ] {
        let mut board = Board::new(64, &[0x89, 0x57, 0x04]);
        board.cpu.gpr[Gpr::Rdi as usize] = rdi;
        let before = board.cpu.clone();
        assert!(board.run_as(fault).is_err());
        assert!(board.bus.log.is_empty() && board.cpu == before);
    }
}

#[test]
fn what_is_not_known_fails_with_its_bytes() {
    // movups [rdi], xmm0; movdqa xmm0, [rdi]; cmpxchg16b [rdi]; call [rdi]; ud2; mov ds, [rdi];
    // an access across the page's end, from either side
    for (code, rdi) in [
        (&[0x0f, 0x11, 0x07][..], DEVICE),
        (&[0x66, 0x0f, 0x6f, 0x07], DEVICE),
        (&[0x48, 0x0f, 0xc7, 0x0f], DEVICE),
        (&[0xff, 0x17], DEVICE),
        (&[0x0f, 0x0b], DEVICE),
        (&[0x8e, 0x1f], DEVICE),
        (&[0x8b, 0x07], DEVICE + 0xffe),
        (&[0x8b, 0x07], DEVICE - 2),
        (&[0xf0, 0x8b, 0x07], DEVICE),
    ] {
        let mut board = Board::new(64, code);
        board.cpu.gpr[Gpr::Rdi as usize] = rdi;
        let error = board.run().unwrap_err();
        let EmulateError::Undecodable { bytes, rip } = error else { panic!("{error}: {code:x?}") };
        assert_eq!((bytes.as_slice().get(..code.len()), rip), (Some(code), CODE));
        assert!(board.bus.log.is_empty());
        assert_eq!(error.deliver(&mut board.cpu), Err(error));
        assert!(format!("{error}").contains(&format!("{:02x} {:02x}", code[0], code[1])));
    }
}

#[test]
fn ram_operands_may_lie_across_pages() {
    // movsq from RAM to the device, the RAM side in two pages
    let mut board = Board::new(64, &[0x48, 0xa5]);
    board.cpu.gpr[Gpr::Rsi as usize] = DATA + 0xffd;
    board.memory.write(Gpa::new(DATA + 0xffd), &OLD.swap_bytes().to_le_bytes()).unwrap();
    assert_eq!(board.run(), Ok(()));
    assert_eq!(board.device(0), OLD.swap_bytes());
}

#[test]
fn instructions_may_lie_across_pages() {
    // mov dword [rdi], 0x04030201, its last 4 bytes in the next page
    let code = [0xc7, 0x07, 1, 2, 3, 4];
    let mut board = Board::new(32, &[]);
    board.cpu.rip = CODE + 0xffe;
    board.memory.write(Gpa::new(CODE + 0xffe), &code).unwrap();
    assert_eq!(board.run(), Ok(()));
    assert_eq!((board.device(0) as u32, board.cpu.rip), (0x0403_0201, CODE + 0x1004));

    // The next page matters only to an instruction that reaches it.
    let mut board = Board::new(32, &[]);
    board.memory.write(Gpa::new(DEVICE - 2), &[0x8b, 0x07]).unwrap();
    board.cpu.rip = DEVICE - 2;
    assert_eq!(board.run(), Ok(()));
    assert_eq!(board.cpu.rip, DEVICE);
    board.memory.write(Gpa::new(DEVICE - 2), &[0xc7, 0x07]).unwrap();
    board.cpu.rip = DEVICE - 2;
    assert_eq!(board.run(), Err(EmulateError::Memory(GuestMemoryError { gpa: Gpa::new(DEVICE), len: 13 })));

    // In paged mode its absence is the guest's fault, with CR2 at the page.
    let mut board = Board::new(64, &[]);
    board.memory.write(Gpa::new(0x2010), &0u64.to_le_bytes()).unwrap();
    board.memory.write(Gpa::new(0x2008), &0x3007u64.to_le_bytes()).unwrap();
    board.memory.write(Gpa::new(0x3000 + 511 * 8), &0x4007u64.to_le_bytes()).unwrap();
    board.memory.write(Gpa::new(0x4000 + 511 * 8), &0x5007u64.to_le_bytes()).unwrap();
    board.memory.write(Gpa::new(0x5ffe), &[0xc7, 0x07]).unwrap();
    board.cpu.rip = 0x7fff_fffe;
    let event = Injection::Exception { vector: 14, error_code: Some(0) };
    assert_eq!(board.run(), Err(EmulateError::Inject { event, cr2: Some(0x8000_0000) }));
}

#[test]
fn delivered_bytes_are_used_and_completed() {
    let mut board = Board::new(64, &[0x90; 15]);
    let mut run = |bytes: &[u8]| {
        board.cpu.rip = CODE;
        let mut cache = DecodeCache::default();
        let result = cache.decode(&board.cpu, &board.memory, Some(bytes)).and_then(|decoded| {
            emulate_mmio(&mut board.cpu, &board.memory, decoded, &read_of(DEVICE), &mut board.bus)
        });
        (result, board.cpu.rip)
    };
    assert_eq!(run(&[0x8b, 0x07, 0xff]), (Ok(()), CODE + 2));
    // None or too few: memory is looked at, and has a NOP.
    assert!(matches!(run(&[]).0, Err(EmulateError::Undecodable { .. })));
    assert!(matches!(run(&[0x48]).0, Err(EmulateError::Undecodable { .. })));
}

#[test]
fn lengths_of_exiting_instructions() {
    use InstructionKind::*;
    let length = |board: &Board, kind| {
        instruction_length(&mut DecodeCache::default(), &board.cpu, &board.memory, kind)
    };
    for (kind, code) in [
        (Cpuid, &[0x0f, 0xa2][..]),
        (Hlt, &[0xf4]),
        (Invd, &[0x0f, 0x08]),
        (Monitor, &[0x0f, 0x01, 0xc8]),
        (Mwait, &[0x0f, 0x01, 0xc9]),
        (Pause, &[0xf3, 0x90]),
        (Rdmsr, &[0x0f, 0x32]),
        (Rdpmc, &[0x0f, 0x33]),
        (Rdtsc, &[0x0f, 0x31]),
        (Rdtscp, &[0x0f, 0x01, 0xf9]),
        (Vmcall, &[0x0f, 0x01, 0xc1]),
        (Vmmcall, &[0x0f, 0x01, 0xd9]),
        (Wbinvd, &[0x0f, 0x09]),
        (Wrmsr, &[0x0f, 0x30]),
        (Xsetbv, &[0x0f, 0x01, 0xd1]),
    ] {
        for bits in [16, 32, 64] {
            let board = Board::new(bits, code);
            assert_eq!(length(&board, kind), Ok(code.len() as u8));
            // The decoder agrees with the table.
            let board = Board::new(bits, &[&[0x3e], code].concat());
            assert_eq!(length(&board, kind), Ok(code.len() as u8 + 1), "{kind:?} with a prefix");
        }
    }
    let board = Board::new(64, &[0x0f, 0xa2]);
    assert_eq!(length(&board, Rdmsr), Err(EmulateError::Retry));
    // At the end of a page its next bytes are not looked at, unless it goes on there.
    let mut board = Board::new(64, &[]);
    board.cpu.rip = DEVICE - 2;
    board.memory.write(Gpa::new(DEVICE - 2), &[0x0f, 0xa2]).unwrap();
    assert_eq!(length(&board, Cpuid), Ok(2));
    board.cpu.rip = CODE + 0xfff;
    board.memory.write(Gpa::new(CODE + 0xfff), &[0x0f, 0xa2]).unwrap();
    assert_eq!(length(&board, Cpuid), Ok(2));
    let mut board = Board::new(64, &[0xf4]);
    board.cpu.rip = u32::MAX.into();
    advance(&mut board.cpu, 1);
    assert_eq!(board.cpu.rip, 0x1_0000_0000);
    let mut board = Board::new(32, &[0xf4]);
    board.cpu.rip = u32::MAX.into();
    advance(&mut board.cpu, 1);
    assert_eq!(board.cpu.rip, 0);
}

#[test]
fn control_register_accesses() {
    let run = |bits, code: &[u8]| {
        let mut board = Board::new(bits, code);
        board.cpu.control[0] |= 0b1001;
        control_access(&board.cpu, DecodeCache::default().decode(&board.cpu, &board.memory, None)?)
    };
    let write = |register, value, len| Ok((ControlAccess::Write { register, value }, len));
    assert_eq!(run(64, &[0x0f, 0x22, 0xd8]), write(3, RAX, 3));
    assert_eq!(run(32, &[0x0f, 0x22, 0xe2]), write(4, 0x3333_3333, 3));
    assert_eq!(run(64, &[0x44, 0x0f, 0x22, 0xc2]), write(8, RDX, 4));
    assert_eq!(run(64, &[0x41, 0x0f, 0x20, 0xc0]), Ok((ControlAccess::Read { register: 0, to: Gpr::R8 }, 4)));
    assert_eq!(run(32, &[0x0f, 0x06]), write(0, 1, 2));
    // lmsw dx (0x3333): PE stays, MP set, EM and TS clear
    assert_eq!(run(16, &[0x0f, 0x01, 0xf2]), write(0, 0b0011, 3));
    assert_eq!(run(32, &[0x90]), Err(EmulateError::Retry));
}

mod hostile {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the bytes and registers: no panic, RIP moves by an instruction or not at
        /// all, and only the device page is touched on the bus.
        #[test]
        fn any_bytes(bits in prop_oneof![Just(16u32), Just(32), Just(64)],
            code in proptest::collection::vec(any::<u8>(), 15), gpr in any::<[u64; 16]>(), near: bool)
        {
            let mut board = Board::new(bits, &code);
            if !near {
                board.cpu.gpr = gpr;
            }
            let _ = board.run();
            let moved = board.cpu.rip.wrapping_sub(CODE);
            prop_assert!(moved <= 15);
            for (_, gpa, width) in &board.bus.log {
                prop_assert!(*gpa >= DEVICE && gpa + width <= DEVICE + 4096);
            }
        }
    }
}
