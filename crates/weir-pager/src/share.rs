//! A store over the share transport: a daemon keeps the pages in its stores.
//!
//! The daemon may die. Then the store waits for the next daemon, which has every page that the dead
//! one had acknowledged. The store sends the writes that were under way again, and begins a read
//! anew. It waits only for as long as `weir run` promises another daemon, and not for ever.
//!
//! A store of the daemon may stand still. Then the daemon answers that it has no answer in time.
//! No page is lost by that, so the store asks again for a while.

use crate::ledger::Witness;
use crate::{BLOCK_PAGES, Ledger, OpenLane, Store};
use std::array;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes};
use weir_share::{Client, Error, Frames, Lease, Options, path_of};

/// Largest number of pages of one request. While the daemon handles a request, this end copies the
/// pages of the next one. Daemons of other versions of Weir may take fewer.
const RUN: usize = 32;
/// Number of the connection's frames that are used for writes. They are used in a circle.
const WRITE_FRAMES: usize = 4 * RUN;
/// Number of frames for reads.
const READ_FRAMES: usize = 4 * RUN;
/// Largest number of requests of one read. If the daemon knows no runs, each of these requests
/// takes a frame for reads. The other half of these frames are then free for frames that were given
/// back, and that the daemon has not received yet.
const READS: usize = READ_FRAMES / 2;
/// Number of the connection's frames.
pub(crate) const FRAMES: usize = WRITE_FRAMES + READ_FRAMES;
/// Number of written pages after which the daemon is told, so that it writes while more pages are
/// copied.
const SUBMIT_EVERY: usize = 16;
/// Longest wait for the next daemon, and for a store that does not answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time that the wait for the next daemon may take before a line reports it.
const SAY_AFTER: Duration = Duration::from_secs(1);
/// The line for a wait for the next daemon.
const DEAD: &str = "the daemon has died; waiting for the next one, for 60 s at most";
/// The lines for a write and a read that the store answers with an error, before the reason.
const NOT_TAKEN: &str = "the store does not take a page";
const NOT_GIVEN: &str = "the store does not give a page back";
/// The line for the end of all waits for a daemon, before the reason.
const OVER: &str = "no daemon has the pages of this process any more";
/// The line for a wait for the first answer of a daemon.
const SLOW: &str = "the daemon does not answer yet; waiting for it, for 60 s at most";
/// The line for a wait for a store of the daemon.
const STALLED: &str = "the store does not answer; waiting for it, for 60 s at most";
/// Longest time of each wait while a further connection is opened.
const OPEN_FOR: Duration = Duration::from_millis(100);
/// The same line of another connection is left out for this time.
const SAME_FOR: Duration = Duration::from_secs(10);
/// Pause before the next attempt to connect.
const PAUSE: Duration = Duration::from_millis(2);
/// The logarithm of the largest number of pauses before a request is sent again to a store that
/// stands still.
const PAUSES_MOST_LOG2: u32 = 6;
/// A store that stood still longer ago than this is waited for anew.
const FORGET_AFTER: Duration = Duration::from_secs(10);

/// A connection to a daemon. It has [`FRAMES`] frames, through which pages are written and read.
pub(crate) trait Connection: fmt::Debug + Sized {
    fn pages(&self) -> u64;
    /// Largest number of pages of one request.
    fn run_most(&self) -> usize;
    fn in_flight(&self) -> u32;
    /// Asks to read `count` pages from `page` on into the frames from index `at` on.
    fn ask_read(&mut self, tag: u32, page: u64, at: usize, count: usize) -> Result<(), Error>;
    /// Asks to write `count` frames from index `at` on to the pages from `page` on.
    fn ask_write(&mut self, tag: u32, page: u64, at: usize, count: usize) -> Result<(), Error>;
    fn submit(&mut self) -> Result<(), Error>;
    fn wait(&mut self) -> Result<Ended, Error>;
    /// Copies the content of frames. The frames of a read keep the read pages only until the next
    /// call of `wait`.
    fn copy_from_frames(&self, at: usize, out: &mut [PageBytes]);
    fn copy_to_frames(&mut self, at: usize, pages: &[PageBytes]);
}

/// A request that has ended: its tag, and its result.
pub(crate) type Ended = (u32, io::Result<()>);

