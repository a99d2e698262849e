//! Exits of a vCPU in terms that SVM and VMX share, and what policy asks of the mechanism
//! that enters the guest.

use super::emulate::InstructionKind;
use super::state::{CpuState, Injection};
use crate::device::bus::Width;
use crate::memory::address::Gpa;
use alloc::string::String;
use core::fmt::Write as _;

/// How an access touched memory that stage 2 did not let through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NestedFault {
    /// Where, in guest physical terms.
    pub gpa: Gpa,
    /// It was a write (or a page-table walk that sets bits).
    pub write: bool,
    /// It was an instruction fetch.
    pub execute: bool,
    /// The access was of the walk of the guest's own page tables.
    pub table_walk: bool,
    /// The access was of the delivery of an event (its stack or descriptors), not of the
    /// instruction at CS:RIP.
    pub delivery: bool,
    /// Stage 2 has a page there, it only forbids this access.
    pub present: bool,
}

/// An `IN` or `OUT`, or one iteration of their string forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortAccess {
    /// The port.
    pub port: u16,
    /// The width; never [`Width::Qword`].
    pub width: Width,
    /// It is an `IN`.
    pub input: bool,
    /// It is `INS` or `OUTS`.
    pub string: bool,
    /// It has a REP prefix.
    pub repeat: bool,
    /// The address after the instruction.
    pub next_rip: u64,
}

/// Why a guest was left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// An interrupt of the machine waits; it is taken when the hypervisor opens interrupts.
    HostInterrupt,
    /// A non-maskable interrupt of the machine; the hypervisor has taken it.
    HostNmi,
    /// The guest is about to return from an NMI, as was asked for.
    NmiReturn,
    /// `CPUID`.
    Cpuid,
    /// `HLT`.
    Halt,
    /// `RDMSR`.
    ReadMsr,
    /// `WRMSR`.
    WriteMsr,
    /// `XSETBV`.
    SetXcr,
    /// `VMMCALL` or `VMCALL`.
    Hypercall(InstructionKind),
    /// `INVD` or `WBINVD`.
    CacheInvalidate(InstructionKind),
    /// An instruction that the cell is not told of, and that is undefined to it:
    /// virtualization, `MONITOR`, `MWAIT`, `RDPMC`.
    Forbidden,
    /// A write of CR8 while an interrupt waits.
    WriteCr8,
    /// A #DB or #AC, taken from the guest so that no loop of them can hold the CPU.
    Exception {
        /// The vector.
        vector: u8,
        /// Its error code.
        error_code: u32,
    },
    /// A port access.
    Port(PortAccess),
    /// An access that stage 2 did not let through.
    NestedFault(NestedFault),
    /// A triple fault.
    Shutdown,
    /// The machine sent INIT.
    HostInit,
    /// The CPU refused to enter the guest with the state it has.
    InvalidState,
    /// An exit that nobody asked for.
    Unknown {
        /// The CPU's own code for it.
        code: u64,
    },
}

/// One kind of exit, for the table in the book.
#[derive(Debug, Clone, Copy)]
pub struct ExitRow {
    /// Its name in `cellctl show`.
    pub name: &'static str,
    /// What the guest or the machine did.
    pub what: &'static str,
    /// What is done about it.
    pub done: &'static str,
    /// Why.
    pub why: &'static str,
}

const fn row(name: &'static str, what: &'static str, done: &'static str, why: &'static str) -> ExitRow {
    ExitRow { name, what, done, why }
}

