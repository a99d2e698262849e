use super::super::interrupt::{DeliveryMode, Destination};
use super::timer::divisor;
use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::vec::Vec;

const HZ: u64 = 2_500_000_000;
const ONE_SHOT: u32 = 0;
const PERIODIC: u32 = 1 << 17;
const TSC_DEADLINE: u32 = 2 << 17;

/// An APIC of ID 5 in xAPIC mode, enabled in software.
fn xapic() -> LocalApic {
    let mut apic = LocalApic::new(5, false, HZ);
    assert_eq!(apic.write_mmio(0xf0, 0x1ff, 0), Effect::IdentityChanged);
    apic
}

fn x2apic(id: u32) -> LocalApic {
    let mut apic = LocalApic::new(id, false, HZ);
    apic.write_base(RESET_ADDRESS | BASE_EN | BASE_EXTD).unwrap();
    assert_eq!(apic.write_msr(0x80f, 0x1ff, 0), Ok(Effect::IdentityChanged));
    apic
}

fn set(apic: &mut LocalApic, offset: u32, value: u32) {
    assert_eq!(apic.write_mmio(offset, value, 0), Effect::None, "write {value:#x} at {offset:#x}");
}

fn esr(apic: &mut LocalApic) -> u32 {
    set(apic, 0x280, 0);
    apic.read_mmio(0x280, 0)
}

fn message(destination: Destination, mode: DeliveryMode, vector: u8) -> InterruptMessage {
    InterruptMessage { destination, mode, vector, level: false }
}

/// Intel SDM vol. 3, 11.4.7.1.
#[test]
fn state_after_reset_and_init() {
    let check = |apic: &mut LocalApic| {
        let expected = |offset| match offset {
            0x20 => 5 << 24,
            0x30 => 0x0005_0014,
            0xe0 => u32::MAX,
            0xf0 => 0xff,
            0x320..=0x370 => MASKED,
            _ => 0,
        };
        for offset in (0..0x400).step_by(16) {
            assert_eq!(apic.read_mmio(offset, 0), expected(offset), "{offset:#x}");
        }
        assert!(!apic.is_software_enabled());
        assert_eq!(apic.deliverable(), None);
    };
    check(&mut LocalApic::new(5, true, HZ));
    assert_eq!(LocalApic::new(5, true, HZ).base(), 0xfee0_0900);
    assert_eq!(LocalApic::new(5, false, HZ).base(), 0xfee0_0800);

    let mut apic = xapic();
    for offset in (0x80..0x400).step_by(16) {
        let _ = apic.write_mmio(offset, 0x3f, 0);
    }
    apic.accept(0x31, true);
    apic.acknowledge(0x31);
    apic.accept(0x41, true);
    apic.init();
    check(&mut apic);
    assert_eq!(apic.highest_requested(), None);
    assert_eq!(apic.eoi(), Effect::None);
}

/// What keeps which bits in xAPIC mode, with the APIC enabled in software.
#[test]
fn writable_bits_of_xapic() {
    let table = [
        (0x20, 5 << 24),
        (0x30, 0x0005_0014),
        (0x80, 0xff),
        (0xa0, 0),
        (0xd0, 0xff00_0000),
        (0xe0, u32::MAX),
        (0xf0, 0x3ff),
        (0x100, 0),
        (0x200, 0),
        (0x310, 0xff00_0000),
        (0x320, 0x0007_00ff),
        (0x330, 0x0001_07ff),
        (0x340, 0x0001_07ff),
        (0x350, 0x0001_a7ff),
        (0x360, 0x0001_a7ff),
        (0x370, 0x0001_00ff),
        (0x390, 0),
        (0x3e0, 0xb),
    ];
    for (offset, expected) in table {
        let mut apic = xapic();
        let _ = apic.write_mmio(offset, u32::MAX, 0);
        assert_eq!(apic.read_mmio(offset, 0), expected, "{offset:#x}");
        assert_eq!(esr(&mut apic), 0, "{offset:#x}");
    }
    let mut apic = xapic();
    let _ = apic.write_mmio(0xe0, 0, 0);
    assert_eq!(apic.read_mmio(0xe0, 0), 0x0fff_ffff);
}

