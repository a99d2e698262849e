//! A vCPU against a CPU and a board of plain fields.

use super::*;
use crate::memory::guest::fake::FakeMemory;
use crate::x86::emulate::fake::FakeCpu;
use crate::x86::interrupt::{DeliveryMode, Destination};
use crate::x86::state::CpuState;
use core::cell::{Cell, RefCell};
use std::vec::Vec;

/// A CPU whose entries return what was put in line.
struct Hw {
    cpu: FakeCpu,
    offered: Option<u8>,
    taken: Option<u8>,
    cr8_watched: bool,
    nmi_return: bool,
    cr8: u8,
    offset: u64,
    interrupted: Option<Injection>,
    resets: u32,
    flushes: u32,
    shadow: bool,
    xcr0: u64,
}

impl Hw {
    /// 32-bit code at 0x100, whose bytes are `code`.
    fn new(board: &TestBoard, code: &[u8]) -> Self {
        board.memory.write(Gpa::new(0x100), code).unwrap();
        let mut cpu = FakeCpu::bits32();
        cpu.rip = 0x100;
        cpu.rflags = 2 | 1 << 9;
        Self {
            cpu,
            offered: None,
            taken: None,
            cr8_watched: false,
            nmi_return: false,
            cr8: 0,
            offset: 0,
            interrupted: None,
            resets: 0,
            flushes: 0,
            shadow: false,
            xcr0: 1,
        }
    }

    /// The guest takes the interrupt that it is offered.
    fn take_interrupt(&mut self) -> Option<u8> {
        self.taken = self.offered.take();
        self.taken
    }
}

impl CpuState for Hw {
    fn gpr(&self, register: Gpr) -> u64 {
        self.cpu.gpr(register)
    }
    fn set_gpr(&mut self, register: Gpr, value: u64) {
        self.cpu.set_gpr(register, value);
    }
    fn rip(&self) -> u64 {
        self.cpu.rip()
    }
    fn set_rip(&mut self, rip: u64) {
        self.shadow = false;
        self.cpu.set_rip(rip);
    }
    fn rflags(&self) -> u64 {
        self.cpu.rflags()
    }
    fn set_rflags(&mut self, rflags: u64) {
        self.cpu.set_rflags(rflags);
    }
    fn control(&self, register: ControlRegister) -> u64 {
        self.cpu.control(register)
    }
    fn set_control(&mut self, register: ControlRegister, value: u64) {
        self.cpu.set_control(register, value);
    }
    fn efer(&self) -> u64 {
        self.cpu.efer()
    }
    fn set_efer(&mut self, efer: u64) {
        self.cpu.set_efer(efer);
    }
    fn segment(&self, name: SegmentName) -> Segment {
        self.cpu.segment(name)
    }
    fn set_segment(&mut self, name: SegmentName, segment: Segment) {
        self.cpu.set_segment(name, segment);
    }
    fn cpl(&self) -> u8 {
        self.cpu.cpl()
    }
    fn set_cpl(&mut self, cpl: u8) {
        self.cpu.set_cpl(cpl);
    }
    fn interruptible(&self) -> bool {
        self.cpu.rflags & 1 << 9 != 0 && !self.shadow
    }
    fn injection_pending(&self) -> bool {
        self.cpu.injection.is_some()
    }
    fn inject(&mut self, event: Injection) {
        assert!(self.cpu.injection.is_none(), "two events at one entry");
        self.cpu.injection = Some(event);
    }
}

