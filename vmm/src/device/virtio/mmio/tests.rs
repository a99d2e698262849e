//! The registers by virtio 1.2, 4.2.2 and 3.1.1.

use super::*;
use crate::device::virtio::driver::{Ring, get, negotiate, set};
use crate::memory::guest::fake::FakeMemory;

/// A device with two queues and 6 bytes of configuration that gives back what it gets.
struct Toy {
    resets: u32,
}

impl VirtioDevice for Toy {
    const DEVICE_ID: u32 = 42;
    const QUEUE_SIZES: &'static [u16] = &[8, 4];
    const FEATURES: u64 = 1 << 3;
    fn config(&self) -> &[u8] {
        &[1, 2, 3, 4, 5, 6]
    }
    fn reset(&mut self) {
        self.resets += 1;
    }
}

const V1: u64 = F_VERSION_1;

fn toy() -> MmioTransport<Toy> {
    MmioTransport::new(Toy { resets: 0 })
}

/// A device with queue 0 set up and DRIVER_OK.
fn running(features: u64) -> (MmioTransport<Toy>, FakeMemory, Ring) {
    let mut t = toy();
    let ring = Ring::new(0x1000, 8);
    negotiate(&mut t, features);
    ring.set_up(&mut t, 0);
    set(&mut t, 0x070, 15);
    (t, FakeMemory::new(0, 0x10000), ring)
}

/// Gives every available buffer back.
fn give_back(t: &mut MmioTransport<Toy>, memory: &FakeMemory) -> Option<()> {
    t.serve(memory, |_, queues| {
        let mut chain = crate::device::virtio::queue::Chain::default();
        while queues[0].pop(memory, &mut chain)? {
            queues[0].push_used(memory, chain.head(), 0)?;
        }
        Ok(())
    })
}

#[test]
fn identification() {
    let mut t = toy();
    assert_eq!(get(&mut t, 0x000), u32::from_le_bytes(*b"virt"));
    assert_eq!(get(&mut t, 0x004), 2);
    assert_eq!(get(&mut t, 0x008), 42);
    assert_eq!(get(&mut t, 0x00c), u32::from_le_bytes(*b"BULK"));
    assert_eq!(get(&mut t, 0x0b0), u32::MAX, "no shared memory");
    assert_eq!(get(&mut t, 0x0b4), u32::MAX);
}

#[test]
fn registers_are_of_32_bits() {
    let mut t = toy();
    for width in [Width::Byte, Width::Word, Width::Qword] {
        assert_eq!(t.read(0, width), 0);
        assert_eq!(t.write(0x070, width, 1), MmioEffect::None);
    }
    assert_eq!(get(&mut t, 0x070), 0);
    assert_eq!(get(&mut t, 0x001), 0);
    assert_eq!(get(&mut t, 0x0f0), 0);
}

#[test]
fn configuration_space_has_every_width_and_an_end() {
    let mut t = toy();
    let generation = get(&mut t, 0x0fc);
    assert_eq!(t.read(0x100, Width::Byte), 1);
    assert_eq!(t.read(0x102, Width::Word), 0x0403);
    assert_eq!(t.read(0x100, Width::Dword), 0x0403_0201);
    assert_eq!(t.read(0x104, Width::Dword), 0x0605);
    assert_eq!(t.read(0x100, Width::Qword), 0x0605_0403_0201);
    assert_eq!(t.read(0x106, Width::Byte), 0);
    assert_eq!(t.read(u64::MAX, Width::Qword), 0);
    assert_eq!(t.write(0x100, Width::Dword, 0xff), MmioEffect::None);
    assert_eq!(t.read(0x100, Width::Byte), 1);
    assert_eq!(get(&mut t, 0x0fc), generation);
}

#[test]
fn features_by_halves() {
    let mut t = toy();
    let mut offered = |select| {
        set(&mut t, 0x014, select);
        get(&mut t, 0x010)
    };
    assert_eq!(offered(0), 1 << 29 | 1 << 3);
    assert_eq!(offered(1), 1);
    assert_eq!(offered(2), 0);
    assert_eq!(offered(u32::MAX), 0);
}

#[test]
fn features_ok_needs_version_1_and_only_what_is_offered() {
    for (features, accepted) in [
        (0, false),
        (V1, true),
        (V1 | 1 << 3, true),
        (V1 | F_EVENT_IDX | 1 << 3, true),
        (1 << 3, false),
        (V1 | 1 << 4, false),
        (V1 | 1 << 28, false),
        (V1 | 1 << 33, false),
    ] {
        let mut t = toy();
        negotiate(&mut t, features);
        assert_eq!(get(&mut t, 0x070), if accepted { 11 } else { 3 }, "features {features:#x}");
        set(&mut t, 0x070, 15);
        assert_eq!(get(&mut t, 0x070), if accepted { 15 } else { 3 }, "features {features:#x}");
    }
}

