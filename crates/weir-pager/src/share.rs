//! A store over the share transport: a daemon keeps the pages in its stores.
//!
//! The daemon may die. Then the store waits for the next daemon, which has every page that the dead
//! one had acknowledged. The store sends the writes that were under way again, and begins a read
//! anew. It waits only for as long as `weir run` promises another daemon, and not for ever.

use crate::{BLOCK_PAGES, Ledger, Store};
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes};
use weir_share::{Client, Error, Frames, Options};

/// Largest number of pages of one request. While the daemon handles a request, this end copies the
/// pages of the next one.
const RUN: usize = 32;
/// Number of the connection's frames that are used for writes. They are used in a circle.
const WRITE_FRAMES: usize = 4 * RUN;
/// Number of requests for which a read has frames.
const READS: usize = 4;
/// Number of the connection's frames.
pub(crate) const FRAMES: usize = WRITE_FRAMES + READS * RUN;
/// Number of written pages after which the daemon is told, so that it writes while more pages are
/// copied.
const SUBMIT_EVERY: usize = 16;
/// Longest wait for the next daemon.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time that the wait for the next daemon may take before a line reports it.
const SAY_AFTER: Duration = Duration::from_secs(1);
/// Pause before the next attempt to connect.
const PAUSE: Duration = Duration::from_millis(2);

/// A connection to a daemon. It has [`FRAMES`] frames, through which pages come and go.
pub(crate) trait Connection: fmt::Debug + Sized {
    fn pages(&self) -> u64;
    fn in_flight(&self) -> u32;
    /// Asks to read `count` pages from `page` on into the frames from index `at` on.
    fn ask_read(&mut self, tag: u32, page: u64, at: usize, count: usize) -> Result<(), Error>;
    /// Asks to write `count` frames from index `at` on to the pages from `page` on.
    fn ask_write(&mut self, tag: u32, page: u64, at: usize, count: usize) -> Result<(), Error>;
    fn submit(&mut self) -> Result<(), Error>;
    fn wait(&mut self) -> Result<Ended, Error>;
    fn copy_from_frames(&self, at: usize, out: &mut [PageBytes]);
    fn copy_to_frames(&mut self, at: usize, pages: &[PageBytes]);
}

/// A request that has ended: its tag, and its result.
pub(crate) type Ended = (u32, io::Result<()>);

/// The run that a process belongs to: its daemons, one at a time, and its ledger.
pub(crate) trait Run {
    type Connection: Connection;

    /// Connects to the present daemon. Each wait for it takes as long at most as `left` says of the
    /// time at which the wait begins.
    fn connect(&mut self, left: &dyn Fn(Duration) -> Duration) -> Result<Self::Connection, Error>;

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

/// A connection of this machine.
#[derive(Debug)]
pub(crate) struct Framed {
    client: Client,
    frames: Frames,
}

impl Connection for Framed {
    fn pages(&self) -> u64 {
        self.client.pages()
    }

    fn in_flight(&self) -> u32 {
        self.client.in_flight()
    }

    fn ask_read(&mut self, tag: u32, page: u64, at: usize, count: usize) -> Result<(), Error> {
        self.client.ask_read_run(tag, page, &self.frames, at as u32, count as u32)
    }

    fn ask_write(&mut self, tag: u32, page: u64, at: usize, count: usize) -> Result<(), Error> {
        self.client.ask_write_run(tag, page, &self.frames, at as u32, count as u32)
    }

    fn submit(&mut self) -> Result<(), Error> {
        self.client.submit()
    }

    fn wait(&mut self) -> Result<Ended, Error> {
        self.client.wait().map(|completion| (completion.tag, completion.result.map(drop)))
    }

    fn copy_from_frames(&self, at: usize, out: &mut [PageBytes]) {
        self.client.copy_from_frames(&self.frames, at, out);
    }

