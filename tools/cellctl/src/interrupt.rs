//! Signals that ask for the end while something is half done.

use crate::exit::{Error, Exit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tells whether the end was asked for. Who puts back what was done does not ask any more, so
/// that this is done to its end.
pub(crate) struct Interrupt {
    asked: Box<dyn Fn() -> bool>,
    released: Arc<AtomicBool>,
}

impl Interrupt {
    /// From now on SIGINT, SIGTERM and SIGHUP are noted and do not end the program.
    pub(crate) fn catch() -> Result<Self, Error> {
        let (asked, released) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register_conditional_default(signal, released.clone())
                .and_then(|_| signal_hook::flag::register(signal, asked.clone()))
                .map_err(|e| Error::new(Exit::Other, format!("signal {signal} cannot be caught: {e}")))?;
        }
        Ok(Self { asked: Box::new(move || asked.load(Ordering::Relaxed)), released })
    }

    /// One that never comes: the signals end the program as ever.
    pub(crate) fn never() -> Self {
        Self { asked: Box::new(|| false), released: Arc::default() }
    }

    /// From now on the signals end the program as ever.
    pub(crate) fn release(&self) {
        self.released.store(true, Ordering::Relaxed);
    }

    /// One that is there when it is looked for the `count`th time, and from then on.
    #[cfg(test)]
    pub(crate) fn after(count: u32) -> Self {
        let left = std::cell::Cell::new(count);
        let asked = move || {
            left.set(left.get().saturating_sub(1));
            left.get() == 0
        };
        Self { asked: Box::new(asked), released: Arc::default() }
    }

    /// Fails when the end was asked for.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if (self.asked)() { Err(Error::new(Exit::Interrupted, "interrupted")) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_noted_and_ends_nothing() {
        let interrupt = Interrupt::catch().unwrap();
        interrupt.check().unwrap();
        signal_hook::low_level::raise(SIGTERM).unwrap();
        assert_eq!(interrupt.check().unwrap_err().exit, Exit::Interrupted);
        assert!(interrupt.check().is_err(), "for good");
    }
}