impl VirtualCpu for Hw {
    fn enter(&mut self) -> Exit {
        unreachable!("the tests say what exits")
    }
    fn next_rip(&self) -> Option<u64> {
        None
    }
    fn instruction_bytes(&self) -> Option<&[u8]> {
        None
    }
    fn interrupted_event(&self) -> Option<Injection> {
        self.interrupted
    }
    fn offer_interrupt(&mut self, vector: Option<u8>) {
        assert_eq!(self.taken, None, "what was taken must be asked for first");
        self.offered = vector;
    }
    fn take_taken_interrupt(&mut self) -> Option<u8> {
        self.taken.take()
    }
    fn watch_cr8(&mut self, on: bool) {
        self.cr8_watched = on;
    }
    fn request_nmi_return(&mut self, on: bool) {
        self.nmi_return = on;
    }
    fn cr8(&self) -> u8 {
        self.cr8
    }
    fn set_cr8(&mut self, class: u8) {
        self.cr8 = class;
    }
    fn set_counter_offset(&mut self, offset: u64) {
        self.offset = offset;
    }
    fn counter_offset(&self) -> u64 {
        self.offset
    }
    fn pat(&self) -> u64 {
        0
    }
    fn set_pat(&mut self, _pat: u64) {}
    fn reset(&mut self) {
        self.resets += 1;
    }
    fn flush_translations(&mut self) {
        self.flushes += 1;
    }
    fn exit_details(&self) -> [u64; 3] {
        [0; 3]
    }
    fn set_xcr0(&mut self, xcr0: u64) -> bool {
        let ok = crate::x86::msr::xcr0_is_valid(xcr0, 7);
        if ok {
            self.xcr0 = xcr0;
        }
        ok
    }
}

struct TestBoard {
    role: Role,
    counter: Cell<u64>,
    memory: FakeMemory,
    sent: RefCell<Vec<InterruptMessage>>,
    ended: RefCell<Vec<u8>>,
    resets: Cell<u32>,
    ports: RefCell<Vec<(u16, Width, Option<u64>)>>,
    accesses: RefCell<Vec<(u64, Width, Option<u64>)>>,
}

impl TestBoard {
    fn new(role: Role) -> Self {
        Self {
            role,
            counter: Cell::new(1000),
            memory: FakeMemory::new(0, 0x4000),
            sent: RefCell::default(),
            ended: RefCell::default(),
            resets: Cell::default(),
            ports: RefCell::default(),
            accesses: RefCell::default(),
        }
    }
}

impl Board for TestBoard {
    type Memory = FakeMemory;

    fn role(&self) -> Role {
        self.role
    }
    fn host_counter(&self) -> u64 {
        self.counter.get()
    }
    fn instant(&self) -> Instant {
        Instant { ns: 0 }
    }
    fn counter_hz(&self) -> u64 {
        1_000_000_000
    }
    fn wall_clock_base_ns(&self) -> u64 {
        0
    }
    fn memory(&self) -> &FakeMemory {
        &self.memory
    }
    fn machine_cpuid(&self, leaf: u32, _subleaf: u32) -> [u32; 4] {
        if leaf == 0 { [0xd, 0x6874_7541, 0x444d_4163, 0x6974_6e65] } else { [0; 4] }
    }
    fn machine_msr(&self, msr: u32) -> u64 {
        u64::from(msr) << 32 | 0x77
    }
    fn vcpus(&self) -> u32 {
        2
    }
    fn read_port(&self, port: u16, width: Width) -> u64 {
        self.ports.borrow_mut().push((port, width, None));
        u64::MAX
    }
    fn write_port(&self, port: u16, width: Width, value: u64) {
        self.ports.borrow_mut().push((port, width, Some(value)));
    }
    fn read_memory(&self, gpa: Gpa, width: Width) -> u64 {
        self.accesses.borrow_mut().push((gpa.raw(), width, None));
        0x55
    }
    fn write_memory(&self, gpa: Gpa, width: Width, value: u64) {
        self.accesses.borrow_mut().push((gpa.raw(), width, Some(value)));
    }
    fn send(&self, message: InterruptMessage, _sender: VcpuId) {
        self.sent.borrow_mut().push(message);
    }
    fn end_of_interrupt(&self, vector: u8, _vcpu: VcpuId) {
        self.ended.borrow_mut().push(vector);
    }
    fn vcpu_reset(&self, _vcpu: VcpuId) {
        self.resets.set(self.resets.get() + 1);
    }
}

fn boot_vcpu() -> (Vcpu, Posted) {
    let vcpu = Vcpu::new(VcpuId(0), 0, true, 1_000_000_000, Arc::default());
    let posted = Posted::new(0);
    vcpu.publish(&posted);
    (vcpu, posted)
}

