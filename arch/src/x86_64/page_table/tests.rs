//! The tables against a map of single pages, over a fake memory.

use super::*;
use core::cell::RefCell;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::vec::Vec;

const TABLES: u64 = 0x7000_0000;

/// Tables in a vector; at most `limit` of them at a time.
#[derive(Debug)]
struct FakeTables {
    entries: Vec<u64>,
    free: Vec<Hpa>,
    used: usize,
    limit: usize,
}

impl FakeTables {
    fn new(limit: usize) -> Self {
        Self { entries: Vec::new(), free: Vec::new(), used: 0, limit }
    }

    fn index(at: Hpa) -> usize {
        usize::try_from((at.raw() - TABLES) / 8).unwrap()
    }
}

impl TableMemory for FakeTables {
    fn allocate(&mut self) -> Option<Hpa> {
        if self.used == self.limit {
            return None;
        }
        self.used += 1;
        let table = self.free.pop().unwrap_or_else(|| {
            let table = Hpa::new(TABLES + self.entries.len() as u64 * 8);
            self.entries.extend([0; 512]);
            table
        });
        self.entries[Self::index(table)..][..512].fill(0);
        Some(table)
    }

    fn free(&mut self, table: Hpa) {
        assert!(!self.free.contains(&table), "freed twice");
        self.entries[Self::index(table)..][..512].fill(u64::MAX);
        self.free.push(table);
        self.used -= 1;
    }

    fn read(&self, at: Hpa) -> u64 {
        self.entries[Self::index(at)]
    }

    fn write(&mut self, at: Hpa, entry: u64) {
        let index = Self::index(at);
        self.entries[index] = entry;
    }
}

impl TableMemory for Rc<RefCell<FakeTables>> {
    fn allocate(&mut self) -> Option<Hpa> {
        self.borrow_mut().allocate()
    }

    fn free(&mut self, table: Hpa) {
        self.borrow_mut().free(table);
    }

    fn read(&self, at: Hpa) -> u64 {
        self.borrow().read(at)
    }

    fn write(&mut self, at: Hpa, entry: u64) {
        self.borrow_mut().write(at, entry);
    }
}

type Nested = PageTables<NestedFormat, FakeTables>;
type Host = PageTables<HostFormat, FakeTables>;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

#[test]
fn the_largest_leaves_are_used() {
    let mut t = Nested::new(FakeTables::new(16), PageSize::Size1G).unwrap();
    let len = 2 * GIB + 2 * MIB + 4096;
    t.map(Gpa::new(0), Hpa::new(4 * GIB), len, Permissions::ALL, MemoryType::WriteBack).unwrap();
    let size = |t: &Nested, at| t.translate(Gpa::new(at)).map(|x| x.size);
    assert_eq!(size(&t, GIB), Some(PageSize::Size1G));
    assert_eq!(size(&t, 2 * GIB), Some(PageSize::Size2M));
    assert_eq!(size(&t, 2 * GIB + 2 * MIB), Some(PageSize::Size4K));
    assert_eq!(size(&t, len), None);
    // Root, two tables of 1 GiB and 2 MiB entries, one of pages.
    assert_eq!(t.memory().used, 4);

    t.unmap(Gpa::new(GIB + 4096), 4096).unwrap();
    assert_eq!(size(&t, GIB), Some(PageSize::Size4K));
    assert_eq!(size(&t, GIB + 4096), None);
    assert_eq!(size(&t, GIB + 2 * MIB), Some(PageSize::Size2M));
    assert_eq!(t.translate(Gpa::new(GIB + 8192 + 5)).unwrap().to, Hpa::new(5 * GIB + 8192 + 5));

    t.unmap(Gpa::new(0), 3 * GIB).unwrap();
    assert_eq!(t.memory().used, 1, "emptied tables go back");
}

