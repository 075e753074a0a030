//! The interface of all designs, by which a round of the benchmark runs its jobs.

use super::QueueError;

/// A design: a queue with the worker that runs its jobs.
pub(super) trait Design: Sized {
    /// A design's memory for each job. It is kept from round to round, so that a round allocates
    /// nothing.
    type Job: Send + Sync + 'static;
    /// The end of the queue at which one producer schedules jobs.
    type Port: Port + 'static;

    /// Makes a job that was not scheduled yet.
    fn job() -> Self::Job;

    /// Starts the queue's worker.
    fn start() -> Result<Self, QueueError>;

    /// Makes the end of the queue at which one producer schedules `jobs`.
    fn port(&self, jobs: &'static [Self::Job]) -> Self::Port;

    /// Ends the worker, once all jobs have run. Returns the number of items in a batch, if the
    /// design knows it.
    fn finish(self) -> Option<f64>;
}

/// The end of a queue at which one producer schedules jobs.
pub(super) trait Port: Send {
    /// Schedules this producer's job `index`; `stamp` is passed to [`job`](super::jobs::job).
    fn schedule(&mut self, index: usize, stamp: u64);
}
