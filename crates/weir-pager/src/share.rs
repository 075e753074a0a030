//! A store over the share transport: a daemon keeps the pages in its stores.
//!
//! The daemon may die. Then the store waits for the next daemon, which has every page that the dead
//! one had acknowledged. The store sends the writes that were under way again, and begins a read
//! anew. It waits only for as long as `weir run` promises another daemon, and not for ever.

use crate::{BLOCK_PAGES, Ledger, Store};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use weir_core::PageBytes;
use weir_share::{Client, Error, Lease, Options};

/// Number of the share connection's frames that are used for writes.
const WRITE_FRAMES: usize = 128;
/// Number of queued writes after which the daemon is told, so that it writes while more pages are
/// copied.
const SUBMIT_EVERY: usize = 16;
/// Longest wait for the next daemon.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time that the wait for the next daemon may take before a line reports it.
const SAY_AFTER: Duration = Duration::from_secs(1);
/// Pause before the next attempt to connect.
const PAUSE: Duration = Duration::from_millis(2);

/// A connection to a daemon.
pub(crate) trait Connection: fmt::Debug + Sized {
    /// A frame or a page that this end holds.
    type Lease: fmt::Debug;

    fn pages(&self) -> u64;
    fn frames(&self) -> u32;
    fn in_flight(&self) -> u32;
    fn ask_frame(&mut self, tag: u32) -> Result<(), Error>;
    fn ask_read(&mut self, tag: u32, page: u64) -> Result<(), Error>;
    fn ask_write(&mut self, tag: u32, page: u64, lease: &Self::Lease) -> Result<(), Error>;
    fn submit(&mut self) -> Result<(), Error>;
    fn wait(&mut self) -> Result<Ended<Self::Lease>, Error>;
    fn wait_for(&mut self, longest: Duration) -> Result<Ended<Self::Lease>, Error>;
    fn page(&self, lease: &Self::Lease) -> &PageBytes;
    fn page_mut(&mut self, lease: &mut Self::Lease) -> Option<&mut PageBytes>;
    fn give_later(&mut self, lease: Self::Lease) -> Result<(), Error>;
}

/// A request that has ended: its tag, and its result.
pub(crate) type Ended<L> = (u32, io::Result<Option<L>>);

/// The run that a process belongs to: its daemons, one at a time, and its ledger.
pub(crate) trait Run {
    type Connection: Connection;

    /// Connects to the present daemon. Each wait for it takes this long at most.
    fn connect(&mut self, longest: Duration) -> Result<Self::Connection, Error>;

    /// Whether another daemon comes if the present one dies.
    fn is_promised(&self) -> bool;

    /// Claims a block whose number is below `limit`.
    fn claim(&mut self, limit: usize) -> Option<usize>;

    fn release(&mut self, block: usize);

    fn now(&self) -> Duration;

    /// Waits for [`PAUSE`].
    fn pause(&mut self);

    fn tell(&mut self, line: &str);
}

impl Connection for Client {
    type Lease = Lease;

    fn pages(&self) -> u64 {
        self.pages()
    }

    fn frames(&self) -> u32 {
        self.frames()
    }

    fn in_flight(&self) -> u32 {
        self.in_flight()
    }

    fn ask_frame(&mut self, tag: u32) -> Result<(), Error> {
        self.ask_frame(tag)
    }

    fn ask_read(&mut self, tag: u32, page: u64) -> Result<(), Error> {
        self.ask_read(tag, page)
    }

    fn ask_write(&mut self, tag: u32, page: u64, lease: &Lease) -> Result<(), Error> {
        self.ask_write(tag, page, lease)
    }

    fn submit(&mut self) -> Result<(), Error> {
        self.submit()
    }

    fn wait(&mut self) -> Result<Ended<Lease>, Error> {
        self.wait().map(|completion| (completion.tag, completion.result))
    }

    fn wait_for(&mut self, longest: Duration) -> Result<Ended<Lease>, Error> {
        self.wait_for(longest).map(|completion| (completion.tag, completion.result))
    }

    fn page(&self, lease: &Lease) -> &PageBytes {
        self.page(lease)
    }

    fn page_mut(&mut self, lease: &mut Lease) -> Option<&mut PageBytes> {
        self.page_mut(lease)
    }

    fn give_later(&mut self, lease: Lease) -> Result<(), Error> {
        self.give_later(lease)
    }
}

