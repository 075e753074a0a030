//! The progress of a daemon's start, and a way to end the start early. A start takes up to two
//! seconds for each GiB of memory that is taken, and of a file that is filled in advance.

use std::fmt::Display;
use std::io;
use weir_core::log::{Level, Log};
use weir_core::{ByteSize, unlocked};

/// A callback that shows the progress of opening one store. It gets the number of bytes done, and
/// of all bytes, and is dropped at the end.
pub type Bar = Box<dyn FnMut(u64, u64)>;

/// Shows the progress of a start, and ends the start when a signal asks for that.
pub struct Start<'a> {
    /// Begins to show the progress of opening a store. Gets the store's name.
    show: Box<dyn Fn(String) -> Bar + 'a>,
    /// Returns the signal that has come, if there is one.
    told: Box<dyn FnMut() -> Option<i32> + 'a>,
    ended_by: Option<i32>,
}

impl<'a> Start<'a> {
    /// Makes a start that ends early when `told` returns a signal.
    pub fn new(show: impl Fn(String) -> Bar + 'a, told: impl FnMut() -> Option<i32> + 'a) -> Self {
        Start { show: Box::new(show), told: Box::new(told), ended_by: None }
    }

    /// Makes a start that shows nothing and cannot be ended early.
    pub fn silent() -> Self {
        Start::new(|_| Box::new(|_, _| ()), || None)
    }

    /// The signal that ended the start.
    pub fn ended_by(&self) -> Option<i32> {
        self.ended_by
    }

    /// Returns a callback that takes the progress of `what`.
    pub fn watch(&mut self, what: &dyn Display) -> impl FnMut(u64, u64) -> io::Result<()> {
        let mut shown = (self.show)(what.to_string());
        move |done, all| {
            self.ended_by = self.ended_by.or_else(&mut self.told);
            if self.ended_by.is_some() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            shown(done, all);
            Ok(())
        }
    }
}

/// Warns once if the system keeps this process from locking some memory, and says how much.
pub fn warn_of_unlocked_memory(log: &Log) {
    let bytes = unlocked();
    if bytes > 0 {
        log(
            Level::Warning,
            format_args!(
                "{} of memory is not locked, so the system may write pages to its swap in the clear: raise RLIMIT_MEMLOCK (ulimit -l unlimited; systemd: LimitMEMLOCK=infinity), or grant CAP_IPC_LOCK",
                ByteSize(bytes)
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_ends_by_the_signal_that_comes_and_stays_ended() {
        let mut signals = vec![None, Some(15), None].into_iter();
        let mut start = Start::new(|_| Box::new(|_, _| ()), move || signals.next()?);
        let mut watch = start.watch(&"host:1GiB");
        assert!(watch(1, 3).is_ok());
        assert_eq!(
            [watch(2, 3), watch(3, 3)].map(|end| end.map_err(|error| error.kind())),
            [Err(io::ErrorKind::Interrupted); 2]
        );
        drop(watch);
        assert_eq!(start.ended_by(), Some(15));
    }
}
