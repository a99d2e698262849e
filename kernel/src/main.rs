//! The Bulkhead hypervisor image.
#![no_std]
#![no_main]