/// All kinds of exits, in the order of [`Exit::kind`].
#[rustfmt::skip]
pub const EXIT_TABLE: [ExitRow; 19] = [
    row("interrupt", "an interrupt of the machine arrived",
        "the CPU's handlers take it; a device's goes on to the root cell's virtual local APIC",
        "the machine's interrupts are the hypervisor's first: its timer and its kicks are among them"),
    row("nmi", "a non-maskable interrupt of the machine arrived",
        "counted; the CPU stops when another one has panicked",
        "the machine's NMIs are the hypervisor's"),
    row("nmi-return", "IRET, while an NMI is in service",
        "the next NMI may be injected",
        "until then NMIs are blocked, as on a CPU"),
    row("cpuid", "CPUID", "answered by the table of CPUID leaves",
        "a cell sees a KVM guest's CPU"),
    row("halt", "HLT", "the CPU sleeps until an interrupt is posted or the vCPU's timer is due",
        "a vCPU has its CPU to itself: there is nobody to yield to, but power to save"),
    row("msr-read", "RDMSR of an MSR that does not pass", "answered by the table of MSRs",
        "only what is switched with the vCPU passes"),
    row("msr-write", "WRMSR of an MSR that does not pass", "answered by the table of MSRs",
        "as msr-read; in x2APIC mode all of the local APIC is here"),
    row("xcr-write", "XSETBV", "XCR0 is set if the cell may have these states, else #GP",
        "states that CPUID hides must not be turned on"),
    row("hypercall", "VMMCALL", "RAX = -1000, KVM's answer to an unknown hypercall",
        "there are no hypercalls: stock kernels ask for none of ours"),
    row("cache-invalidate", "INVD, WBINVD", "nothing: the guest goes on behind it",
        "caches are coherent; INVD would throw away what other cells have written"),
    row("forbidden", "RDPMC, MONITOR, MWAIT, INVLPGA, VMRUN, VMLOAD, VMSAVE, STGI, CLGI, SKINIT", "#UD",
        "CPUID does not show them; those of SVM take addresses of the machine"),
    row("cr8-write", "MOV to CR8, while an interrupt waits", "the task priority is set, and what can be taken is chosen anew",
        "lowering it may be what lets the interrupt through; at other times the CPU does it without an exit"),
    row("exception", "#DB or #AC", "injected as it came",
        "both can be raised without end during their own delivery, with no instruction between at which the machine's interrupts could be taken"),
    row("port", "IN, OUT, INS, OUTS of a port that does not pass",
        "the board's device answers; a port of nobody reads as all-ones and drops writes, counted",
        "a guest cell has no ports of the machine, the root cell all but those of reset and power"),
    row("nested-fault", "an access that stage 2 does not let through",
        "the instruction is decoded and carried out on the device there; fetches, page tables and the stacks of events outside of RAM fail the cell",
        "device memory: I/O APICs, the local APIC in xAPIC mode, the management channel"),
    row("shutdown", "a triple fault", "the cell has failed", "it cannot go on; its registers and last exits are kept for show"),
    row("init", "the machine sent INIT", "nothing", "nobody sends it while guests run"),
    row("invalid-state", "the CPU refused to enter the guest", "the cell has failed", "as shutdown"),
    row("unknown", "an exit that was not asked for", "the cell has failed, with the CPU's code", "as shutdown"),
];

/// Names of exit kinds, in the order of [`Exit::kind`].
pub const EXIT_KINDS: [&str; EXIT_TABLE.len()] = {
    let mut names = [""; EXIT_TABLE.len()];
    let mut kind = 0;
    while kind < names.len() {
        names[kind] = EXIT_TABLE[kind].name;
        kind += 1;
    }
    names
};

/// The table as Markdown, for the docs.
#[must_use]
pub fn exit_table_markdown() -> String {
    let mut text =
        String::from("| kind | the guest or the machine | what is done | why |\n| --- | --- | --- | --- |\n");
    for ExitRow { name, what, done, why } in EXIT_TABLE {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| `{name}` | {what} | {done} | {why} |");
    }
    text
}

impl Exit {
    /// Index into [`EXIT_KINDS`], for counting.
    pub const fn kind(&self) -> usize {
        match self {
            Self::HostInterrupt => 0,
            Self::HostNmi => 1,
            Self::NmiReturn => 2,
            Self::Cpuid => 3,
            Self::Halt => 4,
            Self::ReadMsr => 5,
            Self::WriteMsr => 6,
            Self::SetXcr => 7,
            Self::Hypercall(_) => 8,
            Self::CacheInvalidate(_) => 9,
            Self::Forbidden => 10,
            Self::WriteCr8 => 11,
            Self::Exception { .. } => 12,
            Self::Port(_) => 13,
            Self::NestedFault(_) => 14,
            Self::Shutdown => 15,
            Self::HostInit => 16,
            Self::InvalidState => 17,
            Self::Unknown { .. } => 18,
        }
    }
}

