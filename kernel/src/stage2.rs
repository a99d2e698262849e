//! Stage-2 tables of one cell.

use crate::memory::{self, TableFrames};
use bulkhead_arch::x86_64::page_table::{MemoryType, NestedFormat, PageTableError, PageTables, Permissions};
use bulkhead_vmm::memory::address::{Gpa, Hpa};

/// What a cell may do with a page.
pub(crate) type Access = Permissions;

/// Stage-2 tables. They give their frames back when they are dropped.
pub(crate) struct Stage2(PageTables<NestedFormat, TableFrames>);

impl Stage2 {
    /// Tables that map nothing.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub(crate) fn new() -> Result<Self, PageTableError> {
        Ok(Self(PageTables::new(TableFrames, memory::largest_page())?))
    }

    /// Maps `len` bytes of memory. Memory types of devices come from the machine's MTRRs,
    /// with which the CPU combines this one (AMD APM vol. 2, 15.25.8).
    ///
    /// # Errors
    /// When a part is mapped already, or there is no memory for tables.
    pub(crate) fn map(&mut self, gpa: Gpa, hpa: Hpa, len: u64, access: Access) -> Result<(), PageTableError> {
        self.0.map(gpa, hpa, len, access, MemoryType::WriteBack)
    }

    /// Takes `len` bytes out of the cell's reach. To be called before the cell runs.
    ///
    /// # Errors
    /// When there is no memory to split a large page.
    pub(crate) fn unmap(&mut self, gpa: Gpa, len: u64) -> Result<(), PageTableError> {
        self.0.unmap(gpa, len)
    }

    /// The root's address.
    pub(crate) fn root(&self) -> Hpa {
        self.0.root()
    }
}