#[test]
fn reserved_offsets_of_xapic_are_errors() {
    for offset in [0, 0x10, 0x40, 0x70, 0x84, 0x81, 0x290, 0x2f0, 0x3a0, 0x3f0, 0x400, 0xff0] {
        let mut apic = xapic();
        assert_eq!(apic.read_mmio(offset, 0), 0);
        assert_eq!(esr(&mut apic), error::ILLEGAL_REGISTER, "{offset:#x}");
        assert_eq!(apic.write_mmio(offset, u32::MAX, 0), Effect::None);
        assert_eq!(esr(&mut apic), error::ILLEGAL_REGISTER, "{offset:#x}");
        assert_eq!(esr(&mut apic), 0);
    }
}

/// Intel SDM vol. 3, table 11-6: (MSR, readable, bits that may be set when written).
#[test]
fn access_to_x2apic_msrs() {
    let known = |msr: u32| -> (bool, Option<u64>) {
        match msr {
            0x802 | 0x803 | 0x80a | 0x80d | 0x810..=0x827 | 0x839 => (true, None),
            0x808 => (true, Some(0xff)),
            0x80b => (false, Some(0)),
            0x80f => (true, Some(0x3ff)),
            0x828 => (true, Some(0)),
            0x830 => (true, Some(0xffff_ffff_000c_dfff)),
            0x832 => (true, Some(0x0007_10ff)),
            0x833 | 0x834 => (true, Some(0x0001_17ff)),
            0x835 | 0x836 => (true, Some(0x0001_f7ff)),
            0x837 => (true, Some(0x0001_10ff)),
            0x838 => (true, Some(0xffff_ffff)),
            0x83e => (true, Some(0xb)),
            0x83f => (false, Some(0xff)),
            _ => (false, None),
        }
    };
    for msr in 0x7ff..=0x900 {
        let (readable, writable) = known(msr);
        assert_eq!(x2apic(5).read_msr(msr, 0).is_ok(), readable, "read {msr:#x}");
        assert_eq!(x2apic(5).write_msr(msr, 0, 0).is_ok(), writable.is_some(), "write {msr:#x}");
        for bit in 0..64 {
            let allowed = writable.is_some_and(|mask| mask >> bit & 1 != 0);
            assert_eq!(x2apic(5).write_msr(msr, 1 << bit, 0).is_ok(), allowed, "{msr:#x} bit {bit}");
        }
        assert_eq!(xapic().read_msr(msr, 0), Err(Fault));
        assert_eq!(xapic().write_msr(msr, 0, 0), Err(Fault));
    }
}

#[test]
fn x2apic_identity() {
    let mut apic = x2apic(0x123);
    assert_eq!(apic.read_msr(0x802, 0), Ok(0x123));
    assert_eq!(apic.read_msr(0x80d, 0), Ok(0x0012_0008));
    assert_eq!(apic.mmio_base(), None);
    let posted = Posted::new(0);
    apic.publish(&posted);
    assert!(posted.is_enabled());
    assert!(posted.matches(Destination::Physical(0x123), false));
    assert!(posted.matches(Destination::Logical(0x0012_000c), false));
    assert!(!posted.matches(Destination::Logical(0x0012_0004), false));
    apic.init();
    assert_eq!(apic.base(), RESET_ADDRESS | BASE_EN | BASE_EXTD, "INIT keeps x2APIC mode");
    assert_eq!(apic.read_msr(0x80d, 0), Ok(0x0012_0008));
}