#[test]
fn dropped_tables_give_all_back() {
    let memory = Rc::new(RefCell::new(FakeTables::new(16)));
    let mut t = PageTables::<NestedFormat, _>::new(memory.clone(), PageSize::Size1G).unwrap();
    for (at, len) in [(0, 3 * GIB + 4096), (SPAN - 2 * MIB - 4096, 2 * MIB + 4096)] {
        t.map(Gpa::new(at), Hpa::new(0), len, Permissions::ALL, MemoryType::WriteBack).unwrap();
    }
    t.unmap(Gpa::new(GIB + 4096), 4096).unwrap();
    assert!(memory.borrow().used > 6);
    drop(t);
    assert_eq!(memory.borrow().used, 0);
}

#[test]
fn without_1_gib_pages_2_mib_are_the_largest() {
    let mut t = Host::new(FakeTables::new(16), PageSize::Size2M).unwrap();
    let at = Hva::new(0xffff_8880_0000_0000);
    t.map(at, Hpa::new(0), GIB, Permissions::READ_WRITE, MemoryType::WriteBack).unwrap();
    assert_eq!(t.translate(at).unwrap().size, PageSize::Size2M);
}

#[test]
fn a_misaligned_target_takes_smaller_leaves() {
    let mut t = Nested::new(FakeTables::new(16), PageSize::Size1G).unwrap();
    t.map(Gpa::new(0), Hpa::new(4096), 2 * MIB, Permissions::ALL, MemoryType::WriteBack).unwrap();
    assert_eq!(t.translate(Gpa::new(0)).unwrap().size, PageSize::Size4K);
    assert_eq!(t.translate(Gpa::new(2 * MIB - 1)).unwrap().to, Hpa::new(4096 + 2 * MIB - 1));
}

#[test]
fn entries_have_the_bits_of_the_manual() {
    let to = Hpa::new(0x1234_5000);
    let rw = HostFormat::leaf(to, 0, Permissions::READ_WRITE, MemoryType::WriteBack);
    assert_eq!(rw, Some(0x8000_0000_1234_5003));
    let uc = NestedFormat::leaf(to, 0, Permissions::READ_EXECUTE, MemoryType::Uncached);
    assert_eq!(uc, Some(0x1234_501d));
    let large = NestedFormat::leaf(Hpa::new(GIB), 2, Permissions::ALL, MemoryType::WriteBack);
    assert_eq!(large, Some(0x4000_0087));
    assert_eq!(NestedFormat::table(to), 0x1234_5007);
    assert_eq!(HostFormat::table(to), 0x1234_5003);
    let none = Permissions { read: false, write: false, execute: true };
    assert_eq!(HostFormat::leaf(to, 0, none, MemoryType::WriteBack), None);
}

#[test]
fn a_refusal_names_the_culprit_and_changes_nothing() {
    let mut t = Host::new(FakeTables::new(4), PageSize::Size1G).unwrap();
    let rw = Permissions::READ_WRITE;
    let wb = MemoryType::WriteBack;
    for (at, len) in [(1, 4096), (0, 1), (0, 0), (0x7fff_ffff_f000, 0x2000), (0x8000_0000_0000, 4096)] {
        let error = PageTableError::Range { at, len };
        assert_eq!(t.map(Hva::new(at), Hpa::new(0), len, rw, wb), Err(error));
    }
    assert_eq!(
        t.map(Hva::new(0), Hpa::new(1 << 52), 4096, rw, wb),
        Err(PageTableError::Target(Hpa::new(1 << 52)))
    );
    let top = Hva::new(0xffff_ffff_ffff_f000);
    t.map(top, Hpa::new(0), 4096, rw, wb).unwrap();
    assert_eq!(t.map(top, Hpa::new(0), 4096, rw, wb), Err(PageTableError::AlreadyMapped(top.raw())));
    assert_eq!(t.map(Hva::new(0), Hpa::new(0), 4096, rw, wb), Err(PageTableError::OutOfMemory));
    assert_eq!(t.translate(Hva::new(0)), None);
    assert_eq!(t.memory().used, 4, "what a failed map took goes back");
    assert_eq!(t.protect(Hva::new(0), 4096, rw), Err(PageTableError::NotMapped(0)));
}

