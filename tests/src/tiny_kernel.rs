//! Kernels of a few instructions, in the form of a bzImage: for what has to go wrong, and for
//! what needs no Linux.

/// Size of the setup part: the boot sector and one more.
const SETUP: usize = 1024;
/// Where the protected-mode part has its 64-bit entry.
const ENTRY: usize = 0x200;
/// Where the kernel wants to be loaded, and what it is aligned to.
const PLACE: u32 = 1 << 20;
/// Memory that it needs there.
const MEMORY: u32 = 1 << 16;

/// A bzImage by boot protocol 2.12 whose 64-bit entry is `code` (Linux,
/// Documentation/arch/x86/boot.rst): position-independent, in long mode, interrupts off.
pub fn tiny_kernel(code: &[u8]) -> Vec<u8> {
    let mut image = vec![0; SETUP + ENTRY];
    image.extend_from_slice(code);
    image.resize(image.len().next_multiple_of(16) + 16, 0);
    let paragraphs = u32::try_from((image.len() - SETUP) / 16).unwrap_or(u32::MAX);
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]); // setup_sects
    put(0x1f4, &paragraphs.to_le_bytes()); // syssize
    put(0x1fe, &[0x55, 0xaa]); // boot_flag
    put(0x202, b"HdrS");
    put(0x206, &[0x0c, 0x02]); // version
    put(0x211, &[1]); // loadflags: LOADED_HIGH
    put(0x22c, &u32::MAX.to_le_bytes()); // initrd_addr_max
    put(0x230, &4096_u32.to_le_bytes()); // kernel_alignment
    put(0x234, &[1]); // relocatable_kernel
    put(0x236, &[1]); // xloadflags: XLF_KERNEL_64
    put(0x238, &255_u32.to_le_bytes()); // cmdline_size
    put(0x258, &u64::from(PLACE).to_le_bytes()); // pref_address
    put(0x260, &MEMORY.to_le_bytes()); // init_size
    image
}

/// Code that prints `text` on the first serial port.
pub fn print(text: &str) -> Vec<u8> {
    // mov dx, 0x3f8
    let mut code = vec![0x66, 0xba, 0xf8, 0x03];
    for byte in text.bytes() {
        code.extend([0xb0, byte, 0xee]); // mov al, byte; out dx, al
    }
    code
}

/// Code that sleeps for ever.
pub const SLEEP: &[u8] = &[
    0xf4, // hlt
    0xeb, 0xfd, // jmp back
];

/// Code that ends in a triple fault: an interrupt without a descriptor table.
pub const TRIPLE_FAULT: &[u8] = &[
    0x48, 0x31, 0xc0, // xor rax, rax
    0x50, 0x50, // push rax, twice: a table at 0 with limit 0
    0x0f, 0x01, 0x1c, 0x24, // lidt [rsp]
    0xcc, // int3
];

/// Code that reads the I/O APIC by an instruction that nobody does that with.
pub const STRANGE_ACCESS: &[u8] = &[
    0xb8, 0x00, 0x00, 0xc0, 0xfe, // mov eax, 0xfec00000
    0xd9, 0x00, // fld dword [rax]
];

/// Code that writes `code` to the exit port.
pub fn exit(code: u32) -> Vec<u8> {
    let mut bytes = vec![0xb8]; // mov eax, code
    bytes.extend(code.to_le_bytes());
    bytes.extend([0xe7, 0xf4, 0xf4]); // out 0xf4, eax; hlt
    bytes
}

/// Code that resets the machine by port 0xcf9.
pub const RESET: &[u8] = &[
    0x66, 0xba, 0xf9, 0x0c, // mov dx, 0xcf9
    0xb0, 0x06, // mov al, 6
    0xee, // out dx, al
    0xf4, // hlt
];
