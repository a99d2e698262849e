//! Interrupt and exception entry: a stub per vector, which saves all registers and calls
//! the one handler that the kernel has set.
// UNSAFETY: the stubs are assembly and hand the handler a pointer into the stack.
#![expect(unsafe_code, reason = "the entry stubs are assembly")]

use core::arch::global_asm;
use core::fmt;
use core::mem::transmute;
use core::sync::atomic::{AtomicPtr, Ordering};

/// The registers of interrupted code, as the stubs and the CPU leave them on the stack.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
#[expect(missing_docs, reason = "registers by their names in the manuals")]
pub struct TrapFrame {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rbp: u64,
    pub rdi: u64,
    pub rsi: u64,
    pub rdx: u64,
    pub rcx: u64,
    pub rbx: u64,
    pub rax: u64,
    /// The vector, 0..=255.
    pub vector: u64,
    /// The error code, or `NO_ERROR_CODE`.
    pub error: u64,
    pub rip: u64,
    pub cs: u64,
    pub rflags: u64,
    pub rsp: u64,
    pub ss: u64,
}

/// What stands in the frame when the CPU has pushed no error code, which have 32 bits.
const NO_ERROR_CODE: u64 = u64::MAX;

impl TrapFrame {
    /// The error code, if the CPU has pushed one.
    pub const fn error_code(&self) -> Option<u64> {
        if self.error == NO_ERROR_CODE { None } else { Some(self.error) }
    }
}

impl fmt::Display for TrapFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let t = self;
        writeln!(f, "rip {:016x}  rsp {:016x}  rbp {:016x}  rflags {:08x}", t.rip, t.rsp, t.rbp, t.rflags)?;
        writeln!(f, "rax {:016x}  rbx {:016x}  rcx {:016x}  rdx {:016x}", t.rax, t.rbx, t.rcx, t.rdx)?;
        writeln!(f, "rsi {:016x}  rdi {:016x}  r8  {:016x}  r9  {:016x}", t.rsi, t.rdi, t.r8, t.r9)?;
        writeln!(f, "r10 {:016x}  r11 {:016x}  r12 {:016x}  r13 {:016x}", t.r10, t.r11, t.r12, t.r13)?;
        write!(f, "r14 {:016x}  r15 {:016x}  cs  {:04x}  ss  {:04x}", t.r14, t.r15, t.cs, t.ss)
    }
}

/// What the stubs call. It runs with interrupts closed.
pub type Handler = fn(&TrapFrame);

static HANDLER: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());

/// Sets the handler of all vectors. Until then an interrupt or exception halts the CPU.
pub fn set_handler(handler: Handler) {
    HANDLER.store(handler as *mut (), Ordering::Release);
}

/// The address of the stub for `vector`.
pub(super) fn stub_address(vector: u8) -> u64 {
    unsafe extern "C" {
        static interrupt_stubs: u8;
    }
    (&raw const interrupt_stubs).addr() as u64 + u64::from(vector) * 16
}

// Vectors 8, 10–14, 17, 21, 29, 30 come with an error code (AMD APM vol. 2, table 8-1), but
// only as exceptions, not as interrupts, which anything that can forge a message can raise.
// The CPU aligns the stack to 16 bytes before it pushes five words (APM vol. 2, 8.9.3): so
// where there is an error code, a sixth, the stack is aligned again. In place of a missing
// one the stub pushes `NO_ERROR_CODE`.
global_asm!(
    r#"
    .section .text.interrupt_stubs, "ax", @progbits
    .global interrupt_stubs
    .balign 16
interrupt_stubs:
    .set vector, 0
    .rept 256
    .balign 16
    .if vector == 8 || (vector >= 10 && vector <= 14) || vector == 17 || vector == 21 || vector == 29 || vector == 30
    test spl, 8
    jz 2f
    .endif
    push -1
2:
    push vector
    jmp interrupt_entry
    .set vector, vector + 1
    .endr

interrupt_entry:
    push rax
    push rbx
    push rcx
    push rdx
    push rsi
    push rdi
    push rbp
    push r8
    push r9
    push r10
    push r11
    push r12
    push r13
    push r14
    push r15
    cld
    mov rdi, rsp
    mov rbx, rsp
    and rsp, -16
    call {enter}
    mov rsp, rbx
    pop r15
    pop r14
    pop r13
    pop r12
    pop r11
    pop r10
    pop r9
    pop r8
    pop rbp
    pop rdi
    pop rsi
    pop rdx
    pop rcx
    pop rbx
    pop rax
    add rsp, 16
    iretq
"#,
    enter = sym enter,
);

extern "C" fn enter(frame: &TrapFrame) {
    let handler = HANDLER.load(Ordering::Acquire);
    if handler.is_null() {
        super::ops::halt_forever();
    }
    // SAFETY: only `set_handler` writes the pointer, from a `Handler`.
    let handler = unsafe { transmute::<*mut (), Handler>(handler) };
    handler(frame);
}
