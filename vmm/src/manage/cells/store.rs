//! A cell's files: whole, in memory that it owns and that no guest reaches, so that it can begin
//! anew without anybody's help.

use crate::cell::config::HostRange;
use crate::manage::platform::{Platform, StoredFile};
use crate::memory::address::Hpa;
use alloc::vec::Vec;
use bulkhead_abi::message::{LoadKind, MEMORY_UNIT};

/// A file that a cell is loaded with.
#[derive(Debug)]
pub(super) struct File {
    pub(super) stored: StoredFile,
    /// The port that it comes by.
    pub(super) port: u32,
    /// How much of it has come.
    pub(super) arrived: u64,
}

impl File {
    pub(super) fn is_complete(&self) -> bool {
        self.arrived == self.stored.size
    }

    /// Takes the next bytes of it, no more than are missing.
    fn write(&mut self, mut data: &[u8], platform: &mut dyn Platform) {
        while let Some((base, room)) = place(&self.stored.memory, self.arrived) {
            let room = usize::try_from(room).unwrap_or(usize::MAX);
            let (piece, rest) = data.split_at(room.min(data.len()));
            if piece.is_empty() {
                return;
            }
            platform.store(base, piece);
            self.arrived += piece.len() as u64;
            data = rest;
        }
    }
}

/// Where the byte at `offset` of what fills `ranges` is, and how many follow it in its range.
fn place(ranges: &[HostRange], offset: u64) -> Option<(Hpa, u64)> {
    let mut left = offset;
    for range in ranges {
        if left < range.len {
            return Some((range.base.checked_add(left)?, range.len - left));
        }
        left -= range.len;
    }
    None
}

/// All files of a cell, one of each kind, and memory that held others.
#[derive(Debug, Default)]
pub(super) struct Store {
    files: Vec<File>,
    spare: Vec<HostRange>,
}

impl Store {
    /// Announces a file; one of the same kind is gone, even when this one cannot be had. `take`
    /// gives so many bytes of memory, a multiple of [`MEMORY_UNIT`].
    ///
    /// # Errors
    /// Those of `take`.
    pub(super) fn begin<E>(
        &mut self,
        what: LoadKind,
        size: u64,
        port: u32,
        take: impl FnOnce(u64) -> Result<Vec<HostRange>, E>,
    ) -> Result<(), E> {
        self.remove(what);
        let mut missing = size.checked_next_multiple_of(MEMORY_UNIT).unwrap_or(u64::MAX);
        let mut memory = Vec::new();
        while let Some(range) = self.spare.last_mut().filter(|_| missing > 0) {
            let len = missing.min(range.len);
            memory.push(HostRange { base: range.base, len });
            missing -= len;
            range.len -= len;
            match range.base.checked_add(len) {
                Some(base) if range.len > 0 => range.base = base,
                _ => drop(self.spare.pop()),
            }
        }
        if missing > 0 {
            match take(missing) {
                Ok(more) => memory.extend(more),
                Err(error) => {
                    self.spare.extend(memory);
                    return Err(error);
                }
            }
        }
        self.files.push(File { stored: StoredFile { what, memory, size }, port, arrived: 0 });
        Ok(())
    }

    /// Forgets the file of this kind.
    pub(super) fn remove(&mut self, what: LoadKind) {
        if let Some(at) = self.files.iter().position(|file| file.stored.what == what) {
            self.spare.extend(self.files.remove(at).stored.memory);
        }
    }

    /// Forgets all files.
    pub(super) fn clear(&mut self) {
        while let Some(file) = self.files.pop() {
            self.spare.extend(file.stored.memory);
        }
    }

    pub(super) fn files(&self) -> &[File] {
        &self.files
    }

    /// The files as the platform needs them.
    pub(super) fn stored(&self) -> Vec<StoredFile> {
        self.files.iter().map(|file| file.stored.clone()).collect()
    }

    /// Whether there is a kernel and nothing that waits for bytes.
    pub(super) fn is_complete(&self) -> bool {
        let kernel = self.files.iter().any(|file| file.stored.what == LoadKind::KERNEL);
        kernel && self.files.iter().all(File::is_complete)
    }

    /// Takes bytes of the file that comes by `port`. Returns how many it took, and whether it is
    /// complete; `None` if there is no such file.
    pub(super) fn data(
        &mut self,
        port: u32,
        data: &[u8],
        platform: &mut dyn Platform,
    ) -> Option<(usize, bool)> {
        let file = self.files.iter_mut().find(|file| file.port == port)?;
        let missing = usize::try_from(file.stored.size - file.arrived).unwrap_or(usize::MAX);
        let piece = data.get(..missing).unwrap_or(data);
        file.write(piece, platform);
        Some((piece.len(), file.is_complete()))
    }

    /// All memory of it.
    pub(super) fn memory(&self) -> impl Iterator<Item = HostRange> + '_ {
        self.files.iter().flat_map(|file| &file.stored.memory).chain(&self.spare).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    fn range(unit: u64, units: u64) -> HostRange {
        HostRange { base: Hpa::new(unit * MEMORY_UNIT), len: units * MEMORY_UNIT }
    }

    #[test]
    fn a_file_finds_its_bytes_across_ranges() {
        let ranges = [range(4, 1), range(9, 2)];
        assert_eq!(place(&ranges, 0), Some((Hpa::new(4 * MEMORY_UNIT), MEMORY_UNIT)));
        assert_eq!(place(&ranges, MEMORY_UNIT - 1), Some((Hpa::new(5 * MEMORY_UNIT - 1), 1)));
        assert_eq!(place(&ranges, MEMORY_UNIT), Some((Hpa::new(9 * MEMORY_UNIT), 2 * MEMORY_UNIT)));
        assert_eq!(place(&ranges, 3 * MEMORY_UNIT), None);
    }

    #[test]
    fn what_a_replaced_file_had_is_used_again() {
        let mut store = Store::default();
        let begin = |store: &mut Store, units: u64, from: Option<HostRange>| {
            store.begin(LoadKind::KERNEL, units * MEMORY_UNIT - 7, 1, |bytes| {
                from.filter(|range| range.len == bytes).map(|range| vec![range]).ok_or(bytes)
            })
        };
        assert_eq!(begin(&mut store, 3, Some(range(10, 3))), Ok(()));
        assert_eq!(begin(&mut store, 1, None), Ok(()));
        assert_eq!(store.files()[0].stored.memory, [range(10, 1)]);
        assert_eq!(begin(&mut store, 5, None), Err(2 * MEMORY_UNIT));
        assert!(store.files().is_empty());
        assert_eq!(store.memory().map(|range| range.len).sum::<u64>(), 3 * MEMORY_UNIT);
        assert_eq!(begin(&mut store, 5, Some(range(40, 2))), Ok(()));
        assert_eq!(store.memory().map(|range| range.len).sum::<u64>(), 5 * MEMORY_UNIT);
        store.clear();
        assert_eq!(store.memory().map(|range| range.len).sum::<u64>(), 5 * MEMORY_UNIT);
    }
}
