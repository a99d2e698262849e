//! The setup header at the start of a bzImage.

use super::BootError;
use crate::memory::address::Gpa;

/// How many bytes of a file hold the setup header. It begins at 0x1f1; at 0x290 of the
/// boot parameters other fields begin.
pub(super) const HEADER_END: usize = 0x290;
/// Where the setup header begins.
pub(super) const HEADER_START: usize = 0x1f1;

/// The largest setup part that is accepted, in bytes. The real-mode code in it has to
/// fit one segment, so no kernel has more.
const MAX_SETUP: u64 = 64 * 1024;
/// `xloadflags`: the kernel has a 64-bit entry at 0x200.
const XLF_KERNEL_64: u16 = 1;
/// `xloadflags`: kernel, boot parameters, command line and initrd may lie above 4 GiB.
const XLF_CAN_BE_LOADED_ABOVE_4G: u16 = 1 << 1;
/// `loadflags`: the protected-mode part goes to 0x100000 or above.
const LOADED_HIGH: u8 = 1;

/// Whether a file that begins with `start` is a bzImage: it has a `boot_flag` and the magic
/// number of `header`.
pub(super) fn is_bzimage(start: &[u8; HEADER_END]) -> bool {
    start[0x1fe..0x200] == [0x55, 0xaa] && start[0x202..0x206] == *b"HdrS"
}

/// What a kernel's setup header says of how to load it, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// Size of the setup part, in bytes: where in the file the protected-mode part begins.
    pub(super) setup_size: u64,
    /// Size of the protected-mode part, in bytes.
    pub(super) payload_size: u64,
    /// Whether it runs at other places than [`pref_address`](Self::pref_address).
    pub(super) relocatable: bool,
    /// Alignment of its place, in bytes: a power of two, at least 4096.
    pub(super) kernel_alignment: u64,
    /// Where it likes to be.
    pub(super) pref_address: Gpa,
    /// How much memory it needs there before it has read the memory map, in bytes; at
    /// least [`payload_size`](Self::payload_size).
    pub(super) init_size: u64,
    /// The longest command line it takes, in bytes, without the final zero.
    pub(super) cmdline_size: u32,
    /// The first address behind where an initrd may end; at most 4 GiB.
    pub(super) initrd_limit: u64,
}

impl Header {
    /// Reads the setup header of a bzImage from its first bytes.
    ///
    /// # Errors
    /// When it has no 64-bit entry or a protocol before 2.12, or a field that no kernel can
    /// have.
    pub(super) fn parse(file: &[u8; HEADER_END]) -> Result<Self, BootError> {
        let refuse =
            |field, value, allowed| Err(BootError::Field { part: "setup header", field, value, allowed });

        let version = u16_at::<0x206>(file);
        if version < 0x20c {
            return refuse("version", version.into(), "0x20c (protocol 2.12) or later");
        }
        let loadflags = file[0x211];
        if loadflags & LOADED_HIGH == 0 {
            return refuse("loadflags", loadflags.into(), "bit 0 (LOADED_HIGH) set");
        }
        let xloadflags = u16_at::<0x236>(file);
        if xloadflags & XLF_KERNEL_64 == 0 {
            return refuse("xloadflags", xloadflags.into(), "bit 0 (XLF_KERNEL_64) set");
        }
        // 0 stands for 4, from the days of the first protocols.
        let setup_sects = match file[0x1f1] {
            0 => 4,
            sectors => u64::from(sectors),
        };
        let setup_size = (setup_sects + 1) * 512;
        if setup_size > MAX_SETUP {
            return refuse("setup_sects", setup_sects, "0 to 0x7f");
        }
        let syssize = u32_at::<0x1f4>(file);
        let payload_size = u64::from(syssize) * 16;
        if payload_size <= 0x200 {
            return refuse("syssize", syssize.into(), "more than 0x20, or there is no entry at 0x200");
        }
        let kernel_alignment = u32_at::<0x230>(file);
        if !kernel_alignment.is_power_of_two() || kernel_alignment < 0x1000 {
            return refuse("kernel_alignment", kernel_alignment.into(), "a power of two, 0x1000 or more");
        }
        let init_size = u32_at::<0x260>(file);
        if u64::from(init_size) < payload_size {
            return refuse("init_size", init_size.into(), "at least 16 times syssize");
        }
        let pref_address = u64_at::<0x258>(file);
        if !pref_address.is_multiple_of(kernel_alignment.into()) {
            return refuse("pref_address", pref_address, "a multiple of kernel_alignment");
        }
        // The field dates from kernels whose low memory ended there; one that may be
        // loaded above 4 GiB takes its initrd from anywhere.
        let initrd_limit = if xloadflags & XLF_CAN_BE_LOADED_ABOVE_4G != 0 {
            crate::x86::boot::e820::FOUR_GIB
        } else {
            u64::from(u32_at::<0x22c>(file)) + 1
        };
        Ok(Self {
            setup_size,
            payload_size,
            relocatable: file[0x234] != 0,
            kernel_alignment: kernel_alignment.into(),
            pref_address: Gpa::new(pref_address),
            init_size: init_size.into(),
            cmdline_size: u32_at::<0x238>(file),
            initrd_limit,
        })
    }
}

/// `N` bytes at `OFFSET` of the header, which the compiler checks to be inside.
fn bytes_at<const OFFSET: usize, const N: usize>(file: &[u8; HEADER_END]) -> [u8; N] {
    const { assert!(OFFSET + N <= HEADER_END) }
    core::array::from_fn(|i| file[OFFSET + i])
}

fn u16_at<const OFFSET: usize>(file: &[u8; HEADER_END]) -> u16 {
    u16::from_le_bytes(bytes_at::<OFFSET, 2>(file))
}

fn u32_at<const OFFSET: usize>(file: &[u8; HEADER_END]) -> u32 {
    u32::from_le_bytes(bytes_at::<OFFSET, 4>(file))
}

fn u64_at<const OFFSET: usize>(file: &[u8; HEADER_END]) -> u64 {
    u64::from_le_bytes(bytes_at::<OFFSET, 8>(file))
}
