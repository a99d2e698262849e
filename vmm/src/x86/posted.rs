//! What other CPUs may post to a vCPU.
//!
//! A vCPU's local APIC is touched only by the CPU that runs it. Everybody else posts here,
//! with atomics alone, and then kicks that CPU; the owner takes what was posted right
//! before it enters the guest. The order is: poster sets a bit, then kicks; owner clears
//! interrupts, then takes the bits, then enters.

use super::interrupt::Destination;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Events other than vectors, as bits of one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Events(u32);

impl Events {
    /// A non-maskable interrupt.
    pub const NMI: Self = Self(1 << 8);
    /// INIT: to the state of table "after INIT", then wait for start-up.
    pub const INIT: Self = Self(1 << 9);
    /// Start-up with the vector in bits 7:0.
    pub const STARTUP: Self = Self(1 << 10);

    /// Whether all of `other` is in here.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether nothing was posted.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The start-up vector, if start-up was posted.
    pub const fn startup_vector(self) -> Option<u8> {
        if self.contains(Self::STARTUP) { Some((self.0 & 0xff) as u8) } else { None }
    }
}

/// How an APIC in xAPIC mode is found by logical destinations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogicalId {
    /// LDR, the ID in bits 31:24.
    pub ldr: u32,
    /// DFR: the flat model, else that of clusters.
    pub flat: bool,
}

impl LogicalId {
    /// Found by none.
    pub const NONE: Self = Self { ldr: 0, flat: true };

    /// Whether an APIC in x2APIC mode, whose own logical ID follows from its `apic_id`, is found
    /// by the same logical destinations of 8 bits, which are all that devices can send without
    /// remapping: they are those of cluster 0 (Intel SDM vol. 3, 11.12.10.2).
    pub const fn is_that_of_x2apic(self, apic_id: u32) -> bool {
        let derived = if apic_id < 8 { 1 << apic_id } else { 0 };
        self.flat && self.ldr >> 24 == derived
    }
}

/// What others see of a vCPU's APIC and what they have posted to it.
#[derive(Debug, Default)]
pub struct Posted {
    /// Vectors that arrived, as the posted-interrupt requests of the manuals.
    vectors: [AtomicU64; 4],
    /// Which of them are level-triggered.
    levels: [AtomicU64; 4],
    events: AtomicU32,
    /// The x2APIC or xAPIC ID, for matching.
    apic_id: AtomicU32,
    /// LDR as a 32-bit register.
    logical_id: AtomicU32,
    /// Bits of [`Self::FLAT`], [`Self::X2APIC`], [`Self::ENABLED`].
    mode: AtomicU32,
}

impl Posted {
    /// DFR says flat (xAPIC only).
    pub const FLAT: u32 = 1;
    /// The APIC is in x2APIC mode.
    pub const X2APIC: u32 = 2;
    /// The APIC is enabled in software (SVR.8).
    pub const ENABLED: u32 = 4;

    /// A vCPU with nothing posted and the ID `apic_id`.
    pub fn new(apic_id: u32) -> Self {
        let posted = Self::default();
        posted.apic_id.store(apic_id, Ordering::Relaxed);
        posted.mode.store(Self::FLAT, Ordering::Relaxed);
        posted
    }

    /// Posts `vector`.
    pub fn post_vector(&self, vector: u8, level: bool) {
        let (word, bit) = (usize::from(vector >> 6), 1u64 << (vector & 63));
        if level {
            self.levels[word].fetch_or(bit, Ordering::Relaxed);
        } else {
            self.levels[word].fetch_and(!bit, Ordering::Relaxed);
        }
        self.vectors[word].fetch_or(bit, Ordering::Release);
    }

    /// Posts an NMI.
    pub fn post_nmi(&self) {
        self.events.fetch_or(Events::NMI.0, Ordering::Release);
    }

    /// Posts INIT. A start-up posted before it is void.
    pub fn post_init(&self) {
        let _ = self.events.fetch_update(Ordering::Release, Ordering::Relaxed, |e| {
            Some((e & !(Events::STARTUP.0 | 0xff)) | Events::INIT.0)
        });
    }