/// A vCPU whose APIC is on, in x2APIC mode.
fn x2apic(board: &TestBoard, hw: &mut Hw) -> (Vcpu, Posted) {
    let (mut vcpu, posted) = boot_vcpu();
    write_msr(&mut vcpu, hw, board, &posted, 0x1b, 0xfee0_0d00);
    write_msr(&mut vcpu, hw, board, &posted, 0x80f, 0x1ff);
    assert_eq!(hw.cpu.injection, None);
    (vcpu, posted)
}

fn write_msr(vcpu: &mut Vcpu, hw: &mut Hw, board: &TestBoard, posted: &Posted, msr: u32, value: u64) {
    board.memory.write(Gpa::new(0x100), &[0x0f, 0x30]).unwrap();
    hw.cpu.rip = 0x100;
    hw.set_gpr(Gpr::Rcx, u64::from(msr));
    hw.set_gpr(Gpr::Rax, value & 0xffff_ffff);
    hw.set_gpr(Gpr::Rdx, value >> 32);
    assert_eq!(vcpu.handle(hw, board, posted, Exit::WriteMsr), Outcome::Continue);
}

fn read_msr(
    vcpu: &mut Vcpu,
    hw: &mut Hw,
    board: &TestBoard,
    posted: &Posted,
    msr: u32,
) -> Result<u64, Injection> {
    board.memory.write(Gpa::new(0x100), &[0x0f, 0x32]).unwrap();
    hw.cpu.rip = 0x100;
    hw.set_gpr(Gpr::Rcx, u64::from(msr));
    assert_eq!(vcpu.handle(hw, board, posted, Exit::ReadMsr), Outcome::Continue);
    match hw.cpu.injection.take() {
        Some(event) => Err(event),
        None => Ok(hw.gpr(Gpr::Rdx) << 32 | hw.gpr(Gpr::Rax)),
    }
}

#[test]
fn a_halted_vcpu_waits_for_its_timer_and_takes_its_interrupt() {
    let board = TestBoard::new(Role::Guest);
    let mut hw = Hw::new(&board, &[]);
    let (mut vcpu, posted) = x2apic(&board, &mut hw);
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0x832, 2 << 17 | 0x31);
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0x6e0, 5000);
    board.memory.write(Gpa::new(0x100), &[0xf4]).unwrap();
    hw.cpu.rip = 0x100;
    assert_eq!(vcpu.handle(&mut hw, &board, &posted, Exit::Halt), Outcome::Continue);
    assert_eq!(hw.cpu.rip, 0x101);
    assert_eq!(vcpu.prepare(&mut hw, &board, &posted), Readiness::Wait(Some(5000)));
    board.counter.set(4999);
    assert_eq!(vcpu.prepare(&mut hw, &board, &posted), Readiness::Wait(Some(5000)));
    board.counter.set(5000);
    assert_eq!(vcpu.prepare(&mut hw, &board, &posted), Readiness::Enter);
    assert_eq!(hw.offered, Some(0x31));
}

#[test]
fn with_an_offset_the_wait_is_in_the_hosts_terms() {
    let board = TestBoard::new(Role::Guest);
    let mut hw = Hw::new(&board, &[]);
    hw.offset = 0u64.wrapping_sub(900);
    let (mut vcpu, posted) = x2apic(&board, &mut hw);
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0x832, 2 << 17 | 0x31);
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0x6e0, 5000);
    board.memory.write(Gpa::new(0x100), &[0xf4]).unwrap();
    hw.cpu.rip = 0x100;
    vcpu.handle(&mut hw, &board, &posted, Exit::Halt);
    assert_eq!(vcpu.prepare(&mut hw, &board, &posted), Readiness::Wait(Some(5900)));
}

