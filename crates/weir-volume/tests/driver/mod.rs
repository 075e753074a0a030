//! Drives a mover by the machine's clock.

use std::time::Instant;
use weir_core::Rest;
use weir_store::Fault;
use weir_volume::{Awaited, Driver};

pub struct Driven<F> {
    told: F,
    rest: Rest,
}

/// Calls `told` for each page that cannot be moved, and with `None` between two batches. It says
/// whether to go on.
pub fn driver<F: FnMut(Option<Fault>) -> bool>(told: F) -> Driven<F> {
    Driven { told, rest: Rest::default() }
}

impl<F: FnMut(Option<Fault>) -> bool> Driver for Driven<F> {
    fn now(&mut self) -> Instant {
        Instant::now()
    }

    fn goes_on(&mut self, _moved: u32) -> bool {
        self.rest.end();
        (self.told)(None)
    }

    fn failed(&mut self, fault: Fault) {
        (self.told)(Some(fault));
    }

    fn rest(&mut self, _awaited: Awaited) {
        self.rest.until_next();
    }
}