#[test]
fn features_stand_after_features_ok() {
    let mut t = toy();
    negotiate(&mut t, V1);
    set(&mut t, 0x024, 0);
    set(&mut t, 0x020, 1 << 29);
    assert_eq!(t.driver_features, V1);
}

#[test]
fn status_goes_up_in_order_and_down_only_by_reset() {
    let mut t = toy();
    for early in [2, 8, 4, 64] {
        set(&mut t, 0x070, early);
        assert_eq!(get(&mut t, 0x070), 0, "{early} before its time");
    }
    negotiate(&mut t, V1);
    set(&mut t, 0x070, 15);
    set(&mut t, 0x070, 1);
    assert_eq!(get(&mut t, 0x070), 15);
    set(&mut t, 0x070, 128);
    assert_eq!(get(&mut t, 0x070), 143);
    assert_eq!(set(&mut t, 0x070, 0), MmioEffect::Reset);
    assert_eq!(get(&mut t, 0x070), 0);
}

#[test]
fn queues_are_set_up_one_by_one() {
    let mut t = toy();
    for (queue, max) in [(0, 8), (1, 4), (2, 0), (u32::MAX, 0)] {
        set(&mut t, 0x030, queue);
        assert_eq!(get(&mut t, 0x034), max);
    }
    set(&mut t, 0x044, 1);
    assert_eq!(get(&mut t, 0x044), 0, "no such queue");
    negotiate(&mut t, V1);
    Ring::new(0x4000, 4).set_up(&mut t, 1);
    assert_eq!(get(&mut t, 0x044), 1);
    set(&mut t, 0x030, 0);
    assert_eq!(get(&mut t, 0x044), 0);
    set(&mut t, 0x030, 1);
    set(&mut t, 0x044, 0);
    assert_eq!(get(&mut t, 0x044), 0);
    assert_eq!(get(&mut t, 0x070), 11);
}

#[test]
fn a_bad_queue_needs_a_reset() {
    for (register, value) in [
        (0x038, 0),
        (0x038, 3),
        (0x038, 16),
        (0x038, 0x1_0008),
        (0x080, 0x1008),
        (0x090, 0x2001),
        (0x0a0, 0x3002),
    ] {
        let mut t = toy();
        negotiate(&mut t, V1);
        set(&mut t, 0x038, 8);
        for (register, address) in [(0x080, 0x1000), (0x090, 0x2000), (0x0a0, 0x3000), (register, value)] {
            set(&mut t, register, address);
        }
        set(&mut t, 0x044, 1);
        assert_eq!(get(&mut t, 0x044), 0, "{register:#x} = {value:#x}");
        assert_eq!(get(&mut t, 0x070), 11 | 64, "{register:#x} = {value:#x}");
        assert!(!t.interrupt_line(), "no notification before DRIVER_OK");
    }
}

#[test]
fn a_ready_queue_and_a_running_device_keep_their_queues() {
    let mut t = toy();
    negotiate(&mut t, V1);
    Ring::new(0x1000, 8).set_up(&mut t, 0);
    set(&mut t, 0x038, 3);
    set(&mut t, 0x080, 0xbad);
    set(&mut t, 0x070, 15);
    set(&mut t, 0x044, 0);
    assert_eq!(get(&mut t, 0x044), 1);
    assert_eq!(get(&mut t, 0x070), 15);
    set(&mut t, 0x030, 1);
    set(&mut t, 0x038, 4);
    set(&mut t, 0x044, 1);
    assert_eq!(get(&mut t, 0x044), 0);
}

#[test]
fn notifications_name_a_ready_queue_of_a_running_device() {
    let mut t = toy();
    negotiate(&mut t, V1);
    Ring::new(0x1000, 8).set_up(&mut t, 0);
    assert_eq!(set(&mut t, 0x050, 0), MmioEffect::None, "before DRIVER_OK");
    set(&mut t, 0x070, 15);
    assert_eq!(set(&mut t, 0x050, 0), MmioEffect::Notify(0));
    assert_eq!(set(&mut t, 0x050, 1), MmioEffect::None, "not ready");
    assert_eq!(set(&mut t, 0x050, 2), MmioEffect::None, "no such queue");
    assert_eq!(set(&mut t, 0x050, 0x1_0000), MmioEffect::None);
    set(&mut t, 0x070, 128);
    assert_eq!(set(&mut t, 0x050, 0), MmioEffect::None, "FAILED");
}