/// A run of this machine.
pub(crate) struct OfMachine {
    path: PathBuf,
    ledger: Ledger,
    tell: Box<dyn Fn(&str)>,
    begun: Instant,
}

impl Run for OfMachine {
    type Connection = Client;

    fn connect(&mut self, longest: Duration) -> Result<Client, Error> {
        let options = Options { frames: 256, entries: 512, patience: Some(longest), ..Options::default() };
        Client::connect_with(&self.path, options, &[self.ledger.witness()])
    }

    fn is_promised(&self) -> bool {
        self.ledger.is_promised()
    }

    fn claim(&mut self, limit: usize) -> Option<usize> {
        self.ledger.claim(limit)
    }

    fn release(&mut self, block: usize) {
        self.ledger.release(block);
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn pause(&mut self) {
        std::thread::sleep(PAUSE);
    }

    fn tell(&mut self, line: &str) {
        (self.tell)(line);
    }
}

/// A store of blocks that the daemon of a run keeps.
#[derive(Debug)]
pub struct ShareStore(Shared<OfMachine>);

impl ShareStore {
    /// Connects to the daemon whose socket is at `path`. If that daemon has died, waits for the
    /// next one. `tell` prints a line for people, and must not wait for the program.
    ///
    /// # Errors
    /// Fails as [`Client::connect`] does.
    pub fn connect(path: &Path, ledger: Ledger, tell: impl Fn(&str) + 'static) -> Result<Self, Error> {
        let path = path.to_owned();
        Shared::new(OfMachine { path, ledger, tell: Box::new(tell), begun: Instant::now() }).map(ShareStore)
    }
}

impl Store for ShareStore {
    fn claim(&mut self) -> Option<u64> {
        self.0.claim()
    }

    fn release(&mut self, first: u64) {
        self.0.release(first);
    }

    fn write(&mut self, page: u64, bytes: &PageBytes) -> io::Result<()> {
        self.0.write(page, bytes)
    }

    fn settle(&mut self) -> io::Result<()> {
        self.0.settle()
    }

    fn read(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()> {
        self.0.read(first, out)
    }
}

/// The store, over any [`Run`].
pub(crate) struct Shared<R: Run> {
    run: R,
    link: Link<R::Connection>,
    /// Number of pages of the daemon's volume.
    pages: u64,
    unsubmitted: usize,
    failed: Option<io::Error>,
    /// The time when the last daemon was found dead, until the next one has ended a request. And
    /// whether a line has said so.
    dead_since: Option<(Duration, bool)>,
    /// Whether the wait for a daemon was given up. Then every request fails.
    is_over: bool,
}

/// A connection to one daemon, and its frames.
#[derive(Debug)]
struct Link<C: Connection> {
    client: C,
    /// Free frames, from which pages are written.
    frames: Vec<C::Lease>,
    /// Pages whose write is under way, and their frames, by the tag of the write.
    writing: Vec<Option<(u64, C::Lease)>>,
}

impl<C: Connection> Link<C> {
    /// Takes the frames. Each wait for the daemon takes `longest` at most.
    fn new(mut client: C, longest: Duration) -> Result<Self, Error> {
        let mut frames = Vec::with_capacity(WRITE_FRAMES);
        for tag in 0..WRITE_FRAMES {
            client.ask_frame(tag as u32)?;
            client.submit()?;
            frames.extend(client.wait_for(longest)?.1?);
        }
        Ok(Link { client, frames, writing: (0..WRITE_FRAMES).map(|_| None).collect() })
    }

    /// Begins to write a page with the content that `fill` puts into a frame. A frame must be free.
    fn write(&mut self, page: u64, fill: impl FnOnce(&mut PageBytes)) -> Result<(), Error> {
        let unusable = || Error::System(io::ErrorKind::InvalidData.into());
        let mut lease = self.frames.pop().ok_or_else(unusable)?;
        fill(self.client.page_mut(&mut lease).ok_or_else(unusable)?);
        let tag = self.writing.iter().position(Option::is_none).ok_or_else(unusable)?;
        self.client.ask_write(tag as u32, page, &lease)?;
        self.writing[tag] = Some((page, lease));
        Ok(())
    }
}

impl<R: Run> Shared<R> {
    pub(crate) fn new(run: R) -> Result<Self, Error> {
        let mut run = run;
        let mut since = None;
        let link = loop {
            match connect(&mut run, since) {
                Ok(link) => break link,
                // Only a dead daemon is waited for. This process has no pages yet, so it may as
                // well go without a pager.
                Err(error) if is_death(&error) && !is_shortage(&error) && waits(&mut run, &mut since) => {}
                Err(error) => return Err(error),
            }
        };
        let pages = link.client.pages();
        Ok(Shared { run, link, pages, unsubmitted: 0, failed: None, dead_since: None, is_over: false })
    }

