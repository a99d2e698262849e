//! The virtual local APIC (Intel SDM vol. 3, chapter 11; AMD APM vol. 2, chapter 16).
//!
//! One [`LocalApic`] belongs to one vCPU and is touched only by the CPU that runs it; what
//! other CPUs send arrives by [`Posted`]. It offers xAPIC and x2APIC mode, version 0x14 with
//! six LVT entries, and no EOI-broadcast suppression. What a write does outside is its
//! [`Effect`], for the owner to carry out: this module knows no other CPU.
//!
//! Neighbours: `registers` (layout), `timer` (when it fires), `command` (what ICR sends).
//! All instants are guest TSC ticks.

mod command;
mod registers;
#[cfg(test)]
mod tests;
mod timer;

use super::interrupt::{Destination, InterruptMessage, halves};
use super::posted::Posted;
use crate::memory::address::Gpa;
use command::{Command, Outcome};
use registers::{Page, Register, VectorSet};
pub use timer::BUS_HZ;
use timer::Timer;

/// Version 0x14, highest LVT entry 5.
const VERSION: u32 = 0x0005_0014;
/// Mask bit of an LVT entry.
const MASKED: u32 = 1 << 16;
/// SVR: the APIC is enabled in software.
const SOFTWARE_ENABLED: u32 = 1 << 8;

/// IA32_APIC_BASE: this is the boot CPU.
const BASE_BSP: u64 = 1 << 8;
/// IA32_APIC_BASE: x2APIC mode.
const BASE_EXTD: u64 = 1 << 10;
/// IA32_APIC_BASE: the APIC is enabled.
const BASE_EN: u64 = 1 << 11;
/// IA32_APIC_BASE: the page's address, of at most 52 bits.
const BASE_ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const RESET_ADDRESS: u64 = 0xfee0_0000;

/// Error status bits (Intel SDM vol. 3, 11.5.3).
mod error {
    pub(super) const SEND_ILLEGAL_VECTOR: u32 = 1 << 5;
    pub(super) const RECEIVE_ILLEGAL_VECTOR: u32 = 1 << 6;
    pub(super) const ILLEGAL_REGISTER: u32 = 1 << 7;
}

/// Timer modes, bits 18:17 of the timer's LVT entry.
mod timer_mode {
    pub(super) const PERIODIC: u32 = 1;
    pub(super) const ONE_SHOT: u32 = 0;
    pub(super) const TSC_DEADLINE: u32 = 2;
}

/// The access is the guest's mistake: inject #GP(0).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("#GP(0)")]
pub struct Fault;

/// What a register write does outside of this APIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Effect {
    /// Nothing.
    None,
    /// An interrupt message goes out.
    Send(InterruptMessage),
    /// The vector is no longer in service; the I/O APICs hear of it if `level`.
    Eoi {
        /// The vector that left ISR.
        vector: u8,
        /// Its TMR bit.
        level: bool,
    },
    /// [`LocalApic::publish`] has something new to say.
    IdentityChanged,
}

/// The local APIC of one vCPU.
pub struct LocalApic {
    page: Page,
    requested: VectorSet,
    in_service: VectorSet,
    timer: Timer,
    /// Errors since the last write of ESR.
    errors: u32,
    /// IA32_APIC_BASE.
    base: u64,
    apic_id: u32,
    refused_commands: u64,
}

impl LocalApic {
    /// The state after reset: xAPIC mode at 0xfee00000, disabled in software. `tsc_hz` is
    /// the frequency of the guest's TSC.
    pub fn new(apic_id: u32, bsp: bool, tsc_hz: u64) -> Self {
        let mut apic = Self {
            page: Page::new(),
            requested: VectorSet::new(Register::IRR),
            in_service: VectorSet::new(Register::ISR),
            timer: Timer::new(tsc_hz),
            errors: 0,
            base: RESET_ADDRESS | BASE_EN | if bsp { BASE_BSP } else { 0 },
            apic_id,
            refused_commands: 0,
        };
        apic.init();
        apic
    }

