//! Simulated daemons of one run, for the store over the share transport. A daemon may die at any
//! request. The ledger says which pager has which room. The pages outlive each daemon, as they do
//! under a keeper.

use super::random::Random;
use super::store::{Faults, Said, rubbish, set_word, word};
use crate::share::{Connection, Ended, FRAMES, Run, Shared};
use crate::{BLOCK_PAGES, Store};
use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weir_core::{PAGE_SIZE, PageBytes};
use weir_share::Error;

/// The deaths of daemons, and the times when their stores do not answer.
#[derive(Clone, Copy, Debug)]
pub struct Deaths {
    /// One request of this many kills the daemon, on average.
    pub one_in: u64,
    /// At one request of this many the store stops answering for a while, on average.
    pub stalls: u64,
    /// The number of the run's last daemon. `None`: after each dead daemon another one comes.
    pub last: Option<u64>,
}

/// The state that outlives a daemon.
#[derive(Debug)]
struct Kept {
    random: Random,
    faults: Faults,
    deaths: Deaths,
    pages: Vec<u64>,
    rooms: BTreeSet<usize>,
    /// The number of the present daemon, or of the last one.
    daemon: u64,
    is_alive: bool,
    /// Number of attempts to connect that still fail until the next daemon is there.
    away: u64,
    /// The pages whose write is under way.
    writing: Vec<u64>,
    now: Duration,
    /// The time until which some requests get no answer of the store.
    stalled_until: Duration,
    /// The time until which no request at all gets one.
    silent_until: Duration,
    /// Number of pauses since the death of the last daemon.
    paused: u64,
}

impl Kept {
    fn is_promised(&self) -> bool {
        self.deaths.last.is_none_or(|last| self.daemon < last)
    }

    /// Kills the present daemon at random now and then. Returns whether that daemon is dead.
    fn dies(&mut self) -> bool {
        if self.is_alive && self.random.one_in(self.deaths.one_in) {
            self.is_alive = false;
            // Its writes that are still under way end with it, those of other connections too.
            self.writing.clear();
            // Now and then the next daemon comes too late, and the wait for it ends.
            let is_late = self.deaths.last.is_some() && self.random.one_in(20);
            self.away = if is_late { u64::MAX } else { self.random.below(60) };
            self.paused = 0;
        }
        !self.is_alive
    }

    /// Whether the store does not answer a request in time.
    fn stalls(&mut self) -> bool {
        if self.now >= self.stalled_until && self.random.one_in(self.deaths.stalls) {
            // Only a program that may lose pages meets a wait that is too long for it.
            let most = if self.deaths.last.is_some() { 70_000 } else { 20_000 };
            self.stalled_until = self.now + Duration::from_millis(self.random.below(most));
        }
        self.now < self.silent_until || self.now < self.stalled_until && self.random.one_in(2)
    }

    /// The error of an attempt to connect while memory, descriptors or seats are short for a
    /// moment.
    fn shortage(&mut self) -> Error {
        match self.random.below(4) {
            0 => Error::System(io::Error::from_raw_os_error(libc::ENOMEM)),
            1 => Error::System(io::Error::from_raw_os_error(libc::EMFILE)),
            2 => Error::Refused { version: 1, reason: io::Error::from_raw_os_error(libc::EUSERS) },
            _ => Error::Refused { version: 1, reason: io::Error::from_raw_os_error(libc::ENOMEM) },
        }
    }
}

/// A request for a run of pages.
#[derive(Clone, Debug)]
struct Request {
    tag: u32,
    is_read: bool,
    pages: Range<u64>,
    /// The index of the first frame.
    at: usize,
}

impl Request {
    /// The frames of the request, as a range of indices.
    fn frames(&self) -> Range<usize> {
        self.at..self.at + (self.pages.end - self.pages.start) as usize
    }
}

/// A connection to one daemon.
#[derive(Debug)]
pub struct Simulated {
    kept: Rc<RefCell<Kept>>,
    daemon: u64,
    /// Largest number of pages of one request. It differs between the daemons of a run, which may
    /// be of several versions.
    run_most: usize,
    frames: Vec<PageBytes>,
    asked: Vec<Request>,
    under_way: Vec<Request>,
    ended: VecDeque<Ended>,
    in_flight: u32,
}

impl Simulated {
    fn ask(&mut self, request: Request) -> Result<(), Error> {
        for page in request.pages.clone() {
            assert!(self.has_room(page), "page {page} of the daemon is not the pager's");
        }
        assert!(request.frames().end <= FRAMES && !request.pages.is_empty());
        assert!(request.frames().len() <= self.run_most, "the daemon takes no request of so many pages");
        assert!(self.is_free(request.frames()), "two requests have the same frames");
        self.asked.push(request);
        self.in_flight += 1;
        Ok(())
    }

