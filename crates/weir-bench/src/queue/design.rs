//! The interface of all designs, for the rounds.

use super::QueueError;

/// A queue with its worker.
pub(super) trait Design: Sized {
    /// A design's memory for each job. It is kept from round to round, so that a round allocates
    /// nothing.
    type Job: Send + Sync + 'static;
    /// A producer's end of the queue.
    type Port: Port + 'static;

    /// Makes a job, before its first round.
    fn job() -> Self::Job;

    /// Starts the worker.
    fn start() -> Result<Self, QueueError>;

    /// Makes the end of the queue at which one producer schedules `jobs`.
    fn port(&self, jobs: &'static [Self::Job]) -> Self::Port;

    /// Ends the worker, once all jobs have run. Returns the number of items in a batch, if the
    /// design knows it.
    fn finish(self) -> Option<f64>;
}

/// The end at which a producer schedules.
pub(super) trait Port: Send {
    /// Schedules this producer's job `index`; `stamp` is passed to [`job`](super::jobs::job).
    fn schedule(&mut self, index: usize, stamp: u64);
}
