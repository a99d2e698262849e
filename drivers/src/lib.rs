//! Drivers for the devices that the hypervisor itself uses.
#![no_std]
