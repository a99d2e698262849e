//! One vCPU: its models put together, and what is done about each exit.
//!
//! The CPU that has the vCPU owns this; others only post (see [`Posted`]). A turn of the
//! run loop is [`Vcpu::prepare`], entry, [`Vcpu::handle`]. Nothing here is unsafe, and
//! being wrong here can only hurt the guest.
//!
//! [`Posted`]: super::posted::Posted

mod msrs;
mod report;
#[cfg(test)]
mod tests;

pub use report::exit_counts;

use super::cpuid::{CpuidView, Topology, XCR0_ALLOWED, cpuid};
use super::emulate::{
    self, ControlAccess, DecodeCache, EmulateError, InstructionBytes, InstructionKind, MmioBus,
    control_access, emulate_mmio, instruction_length,
};
use super::exit::{EXIT_KINDS, Exit, NestedFault, PortAccess, VirtualCpu};
use super::interrupt::InterruptMessage;
use super::kvmclock;
use super::local_apic::{Effect, LocalApic};
use super::posted::{Events, Posted};
use super::state::{
    ControlRegister, GENERAL_PROTECTION, Gpr, Injection, Segment, SegmentName, UNDEFINED_OPCODE,
};
use crate::device::bus::{Instant, Width};
use crate::hal::{Role, VcpuId};
use crate::memory::address::Gpa;
use crate::memory::guest::{GuestMemory, GuestMemoryError};
use crate::stats::ExitCounts;
use alloc::sync::Arc;

/// The board a vCPU sits on: everything of its cell that it shares with other vCPUs, and
/// the machine behind it. Called without any lock held.
pub trait Board {
    /// The cell's memory, as the hypervisor reaches it.
    type Memory: GuestMemory;

    /// What the cell is to the node.
    fn role(&self) -> Role;
    /// The machine's counter.
    fn host_counter(&self) -> u64;
    /// The cell's device time.
    fn instant(&self) -> Instant;
    /// The counter's frequency in Hz.
    fn counter_hz(&self) -> u64;
    /// Wall-clock nanoseconds since 1970 at counter zero of the cell.
    fn wall_clock_base_ns(&self) -> u64;
    /// The cell's memory.
    fn memory(&self) -> &Self::Memory;
    /// The machine's CPUID.
    fn machine_cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4];
    /// One of the machine's MSRs that the table in `msr.rs` lets be read.
    fn machine_msr(&self, msr: u32) -> u64;
    /// How many vCPUs the cell has.
    fn vcpus(&self) -> u32;
    /// Reads a port.
    fn read_port(&self, port: u16, width: Width) -> u64;
    /// Writes a port.
    fn write_port(&self, port: u16, width: Width, value: u64);
    /// Reads device memory; `vcpu` is the reader.
    fn read_memory(&self, gpa: Gpa, width: Width) -> u64;
    /// Writes device memory.
    fn write_memory(&self, gpa: Gpa, width: Width, value: u64);
    /// Delivers an interrupt message from `sender` to the vCPUs it is for, and kicks them.
    fn send(&self, message: InterruptMessage, sender: VcpuId);
    /// A level-triggered interrupt has ended at `vcpu`.
    fn end_of_interrupt(&self, vector: u8, vcpu: VcpuId);
    /// `vcpu` was reset: interrupts that it had not ended never will be.
    fn vcpu_reset(&self, vcpu: VcpuId);
}

/// What a vCPU does when it is not failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// Executes.
    Running,
    /// Waits in `HLT` for an interrupt.
    Halted,
    /// Waits for a start-up message.
    WaitForStartup,
}

/// What the CPU is to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// Enter the guest.
    Enter,
    /// Wait for something to be posted, or for the host counter to reach the value.
    Wait(Option<u64>),
}

/// What came of an exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Go on.
    Continue,
    /// The hypervisor must take the machine's interrupt.
    TakeHostInterrupt,
    /// The cell has failed and must stop.
    Failed(Failure),
}