    /// Posts start-up at `vector`. The first one after an INIT counts, as the receiver
    /// ignores further ones.
    pub fn post_startup(&self, vector: u8) {
        let _ = self.events.fetch_update(Ordering::Release, Ordering::Relaxed, |e| {
            (e & Events::STARTUP.0 == 0).then_some((e & !0xff) | Events::STARTUP.0 | u32::from(vector))
        });
    }

    /// Whether anything waits to be taken.
    pub fn is_pending(&self) -> bool {
        self.events.load(Ordering::Acquire) != 0
            || self.vectors.iter().any(|w| w.load(Ordering::Acquire) != 0)
    }

    /// Forgets all that was posted: for when the CPU that owned the vCPU has left it.
    pub fn clear(&self) {
        self.take_vectors(|_, _| {});
        self.take_events();
    }

    /// Takes the events. Only the owner calls it, or who is sure that there is none.
    pub fn take_events(&self) -> Events {
        if self.events.load(Ordering::Relaxed) == 0 {
            return Events(0);
        }
        Events(self.events.swap(0, Ordering::Acquire))
    }

    /// Takes the vectors and calls `accept(vector, level)` for each. Only the owner
    /// calls it, or who is sure that there is none.
    pub fn take_vectors(&self, mut accept: impl FnMut(u8, bool)) {
        for (index, word) in (0u8..4).zip(&self.vectors) {
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = word.swap(0, Ordering::Acquire);
            let levels = self.levels[usize::from(index)].load(Ordering::Relaxed);
            while bits != 0 {
                #[expect(clippy::cast_possible_truncation, reason = "a bit number of u64 is below 64")]
                let bit = bits.trailing_zeros() as u8;
                bits &= bits - 1;
                accept(index * 64 + bit, levels >> bit & 1 != 0);
            }
        }
    }

    /// Publishes the identity by which messages find this vCPU. Only the owner calls it,
    /// after every change of APIC ID, LDR, DFR, SVR or mode. `mode` is made of the
    /// constants of this type.
    pub fn publish(&self, apic_id: u32, logical_id: u32, mode: u32) {
        self.apic_id.store(apic_id, Ordering::Relaxed);
        self.logical_id.store(logical_id, Ordering::Relaxed);
        self.mode.store(mode, Ordering::Release);
    }

    /// The APIC ID last published.
    pub fn apic_id(&self) -> u32 {
        self.apic_id.load(Ordering::Relaxed)
    }

    /// Whether the APIC is enabled in software (SVR.8).
    pub fn is_enabled(&self) -> bool {
        self.mode.load(Ordering::Acquire) & Self::ENABLED != 0
    }

    /// The logical ID last published, as the machine's APIC must have it for its devices'
    /// messages to find this vCPU.
    pub fn logical_id(&self) -> LogicalId {
        let mode = self.mode.load(Ordering::Acquire);
        if mode & Self::X2APIC != 0 {
            return LogicalId::NONE;
        }
        LogicalId { ldr: self.logical_id.load(Ordering::Relaxed), flat: mode & Self::FLAT != 0 }
    }