#[test]
fn xapic_identity() {
    let mut apic = xapic();
    assert_eq!(apic.mmio_base(), Some(Gpa::new(0xfee0_0000)));
    let posted = Posted::new(0);
    assert_eq!(apic.write_mmio(0xd0, 0x4200_0000, 0), Effect::IdentityChanged);
    apic.publish(&posted);
    assert!(posted.matches(Destination::Physical(5), false));
    assert!(posted.matches(Destination::Logical(0x40), false));
    assert_eq!(apic.write_mmio(0xe0, 0, 0), Effect::IdentityChanged);
    apic.publish(&posted);
    assert!(posted.matches(Destination::Logical(0x42), false));
    assert!(!posted.matches(Destination::Logical(0x40), false));
    let _ = apic.write_mmio(0xf0, 0xff, 0);
    apic.publish(&posted);
    assert!(!posted.is_enabled());
}

/// Intel SDM vol. 3, figure 11-27: the transitions between the four states of EN and EXTD.
#[test]
fn apic_base_transitions() {
    const OFF: u64 = 0;
    let allowed = |from, to| match (from, to) {
        (OFF, to) => to == OFF || to == BASE_EN,
        (BASE_EN, to) => to != BASE_EXTD,
        (_, to) => to == OFF || to == BASE_EN | BASE_EXTD,
    };
    for from in [OFF, BASE_EN, BASE_EN | BASE_EXTD] {
        for to in [OFF, BASE_EXTD, BASE_EN, BASE_EN | BASE_EXTD] {
            let mut apic = LocalApic::new(5, true, HZ);
            apic.write_base(RESET_ADDRESS | from).unwrap();
            let before = apic.base();
            let result = apic.write_base(RESET_ADDRESS | to);
            assert_eq!(result.is_ok(), allowed(from, to), "{from:#x} to {to:#x}");
            let after = if result.is_ok() { RESET_ADDRESS | to | BASE_BSP } else { before };
            assert_eq!(apic.base(), after);
        }
    }
    for bit in (0..8).chain([9]).chain(52..64) {
        assert_eq!(xapic().write_base(RESET_ADDRESS | BASE_EN | 1 << bit), Err(Fault), "bit {bit}");
    }
    let mut moved = xapic();
    moved.write_base(0x1_2345_6000 | BASE_EN).unwrap();
    assert_eq!(moved.mmio_base(), Some(Gpa::new(0x1_2345_6000)));
    assert!(moved.is_software_enabled(), "moving the page changes no register");
}

#[test]
fn mode_changes_and_registers() {
    let mut apic = xapic();
    set(&mut apic, 0x80, 0x20);
    set(&mut apic, 0x310, 0x700_0000);
    apic.accept(0x55, false);
    apic.write_base(RESET_ADDRESS | BASE_EN | BASE_EXTD).unwrap();
    assert_eq!(apic.read_msr(0x802, 0), Ok(5));
    assert_eq!(apic.read_msr(0x80d, 0), Ok(0x20));
    assert_eq!(apic.read_msr(0x808, 0), Ok(0x20));
    assert_eq!(apic.read_msr(0x830, 0), Ok(0));
    assert_eq!(apic.deliverable(), Some(0x55));
    apic.write_base(RESET_ADDRESS).unwrap();
    assert_eq!((apic.deliverable(), apic.mmio_base()), (None, None));
    apic.write_base(RESET_ADDRESS | BASE_EN).unwrap();
    assert_eq!(apic.read_mmio(0x20, 0), 5 << 24);
    assert_eq!(apic.read_mmio(0xd0, 0), 0);
    assert!(!apic.is_software_enabled());
}

