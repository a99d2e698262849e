//! The hypervisor's heap: bounded, from two arenas.
//!
//! A small arena in the image serves until the memory map is known; then the main one in
//! the hypervisor's region is added. Whoever allocates what a request asks for uses
//! `try_reserve` and refuses the request when that fails; every other failed allocation
//! is a bug and panics. Lock order: the heap's lock is innermost.
// UNSAFETY: a global allocator hands out raw memory.
#![expect(unsafe_code, reason = "the global allocator")]

use bulkhead_vmm::memory::address::Hva;
use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;
use core::ptr::{self, NonNull};
use linked_list_allocator::Heap;
use spin::mutex::SpinMutex;

/// Bytes of the arena in the image.
const EARLY_SIZE: usize = 128 << 10;

#[repr(C, align(16))]
struct EarlyArena(UnsafeCell<[u8; EARLY_SIZE]>);

// SAFETY: the arena is given to the allocator once, in `init_early`, and nobody else
// touches it.
unsafe impl Sync for EarlyArena {}

static EARLY: EarlyArena = EarlyArena(UnsafeCell::new([0; EARLY_SIZE]));

struct Arenas {
    early: Heap,
    main: Heap,
}

struct LockedArenas(SpinMutex<Arenas>);

#[global_allocator]
static HEAP: LockedArenas =
    LockedArenas(SpinMutex::new(Arenas { early: Heap::empty(), main: Heap::empty() }));

// SAFETY: both arenas hand out disjoint blocks that fit the layout, and a block goes back
// to the arena that holds its address.
unsafe impl GlobalAlloc for LockedArenas {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let mut arenas = self.0.lock();
        let block = match arenas.main.allocate_first_fit(layout) {
            Err(()) => arenas.early.allocate_first_fit(layout),
            block => block,
        };
        block.map_or(ptr::null_mut(), NonNull::as_ptr)
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let mut arenas = self.0.lock();
        let early = EARLY.0.get().addr()..EARLY.0.get().addr() + EARLY_SIZE;
        let arena = if early.contains(&block.addr()) { &mut arenas.early } else { &mut arenas.main };
        if let Some(block) = NonNull::new(block) {
            // SAFETY: the caller gives back a block of this allocator with its layout.
            unsafe { arena.deallocate(block, layout) };
        }
    }
}

/// Opens the arena in the image. Called once, first of all.
pub(crate) fn init_early() {
    let mut arenas = HEAP.0.lock();
    assert_eq!(arenas.early.size(), 0, "the heap is opened once");
    // SAFETY: nobody else uses the arena, and it is static.
    unsafe { arenas.early.init(EARLY.0.get().cast(), EARLY_SIZE) };
}

/// Adds the main arena.
///
/// # Safety
/// `base..base + size` must be mapped writable for good and used for nothing else.
pub(crate) unsafe fn add_main(base: Hva, size: usize) {
    let mut arenas = HEAP.0.lock();
    assert_eq!(arenas.main.size(), 0, "the main arena is added once");
    // SAFETY: the caller vouches for the memory.
    unsafe { arenas.main.init(super::pointer(base), size) };
}

/// Bytes in use.
pub(crate) fn used() -> usize {
    let arenas = HEAP.0.lock();
    arenas.early.used() + arenas.main.used()
}

/// Bytes in all.
pub(crate) fn size() -> usize {
    let arenas = HEAP.0.lock();
    arenas.early.size() + arenas.main.size()
}
