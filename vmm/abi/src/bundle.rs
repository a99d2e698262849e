//! The bundle: the file with a node's configuration, kernels and initial file systems.
//!
//! A cpio newc archive, so that `cpio -t` lists it. Its first file is [`MANIFEST`], in CBOR
//! (RFC 8949): an array of the text [`MAGIC`], the number [`VERSION`], the body as a byte
//! string, and the body's CRC-32. These four stay as they are in all versions; the body of
//! version 1 is an array of the [`NodeConfig`] and of what follows in the archive, with name,
//! [`Role`], size and CRC-32. Checksums are CRC-32/ISO-HDLC (that of zlib and Ethernet).
//!
//! The data of every entry begins on a multiple of [`PAGE_SIZE`] of the archive (files named
//! [`PAD`] fill the gaps), so that a boot loader that puts the archive on a page puts every
//! kernel on one. Zeros after the archive are none of its business: boot loaders round up.
//!
//! [`Bundle::parse`] believes nothing: what it returns is complete, sound and configured
//! within limits, or else the error says what isn't.

mod cpio;

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use crc::{CRC_32_ISO_HDLC, Crc, Table};
use minicbor::{Decode, Encode};

use crate::config::{ConfigError, NodeConfig, open_enum};
pub use cpio::MAGIC as CPIO_MAGIC;
use cpio::{File, Reader};

/// Name of the first file of a bundle.
pub const MANIFEST: &str = "bulkhead/manifest";
/// Name of the files that fill gaps.
pub const PAD: &str = "bulkhead/pad";
/// What a manifest starts with.
pub const MAGIC: &str = "bulkhead bundle";
/// The version of the manifest's body that this code writes and reads.
pub const VERSION: u32 = 1;
/// Every entry's data begins on a multiple of so many bytes.
pub const PAGE_SIZE: usize = 4096;
/// So many entries at most.
pub const ENTRIES_MAX: usize = 256;

/// Sixteen bytes a step: a node checks some 60 MB before it boots, perhaps under emulation.
static CRC: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_ISO_HDLC);

open_enum! {
    /// What an entry is for. A version that doesn't know a role carries the entry along.
    Role, "role", {
        /// The root cell's kernel, a bzImage. Every bundle has one.
        ROOT_KERNEL = 1, "root-kernel";
        /// The root cell's initial file system. One at most.
        ROOT_INITRD = 2, "root-initrd";
        /// A guest cell's configuration in TOML.
        CELL_FILE = 3, "cell-file";
        /// A guest cell's kernel.
        CELL_KERNEL = 4, "cell-kernel";
        /// A guest cell's initial file system.
        CELL_INITRD = 5, "cell-initrd";
    }
}

/// Name of the entry with the configuration of the guest cell `cell`.
pub fn cell_file(cell: &str) -> String {
    format!("cell/{cell}/file")
}

/// Name of the entry with the kernel of the guest cell `cell`.
pub fn cell_kernel(cell: &str) -> String {
    format!("cell/{cell}/kernel")
}

/// Name of the entry with the initial file system of the guest cell `cell`, if it has one.
pub fn cell_initrd(cell: &str) -> String {
    format!("cell/{cell}/initrd")
}

/// A bundle that has been checked.
#[derive(Clone, Debug)]
pub struct Bundle<'a> {
    /// The node's configuration, within its limits.
    pub config: NodeConfig,
    /// All entries, in the manifest's order, [`ENTRIES_MAX`] at most, no name twice.
    pub entries: Vec<Entry<'a>>,
    /// The root cell's kernel; it is among `entries` too.
    pub root_kernel: Entry<'a>,
    /// The root cell's initial file system; it is among `entries` too.
    pub root_initrd: Option<Entry<'a>>,
}

/// An entry of a bundle; its data agrees with its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Its name in the archive: 1 to 255 visible ASCII characters.
    pub name: &'a str,
    /// What it is for.
    pub role: Role,
    /// Its content.
    pub data: &'a [u8],
    /// Where `data` is in the archive, in bytes. [`write()`] puts it on a multiple of
    /// [`PAGE_SIZE`]; [`Bundle::parse`] doesn't ask for that.
    pub offset: usize,
    /// CRC-32 of `data`.
    pub crc32: u32,
}

