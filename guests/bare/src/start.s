    // Multiboot Specification 0.6.96, 3.1: memory information; the addresses follow.
    .section .multiboot, "a"
    .balign 4
multiboot_header:
    .long 0x1badb002
    .long 0x00010002
    .long -(0x1badb002 + 0x00010002)
    .long multiboot_header
    .long image_start
    .long image_end
    .long bss_end
    .long multiboot_entry

    // XEN_ELFNOTE_PHYS32_ENTRY.
    .section .note.Xen, "a", @note
    .balign 4
    .long 4
    .long 4
    .long 18
    .asciz "Xen"
    .long pvh_entry

    .text
    .code32
    .global multiboot_entry
pvh_entry:
    // Here EAX says nothing.
    xor eax, eax
multiboot_entry:
    mov edi, eax
    mov esi, ebx
    mov esp, offset stack_end
    // Page tables for the first 4 GiB, virtual = physical.
    mov eax, offset pointers
    or eax, 3
    mov [top], eax
    mov eax, offset directories
    or eax, 3
    mov [pointers], eax
    add eax, 0x1000
    mov [pointers + 8], eax
    add eax, 0x1000
    mov [pointers + 16], eax
    add eax, 0x1000
    mov [pointers + 24], eax
    xor ecx, ecx
2:
    mov eax, ecx
    shl eax, 21
    or eax, 0x83
    mov [directories + ecx * 8], eax
    inc ecx
    cmp ecx, 2048
    jne 2b
    mov eax, offset top
    mov cr3, eax
    // PAE, then EFER.LME, then paging.
    mov eax, cr4
    or eax, 0x20
    mov cr4, eax
    mov ecx, 0xc0000080
    rdmsr
    or eax, 0x100
    wrmsr
    mov eax, cr0
    or eax, 0x80000000
    mov cr0, eax
    lgdt [gdt_pointer]
    push 8
    mov eax, offset in_64_bits
    push eax
    retf
    .code64
in_64_bits:
    mov eax, 16
    mov ds, eax
    mov es, eax
    mov ss, eax
    // Arguments of 32 bits, extended.
    mov edi, edi
    mov esi, esi
    call {main}
    ud2

    .section .rodata
    .balign 8
gdt:
    .quad 0
    .quad 0x00af9b000000ffff
    .quad 0x00cf93000000ffff
gdt_pointer:
    .word 23
    .long gdt

    .section .bss
    .balign 4096
top:
    .skip 4096
pointers:
    .skip 4096
directories:
    .skip 4 * 4096
    .skip 16384
stack_end:
