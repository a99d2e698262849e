//! The first instructions: of the image on the boot CPU, and of every other CPU.
//!
//! The boot loader enters at `pvh_start` (Xen PVH, the note in `.note.pvh`) or at
//! `multiboot2_start` (the header in `.multiboot2`), in both cases in 32-bit protected
//! mode without paging and with `ebx` pointing to its structure. The code here may run at
//! any physical address below 4 GiB that is a multiple of 4 KiB, so it first finds out
//! where it is. It builds page tables in `.bss` that map the first 4 GiB onto themselves
//! and the image where it was linked, enters long mode and calls
//! `bulkhead_boot(protocol, info, image)` of the kernel.
//!
//! Names that end in `_phys` come from the linker script: link addresses minus
//! `KERNEL_OFFSET`, as the 32-bit code has no room for a virtual address.
//!
//! Other CPUs begin in a copy of [`trampoline`] below 1 MiB, in real mode.
// UNSAFETY: this module is assembly, and refers to symbols defined in it.
#![expect(unsafe_code, reason = "the entry points are assembly")]

use bulkhead_vmm::memory::address::Hpa;
use core::arch::global_asm;

/// Entered by the PVH protocol (`bulkhead_boot`'s first argument).
pub const PROTOCOL_PVH: u32 = 0;
/// Entered by the Multiboot2 protocol.
pub const PROTOCOL_MULTIBOOT2: u32 = 1;
/// How many 4 KiB pages of the image the first page tables map.
pub const IMAGE_PAGES_MAX: u64 = 4 * 512;

// The Multiboot2 header (Multiboot2 specification 1.6, section 3.1): where the image may
// be put, at which address to enter, and that modules begin at a page.
global_asm!(
    r#"
    .section .multiboot2, "a", @progbits
    .balign 8
multiboot2_header:
    .long 0xe85250d6, 0, multiboot2_header_end - multiboot2_header
    .long 0x100000000 - 0xe85250d6 - (multiboot2_header_end - multiboot2_header)
    .short 10, 0                 // relocatable: from, to, alignment, lowest preferred
    .long 24, 0x100000, 0xffffffff, 0x1000, 1
    .short 3, 0                  // entry address
    .long 12, multiboot2_start_phys
    .balign 8
    .short 6, 0                  // modules are page-aligned
    .long 8
    .short 0, 0
    .long 8
multiboot2_header_end:

    .section .note.pvh, "a", @note
    .balign 4
    .long 4, 8, 18               // XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .quad pvh_start_phys
"#
);

global_asm!(
    r#"
    .section .bss.boot_tables, "aw", @nobits
    .balign 4096
    .global boot_tables
boot_tables:
    .skip 4096 * 12              // PML4, PDPT low, PDPT high, PD high, 4 PD low, 4 PT high
    .section .bss.boot_stack, "aw", @nobits
    .balign 4096
    .skip 65536
    .global boot_stack_top
boot_stack_top:

    .section .rodata.boot_gdt, "a", @progbits
    .balign 8
    .global boot_gdt
boot_gdt:
    .quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff

    .section .text.boot, "ax", @progbits
    .code32
    .global pvh_start, multiboot2_start, boot_here, boot_long
pvh_start:
    xor esi, esi
    jmp boot_find
multiboot2_start:
    mov esi, 1

boot_find:                       // there is no stack yet: borrow a word of the loader's
    cli
    cld
    mov edi, ebx
    mov edx, [ebx]
    lea esp, [ebx + 4]
    call boot_here
boot_here:
    pop ebp
    mov [ebx], edx
    sub ebp, offset boot_here_phys
    lea esp, [ebp + boot_stack_top_phys]

    mov eax, 0x80000000          // long mode and NX are a must
    cpuid
    cmp eax, 0x80000001
    jb boot_unfit
    mov eax, 0x80000001
    cpuid
    not edx
    test edx, 0x20100000
    jnz boot_unfit

    lea ebx, [ebp + boot_tables_phys]
    lea eax, [ebx + 4096 + 3]
    mov [ebx], eax               // PML4[0] and [511]
    add eax, 4096
    mov [ebx + 511 * 8], eax
    add eax, 4096
    mov [ebx + 2 * 4096 + 510 * 8], eax
    lea eax, [ebx + 4 * 4096 + 3]
    xor ecx, ecx
boot_loop_0:
    mov [ebx + 4096 + ecx * 8], eax
    add eax, 4096
    inc ecx
    cmp ecx, 4
    jb boot_loop_0
    lea eax, [ebx + 8 * 4096 + 3]
    xor ecx, ecx
boot_loop_1:                            // PD high, from the image's 2 MiB on
    mov [ebx + 3 * 4096 + 8 + ecx * 8], eax
    add eax, 4096
    inc ecx
    cmp ecx, 4
    jb boot_loop_1
    mov eax, 0x83                // 2 MiB pages
    xor ecx, ecx
boot_loop_2:
    mov [ebx + 4 * 4096 + ecx * 8], eax
    add eax, 0x200000
    inc ecx
    cmp ecx, 4 * 512
    jb boot_loop_2
    lea eax, [ebp + image_start_phys + 3]
    xor ecx, ecx
boot_loop_3:
    mov [ebx + 8 * 4096 + ecx * 8], eax
    add eax, 4096
    inc ecx
    cmp ecx, 4 * 512
    jb boot_loop_3

    mov cr3, ebx
    mov eax, cr4
    or eax, 0x20                 // PAE
    mov cr4, eax
    mov ecx, 0xc0000080
    rdmsr
    or eax, 0x900                // LME, NXE
    wrmsr
    mov eax, 0x80010033          // PG, WP, NE, ET, MP, PE
    mov cr0, eax
    lea eax, [ebp + boot_gdt_phys]
    sub esp, 8
    mov word ptr [esp], 23
    mov [esp + 2], eax
    lgdt [esp]
    lea eax, [ebp + boot_long_phys]
    push 8
    push eax
    retf

boot_unfit:
    hlt
    jmp boot_unfit

    .code64
boot_long:
    xor eax, eax
    mov ds, eax
    mov es, eax
    mov fs, eax
    mov gs, eax
    mov ss, eax
    movabs rax, offset boot_high
    jmp rax
boot_high:
    mov rsp, offset boot_stack_top
    lea edx, [ebp + image_start_phys]
    xchg edi, esi
    xor ebp, ebp
    push rbp
    call bulkhead_boot
    ud2
"#
);