/// An entry for [`write()`].
#[derive(Clone, Copy, Debug)]
pub struct NewEntry<'a> {
    /// Its name in the archive: 1 to 255 visible ASCII characters.
    pub name: &'a str,
    /// What it is for.
    pub role: Role,
    /// Its content, less than 4 GiB.
    pub data: &'a [u8],
}

/// Why a file is no bundle, or can't become one. Names in it are cut after 64 characters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// No header where one must be.
    #[error("not a cpio newc archive: no header (070701) at byte {offset}")]
    NotCpio {
        /// Where it was looked for.
        offset: usize,
    },
    /// A header with a number or a name that is none.
    #[error("the cpio header at byte {offset} is damaged: bad size or name")]
    Header {
        /// Where the header starts.
        offset: usize,
    },
    /// The archive ends too early.
    #[error("truncated in {what}: {size} bytes should be at byte {offset}, {left} are there")]
    Truncated {
        /// What is incomplete.
        what: String,
        /// Where it starts.
        offset: usize,
        /// Its size in bytes.
        size: usize,
        /// Bytes from there to the end.
        left: usize,
    },
    /// Something other than zeros after the archive.
    #[error("byte {offset} is not zero, behind the end of the archive")]
    TrailingData {
        /// Where it is.
        offset: usize,
    },
    /// The archive doesn't start with a manifest.
    #[error("no manifest: the first file is {found:?}, must be {MANIFEST:?}")]
    NoManifest {
        /// Name of the first file, empty if there is none.
        found: String,
    },
    /// The manifest is no CBOR of the right form.
    #[error("the manifest is damaged: {reason}")]
    Manifest {
        /// What the decoder says.
        reason: String,
    },
    /// The manifest is one of something else.
    #[error("the manifest's magic is {found:?}, must be {MAGIC:?}")]
    Magic {
        /// What it was.
        found: String,
    },
    /// The manifest is of another version.
    #[error("the bundle has version {found}, this program reads version {VERSION}")]
    Version {
        /// What it was.
        found: u32,
    },
    /// The configuration is out of its limits.
    #[error("bad node configuration: {0}")]
    Config(#[from] ConfigError),
    /// The archive lacks an entry that the manifest has.
    #[error("entry {name:?} is missing")]
    Missing {
        /// Name of the entry.
        name: String,
    },
    /// The archive has a file that the manifest has not.
    #[error("file {name:?} is not in the manifest")]
    Unlisted {
        /// Name of the file.
        name: String,
    },
    /// A name occurs twice, in the archive or in the manifest.
    #[error("entry {name:?} is there twice")]
    Duplicate {
        /// Name of the entry.
        name: String,
    },
    /// Two entries with a role of which there is one.
    #[error("two entries have the role {role}: {first:?} and {second:?}")]
    RoleTwice {
        /// The role.
        role: Role,
        /// Name of the first entry.
        first: String,
        /// Name of the second.
        second: String,
    },
    /// More than [`ENTRIES_MAX`] entries.
    #[error("more than {ENTRIES_MAX} entries")]
    TooMany,
    /// An entry too large for the archive's format.
    #[error("{name:?} is too large: {size} bytes, at most 4294967295 are allowed")]
    TooLarge {
        /// Name of the entry.
        name: String,
        /// Its size in bytes.
        size: usize,
    },
    /// An entry has not the size that the manifest gives.
    #[error("entry {name:?} has {found} bytes, the manifest says {expected}")]
    Size {
        /// Name of the entry.
        name: String,
        /// What it has.
        found: usize,
        /// What it should have.
        expected: u64,
    },
    /// An entry, or the manifest's body, has not the checksum that the manifest gives.
    #[error("{name:?} has checksum {found:#010x}, the manifest says {expected:#010x}")]
    Checksum {
        /// Name of the entry, or [`MANIFEST`].
        name: String,
        /// CRC-32 of what is there.
        found: u32,
        /// What it should be.
        expected: u32,
    },
    /// No entry has the role [`Role::ROOT_KERNEL`].
    #[error("no root kernel")]
    NoRootKernel,
    /// The root kernel is no Linux kernel for x86.
    #[error("root kernel {name:?} is not a bzImage: no {lacks}")]
    NotBzImage {
        /// Name of the entry.
        name: String,
        /// What a bzImage has and this hasn't.
        lacks: &'static str,
    },
}