/// Why a cell has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// A triple fault.
    #[error("triple fault")]
    TripleFault,
    /// The CPU refused to enter the guest.
    #[error("the CPU refused the vCPU's state at entry")]
    InvalidState,
    /// An instruction that touched device memory, or made an exit, is not known.
    #[error("cannot carry out the instruction {bytes} at {rip:#x}")]
    Undecodable {
        /// Its bytes.
        bytes: InstructionBytes,
        /// Where it is.
        rip: u64,
    },
    /// Instructions, page tables or an operand are where no RAM is.
    #[error("{0}")]
    Memory(#[from] GuestMemoryError),
    /// Instructions were fetched from, or page tables walked in, memory that is not RAM.
    #[error("{what} at {gpa}, which is not RAM of the cell")]
    NotRam {
        /// What touched it.
        what: &'static str,
        /// Where.
        gpa: Gpa,
    },
    /// An exit that was not asked for.
    #[error("unexpected exit {0:#x}")]
    UnknownExit(u64),
}

/// One exit, for the record.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExitRecord {
    /// Host counter at the exit.
    pub counter: u64,
    /// The guest's instruction pointer.
    pub rip: u64,
    /// Index into [`EXIT_KINDS`].
    pub kind: u8,
    /// The CPU's own code and two words.
    pub details: [u64; 3],
}

/// Exits of one vCPU, by [`Exit::kind`].
pub type VcpuCounts = ExitCounts<{ EXIT_KINDS.len() }>;

/// How many exits the record holds.
pub const HISTORY: usize = 16;

/// One vCPU.
pub struct Vcpu {
    /// Which one of its cell.
    pub id: VcpuId,
    apic_id: u32,
    apic: LocalApic,
    activity: Activity,
    nmi_pending: bool,
    nmi_blocked: bool,
    system_time_msr: u64,
    wall_clock_msr: u64,
    decoder: DecodeCache,
    counts: Arc<VcpuCounts>,
    history: [ExitRecord; HISTORY],
    next_record: usize,
    /// The exit since which the vCPU is away, by kind and host counter.
    last_exit: Option<(usize, u64)>,
    /// MSR accesses that faulted.
    pub msr_faults: u64,
    /// Accesses to memory or ports of nobody.
    pub stray_accesses: u64,
}

impl Vcpu {
    /// A vCPU after power-up. The first of a cell (`boot`) runs, the others wait for
    /// start-up.
    #[must_use]
    pub fn new(id: VcpuId, apic_id: u32, boot: bool, counter_hz: u64, counts: Arc<VcpuCounts>) -> Self {
        Self {
            id,
            apic_id,
            apic: LocalApic::new(apic_id, boot, counter_hz),
            activity: if boot { Activity::Running } else { Activity::WaitForStartup },
            nmi_pending: false,
            nmi_blocked: false,
            system_time_msr: 0,
            wall_clock_msr: 0,
            decoder: DecodeCache::default(),
            counts,
            history: [ExitRecord::default(); HISTORY],
            next_record: 0,
            last_exit: None,
            msr_faults: 0,
            stray_accesses: 0,
        }
    }

    /// What the vCPU does.
    #[must_use]
    pub fn activity(&self) -> Activity {
        self.activity
    }

