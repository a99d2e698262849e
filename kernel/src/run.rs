//! The loop of each CPU: enter, leave, handle, wait.
//!
//! A CPU is in one of three places: in the root cell, in a guest cell, or idle. Only its own
//! loop moves it; others ask ([`CpuControl`]) and kick it.
//!
//! Interrupts of the machine are closed in here, except in the two windows of
//! [`turn`] and [`sleep`]. What must not be missed is looked at after they
//! were closed and before the guest is entered or the CPU sleeps: a kick in between stays
//! pending, and ends the entry or the sleep at once.

// UNSAFETY: making a vCPU rests on promises about its cell's tables.
#![expect(unsafe_code, reason = "making a vCPU rests on promises about its cell's tables")]

use crate::guest_cell::GuestCell;
use crate::node::{Node, node};
use crate::root_cell::RootCell;
use crate::{host, interrupts, logging};
use alloc::sync::Arc;
use bulkhead_arch::Backend;
use bulkhead_arch::x86_64::scrub::scrub_cpu;
use bulkhead_vmm::hal::{CpuId, VcpuId};
use bulkhead_vmm::manage::Node as Manager;
use bulkhead_vmm::x86::exit::VirtualCpu;
use bulkhead_vmm::x86::posted::{LogicalId, Posted};
use bulkhead_vmm::x86::root_ports::MachineEnd;
use bulkhead_vmm::x86::vcpu::{Board, Outcome, Readiness, Vcpu};
use core::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use spin::Mutex;

/// What a CPU is told to do next, once it is idle.
pub(crate) enum Command {
    /// Join the root cell again, and wait there for start-up.
    ReturnToRoot,
    /// Run this vCPU of this cell.
    Run(Arc<GuestCell>, VcpuId),
}

/// How a CPU's leaving of the root cell stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Claim {
    /// Nobody wants it.
    None = 0,
    /// It is to leave as soon as the root cell has parked it.
    Asked = 1,
    /// It has left.
    Left = 2,
}

/// How others reach a CPU's loop.
#[derive(Default)]
pub(crate) struct CpuControl {
    claim: AtomicU8,
    command: Mutex<Option<Command>>,
    commanded: AtomicBool,
}

impl CpuControl {
    /// How the claim stands.
    pub(crate) fn claim(&self) -> Claim {
        match self.claim.load(Ordering::Acquire) {
            0 => Claim::None,
            1 => Claim::Asked,
            _ => Claim::Left,
        }
    }