/// Intel SDM vol. 3, table 11-3.
#[test]
fn interrupt_commands() {
    use DeliveryMode as M;
    use Destination as D;
    let sent = |low: u32| {
        let mut apic = xapic();
        set(&mut apic, 0x310, 0x0300_0000);
        let effect = apic.write_mmio(0x300, low, 0);
        (effect, apic.refused_commands(), apic.highest_requested(), esr(&mut apic))
    };
    let goes = |d, m, v| (Effect::Send(message(d, m, v)), 0, None, 0);
    let refused = (Effect::None, 1, None, 0);
    let table = [
        (0x0_4031, goes(D::Physical(3), M::FIXED, 0x31)),
        (0x0_c031, goes(D::Physical(3), M::FIXED, 0x31)),
        (0x0_4831, goes(D::Logical(3), M::FIXED, 0x31)),
        (0x0_4931, goes(D::Logical(3), M::LOWEST_PRIORITY, 0x31)),
        (0x0_4400, goes(D::Physical(3), M::NMI, 0)),
        (0x0_4500, goes(D::Physical(3), M::INIT, 0)),
        (0x0_c500, goes(D::Physical(3), M::INIT, 0)),
        (0x0_8500, (Effect::None, 0, None, 0)),
        (0x0_4699, goes(D::Physical(3), M::STARTUP, 0x99)),
        (0x0_4200, refused),
        (0x0_4331, refused),
        (0x0_4731, refused),
        (0x4_4031, (Effect::None, 0, Some(0x31), 0)),
        (0x4_4400, refused),
        (0x8_4031, goes(D::All, M::FIXED, 0x31)),
        (0x8_4500, refused),
        (0xc_4031, goes(D::Others, M::FIXED, 0x31)),
        (0xc_4131, goes(D::Others, M::LOWEST_PRIORITY, 0x31)),
        (0xc_4500, goes(D::Others, M::INIT, 0)),
        (0xc_4600, goes(D::Others, M::STARTUP, 0)),
        (0x0_400f, (Effect::None, 0, None, 0x20)),
        (0x0_410f, (Effect::None, 0, None, 0x20)),
        (0x4_4000, (Effect::None, 0, None, 0x60)),
    ];
    for (low, expected) in table {
        assert_eq!(sent(low), expected, "ICR {low:#x}");
    }
}

#[test]
fn icr_forms() {
    let mut apic = xapic();
    set(&mut apic, 0x310, 0xff00_0000);
    let everybody = message(Destination::Physical(u32::MAX), DeliveryMode::FIXED, 0x40);
    assert_eq!(apic.write_mmio(0x300, 0x4040, 0), Effect::Send(everybody));
    assert_eq!(apic.read_mmio(0x300, 0), 0x4040);

    let mut apic = x2apic(5);
    let to_255 = message(Destination::Physical(0xff), DeliveryMode::FIXED, 0x40);
    assert_eq!(apic.write_msr(0x830, 0xff_0000_4040, 0), Ok(Effect::Send(to_255)));
    assert_eq!(apic.read_msr(0x830, 0), Ok(0xff_0000_4040));
    let cluster = message(Destination::Logical(0x0002_0003), DeliveryMode::FIXED, 0x40);
    assert_eq!(apic.write_msr(0x830, 0x0002_0003_0000_0840, 0), Ok(Effect::Send(cluster)));
    assert_eq!(apic.write_msr(0x83f, 0x77, 0), Ok(Effect::None));
    assert_eq!(apic.deliverable(), Some(0x77));
    assert_eq!(apic.write_msr(0x83f, 7, 0), Ok(Effect::None));
    assert_eq!(apic.write_msr(0x828, 0, 0), Ok(Effect::None));
    assert_eq!(apic.read_msr(0x828, 0), Ok(0x60));
}

#[test]
fn errors_are_latched_and_interrupt_once() {
    let mut apic = xapic();
    set(&mut apic, 0x370, 0xfe);
    assert!(!apic.accept(15, false));
    assert_eq!(apic.read_mmio(0x280, 0), 0, "not before ESR is written");
    assert_eq!(apic.deliverable(), Some(0xfe));
    apic.acknowledge(0xfe);
    let _ = apic.read_mmio(0x40, 0);
    assert_eq!(apic.highest_requested(), None, "armed again only by a write to ESR");
    assert_eq!(esr(&mut apic), 0xc0);
    assert_eq!(apic.read_mmio(0x280, 0), 0xc0, "reads do not clear");
    let _ = apic.read_mmio(0x40, 0);
    assert_eq!(apic.highest_requested(), Some(0xfe));
    assert_eq!(esr(&mut apic), 0x80);

    set(&mut apic, 0x370, 3);
    let _ = apic.read_mmio(0x40, 0);
    assert_eq!(esr(&mut apic), 0xc0, "an illegal error vector is itself an error");
}