    fn copy_to_frames(&mut self, at: usize, pages: &[PageBytes]) {
        self.client.copy_to_frames(&self.frames, at, pages);
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
    type Connection = Framed;

    fn connect(&mut self, left: &dyn Fn(Duration) -> Duration) -> Result<Framed, Error> {
        let frames = FRAMES as u32;
        let patience = Some(left(self.now()));
        let options = Options { frames, entries: 512, patience, ..Options::default() };
        let mut client = Client::connect_with(&self.path, options, &[self.ledger.witness()])?;
        let frames = client.take_frames(frames, left(self.now()))?;
        Ok(Framed { client, frames })
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

    fn write(&mut self, first: u64, pages: &[PageBytes]) -> io::Result<()> {
        self.0.write(first, pages)
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

/// A connection to one daemon, and the use of its frames.
#[derive(Debug)]
struct Link<C: Connection> {
    connection: C,
    /// The writes that are under way, and their frames: those that are neither the oldest one nor
    /// after one under way may have ended.
    writing: VecDeque<Writing>,
    /// The tag of the first of these writes. The others have the tags after it.
    first: u32,
}

/// A write of `count` pages from `page` on, from the frames from index `at` on.
#[derive(Clone, Copy, Debug)]
struct Writing {
    page: u64,
    at: usize,
    count: usize,
    has_ended: bool,
}

/// The tags of reads. Those of writes are below.
const READ: u32 = 1 << 31;

impl<C: Connection> Link<C> {
    fn new(connection: C) -> Self {
        Link { connection, writing: VecDeque::new(), first: 0 }
    }

    /// Finds `count` free frames for a write, one after another. They are used in a circle, and no
    /// write goes beyond its end.
    fn free(&self, count: usize) -> Option<usize> {
        let (Some(oldest), Some(newest)) = (self.writing.front(), self.writing.back()) else {
            return Some(0);
        };
        let (begin, end) = (oldest.at, newest.at + newest.count);
        if end <= begin {
            return (begin - end >= count).then_some(end);
        }
        match WRITE_FRAMES - end >= count {
            true => Some(end),
            false => (begin >= count).then_some(0),
        }
    }

    /// Begins to write pages from the frames from index `at` on, which have their content.
    fn write(&mut self, page: u64, at: usize, count: usize) -> Result<(), Error> {
        let tag = (self.first.wrapping_add(self.writing.len() as u32)) % READ;
        self.connection.ask_write(tag, page, at, count)?;
        self.writing.push_back(Writing { page, at, count, has_ended: false });
        Ok(())
    }

    /// Notes that the write with this tag has ended.
    fn end_write(&mut self, tag: u32) {
        let number = tag.wrapping_sub(self.first) % READ;
        if let Some(writing) = self.writing.get_mut(number as usize) {
            writing.has_ended = true;
        }
        while self.writing.pop_front_if(|writing| writing.has_ended).is_some() {
            self.first = (self.first + 1) % READ;
        }
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
        let pages = link.connection.pages();
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
        if link.connection.pages() != self.pages {
            return Err(Error::Nonsense { what: "number of pages" });
        }
        let old = &self.link;
        let mut bytes = [[0; PAGE_SIZE]];
        for &Writing { page, at, count, .. } in old.writing.iter().filter(|writing| !writing.has_ended) {
            for frame in at..at + count {
                old.connection.copy_from_frames(frame, &mut bytes);
                link.connection.copy_to_frames(frame, &bytes);
            }
            link.write(page, at, count)?;
        }
        link.connection.submit()?;
        self.unsubmitted = 0;
        self.link = link;
        Ok(())
    }

    /// Waits for the completion of one write, and keeps its error.
    fn end_write(&mut self) -> io::Result<()> {
        loop {
            self.unsubmitted = 0;
            let connection = &mut self.link.connection;
            match connection.submit().and_then(|()| connection.wait()) {
                Ok((tag, result)) => {
                    self.dead_since = None;
                    self.link.end_write(tag);
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
        while self.link.connection.in_flight() > 0 {
            self.end_write()?;
        }
        Ok(())
    }

    /// Reads pages while nothing else is under way. The outer error is one of the connection.
    fn read_once(&mut self, first: u64, out: &mut [PageBytes]) -> Result<io::Result<()>, Error> {
        let connection = &mut self.link.connection;
        let mut failed = None;
        // For each request its pages, by their index in `out`.
        let mut asked: [Range<usize>; READS] = Default::default();
        let frames = |number: usize| WRITE_FRAMES + number * RUN;
        let (mut next, mut came) = (0, 0);
        while came < out.len() {
            for (number, pages) in asked.iter_mut().enumerate() {
                if pages.start == pages.end && next < out.len() {
                    *pages = next..out.len().min(next + RUN);
                    next = pages.end;
                    let (page, tag) = (first + pages.start as u64, READ + number as u32);
                    connection.ask_read(tag, page, frames(number), pages.len())?;
                }
            }
            connection.submit()?;
            let (tag, result) = connection.wait()?;
            let number = tag.wrapping_sub(READ) as usize;
            let pages = std::mem::take(asked.get_mut(number).ok_or(Error::Nonsense { what: "tag" })?);
            came += pages.len();
            match result {
                Ok(()) => connection.copy_from_frames(frames(number), &mut out[pages]),
                Err(error) => failed = Some(error),
            }
        }
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
    run.connect(&left).map(Link::new)
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

    fn write(&mut self, first: u64, pages: &[PageBytes]) -> io::Result<()> {
        for (page, pages) in (first..).step_by(RUN).zip(pages.chunks(RUN)) {
            if self.is_over {
                return Err(io::ErrorKind::NotConnected.into());
            }
            let at = loop {
                match self.link.free(pages.len()) {
                    Some(at) => break at,
                    None => self.end_write()?,
                }
            };
            self.link.connection.copy_to_frames(at, pages);
            self.link.write(page, at, pages.len()).map_err(io::Error::other)?;
            self.unsubmitted += pages.len();
            if self.unsubmitted >= SUBMIT_EVERY {
                self.unsubmitted = 0;
                // If the daemon has died, the wait for a completion finds that.
                let _ = self.link.connection.submit();
            }
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
        type Connection = Framed;

        fn connect(&mut self, _: &dyn Fn(Duration) -> Duration) -> Result<Framed, Error> {
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