#[test]
fn an_interrupt_is_requested_until_the_guest_has_taken_it() {
    let board = TestBoard::new(Role::Guest);
    let mut hw = Hw::new(&board, &[]);
    let (mut vcpu, posted) = x2apic(&board, &mut hw);
    // IRR and ISR of vectors 0x40..0x60.
    let state = |vcpu: &mut Vcpu, hw: &mut Hw| {
        [0x822, 0x812].map(|msr| read_msr(vcpu, hw, &board, &posted, msr).unwrap())
    };
    hw.cpu.rflags = 2;
    posted.post_vector(0x41, false);
    for _ in 0..3 {
        assert_eq!(vcpu.prepare(&mut hw, &board, &posted), Readiness::Enter);
        assert_eq!((hw.cpu.injection, hw.offered), (None, Some(0x41)));
        assert_eq!(state(&mut vcpu, &mut hw), [2, 0], "not taken: IF is 0, or its delivery was interrupted");
    }
    // A higher one comes before it was taken: that one is offered in its place.
    posted.post_vector(0x52, false);
    vcpu.prepare(&mut hw, &board, &posted);
    assert_eq!(hw.take_interrupt(), Some(0x52));
    assert_eq!(state(&mut vcpu, &mut hw), [2, 1 << 18]);
    vcpu.prepare(&mut hw, &board, &posted);
    assert_eq!(hw.offered, None, "0x52 is in service");
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0x80b, 0);
    vcpu.prepare(&mut hw, &board, &posted);
    assert_eq!(hw.take_interrupt(), Some(0x41));
    assert_eq!(state(&mut vcpu, &mut hw), [0, 2]);
}

#[test]
fn task_priority_holds_an_interrupt_until_it_is_lowered() {
    let board = TestBoard::new(Role::Guest);
    let mut hw = Hw::new(&board, &[]);
    let (mut vcpu, posted) = x2apic(&board, &mut hw);
    vcpu.prepare(&mut hw, &board, &posted);
    assert!(!hw.cr8_watched, "nothing waits");
    // mov cr8, eax, in 64-bit code only; here by what it does.
    hw.cr8 = 8;
    vcpu.handle(&mut hw, &board, &posted, Exit::HostNmi);
    posted.post_vector(0x41, false);
    assert_eq!(vcpu.prepare(&mut hw, &board, &posted), Readiness::Enter);
    assert_eq!((hw.offered, hw.cr8_watched, hw.cr8), (None, true, 8));
    hw.cr8 = 3;
    vcpu.handle(&mut hw, &board, &posted, Exit::HostNmi);
    assert_eq!(vcpu.prepare(&mut hw, &board, &posted), Readiness::Enter);
    assert_eq!((hw.offered, hw.cr8_watched), (Some(0x41), true));
    hw.take_interrupt();
    vcpu.handle(&mut hw, &board, &posted, Exit::HostNmi);
    vcpu.prepare(&mut hw, &board, &posted);
    assert!(!hw.cr8_watched);
}

#[test]
fn an_event_whose_delivery_was_interrupted_goes_first() {
    let board = TestBoard::new(Role::Guest);
    let mut hw = Hw::new(&board, &[]);
    let (mut vcpu, posted) = x2apic(&board, &mut hw);
    let event = Injection::Exception { vector: 14, error_code: Some(2) };
    hw.interrupted = Some(event);
    vcpu.handle(&mut hw, &board, &posted, Exit::HostNmi);
    hw.interrupted = None;
    posted.post_vector(0xf1, false);
    posted.post_nmi();
    assert_eq!(vcpu.prepare(&mut hw, &board, &posted), Readiness::Enter);
    assert_eq!((hw.cpu.injection.take(), hw.offered), (Some(event), Some(0xf1)));
    assert_eq!(vcpu.prepare(&mut hw, &board, &posted), Readiness::Enter);
    assert_eq!((hw.cpu.injection, hw.offered), (Some(Injection::Nmi), Some(0xf1)));
}

#[test]
fn an_nmi_is_taken_once_until_the_guest_returns_from_it() {
    let board = TestBoard::new(Role::Guest);
    let mut hw = Hw::new(&board, &[]);
    let (mut vcpu, posted) = boot_vcpu();
    hw.cpu.rflags = 2;
    posted.post_nmi();
    vcpu.prepare(&mut hw, &board, &posted);
    assert_eq!((hw.cpu.injection.take(), hw.nmi_return), (Some(Injection::Nmi), true));
    posted.post_nmi();
    vcpu.prepare(&mut hw, &board, &posted);
    assert_eq!(hw.cpu.injection, None, "blocked");
    vcpu.handle(&mut hw, &board, &posted, Exit::NmiReturn);
    vcpu.prepare(&mut hw, &board, &posted);
    assert_eq!(hw.cpu.injection, Some(Injection::Nmi));
}