/// The manifest's fields that tell whether the rest can be read.
#[derive(Decode)]
struct Identity<'b> {
    #[b(0)]
    magic: &'b str,
    #[n(1)]
    version: u32,
}

#[derive(Encode, Decode)]
struct Manifest<'b> {
    #[b(0)]
    magic: &'b str,
    #[n(1)]
    version: u32,
    #[cbor(b(2), with = "minicbor::bytes")]
    body: &'b [u8],
    #[n(3)]
    crc32: u32,
}

#[derive(Encode, Decode)]
struct Body<'b> {
    #[n(0)]
    config: NodeConfig,
    #[b(1)]
    entries: Vec<Listed<'b>>,
}

/// What the manifest says about an entry.
#[derive(Encode, Decode)]
struct Listed<'b> {
    #[b(0)]
    name: &'b str,
    #[n(1)]
    role: Role,
    #[n(2)]
    size: u64,
    #[n(3)]
    crc32: u32,
}

impl<'a> Bundle<'a> {
    /// Reads a bundle and checks all of it: form, version, checksums, configuration, and that
    /// the root kernel is a bzImage.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn parse(archive: &'a [u8]) -> Result<Self, BundleError> {
        let mut reader = Reader::new(archive);
        let body = match reader.next()? {
            Some(file) if file.name == MANIFEST => Body::from_manifest(file.data)?,
            file => return Err(BundleError::NoManifest { found: short(file.map_or("", |file| file.name)) }),
        };
        body.config.validate()?;
        if body.entries.len() > ENTRIES_MAX {
            return Err(BundleError::TooMany);
        }
        let files = files(reader)?;
        let mut entries = Vec::new();
        for listed in &body.entries {
            let entry = listed.find(&files)?;
            if entries.iter().any(|other: &Entry<'_>| other.name == entry.name) {
                return Err(BundleError::Duplicate { name: short(entry.name) });
            }
            entries.push(entry);
        }
        if let Some(file) = files.iter().find(|file| !entries.iter().any(|entry| entry.name == file.name)) {
            return Err(BundleError::Unlisted { name: short(file.name) });
        }
        let root_kernel = only(&entries, Role::ROOT_KERNEL)?.ok_or(BundleError::NoRootKernel)?;
        check_bzimage(&root_kernel)?;
        let root_initrd = only(&entries, Role::ROOT_INITRD)?;
        Ok(Self { config: body.config, entries, root_kernel, root_initrd })
    }
}

/// Makes a bundle that [`Bundle::parse`] accepts. The same arguments give the same bytes.
///
/// # Errors
/// What `Bundle::parse` would say, or [`BundleError::TooLarge`].
pub fn write(config: &NodeConfig, entries: &[NewEntry<'_>]) -> Result<Vec<u8>, BundleError> {
    let mut archive = Vec::new();
    let mut listed = Vec::new();
    for &NewEntry { name, role, data } in entries {
        let size = u64::try_from(data.len()).unwrap_or(u64::MAX);
        listed.push(Listed { name, role, size, crc32: CRC.checksum(data) });
    }
    append(&mut archive, MANIFEST, &Body { config: config.clone(), entries: listed }.to_manifest()?)?;
    for &NewEntry { name, data, .. } in entries {
        pad(&mut archive, name)?;
        append(&mut archive, name, data)?;
    }
    cpio::finish(&mut archive);
    Bundle::parse(&archive)?;
    Ok(archive)
}

/// Fills up so that the data of a file of that name, appended next, begins on a page.
fn pad(archive: &mut Vec<u8>, name: &str) -> Result<(), BundleError> {
    let gap = (archive.len() + cpio::overhead(name)).wrapping_neg() % PAGE_SIZE;
    if gap == 0 {
        return Ok(());
    }
    let least = cpio::overhead(PAD);
    let gap = if gap < least { gap + PAGE_SIZE } else { gap };
    append(archive, PAD, &alloc::vec![0; gap - least])
}

fn append(archive: &mut Vec<u8>, name: &str, data: &[u8]) -> Result<(), BundleError> {
    cpio::append(archive, name, data).ok_or(BundleError::TooLarge { name: short(name), size: data.len() })
}

impl<'a> Body<'a> {
    fn from_manifest(data: &'a [u8]) -> Result<Self, BundleError> {
        let Identity { magic, version } = decode(data)?;
        if magic != MAGIC {
            return Err(BundleError::Magic { found: short(magic) });
        }
        if version != VERSION {
            return Err(BundleError::Version { found: version });
        }
        let manifest: Manifest<'a> = decode(data)?;
        check_crc(MANIFEST, manifest.body, manifest.crc32)?;
        decode(manifest.body)
    }

    fn to_manifest(&self) -> Result<Vec<u8>, BundleError> {
        let body = encode(self)?;
        encode(&Manifest { magic: MAGIC, version: VERSION, body: &body, crc32: CRC.checksum(&body) })
    }
}

impl Listed<'_> {
    /// The entry, with its data out of `files`.
    fn find<'a>(&self, files: &[File<'a>]) -> Result<Entry<'a>, BundleError> {
        let file = files.iter().find(|file| file.name == self.name);
        let &File { name, offset, data } = file.ok_or(BundleError::Missing { name: short(self.name) })?;
        if u64::try_from(data.len()) != Ok(self.size) {
            return Err(BundleError::Size { name: short(name), found: data.len(), expected: self.size });
        }
        check_crc(name, data, self.crc32)?;
        Ok(Entry { name, role: self.role, data, offset, crc32: self.crc32 })
    }
}

