//! A volume as a page device.

use crate::{Guard, Lane, STORES_MAX, Volume};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;
use weir_core::{PageBytes, PageNo};
use weir_device::{Coming, Done, PageDevice, PageGuard, PageLane, Progress, Ticket, View, WAKE_FDS_MAX};
use weir_store::OpenError;

// For each store, a lane has at most one descriptor that can wake the lane's owner.
const _: () = assert!(STORES_MAX <= WAKE_FDS_MAX);

impl PageDevice for Volume {
    type Lane = Lane;
    type Error = OpenError;

    fn pages(&self) -> u32 {
        self.pages()
    }

    fn open(self: &Arc<Self>) -> Result<Lane, OpenError> {
        self.lane()
    }
}

impl PageLane for Lane {
    type Guard<'a> = Guard<'a>;

    fn pages(&self) -> u32 {
        self.volume().pages()
    }

    fn announce(&mut self, coming: impl Iterator<Item = Coming>) {
        let Some(mut batch) = self.batch() else { return };
        for part in coming {
            match part {
                Coming::Reads(first, count) => batch.reads((first.0..first.0 + count).map(PageNo)),
                Coming::Writes(count) => batch.writes(count as usize),
            }
        }
        batch.announce();
    }

    #[inline]
    fn read(&mut self, ticket: Ticket, page: PageNo, out: &mut PageBytes) -> Progress {
        self.read(ticket, page, out)
    }

    fn read_run(&mut self, first: PageNo, out: &mut [PageBytes]) -> usize {
        self.read_run(first, out)
    }

    fn queue_reads(&mut self, ticket: Ticket, first: PageNo, count: usize) -> usize {
        self.queue_reads(ticket, first, count)
    }

    #[inline]
    fn write(&mut self, ticket: Ticket, page: PageNo, bytes: &PageBytes) -> Progress {
        self.write(ticket, page, bytes)
    }

    fn write_part(&mut self, ticket: Ticket, page: PageNo, offset: usize, bytes: &[u8]) -> Progress {
        self.write_part(ticket, page, offset, bytes)
    }

    fn write_run(&mut self, first: PageNo, pages: &[PageBytes]) -> usize {
        self.write_run(first, pages)
    }

    fn queue_writes(&mut self, ticket: Ticket, first: PageNo, pages: &[PageBytes]) -> usize {
        self.queue_writes(ticket, first, pages)
    }

    fn discard(&mut self, first: PageNo, count: u32) {
        self.discard(first, count);
    }

    fn zero(&mut self, first: PageNo, count: u32, holes: bool) {
        self.zero(first, count, holes);
    }

    /// Does nothing: no store holds pages longer than the volume lives, so an acknowledged page is
    /// as safe as it can be.
    fn flush(&mut self, _ticket: Ticket) -> Progress {
        Progress::Done(Ok(()))
    }

    #[inline]
    fn pin(&mut self) -> Guard<'_> {
        self.pin()
    }

    fn forsake(&mut self, whose: impl Fn(Ticket) -> bool) {
        self.forsake(whose);
    }

    fn hold(&mut self, holds: bool) {
        self.hold(holds);
    }

    fn mapped(&self, page: PageNo) -> bool {
        self.mapped(page)
    }

    fn known_zero(&self, page: PageNo) -> bool {
        self.known_zero(page)
    }

    fn submit(&mut self) {
        self.submit();
    }

    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        self.poll(now, done);
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.in_flight()
    }

    fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.wake_fds()
    }

    fn must_poll(&self) -> bool {
        self.must_poll()
    }
}

impl PageGuard for Guard<'_> {
    #[inline]
    fn view(&self, page: PageNo) -> View<'_> {
        self.view(page)
    }

    #[inline]
    fn prefetch(&self, page: PageNo) {
        self.prefetch(page);
    }

    fn count_reads(&self, pages: u64, faults: u64) {
        self.count_reads(pages, faults);
    }
}
