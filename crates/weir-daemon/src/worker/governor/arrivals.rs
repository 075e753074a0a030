//! Notices programs that begin to use a card: the kernel reports each opening of the card's device
//! files. So the governor need not poll.

use crate::environment::Clock;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The watch on device files, and an eventfd that ends the wait for arrivals.
#[derive(Clone, Debug)]
pub struct Arrivals {
    opened: Option<Arc<OwnedFd>>,
    end: Arc<OwnedFd>,
}

impl Arrivals {
    /// Watches every card's device files. If the system denies the watch, no arrival of a program
    /// will be reported.
    ///
    /// # Errors
    /// Fails when the system has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Self::watching(&devices())
    }

    fn watching(paths: &[PathBuf]) -> io::Result<Self> {
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK);
        let opened = watch.ok().filter(|watch| {
            !paths.is_empty()
                && paths.iter().all(|path| inotify::add_watch(watch, path, WatchFlags::OPEN).is_ok())
        });
        Ok(Arrivals { opened: opened.map(Arc::new), end })
    }

    /// Whether the watch reports arrivals.
    pub fn are_told(&self) -> bool {
        self.opened.is_some()
    }

    /// Waits for an arrival, for at most this long. Returns whether one came.
    pub fn wait(&self, most: Duration, clock: &dyn Clock) -> bool {
        let end = PollFd::from_borrowed_fd(self.end.as_fd(), PollFlags::IN);
        match &self.opened {
            None => {
                clock.wait(&mut [end], most);
                false
            }
            Some(opened) => {
                let mut fds = [PollFd::from_borrowed_fd(opened.as_fd(), PollFlags::IN), end];
                clock.wait(&mut fds, most);
                !fds[0].revents().is_empty()
            }
        }
    }

    /// Drops the arrivals that have come so far.
    pub fn forget(&self) {
        let mut events = [0; 4096];
        if let Some(opened) = &self.opened {
            while rustix::io::read(opened, &mut events).is_ok_and(|read| read > 0) {}
        }
    }

    /// Ends the wait of the thread that waits for arrivals.
    pub fn end(&self) {
        // An eventfd takes a number of 8 bytes.
        let _ = rustix::io::write(&self.end, &1u64.to_ne_bytes());
    }
}

/// The device files that a program opens before it can use a card.
fn devices() -> Vec<PathBuf> {
    let named = |directory: &str, starts: &'static str| {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        entries
            .filter(move |entry| {
                let name = entry.file_name();
                let rest = name.to_str().and_then(|name| name.strip_prefix(starts));
                rest.is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()) && !rest.is_empty())
            })
            .map(|entry| entry.path())
    };
    named("/dev", "nvidia").chain(named("/dev/dri", "renderD")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::MachineClock;

    #[test]
    fn whoever_opens_a_watched_file_is_told_of_once_and_an_end_ends_the_wait() {
        let file = std::env::temp_dir().join(format!("weir-{}-card", std::process::id()));
        fs::write(&file, "").unwrap();
        let arrivals = Arrivals::watching(std::slice::from_ref(&file)).unwrap();
        if !arrivals.are_told() {
            println!("skipped: no inotify here");
            return;
        }
        assert!(!arrivals.wait(Duration::from_millis(1), &MachineClock));
        drop(fs::File::open(&file).unwrap());
        assert!(arrivals.wait(Duration::from_secs(60), &MachineClock));
        arrivals.forget();
        assert!(!arrivals.wait(Duration::from_millis(1), &MachineClock), "it was told of");
        arrivals.end();
        let begun = std::time::Instant::now();
        assert!(!arrivals.wait(Duration::from_secs(100), &MachineClock));
        assert!(begun.elapsed() < Duration::from_secs(60));
        fs::remove_file(&file).unwrap();
        assert!(!Arrivals::watching(&[file]).unwrap().are_told(), "what is not there cannot be watched");
    }
}
