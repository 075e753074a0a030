//! The announcements of a batch to a slow store: how much comes, before its first operation, and
//! all operations before any wait.

mod common;

use common::{Served, few, noise};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use weir_core::{ByteSize, PAGE_SIZE, PageBytes, Slot};
use weir_export::nbd::client::Operation;
use weir_store::{Done, Lane, OpenError, Progress, Sim, SimUrl, State, Store, Ticket};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Call {
    Plan(usize, usize),
    Read,
    Write,
    /// A submit with something queued.
    Submit,
    Poll,
}

/// A slow store that notes its calls.
#[derive(Debug)]
struct Watched {
    store: Sim,
    /// The calls, in memory taken in advance: the process is sealed.
    calls: Arc<Mutex<Vec<Call>>>,
}

struct WatchedLane {
    lane: Box<dyn Lane>,
    calls: Arc<Mutex<Vec<Call>>>,
    /// Whether operations were begun since the last submit. Other lanes note their calls too, also
    /// that of a connection which has ended, at any time.
    has_queued: bool,
}

impl WatchedLane {
    fn note(&self, call: Call) {
        let mut calls = self.calls.lock().unwrap();
        // Polls in a row count as one.
        if calls.last() != Some(&Call::Poll) || call != Call::Poll {
            assert!(calls.len() < calls.capacity());
            calls.push(call);
        }
    }
}

impl Store for Watched {
    fn name(&self) -> &str {
        "watched"
    }

    fn slots(&self) -> u32 {
        self.store.slots()
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        Ok(Box::new(WatchedLane {
            lane: self.store.lane(depth)?,
            calls: Arc::clone(&self.calls),
            has_queued: false,
        }))
    }

    fn state(&self, member: u32) -> State {
        self.store.state(member)
    }

    fn unfit_for_swap(&self) -> Option<String> {
        None
    }
}

impl Lane for WatchedLane {
    fn plan(&mut self, reads: usize, writes: usize) {
        self.note(Call::Plan(reads, writes));
    }

    fn heeds_plan(&self) -> bool {
        true
    }

    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        self.note(Call::Write);
        self.has_queued = true;
        self.lane.write(ticket, slot, page)
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress {
        self.note(Call::Read);
        self.has_queued = true;
        self.lane.read(ticket, slot, page)
    }

    fn submit(&mut self) {
        if std::mem::take(&mut self.has_queued) {
            self.note(Call::Submit);
        }
        self.lane.submit();
    }

    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        if self.lane.in_flight() > 0 {
            self.note(Call::Poll);
        }
        self.lane.poll(now, done);
    }

    fn in_flight(&self) -> usize {
        self.lane.in_flight()
    }
}

const PAGES: u32 = 1024;

fn served(name: &str) -> (Served, Arc<Mutex<Vec<Call>>>) {
    let calls = Arc::new(Mutex::new(Vec::with_capacity(1 << 16)));
    let served = Served::over(name, PAGES, &few(), |slots| {
        let size = ByteSize(u64::from(slots) * PAGE_SIZE as u64);
        let url = SimUrl { size, delay: 5, ..SimUrl::default() };
        Arc::new(Watched { store: Sim::open(url).unwrap(), calls: Arc::clone(&calls) })
    });
    served.client().write(0, &noise(1, PAGES as usize * PAGE_SIZE)).unwrap();
    // The lane of a connection that ends submits and polls once more, and then the end is logged.
    assert!(served.logs(": the connection was closed"));
    calls.lock().unwrap().clear();
    (served, calls)
}

/// The operations announced and done up to the first poll, and all of them.
fn counts(calls: &[Call]) -> ([usize; 4], [usize; 4]) {
    let (mut sum, mut early) = ([0; 4], None);
    for call in calls {
        match call {
            Call::Plan(reads, writes) => (sum[0], sum[1]) = (sum[0] + reads, sum[1] + writes),
            Call::Read => sum[2] += 1,
            Call::Write => sum[3] += 1,
            Call::Submit => {}
            Call::Poll => early = early.or(Some(sum)),
        }
        assert!(sum[2] <= sum[0] && sum[3] <= sum[1], "done before it was announced: {calls:?}");
    }
    (early.unwrap_or(sum), sum)
}