/// The files behind the manifest, no name twice, without padding.
fn files(mut reader: Reader<'_>) -> Result<Vec<File<'_>>, BundleError> {
    let mut files: Vec<File<'_>> = Vec::new();
    while let Some(file) = reader.next()? {
        if file.name == PAD {
            continue;
        }
        if file.name == MANIFEST || files.iter().any(|other| other.name == file.name) {
            return Err(BundleError::Duplicate { name: short(file.name) });
        }
        if files.len() == ENTRIES_MAX {
            return Err(BundleError::TooMany);
        }
        files.push(file);
    }
    Ok(files)
}

/// The entry with a role that only one may have.
fn only<'a>(entries: &[Entry<'a>], role: Role) -> Result<Option<Entry<'a>>, BundleError> {
    let mut with_role = entries.iter().filter(|entry| entry.role == role);
    let Some(first) = with_role.next() else { return Ok(None) };
    match with_role.next() {
        None => Ok(Some(*first)),
        Some(second) => {
            Err(BundleError::RoleTwice { role, first: short(first.name), second: short(second.name) })
        }
    }
}

/// Linux, Documentation/arch/x86/boot.rst, "The Real-Mode Kernel Header".
fn check_bzimage(kernel: &Entry<'_>) -> Result<(), BundleError> {
    let has = |offset: usize, bytes: &[u8]| {
        kernel.data.get(offset..).is_some_and(|from_offset| from_offset.starts_with(bytes))
    };
    let lacks = match (has(0x1fe, &[0x55, 0xaa]), has(0x202, b"HdrS")) {
        (false, _) => "boot sector signature (55 aa at 0x1fe)",
        (_, false) => "setup header (HdrS at 0x202)",
        (true, true) => return Ok(()),
    };
    Err(BundleError::NotBzImage { name: short(kernel.name), lacks })
}

fn check_crc(name: &str, data: &[u8], expected: u32) -> Result<(), BundleError> {
    let found = CRC.checksum(data);
    if found == expected { Ok(()) } else { Err(BundleError::Checksum { name: short(name), found, expected }) }
}

/// Decodes all of `data`: nothing may be left over.
fn decode<'a, T: Decode<'a, ()>>(data: &'a [u8]) -> Result<T, BundleError> {
    let mut decoder = minicbor::Decoder::new(data);
    let value = decoder.decode().map_err(|error| BundleError::Manifest { reason: error.to_string() })?;
    match data.len().checked_sub(decoder.position()) {
        Some(0) => Ok(value),
        _ => Err(BundleError::Manifest { reason: "more bytes than it needs".into() }),
    }
}

fn encode<T: Encode<()>>(value: &T) -> Result<Vec<u8>, BundleError> {
    minicbor::to_vec(value).map_err(|error| BundleError::Manifest { reason: error.to_string() })
}

/// The name as far as an error shows it.
fn short(name: &str) -> String {
    name.chars().take(64).collect()
}

#[cfg(test)]
mod tests;
