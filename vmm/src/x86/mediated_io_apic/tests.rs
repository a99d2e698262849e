use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

const PINS: usize = 3;
const MASK: u32 = 1 << 16;
const LEVEL: u32 = 1 << 15;
const REMOTE_IRR: u32 = 1 << 14;

/// An interrupt on its way: the CPU's APIC ID, the vector, level-triggered.
type Arrival = (u32, u8, bool);

/// An I/O APIC as the data sheet describes it, with fixed mode and physical destinations.
#[derive(Debug, Default)]
struct Chip {
    entries: [Entry; PINS],
    lines: [bool; PINS],
    sent: Vec<Arrival>,
    /// Each entry that was unmasked after a register write, with its pin.
    unmasked: Vec<(usize, Entry)>,
}

impl Chip {
    fn send(&mut self, pin: usize) {
        let entry = &mut self.entries[pin];
        let Destination::Physical(cpu) = entry.destination() else { panic!("a logical destination") };
        entry.set_remote_irr(entry.level());
        self.sent.push((cpu, entry.vector(), entry.level()));
    }

    fn service(&mut self, pin: usize) {
        let entry = self.entries[pin];
        if self.lines[pin] && entry.level() && !entry.masked() && !entry.remote_irr() {
            self.send(pin);
        }
    }

    fn set_line(&mut self, pin: usize, up: bool) {
        let rises = up && !self.lines[pin];
        self.lines[pin] = up;
        if rises && !self.entries[pin].level() && !self.entries[pin].masked() {
            self.send(pin);
        }
        self.service(pin);
    }

    fn end(&mut self, vector: u8) {
        for pin in 0..PINS {
            if self.entries[pin].remote_irr() && self.entries[pin].vector() == vector {
                self.entries[pin].set_remote_irr(false);
                self.service(pin);
            }
        }
    }
}

impl IoApicHardware for Chip {
    fn read(&mut self, register: u8) -> u32 {
        match register {
            0 => 0x0200_0000,
            // Version 0x20: this one has an EOI register, which nobody may see.
            1 => 0x0002_0020,
            _ => {
                let entry = self.entries[usize::from(register - 0x10) / 2];
                if register & 1 == 0 { entry.low() } else { entry.high() }
            }
        }
    }

    fn write(&mut self, register: u8, value: u32) {
        let pin = usize::from(register - 0x10) / 2;
        let half = if register & 1 == 0 { Half::Low } else { Half::High };
        self.entries[pin] = self.entries[pin].written(half, value);
        if !self.entries[pin].masked() {
            self.unmasked.push((pin, self.entries[pin].with_remote_irr(false)));
        }
        self.service(pin);
    }
}

fn put(apic: &mut MediatedIoApic<Chip>, register: u8, value: u32) {
    apic.write(0, Width::Dword, u64::from(register));
    apic.write(0x10, Width::Dword, u64::from(value));
}

fn get(apic: &mut MediatedIoApic<Chip>, register: u8) -> u32 {
    apic.write(0, Width::Dword, u64::from(register));
    u32::try_from(apic.read(0x10, Width::Dword)).unwrap()
}

fn at(cpu: u32) -> impl Fn(Destination) -> bool {
    move |destination| destination == Destination::Physical(cpu)
}

/// What the hypervisor does with the interrupts on their way; returns what is then pending
/// in the root cell.
fn take(apic: &mut MediatedIoApic<Chip>) -> Vec<Arrival> {
    let mut pending = Vec::new();
    while !apic.hardware.sent.is_empty() {
        let (cpu, vector, level) = apic.hardware.sent.remove(0);
        if level {
            apic.level_arrived(vector, cpu, &at(cpu));
            apic.hardware.end(vector);
        }
        pending.push((cpu, vector, level));
    }
    pending
}

