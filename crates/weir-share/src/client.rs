//! The client of the share transport.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use weir_core::{PAGE_SIZE, PageBytes, copy};
use weir_lease::{BATCH_REFERENCES_MAX, Token, TokenRange};

use crate::area::{Area, Layout, Ring, Window};
use crate::socket::{receive, send, take_rings};
use crate::turn::Offers;
use crate::wire::{
    Completed, Hello, NAME_BYTES_MAX, Op, RUN_MAX, Spot, Submission, VERSION, WELCOME_BYTES, WINDOWS_MAX,
    Welcome,
};

/// The options of a client.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Number of frames: the pages that the client can hold at a time.
    pub frames: u32,
    /// Largest number of requests that can be under way, a power of two.
    pub entries: u32,
    /// Time that the client spins for a completion before it sleeps.
    pub spin: Duration,
    /// Whether to read pages in the stores' memory without a copy, if the server allows it. This
    /// process can then read every page of the volume. The stores' memory stays taken as long as
    /// this process has it mapped.
    pub in_place: bool,
    /// Longest time that the server may take to accept the client, and then to answer the greeting.
    /// After it the call fails with `EAGAIN`. Without it the client waits for ever.
    pub patience: Option<Duration>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            frames: 256,
            entries: 256,
            spin: Duration::from_micros(50),
            in_place: false,
            patience: None,
        }
    }
}

/// The reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No server listens at the path.
    #[error("cannot connect to the share server at {path}; is `weir serve --share` running?")]
    Connect {
        /// The path of the server's socket.
        path: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The server refused the client.
    #[error("the share server (format {version}) refuses: {reason}; this client speaks format {VERSION}")]
    Refused {
        /// The server's version.
        version: u32,
        /// The server's reason.
        reason: io::Error,
    },
    /// The server has no volume of this name.
    #[error("the share server has no volume {volume:?} now; weir volume list shows all")]
    NoVolume {
        /// The name that was asked for; empty: the daemon's own volume.
        volume: String,
    },
    /// The server is of an earlier version of Weir, which knows no names of volumes.
    #[error(
        "the share server is of an earlier version, which serves its own volume alone: replace it, or name no volume"
    )]
    NoNames,
    /// The server is of an earlier version of Weir, which reads and writes single pages only.
    #[error("the share server is of an earlier version, which knows no runs of pages: replace it")]
    NoRuns,
    /// The server violated the format.
    #[error("the share server's {what} makes no sense; is it another version?")]
    Nonsense {
        /// The violation.
        what: &'static str,
    },
    /// The server is gone, and with it all pages that this client held.
    #[error("the share server has gone; connect again")]
    Gone,
    /// The ring is full: take completions first.
    #[error("{entries} requests are under way, and no more fit: take completions first")]
    Full {
        /// Number of entries in the ring.
        entries: u32,
    },
    /// The server could not do the operation.
    #[error("{op:?} of page {page} failed")]
    Failed {
        /// The operation that was asked for.
        op: Op,
        /// The page's number.
        page: u64,
        /// The server's error.
        #[source]
        source: io::Error,
    },
    /// A system call failed.
    #[error("the share connection failed")]
    System(#[from] io::Error),
}

impl From<rustix::io::Errno> for Error {
    fn from(errno: rustix::io::Errno) -> Self {
        Error::System(errno.into())
    }
}

/// A page that this client holds. Return it with [`Client::give`] or [`Client::give_later`]. If a
/// lease is only dropped, the server counts its page as held until the connection closes.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a lease that is dropped stays out"]
pub struct Lease {
    token: Token,
    spot: Spot,
}

impl Lease {
    /// The lease's token.
    pub fn token(&self) -> Token {
        self.token
    }

    /// The place of the page: a frame of the area, or a slot of a window.
    pub fn spot(&self) -> Spot {
        self.spot
    }
}

/// Frames that this client holds, one after another in the area. The client reads and writes runs
/// of pages through them. They stay with the client until its connection closes.
#[derive(Debug)]
pub struct Frames {
    /// The token of the first frame. The tokens of the others follow it.
    token: Token,
    first: u32,
    count: u32,
}