#[derive(Debug, Clone)]
enum Op {
    Map { at: u64, to: u64, pages: u64, write: bool, uncached: bool },
    Unmap { at: u64, pages: u64 },
    Protect { at: u64, pages: u64, write: bool },
}

/// Page numbers around a 1 GiB boundary, so that tables of three levels take part.
fn page() -> impl Strategy<Value = u64> {
    prop_oneof![0..2048u64, (0..4u64).prop_map(|n| n * 512)].prop_map(|n| GIB / 4096 - 1024 + n)
}

fn op() -> impl Strategy<Value = Op> {
    let pages = || prop_oneof![1..40u64, 500..600u64, Just(512), Just(1024)];
    prop_oneof![
        (page(), page(), pages(), any::<bool>(), any::<bool>())
            .prop_map(|(at, to, pages, write, uncached)| Op::Map { at, to, pages, write, uncached }),
        (page(), pages()).prop_map(|(at, pages)| Op::Unmap { at, pages }),
        (page(), pages(), any::<bool>()).prop_map(|(at, pages, write)| Op::Protect { at, pages, write }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn tables_do_what_a_map_of_pages_does(ops in proptest::collection::vec(op(), 1..24), limit in 4..12usize) {
        let mut tables = Nested::new(FakeTables::new(limit), PageSize::Size1G).unwrap();
        let mut model = BTreeMap::new();
        let permissions = |write| if write { Permissions::ALL } else { Permissions::READ };
        for op in ops {
            match op {
                Op::Map { at, to, pages, write, uncached } => {
                    let kind = if uncached { MemoryType::Uncached } else { MemoryType::WriteBack };
                    let taken = (at..at + pages).find(|p| model.contains_key(p));
                    let (gpa, hpa) = (Gpa::new(at * 4096), Hpa::new(to * 4096));
                    match tables.map(gpa, hpa, pages * 4096, permissions(write), kind) {
                        Ok(()) => {
                            prop_assert_eq!(taken, None);
                            model.extend((0..pages).map(|n| (at + n, (to + n, permissions(write), kind))));
                        }
                        Err(PageTableError::OutOfMemory) => prop_assert_eq!(taken, None),
                        Err(error) => {
                            prop_assert_eq!(Some(error), taken.map(|p| PageTableError::AlreadyMapped(p * 4096)));
                        }
                    }
                }
                Op::Unmap { at, pages } => match tables.unmap(Gpa::new(at * 4096), pages * 4096) {
                    Ok(()) => model.retain(|&page, _| page < at || page >= at + pages),
                    Err(error) => prop_assert_eq!(error, PageTableError::OutOfMemory),
                },
                Op::Protect { at, pages, write } => {
                    let hole = (at..at + pages).find(|p| !model.contains_key(p));
                    match tables.protect(Gpa::new(at * 4096), pages * 4096, permissions(write)) {
                        Ok(()) => {
                            prop_assert_eq!(hole, None);
                            for (_, page) in model.range_mut(at..at + pages) {
                                page.1 = permissions(write);
                            }
                        }
                        Err(PageTableError::OutOfMemory) => prop_assert_eq!(hole, None),
                        Err(error) => {
                            prop_assert_eq!(Some(error), hole.map(|p| PageTableError::NotMapped(p * 4096)));
                        }
                    }
                }
            }
            for page in GIB / 4096 - 1024..GIB / 4096 + 2048 {
                let found = tables.translate(Gpa::new(page * 4096 + 9));
                let found = found.map(|t| (t.to.raw(), t.permissions, t.memory_type));
                let expected = model.get(&page).map(|&(to, p, k)| (to * 4096 + 9, p, k));
                prop_assert_eq!(found, expected);
            }
        }
        tables.unmap(Gpa::new(0), SPAN).unwrap();
        prop_assert_eq!(tables.memory().used, 1);
    }
}
