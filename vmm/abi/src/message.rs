//! Management messages between `cellctl` and the hypervisor.