/// A request that has ended.
#[derive(Debug)]
pub struct Completion {
    /// The tag that was given with the request.
    pub tag: u32,
    /// The leased page or frame, if the request was for one.
    pub result: io::Result<Option<Lease>>,
}

/// A connection to a share server.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    area: Area,
    windows: Vec<Window>,
    /// The eventfd that the client writes to wake the server.
    server_bell: OwnedFd,
    pages: u64,
    run_most: u32,
    spin: Duration,
    offers: Offers,
    submitted: u32,
    seen: u32,
    in_flight: u32,
    /// Tokens that go back to the server with the next [`submit`](Client::submit). They form one
    /// range while they come in order.
    returns: Option<TokenRange>,
}

impl Client {
    /// Connects to the server at `path`, for pages of the daemon's own volume.
    ///
    /// # Errors
    /// Fails as [`connect_to`](Client::connect_to) does.
    pub fn connect(path: &Path, options: Options) -> Result<Self, Error> {
        Self::connect_to(path, "", options)
    }

    /// Connects to the server at `path`, for pages of the volume of this name. While the client is
    /// connected, the volume can grow, and neither shrinks nor goes. The client sees the size that
    /// the volume has now.
    ///
    /// # Errors
    /// Fails with [`Error::Connect`], [`Error::Refused`], [`Error::NoVolume`] or
    /// [`Error::NoNames`], and with [`Error::Nonsense`] when another kind of server listens there.
    pub fn connect_to(path: &Path, volume: &str, options: Options) -> Result<Self, Error> {
        Self::greet(path, volume, options, &[])
    }

