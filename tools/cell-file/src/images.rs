//! The files that a cell boots from, checked before anybody makes the cell.

use crate::{BadFile, CellFile};
use bulkhead_vmm::x86::board;
use bulkhead_vmm::x86::boot::{self, BootError, Handover, Image, ImageError};
use std::fmt::Display;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

impl CellFile {
    /// Checks the kernel and the initrd as the hypervisor will when they are loaded. Returns how
    /// many bytes each has, the kernel first.
    ///
    /// # Errors
    /// What is wrong with one of them, or that they do not fit into the cell's memory.
    pub fn check_images(&self) -> Result<Vec<u64>, BadFile> {
        let bad = |path: &Path, why: &dyn Display| BadFile(format!("{}: {why}", path.display()));
        let open = |path: &Path| {
            let file = File::open(path).map_err(|e| bad(path, &format_args!("cannot be opened: {e}")))?;
            let meta = file.metadata().map_err(|e| bad(path, &e))?;
            if !meta.is_file() || meta.len() == 0 {
                return Err(bad(path, &"is not a file with something in it"));
            }
            Ok(ImageFile { file, size: meta.len() })
        };
        let kernel = open(&self.kernel)?;
        let initrd = self.initrd.as_ref().map(|path| open(path).map(|file| file.size)).transpose()?;
        let sum = kernel.size.saturating_add(initrd.unwrap_or(0));
        let handover = Handover {
            map: &board::memory_map(self.memory),
            cmdline: self.cmdline.as_bytes(),
            initrd,
            rsdp: Some(board::RSDP_ADDRESS),
        };
        // As the hypervisor itself does it.
        match boot::plan(&kernel, &handover) {
            Err(error @ BootError::Unknown) => return Err(bad(&self.kernel, &error)),
            _ if sum > self.memory => {
                let why = format!(
                    "kernel and initrd have {sum} bytes, and the cell {} bytes of memory; allowed: less",
                    self.memory
                );
                return Err(BadFile(why));
            }
            Err(error @ BootError::NoRoom { what: "initrd", .. }) => {
                return Err(bad(self.initrd.as_ref().unwrap_or(&self.kernel), &error));
            }
            Err(error) => return Err(bad(&self.kernel, &error)),
            Ok(_) => {}
        }
        Ok([Some(kernel.size), initrd].into_iter().flatten().collect())
    }
}

/// A file on disk.
struct ImageFile {
    file: File,
    size: u64,
}

impl Image for ImageFile {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), ImageError> {
        let len = buf.len();
        self.file.read_exact_at(buf, offset).map_err(|_| ImageError { offset, len })
    }
}