#[test]
fn start_up_begins_at_its_page_and_only_after_init() {
    let board = TestBoard::new(Role::Root);
    let mut hw = Hw::new(&board, &[]);
    let mut vcpu = Vcpu::new(VcpuId(1), 1, false, 1_000_000_000, Arc::default());
    let posted = Posted::new(1);
    assert!(vcpu.is_parked());
    assert_eq!(vcpu.prepare(&mut hw, &board, &posted), Readiness::Wait(None));
    posted.post_init();
    assert_eq!(vcpu.prepare(&mut hw, &board, &posted), Readiness::Wait(None));
    assert_eq!(hw.resets, 1);
    posted.post_startup(0x9a);
    assert_eq!(vcpu.prepare(&mut hw, &board, &posted), Readiness::Enter);
    let cs = hw.segment(SegmentName::Cs);
    assert_eq!((hw.rip(), cs.selector, cs.base), (0, 0x9a00, 0x9_a000));
    posted.post_startup(0x11);
    assert_eq!(vcpu.prepare(&mut hw, &board, &posted), Readiness::Enter);
    assert_eq!(hw.segment(SegmentName::Cs).selector, 0x9a00, "a running CPU ignores start-up");
    assert!(!vcpu.is_parked());
}

#[test]
fn a_cpu_is_parked_when_it_halts_with_its_apic_off() {
    let board = TestBoard::new(Role::Root);
    let mut hw = Hw::new(&board, &[]);
    let (mut vcpu, posted) = x2apic(&board, &mut hw);
    board.memory.write(Gpa::new(0x100), &[0xf4]).unwrap();
    hw.cpu.rip = 0x100;
    vcpu.handle(&mut hw, &board, &posted, Exit::Halt);
    assert!(!vcpu.is_parked(), "idle");
    posted.post_nmi();
    vcpu.prepare(&mut hw, &board, &posted);
    hw.cpu.injection = None;
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0x80f, 0xff);
    assert!(!vcpu.is_parked(), "still executes");
    board.memory.write(Gpa::new(0x100), &[0xf4]).unwrap();
    hw.cpu.rip = 0x100;
    vcpu.handle(&mut hw, &board, &posted, Exit::Halt);
    assert!(vcpu.is_parked());
}

#[test]
fn msrs_do_what_the_table_says() {
    let board = TestBoard::new(Role::Root);
    let mut hw = Hw::new(&board, &[]);
    let (mut vcpu, posted) = x2apic(&board, &mut hw);
    let gp = Err(GENERAL_PROTECTION);
    assert_eq!(read_msr(&mut vcpu, &mut hw, &board, &posted, 0xc001_0114), gp, "VM_CR");
    assert_eq!(hw.cpu.rip, 0x100, "the fault is at the instruction");
    assert_eq!(read_msr(&mut vcpu, &mut hw, &board, &posted, 0x2ff), Ok(0x2ff << 32 | 0x77));
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0x2ff, 6);
    assert_eq!(hw.cpu.injection, None, "dropped without a fault");
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0x10, 5);
    assert_eq!(hw.offset, 0, "the root cell's counter is the machine's");
    assert_eq!(read_msr(&mut vcpu, &mut hw, &board, &posted, 0x10), Ok(1000));
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0xc000_0080, 1 << 12);
    assert_eq!(hw.cpu.injection.take(), Some(GENERAL_PROTECTION), "SVME");
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0xc000_0080, 1 << 8 | 1);
    assert_eq!((hw.cpu.injection, hw.efer()), (None, 1 << 8 | 1));
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0x277, 2);
    assert_eq!(hw.cpu.injection.take(), Some(GENERAL_PROTECTION), "a reserved memory type");
    assert_eq!(vcpu.msr_faults, 3);

    let board = TestBoard::new(Role::Guest);
    let mut hw = Hw::new(&board, &[]);
    let (mut vcpu, posted) = x2apic(&board, &mut hw);
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0x10, 5);
    assert_eq!(hw.offset, 5u64.wrapping_sub(1000));
    assert_eq!(read_msr(&mut vcpu, &mut hw, &board, &posted, 0x10), Ok(5));
    assert_eq!(read_msr(&mut vcpu, &mut hw, &board, &posted, 0x2ff), Ok(0x806), "all write-back");
    assert_eq!(read_msr(&mut vcpu, &mut hw, &board, &posted, 0x200), gp, "no ranges");
}