    /// INIT: registers as after reset, IA32_APIC_BASE and with it the mode kept (Intel SDM
    /// vol. 3, 11.4.7.3 and 11.12.5.1). Changes the identity.
    pub fn init(&mut self) {
        self.page.clear();
        self.requested = VectorSet::new(Register::IRR);
        self.in_service = VectorSet::new(Register::ISR);
        self.timer.disarm();
        self.errors = 0;
        self.page.set(Register::VERSION, VERSION);
        self.page.set(Register::DFR, u32::MAX);
        self.page.set(Register::SVR, 0xff);
        for lvt in Register::LVTS {
            self.page.set(lvt, MASKED);
        }
        self.load_id();
    }

    /// Puts the ID, and the logical ID where it derives from it, in the form of the mode.
    fn load_id(&mut self) {
        if self.is_x2apic() {
            self.page.set(Register::ID, self.apic_id);
            // 11.12.10.2: cluster in the upper half, one bit of 16 in the lower.
            self.page.set(Register::LDR, self.apic_id >> 4 << 16 | 1 << (self.apic_id & 0xf));
        } else {
            self.page.set(Register::ID, self.apic_id << 24);
        }
    }

    /// IA32_APIC_BASE.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Writes IA32_APIC_BASE. The BSP bit is read-only (AMD APM vol. 2, 16.3.1). Changes the
    /// identity, and forgets all interrupts when it disables the APIC.
    ///
    /// # Errors
    /// [`Fault`] for reserved bits and for the transitions that the manual forbids (Intel
    /// SDM vol. 3, figure 11-27): x2APIC to xAPIC, disabled to x2APIC, and to the invalid
    /// state.
    pub fn write_base(&mut self, value: u64) -> Result<(), Fault> {
        const MODE: u64 = BASE_EN | BASE_EXTD;
        const X2APIC: u64 = BASE_EN | BASE_EXTD;
        if value & !(BASE_ADDRESS | MODE | BASE_BSP) != 0 {
            return Err(Fault);
        }
        match (self.base & MODE, value & MODE) {
            (_, BASE_EXTD) | (0, X2APIC) | (X2APIC, BASE_EN) => return Err(Fault),
            _ => {}
        }
        let old = self.base;
        self.base = value & !BASE_BSP | old & BASE_BSP;
        if value & MODE == 0 {
            self.init();
        } else if old & MODE != value & MODE {
            self.page.set(Register::ICR_HIGH, 0);
            self.load_id();
        }
        Ok(())
    }

    /// Where the register page is: in xAPIC mode.
    pub fn mmio_base(&self) -> Option<Gpa> {
        (self.is_enabled() && !self.is_x2apic()).then(|| Gpa::new(self.base & BASE_ADDRESS))
    }

    /// Whether there is an APIC at all: IA32_APIC_BASE.EN.
    pub fn is_enabled(&self) -> bool {
        self.base & BASE_EN != 0
    }

    fn is_x2apic(&self) -> bool {
        self.base & BASE_EXTD != 0
    }

    /// Whether fixed interrupts are accepted: SVR.8, and the APIC is enabled at all.
    pub fn is_software_enabled(&self) -> bool {
        self.is_enabled() && self.page.get(Register::SVR) & SOFTWARE_ENABLED != 0
    }

    /// Commands that were not sent because their delivery mode is not offered or not allowed.
    pub fn refused_commands(&self) -> u64 {
        self.refused_commands
    }

    /// Tells `posted` by which messages this vCPU is found. To be called at the start, after
    /// [`Effect::IdentityChanged`], [`Self::init`] and [`Self::write_base`].
    pub fn publish(&self, posted: &Posted) {
        let mut mode = 0;
        if self.page.get(Register::DFR) >> 28 == 0xf {
            mode |= Posted::FLAT;
        }
        if self.is_x2apic() {
            mode |= Posted::X2APIC;
        }
        if self.is_software_enabled() {
            mode |= Posted::ENABLED;
        }
        posted.publish(self.apic_id, self.page.get(Register::LDR), mode);
    }