// Entered in real mode at CS:0, the first byte of its page. It writes only while paging
// is off, so its mapping needs no write permission.
global_asm!(
    r#"
    .section .rodata.trampoline, "a", @progbits
    .global trampoline_start, trampoline_end
    .balign 16
    .set trampoline_32_offset, trampoline_32 - trampoline_start
    .set trampoline_64_offset, trampoline_64 - trampoline_start
    .set trampoline_gdt_offset, trampoline_gdt - trampoline_start
    .set trampoline_pointer_offset, trampoline_gdt_pointer - trampoline_start
trampoline_start:
    .code16
    cli
    cld
    mov ax, cs
    mov ds, ax
    mov ss, ax
    mov sp, 4096 - 64
    movzx ebx, ax
    shl ebx, 4                   // where this page is
    lea eax, [ebx + trampoline_gdt_offset]
    mov [trampoline_pointer_offset + 2], eax
    lgdtd [trampoline_pointer_offset]
    lea ecx, [ebx + trampoline_32_offset]
    mov eax, 0x11                // ET, PE
    mov cr0, eax
    mov eax, 0x18
    push eax
    push ecx
    .byte 0x66                   // 32-bit operands
    retf

    .code32
trampoline_32:
    mov eax, 0x10
    mov ds, eax
    mov ss, eax
    lea esp, [ebx + 4096 - 64]
    mov eax, cr4
    or eax, 0x20                 // PAE
    mov cr4, eax
    mov eax, [ebx + 4096 - 32]
    mov cr3, eax
    mov ecx, 0xc0000080
    rdmsr
    or eax, 0x900                // LME, NXE
    wrmsr
    lea eax, [ebx + trampoline_64_offset]
    push 0x08
    push eax
    mov eax, 0x80010033          // PG, WP, NE, ET, MP, PE; caches on
    mov cr0, eax
    retf

    .code64
trampoline_64:
    xor eax, eax
    mov ds, eax
    mov es, eax
    mov fs, eax
    mov gs, eax
    mov ss, eax
    mov rsp, [rbx + 4096 - 24]
    mov rdi, [rbx + 4096 - 16]
    mov rax, [rbx + 4096 - 8]
    xor ebp, ebp
    push rbp
    jmp rax

    .balign 8
trampoline_gdt:
    .quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff, 0x00cf9b000000ffff
trampoline_gdt_pointer:
    .short 31
    .long 0
trampoline_end:
"#
);

/// The code of the trampoline, to be copied to the beginning of a page below 1 MiB.
pub fn trampoline() -> &'static [u8] {
    unsafe extern "C" {
        static trampoline_start: u8;
        static trampoline_end: u8;
    }
    let start = &raw const trampoline_start;
    let len = (&raw const trampoline_end).addr() - start.addr();
    // SAFETY: the assembly above defines both symbols around read-only bytes.
    unsafe { core::slice::from_raw_parts(start, len) }
}

/// What the trampoline reads from the last 32 bytes of its page.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct TrampolineArguments {
    /// Page tables, below 4 GiB, that map the trampoline's page onto itself.
    pub page_tables: Hpa,
    /// The upper end of the stack to begin on, a multiple of 16.
    pub stack_top: u64,
    /// What `entry` is called with.
    pub argument: *mut (),
    /// What is called; it never returns.
    pub entry: extern "C" fn(*mut ()) -> !,
}

const _: () = assert!(size_of::<TrampolineArguments>() == 32);

/// Where in the image the parts with different permissions begin and end, as linked.
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "names of the linker script")]
pub struct ImageLayout {
    pub image_start: u64,
    pub text_start: u64,
    pub data_start: u64,
    pub image_end: u64,
}

/// The image's layout: read-only data, code, data.
pub fn image_layout() -> ImageLayout {
    unsafe extern "C" {
        static image_start: u8;
        static text_start: u8;
        static data_start: u8;
        static image_end: u8;
    }
    let at = |symbol: *const u8| symbol.addr() as u64;
    ImageLayout {
        image_start: at(&raw const image_start),
        text_start: at(&raw const text_start),
        data_start: at(&raw const data_start),
        image_end: at(&raw const image_end),
    }
}