    /// Does the same as [`Client::connect`], and sends the server at most two descriptors with the
    /// greeting. The server does not use these descriptors. But their open files stay open until
    /// the server has ended this client's requests, even if this process ends earlier.
    ///
    /// # Errors
    /// Fails as [`Client::connect_to`] does.
    pub fn connect_with(path: &Path, options: Options, fds: &[BorrowedFd<'_>]) -> Result<Self, Error> {
        Self::greet(path, "", options, fds)
    }

    fn greet(path: &Path, volume: &str, options: Options, fds: &[BorrowedFd<'_>]) -> Result<Self, Error> {
        if volume.len() > NAME_BYTES_MAX {
            return Err(Error::NoVolume { volume: volume.to_owned() });
        }
        let error = |source: rustix::io::Errno| Error::Connect {
            path: path.display().to_string(),
            source: source.into(),
        };
        let address = SocketAddrUnix::new(path).map_err(error)?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(error)?;
        // These timeouts hold for each wait in a system call on the socket. After the greeting, no
        // system call on the socket waits.
        for side in [Timeout::Send, Timeout::Recv] {
            set_socket_timeout(&socket, side, options.patience).map_err(error)?;
        }
        connect(&socket, &address).map_err(error)?;
        let Options { frames, entries, in_place, .. } = options;
        let hello = Hello { version: VERSION, frames, entries, in_place, volume: volume.as_bytes() };
        match send(&socket, &hello.encode(), fds) {
            // A server without room for another client sends its refusal, and closes the socket
            // before it has read anything. So read the refusal.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            sent => sent?,
        }
        let mut bytes = [0; WELCOME_BYTES];
        let (count, fds) = receive(&socket, &mut bytes)?;
        if count == 0 {
            return Err(Error::Gone);
        }
        let welcome = Welcome::decode(&bytes[..count]).ok_or(Error::Nonsense { what: "greeting" })?;
        if welcome.status != 0 {
            let errno = welcome.status.wrapping_neg();
            return Err(match rustix::io::Errno::from_raw_os_error(errno) {
                rustix::io::Errno::NOENT => Error::NoVolume { volume: volume.to_owned() },
                rustix::io::Errno::PROTO if !volume.is_empty() => Error::NoNames,
                _ => Error::Refused { version: welcome.version, reason: io::Error::from_raw_os_error(errno) },
            });
        }
        let layout =
            Layout::new(welcome.frames, welcome.entries).ok_or(Error::Nonsense { what: "layout" })?;
        let mut fds = fds.into_iter();
        let (Some(area), Some(server_bell)) = (fds.next(), fds.next()) else {
            return Err(Error::Nonsense { what: "set of descriptors" });
        };
        if fds.len() != welcome.windows as usize || welcome.windows > WINDOWS_MAX {
            return Err(Error::Nonsense { what: "number of windows" });
        }
        let windows = fds.map(|fd| Window::open(&fd)).collect::<io::Result<_>>()?;
        Ok(Client {
            socket,
            area: Area::adopt(area, layout)?,
            windows,
            server_bell,
            pages: welcome.pages,
            run_most: welcome.run_most.min(RUN_MAX),
            spin: options.spin,
            offers: Offers::default(),
            submitted: 0,
            seen: 0,
            in_flight: 0,
            returns: None,
        })
    }

    /// Number of pages of the volume.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Number of frames that this client may hold at a time.
    pub fn frames(&self) -> u32 {
        self.area.layout().frames()
    }

    /// Number of requests that are under way.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Asks for a page. [`Client::submit`] sends the request.
    ///
    /// # Errors
    /// Fails with [`Error::Full`] when the ring has no room.
    #[inline]
    pub fn ask_read(&mut self, tag: u32, page: u64) -> Result<(), Error> {
        self.ask(Submission { op: Op::Read, tag, page, token: 0, count: 0 })
    }

    /// Asks for an empty frame, to fill it and then write it to a page.
    ///
    /// # Errors
    /// Fails with [`Error::Full`] when the ring has no room.
    pub fn ask_frame(&mut self, tag: u32) -> Result<(), Error> {
        self.ask(Submission { op: Op::Reserve, tag, page: 0, token: 0, count: 0 })
    }

    /// Asks to write a frame's content to a page. Do not change the frame until the completion. The
    /// lease must be of a frame: for a page in a window the completion is `EBADF`.
    ///
    /// # Errors
    /// Fails with [`Error::Full`] when the ring has no room.
    pub fn ask_write(&mut self, tag: u32, page: u64, lease: &Lease) -> Result<(), Error> {
        self.ask(Submission { op: Op::Write, tag, page, token: lease.token.0, count: 0 })
    }

    /// Asks to discard `count` pages from `page` on.
    ///
    /// # Errors
    /// Fails with [`Error::Full`] when the ring has no room.
    pub fn ask_discard(&mut self, tag: u32, page: u64, count: u32) -> Result<(), Error> {
        self.ask(Submission { op: Op::Discard, tag, page, token: 0, count })
    }

    /// Takes `count` frames that lie one after another, for runs of pages. Call it only while
    /// nothing else is under way. Each wait for an answer takes `longest` at most.
    ///
    /// # Errors
    /// Fails with [`Error::Failed`] if the client may not hold so many frames. Fails with
    /// [`Error::Nonsense`] if the frames do not follow each other, because this client has held
    /// other frames before.
    pub fn take_frames(&mut self, count: u32, longest: Duration) -> Result<Frames, Error> {
        let mut frames: Option<Frames> = None;
        let most = (self.area.layout().entries() / 2).max(1);
        for begun in (0..count).step_by(most as usize) {
            let some = most.min(count - begun);
            for _ in 0..some {
                self.ask_frame(0)?;
            }
            self.submit()?;
            for _ in 0..some {
                let failed = |source| Error::Failed { op: Op::Reserve, page: 0, source };
                let lease = self.wait_for(longest)?.result.map_err(failed)?;
                let Some(Lease { token, spot: Spot::Frame(frame) }) = lease else {
                    return Err(Error::Nonsense { what: "completion" });
                };
                let run = frames.get_or_insert(Frames { token, first: frame, count: 0 });
                if token.0 != run.token.0.wrapping_add(run.count) || frame != run.first + run.count {
                    return Err(Error::Nonsense { what: "row of frames" });
                }
                run.count += 1;
            }
        }
        frames.ok_or(Error::Nonsense { what: "row of frames" })
    }

    /// Largest number of pages of one run. It is 0 if the server is of an earlier version: then ask
    /// for single pages. Such a server can still write from one of [`Frames`] at a time.
    pub fn run_most(&self) -> u32 {
        self.run_most
    }

    /// Asks to read `count` pages from `page` on into the frames from index `at` on. Look at those
    /// frames only after the completion. If one page cannot be read, the completion is its error,
    /// and the frames have any content.
    ///
    /// # Errors
    /// Fails with [`Error::Full`] when the ring has no room, and with [`Error::NoRuns`] if the
    /// server is of an earlier version.
    ///
    /// # Panics
    /// Panics when there are fewer frames.
    pub fn ask_read_run(
        &mut self,
        tag: u32,
        page: u64,
        frames: &Frames,
        at: u32,
        count: u32,
    ) -> Result<(), Error> {
        self.ask_run(Op::ReadRun, tag, page, (frames, at, count))
    }

    /// Asks to write the frames from index `at` on to `count` pages from `page` on. Do not change
    /// those frames until the completion. If the completion is an error, each page has its old
    /// content or its new one.
    ///
    /// # Errors
    /// Fails with [`Error::Full`] when the ring has no room, and with [`Error::NoRuns`] if the
    /// server is of an earlier version and `count` is not 1.
    ///
    /// # Panics
    /// Panics when there are fewer frames.
    pub fn ask_write_run(
        &mut self,
        tag: u32,
        page: u64,
        frames: &Frames,
        at: u32,
        count: u32,
    ) -> Result<(), Error> {
        self.ask_run(Op::WriteRun, tag, page, (frames, at, count))
    }

    fn ask_run(
        &mut self,
        op: Op,
        tag: u32,
        page: u64,
        (frames, at, count): (&Frames, u32, u32),
    ) -> Result<(), Error> {
        assert!(at + count <= frames.count, "frames {at} to {} of {}", at + count, frames.count);
        let token = frames.token.0.wrapping_add(at);
        match op {
            _ if self.run_most > 0 => self.ask(Submission { op, tag, page, token, count }),
            Op::WriteRun if count == 1 => self.ask(Submission { op: Op::Write, tag, page, token, count: 0 }),
            _ => Err(Error::NoRuns),
        }
    }

    /// Copies the frames from index `at` on to `out`.
    ///
    /// # Panics
    /// Panics when there are fewer frames.
    pub fn copy_from_frames(&self, frames: &Frames, at: usize, out: &mut [PageBytes]) {
        assert!(at + out.len() <= frames.count as usize, "frames {at} on of {}", frames.count);
        for (frame, page) in (frames.first + at as u32..).zip(out) {
            // SAFETY: the frame lies in this area, and frames are page-aligned. The server may
            // write it meanwhile, if a read of it is under way: then the copy has any content.
            unsafe { copy::page_from_shared(page, self.area.frame(frame).cast()) };
        }
    }

    /// Copies `pages` to the frames from index `at` on.
    ///
    /// # Panics
    /// Panics when there are fewer frames.
    pub fn copy_to_frames(&mut self, frames: &Frames, at: usize, pages: &[PageBytes]) {
        assert!(at + pages.len() <= frames.count as usize, "frames {at} on of {}", frames.count);
        for (frame, page) in (frames.first + at as u32..).zip(pages) {
            // SAFETY: as in `copy_from_frames`.
            unsafe { copy::page_to_shared(self.area.frame(frame).cast(), page) };
        }
    }

    #[inline]
    fn ask(&mut self, submission: Submission) -> Result<(), Error> {
        // One entry of the ring is kept free, so that frames can always be given back.
        let entries = self.area.layout().entries();
        if self.in_flight + 1 >= entries.max(2) || !self.has_room(1) {
            return Err(Error::Full { entries });
        }
        self.push(submission);
        self.in_flight += 1;
        Ok(())
    }

    #[inline]
    fn has_room(&self, kept: u32) -> bool {
        let taken = self.area.read(Ring::Submissions).load(Ordering::Acquire);
        self.submitted.wrapping_sub(taken) + kept < self.area.layout().entries().max(kept + 1)
    }

    #[inline]
    fn push(&mut self, submission: Submission) {
        self.area.store(Ring::Submissions, self.submitted, submission.encode());
        self.submitted = self.submitted.wrapping_add(1);
    }

    /// The content of a leased page.
    ///
    /// # Panics
    /// Panics for another client's lease, if its frame or window does not exist in this client.
    #[inline]
    pub fn page(&self, lease: &Lease) -> &PageBytes {
        let at = match lease.spot {
            Spot::Frame(frame) => self.area.frame(frame).cast_const(),
            spot => self.in_window(spot).expect("the lease is this client's"),
        };
        // SAFETY: this client holds the frame or slot, so the server does not write it; a write
        // through the client needs `&mut self`.
        unsafe { &*at }
    }

    #[inline]
    fn in_window(&self, spot: Spot) -> Option<*const PageBytes> {
        let Spot::Window { window, slot } = spot else { return None };
        self.windows.get(window as usize)?.slot(slot)
    }

    /// The content of a frame, for writing; `None` for a page in a window.
    pub fn page_mut(&mut self, lease: &mut Lease) -> Option<&mut PageBytes> {
        let Spot::Frame(frame) = lease.spot else { return None };
        // SAFETY: this client holds the frame, and `&mut self` excludes every other reference to
        // it.
        Some(unsafe { &mut *self.area.frame(frame) })
    }

    /// Gives a frame back to the server with the next [`Client::submit`]. Frames that go back in
    /// the order in which they came take one ring entry together.
    ///
    /// # Errors
    /// Fails with [`Error::Gone`] when the server is gone.
    #[expect(clippy::needless_pass_by_value, reason = "what is given back must not be used again")]
    #[inline]
    pub fn give_later(&mut self, lease: Lease) -> Result<(), Error> {
        let token = lease.token;
        match &mut self.returns {
            Some(range)
                if range.start.0.wrapping_add(range.count) == token.0
                    && u64::from(range.count) < BATCH_REFERENCES_MAX =>
            {
                range.count += 1;
            }
            waiting => {
                if let Some(range) = waiting.replace(TokenRange::from(token)) {
                    self.push_returns(range)?;
                }
            }
        }
        Ok(())
    }

    /// Gives a frame back to the server now.
    ///
    /// # Errors
    /// Fails with [`Error::Gone`] when the server is gone.
    pub fn give(&mut self, lease: Lease) -> Result<(), Error> {
        self.give_later(lease)?;
        self.submit()
    }

    fn push_returns(&mut self, range: TokenRange) -> Result<(), Error> {
        while !self.has_room(0) {
            self.publish()?;
            if self.is_gone()? {
                return Err(Error::Gone);
            }
            std::thread::yield_now();
        }
        let TokenRange { start, count } = range;
        self.push(Submission { op: Op::Give, tag: 0, page: 0, token: start.0, count });
        Ok(())
    }

    /// Sends the requests that were made, and the frames that were given back, since the last call.
    /// Wakes the server if it sleeps.
    ///
    /// # Errors
    /// Fails with [`Error::Gone`] when the server is gone.
    pub fn submit(&mut self) -> Result<(), Error> {
        if let Some(range) = self.returns.take() {
            self.push_returns(range)?;
        }
        self.publish()
    }

    fn publish(&mut self) -> Result<(), Error> {
        self.area.written(Ring::Submissions).store(self.submitted, Ordering::Release);
        // The server first notes that it sleeps, and then looks at the ring. This client first
        // writes the ring, and then looks at the note. So at least one of the two notices the
        // other.
        fence(Ordering::SeqCst);
        if self.area.server_asleep().load(Ordering::Relaxed) != 0 {
            self.area.server_asleep().store(0, Ordering::Relaxed);
            rustix::io::write(&self.server_bell, &1u64.to_ne_bytes())?;
        }
        Ok(())
    }

    /// Takes one completion, if there is one.
    ///
    /// # Errors
    /// Fails with [`Error::Nonsense`] when the server names a frame that does not exist.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<Completion>, Error> {
        let written = self.area.written(Ring::Completions).load(Ordering::Acquire);
        if written == self.seen {
            return Ok(None);
        }
        let completed = Completed::decode(self.area.load(Ring::Completions, self.seen));
        self.seen = self.seen.wrapping_add(1);
        self.area.read(Ring::Completions).store(self.seen, Ordering::Release);
        self.in_flight = self.in_flight.saturating_sub(1);
        let Completed { tag, status, token, spot } = completed;
        let known = match spot {
            Spot::Nowhere => true,
            Spot::Frame(frame) => frame < self.frames(),
            Spot::Window { .. } => self.in_window(spot).is_some(),
        };
        let result = match status {
            0 if !known => return Err(Error::Nonsense { what: "frame or slot" }),
            0 if spot == Spot::Nowhere => Ok(None),
            0 => Ok(Some(Lease { token: Token(token), spot })),
            _ => Err(io::Error::from_raw_os_error(status.wrapping_neg())),
        };
        Ok(Some(Completion { tag, result }))
    }

    /// Waits for one completion: spins first, as the options say, then sleeps.
    ///
    /// # Errors
    /// Fails with [`Error::Gone`] when the server goes away meanwhile.
    #[inline]
    pub fn wait(&mut self) -> Result<Completion, Error> {
        self.wait_until(None)
    }

    /// Does the same as [`Client::wait`], but waits for so long at most.
    ///
    /// # Errors
    /// Fails as [`Client::wait`] does, and with `EAGAIN` after that time.
    pub fn wait_for(&mut self, longest: Duration) -> Result<Completion, Error> {
        self.wait_until(Some(Instant::now() + longest))
    }

    #[inline]
    fn wait_until(&mut self, until: Option<Instant>) -> Result<Completion, Error> {
        // Usually a completion is there already, and taking it is cheaper than reading the clock.
        if let Some(completion) = self.poll()? {
            return Ok(completion);
        }
        let begun = Instant::now();
        loop {
            for _ in 0..8 {
                if let Some(completion) = self.poll()? {
                    return Ok(completion);
                }
                std::hint::spin_loop();
            }
            if begun.elapsed() >= self.spin || self.offers.is_crowded() {
                break;
            }
            // Offer the CPU: the scheduler often wakes the server on its client's CPU, where the
            // server must wait for this thread.
            self.offers.offer();
        }
        loop {
            self.area.client_asleep().store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if let Some(completion) = self.poll()? {
                self.area.client_asleep().store(0, Ordering::Relaxed);
                return Ok(completion);
            }
            let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
            rustix::io::retry_on_intr(|| {
                let left = until.map(|until| until.saturating_duration_since(Instant::now()));
                // A conversion fails only for a time of centuries. Then the wait has no limit.
                let left = left.and_then(|left| Timespec::try_from(left).ok());
                poll(&mut fds, left.as_ref())
            })?;
            if until.is_some_and(|until| until <= Instant::now()) {
                return self.poll()?.ok_or_else(|| rustix::io::Errno::AGAIN.into());
            }
            if !take_rings(&self.socket)? {
                // The server is gone. A completion that it sent before is still returned.
                return self.poll()?.ok_or(Error::Gone);
            }
        }
    }

    fn is_gone(&self) -> Result<bool, Error> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        Ok(rustix::io::retry_on_intr(|| poll(&mut fds, Some(&now)))? > 0)
    }