#[test]
fn messages_and_ends_of_interrupts_reach_the_board() {
    let board = TestBoard::new(Role::Guest);
    let mut hw = Hw::new(&board, &[]);
    let (mut vcpu, posted) = x2apic(&board, &mut hw);
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0x830, 1 << 32 | 0x4055);
    let want = InterruptMessage {
        destination: Destination::Physical(1),
        mode: DeliveryMode::FIXED,
        vector: 0x55,
        level: false,
    };
    assert_eq!(board.sent.borrow()[..], [want]);
    for (vector, level) in [(0x61, true), (0x71, false)] {
        posted.post_vector(vector, level);
        vcpu.prepare(&mut hw, &board, &posted);
        assert_eq!(hw.take_interrupt(), Some(vector));
        write_msr(&mut vcpu, &mut hw, &board, &posted, 0x80b, 0);
    }
    assert_eq!(board.ended.borrow()[..], [0x61], "only the level-triggered one is told");
}

#[test]
fn a_level_interrupt_for_an_apic_that_is_off_is_not_held_for_ever() {
    let board = TestBoard::new(Role::Root);
    let mut hw = Hw::new(&board, &[]);
    let (mut vcpu, posted) = boot_vcpu();
    posted.post_vector(0x61, true);
    vcpu.prepare(&mut hw, &board, &posted);
    assert_eq!(board.ended.borrow()[..], [0x61]);
    assert_eq!(hw.offered, None);
}

#[test]
fn ports_and_memory_reach_the_board_and_the_apic_its_page() {
    let board = TestBoard::new(Role::Guest);
    let mut hw = Hw::new(&board, &[]);
    let (mut vcpu, posted) = boot_vcpu();
    hw.set_gpr(Gpr::Rax, 0x1122_3344_5566_7788);
    let access = PortAccess {
        port: 0x3f8,
        width: Width::Byte,
        input: false,
        string: false,
        repeat: false,
        next_rip: 0x102,
    };
    vcpu.handle(&mut hw, &board, &posted, Exit::Port(access));
    assert_eq!((board.ports.borrow()[0], hw.cpu.rip), ((0x3f8, Width::Byte, Some(0x88)), 0x102));
    for (width, want) in [
        (Width::Byte, 0x1122_3344_5566_77ff),
        (Width::Word, 0x1122_3344_5566_ffff),
        (Width::Dword, 0xffff_ffff),
    ] {
        vcpu.handle(&mut hw, &board, &posted, Exit::Port(PortAccess { input: true, width, ..access }));
        assert_eq!(hw.gpr(Gpr::Rax), want);
    }
    let fault = |gpa, write| {
        Exit::NestedFault(NestedFault {
            gpa: Gpa::new(gpa),
            write,
            execute: false,
            table_walk: false,
            delivery: false,
            present: false,
        })
    };
    // mov eax, [0xfec00010]; mov eax, [0xfee00020]
    for (gpa, want) in [(0xfec0_0010u64, 0x55), (0xfee0_0020, 0)] {
        let mut code = std::vec![0xa1];
        code.extend(u32::try_from(gpa).unwrap().to_le_bytes());
        board.memory.write(Gpa::new(0x100), &code).unwrap();
        hw.cpu.rip = 0x100;
        assert_eq!(vcpu.handle(&mut hw, &board, &posted, fault(gpa, false)), Outcome::Continue);
        assert_eq!((hw.gpr(Gpr::Rax), hw.cpu.rip), (want, 0x105));
    }
    assert_eq!(board.accesses.borrow()[..], [(0xfec0_0010, Width::Dword, None)]);
}