#[test]
fn takes_over_and_hides() {
    let mut chip = Chip::default();
    chip.entries[1] = Entry::from_bits(0x0300_0000_0000_c041);
    let mut apic = MediatedIoApic::new(chip);
    assert_eq!(apic.hardware.entries, [Entry::RESET; PINS]);
    assert_eq!(get(&mut apic, 0), 0x0200_0000);
    assert_eq!(get(&mut apic, 1), 0x0002_0011, "no EOI register");
    assert_eq!(get(&mut apic, 0x12), MASK);
    assert_eq!(get(&mut apic, 0x16), u32::MAX, "no fourth pin");
    put(&mut apic, 0x16, 0x41);
    put(&mut apic, 0, 0x0500_0000);
    assert_eq!(get(&mut apic, 0), 0x0500_0000);
    apic.write(0x40, Width::Dword, 0x41);
    assert_eq!(apic.read(0x40, Width::Dword), 0xffff_ffff);
}

#[test]
fn level_is_held_until_its_eoi() {
    let mut apic = MediatedIoApic::new(Chip::default());
    put(&mut apic, 0x11, 1 << 24);
    put(&mut apic, 0x10, LEVEL | 0x41);
    apic.hardware.set_line(0, true);
    assert_eq!(get(&mut apic, 0x10), LEVEL | REMOTE_IRR | 0x41, "on its way");
    assert_eq!(take(&mut apic), [(1, 0x41, true)]);
    assert_eq!(apic.hardware.entries[0].low(), LEVEL | MASK | 0x41);
    assert_eq!(get(&mut apic, 0x10), LEVEL | REMOTE_IRR | 0x41);
    apic.eoi(0x40, 1);
    apic.eoi(0x41, 0);
    assert_eq!(take(&mut apic), [], "another vector, another CPU");
    apic.eoi(0x41, 1);
    assert_eq!(take(&mut apic), [(1, 0x41, true)], "the line is still up");
    apic.hardware.set_line(0, false);
    apic.eoi(0x41, 1);
    assert_eq!(take(&mut apic), []);
    assert_eq!(apic.hardware.entries[0].low(), LEVEL | 0x41);
    assert!(!apic.level_arrived(0x42, 1, &at(1)));
}

#[test]
fn what_else_releases() {
    type Act = fn(&mut MediatedIoApic<Chip>);
    let table: [(&str, Act, &[Arrival]); 7] = [
        ("INIT", |a| a.release_all_for(0), &[(0, 0x41, true)]),
        ("INIT of another", |a| a.release_all_for(1), &[]),
        ("rewrite", |a| put(a, 0x10, LEVEL | 0x41), &[(0, 0x41, true)]),
        ("other vector", |a| put(a, 0x10, LEVEL | 0x42), &[(0, 0x42, true)]),
        ("other CPU", |a| put(a, 0x11, 1 << 24), &[(1, 0x41, true)]),
        ("same CPU", |a| put(a, 0x11, 0), &[]),
        ("mask", |a| put(a, 0x10, MASK | LEVEL | 0x41), &[]),
    ];
    for (what, act, expected) in table {
        let mut apic = MediatedIoApic::new(Chip::default());
        put(&mut apic, 0x10, LEVEL | 0x41);
        apic.hardware.set_line(0, true);
        take(&mut apic);
        act(&mut apic);
        assert_eq!(take(&mut apic), expected, "{what}");
    }
}

#[test]
fn harmful_entries_stay_masked() {
    let table = [
        (0x0020, false),
        (0x00ff, false),
        (0x0131, false),
        (0x001f, true),
        (0x0018, true),
        (0x0231, true),
        (0x0331, true),
        (0x0431, true),
        (0x0531, true),
        (0x0631, true),
        (0x0731, true),
    ];
    for (low, refused) in table {
        let mut apic = MediatedIoApic::new(Chip::default());
        put(&mut apic, 0x10, MASK | low);
        assert_eq!(apic.refused(), 0);
        put(&mut apic, 0x10, low);
        assert_eq!(apic.refused(), u64::from(refused), "{low:#x}");
        assert_eq!(apic.hardware.entries[0].masked(), refused, "{low:#x}");
        assert_eq!(get(&mut apic, 0x10), low, "the root sees what it wrote");
    }
}

#[test]
fn a_new_vector_ends_what_is_on_its_way() {
    let mut apic = MediatedIoApic::new(Chip::default());
    put(&mut apic, 0x10, LEVEL | 0x41);
    apic.hardware.set_line(0, true);
    put(&mut apic, 0x10, LEVEL | 0x42);
    assert_eq!(take(&mut apic), [(0, 0x41, true), (0, 0x42, true)]);
    apic.eoi(0x42, 0);
    assert_eq!(take(&mut apic), [(0, 0x42, true)], "not stuck");
}