    // --- The guest's accesses -----------------------------------------------------------

    /// Reads the register at `offset` of the page. Only multiples of 16 are registers; what
    /// is reserved reads as 0 and is an error in ESR.
    pub fn read_mmio(&mut self, offset: u32, now: u64) -> u32 {
        match Register::at_offset(offset).filter(|r| r.in_xapic()) {
            Some(register) => self.read(register, now),
            None => {
                self.log_error(error::ILLEGAL_REGISTER);
                0
            }
        }
    }

    /// Writes the register at `offset` of the page. Reserved bits are ignored.
    pub fn write_mmio(&mut self, offset: u32, value: u32, now: u64) -> Effect {
        match Register::at_offset(offset).filter(|r| r.in_xapic()) {
            Some(Register::ICR_LOW) => {
                self.page.set(Register::ICR_LOW, value & Register::ICR_LOW.writable());
                self.command(value, self.page.get(Register::ICR_HIGH) >> 24)
            }
            Some(register) => self.write(register, value & register.writable(), now),
            None => {
                self.log_error(error::ILLEGAL_REGISTER);
                Effect::None
            }
        }
    }

    /// RDMSR of `msr`, 0x800..=0x8ff.
    ///
    /// # Errors
    /// [`Fault`] outside of x2APIC mode and for what is reserved or write-only.
    pub fn read_msr(&mut self, msr: u32, now: u64) -> Result<u64, Fault> {
        let register = self.msr_register(msr)?;
        if !register.readable_in_x2apic() {
            return Err(Fault);
        }
        let high = if register == Register::ICR_LOW { self.page.get(Register::ICR_HIGH) } else { 0 };
        Ok(u64::from(high) << 32 | u64::from(self.read(register, now)))
    }

    /// WRMSR of `msr`, 0x800..=0x8ff.
    ///
    /// # Errors
    /// [`Fault`] outside of x2APIC mode, for what is reserved or read-only, and for reserved
    /// bits.
    pub fn write_msr(&mut self, msr: u32, value: u64, now: u64) -> Result<Effect, Fault> {
        let register = self.msr_register(msr)?;
        let (high, low) = halves(value);
        if !register.writable_in_x2apic()
            || low & !register.unreserved() != 0
            || (high != 0 && register != Register::ICR_LOW)
        {
            return Err(Fault);
        }
        let low = low & register.writable();
        if register == Register::ICR_LOW {
            self.page.set(Register::ICR_LOW, low);
            self.page.set(Register::ICR_HIGH, high);
            return Ok(self.command(low, high));
        }
        Ok(self.write(register, low, now))
    }

    fn msr_register(&self, msr: u32) -> Result<Register, Fault> {
        if self.is_x2apic() { Register::at_msr(msr).ok_or(Fault) } else { Err(Fault) }
    }

    fn read(&mut self, register: Register, now: u64) -> u32 {
        match register {
            Register::APR => self.arbitration_priority(),
            Register::CURRENT_COUNT => {
                self.poll_timer(now);
                self.timer.current_count(now)
            }
            _ => self.page.get(register),
        }
    }