    /// Whether no request has these frames.
    fn is_free(&self, frames: Range<usize>) -> bool {
        let mut others = self.asked.iter().chain(&self.under_way).map(Request::frames);
        others.all(|other| other.end <= frames.start || frames.end <= other.start)
    }

    /// Whether the daemon of this connection is dead.
    fn is_gone(&self) -> bool {
        let kept = self.kept.borrow();
        !kept.is_alive || kept.daemon != self.daemon
    }

    /// Does one of the requests that are under way, as the daemon does it.
    fn end_one(&mut self) -> Ended {
        let mut kept = self.kept.borrow_mut();
        let kept = &mut *kept;
        let at = kept.random.below(self.under_way.len() as u64) as usize;
        let request = self.under_way.swap_remove(at);
        let stalls = kept.stalls();
        let mut result = Ok(());
        for (page, frame) in request.pages.clone().zip(request.frames()) {
            let fails = kept.random.one_in(match request.is_read {
                true => kept.faults.unreadable,
                false => kept.faults.doomed,
            });
            if fails || stalls {
                let errno = if stalls { libc::ETIMEDOUT } else { libc::EIO };
                result = Err(io::Error::from_raw_os_error(errno));
            }
            // A request that fails may leave rubbish. A write that gets no answer changes nothing.
            let rubbish = result.is_err().then(|| rubbish(&mut kept.random));
            if request.is_read {
                set_word(&mut self.frames[frame], rubbish.unwrap_or(kept.pages[page as usize]));
                continue;
            }
            kept.writing.retain(|other| *other != page);
            if !stalls {
                kept.pages[page as usize] = rubbish.unwrap_or(word(&self.frames[frame]));
            }
        }
        (request.tag, result)
    }
}

impl Connection for Simulated {
    fn pages(&self) -> u64 {
        self.kept.borrow().pages.len() as u64
    }

    fn run_most(&self) -> usize {
        self.run_most
    }

    fn in_flight(&self) -> u32 {
        self.in_flight
    }

    fn ask_read(&mut self, tag: u32, page: u64, at: usize, count: usize) -> Result<(), Error> {
        self.ask(Request { tag, is_read: true, pages: page..page + count as u64, at })
    }

    fn ask_write(&mut self, tag: u32, page: u64, at: usize, count: usize) -> Result<(), Error> {
        self.ask(Request { tag, is_read: false, pages: page..page + count as u64, at })
    }

