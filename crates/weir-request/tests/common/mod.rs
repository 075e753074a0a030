//! A filter over any page lane: it answers late, has no room, and fails, by a seed.

use std::os::fd::BorrowedFd;
use std::time::Instant;
use weir_core::{PAGE_SIZE, PageBytes, PageNo};
use weir_device::{Done, Fault, PageLane, Progress, Ticket};

/// The filter's faults, each in percent of operations.
#[derive(Clone, Copy, Debug)]
pub struct Mood {
    pub late: u64,
    pub full: u64,
    pub fails: u64,
    /// Most polls that a late operation waits for.
    pub polls: u64,
}

enum Held {
    Read,
    Write(Box<PageBytes>),
    Part(usize, Vec<u8>),
    Run(Vec<PageBytes>),
    Flush,
    Forsaken,
}

pub struct Moody<L> {
    inner: L,
    pub mood: Mood,
    state: u64,
    held: Vec<(Ticket, PageNo, Held, u64)>,
    /// Number of flushes that reached the device below.
    pub flushes: usize,
}

impl<L: PageLane> Moody<L> {
    pub fn new(inner: L, mood: Mood, seed: u64) -> Self {
        Moody { inner, mood, state: seed | 1, held: Vec::new(), flushes: 0 }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) % end
    }

    /// The fate of an operation; `None`: it goes through at once.
    fn fate(&mut self, ticket: Ticket, page: PageNo, held: impl FnOnce() -> Held) -> Option<Progress> {
        let Mood { late, full, fails, polls } = self.mood;
        let drawn = self.below(100);
        if drawn < full {
            return Some(Progress::Full);
        } else if drawn < full + fails {
            return Some(Progress::Done(Err(Fault::Io(5))));
        } else if drawn < full + fails + late {
            let due = 1 + self.below(polls);
            self.held.push((ticket, page, held(), due));
            return Some(Progress::Queued);
        }
        None
    }
}

impl<L: PageLane> PageLane for Moody<L> {
    type Guard<'a>
        = L::Guard<'a>
    where
        Self: 'a;

    fn pages(&self) -> u32 {
        self.inner.pages()
    }
    fn read(&mut self, ticket: Ticket, page: PageNo, out: &mut PageBytes) -> Progress {
        self.fate(ticket, page, || Held::Read).unwrap_or_else(|| self.inner.read(ticket, page, out))
    }
    fn read_run(&mut self, first: PageNo, out: &mut [PageBytes]) -> usize {
        let count = self.below(out.len() as u64 + 1) as usize;
        self.inner.read_run(first, &mut out[..count])
    }
    fn queue_reads(&mut self, ticket: Ticket, first: PageNo, count: usize) -> usize {
        let count = if self.below(100) < self.mood.late { self.below(count as u64 + 1) } else { 0 };
        for at in 0..count as u32 {
            let due = 1 + self.below(self.mood.polls);
            self.held.push((ticket + at, PageNo(first.0 + at), Held::Read, due));
        }
        count as usize
    }
    fn write(&mut self, ticket: Ticket, page: PageNo, bytes: &PageBytes) -> Progress {
        let fate = self.fate(ticket, page, || Held::Write(Box::new(*bytes)));
        fate.unwrap_or_else(|| self.inner.write(ticket, page, bytes))
    }
    fn write_part(&mut self, ticket: Ticket, page: PageNo, offset: usize, bytes: &[u8]) -> Progress {
        let fate = self.fate(ticket, page, || Held::Part(offset, bytes.to_vec()));
        fate.unwrap_or_else(|| self.inner.write_part(ticket, page, offset, bytes))
    }
    fn write_run(&mut self, first: PageNo, pages: &[PageBytes]) -> usize {
        let count = self.below(pages.len() as u64 + 1) as usize;
        self.inner.write_run(first, &pages[..count])
    }
    fn queue_writes(&mut self, ticket: Ticket, first: PageNo, pages: &[PageBytes]) -> usize {
        let count =
            if self.below(100) < self.mood.late { self.below(pages.len() as u64 + 1) as usize } else { 0 };
        if count > 0 {
            let due = 1 + self.below(self.mood.polls);
            self.held.push((ticket, first, Held::Run(pages[..count].to_vec()), due));
        }
        count
    }
    fn discard(&mut self, first: PageNo, count: u32) {
        self.inner.discard(first, count);
    }
    fn zero(&mut self, first: PageNo, count: u32, holes: bool) {
        self.inner.zero(first, count, holes);
    }
    fn flush(&mut self, ticket: Ticket) -> Progress {
        self.flushes += 1;
        self.fate(ticket, PageNo(0), || Held::Flush).unwrap_or_else(|| self.inner.flush(ticket))
    }
    fn pin(&mut self) -> Self::Guard<'_> {
        self.inner.pin()
    }
    fn forsake(&mut self, whose: impl Fn(Ticket) -> bool) {
        for (ticket, _, held, _) in &mut self.held {
            if whose(*ticket) && !matches!(held, Held::Read | Held::Flush) {
                *held = Held::Forsaken;
            }
        }
        self.inner.forsake(whose);
    }
    fn hold(&mut self, holds: bool) {
        self.inner.hold(holds);
    }
    fn known_zero(&self, page: PageNo) -> bool {
        self.inner.known_zero(page)
    }
    fn submit(&mut self) {
        self.inner.submit();
    }
    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        self.inner.poll(now, done);
        self.held.iter_mut().for_each(|(.., due)| *due -= 1);
        while let Some(at) = self.held.iter().position(|(.., due)| *due == 0) {
            let (ticket, page, held, _) = self.held.swap_remove(at);
            let mut read = [0; PAGE_SIZE];
            let progress = match &held {
                Held::Read => self.inner.read(ticket, page, &mut read),
                Held::Write(bytes) => self.inner.write(ticket, page, bytes),
                Held::Run(pages) => {
                    let mut pages = pages.iter().zip(page.0..);
                    // The device below answers each at once.
                    let failed = pages.find(|(bytes, at)| {
                        self.inner.write(ticket, PageNo(*at), bytes) != Progress::Done(Ok(()))
                    });
                    Progress::Done(failed.map_or(Ok(()), |_| Err(Fault::Io(5))))
                }
                Held::Part(offset, bytes) => self.inner.write_part(ticket, page, *offset, bytes),
                Held::Flush => self.inner.flush(ticket),
                Held::Forsaken => Progress::Done(Err(Fault::Forsaken)),
            };
            match progress {
                Progress::Queued => {}
                Progress::Full => self.held.push((ticket, page, held, 1)),
                Progress::Done(result) => {
                    let page = (matches!(held, Held::Read) && result.is_ok()).then_some(&read);
                    done(Done { ticket, result, page });
                }
            }
            if progress == Progress::Full {
                break;
            }
        }
        self.inner.submit();
    }
    fn in_flight(&self) -> usize {
        self.held.len() + self.inner.in_flight()
    }
    fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.inner.wake_fds()
    }
    fn must_poll(&self) -> bool {
        !self.held.is_empty() || self.inner.must_poll()
    }
}
