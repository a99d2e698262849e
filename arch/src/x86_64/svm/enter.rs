//! The world switch of SVM.

// UNSAFETY: the switch itself is assembly.
#![expect(unsafe_code, reason = "the world switch is assembly")]

use core::arch::naked_asm;

/// The general-purpose registers that `VMRUN` does not switch, in the order of their
/// numbers; RAX (0) and RSP (4) live in the VMCB and their places here are not used.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct GuestRegisters(pub(super) [u64; 16]);

/// Enters the guest and returns after `#VMEXIT` with the host's state as before.
///
/// With GIF = 0 nothing can come between the last look at the mailbox and the entry: an
/// interrupt that arrives then stays pending until `VMRUN`, which leaves the guest at once.
/// `VMRUN` wants the host's RFLAGS.IF set for that, since `V_INTR_MASKING` makes it gate
/// physical interrupts (APM 15.21.1). `VMLOAD`/`VMSAVE` switch FS, GS, TR, LDTR and the
/// system-call MSRs, which `VMRUN` leaves alone (APM 15.5.2).
///
/// # Safety
/// - `registers` is valid for reads and writes; `vmcb` is the physical address of a VMCB
///   that nobody else uses, whose maps and nested tables exist and keep the guest out of
///   what is not its own; `host` is that of a page to which this CPU's state was saved by
///   `VMSAVE` and which nobody writes.
/// - EFER.SVME is set and `VM_HSAVE_PA` is this CPU's own page; RFLAGS.IF is 0.
#[unsafe(naked)]
pub(super) unsafe extern "sysv64" fn enter(registers: *mut GuestRegisters, vmcb: u64, host: u64) {
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "push rdx",
        "push rdi",
        "mov rax, rsi",
        "mov rcx, [rdi + 8 * 1]",
        "mov rdx, [rdi + 8 * 2]",
        "mov rbx, [rdi + 8 * 3]",
        "mov rbp, [rdi + 8 * 5]",
        "mov rsi, [rdi + 8 * 6]",
        "mov r8,  [rdi + 8 * 8]",
        "mov r9,  [rdi + 8 * 9]",
        "mov r10, [rdi + 8 * 10]",
        "mov r11, [rdi + 8 * 11]",
        "mov r12, [rdi + 8 * 12]",
        "mov r13, [rdi + 8 * 13]",
        "mov r14, [rdi + 8 * 14]",
        "mov r15, [rdi + 8 * 15]",
        "mov rdi, [rdi + 8 * 7]",
        "clgi",
        "sti",
        "vmload rax",
        "vmrun rax",
        "vmsave rax",
        "cli",
        "mov rax, [rsp + 8]",
        "vmload rax",
        "stgi",
        "mov rax, [rsp]",
        "mov [rax + 8 * 1], rcx",
        "mov [rax + 8 * 2], rdx",
        "mov [rax + 8 * 3], rbx",
        "mov [rax + 8 * 5], rbp",
        "mov [rax + 8 * 6], rsi",
        "mov [rax + 8 * 7], rdi",
        "mov [rax + 8 * 8], r8",
        "mov [rax + 8 * 9], r9",
        "mov [rax + 8 * 10], r10",
        "mov [rax + 8 * 11], r11",
        "mov [rax + 8 * 12], r12",
        "mov [rax + 8 * 13], r13",
        "mov [rax + 8 * 14], r14",
        "mov [rax + 8 * 15], r15",
        "add rsp, 16",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
    )
}