#[test]
fn software_disable_masks_lvts_and_leaves_requests_to_be_handled() {
    let mut apic = xapic();
    set(&mut apic, 0x350, 0x31);
    apic.accept(0x51, true);
    apic.acknowledge(0x51);
    apic.accept(0x41, true);
    let _ = apic.write_mmio(0xf0, 0xff, 0);
    for offset in (0x320..=0x370).step_by(16) {
        assert_ne!(apic.read_mmio(offset, 0) & MASKED, 0);
        set(&mut apic, offset, 0x31);
        assert_eq!(apic.read_mmio(offset, 0), MASKED | 0x31);
    }
    assert!(!apic.accept(0x61, true));
    assert_eq!((apic.deliverable(), apic.highest_requested()), (None, Some(0x41)), "0x51 is in service");
    // In service and requested ones end as ever, so that what waits for their end goes on.
    assert_eq!(apic.write_mmio(0xb0, 0, 0), Effect::Eoi { vector: 0x51, level: true });
    assert_eq!(apic.deliverable(), Some(0x41));
    apic.acknowledge(0x41);
    assert_eq!(apic.write_mmio(0xb0, 0, 0), Effect::Eoi { vector: 0x41, level: true });
    let _ = apic.write_mmio(0xf0, 0x1ff, 0);
    assert_eq!(apic.read_mmio(0x350, 0), MASKED | 0x31);
}

#[test]
fn divisors() {
    for (register, expected) in
        [(0, 2), (1, 4), (2, 8), (3, 16), (0b1000, 32), (0b1001, 64), (0b1010, 128), (0b1011, 1)]
    {
        assert_eq!(divisor(register), expected, "{register:#x}");
    }
}

fn timer(mode: u32) -> LocalApic {
    let mut apic = xapic();
    set(&mut apic, 0x3e0, 0b1011);
    set(&mut apic, 0x320, mode | 0x40);
    apic
}

#[test]
fn tsc_deadline_rules() {
    let mut apic = timer(TSC_DEADLINE);
    apic.set_tsc_deadline(1000, 10);
    assert_eq!((apic.tsc_deadline(999), apic.next_deadline()), (1000, Some(1000)));
    apic.poll_timer(999);
    assert_eq!(apic.deliverable(), None);
    assert_eq!(apic.tsc_deadline(1000), 0);
    apic.poll_timer(1000);
    assert_eq!((apic.deliverable(), apic.next_deadline()), (Some(0x40), None));

    let mut apic = timer(TSC_DEADLINE);
    apic.set_tsc_deadline(10, 1000);
    assert_eq!(apic.deliverable(), Some(0x40), "the past fires at once");

    let mut apic = timer(TSC_DEADLINE);
    apic.set_tsc_deadline(1000, 10);
    apic.set_tsc_deadline(0, 20);
    assert_eq!(apic.next_deadline(), None, "0 disarms");

    let mut apic = timer(TSC_DEADLINE);
    apic.set_tsc_deadline(1000, 10);
    apic.set_tsc_deadline(2000, 1500);
    assert_eq!(apic.deliverable(), Some(0x40), "the first had fired before the second was set");
    assert_eq!(apic.next_deadline(), Some(2000));

    let mut apic = timer(TSC_DEADLINE);
    let _ = apic.write_mmio(0x380, 100, 0);
    assert_eq!((apic.read_mmio(0x380, 0), apic.next_deadline()), (0, None), "no initial count");
    for mode in [ONE_SHOT, PERIODIC, 3 << 17] {
        let mut apic = timer(mode);
        apic.set_tsc_deadline(1000, 10);
        assert_eq!((apic.tsc_deadline(10), apic.next_deadline()), (0, None));
    }
}

#[test]
fn a_change_of_mode_disarms() {
    let modes = [ONE_SHOT, PERIODIC, TSC_DEADLINE, 3 << 17];
    for from in modes {
        for to in modes {
            let mut apic = timer(from);
            let _ = apic.write_mmio(0x380, 1000, 0);
            apic.set_tsc_deadline(1000, 0);
            let armed = apic.next_deadline();
            assert_eq!(armed.is_some(), from != 3 << 17);
            set(&mut apic, 0x320, to | 0x50);
            assert_eq!(apic.next_deadline(), armed.filter(|_| from == to), "{from:#x} to {to:#x}");
        }
    }
}

