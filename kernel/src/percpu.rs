//! Per-CPU state, found by GS.
//!
//! Each CPU has one [`PerCpu`], made before it runs and never freed. Other CPUs see it
//! too, so all that changes is atomic.
// UNSAFETY: GS leads to the CPU's own state.
#![expect(unsafe_code, reason = "a pointer in a segment register")]

use crate::memory::{self, STACK_SIZE};
use alloc::boxed::Box;
use bulkhead_arch::x86_64::descriptors::{CpuDescriptors, Idt};
use bulkhead_arch::x86_64::ops;
use bulkhead_arch::x86_64::page_table::PageTableError;
use bulkhead_vmm::hal::CpuId;
use bulkhead_vmm::memory::address::Hva;
use core::sync::atomic::{AtomicBool, AtomicU64};
use spin::{Once, RwLock};

/// Bytes of a stack for double faults, NMIs, machine checks.
const IST_STACK_SIZE: u64 = 16 << 10;

static IDT: Once<Idt> = Once::new();
/// All CPUs that run, by number.
static ALL: RwLock<alloc::vec::Vec<&'static PerCpu>> = RwLock::new(alloc::vec::Vec::new());

/// What belongs to one CPU.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct PerCpu {
    /// Where this is: what GS:0 holds.
    this: *const Self,
    pub(crate) id: CpuId,
    pub(crate) apic_id: u32,
    /// Device vectors that arrived and have not been taken, a bit each.
    pub(crate) arrived: [AtomicU64; 4],
    /// Which of them were level-triggered.
    pub(crate) arrived_level: [AtomicU64; 4],
    /// The counter's value that the timer is armed for; `u64::MAX` when it is not.
    pub(crate) timer_target: AtomicU64,
    /// The timer has fired.
    pub(crate) timer_fired: AtomicBool,
    /// Another CPU wants this one to look at its mailbox.
    pub(crate) kicked: AtomicBool,
    /// What the log has still to tell of interrupts that nobody sends; 0 for nothing.
    pub(crate) to_tell: AtomicU64,
    /// NMIs so far.
    pub(crate) nmis: AtomicU64,
    /// This CPU runs Rust code.
    pub(crate) online: AtomicBool,
}

// SAFETY: `this` points to the value itself, which is never moved or freed; everything
// else is atomic or never changes.
unsafe impl Sync for PerCpu {}
// SAFETY: as above.
unsafe impl Send for PerCpu {}

impl PerCpu {
    /// The state of CPU `id`.
    pub(crate) fn new(id: CpuId, apic_id: u32) -> &'static Self {
        let cpu = Box::leak(Box::new(Self {
            this: core::ptr::null(),
            id,
            apic_id,
            arrived: Default::default(),
            arrived_level: Default::default(),
            timer_target: AtomicU64::new(u64::MAX),
            timer_fired: AtomicBool::new(false),
            kicked: AtomicBool::new(false),
            to_tell: AtomicU64::new(0),
            nmis: AtomicU64::new(0),
            online: AtomicBool::new(false),
        }));
        cpu.this = &raw const *cpu;
        cpu
    }

    /// Makes this the state of the CPU that calls it.
    pub(crate) fn install(&'static self) {
        // SAFETY: the first word points to the area, which lives for ever.
        unsafe { ops::set_per_cpu_base(self.this.cast()) };
    }
}

/// The state of the CPU that calls it.
pub(crate) fn this() -> &'static PerCpu {
    // SAFETY: every CPU installs its state before anything else; it is never freed.
    unsafe { &*ops::per_cpu_base().cast::<PerCpu>() }
}

/// As [`this`], but `None` before it is installed: for panics.
pub(crate) fn try_this() -> Option<&'static PerCpu> {
    ops::has_per_cpu_base().then(this)
}

/// CPU `id`'s state, if it runs.
pub(crate) fn get(id: CpuId) -> Option<&'static PerCpu> {
    ALL.read().get(id.0 as usize).copied()
}

/// How many CPUs run.
pub(crate) fn count() -> u32 {
    u32::try_from(ALL.read().len()).expect("APIC IDs have 32 bits")
}

/// Notes that `cpu` runs. Its number must be the next.
pub(crate) fn add(cpu: &'static PerCpu) {
    let mut all = ALL.write();
    assert_eq!(all.len(), cpu.id.0 as usize, "CPU numbers have no gaps");
    all.push(cpu);
}

/// Calls `f` for each CPU. Takes no lock that a stopped CPU could hold for long; a panic
/// may call it.
pub(crate) fn for_each(mut f: impl FnMut(&'static PerCpu)) {
    if let Some(all) = ALL.try_read() {
        all.iter().for_each(|cpu| f(cpu));
    }
}

/// Descriptor tables for one CPU, with its stacks for double faults, NMIs and machine
/// checks.
pub(crate) fn new_descriptors(stacks: [Hva; 3]) -> &'static mut CpuDescriptors {
    Box::leak(Box::new(CpuDescriptors::new(stacks)))
}

/// Loads descriptor tables on this CPU, for good or until the next call.
///
/// # Safety
/// Their stacks must be mapped and be used for nothing else.
pub(crate) unsafe fn load_descriptors(descriptors: &'static mut CpuDescriptors) {
    // SAFETY: whoever owns the descriptors is the only one to use them; the caller vouches
    // for the stacks.
    unsafe { descriptors.load(IDT.call_once(Idt::new)) };
}

/// The stacks of a CPU: its own, and those for double faults, NMIs, machine checks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stacks {
    pub(crate) own: Hva,
    pub(crate) ist: [Hva; 3],
}

impl Stacks {
    /// New stacks.
    ///
    /// # Errors
    /// When there is no memory.
    pub(crate) fn new() -> Result<Self, PageTableError> {
        let mut ist = [Hva::new(0); 3];
        for stack in &mut ist {
            *stack = memory::allocate_stack(IST_STACK_SIZE)?;
        }
        Ok(Self { own: memory::allocate_stack(STACK_SIZE)?, ist })
    }
}
