//! What a vector that comes to the hypervisor is: interrupt or exception, and whose.
//!
//! Any vector can come as an interrupt: without remapping, a device can be made to send any
//! message, and an 8259 gives whatever it was set up for. An interrupt must not be taken for
//! an exception, which would stop the node; so a vector is an exception only if nothing says
//! that it is none.

/// Vectors of the hypervisor's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnVectors {
    /// The local APIC's timer.
    pub timer: u8,
    /// Another CPU has put something into this one's mailbox.
    pub kick: u8,
    /// The local APIC's spurious interrupts.
    pub spurious: u8,
}

/// From here on vectors are those of devices, which are the root cell's.
pub const FIRST_DEVICE_VECTOR: u8 = 0x20;

/// What has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// A non-maskable interrupt.
    Nmi,
    /// The timer, to be ended.
    Timer,
    /// A kick, to be ended.
    Kick,
    /// The local APIC had nothing to give after all. Not to be ended.
    Spurious,
    /// A device's interrupt.
    Device,
    /// INIT, made an exception by `VM_CR.R_INIT`.
    Init,
    /// An interrupt that nobody of ours sends.
    Stray {
        /// The local APIC has it in service: it is to be ended.
        end: bool,
    },
    /// An exception of the hypervisor.
    Exception,
}

const NMI: u8 = 2;
/// #SX, security exception; its error code 1 means INIT (AMD APM vol. 2, 15.28).
const SECURITY: u8 = 30;
const SECURITY_INIT: u64 = 1;

/// Whether the exception with this vector has an error code (AMD APM vol. 2, table 8-1).
const fn has_error_code(vector: u8) -> bool {
    matches!(vector, 8 | 10..=14 | 17 | 21 | 29 | 30)
}

/// Whether no exception has this vector. Those that 64-bit CPUs reserve count as
/// exceptions: a new one must not go unseen.
const fn never_an_exception(vector: u8) -> bool {
    // 9 is the coprocessor's of the 80386, 15 an 8259's spurious one as firmware sets it up;
    // the rest are between the last exceptions, where the hypervisor has its own.
    matches!(vector, 9 | 15 | 22..=27 | 31)
}

/// Tells what `vector` is. `error_code` is what the CPU has pushed; `in_service` asks the
/// local APIC whether its ISR bit of the vector is set, as it is for every interrupt but NMIs,
/// spurious ones and those that came from an 8259 (AMD APM vol. 2, 16.6.3 and 16.5), and for
/// no exception.
pub fn classify(
    vector: u8,
    error_code: Option<u64>,
    own: OwnVectors,
    in_service: impl FnOnce() -> bool,
) -> Arrival {
    match vector {
        // Hints: to end one that did not come from the APIC does no harm here.
        _ if vector == own.timer => Arrival::Timer,
        _ if vector == own.kick => Arrival::Kick,
        FIRST_DEVICE_VECTOR.. => {
            if in_service() {
                Arrival::Device
            } else {
                Arrival::Stray { end: false }
            }
        }
        _ if in_service() => Arrival::Stray { end: true },
        NMI => Arrival::Nmi,
        SECURITY if error_code == Some(SECURITY_INIT) => Arrival::Init,
        _ if vector == own.spurious => Arrival::Spurious,
        _ if never_an_exception(vector) || has_error_code(vector) && error_code.is_none() => {
            Arrival::Stray { end: false }
        }
        _ => Arrival::Exception,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: OwnVectors = OwnVectors { timer: 0x18, kick: 0x19, spurious: 0x1f };

    fn interrupt(vector: u8) -> Arrival {
        classify(vector, None, OWN, || true)
    }

    fn not_in_service(vector: u8, error_code: Option<u64>) -> Arrival {
        classify(vector, error_code, OWN, || false)
    }

    #[test]
    fn no_interrupt_is_an_exception() {
        for vector in 0..=u8::MAX {
            let want = match vector {
                0x18 => Arrival::Timer,
                0x19 => Arrival::Kick,
                0x20.. => Arrival::Device,
                _ => Arrival::Stray { end: true },
            };
            assert_eq!(interrupt(vector), want, "{vector:#x}");
        }
    }

    #[test]
    fn exceptions_stay_exceptions() {
        // AMD APM vol. 2, table 8-1, with the error codes that come along.
        for vector in [0, 1, 3, 4, 5, 6, 7, 16, 18, 19, 20, 28] {
            assert_eq!(not_in_service(vector, None), Arrival::Exception, "{vector}");
        }
        for vector in [8, 10, 11, 12, 13, 14, 17, 21, 29, 30] {
            for code in [0, 2, 0x1_0008] {
                assert_eq!(not_in_service(vector, Some(code)), Arrival::Exception, "{vector}");
            }
        }
    }

    #[test]
    fn an_8259s_interrupt_is_no_exception_where_the_stack_tells() {
        for vector in [8, 9, 10, 11, 12, 13, 14, 15, 17, 21, 22, 26, 27, 29, 30, 0x20, 0xff] {
            assert_eq!(not_in_service(vector, None), Arrival::Stray { end: false }, "{vector}");
        }
    }

    #[test]
    fn what_the_machine_itself_sends() {
        assert_eq!(not_in_service(2, None), Arrival::Nmi);
        assert_eq!(not_in_service(0x1f, None), Arrival::Spurious);
        assert_eq!(not_in_service(30, Some(1)), Arrival::Init);
    }

    #[test]
    fn hints_do_not_ask_the_apic() {
        for (vector, arrival) in [(0x18, Arrival::Timer), (0x19, Arrival::Kick)] {
            assert_eq!(classify(vector, None, OWN, || panic!("asked")), arrival);
        }
    }
}