    /// Writes `value`, whose bits are all writable, but for ICR.
    fn write(&mut self, register: Register, value: u32, now: u64) -> Effect {
        match register {
            Register::TPR => self.store_tpr(value),
            Register::EOI => return self.eoi(),
            Register::LDR => {
                self.page.set(register, value);
                return Effect::IdentityChanged;
            }
            Register::DFR => {
                self.page.set(register, value | 0x0fff_ffff);
                return Effect::IdentityChanged;
            }
            Register::SVR => {
                self.poll_timer(now);
                self.page.set(register, value);
                if value & SOFTWARE_ENABLED == 0 {
                    for lvt in Register::LVTS {
                        self.page.set(lvt, self.page.get(lvt) | MASKED);
                    }
                }
                return Effect::IdentityChanged;
            }
            Register::ESR => {
                self.page.set(register, self.errors);
                self.errors = 0;
            }
            Register::LVT_TIMER => {
                self.poll_timer(now);
                let old = self.timer_mode();
                self.write_lvt(register, value);
                if self.timer_mode() != old {
                    self.timer.disarm();
                    self.page.set(Register::INITIAL_COUNT, 0);
                }
            }
            Register::INITIAL_COUNT => {
                let periodic = match self.timer_mode() {
                    timer_mode::ONE_SHOT => false,
                    timer_mode::PERIODIC => true,
                    _ => return Effect::None,
                };
                self.poll_timer(now);
                self.page.set(register, value);
                let divisor = timer::divisor(self.page.get(Register::DIVIDE));
                self.timer.arm_count(value, divisor, periodic, now);
            }
            Register::DIVIDE => {
                self.poll_timer(now);
                self.page.set(register, value);
                self.timer.set_divisor(timer::divisor(value), now);
            }
            Register::SELF_IPI => return self.command(0x4_0000 | value, 0),
            _ if Register::LVTS.contains(&register) => self.write_lvt(register, value),
            _ if register.writable() != 0 => self.page.set(register, value),
            _ => {}
        }
        Effect::None
    }

    /// Masks cannot be cleared while the APIC is disabled in software (11.4.7.2).
    fn write_lvt(&mut self, register: Register, value: u32) {
        let forced = if self.is_software_enabled() { 0 } else { MASKED };
        self.page.set(register, value | forced);
    }

    fn command(&mut self, low: u32, destination: u32) -> Effect {
        match Command::from_bits(low).outcome(destination, self.is_x2apic()) {
            Outcome::Send(message) if message.destination == Destination::Myself => {
                self.accept(message.vector, false);
                return Effect::None;
            }
            Outcome::Send(message) => return Effect::Send(message),
            Outcome::IllegalVector { to_self } => {
                let receive = if to_self { error::RECEIVE_ILLEGAL_VECTOR } else { 0 };
                self.log_error(error::SEND_ILLEGAL_VECTOR | receive);
            }
            Outcome::Nothing => {}
            Outcome::Refused => self.refused_commands += 1,
        }
        Effect::None
    }

    // --- Priorities ---------------------------------------------------------------------

    /// The task priority register; CR8 is its bits 7:4.
    pub fn tpr(&self) -> u8 {
        self.page.get(Register::TPR).to_le_bytes()[0]
    }

    /// Writes the task priority register; for CR8 give `cr8 << 4`.
    pub fn set_tpr(&mut self, value: u8) {
        self.store_tpr(u32::from(value));
    }

    fn store_tpr(&mut self, value: u32) {
        self.page.set(Register::TPR, value);
        self.update_ppr();
    }

    /// 11.8.3.1: the higher class of TPR and the highest vector in service; TPR's low bits
    /// only when TPR decides.
    fn update_ppr(&mut self) {
        let tpr = self.page.get(Register::TPR);
        let service = u32::from(self.in_service.highest(&self.page).unwrap_or(0));
        let ppr = if tpr >> 4 >= service >> 4 { tpr } else { service & 0xf0 };
        self.page.set(Register::PPR, ppr);
    }

    /// AMD APM vol. 2, 16.6.4.
    fn arbitration_priority(&self) -> u32 {
        let tpr = self.page.get(Register::TPR);
        let class = |v: Option<u8>| u32::from(v.unwrap_or(0)) & 0xf0;
        let requested = class(self.requested.highest(&self.page));
        let service = class(self.in_service.highest(&self.page));
        if tpr & 0xf0 >= requested && tpr & 0xf0 > service {
            tpr
        } else {
            requested.max(tpr & service & 0xf0)
        }
    }

    // --- Interrupts ---------------------------------------------------------------------

