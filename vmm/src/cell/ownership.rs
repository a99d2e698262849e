//! Who owns each CPU and each unit of the pool: at any time exactly one.

use crate::cell::config::HostRange;
use crate::hal::{CellId, CpuId};
use crate::memory::address::Hpa;
use alloc::vec::Vec;
use bulkhead_abi::message::MEMORY_UNIT;
use thiserror::Error;

/// Who owns a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpuOwner {
    /// A cell, the root cell among them.
    Cell(CellId),
    /// Nobody: it was kept back at boot.
    Nobody,
}

/// Why a cell cannot have what it wants. Nothing has then changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OwnershipError {
    /// There is no such CPU.
    #[error("there is no CPU {cpu}")]
    NoSuchCpu {
        /// Its number.
        cpu: u32,
    },
    /// Another guest cell has the CPU.
    #[error("CPU {cpu} belongs to {owner}")]
    CpuTaken {
        /// Its number.
        cpu: u32,
        /// The cell that has it.
        owner: CellId,
    },
    /// The pool has too little.
    #[error("{wanted} bytes are wanted and {free} free")]
    Memory {
        /// Bytes wanted.
        wanted: u64,
        /// Bytes free.
        free: u64,
    },
}

/// One CPU's owner now and whose it is when no guest cell has it.
#[derive(Debug, Clone, Copy)]
struct Cpu {
    home: CpuOwner,
    owner: CpuOwner,
}

/// The ledger of CPUs and pool memory.
#[derive(Debug)]
pub struct Ownership {
    /// Indexed by the CPU's number.
    cpus: Vec<Cpu>,
    /// Free memory, sorted; no two ranges touch.
    free: Vec<HostRange>,
    pool_bytes: u64,
    generation: u64,
}

impl Ownership {
    /// The ledger of a machine with `cpus` CPUs, of which those in `kept_back` are nobody's
    /// and the others the root cell's, and with `pool` for guest cells: ranges that do not
    /// overlap, of which whole units of 2 MiB are used.
    pub fn new(cpus: u32, kept_back: &[CpuId], pool: &[HostRange]) -> Self {
        let cpu = |n| {
            let kept = kept_back.contains(&CpuId(n));
            let home = if kept { CpuOwner::Nobody } else { CpuOwner::Cell(CellId::ROOT) };
            Cpu { home, owner: home }
        };
        let cpus = (0..cpus).map(cpu).collect();
        let mut ownership = Self { cpus, free: Vec::new(), pool_bytes: 0, generation: 0 };
        for range in pool {
            let end = range.base.raw().saturating_add(range.len) / MEMORY_UNIT * MEMORY_UNIT;
            let Some(base) = range.base.raw().checked_next_multiple_of(MEMORY_UNIT) else { continue };
            if let Some(len) = end.checked_sub(base).filter(|len| *len > 0) {
                ownership.insert(HostRange { base: Hpa::new(base), len });
                ownership.pool_bytes += len;
            }
        }
        ownership
    }

