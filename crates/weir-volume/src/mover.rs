//! A mover, by which a worker moves pages, and the mover's driver.
//!
//! A mover runs for milliseconds to seconds, and waits for stores and for other lanes. It neither
//! sleeps nor reads a clock: its [`Driver`] tells the time, and rests between two looks.

use crate::give_back::LANES_WAIT;
use crate::{GiveBackError, Lane, Volume};
use std::sync::Arc;
use std::time::Instant;
use weir_store::{Done, Fault};

/// The questions of a [`Mover`] to its user.
pub trait Driver {
    /// The time now.
    fn now(&mut self) -> Instant;

    /// Takes the pages `moved` by a batch. Returns false to stop the move.
    fn goes_on(&mut self, moved: u32) -> bool;

    /// Reports a page that could not be moved, and stays in its slot.
    fn failed(&mut self, _fault: Fault) {}

    /// Rests between two looks, when the mover can do nothing until `awaited` happens.
    fn rest(&mut self, awaited: Awaited);
}

/// The event that a [`Mover`] waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Awaited {
    /// Answers of stores, which take microseconds to milliseconds.
    Stores,
    /// Other lanes that are within a batch, mostly for microseconds.
    Lanes,
    /// Programs that use pages in place. They may take as long as they like, and each look goes
    /// through the whole chunk.
    Loans,
}

/// A mover: a lane that moves pages, [`Config::depth`](crate::Config::depth) of them at a time. It
/// gives memory back, takes it again, promotes pages and compacts packs.
pub struct Mover {
    pub(crate) lane: Lane,
}

impl Mover {
    /// The volume whose pages the mover moves.
    pub fn volume(&self) -> &Arc<Volume> {
        self.lane.volume()
    }

    /// Abandons the mover as [`Lane::abandon`] does.
    pub fn abandon(self) {
        self.lane.abandon();
    }

    /// Waits until nothing is in flight, and hands each completion to `each`.
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