    /// Asks the CPU to leave the root cell; to be followed by a kick. One that has been told
    /// to go back there, and has not gone yet, stays instead.
    pub(crate) fn ask(&self) {
        let mut command = self.command.lock();
        command.take_if(|command| matches!(command, Command::ReturnToRoot));
        let _ = self.claim.compare_exchange(
            Claim::None as u8,
            Claim::Asked as u8,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
    }

    /// Takes the question back; `false` when the CPU has left already.
    pub(crate) fn withdraw(&self) -> bool {
        let asked = Claim::Asked as u8;
        self.claim.compare_exchange(asked, Claim::None as u8, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Leaves, if asked to.
    fn leave(&self) -> bool {
        let asked = Claim::Asked as u8;
        self.claim.compare_exchange(asked, Claim::Left as u8, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Marks a CPU that was kept back from the root cell at boot.
    pub(crate) fn keep_back(&self) {
        self.claim.store(Claim::Left as u8, Ordering::Release);
    }

    /// Gives the idle CPU a command; to be followed by a kick.
    pub(crate) fn command(&self, command: Command) {
        *self.command.lock() = Some(command);
        self.commanded.store(true, Ordering::Release);
    }

    fn take_command(&self) -> Option<Command> {
        if !self.commanded.swap(false, Ordering::AcqRel) {
            return None;
        }
        let mut slot = self.command.lock();
        let command = slot.take();
        if let Some(Command::ReturnToRoot) = command {
            // Under the lock, so that `ask` sees either the command or that it was followed.
            self.claim.store(Claim::None as u8, Ordering::Release);
        }
        command
    }
}

enum Place {
    Root { boot: bool },
    Idle,
    Guest(Arc<GuestCell>, VcpuId),
}

/// The loop of `cpu`; `backend` is what enters guests on it.
pub(crate) fn run<B: Backend>(cpu: CpuId, backend: &B) -> ! {
    let node = node();
    let Some(control) = node.control(cpu) else { panic!("no control for {cpu}") };
    let mut place = match control.claim() {
        Claim::Left => Place::Idle,
        _ => Place::Root { boot: cpu == CpuId(0) },
    };
    loop {
        place = match place {
            Place::Root { boot } => {
                scrub_cpu();
                run_root(node, control, cpu, backend, boot);
                Place::Idle
            }
            Place::Guest(cell, vcpu) => {
                scrub_cpu();
                run_guest(node, cpu, &cell, vcpu, backend);
                Place::Idle
            }
            Place::Idle => match control.take_command() {
                Some(Command::ReturnToRoot) => Place::Root { boot: false },
                Some(Command::Run(cell, vcpu)) => Place::Guest(cell, vcpu),
                None => {
                    if !node.work() && !control.commanded.load(Ordering::Acquire) {
                        sleep(None);
                    }
                    interrupts::take_arrived(|vector, level| stray_interrupt(node, cpu, vector, level));
                    Place::Idle
                }
            },
        };
    }
}

/// Runs `cpu` in the root cell until the root cell has parked it and somebody wants it.
fn run_root<B: Backend>(node: &Node, control: &CpuControl, cpu: CpuId, backend: &B, boot: bool) {
    let root: &RootCell = node.root();
    let id = VcpuId(cpu.0);
    let Some(posted) = root.board.posted(id) else { panic!("{cpu} has no vCPU in the root cell") };
    // SAFETY: the root cell lives as long as the node, its tables keep it out of what is not
    // its own, and this is the CPU of `backend`.
    let mut hw = unsafe { backend.create(root.nested_root(), root.permissions()) };
    let mut vcpu = Vcpu::new(id, posted.apic_id(), boot, node.counter_hz(), root.counts(id));
    // What was held back while the CPU was lent is let go.
    root.board.vcpu_reset(id);
    vcpu.publish(posted);
    if boot {
        root.entry.apply(&mut hw);
    }
    let mut logical_id = LogicalId::NONE;
    loop {
        if vcpu.is_parked() && control.leave() {
            // What was not ended here never will be.
            root.board.vcpu_reset(id);
            vcpu.count_last_exit(host::counter());
            // No device finds it here any more, but by the CPU's own ID.
            host::set_logical_id(cpu, LogicalId::NONE);
            return;
        }
        if posted.logical_id() != logical_id {
            logical_id = posted.logical_id();
            host::set_logical_id(cpu, logical_id);
        }
        if root.board.take_channel_notification() {
            node.attend();
        }
        if let Some(end) = root.board.wanted_end() {
            see_to_guests(node, end, |vector, level| root.arrived(id, posted, vector, level));
            root.board.end_machine();
            // Where the write did nothing, the root cell goes on.
            logging::release_serial();
        }
        let busy = node.wants_attention() && node.work();
        match turn(&mut vcpu, &mut hw, &root.board, posted, busy, node.look_again(), |vector, level| {
            root.arrived(id, posted, vector, level);
        }) {
            Ok(()) => {}
            Err(failure) => {
                let report = vcpu.report(&hw, &failure, host::counter_to_ns);
                root.failed(&report);
            }
        }
    }
}

/// The root cell wants the machine to end: guest cells turn themselves off before it is turned
/// off; a reset does not wait for them, but says what is lost.
fn see_to_guests(node: &Node, end: MachineEnd, mut arrived: impl FnMut(u8, bool)) {
    // From now on the root cell prints nothing, and nobody can ask for the log.
    logging::reclaim_serial();
    match end {
        MachineEnd::Reset => node.with_manager(|manager| {
            log::info!("root cell: resets the machine");
            for name in manager.cells_on() {
                log::warn!("cell '{name}' runs, and is lost by the reset of the machine");
            }
        }),
        MachineEnd::PowerOff => {
            log::info!("root cell: turns the machine off");
            node.with_manager(Manager::begin_shutdown);
            while !node.with_manager(|manager| manager.is_off()) {
                if !node.work() {
                    sleep(node.look_again());
                }
                interrupts::take_arrived(&mut arrived);
            }
        }
    }
}

/// Runs a vCPU of a guest cell until the cell stops.
fn run_guest<B: Backend>(node: &Node, cpu: CpuId, cell: &GuestCell, id: VcpuId, backend: &B) {
    let Some(posted) = cell.board.posted(id) else { panic!("{id} is not of its cell") };
    // SAFETY: the caller's reference outlives the vCPU, the cell's tables map its own memory
    // alone, it has no ports, and this is the CPU of `backend`.
    let mut hw = unsafe { backend.create(cell.nested_root(), cell.permissions()) };
    hw.set_counter_offset(cell.counter_offset());
    let boot = id == VcpuId(0);
    let mut vcpu = Vcpu::new(id, id.0, boot, node.counter_hz(), cell.counts(id));
    vcpu.publish(posted);
    if boot {
        cell.entry(&mut hw);
    }
    while !cell.board.is_stopping() {
        if cell.board.is_held() {
            rest(node, cpu, cell);
            continue;
        }
        // The devices are the root cell's: what still comes here is late.
        let result = turn(&mut vcpu, &mut hw, &cell.board, posted, false, None, |vector, level| {
            stray_interrupt(node, cpu, vector, level);
        });
        if let Err(failure) = result {
            cell.fail(vcpu.report(&hw, &failure, host::counter_to_ns), id, failure);
        }
        if cell.board.take_output_notification() {
            node.attend();
        }
    }
    vcpu.count_last_exit(host::counter());
    drop(hw);
    cell.vcpu_left();
    node.attend();
}

/// Keeps a vCPU of a cell out of the guest for as long as the cell is held.
fn rest(node: &Node, cpu: CpuId, cell: &GuestCell) {
    cell.vcpu_rests();
    node.attend();
    while cell.board.is_held() && !cell.board.is_stopping() {
        if !node.work() {
            sleep(None);
        }
        interrupts::take_arrived(|vector, level| stray_interrupt(node, cpu, vector, level));
    }
    cell.vcpu_goes_on();
}

/// An interrupt of the root cell's devices has arrived at `cpu`, which is not in the root cell.
/// A level-triggered one is held back, or its line would raise it again as soon as it is ended,
/// and `cpu` would do nothing else.
fn stray_interrupt(node: &Node, cpu: CpuId, vector: u8, level: bool) {
    host::count_stray_interrupt(cpu, vector);
    if level {
        node.root().board.level_arrived(VcpuId(cpu.0), vector);
    }
}

/// One turn: an entry and what came of it, or a sleep. `busy` keeps it from sleeping.
/// `arrived(vector, level)` is told each interrupt of the machine.
fn turn<H: VirtualCpu, B: Board>(
    vcpu: &mut Vcpu,
    hw: &mut H,
    board: &B,
    posted: &Posted,
    busy: bool,
    look_again: Option<u64>,
    arrived: impl FnMut(u8, bool),
) -> Result<(), bulkhead_vmm::x86::vcpu::Failure> {
    interrupts::take_arrived(arrived);
    match vcpu.prepare(hw, board, posted) {
        Readiness::Wait(deadline) => {
            if busy {
                // The vCPU may wait for what a device is about to say.
                host::open_interrupts_briefly();
            } else if !posted.is_pending() {
                sleep(deadline.into_iter().chain(look_again).min());
            }
            Ok(())
        }
        Readiness::Enter => {
            host::arm_timer(vcpu.next_deadline(hw));
            let exit = hw.enter();
            match vcpu.handle(hw, board, posted, exit) {
                Outcome::Continue => Ok(()),
                Outcome::TakeHostInterrupt => {
                    host::open_interrupts_briefly();
                    Ok(())
                }
                Outcome::Failed(failure) => Err(failure),
            }
        }
    }
}

/// Sleeps until an interrupt, at the latest until the host counter reaches `deadline`.
fn sleep(deadline: Option<u64>) {
    host::arm_timer(deadline);
    host::wait_for_interrupt();
}