    /// Handles an error of the connection. If the daemon has died, waits for the next one, and
    /// sends it the writes that were under way. Their frames still have the content: the memory of
    /// a connection lasts as long as this end has it.
    ///
    /// # Errors
    /// Fails if no daemon comes, or for any other error. From then on every request fails.
    fn recover(&mut self, error: Error) -> io::Result<()> {
        let mut error = error;
        let mut is_passing = is_death(&error);
        while !self.is_over && is_passing && waits(&mut self.run, &mut self.dead_since) {
            match connect(&mut self.run, self.dead_since) {
                Ok(link) => match self.send_again(link) {
                    Ok(()) => return Ok(()),
                    Err(new) => (is_passing, error) = (is_death(&new), new),
                },
                // Nothing was sent, so a shortage does no harm, and it may pass.
                Err(new) => (is_passing, error) = (is_death(&new) || is_shortage(&new), new),
            }
        }
        self.is_over = true;
        Err(io::Error::other(error))
    }

    /// Sends the next daemon the writes that were under way.
    fn send_again(&mut self, link: Link<R::Connection>) -> Result<(), Error> {
        let mut link = link;
        if link.client.pages() != self.pages {
            return Err(Error::Nonsense { what: "number of pages" });
        }
        let old = &self.link;
        for (page, lease) in old.writing.iter().flatten() {
            link.write(*page, |frame| frame.copy_from_slice(old.client.page(lease)))?;
        }
        link.client.submit()?;
        self.unsubmitted = 0;
        self.link = link;
        Ok(())
    }

    /// Waits for the completion of one write, frees its frame, and keeps its error.
    fn end_write(&mut self) -> io::Result<()> {
        loop {
            self.unsubmitted = 0;
            let client = &mut self.link.client;
            match client.submit().and_then(|()| client.wait()) {
                Ok((tag, result)) => {
                    self.dead_since = None;
                    let written = self.link.writing.get_mut(tag as usize).and_then(Option::take);
                    self.link.frames.extend(written.map(|(_, lease)| lease));
                    if let Err(error) = result {
                        self.failed.get_or_insert(error);
                    }
                    return Ok(());
                }
                Err(error) => self.recover(error)?,
            }
        }
    }

    fn end_writes(&mut self) -> io::Result<()> {
        while self.link.client.in_flight() > 0 {
            self.end_write()?;
        }
        Ok(())
    }