#[test]
fn the_interrupt_is_up_until_acknowledged() {
    let (mut t, memory, mut ring) = running(V1);
    give_back(&mut t, &memory).unwrap();
    assert!(!t.interrupt_line(), "nothing used");
    ring.add(&memory, &[(0x8000, 16, false)]).unwrap();
    give_back(&mut t, &memory).unwrap();
    assert!(t.interrupt_line());
    assert_eq!(get(&mut t, 0x060), 1);
    assert_eq!(set(&mut t, 0x064, 2), MmioEffect::InterruptAck);
    assert!(t.interrupt_line(), "another one acknowledged");
    set(&mut t, 0x064, 1);
    assert!(!t.interrupt_line());
    give_back(&mut t, &memory).unwrap();
    assert!(!t.interrupt_line(), "nothing new");
}

#[test]
fn no_interrupt_is_honoured() {
    let (mut t, memory, mut ring) = running(V1);
    memory.write(crate::memory::address::Gpa::new(ring.driver()), &[1, 0]).unwrap();
    ring.add(&memory, &[(0x8000, 16, false)]).unwrap();
    give_back(&mut t, &memory).unwrap();
    assert!(!t.interrupt_line());
    assert!(ring.take(&memory).is_some());
}

#[test]
fn event_index_says_when_to_interrupt_and_to_notify() {
    let (mut t, memory, mut ring) = running(V1 | F_EVENT_IDX);
    // An interrupt when the used index goes past 2, not before.
    memory.write(crate::memory::address::Gpa::new(ring.driver() + 4 + 16), &[2, 0]).unwrap();
    for (used, interrupt) in [(1, false), (2, false), (3, true), (4, false)] {
        ring.add(&memory, &[(0x8000, 16, false)]).unwrap();
        give_back(&mut t, &memory).unwrap();
        assert_eq!(t.interrupt_line(), interrupt, "used index {used}");
        set(&mut t, 0x064, 3);
    }
    assert_eq!(t.serve(&memory, |_, queues| queues[0].arm(&memory)), Some(false));
    assert!(ring.add(&memory, &[(0x8000, 16, false)]).unwrap().1, "armed");
    assert!(!ring.add(&memory, &[(0x8000, 16, false)]).unwrap().1, "notified already");
    assert_eq!(t.serve(&memory, |_, queues| queues[0].arm(&memory)), Some(true));
}

#[test]
fn a_fault_stops_the_device_until_reset() {
    let (mut t, memory, mut ring) = running(V1);
    ring.offer(&memory, 8);
    assert_eq!(give_back(&mut t, &memory), None);
    assert_eq!(get(&mut t, 0x070), 15 | 64);
    assert_eq!(get(&mut t, 0x060), 2, "a configuration change interrupt");
    assert_eq!((t.faults(), t.device().resets), (1, 2));
    set(&mut t, 0x070, 15);
    assert_eq!(get(&mut t, 0x070), 15 | 64, "the driver can't clear it");
    assert_eq!(set(&mut t, 0x050, 0), MmioEffect::None);
    assert_eq!(give_back(&mut t, &memory), None);
    assert_eq!(t.faults(), 1, "stopped, not failed again");

    set(&mut t, 0x070, 0);
    assert_eq!((get(&mut t, 0x070), get(&mut t, 0x060), get(&mut t, 0x044)), (0, 0, 0));
    assert!(!t.interrupt_line());
    let memory = FakeMemory::new(0, 0x10000);
    let mut ring = Ring::new(0x1000, 8);
    negotiate(&mut t, V1);
    ring.set_up(&mut t, 0);
    set(&mut t, 0x070, 15);
    ring.add(&memory, &[(0x8000, 16, false)]).unwrap();
    give_back(&mut t, &memory).unwrap();
    assert!(ring.take(&memory).is_some());
}

#[test]
fn reset_forgets_all() {
    let (mut t, memory, mut ring) = running(V1 | F_EVENT_IDX);
    for _ in 0..3 {
        ring.add(&memory, &[(0x8000, 16, false)]).unwrap();
    }
    give_back(&mut t, &memory).unwrap();
    set(&mut t, 0x014, 1);
    set(&mut t, 0x070, 0);
    assert_eq!(give_back(&mut t, &memory), None);
    assert_eq!(get(&mut t, 0x010), 1 << 29 | 1 << 3);
    set(&mut t, 0x070, 3);
    set(&mut t, 0x070, 11);
    assert_eq!(get(&mut t, 0x070), 3, "features are gone");
    set(&mut t, 0x044, 1);
    assert_eq!(get(&mut t, 0x044), 0, "the queue's size is gone");
}