/// The root cell's side: what is pending and what in service at its two CPUs.
#[derive(Debug, Default, PartialEq, Clone)]
struct Root {
    irr: BTreeSet<(u32, u8, bool)>,
    isr: BTreeSet<(u32, u8, bool)>,
}

impl Root {
    fn highest(set: &BTreeSet<Arrival>, cpu: u32) -> Option<Arrival> {
        set.range((cpu, 0, false)..(cpu + 1, 0, false)).next_back().copied()
    }

    fn deliver(&mut self, cpu: u32) {
        let next = Self::highest(&self.irr, cpu);
        if let Some(next) = next.filter(|n| Self::highest(&self.isr, cpu).is_none_or(|s| s.1 < n.1)) {
            self.irr.remove(&next);
            self.isr.insert(next);
        }
    }

    fn end(&mut self, cpu: u32) -> Option<Arrival> {
        let last = Self::highest(&self.isr, cpu)?;
        self.isr.remove(&last);
        Some(last)
    }
}

/// An I/O APIC without a hypervisor, whose remote IRR knows the CPU that must end it and is
/// cleared by every change of its entry.
#[derive(Debug, Default)]
struct Reference {
    chip: Chip,
    holder: [Option<u32>; PINS],
}

impl Reference {
    fn take(&mut self, root: &mut Root) {
        for (cpu, vector, level) in std::mem::take(&mut self.chip.sent) {
            for pin in 0..PINS {
                let entry = self.chip.entries[pin];
                if level && entry.vector() == vector && entry.destination() == Destination::Physical(cpu) {
                    self.holder[pin] = Some(cpu);
                }
            }
            root.irr.insert((cpu, vector, level));
        }
    }

    fn write(&mut self, pin: usize, half: Half, value: u32) {
        let old = self.chip.entries[pin];
        if half == Half::Low || old.with_remote_irr(false) != old.written(half, value).with_remote_irr(false)
        {
            self.chip.entries[pin].set_remote_irr(false);
            self.holder[pin] = None;
        }
        self.chip.write(index(u8::try_from(pin).unwrap(), half), value);
    }

    fn end(&mut self, cpu: u32, vector: u8) {
        for pin in 0..PINS {
            if self.holder[pin] == Some(cpu) && self.chip.entries[pin].vector() == vector {
                self.holder[pin] = None;
                self.chip.entries[pin].set_remote_irr(false);
                self.chip.service(pin);
            }
        }
    }
}

#[derive(Debug, Clone)]
enum Op {
    Line(usize, bool),
    /// Pin, vector, masked.
    Low(usize, u8, bool),
    High(usize, u32),
    Deliver(u32),
    Eoi(u32),
    /// Interrupts on their way arrive.
    Take,
}

/// Even vectors are level-triggered; 0x1e and 0x1f must stay masked.
fn low(vector: u8, masked: bool) -> u32 {
    u32::from(vector) | if vector & 1 == 0 { LEVEL } else { 0 } | if masked { MASK } else { 0 }
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let vector = prop::sample::select(std::vec![0x40u8, 0x40, 0x42, 0x42, 0x43, 0x1e, 0x1f]);
    let op = prop_oneof![
        4 => (0..PINS, any::<bool>()).prop_map(|(pin, up)| Op::Line(pin, up)),
        3 => (0..PINS, vector, prop::bool::weighted(0.3)).prop_map(|(p, v, m)| Op::Low(p, v, m)),
        1 => (0..PINS, 0..2u32).prop_map(|(pin, cpu)| Op::High(pin, cpu)),
        3 => (0..2u32).prop_map(Op::Deliver),
        3 => (0..2u32).prop_map(Op::Eoi),
        3 => Just(Op::Take),
    ];
    prop::collection::vec(op, 0..80)
}