    /// Reads pages while nothing else is under way. The outer error is one of the connection.
    fn read_once(&mut self, first: u64, out: &mut [PageBytes]) -> Result<io::Result<()>, Error> {
        let client = &mut self.link.client;
        // The server learns that a frame was returned only with the next request. So only half of
        // the frames are used at a time.
        let window = (client.frames() as usize - WRITE_FRAMES) / 2;
        let mut failed = None;
        let (mut asked, mut came) = (0, 0);
        while came < out.len() {
            while asked < out.len() && asked - came < window {
                client.ask_read(asked as u32, first + asked as u64)?;
                asked += 1;
            }
            client.submit()?;
            let (tag, result) = client.wait()?;
            came += 1;
            match result {
                Ok(Some(lease)) => {
                    if let Some(page) = out.get_mut(tag as usize) {
                        page.copy_from_slice(client.page(&lease));
                    }
                    client.give_later(lease)?;
                }
                Ok(None) => failed = Some(io::ErrorKind::InvalidData.into()),
                Err(error) => failed = Some(error),
            }
        }
        client.submit()?;
        Ok(failed.map_or(Ok(()), Err))
    }
}

/// Connects to the present daemon. It may listen and stand still. So the first wait is short, to
/// have the line of [`waits`] said. Later ones end with [`PATIENCE`].
fn connect<R: Run>(run: &mut R, since: Option<(Duration, bool)>) -> Result<Link<R::Connection>, Error> {
    let left = |now: Duration| match since {
        Some((begun, true)) => (begun + PATIENCE).saturating_sub(now).max(PAUSE),
        _ => SAY_AFTER,
    };
    let longest = left(run.now());
    let client = run.connect(longest)?;
    Link::new(client, left(run.now()))
}

/// Whether an error shows that the daemon has died.
fn is_death(error: &Error) -> bool {
    match error {
        Error::Gone | Error::Connect { .. } => true,
        // The daemon has died after the connection was made, and before its greeting came.
        Error::System(error) => {
            matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
        }
        _ => false,
    }
}

/// Whether this process or the daemon lacks something that it may have a little later: memory,
/// descriptors, or a seat.
fn is_shortage(error: &Error) -> bool {
    use rustix::io::Errno;
    const LACKS: [Errno; 7] = [
        Errno::NOMEM,
        Errno::MFILE,
        Errno::NFILE,
        Errno::NOBUFS,
        Errno::AGAIN,
        Errno::TOOMANYREFS,
        Errno::USERS,
    ];
    match error {
        Error::Refused { reason: source, .. } | Error::Connect { source, .. } | Error::System(source) => {
            LACKS.iter().any(|lack| source.raw_os_error() == Some(lack.raw_os_error()))
        }
        _ => false,
    }
}

/// Waits a little for the next daemon. Returns false if waiting is of no use: no other daemon
/// comes, or the wait has taken too long.
fn waits<R: Run>(run: &mut R, since: &mut Option<(Duration, bool)>) -> bool {
    let now = run.now();
    let (begun, is_said) = *since.get_or_insert((now, false));
    if now - begun > PATIENCE || !run.is_promised() {
        return false;
    }
    if !is_said && now - begun > SAY_AFTER {
        *since = Some((begun, true));
        run.tell("the daemon has died; waiting for the next one, for 60 s at most");
    }
    run.pause();
    true
}

impl<R: Run> Store for Shared<R> {
    fn claim(&mut self) -> Option<u64> {
        let blocks = self.pages as usize / BLOCK_PAGES;
        Some((self.run.claim(blocks)? * BLOCK_PAGES) as u64)
    }

    fn release(&mut self, first: u64) {
        self.run.release(first as usize / BLOCK_PAGES);
    }

    fn write(&mut self, page: u64, bytes: &PageBytes) -> io::Result<()> {
        if self.is_over {
            return Err(io::ErrorKind::NotConnected.into());
        }
        while self.link.frames.is_empty() {
            self.end_write()?;
        }
        self.link.write(page, |frame| frame.copy_from_slice(bytes)).map_err(io::Error::other)?;
        self.unsubmitted += 1;
        if self.unsubmitted >= SUBMIT_EVERY {
            self.unsubmitted = 0;
            // If the daemon has died, the wait for a completion finds that.
            let _ = self.link.client.submit();
        }
        Ok(())
    }

    fn settle(&mut self) -> io::Result<()> {
        self.end_writes()?;
        self.failed.take().map_or(Ok(()), Err)
    }

    fn read(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()> {
        // Wait for all writes first, since a read takes each completion for its own.
        self.end_writes()?;
        loop {
            if self.is_over {
                return Err(io::ErrorKind::NotConnected.into());
            }
            match self.read_once(first, out) {
                Ok(read) => {
                    self.dead_since = None;
                    return read;
                }
                Err(error) => self.recover(error)?,
            }
        }
    }
}

impl<R: Run> fmt::Debug for Shared<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("link", &self.link)
            .field("is_over", &self.is_over)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run whose daemon refuses everybody.
    struct Refusing(rustix::io::Errno);

    impl Run for Refusing {
        type Connection = Client;

        fn connect(&mut self, _: Duration) -> Result<Client, Error> {
            Err(Error::Refused { version: 1, reason: self.0.into() })
        }

        fn is_promised(&self) -> bool {
            true
        }

        fn claim(&mut self, _: usize) -> Option<usize> {
            None
        }

        fn release(&mut self, _: usize) {}

        fn now(&self) -> Duration {
            Duration::ZERO
        }

        fn pause(&mut self) {
            panic!("it waits for a daemon that lives");
        }

        fn tell(&mut self, line: &str) {
            panic!("{line}");
        }
    }

    #[test]
    fn a_process_without_pages_does_not_wait_for_a_daemon_that_refuses_it() {
        use rustix::io::Errno;
        for errno in [Errno::USERS, Errno::NOMEM, Errno::PROTONOSUPPORT] {
            assert!(matches!(Shared::new(Refusing(errno)), Err(Error::Refused { .. })));
        }
    }
}