    fn submit(&mut self) -> Result<(), Error> {
        // As with shared memory, nobody notices here that the daemon is dead.
        if !self.is_gone() {
            let mut kept = self.kept.borrow_mut();
            for request in self.asked.iter().filter(|request| !request.is_read) {
                for page in request.pages.clone() {
                    assert!(!kept.writing.contains(&page), "two writes of one page are under way");
                    kept.writing.push(page);
                }
            }
            drop(kept);
            self.under_way.append(&mut self.asked);
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<Ended, Error> {
        while self.ended.is_empty() {
            if self.is_gone() {
                return Err(Error::Gone);
            }
            assert!(!self.under_way.is_empty(), "the client waits for nothing");
            // Some of the requests under way end before the daemon dies. The client gets the
            // completions of some of these, and never gets those of the others.
            let dies = self.kept.borrow_mut().dies();
            let hears = if dies { self.kept.borrow_mut().random.below(3) } else { 1 };
            let ends = if dies { self.kept.borrow_mut().random.below(9) } else { 1 };
            for number in 0..ends.min(self.under_way.len() as u64) {
                let ended = self.end_one();
                if number < hears {
                    self.ended.push_back(ended);
                }
            }
        }
        self.in_flight -= 1;
        Ok(self.ended.pop_front().expect("one has ended"))
    }

    fn copy_from_frames(&self, at: usize, out: &mut [PageBytes]) {
        out.copy_from_slice(&self.frames[at..at + out.len()]);
    }

    fn copy_to_frames(&mut self, at: usize, pages: &[PageBytes]) {
        assert!(self.is_free(at..at + pages.len()), "the frames of a request are changed");
        self.frames[at..at + pages.len()].copy_from_slice(pages);
    }
}

impl Simulated {
    fn has_room(&self, page: u64) -> bool {
        self.kept.borrow().rooms.contains(&(page as usize / BLOCK_PAGES))
    }
}

pub struct SimulatedRun(Rc<RefCell<Kept>>);

impl Run for SimulatedRun {
    type Connection = Simulated;

    fn connect(&mut self, _: &dyn Fn(Duration) -> Duration) -> Result<Simulated, Error> {
        let mut kept = self.0.borrow_mut();
        if !kept.is_alive && (kept.away > 0 || !kept.is_promised()) {
            kept.away = kept.away.saturating_sub(1);
            let source = io::ErrorKind::ConnectionRefused.into();
            return Err(Error::Connect { path: String::new(), source });
        }
        if !kept.is_alive {
            kept.is_alive = true;
            kept.daemon += 1;
        }
        if kept.dies() {
            return Err(Error::Gone);
        }
        if kept.daemon > 1 && kept.random.one_in(3) {
            return Err(kept.shortage());
        }
        Ok(Simulated {
            kept: Rc::clone(&self.0),
            daemon: kept.daemon,
            run_most: [64, 64, 20, 1][kept.random.below(4) as usize],
            frames: vec![[0; PAGE_SIZE]; FRAMES],
            asked: Vec::new(),
            under_way: Vec::new(),
            ended: VecDeque::new(),
            in_flight: 0,
        })
    }

    fn is_promised(&self) -> bool {
        self.0.borrow().is_promised()
    }

    fn claim(&mut self, limit: usize) -> Option<usize> {
        let mut kept = self.0.borrow_mut();
        let free: Vec<usize> = (0..limit).filter(|room| !kept.rooms.contains(room)).collect();
        let room = *free.get(kept.random.below(free.len() as u64) as usize)?;
        for page in room * BLOCK_PAGES..(room + 1) * BLOCK_PAGES {
            kept.pages[page] = rubbish(&mut kept.random);
        }
        kept.rooms.insert(room);
        Some(room)
    }

    fn release(&mut self, room: usize) {
        let mut kept = self.0.borrow_mut();
        assert!(kept.rooms.remove(&room), "room {room} was not claimed");
        let late = kept.writing.iter().find(|page| **page as usize / BLOCK_PAGES == room);
        assert_eq!(late, None, "a write is under way to room that is given back");
    }

    fn now(&self) -> Duration {
        self.0.borrow().now
    }

    fn pause(&mut self) {
        let mut kept = self.0.borrow_mut();
        kept.now += Duration::from_millis(2);
        kept.paused += 1;
        // A connection may wait for a store before it hears that the daemon has died: some times,
        // and for many pauses each.
        let is_awaited = kept.is_alive || kept.is_promised() || kept.paused < 1_000;
        assert!(is_awaited, "a pager waits for a daemon that nobody promises");
        assert!(kept.paused < 1_000_000, "a pager waits for ever");
    }

    fn tell(&mut self, _: &str) {}
}

/// The store over a simulated run. It counts the failures, for the checks of the simulated program.
pub struct Mortal {
    store: Shared<SimulatedRun>,
    run: Rc<RefCell<Kept>>,
    deaths: Deaths,
    pub said: Arc<Mutex<Said>>,
}

impl Mortal {
    pub fn new(random: Random, faults: Faults, deaths: Deaths) -> Self {
        let kept = Kept {
            random,
            faults,
            deaths: Deaths { one_in: 0, stalls: 0, ..deaths },
            pages: vec![0; faults.rooms as usize * BLOCK_PAGES],
            rooms: BTreeSet::new(),
            daemon: 0,
            is_alive: false,
            away: 0,
            writing: Vec::new(),
            now: Duration::ZERO,
            stalled_until: Duration::ZERO,
            silent_until: Duration::ZERO,
            paused: 0,
        };
        let run = Rc::new(RefCell::new(kept));
        let store = Shared::new(SimulatedRun(Rc::clone(&run))).expect("nobody dies yet");
        Mortal { store, run, said: Arc::default(), deaths }
    }

    /// From now on daemons die.
    pub fn begin_deaths(&self) {
        self.run.borrow_mut().deaths = self.deaths;
    }

    /// A further connection to the same daemon.
    pub fn lane(&self) -> Self {
        let run = Rc::clone(&self.run);
        let store = Shared::open(SimulatedRun(Rc::clone(&run))).expect("nobody dies yet");
        Mortal { store, run, deaths: self.deaths, said: Arc::clone(&self.said) }
    }

    fn note<T>(&self, result: io::Result<T>, count: impl Fn(&mut Said) -> &mut u64) -> io::Result<T> {
        if result.is_err() {
            *count(&mut self.said.lock().unwrap()) += 1;
        }
        self.said.lock().unwrap().rooms = self.run.borrow().rooms.len();
        result
    }
}

impl Store for Mortal {
    fn claim(&mut self) -> Option<u64> {
        let room = self.store.claim();
        let _ = self.note(room.ok_or(io::ErrorKind::StorageFull.into()), |said| &mut said.refused);
        room
    }

    fn release(&mut self, first: u64) {
        self.store.release(first);
        let _ = self.note(Ok(()), |said| &mut said.refused);
    }

    fn write(&mut self, first: u64, pages: &[PageBytes]) -> io::Result<()> {
        let result = self.store.write(first, pages);
        self.note(result, |said| &mut said.refused)
    }

    fn settle(&mut self) -> io::Result<()> {
        let result = self.store.settle();
        self.note(result, |said| &mut said.refused)
    }

    fn read(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()> {
        let result = self.store.read(first, out);
        self.note(result, |said| &mut said.unreadable)
    }

    fn read_ahead(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()> {
        // The pager loses no page if this fails.
        self.store.read_ahead(first, out)
    }

    fn heed(&mut self, hurry: Arc<AtomicBool>) {
        self.store.heed(hurry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> Mortal {
        let faults = Faults { rooms: 4, ..Faults::default() };
        Mortal::new(Random::new(5), faults, Deaths { one_in: 0, stalls: 0, last: None })
    }

    /// Has no request get an answer of the store for so long.
    fn silence(store: &Mortal, seconds: u64) {
        let mut kept = store.run.borrow_mut();
        kept.silent_until = kept.now + Duration::from_secs(seconds);
    }

    #[test]
    fn a_store_that_stands_still_for_a_while_costs_no_page_and_a_helper_does_not_wait_for_it() {
        let mut store = store();
        let mut lane = store.lane();
        let first = store.claim().unwrap();
        let pages: Vec<PageBytes> = (0..4).map(|page| [page as u8; PAGE_SIZE]).collect();
        let words = |pages: &[PageBytes]| pages.iter().map(word).collect::<Vec<u64>>();
        for of in [&mut store, &mut lane] {
            silence(of, 50);
            of.write(first, &pages).unwrap();
            of.settle().unwrap();
        }
        let mut read = vec![[0; PAGE_SIZE]; 4];
        silence(&store, 50);
        let begun = store.run.borrow().now;
        for of in [&mut store, &mut lane] {
            let late = of.read_ahead(first, &mut read);
            assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
            assert_eq!(of.run.borrow().now, begun, "it waits for pages that nobody may need");
        }
        store.read(first, &mut read).unwrap();
        assert_eq!(words(&read), words(&pages));
        // The wait has an end. Once the store answers again, it is waited for again.
        silence(&store, 1000);
        assert_eq!(store.read(first, &mut read).unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(store.run.borrow().now - begun >= Duration::from_secs(60));
        silence(&store, 0);
        store.read(first, &mut read).unwrap();
        silence(&store, 50);
        store.read(first, &mut read).unwrap();
        assert_eq!(words(&read), words(&pages));
        // So it is, if nobody has asked for a long time since the last wait.
        silence(&store, 1000);
        store.read(first, &mut read).unwrap_err();
        silence(&store, 0);
        store.run.borrow_mut().now += Duration::from_secs(100);
        silence(&store, 50);
        store.read(first, &mut read).unwrap();
        // A page that is lost is an answer too.
        silence(&store, 1000);
        store.read(first, &mut read).unwrap_err();
        silence(&store, 0);
        store.run.borrow_mut().faults.unreadable = 1;
        assert_eq!(store.read(first, &mut read).unwrap_err().raw_os_error(), Some(libc::EIO));
        store.run.borrow_mut().faults.unreadable = 0;
        silence(&store, 50);
        store.read(first, &mut read).unwrap();
    }

    #[test]
    fn a_write_is_given_up_if_somebody_cannot_wait_for_the_store() {
        let mut store = store();
        let first = store.claim().unwrap();
        let hurry = Arc::new(AtomicBool::new(true));
        store.heed(Arc::clone(&hurry));
        silence(&store, 1000);
        let begun = store.run.borrow().now;
        store.write(first, &[[7; PAGE_SIZE]; 2]).unwrap();
        assert_eq!(store.settle().unwrap_err().kind(), io::ErrorKind::Interrupted);
        assert_eq!(store.run.borrow().now, begun);
        hurry.store(false, Ordering::Relaxed);
        silence(&store, 0);
        store.write(first, &[[8; PAGE_SIZE]; 2]).unwrap();
        store.settle().unwrap();
        let mut read = [[0; PAGE_SIZE]; 2];
        store.read(first, &mut read).unwrap();
        assert_eq!(read[1][..8], [8; 8]);
    }
}