    /// An interrupt arrives. Returns whether it was accepted: a level-triggered one that was
    /// not will have no EOI.
    pub fn accept(&mut self, vector: u8, level: bool) -> bool {
        if !self.is_software_enabled() {
            return false;
        }
        if vector < 16 {
            self.log_error(error::RECEIVE_ILLEGAL_VECTOR);
            return false;
        }
        self.page.set_vector(Register::TMR, vector, level);
        self.requested.insert(&mut self.page, vector);
        true
    }

    /// Raises the interrupt of an LVT entry in fixed mode.
    fn raise(&mut self, lvt: Register) {
        let entry = self.page.get(lvt);
        if entry & MASKED == 0 {
            self.accept(entry.to_le_bytes()[0], false);
        }
    }

    /// Notes an error for ESR. The first one since ESR was written raises the error
    /// interrupt, which also ends the recursion for an error vector that is itself illegal.
    fn log_error(&mut self, bits: u32) {
        let first = self.errors == 0;
        self.errors |= bits;
        if first {
            self.raise(Register::LVT_ERROR);
        }
    }

    /// The highest vector in IRR, whatever the priority.
    pub fn highest_requested(&self) -> Option<u8> {
        self.requested.highest(&self.page)
    }

    /// The vector that the CPU would get now if it could take one. What was accepted before the
    /// APIC was disabled in software is still the CPU's to handle and to end (11.4.7.2).
    pub fn deliverable(&self) -> Option<u8> {
        let vector = self.highest_requested()?;
        (u32::from(vector >> 4) > self.page.get(Register::PPR) >> 4).then_some(vector)
    }

    /// The CPU has taken `vector`: from IRR to ISR.
    pub fn acknowledge(&mut self, vector: u8) {
        self.requested.remove(&mut self.page, vector);
        self.in_service.insert(&mut self.page, vector);
        self.update_ppr();
    }

    /// End of interrupt, as a write to EOI: the highest vector leaves ISR.
    pub fn eoi(&mut self) -> Effect {
        let Some(vector) = self.in_service.highest(&self.page) else { return Effect::None };
        self.in_service.remove(&mut self.page, vector);
        self.update_ppr();
        Effect::Eoi { vector, level: self.page.vector(Register::TMR, vector) }
    }

    // --- Timer --------------------------------------------------------------------------

    fn timer_mode(&self) -> u32 {
        self.page.get(Register::LVT_TIMER) >> 17 & 3
    }

    /// IA32_TSC_DEADLINE: 0 when disarmed, after it has fired, and in the other timer modes.
    pub fn tsc_deadline(&self, now: u64) -> u64 {
        self.timer.deadline_register(now)
    }

    /// Writes IA32_TSC_DEADLINE: 0 disarms, a value that has passed fires at once; ignored in
    /// the other timer modes (11.5.4.1).
    pub fn set_tsc_deadline(&mut self, value: u64, now: u64) {
        if self.timer_mode() == timer_mode::TSC_DEADLINE {
            self.poll_timer(now);
            self.timer.arm_deadline(value);
            self.poll_timer(now);
        }
    }

    /// If the timer is due: its interrupt into IRR unless masked; a periodic one goes on.
    pub fn poll_timer(&mut self, now: u64) {
        if self.timer.poll(now) {
            self.raise(Register::LVT_TIMER);
        }
    }

    /// The TSC value at which the timer will raise its interrupt; `None` also while it is
    /// masked.
    pub fn next_deadline(&self) -> Option<u64> {
        if self.page.get(Register::LVT_TIMER) & MASKED == 0 { self.timer.deadline() } else { None }
    }

    /// The guest's TSC was set from `old` to `new`: the count modes keep the time that is
    /// left, as their clock is not the TSC.
    pub fn tsc_jumped(&mut self, old: u64, new: u64) {
        self.poll_timer(old);
        self.timer.tsc_jumped(old, new);
        self.poll_timer(new);
    }
}
