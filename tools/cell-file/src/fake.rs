//! What tests need that make cells of files.

/// A file that passes for a kernel (Documentation/arch/x86/boot.rst): one setup sector, no
/// code.
pub fn kernel() -> Vec<u8> {
    let mut kernel = vec![0; 100_352];
    let fields: [(usize, &[u8]); 10] = [
        (0x1f1, &[1]),
        (0x1f4, &6208_u32.to_le_bytes()),
        (0x1fe, &[0x55, 0xaa]),
        (0x202, b"HdrS\x0c\x02"),
        (0x211, &[1]),
        (0x22c, &u32::MAX.to_le_bytes()),
        (0x230, &0x1000_u32.to_le_bytes()),
        (0x234, &[1, 0, 1]),
        (0x238, &255_u32.to_le_bytes()),
        (0x260, &0x2_0000_u32.to_le_bytes()),
    ];
    for (at, bytes) in fields {
        kernel[at..at + bytes.len()].copy_from_slice(bytes);
    }
    kernel
}
