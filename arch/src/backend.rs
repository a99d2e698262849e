//! What enters guests: SVM today, VMX beside it later, chosen when the node boots. The run
//! loop is generic over it, so that nothing on the exit path goes through a table of
//! functions.

// UNSAFETY: making a vCPU rests on promises about its tables.
#![expect(unsafe_code, reason = "making a vCPU rests on promises about its tables")]

use crate::x86_64::svm::{Permissions, SvmCpu, SvmHost};
use alloc::sync::Arc;
use bulkhead_vmm::memory::address::Hpa;
use bulkhead_vmm::x86::exit::VirtualCpu;

/// One CPU's ability to enter guests.
pub trait Backend {
    /// A vCPU of it.
    type Cpu: VirtualCpu;

    /// A vCPU in the state after INIT, to be entered on this CPU alone.
    ///
    /// # Safety
    /// - `nested_root` is the root of stage-2 tables that live as long as the vCPU and map
    ///   nothing but what its cell may touch.
    /// - `permissions` let through only ports and MSRs by which the cell cannot harm others.
    /// - It is called on the CPU that the value belongs to, and the vCPU stays there.
    unsafe fn create(&self, nested_root: Hpa, permissions: Arc<Permissions>) -> Self::Cpu;
}

impl Backend for SvmHost {
    type Cpu = SvmCpu;

    unsafe fn create(&self, nested_root: Hpa, permissions: Arc<Permissions>) -> SvmCpu {
        // SAFETY: the caller has promised the same.
        unsafe { SvmCpu::new(self, nested_root, permissions) }
    }
}