#[test]
fn what_cannot_go_on_fails_the_cell_and_names_the_reason() {
    let board = TestBoard::new(Role::Guest);
    let mut hw = Hw::new(&board, &[0x0f, 0x0b]);
    let (mut vcpu, posted) = boot_vcpu();
    let mut failure = |exit| match vcpu.handle(&mut hw, &board, &posted, exit) {
        Outcome::Failed(failure) => std::string::ToString::to_string(&failure),
        other => panic!("{other:?}"),
    };
    assert_eq!(failure(Exit::Shutdown), "triple fault");
    assert_eq!(failure(Exit::Unknown { code: 0x77 }), "unexpected exit 0x77");
    let fault = NestedFault {
        gpa: Gpa::new(0x9000),
        write: false,
        execute: true,
        table_walk: false,
        delivery: false,
        present: false,
    };
    assert_eq!(failure(Exit::NestedFault(fault)), "instructions at 0x9000, which is not RAM of the cell");
    let walk = NestedFault { execute: false, table_walk: true, ..fault };
    assert_eq!(failure(Exit::NestedFault(walk)), "page tables at 0x9000, which is not RAM of the cell");
    let delivery = NestedFault { execute: false, delivery: true, ..fault };
    assert_eq!(
        failure(Exit::NestedFault(delivery)),
        "stack or descriptors of an event at 0x9000, which is not RAM of the cell"
    );
    let undecodable = failure(Exit::NestedFault(NestedFault { execute: false, ..fault }));
    assert!(undecodable.starts_with("cannot carry out the instruction 0f 0b"), "{undecodable}");

    let report = vcpu.report(&hw, &Failure::TripleFault, |ticks| ticks * 2);
    assert_eq!((report.reason.as_str(), report.vcpu), ("triple fault", 0));
    assert_eq!(report.exits.len(), 6);
    assert_eq!((report.exits[0].reason.as_str(), report.exits[0].time_ns), ("shutdown", 2000));
    assert!(report.registers.iter().any(|r| r.name == "rip" && r.value == 0x100));
}

#[test]
fn the_rest_of_the_exits() {
    let board = TestBoard::new(Role::Guest);
    let mut hw = Hw::new(&board, &[0x0f, 0x01, 0xd9]);
    let (mut vcpu, posted) = boot_vcpu();
    vcpu.handle(&mut hw, &board, &posted, Exit::Hypercall(InstructionKind::Vmmcall));
    assert_eq!((hw.gpr(Gpr::Rax).cast_signed(), hw.cpu.rip), (-1000, 0x103));
    vcpu.handle(&mut hw, &board, &posted, Exit::Forbidden);
    assert_eq!(hw.cpu.injection.take(), Some(UNDEFINED_OPCODE));
    vcpu.handle(&mut hw, &board, &posted, Exit::Exception { vector: 17, error_code: 0 });
    assert_eq!(hw.cpu.injection.take(), Some(Injection::Exception { vector: 17, error_code: Some(0) }));
    board.memory.write(Gpa::new(0x100), &[0x0f, 0x01, 0xd1]).unwrap();
    for (value, ok) in [(7u64, true), (5, false), (0xe7, false)] {
        hw.cpu.rip = 0x100;
        hw.set_gpr(Gpr::Rcx, 0);
        hw.set_gpr(Gpr::Rax, value);
        hw.set_gpr(Gpr::Rdx, 0);
        vcpu.handle(&mut hw, &board, &posted, Exit::SetXcr);
        assert_eq!((hw.cpu.injection.take().is_none(), hw.cpu.rip == 0x103), (ok, ok), "{value:#x}");
    }
    assert_eq!(hw.xcr0, 7);
    board.memory.write(Gpa::new(0x100), &[0x0f, 0xa2]).unwrap();
    hw.cpu.rip = 0x100;
    hw.set_gpr(Gpr::Rax, 0x4000_0000);
    vcpu.handle(&mut hw, &board, &posted, Exit::Cpuid);
    assert_eq!((hw.gpr(Gpr::Rbx), hw.cpu.rip), (0x4b4d_564b, 0x102), "KVMK");
}