    /// Whether a message to `destination` is for this vCPU; `is_sender` for the shorthands
    /// (Intel SDM vol. 3, 11.6.2; x2APIC logical IDs 11.12.10.2).
    pub fn matches(&self, destination: Destination, is_sender: bool) -> bool {
        let mode = self.mode.load(Ordering::Acquire);
        let x2apic = mode & Self::X2APIC != 0;
        match destination {
            Destination::Myself => is_sender,
            Destination::All => true,
            Destination::Others => !is_sender,
            Destination::Physical(id) => id == self.apic_id() || id == u32::MAX || (id == 0xff && !x2apic),
            Destination::Logical(id) => {
                let own = self.logical_id.load(Ordering::Relaxed);
                if x2apic {
                    id == u32::MAX || (id >> 16 == own >> 16 && id & own & 0xffff != 0)
                } else {
                    let own = own >> 24;
                    if mode & Self::FLAT != 0 {
                        id & own & 0xff != 0
                    } else {
                        // Cluster model: 0xf in the high nibble addresses all clusters.
                        let cluster = id >> 4 & 0xf;
                        (cluster == 0xf || cluster == own >> 4) && id & own & 0xf != 0
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn what_is_posted_is_taken_once() {
        let p = Posted::new(3);
        p.post_vector(0x31, false);
        p.post_vector(0xfe, true);
        assert!(p.is_pending());
        let mut got = Vec::new();
        p.take_vectors(|v, l| got.push((v, l)));
        assert_eq!(got, [(0x31, false), (0xfe, true)]);
        assert!(!p.is_pending());
        p.take_vectors(|_, _| panic!("taken twice"));
    }

    #[test]
    fn init_voids_startup_and_first_startup_counts() {
        let p = Posted::new(0);
        p.post_startup(0x10);
        p.post_init();
        p.post_startup(0x99);
        p.post_startup(0x11);
        let events = p.take_events();
        assert!(events.contains(Events::INIT));
        assert_eq!(events.startup_vector(), Some(0x99));
        assert!(p.take_events().is_empty());
    }

    #[test]
    fn destinations() {
        let p = Posted::new(5);
        p.publish(5, 0x2000_0000, Posted::FLAT);
        assert!(p.matches(Destination::Physical(5), false));
        assert!(p.matches(Destination::Physical(0xff), false));
        assert!(!p.matches(Destination::Physical(4), false));
        assert!(p.matches(Destination::Logical(0x30), false));
        assert!(!p.matches(Destination::Logical(0x10), false));
        p.publish(5, 0x2200_0000, 0);
        assert!(p.matches(Destination::Logical(0x22), false));
        assert!(p.matches(Destination::Logical(0xf2), false));
        assert!(!p.matches(Destination::Logical(0x32), false));
        p.publish(0x25, 0x0002_0020, Posted::X2APIC);
        assert!(p.matches(Destination::Logical(0x0002_0030), false));
        assert!(!p.matches(Destination::Logical(0x0001_0020), false));
        assert!(!p.matches(Destination::Physical(0xff), false));
        assert!(p.matches(Destination::Physical(u32::MAX), false));
        assert!(p.matches(Destination::Others, false) && !p.matches(Destination::Others, true));
    }

    #[test]
    fn the_machine_is_told_the_logical_id_of_xapic_mode_alone() {
        let p = Posted::new(5);
        p.publish(5, 0x2000_0000, Posted::FLAT);
        assert_eq!(p.logical_id(), LogicalId { ldr: 0x2000_0000, flat: true });
        p.publish(5, 0x2200_0000, Posted::ENABLED);
        assert_eq!(p.logical_id(), LogicalId { ldr: 0x2200_0000, flat: false });
        p.publish(5, 0x20, Posted::X2APIC | Posted::FLAT);
        assert_eq!(p.logical_id(), LogicalId::NONE);
    }

    #[test]
    fn an_x2apic_is_found_where_the_logical_id_is_a_bit_for_its_own_id() {
        // Against what an APIC in each of the modes answers to.
        for apic_id in [0, 3, 7, 8, 19] {
            let x2apic = Posted::new(apic_id);
            x2apic.publish(apic_id, apic_id >> 4 << 16 | 1 << (apic_id & 0xf), Posted::X2APIC);
            for ldr in 0..=0xff {
                for mode in [0, Posted::FLAT] {
                    let xapic = Posted::new(apic_id);
                    xapic.publish(apic_id, ldr << 24, mode);
                    let same = (0..0x100).all(|destination| {
                        let to = Destination::Logical(destination);
                        xapic.matches(to, false) == x2apic.matches(to, false)
                    });
                    // A cluster's ID of 0 happens to be found by none, too, or by 0x0n alone.
                    if mode == Posted::FLAT {
                        assert_eq!(xapic.logical_id().is_that_of_x2apic(apic_id), same, "{apic_id} {ldr:#x}");
                    } else {
                        assert!(!xapic.logical_id().is_that_of_x2apic(apic_id));
                    }
                }
            }
        }
    }
}