    /// Makes `cell` the owner of the CPUs `cpus`, no two of them the same, and of `bytes` of
    /// memory, a multiple of 2 MiB: all or nothing. The memory is in one range if there is
    /// one that is large enough, the smallest such.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn take(
        &mut self,
        cell: CellId,
        cpus: &[u32],
        bytes: u64,
    ) -> Result<(Vec<CpuId>, Vec<HostRange>), OwnershipError> {
        self.check(cpus, bytes)?;
        let memory = self.take_memory(bytes);
        for (n, cpu) in (0..).zip(&mut self.cpus) {
            if cpus.contains(&n) {
                cpu.owner = CpuOwner::Cell(cell);
            }
        }
        Ok((cpus.iter().copied().map(CpuId).collect(), memory))
    }

    /// Whether a new cell can have these CPUs and so many bytes.
    ///
    /// # Errors
    /// When a CPU is not there or another guest cell's, or memory is short.
    pub fn check(&self, cpus: &[u32], bytes: u64) -> Result<(), OwnershipError> {
        for &cpu in cpus {
            match self.owner(CpuId(cpu)) {
                None => return Err(OwnershipError::NoSuchCpu { cpu }),
                Some(CpuOwner::Cell(owner)) if owner != CellId::ROOT => {
                    return Err(OwnershipError::CpuTaken { cpu, owner });
                }
                Some(_) => {}
            }
        }
        let free = self.free_bytes();
        if bytes > free { Err(OwnershipError::Memory { wanted: bytes, free }) } else { Ok(()) }
    }

    /// Takes back what [`take`](Self::take) gave to `cell`, of which `memory` is the memory.
    pub fn give_back(&mut self, cell: CellId, memory: &[HostRange]) {
        for cpu in &mut self.cpus {
            if cpu.owner == CpuOwner::Cell(cell) {
                cpu.owner = cpu.home;
            }
        }
        for range in memory {
            self.insert(*range);
        }
    }

    /// What was taken is its cell's for good, or what was so has been given back.
    pub const fn note_change(&mut self) {
        self.generation += 1;
    }

    /// Who has `cpu`; `None` if there is no such CPU.
    pub fn owner(&self, cpu: CpuId) -> Option<CpuOwner> {
        self.cpu(cpu).map(|cpu| cpu.owner)
    }

    /// Whether `cpu` is the root cell's when no guest cell has it.
    pub fn comes_from_root(&self, cpu: CpuId) -> bool {
        self.cpu(cpu).is_some_and(|cpu| cpu.home == CpuOwner::Cell(CellId::ROOT))
    }

    /// The owners of all CPUs, in the order of their numbers.
    pub fn owners(&self) -> impl Iterator<Item = (CpuId, CpuOwner)> + '_ {
        (0..).map(CpuId).zip(self.cpus.iter().map(|cpu| cpu.owner))
    }

    /// Bytes of the pool, used or not.
    pub const fn pool_bytes(&self) -> u64 {
        self.pool_bytes
    }

    /// The ranges that no cell has, sorted.
    pub fn free(&self) -> &[HostRange] {
        &self.free
    }

    /// Bytes that no cell has.
    pub fn free_bytes(&self) -> u64 {
        self.free.iter().map(|range| range.len).sum()
    }

    /// How many times something has changed its owner for good.
    pub const fn generation(&self) -> u64 {
        self.generation
    }

    fn cpu(&self, cpu: CpuId) -> Option<&Cpu> {
        self.cpus.get(usize::try_from(cpu.0).ok()?)
    }

    /// Takes what [`check`](Self::check) has found to be there.
    fn take_memory(&mut self, bytes: u64) -> Vec<HostRange> {
        let mut taken = Vec::new();
        let mut missing = bytes;
        while missing > 0 {
            // The smallest range that does, else the largest there is.
            let fits = self.free.iter_mut().filter(|r| r.len >= missing).min_by_key(|r| r.len);
            let range = match fits {
                Some(range) => range,
                None => match self.free.iter_mut().max_by_key(|r| r.len) {
                    Some(range) => range,
                    None => break,
                },
            };
            let len = missing.min(range.len);
            taken.push(HostRange { base: range.base, len });
            *range = HostRange { base: Hpa::new(range.base.raw() + len), len: range.len - len };
            self.free.retain(|r| r.len > 0);
            missing -= len;
        }
        self.free.shrink_to_fit();
        taken
    }

    /// Adds `range` to the free memory and joins what touches. The list then holds as much of
    /// the heap as its ranges need, whatever has come and gone.
    fn insert(&mut self, range: HostRange) {
        let at = self.free.partition_point(|other| other.base < range.base);
        self.free.insert(at, range);
        self.free.dedup_by(|next, last| {
            let touches = last.base.checked_add(last.len) == Some(next.base);
            if touches {
                last.len += next.len;
            }
            touches
        });
        self.free.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const M: u64 = 1 << 20;

    fn range(base: u64, len: u64) -> HostRange {
        HostRange { base: Hpa::new(base), len }
    }

    #[test]
    fn only_whole_units_are_used() {
        let ownership = Ownership::new(1, &[], &[range(M, 4 * M), range(9 * M, M)]);
        assert_eq!(ownership.free(), [range(2 * M, 2 * M)]);
        assert_eq!(ownership.pool_bytes(), 2 * M);
    }

    #[test]
    fn one_range_is_preferred_and_the_smallest_that_does() {
        let mut ownership = Ownership::new(4, &[], &[range(0, 8 * M), range(16 * M, 4 * M)]);
        let (_, memory) = ownership.take(CellId(1), &[1], 4 * M).unwrap();
        assert_eq!(memory, [range(16 * M, 4 * M)]);
        ownership.give_back(CellId(1), &memory);
        let (_, memory) = ownership.take(CellId(2), &[1], 10 * M).unwrap();
        assert_eq!(memory, [range(0, 8 * M), range(16 * M, 2 * M)]);
    }

    #[test]
    fn what_cannot_be_had_changes_nothing() {
        let mut ownership = Ownership::new(3, &[CpuId(2)], &[range(0, 8 * M)]);
        ownership.take(CellId(1), &[1], 4 * M).unwrap();
        let refused = [
            (&[3][..], M * 2, OwnershipError::NoSuchCpu { cpu: 3 }),
            (&[2, 1], M * 2, OwnershipError::CpuTaken { cpu: 1, owner: CellId(1) }),
            (&[2], M * 6, OwnershipError::Memory { wanted: 6 * M, free: 4 * M }),
        ];
        for (cpus, bytes, error) in refused {
            assert_eq!(ownership.take(CellId(2), cpus, bytes), Err(error));
            assert_eq!(ownership.owner(CpuId(2)), Some(CpuOwner::Nobody));
            assert_eq!((ownership.free_bytes(), ownership.generation()), (4 * M, 0));
        }
        assert!(ownership.comes_from_root(CpuId(1)) && !ownership.comes_from_root(CpuId(2)));
    }

    proptest! {
        /// Against a model with one entry per unit.
        #[test]
        fn each_unit_has_one_owner(steps in prop::collection::vec((any::<bool>(), 1u64..12), 1..60)) {
            let pool = [range(0, 24 * M), range(32 * M, 8 * M), range(40 * M, 2 * M)];
            let mut ownership = Ownership::new(2, &[], &pool);
            let mut held: Vec<Vec<HostRange>> = Vec::new();
            for (give, units) in steps {
                if give && !held.is_empty() {
                    let memory = held.swap_remove(usize::try_from(units).unwrap() % held.len());
                    ownership.give_back(CellId(9), &memory);
                } else if let Ok((_, memory)) = ownership.take(CellId(1), &[], units * MEMORY_UNIT) {
                    prop_assert_eq!(memory.iter().map(|r| r.len).sum::<u64>(), units * MEMORY_UNIT);
                    held.push(memory);
                }
                let mut owners = [0u32; 21];
                for r in held.iter().flatten().chain(ownership.free()) {
                    for unit in r.base.raw() / MEMORY_UNIT..(r.base.raw() + r.len) / MEMORY_UNIT {
                        owners[usize::try_from(unit).unwrap()] += 1;
                    }
                }
                for (unit, owners) in owners.iter().enumerate() {
                    prop_assert_eq!(*owners, u32::from(!(12..16).contains(&unit)), "unit {}", unit);
                }
            }
            for memory in held {
                ownership.give_back(CellId(9), &memory);
            }
            prop_assert_eq!(ownership.free(), [range(0, 24 * M), range(32 * M, 10 * M)]);
            // The heap too is as it was before there was a cell.
            prop_assert_eq!(ownership.free.capacity(), Ownership::new(2, &[], &pool).free.capacity());
        }
    }
}
