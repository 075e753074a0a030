//! Drives a mover by the machine's clock.

use std::time::Instant;
use weir_core::Rest;
use weir_store::Fault;
use weir_volume::{GiveBackError, Moved, Mover, Sparse, Step, Task};

/// The user of a mover: told of each page that cannot be moved, and of `None` between two steps.
/// It says whether to go on.
pub fn driver<F: FnMut(Option<Fault>) -> bool>(told: F) -> F {
    told
}

pub type Told<'a> = &'a mut dyn FnMut(Option<Fault>) -> bool;

/// A mover's tasks, each driven to its end.
#[allow(dead_code)]
pub trait Driven {
    fn drive(&mut self, task: Task, told: Told<'_>) -> Result<Moved, GiveBackError>;

    fn give_back(&mut self, store: usize, chunk: u32, told: Told<'_>) -> Result<u32, GiveBackError>;

    fn moved_to(&self) -> u32;

    fn finish_give_back(&mut self, store: usize, chunk: u32, told: Told<'_>) -> Result<u32, GiveBackError> {
        Ok(self.drive(Task::GiveBack { store, chunk }, told)?.pages)
    }

    fn move_out(
        &mut self,
        store: usize,
        chunk: u32,
        part: (u32, u32),
        told: Told<'_>,
    ) -> Result<u32, GiveBackError> {
        Ok(self.drive(Task::MoveOut { store, chunk, part }, told)?.pages)
    }

    fn move_up(&mut self, from: usize, next: &mut u32, told: Told<'_>) -> Result<Moved, GiveBackError> {
        let moved = self.drive(Task::MoveUp { from, next: *next }, told);
        *next = self.moved_to();
        moved
    }

    fn compact(
        &mut self,
        store: usize,
        next: &mut u32,
        sparse: Sparse,
        told: Told<'_>,
    ) -> Result<Moved, GiveBackError> {
        let moved = self.drive(Task::Compact { store, next: *next, sparse }, told);
        *next = self.moved_to();
        moved
    }
}

impl Driven for Mover {
    fn drive(&mut self, task: Task, told: Told<'_>) -> Result<Moved, GiveBackError> {
        let mut rest = Rest::default();
        self.begin(task)?;
        loop {
            match self.step(Instant::now()) {
                Step::More { .. } => {
                    rest.end();
                    if !told(None) {
                        self.stop();
                    }
                }
                Step::Waits(..) => rest.until_next(),
                Step::Ended(result) => {
                    self.failed().iter().for_each(|&(_, fault)| {
                        told(Some(fault));
                    });
                    return result;
                }
            }
        }
    }

    fn give_back(&mut self, store: usize, chunk: u32, told: Told<'_>) -> Result<u32, GiveBackError> {
        self.pool().begin_give_back(store, &[chunk])?;
        self.finish_give_back(store, chunk, told)
    }

    fn moved_to(&self) -> u32 {
        self.next()
    }
}
