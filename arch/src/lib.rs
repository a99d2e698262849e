//! Mechanisms: everything that needs privileged instructions, behind safe traits.
#![no_std]