#[test]
fn a_masked_timer_expires_silently() {
    for mode in [ONE_SHOT, TSC_DEADLINE] {
        let mut apic = timer(mode | MASKED);
        let _ = apic.write_mmio(0x380, 400, 0);
        apic.set_tsc_deadline(1000, 0);
        assert_eq!(apic.next_deadline(), None);
        let _ = apic.write_mmio(0x320, mode | 0x40, 1001);
        apic.poll_timer(2000);
        assert_eq!(apic.highest_requested(), None);
    }
    let mut apic = timer(ONE_SHOT | MASKED);
    let _ = apic.write_mmio(0x380, 400, 0);
    let _ = apic.write_mmio(0x320, ONE_SHOT | 0x40, 999);
    apic.poll_timer(1000);
    assert_eq!(apic.highest_requested(), Some(0x40), "unmasked in time");
}

#[test]
fn counts_are_bus_ticks() {
    // 2.5 TSC ticks for a bus tick.
    let mut apic = timer(ONE_SHOT);
    set(&mut apic, 0x380, 3);
    assert_eq!(apic.next_deadline(), Some(8));
    for (now, count) in [(0, 3), (2, 3), (3, 2), (5, 1), (7, 1), (8, 0), (9, 0)] {
        assert_eq!(apic.read_mmio(0x390, now), count, "at {now}");
    }
    assert_eq!((apic.highest_requested(), apic.read_mmio(0x380, 9)), (Some(0x40), 3));

    let mut apic = timer(PERIODIC);
    set(&mut apic, 0x380, 3);
    for deadline in [8, 15, 23, 30] {
        assert_eq!(apic.next_deadline(), Some(deadline), "no drift");
        apic.poll_timer(deadline);
    }
    apic.poll_timer(1000);
    assert_eq!(apic.next_deadline(), Some(1005), "missed periods are one interrupt");
    set(&mut apic, 0x380, 0);
    assert_eq!(apic.next_deadline(), None);

    let mut apic = timer(ONE_SHOT);
    set(&mut apic, 0x380, 1000);
    let _ = apic.write_mmio(0x3e0, 0, 1000);
    assert_eq!(apic.read_mmio(0x390, 1000), 600, "the count stays when the divisor changes");
    assert_eq!(apic.next_deadline(), Some(1000 + 600 * 2 * 5 / 2));
    apic.tsc_jumped(1500, 500_000);
    assert_eq!(apic.next_deadline(), Some(502_500));

    let mut apic = timer(PERIODIC);
    set(&mut apic, 0x3e0, 0b1010);
    let _ = apic.write_mmio(0x380, u32::MAX, u64::MAX - 1);
    assert_eq!(apic.next_deadline(), Some(u64::MAX), "no wrap");
}

#[derive(Debug, Clone)]
enum Op {
    Accept(u8, bool),
    Tpr(u8),
    Take,
    Eoi,
    Enable(bool),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (any::<u8>(), any::<bool>()).prop_map(|(v, l)| Op::Accept(v, l)),
        1 => any::<u8>().prop_map(Op::Tpr),
        4 => Just(Op::Take),
        3 => Just(Op::Eoi),
        1 => prop::bool::weighted(0.8).prop_map(Op::Enable),
    ]
}

fn register_of(apic: &mut LocalApic, base: u32) -> BTreeSet<u8> {
    (0..=255u8).filter(|v| apic.read_mmio(base + u32::from(*v) / 32 * 16, 0) >> (v % 32) & 1 != 0).collect()
}

