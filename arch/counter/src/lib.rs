//! One safe function that reads the CPU's counter.
#![no_std]
