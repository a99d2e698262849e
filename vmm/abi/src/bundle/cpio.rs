//! The cpio "newc" format, as much of it as a bundle uses: regular files in a row.
//!
//! A header of 110 ASCII bytes (magic `070701`, then 13 numbers of 8 hexadecimal digits), the
//! name with its NUL, padding to 4 bytes, the data, padding to 4 bytes; at the end a file
//! named `TRAILER!!!` (Linux, Documentation/driver-api/early-userspace/buffer-format.rst).

use alloc::vec::Vec;

use super::BundleError;

/// What every cpio newc header, and so every bundle, starts with.
pub const MAGIC: &[u8; 6] = b"070701";
const HEADER_SIZE: usize = 110;
/// Where the header has the size of the data and that of the name.
const FILE_SIZE_AT: usize = 54;
const NAME_SIZE_AT: usize = 94;
const TRAILER: &str = "TRAILER!!!";
/// Longest name in bytes, without its NUL.
const NAME_MAX: usize = 255;
/// A regular file that all may read and its owner may write (stat(2)).
const REGULAR_FILE: usize = 0o100_644;

/// One file of an archive.
#[derive(Clone, Copy)]
pub(super) struct File<'a> {
    pub(super) name: &'a str,
    /// Where the data is in the archive, in bytes.
    pub(super) offset: usize,
    pub(super) data: &'a [u8],
}

/// Reads an archive file by file.
pub(super) struct Reader<'a> {
    archive: &'a [u8],
    /// Where the next header or the end is looked for.
    offset: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(archive: &'a [u8]) -> Self {
        Self { archive, offset: 0 }
    }

    /// The next file, `None` after the last. Only zeros may come after the last.
    pub(super) fn next(&mut self) -> Result<Option<File<'a>>, BundleError> {
        let start = self.offset;
        let rest = self.archive.get(start..).unwrap_or_default();
        // A header cut short is truncated; one that starts otherwise is none.
        if !rest.iter().zip(MAGIC).all(|(byte, magic)| byte == magic) {
            return Err(BundleError::NotCpio { offset: start });
        }
        let header = self.take(HEADER_SIZE, "a header")?;
        let file_size = number(header, FILE_SIZE_AT).ok_or(BundleError::Header { offset: start })?;
        let name_size = number(header, NAME_SIZE_AT).ok_or(BundleError::Header { offset: start })?;
        let name = self.take(name_size, "a name")?;
        let name = match name.split_last() {
            Some((0, name))
                if (1..=NAME_MAX).contains(&name.len()) && name.iter().all(u8::is_ascii_graphic) =>
            {
                core::str::from_utf8(name).ok()
            }
            _ => None,
        };
        let name = name.ok_or(BundleError::Header { offset: start })?;
        self.align("the padding of a name")?;
        if name == TRAILER {
            let rest = self.archive.get(self.offset..).unwrap_or_default();
            return match rest.iter().position(|&byte| byte != 0) {
                None => Ok(None),
                Some(at) => Err(BundleError::TrailingData { offset: self.offset.saturating_add(at) }),
            };
        }
        let offset = self.offset;
        let data = self.take(file_size, name)?;
        self.align("the padding of a file")?;
        Ok(Some(File { name, offset, data }))
    }

    fn take(&mut self, size: usize, what: &str) -> Result<&'a [u8], BundleError> {
        let end = self.offset.checked_add(size);
        let bytes = end.and_then(|end| self.archive.get(self.offset..end));
        let (Some(end), Some(bytes)) = (end, bytes) else {
            let left = self.archive.len().saturating_sub(self.offset);
            return Err(BundleError::Truncated { what: what.into(), offset: self.offset, size, left });
        };
        self.offset = end;
        Ok(bytes)
    }

    fn align(&mut self, what: &str) -> Result<(), BundleError> {
        self.take(padding(self.offset), what).map(drop)
    }
}

/// Bytes from `offset` to the next multiple of 4.
fn padding(offset: usize) -> usize {
    offset.wrapping_neg() % 4
}

/// The number of 8 hexadecimal digits at `offset` of a header.
fn number(header: &[u8], offset: usize) -> Option<usize> {
    let digits = header.get(offset..)?.get(..8)?;
    digits.iter().try_fold(0, |value: usize, &digit| {
        let digit = char::from(digit).to_digit(16)?;
        value.checked_mul(16)?.checked_add(usize::try_from(digit).ok()?)
    })
}

/// Bytes a file takes before its data.
pub(super) fn overhead(name: &str) -> usize {
    (HEADER_SIZE + name.len() + 1).next_multiple_of(4)
}

/// Appends a file. `None` if the data is too long for the format (4 GiB).
pub(super) fn append(archive: &mut Vec<u8>, name: &str, data: &[u8]) -> Option<()> {
    u32::try_from(data.len()).ok()?;
    append_header(archive, name, REGULAR_FILE, data.len());
    archive.extend_from_slice(data);
    archive.resize(archive.len().next_multiple_of(4), 0);
    Some(())
}

/// Appends what ends an archive.
pub(super) fn finish(archive: &mut Vec<u8>) {
    append_header(archive, TRAILER, 0, 0);
}

fn append_header(archive: &mut Vec<u8>, name: &str, mode: usize, size: usize) {
    archive.extend_from_slice(MAGIC);
    // ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor,
    // namesize, check: no times and no owners, so that the same input gives the same bundle.
    for field in [0, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name.len() + 1, 0] {
        archive.extend_from_slice(alloc::format!("{field:08x}").as_bytes());
    }
    archive.extend_from_slice(name.as_bytes());
    archive.push(0);
    archive.resize(archive.len().next_multiple_of(4), 0);
}
