//! Standard error that nobody waits for.
//!
//! The reader of the lines, a journal that was swapped out or a file on tmpfs that was,
//! may stand still while the device that it was swapped out to is down; and a daemon, or a keeper
//! on its way to starting one, that waits for it never brings that device back. So standard error
//! becomes a pipe that is full at worst, and one thread, which may wait as long as it has to,
//! carries the lines on. A daemon under a keeper writes into its keeper's pipe.

use rustix::pipe::PipeFlags;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

/// How long to wait for the last lines to be taken.
const PATIENCE: Duration = Duration::from_secs(1);
/// Stack of the thread; with `mlockall` all of it is resident.
const STACK_BYTES: usize = 64 << 10;

/// A relay at work. Dropping it makes standard error what it was.
pub struct Relay {
    original: OwnedFd,
    ended: Receiver<()>,
}

impl Relay {
    /// Puts itself before standard error, of this process and of those that it starts.
    ///
    /// # Errors
    /// What `pipe` or `dup` say, or `clone`.
    pub fn start() -> io::Result<Self> {
        let original = dup_cloexec(rustix::stdio::stderr())?;
        let mut taker = File::from(original.try_clone()?);
        let (lines, stderr) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        // Of the writing end alone: who reads waits for lines.
        rustix::io::ioctl_fionbio(&stderr, true)?;
        let (tell, ended) = channel();
        let mut lines = File::from(lines);
        thread::Builder::new().name("weir-log".into()).stack_size(STACK_BYTES).spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = lines.read(&mut buffer) {
                // Lines that nobody takes are lost, not kept.
                let _ = taker.write_all(&buffer[..read]);
            }
            let _ = tell.send(());
        })?;
        rustix::stdio::dup2_stderr(&stderr)?;
        Ok(Relay { original, ended })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // The pipe's writing end closes with this, if no child has it still.
        let _ = rustix::stdio::dup2_stderr(&self.original);
        let _ = self.ended.recv_timeout(PATIENCE);
    }
}

fn dup_cloexec(fd: impl std::os::fd::AsFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, 3)?)
}
