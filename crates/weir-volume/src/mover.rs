//! The tool by which a worker moves pages, and its driver.
//!
//! A mover takes milliseconds to seconds, and waits for stores and for other lanes. It neither
//! sleeps nor reads a clock for that: its [`Driver`] says what time it is and rests between two
//! looks.

use crate::give_back::LANES_WAIT;
use crate::{GiveBackError, Lane, Volume};
use std::sync::Arc;
use std::time::Instant;
use weir_store::{Done, Fault};

/// The questions of a [`Mover`] to its user.
pub trait Driver {
    /// The time.
    fn now(&mut self) -> Instant;

    /// A batch has `moved` so many pages. By false the work ends.
    fn goes_on(&mut self, moved: u32) -> bool;

    /// A page could not be moved, and stays where it is.
    fn failed(&mut self, _fault: Fault) {}

    /// The mover has found nothing to go on with. Called between two looks.
    fn rest(&mut self, awaited: Awaited);
}

/// The event that a [`Mover`] waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Awaited {
    /// Answers of stores: microseconds to milliseconds.
    Stores,
    /// Other lanes, which are within a batch: mostly microseconds.
    Lanes,
    /// Programs that use pages in place. They may take as long as they like, and each look goes
    /// through a chunk.
    Loans,
}

/// A lane that moves pages, as many at a time as [`Config::depth`](crate::Config::depth) says:
/// gives memory back, takes it again, brings pages up and together.
pub struct Mover {
    pub(crate) lane: Lane,
}

impl Mover {
    /// The volume whose pages it moves.
    pub fn volume(&self) -> &Arc<Volume> {
        self.lane.volume()
    }

    /// Gives the mover up as [`Lane::abandon`] does.
    pub fn abandon(self) {
        self.lane.abandon();
    }

    /// Has everything end that is in flight, and hands it to `each`.
    pub(crate) fn drain(
        &mut self,
        driver: &mut dyn Driver,
        each: &mut dyn FnMut(&mut dyn Driver, Done<'_>),
    ) -> Result<(), GiveBackError> {
        let began = driver.now();
        while self.lane.in_flight() > 0 {
            self.lane.submit();
            let now = driver.now();
            self.lane.poll(now, &mut |done| each(driver, done));
            if now > began + LANES_WAIT {
                return Err(GiveBackError::Busy);
            }
            if self.lane.in_flight() > 0 {
                driver.rest(Awaited::Stores);
            }
        }
        Ok(())
    }
}