/// A vCPU that can be entered: registers, and the controls of entry. SVM and VMX each
/// implement it; the run loop is generic over it.
pub trait VirtualCpu: CpuState {
    /// Enters the guest and returns when it has been left. Interrupts of the machine are
    /// closed before and after; while the guest runs, they make it exit.
    fn enter(&mut self) -> Exit;

    /// The address after the instruction that made the last exit, where the CPU tells.
    fn next_rip(&self) -> Option<u64>;

    /// The bytes of the instruction that made the last exit, where the CPU tells.
    fn instruction_bytes(&self) -> Option<&[u8]>;

    /// An event, but for offered interrupts, whose delivery the last exit interrupted, and which
    /// must be injected again.
    fn interrupted_event(&self) -> Option<Injection>;

    /// Offers the guest the external interrupt `vector`, or none, in place of what was offered
    /// before. The CPU takes it once RFLAGS.IF is 1 and no shadow is left, be that at the entry
    /// or long after it, without an exit.
    fn offer_interrupt(&mut self, vector: Option<u8>);

    /// The offered interrupt, if the guest has taken it since it was entered: told once. One
    /// whose delivery did not come to its end, for the exit came between, was not taken.
    fn take_taken_interrupt(&mut self) -> Option<u8>;

    /// Asks for [`Exit::WriteCr8`] at each write of CR8, or for no such exit.
    fn watch_cr8(&mut self, on: bool);

    /// Asks for [`Exit::NmiReturn`] at the guest's next `IRET`, or for no such exit.
    fn request_nmi_return(&mut self, on: bool);

    /// The task-priority class that the guest has set by CR8, 0..=15.
    fn cr8(&self) -> u8;

    /// Sets what CR8 reads as.
    fn set_cr8(&mut self, class: u8);

    /// Sets guest counter minus host counter.
    fn set_counter_offset(&mut self, offset: u64);

    /// Guest counter minus host counter.
    fn counter_offset(&self) -> u64;

    /// The guest's PAT.
    fn pat(&self) -> u64;

    /// Sets the guest's PAT; each of its bytes must be a valid memory type.
    fn set_pat(&mut self, pat: u64);

    /// Puts all registers into the state after INIT (AMD APM vol. 2, table 14-1).
    fn reset(&mut self);

    /// Lets the next entry forget all cached translations of this guest.
    fn flush_translations(&mut self);

    /// The CPU's own account of the last exit, for a person to read: code and two words.
    fn exit_details(&self) -> [u64; 3];

    /// Sets XCR0, which stays loaded on the CPU; `false` when the CPU would refuse it, and
    /// then nothing changed.
    fn set_xcr0(&mut self, xcr0: u64) -> bool;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_exit_is_counted_under_its_name() {
        let port = PortAccess {
            port: 0x80,
            width: Width::Byte,
            input: false,
            string: false,
            repeat: false,
            next_rip: 0,
        };
        let fault = NestedFault {
            gpa: Gpa::new(0),
            write: false,
            execute: false,
            table_walk: false,
            delivery: false,
            present: false,
        };
        let exits = [
            (Exit::HostInterrupt, "interrupt"),
            (Exit::HostNmi, "nmi"),
            (Exit::NmiReturn, "nmi-return"),
            (Exit::Cpuid, "cpuid"),
            (Exit::Halt, "halt"),
            (Exit::ReadMsr, "msr-read"),
            (Exit::WriteMsr, "msr-write"),
            (Exit::SetXcr, "xcr-write"),
            (Exit::Hypercall(InstructionKind::Vmmcall), "hypercall"),
            (Exit::CacheInvalidate(InstructionKind::Invd), "cache-invalidate"),
            (Exit::Forbidden, "forbidden"),
            (Exit::WriteCr8, "cr8-write"),
            (Exit::Exception { vector: 1, error_code: 0 }, "exception"),
            (Exit::Port(port), "port"),
            (Exit::NestedFault(fault), "nested-fault"),
            (Exit::Shutdown, "shutdown"),
            (Exit::HostInit, "init"),
            (Exit::InvalidState, "invalid-state"),
            (Exit::Unknown { code: 7 }, "unknown"),
        ];
        for (exit, name) in exits {
            assert_eq!(EXIT_KINDS[exit.kind()], name, "{exit:?}");
        }
    }
}