/// Applies `op` to the mediated I/O APIC and the root cell above it.
fn step(apic: &mut MediatedIoApic<Chip>, root: &mut Root, op: &Op) {
    match *op {
        Op::Line(pin, up) => apic.hardware.set_line(pin, up),
        Op::Low(pin, vector, masked) => {
            put(apic, index(u8::try_from(pin).unwrap(), Half::Low), low(vector, masked));
        }
        Op::High(pin, cpu) => put(apic, index(u8::try_from(pin).unwrap(), Half::High), cpu << 24),
        Op::Deliver(cpu) => root.deliver(cpu),
        Op::Eoi(cpu) => {
            if let Some((cpu, vector, true)) = root.end(cpu) {
                apic.eoi(vector, cpu);
            }
        }
        Op::Take => root.irr.extend(take(apic)),
    }
}

/// Whether two pins would have the same vector at the same CPU after `op`.
fn shares(entries: &[Entry; PINS], op: &Op) -> bool {
    let mut after = *entries;
    match *op {
        Op::Low(pin, vector, masked) => after[pin] = after[pin].written(Half::Low, low(vector, masked)),
        Op::High(pin, cpu) => after[pin] = after[pin].written(Half::High, cpu << 24),
        _ => {}
    }
    let active = |e: &Entry| e.vector() >= FIRST_VECTOR;
    (0..PINS).any(|a| {
        (0..a).any(|b| {
            let (a, b) = (&after[a], &after[b]);
            active(a) && a.vector() == b.vector() && a.destination() == b.destination()
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// The root cell gets exactly the interrupts that it would get without a hypervisor.
    #[test]
    fn as_without_a_hypervisor(ops in ops()) {
        let mut apic = MediatedIoApic::new(Chip::default());
        let mut root = Root::default();
        let mut reference = Reference::default();
        reference.chip.entries = [Entry::RESET; PINS];
        let mut reference_root = Root::default();
        for op in ops {
            if shares(&reference.chip.entries, &op) {
                continue;
            }
            step(&mut apic, &mut root, &op);
            step(&mut apic, &mut root, &Op::Take);
            match op {
                Op::Line(pin, up) => reference.chip.set_line(pin, up),
                Op::Low(pin, vector, masked) => {
                    let masked = masked || vector < FIRST_VECTOR;
                    reference.write(pin, Half::Low, low(vector, masked));
                }
                Op::High(pin, cpu) => reference.write(pin, Half::High, cpu << 24),
                Op::Deliver(cpu) => reference_root.deliver(cpu),
                Op::Eoi(cpu) => if let Some((cpu, vector, true)) = reference_root.end(cpu) {
                    reference.end(cpu, vector);
                },
                Op::Take => {}
            }
            reference.take(&mut reference_root);
            prop_assert_eq!(&root, &reference_root, "after {:?}", op);
        }
    }

    /// Whenever interrupts arrive and however vectors are shared: nothing is lost, and the
    /// hardware never has an unmasked entry that is not the root's, or held, or refused.
    #[test]
    fn nothing_is_lost(ops in ops()) {
        let mut apic = MediatedIoApic::new(Chip::default());
        let mut root = Root::default();
        for op in ops {
            step(&mut apic, &mut root, &op);
            for (pin, entry) in std::mem::take(&mut apic.hardware.unmasked) {
                prop_assert_eq!(entry, apic.pins[pin].entry, "after {:?}", op);
            }
            for (number, pin) in apic.pins.iter().enumerate() {
                let entry = pin.entry;
                let chip = apic.hardware.entries[number];
                let refused = entry.vector() < FIRST_VECTOR;
                prop_assert_eq!(chip.masked(), entry.masked() || pin.held_for.is_some() || refused);
                if let Some(cpu) = pin.held_for {
                    let interrupt = (cpu, entry.vector(), true);
                    let ends = root.irr.contains(&interrupt) || root.isr.contains(&interrupt);
                    prop_assert!(ends, "after {:?} nobody will end {:?}", op, pin);
                } else if entry.level() && !chip.masked() && apic.hardware.lines[number] {
                    let on_its_way = apic.hardware.sent.iter().any(|s| s.1 == entry.vector());
                    prop_assert!(chip.remote_irr() && on_its_way, "after {:?} lost {:?}", op, pin);
                }
            }
        }
    }
}