    /// Reads a page and waits for it. Call it only while nothing else is under way.
    ///
    /// # Errors
    /// Fails with [`Error::Failed`]: with `ENOBUFS` while every frame is held, with `EIO` for a
    /// page that is lost.
    pub fn read(&mut self, page: u64) -> Result<Lease, Error> {
        self.ask_read(0, page)?;
        self.one(Op::Read, page)?.ok_or(Error::Nonsense { what: "completion" })
    }

    /// Writes a page from a frame of the client's choice, and waits for the completion. Call this
    /// only while nothing else is under way.
    ///
    /// # Errors
    /// Fails with [`Error::Failed`]: with `ENOBUFS` while every frame is held, with `EIO` when the
    /// page cannot be stored.
    pub fn write(&mut self, page: u64, bytes: &[u8; PAGE_SIZE]) -> Result<(), Error> {
        self.ask_frame(0)?;
        let mut lease = self.one(Op::Reserve, page)?.ok_or(Error::Nonsense { what: "completion" })?;
        self.page_mut(&mut lease)
            .ok_or(Error::Nonsense { what: "frame to write from" })?
            .copy_from_slice(bytes);
        self.ask_write(0, page, &lease)?;
        let written = self.one(Op::Write, page);
        self.give(lease)?;
        written.map(drop)
    }

    fn one(&mut self, op: Op, page: u64) -> Result<Option<Lease>, Error> {
        self.submit()?;
        self.wait()?.result.map_err(|source| Error::Failed { op, page, source })
    }
}

impl AsFd for Client {
    /// Becomes readable when the server wakes this client, which it does only while
    /// [`Client::wait`] sleeps. Hangs up when the server has gone.
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
