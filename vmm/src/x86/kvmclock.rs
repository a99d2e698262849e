//! The KVM paravirtual clock.