/// The run that a process belongs to: its daemons, one at a time, and its ledger.
pub(crate) trait Run {
    type Connection: Connection;

    /// Connects to the present daemon. `left` gets the time at which a wait begins, and returns the
    /// longest time that this wait may take.
    fn connect(&mut self, left: &dyn Fn(Duration) -> Duration) -> Result<Self::Connection, Error>;

    /// Whether another daemon comes if the present one dies.
    fn is_promised(&self) -> bool;

    /// Whether this is the first connection of the process, without which it has no pages.
    fn is_first(&self) -> bool {
        true
    }

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
    /// The page of the last read that has ended, if the daemon knows no runs: such a daemon itself
    /// chooses the frame of each read.
    brought: Option<Lease>,
}

impl Framed {
    /// Takes the frames of a new connection. Each wait takes `longest` at most.
    fn new(mut client: Client, longest: Duration) -> Result<Self, Error> {
        let knows_runs = client.run_most() > 0;
        let frames = client.take_frames(if knows_runs { FRAMES } else { WRITE_FRAMES } as u32, longest)?;
        Ok(Framed { client, frames, brought: None })
    }
}

impl Connection for Framed {
    fn pages(&self) -> u64 {
        self.client.pages()
    }

    fn run_most(&self) -> usize {
        self.client.run_most().max(1) as usize
    }

    fn in_flight(&self) -> u32 {
        self.client.in_flight()
    }

    fn ask_read(&mut self, tag: u32, page: u64, at: usize, count: usize) -> Result<(), Error> {
        match self.client.run_most() {
            0 => self.client.ask_read(tag, page),
            _ => self.client.ask_read_run(tag, page, &self.frames, at as u32, count as u32),
        }
    }

    fn ask_write(&mut self, tag: u32, page: u64, at: usize, count: usize) -> Result<(), Error> {
        self.client.ask_write_run(tag, page, &self.frames, at as u32, count as u32)
    }

    fn submit(&mut self) -> Result<(), Error> {
        self.client.submit()
    }

    fn wait(&mut self) -> Result<Ended, Error> {
        if let Some(lease) = self.brought.take() {
            self.client.give_later(lease)?;
        }
        let completion = self.client.wait()?;
        Ok((completion.tag, completion.result.map(|lease| self.brought = lease)))
    }

    fn copy_from_frames(&self, at: usize, out: &mut [PageBytes]) {
        match &self.brought {
            Some(lease) if at >= WRITE_FRAMES => out[0].copy_from_slice(self.client.page(lease)),
            _ => self.client.copy_from_frames(&self.frames, at, out),
        }
    }

    fn copy_to_frames(&mut self, at: usize, pages: &[PageBytes]) {
        self.client.copy_to_frames(&self.frames, at, pages);
    }
}

/// A run of this machine.
pub(crate) struct OfMachine {
    path: PathBuf,
    witness: Witness,
    /// `None` for a further connection, which claims nothing.
    ledger: Option<Ledger>,
    tell: Arc<dyn Fn(&str) + Send + Sync>,
    begun: Instant,
}

impl Run for OfMachine {
    type Connection = Framed;

    fn connect(&mut self, left: &dyn Fn(Duration) -> Duration) -> Result<Framed, Error> {
        let patience = Some(left(self.now()));
        let options = Options { frames: FRAMES as u32, entries: 512, patience, ..Options::default() };
        let client = Client::connect_with(&self.path, options, &[self.witness.as_fd()])?;
        Framed::new(client, left(self.now()))
    }

    fn is_promised(&self) -> bool {
        self.witness.is_promised()
    }

    fn is_first(&self) -> bool {
        self.ledger.is_some()
    }

    fn claim(&mut self, limit: usize) -> Option<usize> {
        self.ledger.as_mut()?.claim(limit)
    }