proptest! {
    /// Against an APIC that keeps IRR, ISR and TMR as sets.
    #[test]
    fn priorities_as_in_the_reference(ops in prop::collection::vec(op(), 0..60)) {
        let mut apic = xapic();
        let (mut irr, mut isr, mut tmr) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        let (mut tpr, mut enabled) = (0u8, true);
        for op in ops {
            let ppr = |isr: &BTreeSet<u8>, tpr: u8| {
                let service = isr.last().copied().unwrap_or(0) & 0xf0;
                if tpr & 0xf0 >= service { tpr } else { service }
            };
            match op {
                Op::Accept(vector, level) => {
                    let accepted = enabled && vector >= 16;
                    prop_assert_eq!(apic.accept(vector, level), accepted);
                    if accepted {
                        irr.insert(vector);
                        if level { tmr.insert(vector); } else { tmr.remove(&vector); }
                    }
                }
                Op::Tpr(value) => {
                    tpr = value;
                    apic.set_tpr(value);
                }
                Op::Take => if let Some(vector) = apic.deliverable() {
                    apic.acknowledge(vector);
                    irr.remove(&vector);
                    isr.insert(vector);
                },
                Op::Eoi => {
                    let expected = isr.pop_last().map_or(Effect::None, |vector| {
                        Effect::Eoi { vector, level: tmr.contains(&vector) }
                    });
                    prop_assert_eq!(apic.write_mmio(0xb0, 0, 0), expected);
                }
                Op::Enable(on) => {
                    enabled = on;
                    let _ = apic.write_mmio(0xf0, 0xff | u32::from(on) << 8, 0);
                }
            }
            let ppr = ppr(&isr, tpr);
            let top = irr.last().copied();
            prop_assert_eq!(apic.highest_requested(), top);
            prop_assert_eq!(apic.deliverable(), top.filter(|v| v & 0xf0 > ppr & 0xf0));
            prop_assert_eq!(apic.read_mmio(0xa0, 0), u32::from(ppr));
            prop_assert_eq!(apic.tpr(), tpr);
        }
        prop_assert_eq!(register_of(&mut apic, 0x200), irr);
        prop_assert_eq!(register_of(&mut apic, 0x100), isr);
        prop_assert_eq!(register_of(&mut apic, 0x180), tmr);
    }

    /// However it is polled, a count timer fires at the first TSC value at which its bus
    /// ticks are over, and the current count is what is left of them.
    #[test]
    fn count_timers_are_exact(
        hz in 1_000_000u64..10_000_000_000,
        count in 1u32..100_000,
        register in prop::sample::select(std::vec![0u32, 1, 2, 3, 8, 9, 10, 11]),
        periodic: bool,
        start in 0u64..1 << 62,
        steps in prop::collection::vec(0u64..3_000_000, 1..20),
    ) {
        let mut apic = LocalApic::new(0, false, hz);
        let _ = apic.write_mmio(0xf0, 0x1ff, 0);
        set(&mut apic, 0x3e0, register);
        set(&mut apic, 0x320, 0x40 | if periodic { PERIODIC } else { ONE_SHOT });
        let _ = apic.write_mmio(0x380, count, start);
        let (count, divisor) = (u128::from(count), u128::from(divisor(register)));
        let period = count * divisor;
        let (mut now, mut fired) = (start, 0);
        let polls: Vec<u64> = steps.into_iter().map(|step| { now += step; now }).collect();
        for now in polls {
            let bus = u128::from(now - start) * u128::from(BUS_HZ) / u128::from(hz);
            let over = if periodic { bus / period } else { (bus / period).min(1) };
            apic.poll_timer(now);
            prop_assert_eq!(apic.deliverable().is_some(), over > fired);
            if over > fired {
                apic.acknowledge(0x40);
                let _ = apic.eoi();
                fired = over;
            }
            let left = if periodic || over == 0 { count - bus % period / divisor } else { 0 };
            prop_assert_eq!(u128::from(apic.read_mmio(0x390, now)), left);
            let next = (periodic || over == 0).then(|| {
                let bus = (over + 1) * period;
                start + u64::try_from((bus * u128::from(hz)).div_ceil(u128::from(BUS_HZ))).unwrap()
            });
            prop_assert_eq!(apic.next_deadline(), next);
        }
    }
}