#[test]
fn a_batch_of_reads_is_announced_once_and_all_begun_before_the_first_is_waited_for() {
    let (served, calls) = served("plan-reads");
    let mut client = served.client();
    for at in 0..32 {
        client.queue(Operation::read(at * 3 * PAGE_SIZE as u64, PAGE_SIZE as u32));
    }
    client.send().unwrap();
    while client.in_flight() > 0 {
        assert_eq!(client.receive().unwrap().result, Ok(()));
    }
    let calls = calls.lock().unwrap().clone();
    assert_eq!(calls[0], Call::Plan(32, 0), "{calls:?}");
    assert_eq!(counts(&calls), ([32, 0, 32, 0], [32, 0, 32, 0]), "{calls:?}");
    served.shutdown();
}

#[test]
fn a_read_of_a_mebibyte_is_one_batch_wherever_it_begins() {
    for (name, offset, pages) in [("plan-mebibyte", 0, 256), ("plan-ragged", 5000, 257)] {
        let (served, calls) = served(name);
        let mut client = served.client();
        // The lane has room for 256; the unaligned range's last page comes after one has come back.
        let begun = pages.min(256);
        assert!(client.read(offset, 1 << 20).unwrap() == noise(1, 8 << 20)[offset as usize..][..1 << 20]);
        let calls = calls.lock().unwrap().clone();
        assert_eq!(calls[0], Call::Plan(pages, 0), "{calls:?}");
        let (early, all) = counts(&calls);
        assert_eq!((early[2], all[2]), (begun, pages), "{calls:?}");
        served.shutdown();
    }
}

#[test]
fn writes_are_announced_with_the_reads_that_come_with_them() {
    let (served, calls) = served("plan-both");
    let mut client = served.client();
    let data = noise(2, 8 * PAGE_SIZE);
    for at in 0..4 {
        client.queue(Operation::write(at * data.len() as u64, &data));
        client.queue(Operation::read((512 + at) * PAGE_SIZE as u64, PAGE_SIZE as u32));
    }
    client.send().unwrap();
    while client.in_flight() > 0 {
        assert_eq!(client.receive().unwrap().result, Ok(()));
    }
    let calls = calls.lock().unwrap().clone();
    let (_, all) = counts(&calls);
    assert_eq!(all, [4, 32, 4, 32], "{calls:?}");
    served.shutdown();
}

#[test]
fn pages_that_lie_in_no_store_are_not_announced() {
    let (served, calls) = served("plan-nothing");
    let mut client = served.client();
    client.perform(Operation::Trim { offset: 0, length: 64 << 10 }).unwrap();
    assert_eq!(client.read(0, 128 << 10).unwrap()[..64 << 10], [0; 64 << 10]);
    let calls = calls.lock().unwrap().clone();
    assert_eq!(calls[0], Call::Plan(16, 0), "{calls:?}");
    served.shutdown();
}

#[test]
fn a_long_read_is_started_piece_by_piece_and_the_next_piece_before_the_last_is_sent() {
    let (served, calls) = served("pieces");
    for mut client in [served.client(), served.simple_client()] {
        // A simple reply is sent whole, not piece by piece.
        let structured = client.terms().structured;
        client.read(0, 4 << 20).unwrap();
        let mut noted = calls.lock().unwrap();
        let calls = noted.clone();
        noted.clear();
        drop(noted);
        if structured {
            let before_first_poll = calls.iter().take_while(|call| **call != Call::Poll);
            let pieces: Vec<&Call> = before_first_poll.filter(|call| **call != Call::Read).collect();
            assert!(
                matches!(pieces[..], [Call::Plan(..), Call::Submit, Call::Submit, Call::Submit, ..]),
                "{pieces:?}"
            );
            let first = calls.iter().position(|call| *call == Call::Submit).unwrap();
            let reads = calls[..first].iter().filter(|call| **call == Call::Read).count();
            assert_eq!(reads, 64, "the first piece is 256 KiB");
        }
        assert_eq!(calls.iter().filter(|call| **call == Call::Read).count() % 1024, 0);
    }
    served.shutdown();
}