    /// Whether the guest's kernel has given the CPU up: halted, with its APIC disabled in
    /// software, as Linux leaves a CPU that it takes offline.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        match self.activity {
            Activity::Running => false,
            Activity::Halted => !self.apic.is_software_enabled(),
            Activity::WaitForStartup => true,
        }
    }

    /// The last exits, oldest first.
    pub fn history(&self) -> impl Iterator<Item = &ExitRecord> {
        let (new, old) = self.history.split_at(self.next_record % HISTORY);
        old.iter().chain(new).filter(|r| r.counter != 0)
    }

    /// Publishes the APIC's identity, once before the first entry.
    pub fn publish(&self, posted: &Posted) {
        self.apic.publish(posted);
    }

    /// Makes everything ready for an entry: takes what others have posted, fires the timer,
    /// chooses what to inject and to offer.
    pub fn prepare<H: VirtualCpu, B: Board>(&mut self, hw: &mut H, board: &B, posted: &Posted) -> Readiness {
        let host_counter = board.host_counter();
        let events = posted.take_events();
        if events.contains(Events::INIT) {
            hw.reset();
            self.apic.init();
            self.apic.publish(posted);
            board.vcpu_reset(self.id);
            self.activity = Activity::WaitForStartup;
            (self.nmi_pending, self.nmi_blocked) = (false, false);
        }
        if let (Some(vector), Activity::WaitForStartup) = (events.startup_vector(), self.activity) {
            let page = u16::from(vector);
            hw.set_segment(
                SegmentName::Cs,
                Segment { selector: page << 8, attributes: 0x9b, limit: 0xffff, base: u64::from(page) << 12 },
            );
            hw.set_rip(0);
            self.activity = Activity::Running;
        }
        if events.contains(Events::NMI) && self.activity != Activity::WaitForStartup {
            self.nmi_pending = true;
        }
        posted.take_vectors(|vector, level| {
            if !self.apic.accept(vector, level) && level {
                // An APIC that is off will never end it; its line must not stay held.
                board.end_of_interrupt(vector, self.id);
            }
        });
        let now = host_counter.wrapping_add(hw.counter_offset());
        self.apic.poll_timer(now);

        let nmi = self.nmi_pending && !self.nmi_blocked;
        match self.activity {
            Activity::WaitForStartup => return Readiness::Wait(None),
            Activity::Halted if !(nmi || hw.interruptible() && self.apic.deliverable().is_some()) => {
                return Readiness::Wait(self.next_deadline(hw));
            }
            Activity::Halted => self.activity = Activity::Running,
            Activity::Running => {}
        }

        if nmi && !hw.injection_pending() {
            self.nmi_pending = false;
            self.nmi_blocked = true;
            hw.inject(Injection::Nmi);
            hw.request_nmi_return(true);
        }
        hw.set_cr8(self.apic.tpr() >> 4);
        hw.offer_interrupt(self.apic.deliverable());
        // A write of CR8 may let through, or hold back, what waits.
        hw.watch_cr8(self.apic.highest_requested().is_some());
        if let Some((kind, since)) = self.last_exit.take() {
            self.counts.count(kind, host_counter.saturating_sub(since));
        }
        Readiness::Enter
    }

    /// The host counter at which the vCPU's timer fires.
    #[must_use]
    pub fn next_deadline<H: VirtualCpu>(&self, hw: &H) -> Option<u64> {
        self.apic.next_deadline().map(|guest| guest.wrapping_sub(hw.counter_offset()))
    }

    /// Does what an exit asks for.
    pub fn handle<H: VirtualCpu, B: Board>(
        &mut self,
        hw: &mut H,
        board: &B,
        posted: &Posted,
        exit: Exit,
    ) -> Outcome {
        self.record(hw, board, &exit);
        if let Some(vector) = hw.take_taken_interrupt() {
            self.apic.acknowledge(vector);
        }
        if hw.cr8() != self.apic.tpr() >> 4 {
            self.apic.set_tpr(hw.cr8() << 4);
        }
        if let Some(event) = hw.interrupted_event() {
            hw.inject(event);
        }
        let done = match exit {
            Exit::HostInterrupt => return Outcome::TakeHostInterrupt,
            Exit::HostNmi | Exit::HostInit => Ok(()),
            Exit::NmiReturn => {
                self.nmi_blocked = false;
                hw.request_nmi_return(false);
                Ok(())
            }
            Exit::Cpuid => self.cpuid(hw, board),
            Exit::Halt => self.advance(hw, board, InstructionKind::Hlt).map(|moved| {
                if moved {
                    self.activity = Activity::Halted;
                }
            }),
            Exit::ReadMsr => self.read_msr(hw, board),
            Exit::WriteMsr => self.write_msr(hw, board, posted),
            Exit::SetXcr => self.set_xcr(hw, board),
            // No hypercalls: the answer is KVM's for an unknown one, -ENOSYS.
            Exit::Hypercall(instruction) => self.advance(hw, board, instruction).map(|moved| {
                if moved {
                    hw.set_gpr(Gpr::Rax, (-1000i64).cast_unsigned());
                }
            }),
            // The caches are coherent and stage 2 fixes memory types; nothing is to be done.
            Exit::CacheInvalidate(instruction) => self.advance(hw, board, instruction).map(drop),
            Exit::Forbidden => {
                hw.inject(UNDEFINED_OPCODE);
                Ok(())
            }
            Exit::WriteCr8 => self.write_cr8(hw, board),
            Exit::Exception { vector, error_code } => {
                let error_code = (vector == 17).then_some(error_code);
                hw.inject(Injection::Exception { vector, error_code });
                Ok(())
            }
            Exit::Port(access) => self.port(hw, board, access),
            Exit::NestedFault(fault) => self.nested_fault(hw, board, posted, fault),
            Exit::Shutdown => Err(Failure::TripleFault),
            Exit::InvalidState => Err(Failure::InvalidState),
            Exit::Unknown { code } => Err(Failure::UnknownExit(code)),
        };
        match done {
            Ok(()) => Outcome::Continue,
            Err(failure) => Outcome::Failed(failure),
        }
    }

    fn record<H: VirtualCpu, B: Board>(&mut self, hw: &H, board: &B, exit: &Exit) {
        let kind = exit.kind();
        self.last_exit = Some((kind, board.host_counter()));
        #[expect(clippy::cast_possible_truncation, reason = "there are fewer kinds than 256")]
        let kind = kind as u8;
        if let Some(slot) = self.history.get_mut(self.next_record % HISTORY) {
            *slot =
                ExitRecord { counter: board.host_counter(), rip: hw.rip(), kind, details: hw.exit_details() };
        }
        self.next_record = self.next_record.wrapping_add(1);
    }

    /// The length of the instruction that made the exit, to be asked for before anything is
    /// done for it. `None` when it is not to be carried out: it is no longer there, or cannot be
    /// fetched any more, and the guest has to go on with that.
    fn length<H: VirtualCpu, B: Board>(
        &mut self,
        hw: &mut H,
        board: &B,
        kind: InstructionKind,
    ) -> Result<Option<u8>, Failure> {
        match hw.next_rip() {
            // The CPU tells it; an instruction has at most 15 bytes.
            Some(next) => Ok(Some(low_byte(next.wrapping_sub(hw.rip())) & 15)),
            None => match instruction_length(&mut self.decoder, hw, board.memory(), kind) {
                Ok(length) => Ok(Some(length)),
                Err(error) => self.emulation_failed(hw, error).map(|()| None),
            },
        }
    }

    /// Moves past the instruction that made the exit; whether it is to be carried out.
    fn advance<H: VirtualCpu, B: Board>(
        &mut self,
        hw: &mut H,
        board: &B,
        kind: InstructionKind,
    ) -> Result<bool, Failure> {
        let length = self.length(hw, board, kind)?;
        if let Some(length) = length {
            emulate::advance(hw, length);
        }
        Ok(length.is_some())
    }

    /// Turns an error of the emulator into a fault of the guest or a failure of the cell.
    fn emulation_failed<H: VirtualCpu>(&self, hw: &mut H, error: EmulateError) -> Result<(), Failure> {
        if error == EmulateError::Retry {
            // The CPU may have come here by a translation that the guest's tables no longer
            // have, and would do so again for ever.
            hw.flush_translations();
        }
        match error.deliver(hw) {
            Ok(()) => Ok(()),
            Err(EmulateError::Undecodable { bytes, rip }) => Err(Failure::Undecodable { bytes, rip }),
            Err(EmulateError::Memory(error)) => Err(Failure::Memory(error)),
            // `deliver` has dealt with these.
            Err(EmulateError::Inject { .. } | EmulateError::Retry) => Ok(()),
        }
    }

    fn cpuid<H: VirtualCpu, B: Board>(&mut self, hw: &mut H, board: &B) -> Result<(), Failure> {
        let (leaf, subleaf) = (low(hw.gpr(Gpr::Rax)), low(hw.gpr(Gpr::Rcx)));
        let view = CpuidView {
            topology: match board.role() {
                Role::Root => Topology::Machine,
                Role::Guest => Topology::Flat { vcpus: board.vcpus() },
            },
            apic_id: self.apic_id,
            cr4: hw.control(ControlRegister::Cr4),
            pv_eoi: false,
        };
        if !self.advance(hw, board, InstructionKind::Cpuid)? {
            return Ok(());
        }
        let [eax, ebx, ecx, edx] = cpuid(leaf, subleaf, &view, &|l, s| board.machine_cpuid(l, s));
        hw.set_gpr(Gpr::Rax, u64::from(eax));
        hw.set_gpr(Gpr::Rbx, u64::from(ebx));
        hw.set_gpr(Gpr::Rcx, u64::from(ecx));
        hw.set_gpr(Gpr::Rdx, u64::from(edx));
        Ok(())
    }

    fn set_xcr<H: VirtualCpu, B: Board>(&mut self, hw: &mut H, board: &B) -> Result<(), Failure> {
        let Some(length) = self.length(hw, board, InstructionKind::Xsetbv)? else { return Ok(()) };
        let value = low(hw.gpr(Gpr::Rax)) as u64 | u64::from(low(hw.gpr(Gpr::Rdx))) << 32;
        // The intercept comes after the CPU's own check of CPL (APM table 15-7).
        if low(hw.gpr(Gpr::Rcx)) != 0 || value & !XCR0_ALLOWED != 0 || !hw.set_xcr0(value) {
            hw.inject(GENERAL_PROTECTION);
            return Ok(());
        }
        emulate::advance(hw, length);
        Ok(())
    }

    fn write_cr8<H: VirtualCpu, B: Board>(&mut self, hw: &mut H, board: &B) -> Result<(), Failure> {
        let decoded = self.decoder.decode(hw, board.memory(), hw.instruction_bytes());
        match decoded.and_then(|decoded| control_access(hw, decoded)) {
            Ok((ControlAccess::Write { register: 8, value }, length)) => {
                if value > 15 {
                    hw.inject(GENERAL_PROTECTION);
                    return Ok(());
                }
                self.apic.set_tpr(low_byte(value) << 4);
                hw.set_cr8(low_byte(value));
                emulate::advance(hw, length);
                Ok(())
            }
            // Another instruction stands there by now: it is executed.
            Ok(_) => self.emulation_failed(hw, EmulateError::Retry),
            Err(error) => self.emulation_failed(hw, error),
        }
    }

    fn port<H: VirtualCpu, B: Board>(
        &mut self,
        hw: &mut H,
        board: &B,
        access: PortAccess,
    ) -> Result<(), Failure> {
        let PortAccess { port, width, input, string, repeat: _, next_rip } = access;
        if string {
            let done = self.decoder.decode(hw, board.memory(), None).and_then(|decoded| {
                emulate::string_port(hw, board.memory(), decoded, &access, &mut Ports { board })
            });
            return match done {
                Ok(()) => Ok(()),
                Err(error) => self.emulation_failed(hw, error),
            };
        }
        let rax = hw.gpr(Gpr::Rax);
        if input {
            let value = board.read_port(port, width) & width.all_ones();
            // A 32-bit result clears the upper half, narrower ones leave the rest alone.
            let kept = if width == Width::Dword { 0 } else { rax & !width.all_ones() };
            hw.set_gpr(Gpr::Rax, kept | value);
        } else {
            board.write_port(port, width, rax & width.all_ones());
        }
        hw.set_rip(next_rip);
        Ok(())
    }

    fn nested_fault<H: VirtualCpu, B: Board>(
        &mut self,
        hw: &mut H,
        board: &B,
        posted: &Posted,
        fault: NestedFault,
    ) -> Result<(), Failure> {
        if fault.table_walk {
            return Err(Failure::NotRam { what: "page tables", gpa: fault.gpa });
        }
        if fault.execute {
            return Err(Failure::NotRam { what: "instructions", gpa: fault.gpa });
        }
        if fault.delivery {
            // What is at CS:RIP has not begun.
            return Err(Failure::NotRam { what: "stack or descriptors of an event", gpa: fault.gpa });
        }
        let decoded = self.decoder.decode(hw, board.memory(), hw.instruction_bytes());
        let now = board.host_counter().wrapping_add(hw.counter_offset());
        let mut bus = Memory { apic: &mut self.apic, id: self.id, board, posted, now };
        let result = decoded.and_then(|decoded| emulate_mmio(hw, board.memory(), decoded, &fault, &mut bus));
        match result {
            Ok(()) => Ok(()),
            Err(error) => self.emulation_failed(hw, error),
        }
    }
}

