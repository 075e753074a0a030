//! The operations of every design for the rounds.

use super::QueueError;

/// A queue with its worker.
pub(super) trait Design: Sized {
    /// A design's memory for each job from round to round, so that nothing is allocated in one.
    type Job: Send + Sync + 'static;
    /// A producer's own end.
    type Port: Port + 'static;

    /// A job, before its first round.
    fn job() -> Self::Job;

    /// Starts the worker.
    fn start() -> Result<Self, QueueError>;

    /// An end for a producer that will schedule `jobs`.
    fn port(&self, jobs: &'static [Self::Job]) -> Self::Port;

    /// Ends the worker, once all jobs have run. Items a batch, if the design knows.
    fn finish(self) -> Option<f64>;
}

/// The end at which a producer schedules.
pub(super) trait Port: Send {
    /// Schedules job `index` of this producer's; `stamp` goes to [`job`](super::jobs::job).
    fn schedule(&mut self, index: usize, stamp: u64);
}