    fn release(&mut self, block: usize) {
        if let Some(ledger) = &mut self.ledger {
            ledger.release(block);
        }
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
pub struct ShareStore {
    shared: Shared<OfMachine>,
    /// Number of connections that this process may have, with this one.
    connections: u16,
}

impl ShareStore {
    /// Connects to the daemon whose socket is at `path`. If that daemon has died, waits for the
    /// next one. `tell` prints a line for people, and must not wait for the program. The store has
    /// further [lanes](Store::lanes) to the daemon's other sockets, [`path_of`] 1 and so on, so
    /// that there are up to `connections` connections.
    ///
    /// # Errors
    /// Fails as [`Client::connect`] does.
    pub fn connect(
        path: &Path,
        ledger: Ledger,
        connections: u16,
        tell: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let (path, witness) = (path.to_owned(), ledger.witness().try_clone()?);
        let last: Mutex<Option<(String, Instant)>> = Mutex::default();
        let tell = move |line: &str| {
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            let is_said = last.as_ref().is_some_and(|(said, at)| said == line && at.elapsed() < SAME_FOR);
            if !is_said {
                tell(line);
                *last = Some((line.to_owned(), Instant::now()));
            }
        };
        let (ledger, tell) = (Some(ledger), Arc::new(tell));
        let run = OfMachine { path, witness, ledger, tell, begun: Instant::now() };
        Ok(ShareStore { shared: Shared::new(run)?, connections })
    }
}

impl Store for ShareStore {
    fn read_ahead(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()> {
        self.shared.read_ahead(first, out)
    }

    fn lanes(&mut self) -> Vec<OpenLane> {
        let OfMachine { path, witness, tell, .. } = &self.shared.run;
        let lane = |number| {
            let (path, witness) = (path_of(path, number), witness.try_clone().ok()?);
            let tell = Arc::clone(tell);
            let open = move || {
                let (path, witness, tell) = (path.clone(), witness.try_clone().ok()?, Arc::clone(&tell));
                let run = OfMachine { path, witness, ledger: None, tell, begun: Instant::now() };
                Some(Box::new(Shared::open(run).ok()?) as Box<dyn Store>)
            };
            Some(Box::new(open) as OpenLane)
        };
        (1..self.connections).filter_map(lane).collect()
    }

    fn claim(&mut self) -> Option<u64> {
        self.shared.claim()
    }

    fn release(&mut self, first: u64) {
        self.shared.release(first);
    }

    fn write(&mut self, first: u64, pages: &[PageBytes]) -> io::Result<()> {
        self.shared.write(first, pages)
    }

    fn settle(&mut self) -> io::Result<()> {
        self.shared.settle()
    }

    fn read(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()> {
        self.shared.read(first, out)
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
    /// The time at which the store found the last daemon dead, and whether a line has reported
    /// this. `None` again once the next daemon has ended a request.
    dead_since: Option<(Duration, bool)>,
    /// The time at which a store of the daemon did not answer for the first time, and whether a
    /// line has reported this. `None` again once another answer has come.
    stalled_since: Option<(Duration, bool)>,
    /// The time at which it did so last, and the number of times.
    stalled: (Duration, u32),
    /// Whether nobody may wait for a store now.
    hurry: Arc<AtomicBool>,
    /// Whether the wait for a daemon was given up. Then every request fails.
    is_over: bool,
}

/// A connection to one daemon, and the use of its frames.
#[derive(Debug)]
struct Link<C: Connection> {
    connection: C,
    /// Largest number of pages of one request.
    run: usize,
    /// The writes that are under way, the oldest one first, with their frames. A write that has
    /// ended stays in the list until all older writes have ended.
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

/// The outcome of a wait for a store that did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// The request may be sent again.
    Again,
    /// Nobody may wait for a store now.
    Hurry,
    /// The error says something else, or the wait has taken too long.
    Over,
}

/// The first tag of reads. The tags of writes are smaller.
const READ: u32 = 1 << 31;

impl<C: Connection> Link<C> {
    fn new(connection: C) -> Self {
        let run = connection.run_most().clamp(1, RUN);
        Link { connection, run, writing: VecDeque::new(), first: 0 }
    }

    /// Finds `count` free frames for a write, one after another. The write frames are used in a
    /// circle, and no write crosses the end of the circle.
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
        for begun in (0..count).step_by(self.run) {
            let (page, at, count) = (page + begun as u64, at + begun, self.run.min(count - begun));
            let tag = (self.first.wrapping_add(self.writing.len() as u32)) % READ;
            self.connection.ask_write(tag, page, at, count)?;
            self.writing.push_back(Writing { page, at, count, has_ended: false });
        }
        Ok(())
    }

    /// The number of the write with this tag in `writing`.
    fn number(&self, tag: u32) -> usize {
        (tag.wrapping_sub(self.first) % READ) as usize
    }

    /// Sends the write with this tag again. Its frames still have the pages.
    fn write_again(&mut self, tag: u32) -> Result<(), Error> {
        match self.writing.get(self.number(tag)) {
            Some(&Writing { page, at, count, has_ended: false }) => {
                self.connection.ask_write(tag, page, at, count)
            }
            _ => Err(Error::Nonsense { what: "tag" }),
        }
    }

    /// Notes that the write with this tag has ended.
    fn end_write(&mut self, tag: u32) {
        let number = self.number(tag);
        if let Some(writing) = self.writing.get_mut(number) {
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
        let mut since = Some((run.now(), false));
        let link = loop {
            match connect(&mut run, since) {
                Ok(link) => break link,
                // The daemon is there, and busy or stopped. A process that would go on without a
                // pager now would do so for good.
                Err(error) if is_slow(&error) && goes_on(&mut run, &mut since, SLOW) => {}
                // Wait for a daemon that has died too. After any other error this process can go
                // without a pager, since it has no pages in the store yet.
                Err(error) if is_death(&error) && !is_shortage(&error) && waits(&mut run, &mut since) => {}
                Err(error) => return Err(error),
            }
        };
        Ok(Shared::over(run, link))
    }

    /// Makes a further connection to the present daemon, without a wait for another one.
    pub(crate) fn open(mut run: R) -> Result<Self, Error> {
        let link = run.connect(&|_| OPEN_FOR).map(Link::new)?;
        Ok(Shared::over(run, link))
    }

    fn over(run: R, link: Link<R::Connection>) -> Self {
        let pages = link.connection.pages();
        Shared {
            run,
            link,
            pages,
            unsubmitted: 0,
            failed: None,
            dead_since: None,
            stalled_since: None,
            stalled: (Duration::ZERO, 0),
            hurry: Arc::default(),
            is_over: false,
        }
    }

    /// Handles an error of the connection. If the daemon has died, waits for the next daemon, and
    /// sends it the writes that were under way. The old frames still have the content: the memory
    /// of a connection lasts as long as this process maps it.
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
                // No write was sent to the new daemon, so a shortage does no harm. Try again, since
                // the shortage may pass.
                Err(new) => (is_passing, error) = (is_death(&new) || is_shortage(&new), new),
            }
        }
        if !std::mem::replace(&mut self.is_over, true) && self.run.is_first() {
            let why =
                std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            self.run.tell(&format!("{OVER}: {why}"));
        }
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
        self.stalled_since = None;
        self.link = link;
        Ok(())
    }

    /// Waits for the completion of one write, and keeps its error. Sends a write again that the
    /// daemon's store has not answered in time: such a write never takes effect later.
    fn end_write(&mut self) -> io::Result<()> {
        loop {
            self.unsubmitted = 0;
            let connection = &mut self.link.connection;
            let ended = match connection.submit().and_then(|()| connection.wait()) {
                Ok((tag, result)) => {
                    let found = result.as_ref().err().map(|error| self.wait_for_store(error));
                    if found == Some(Found::Again) {
                        self.link.write_again(tag)
                    } else {
                        self.heard(&result);
                        self.link.end_write(tag);
                        if let Err(error) = result {
                            let is_given_up = found == Some(Found::Hurry);
                            if !is_given_up {
                                self.run.tell(&format!("{NOT_TAKEN}: {error}"));
                            }
                            let error = if is_given_up { io::ErrorKind::Interrupted.into() } else { error };
                            self.failed.get_or_insert(error);
                        }
                        return Ok(());
                    }
                }
                Err(error) => Err(error),
            };
            if let Err(error) = ended {
                self.recover(error)?;
            }
        }
    }

    /// Notes the result of a request that the daemon has answered.
    fn heard(&mut self, result: &io::Result<()>) {
        self.dead_since = None;
        if !result.as_ref().is_err_and(is_stall) {
            self.stalled_since = None;
        }
    }

    /// If a request failed because a store of the daemon does not answer, waits a little, and
    /// longer from time to time: the answer may come at once, and that the store stands still is
    /// all it says.
    fn wait_for_store(&mut self, error: &io::Error) -> Found {
        self.dead_since = None;
        if !is_stall(error) {
            return Found::Over;
        }
        let now = self.run.now();
        // Earlier waits, of which nobody has asked since, say nothing about this one.
        if now.saturating_sub(self.stalled.0) > FORGET_AFTER {
            self.stalled_since = None;
        }
        self.stalled = (now, if self.stalled_since.is_some() { self.stalled.1 + 1 } else { 0 });
        for _ in 1..1 << self.stalled.1.min(PAUSES_MOST_LOG2) {
            if self.hurry.load(Ordering::Relaxed) {
                break;
            }
            self.run.pause();
        }
        match self.hurry.load(Ordering::Relaxed) {
            true => Found::Hurry,
            false if goes_on(&mut self.run, &mut self.stalled_since, STALLED) => Found::Again,
            false => Found::Over,
        }
    }

    /// Reads pages, and sends the writes before. `is_needed` says whether to wait for a store that
    /// stands still.
    fn read_for(&mut self, first: u64, out: &mut [PageBytes], is_needed: bool) -> io::Result<()> {
        // Wait for all writes first, since a read takes every completion for one of its own.
        self.end_writes()?;
        loop {
            if self.is_over {
                return Err(io::ErrorKind::NotConnected.into());
            }
            match self.read_once(first, out) {
                Ok(Err(error)) if is_needed && self.wait_for_store(&error) == Found::Again => {}
                Ok(read) => {
                    self.heard(&read);
                    if let (true, Err(error)) = (is_needed, &read) {
                        self.run.tell(&format!("{NOT_GIVEN}: {error}"));
                    }
                    return read;
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

    /// Reads pages while nothing else is under way. The outer `Result` has errors of the
    /// connection, and the inner one has errors of the read.
    fn read_once(&mut self, first: u64, out: &mut [PageBytes]) -> Result<io::Result<()>, Error> {
        let Link { connection, run, .. } = &mut self.link;
        let run = *run;
        let mut failed = None;
        // For each request its pages, by their index in `out`.
        let mut asked: [Range<usize>; READS] = array::from_fn(|_| 0..0);
        let asked = &mut asked[..READS.min(READ_FRAMES / run)];
        let frames = |number: usize| WRITE_FRAMES + number * run;
        let (mut next, mut came) = (0, 0);
        while came < out.len() {
            for (number, pages) in asked.iter_mut().enumerate() {
                if pages.start == pages.end && next < out.len() {
                    *pages = next..out.len().min(next + run);
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

/// Connects to the present daemon, which may be listening and never answer. So the first wait is
/// short, so that [`waits`] can then print its line. Later waits end with [`PATIENCE`].
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

/// Whether an error says that a store of the daemon has not answered in time.
fn is_stall(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::TimedOut
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

/// Whether an error shows that the daemon listens, and has not answered in time.
fn is_slow(error: &Error) -> bool {
    match error {
        Error::Connect { source, .. } | Error::System(source) => {
            matches!(source.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
        }
        _ => false,
    }
}

/// Waits a little for the next daemon. Returns false if waiting is of no use: no other daemon
/// comes, or the wait has taken too long.
fn waits<R: Run>(run: &mut R, since: &mut Option<(Duration, bool)>) -> bool {
    run.is_promised() && goes_on(run, since, DEAD)
}

/// Waits a little for a daemon or a store. Prints `line` once if the wait has taken long. Returns
/// false if it has taken too long.
fn goes_on<R: Run>(run: &mut R, since: &mut Option<(Duration, bool)>, line: &str) -> bool {
    let now = run.now();
    let (begun, is_said) = *since.get_or_insert((now, false));
    if now - begun > PATIENCE {
        return false;
    }
    if !is_said && now - begun >= SAY_AFTER {
        *since = Some((begun, true));
        run.tell(line);
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
        self.read_for(first, out, true)
    }

    fn read_ahead(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()> {
        self.read_for(first, out, false)
    }

    fn heed(&mut self, hurry: Arc<AtomicBool>) {
        self.hurry = hurry;
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
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::Errno;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
    use std::cell::RefCell;
    use std::os::fd::{AsFd as _, OwnedFd};
    use std::rc::Rc;
    use weir_core::copy;
    use weir_share::wire::{Completed, Hello, Op, Spot, Submission, VERSION, Welcome};
    use weir_share::{Area, Layout, Ring, peek, receive, ring, send};

    /// A run whose daemon refuses every client.
    struct Refusing(Errno);

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

    /// A daemon of another version. Its runs have at most `run_most` pages. With 0 it knows no
    /// runs.
    struct Other {
        socket: OwnedFd,
        area: Area,
        run_most: u32,
        pages: Vec<PageBytes>,
        /// The token of each frame that the client has.
        held: Vec<Option<u32>>,
        tokens: u32,
    }

    impl Other {
        /// Waits for one client.
        fn accept(server: &OwnedFd, run_most: u32) -> Other {
            let socket = rustix::net::accept(server).unwrap();
            let mut bytes = [0; 512];
            let count = receive(&socket, &mut bytes).unwrap().0;
            let hello = Hello::decode(&bytes[..count]).unwrap();
            let (frames, entries) = (hello.frames, hello.entries.min(256));
            let area = Area::create(Layout::new(frames, entries).unwrap()).unwrap();
            let bell = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            let pages = 4 * BLOCK_PAGES as u64;
            let welcome =
                Welcome { version: VERSION, status: 0, frames, entries, pages, windows: 0, run_most };
            send(&socket, &welcome.encode(), &[area.fd().unwrap(), bell.as_fd()]).unwrap();
            let (pages, held) = (vec![[0; PAGE_SIZE]; pages as usize], vec![None; frames as usize]);
            Other { socket, area, run_most, pages, held, tokens: 0 }
        }

        fn hand_out(&mut self) -> Result<(u32, Spot), Errno> {
            let frame = self.held.iter().position(Option::is_none).ok_or(Errno::NOBUFS)?;
            self.tokens += 1;
            self.held[frame] = Some(self.tokens);
            Ok((self.tokens, Spot::Frame(frame as u32)))
        }

        fn frame(&self, token: u32) -> Result<u32, Errno> {
            let frame = self.held.iter().position(|held| *held == Some(token));
            frame.map(|frame| frame as u32).ok_or(Errno::BADF)
        }

        fn handle(&mut self, asked: Submission) -> Result<(u32, Spot), Errno> {
            let first = asked.page as usize;
            let count = if asked.is_run() { asked.count } else { 1 };
            if count > self.run_most.max(1) || (asked.is_run() && self.run_most == 0) {
                return Err(Errno::INVAL);
            }
            let (token, spot) = match asked.op {
                Op::Reserve => return self.hand_out(),
                Op::Read => self.hand_out()?,
                _ => (asked.token, Spot::Nowhere),
            };
            for at in 0..count {
                let (frame, page) = (self.frame(token + at)?, &mut self.pages[first + at as usize]);
                let frame = self.area.frame(frame).cast();
                // SAFETY: the frame lies in this area, and frames are page-aligned.
                unsafe {
                    match asked.op {
                        Op::Write | Op::WriteRun => copy::page_from_shared(page, frame),
                        _ => copy::page_to_shared(frame, page),
                    }
                }
            }
            Ok((token, spot))
        }

        /// Serves the client until it has gone.
        fn serve(mut self) {
            let (mut taken, mut ended) = (0u32, 0u32);
            while peek(&self.socket, &mut [0]).is_err() {
                while taken != self.area.written(Ring::Submissions).load(Ordering::Acquire) {
                    let asked = Submission::decode(self.area.load(Ring::Submissions, taken)).unwrap();
                    taken = taken.wrapping_add(1);
                    self.area.read(Ring::Submissions).store(taken, Ordering::Release);
                    if asked.op == Op::Give {
                        let given = asked.token..asked.token + asked.count;
                        let is_given = |held: &Option<u32>| held.is_some_and(|token| given.contains(&token));
                        self.held.iter_mut().filter(|held| is_given(held)).for_each(|held| *held = None);
                        continue;
                    }
                    let result = self.handle(asked);
                    let status = result.map_or_else(|errno| -errno.raw_os_error(), |_| 0);
                    let (token, spot) = result.unwrap_or((0, Spot::Nowhere));
                    let completed = Completed { tag: asked.tag, status, token, spot };
                    self.area.store(Ring::Completions, ended, completed.encode());
                    ended = ended.wrapping_add(1);
                    self.area.written(Ring::Completions).store(ended, Ordering::Release);
                }
                ring(&self.socket);
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }

    /// A run of one daemon, which listens at this path.
    struct OfOther(PathBuf);

    impl Run for OfOther {
        type Connection = Framed;

        fn connect(&mut self, _: &dyn Fn(Duration) -> Duration) -> Result<Framed, Error> {
            let options = Options { frames: FRAMES as u32, entries: 512, ..Options::default() };
            Framed::new(Client::connect(&self.0, options)?, PATIENCE)
        }

        fn is_promised(&self) -> bool {
            false
        }

        fn claim(&mut self, _: usize) -> Option<usize> {
            Some(1)
        }

        fn release(&mut self, _: usize) {}

        fn now(&self) -> Duration {
            Duration::ZERO
        }

        fn pause(&mut self) {}

        fn tell(&mut self, line: &str) {
            panic!("{line}");
        }
    }

    #[test]
    fn daemons_whose_runs_are_shorter_or_that_have_none_keep_pages_too() {
        for run_most in [0, 1, 20, 64] {
            let path = std::env::temp_dir().join(format!("weir-runs-{run_most}-{}", std::process::id()));
            let _ = std::fs::remove_file(&path);
            let server = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            rustix::net::bind(&server, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            rustix::net::listen(&server, 1).unwrap();
            let daemon = std::thread::spawn(move || Other::accept(&server, run_most).serve());
            let mut store = Shared::new(OfOther(path.clone())).unwrap();
            std::fs::remove_file(&path).unwrap();
            let first = store.claim().unwrap();
            let mut read = vec![[0; PAGE_SIZE]; BLOCK_PAGES];
            for round in 1..3u8 {
                let page = |at: usize| [round.wrapping_mul(91).wrapping_add(at as u8); PAGE_SIZE];
                let pages: Vec<PageBytes> = (0..BLOCK_PAGES).map(page).collect();
                store.write(first, &pages[..100]).unwrap();
                store.write(first + 100, &pages[100..]).unwrap();
                store.settle().unwrap();
                store.read(first, &mut read).unwrap();
                assert!(read == pages, "{run_most} pages of a run");
                store.read(first + 7, &mut read[..1]).unwrap();
                assert!(read[0] == pages[7], "{run_most} pages of a run");
            }
            drop(store);
            daemon.join().unwrap();
        }
    }

    /// A run whose daemon lives, and does not answer for so long. No other daemon comes.
    struct Late {
        until: Duration,
        now: Duration,
        said: Rc<RefCell<Vec<String>>>,
    }

    impl Run for Late {
        type Connection = Framed;

        fn connect(&mut self, left: &dyn Fn(Duration) -> Duration) -> Result<Framed, Error> {
            let longest = left(self.now);
            if self.now + longest < self.until {
                self.now += longest;
                return Err(Errno::AGAIN.into());
            }
            self.now = self.now.max(self.until);
            // It answers at last. That it refuses shows that it was asked.
            Err(Error::Refused { version: 1, reason: Errno::PERM.into() })
        }

        fn is_promised(&self) -> bool {
            false
        }

        fn claim(&mut self, _: usize) -> Option<usize> {
            None
        }

        fn release(&mut self, _: usize) {}

        fn now(&self) -> Duration {
            self.now
        }

        fn pause(&mut self) {
            self.now += PAUSE;
        }

        fn tell(&mut self, line: &str) {
            self.said.borrow_mut().push(line.to_owned());
        }
    }

    #[test]
    fn a_process_waits_for_the_first_answer_of_a_daemon_that_is_slow_and_says_so_once() {
        for (seconds, lines, is_answered) in [(0, 0, true), (2, 1, true), (59, 1, true), (63, 1, false)] {
            let said = Rc::default();
            let late =
                Late { until: Duration::from_secs(seconds), now: Duration::ZERO, said: Rc::clone(&said) };
            let outcome = Shared::new(late).map(drop).unwrap_err();
            assert_eq!(matches!(outcome, Error::Refused { .. }), is_answered, "{seconds} s: {outcome}");
            assert_eq!(*said.borrow(), vec![SLOW; lines], "{seconds} s");
        }
    }

    #[test]
    fn a_process_without_pages_does_not_wait_for_a_daemon_that_refuses_it() {
        for errno in [Errno::USERS, Errno::NOMEM, Errno::PROTONOSUPPORT] {
            assert!(matches!(Shared::new(Refusing(errno)), Err(Error::Refused { .. })));
        }
    }
}
