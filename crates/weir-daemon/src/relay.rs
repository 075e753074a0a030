//! A relay for standard error, so that no thread waits for its reader.
//!
//! The reader of the lines, such as a journal, may itself be swapped out to the very device that is
//! down. It would then stand still. A daemon that waits for the reader would never bring the device
//! back. Nor would a keeper that waits for the reader before it starts a daemon. So standard error
//! becomes a pipe, which may be full at worst. One thread, which may wait as long as it must,
//! passes the lines on. A daemon under a keeper writes into its keeper's pipe.

use rustix::pipe::PipeFlags;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

/// Longest wait at the end for the relay to write the last lines.
const PATIENCE: Duration = Duration::from_secs(1);
/// Stack of the relay's thread. It is small because `mlockall` makes all of it resident.
const STACK_BYTES: usize = 64 << 10;

/// A relay at work. Dropping it restores standard error.
pub struct Relay {
    original: OwnedFd,
    ended: Receiver<()>,
}

impl Relay {
    /// Puts a relay before standard error, for this process and the processes that it starts.
    ///
    /// # Errors
    /// Fails with the error of `pipe`, `dup` or `clone`.
    pub fn start() -> io::Result<Self> {
        let original = dup_cloexec(rustix::stdio::stderr())?;
        let mut taker = File::from(original.try_clone()?);
        let (lines, stderr) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        // Only the writing end is non-blocking. The relay's thread waits at the reading end.
        rustix::io::ioctl_fionbio(&stderr, true)?;
        let (tell, ended) = channel();
        let mut lines = File::from(lines);
        thread::Builder::new().name("weir-log".into()).stack_size(STACK_BYTES).spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = lines.read(&mut buffer) {
                // A line that standard error does not take is lost.
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
        // This restores standard error, and so closes this process's writing end of the pipe. The
        // relay's thread ends once no process has a writing end any more. A child may still have
        // one, so do not wait for ever.
        let _ = rustix::stdio::dup2_stderr(&self.original);
        let _ = self.ended.recv_timeout(PATIENCE);
    }
}

fn dup_cloexec(fd: impl std::os::fd::AsFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, 3)?)
}