/// Carries out what a write to the APIC of `id` has brought about.
fn apply<B: Board>(apic: &LocalApic, id: VcpuId, board: &B, posted: &Posted, effect: Effect) {
    match effect {
        Effect::None => {}
        Effect::Send(message) => board.send(message, id),
        Effect::Eoi { vector, level } => {
            if level {
                board.end_of_interrupt(vector, id);
            }
        }
        Effect::IdentityChanged => apic.publish(posted),
    }
}

/// Ports as the string instructions reach them.
struct Ports<'a, B> {
    board: &'a B,
}

impl<B: Board> super::emulate::PortBus for Ports<'_, B> {
    fn read(&mut self, port: u16, width: Width) -> u64 {
        self.board.read_port(port, width)
    }

    fn write(&mut self, port: u16, width: Width, value: u64) {
        self.board.write_port(port, width, value);
    }
}

/// Device memory as this vCPU reaches it: its own APIC, then the board.
struct Memory<'a, B> {
    apic: &'a mut LocalApic,
    id: VcpuId,
    board: &'a B,
    posted: &'a Posted,
    now: u64,
}

impl<B: Board> Memory<'_, B> {
    fn apic_offset(&self, gpa: Gpa) -> Option<u32> {
        let base = self.apic.mmio_base()?;
        u32::try_from(gpa.checked_offset_from(base)?).ok().filter(|offset| *offset < 4096)
    }
}

impl<B: Board> MmioBus for Memory<'_, B> {
    fn read(&mut self, gpa: Gpa, width: Width) -> u64 {
        match self.apic_offset(gpa) {
            Some(offset) => {
                // Registers are 32 bits at 16-byte steps; narrower reads take their part.
                let value = self.apic.read_mmio(offset & !3, self.now);
                u64::from(value) >> (offset % 4 * 8) & width.all_ones()
            }
            None => self.board.read_memory(gpa, width),
        }
    }

    fn write(&mut self, gpa: Gpa, width: Width, value: u64) {
        match self.apic_offset(gpa) {
            Some(offset) => {
                let effect = self.apic.write_mmio(offset, low(value), self.now);
                apply(self.apic, self.id, self.board, self.posted, effect);
            }
            None => self.board.write_memory(gpa, width, value),
        }
    }
}

/// The low 32 bits.
#[expect(clippy::cast_possible_truncation, reason = "the low half is what is asked for")]
pub(crate) const fn low(value: u64) -> u32 {
    value as u32
}

#[expect(clippy::cast_possible_truncation, reason = "the low byte is what is asked for")]
const fn low_byte(value: u64) -> u8 {
    value as u8
}