#[test]
fn an_apic_that_is_disabled_in_hardware_forgets_what_it_has_not_ended_and_in_software_does_not() {
    let board = TestBoard::new(Role::Root);
    let mut hw = Hw::new(&board, &[]);
    let (mut vcpu, posted) = x2apic(&board, &mut hw);
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0x80f, 0xff);
    assert_eq!(board.resets.get(), 0);
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0x1b, 0xfee0_0100);
    assert_eq!(board.resets.get(), 1);
    // Enabled again, it has nothing to forget.
    write_msr(&mut vcpu, &mut hw, &board, &posted, 0x1b, 0xfee0_0900);
    assert_eq!(board.resets.get(), 1);
}

#[test]
fn the_exit_after_which_a_vcpu_stays_away_is_counted_once() {
    let board = TestBoard::new(Role::Guest);
    let mut hw = Hw::new(&board, &[]);
    let counts = Arc::<VcpuCounts>::default();
    let mut vcpu = Vcpu::new(VcpuId(0), 0, true, 1_000_000_000, counts.clone());
    let posted = Posted::new(0);
    let shutdowns = || exit_counts(&counts, |ticks| ticks).into_iter().find(|c| c.reason == "shutdown");
    assert_eq!(vcpu.prepare(&mut hw, &board, &posted), Readiness::Enter);
    assert_eq!(vcpu.handle(&mut hw, &board, &posted, Exit::Shutdown), Outcome::Failed(Failure::TripleFault));
    assert_eq!(shutdowns(), None);
    for _ in 0..2 {
        vcpu.count_last_exit(1070);
        let counted = shutdowns().unwrap();
        assert_eq!((counted.count, counted.time_ns), (1, 70));
    }
}

/// What exited is not what is there, or cannot be fetched: nothing is done for it.
#[test]
fn an_instruction_that_is_gone_does_nothing() {
    let board = TestBoard::new(Role::Guest);
    let mut hw = Hw::new(&board, &[0x90, 0x90, 0x90]);
    let (mut vcpu, posted) = boot_vcpu();
    hw.cpu.gpr = [7; 16];
    // WRMSR to the deadline would arm the timer.
    hw.cpu.gpr[Gpr::Rcx as usize] = 0x6e0;
    let before = hw.cpu.clone();
    let exits = [
        Exit::Cpuid,
        Exit::Halt,
        Exit::ReadMsr,
        Exit::WriteMsr,
        Exit::SetXcr,
        Exit::Hypercall(InstructionKind::Vmmcall),
        Exit::CacheInvalidate(InstructionKind::Wbinvd),
        Exit::WriteCr8,
    ];
    for (n, exit) in (1..).zip(exits) {
        assert_eq!(vcpu.handle(&mut hw, &board, &posted, exit), Outcome::Continue, "{exit:?}");
        // It is tried again, by what the tables say now.
        assert_eq!((&hw.cpu, hw.flushes), (&before, n), "{exit:?}");
    }
    // The page is gone: a page fault, in place of what it was.
    hw.cpu.control[ControlRegister::Cr0 as usize] |= crate::x86::state::CR0_PG;
    hw.cpu.control[ControlRegister::Cr3 as usize] = 0x3000;
    for exit in exits {
        let gpr = hw.cpu.gpr;
        assert_eq!(vcpu.handle(&mut hw, &board, &posted, exit), Outcome::Continue, "{exit:?}");
        let fault = Injection::Exception { vector: 14, error_code: Some(0) };
        assert_eq!((hw.cpu.injection.take(), hw.cpu.rip, hw.cpu.gpr), (Some(fault), 0x100, gpr), "{exit:?}");
    }
    assert_eq!((vcpu.activity(), hw.xcr0, vcpu.next_deadline(&hw)), (Activity::Running, 1, None));
}
