//! The node: its cells, its CPUs, and the management that runs between them.
//!
//! Management has one lock, [`Node::work`] only tries it: whoever finds it taken has nothing
//! to do, for the holder sees what was asked before it lets go, or leaves
//! [`Node::attend`]'s mark.

use crate::host::{self, HostMachine};
use crate::platform::KernelPlatform;
use crate::root_cell::RootCell;
use crate::run::CpuControl;
use alloc::vec::Vec;
use bulkhead_abi::bundle::Bundle;
use bulkhead_vmm::hal::CpuId;
use bulkhead_vmm::manage::{Node as Manager, Progress};
use bulkhead_vmm::x86::machine::Machine;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use spin::{Mutex, Once};

/// Packets that the channel moves in one slice of work.
const PACKETS_PER_SLICE: usize = 16;

/// The node.
pub(crate) struct Node {
    root: RootCell,
    controls: Vec<CpuControl>,
    management: Mutex<(Manager, KernelPlatform)>,
    attention: AtomicBool,
    /// Host counter at which management wants to look at something that it waits for.
    look_again: AtomicU64,
    counter_hz: u64,
}

static NODE: Once<Node> = Once::new();

/// The node, once [`Node::install`] was called.
pub(crate) fn node() -> &'static Node {
    match NODE.get() {
        Some(node) => node,
        None => panic!("the node is used before it was put together"),
    }
}

/// Whether there is a node yet.
pub(crate) fn is_installed() -> bool {
    NODE.is_completed()
}

impl Node {
    /// Puts the node together; once.
    pub(crate) fn install(root: RootCell, controls: Vec<CpuControl>, manager: Manager, counter_hz: u64) {
        let management = Mutex::new((manager, KernelPlatform::default()));
        NODE.call_once(|| Self {
            root,
            controls,
            management,
            attention: AtomicBool::new(false),
            look_again: AtomicU64::new(u64::MAX),
            counter_hz,
        });
    }

    /// The root cell.
    pub(crate) fn root(&self) -> &RootCell {
        &self.root
    }

    /// How others reach `cpu`.
    pub(crate) fn control(&self, cpu: CpuId) -> Option<&CpuControl> {
        self.controls.get(usize::try_from(cpu.0).ok()?)
    }

    /// The frequency of the machine's counter.
    pub(crate) fn counter_hz(&self) -> u64 {
        self.counter_hz
    }

    /// Says that management has something to do, and sees to it that the boot CPU, which
    /// never leaves the root cell, looks.
    pub(crate) fn attend(&self) {
        if !self.attention.swap(true, Ordering::AcqRel) {
            HostMachine.kick(CpuId(0));
        }
    }

    /// Whether a CPU should call [`work`](Self::work) before it goes on.
    pub(crate) fn wants_attention(&self) -> bool {
        self.attention.load(Ordering::Acquire) || host::counter() >= self.look_again.load(Ordering::Acquire)
    }

    /// Calls `look` with what manages the cells.
    pub(crate) fn with_manager<T>(&self, look: impl FnOnce(&mut Manager) -> T) -> T {
        look(&mut self.management.lock().0)
    }

    /// Starts the cells that `bundle` says; before the root cell runs.
    pub(crate) fn start_bundled(&self, bundle: &Bundle<'_>) {
        let (manager, platform) = &mut *self.management.lock();
        manager.start_bundled(bundle, host::boot_wall_clock_ns(), platform);
    }

    /// Host counter at which a CPU that sleeps must look at management again.
    pub(crate) fn look_again(&self) -> Option<u64> {
        Some(self.look_again.load(Ordering::Acquire)).filter(|at| *at != u64::MAX)
    }

    /// Does a slice of management's work. Returns whether more waits.
    pub(crate) fn work(&self) -> bool {
        let Some(mut management) = self.management.try_lock() else { return false };
        self.attention.store(false, Ordering::Release);
        let (manager, platform) = &mut *management;
        let mut more = self.root.board.poll_channel(manager, PACKETS_PER_SLICE);
        let progress = manager.work(platform);
        more |= progress == Progress::More;
        more |= self.root.board.poll_channel(manager, PACKETS_PER_SLICE);
        let again = match progress {
            Progress::Waiting => host::counter().saturating_add(self.counter_hz / 1000),
            _ => u64::MAX,
        };
        if self.look_again.swap(again, Ordering::AcqRel) == u64::MAX && again != u64::MAX {
            // Who sleeps until the next look does not know of it yet.
            HostMachine.kick(CpuId(0));
        }
        if more {
            self.attention.store(true, Ordering::Release);
        }
        drop(management);
        // Who has asked since the mark was cleared may have found the lock taken, and sleep.
        fence(Ordering::SeqCst);
        self.attention.load(Ordering::Acquire)
    }
}
