//! Privileged instructions, one a wrapper.
//!
//! What cannot break memory safety is a safe function; the rest says what it is owed.
// UNSAFETY: privileged instructions are reached by inline assembly and by the unsafe
// functions of the `x86_64` crate.
#![expect(unsafe_code, reason = "privileged instructions")]

use ::x86_64::instructions::{self, interrupts, tlb};
use ::x86_64::registers::{control::Cr3, model_specific::Msr};
use ::x86_64::{PhysAddr, VirtAddr, structures::paging::PhysFrame};
use bulkhead_vmm::memory::address::{Hpa, Hva};
use core::arch::x86_64::CpuidResult;
use core::arch::{asm, x86_64::__cpuid_count};

/// Opens interrupts and halts until one has been taken.
pub fn enable_interrupts_and_halt() {
    interrupts::enable_and_hlt();
}

/// Opens interrupts.
pub fn enable_interrupts() {
    interrupts::enable();
}

/// Closes interrupts.
pub fn disable_interrupts() {
    interrupts::disable();
}

/// Whether interrupts are open (RFLAGS.IF).
pub fn interrupts_enabled() -> bool {
    interrupts::are_enabled()
}

/// Halts for good. Non-maskable interrupts are still taken.
pub fn halt_forever() -> ! {
    interrupts::disable();
    loop {
        instructions::hlt();
    }
}

/// CPUID.
pub fn cpuid(leaf: u32, subleaf: u32) -> CpuidResult {
    __cpuid_count(leaf, subleaf)
}

/// Reads model-specific register `msr`.
///
/// A register that the CPU does not have raises #GP, which stops the hypervisor.
pub fn read_msr(msr: u32) -> u64 {
    // SAFETY: reading a register changes no memory.
    unsafe { Msr::new(msr).read() }
}

/// Writes model-specific register `msr`.
///
/// # Safety
/// The write must not break what Rust code relies on: paging, segment bases, the mode.
pub unsafe fn write_msr(msr: u32, value: u64) {
    let mut msr = Msr::new(msr);
    // SAFETY: the caller vouches for the value.
    unsafe { msr.write(value) }
}

/// The root of the page tables in use.
pub fn page_table_root() -> Hpa {
    Hpa::new(Cr3::read().0.start_address().as_u64())
}

/// Switches to the page tables at `root`, a multiple of 4 KiB.
///
/// # Safety
/// They must map all memory in use as it is mapped now.
pub unsafe fn set_page_table_root(root: Hpa) {
    let frame = PhysFrame::containing_address(PhysAddr::new_truncate(root.raw()));
    // SAFETY: the caller vouches for the tables.
    unsafe { Cr3::write(frame, ::x86_64::registers::control::Cr3Flags::empty()) }
}

/// Forgets this CPU's translation of the page of `at`.
pub fn flush_page(at: Hva) {
    tlb::flush(VirtAddr::new_truncate(at.raw()));
}

/// Forgets all of this CPU's translations of non-global pages.
pub fn flush_all() {
    tlb::flush_all();
}

/// The address that a page fault reports (CR2).
pub fn fault_address() -> u64 {
    ::x86_64::registers::control::Cr2::read_raw()
}

/// Sets the base of GS, by which a CPU finds its own data.
///
/// # Safety
/// `base` must point to the CPU's per-CPU area, whose first word points to the area, and
/// which must live as long as the CPU runs.
pub unsafe fn set_per_cpu_base(base: *const ()) {
    ::x86_64::registers::model_specific::GsBase::write(VirtAddr::from_ptr(base));
}

/// The first word at GS: the address of the per-CPU area, see [`set_per_cpu_base`].
#[inline]
pub fn per_cpu_base() -> *const () {
    let base;
    // SAFETY: reads the word that `set_per_cpu_base` requires to be there; before it ran,
    // GS is 0 and the read faults.
    unsafe { asm!("mov {}, gs:[0]", out(reg) base, options(nostack, pure, readonly, preserves_flags)) };
    base
}

/// Whether [`set_per_cpu_base`] has run on this CPU.
pub fn has_per_cpu_base() -> bool {
    ::x86_64::registers::model_specific::GsBase::read().as_u64() != 0
}

/// The caller's frame pointer.
#[inline(always)]
pub fn frame_pointer() -> u64 {
    let rbp;
    // SAFETY: copies a register.
    unsafe { asm!("mov {}, rbp", out(reg) rbp, options(nomem, nostack, preserves_flags)) };
    rbp
}

/// Continues on another stack: calls `f(argument)` with the stack pointer at `top`.
///
/// # Safety
/// Below `top`, a multiple of 16, must be mapped memory that nobody else uses, enough for
/// all that runs on it. Nothing on the old stack may be used any more, unless by
/// references that outlive this call in a way the old stack does.
pub unsafe fn continue_on_stack(top: Hva, f: extern "C" fn(*mut ()) -> !, argument: *mut ()) -> ! {
    // SAFETY: the caller vouches for the stack, and `f` does not return.
    unsafe {
        asm!("mov rsp, {}", "xor ebp, ebp", "push rbp", "jmp {}", in(reg) top.raw(), in(reg) f,
            in("rdi") argument, options(noreturn))
    }
}

/// Random bytes of the CPU (RDRAND); `None` when it has none or gives none.
pub fn random_bytes<const N: usize>() -> Option<[u8; N]> {
    if cpuid(1, 0).ecx & 1 << 30 == 0 {
        return None;
    }
    let mut bytes = [0; N];
    for chunk in bytes.chunks_mut(8) {
        let word = (0..10).find_map(|_| random_word())?;
        for (to, from) in chunk.iter_mut().zip(word.to_le_bytes()) {
            *to = from;
        }
    }
    Some(bytes)
}

fn random_word() -> Option<u64> {
    let (word, ok): (u64, u8);
    // SAFETY: the caller has seen that the CPU has the instruction.
    unsafe { asm!("rdrand {}", "setc {}", out(reg) word, out(reg_byte) ok, options(nomem, nostack)) };
    (ok != 0).then_some(word)
}

macro_rules! port {
    ($($read:ident $write:ident $width:ty),*) => {$(
        #[doc = concat!("Reads a `", stringify!($width), "` from a port.")]
        pub fn $read(port: u16) -> $width {
            // SAFETY: an IN has no effect on memory that Rust knows of.
            unsafe { ::x86_64::instructions::port::Port::new(port).read() }
        }

        #[doc = concat!("Writes a `", stringify!($width), "` to a port, as the root cell, which owns the machine's ports, or the hypervisor's power-off wants it.")]
        pub fn $write(port: u16, value: $width) {
            // SAFETY: the ports are those of the root cell, which could do the same without
            // an exit; devices that write memory by DMA are its own.
            unsafe { ::x86_64::instructions::port::Port::new(port).write(value) }
        }
    )*};
}

port!(in8 out8 u8, in16 out16 u16, in32 out32 u32);
