//! One connection's share of a trial: random requests on its own pages. Each answer is compared
//! with the shadow.

use super::shadow::{BLOCK, Mismatch, Shadow, next};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use weir_core::PAGE_SIZE;
use weir_core::metrics::Latencies;
use weir_export::nbd::client::{Client, ClientError, Operation};

/// Largest number of requests in flight.
const DEPTH: u64 = 8;
/// Largest number of pages in flight: well below a socket's buffer, so that neither side waits for
/// the other to read.
const PAGES_IN_FLIGHT: u32 = 32;
/// Largest number of mismatches that are described in words; all are counted.
const DESCRIBED: usize = 4;

/// A request's effect on its pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Reads the pages.
    Read,
    /// Writes the pages.
    Write,
    /// Discards the pages.
    Discard,
    /// Fills the pages with zeros.
    Zero,
}

/// All kinds of requests, in the order of the report.
pub const KINDS: [(Kind, &str); 4] =
    [(Kind::Read, "read"), (Kind::Write, "write"), (Kind::Discard, "discard"), (Kind::Zero, "zero")];

/// The counts of one connection.
#[derive(Debug, Default)]
pub struct Tally {
    /// For each of [`KINDS`]: the number of requests answered.
    pub requests: [u64; 4],
    /// For each of [`KINDS`]: the number of pages in its requests.
    pub pages: [u64; 4],
    /// For each of [`KINDS`]: times from sending a request to having its answer.
    pub latencies: [Latencies; 4],
    /// Number of requests that the server answered with an error.
    pub errors: u64,
    /// Number of pages with other content than expected.
    pub mismatches: u64,
    /// The first few errors and mismatches, in words.
    pub complaints: Vec<String>,
}

impl Tally {
    fn complain(&mut self, what: String) {
        if self.complaints.len() < DESCRIBED {
            self.complaints.push(what);
        }
    }

    fn mismatch(&mut self, wrong: &Mismatch) {
        self.mismatches += 1;
        self.complain(wrong.to_string());
    }
}

/// A request under way.
struct Request {
    kind: Kind,
    block: u32,
    pages: Range<u32>,
}

/// An NBD connection, with the expected content of its pages.
#[derive(Debug)]
pub struct Connection {
    client: Client,
    shadow: Shadow,
    random: u64,
    payload: Vec<u8>,
    tally: Tally,
}

impl Connection {
    /// A connection whose pages all read as zeros; `random` is the seed of its requests.
    pub fn new(client: Client, shadow: Shadow, random: u64) -> Self {
        Connection { client, shadow, random, payload: Vec::new(), tally: Tally::default() }
    }

    /// Writes every second block whole, so that reads find content from the start.
    pub fn fill(&mut self) -> Result<(), ClientError> {
        for block in (0..self.shadow.blocks()).step_by(2) {
            self.batch(&[Request { kind: Kind::Write, block, pages: 0..BLOCK }])?;
        }
        Ok(())
    }

    /// Makes random requests until the time is over or another connection gives up.
    pub fn torment(
        &mut self,
        until: Instant,
        stop: &AtomicBool,
        progress: impl Fn(),
    ) -> Result<(), ClientError> {
        while Instant::now() < until && !stop.load(Ordering::Relaxed) {
            let batch = self.choose();
            self.batch(&batch)?;
            progress();
        }
        self.client.perform(Operation::Flush).map(drop)
    }

    /// Number of pages that hold content.
    pub fn written(&self) -> u64 {
        self.shadow.written()
    }

    /// Returns the expected content of the pages, and the connection without it. The connection
    /// then reads another connection's pages.
    pub fn split(self) -> (Shadow, Reader) {
        (self.shadow, Reader { client: self.client, tally: self.tally })
    }

    /// Chooses up to [`DEPTH`] requests, each on a block of its own: answers come in any order, so
    /// no request may affect another.
    fn choose(&mut self) -> Vec<Request> {
        let mut batch: Vec<Request> = Vec::new();
        let mut room = PAGES_IN_FLIGHT;
        for _ in 0..1 + next(&mut self.random) % DEPTH {
            let block = (next(&mut self.random) % u64::from(self.shadow.blocks())) as u32;
            if room == 0 || batch.iter().any(|request| request.block == block) {
                continue;
            }
            // Most requests of a swapping kernel are single pages, and some are whole clusters.
            let most = if next(&mut self.random).is_multiple_of(4) { room } else { 1 };
            let length = 1 + (next(&mut self.random) % u64::from(most)) as u32;
            let first = (next(&mut self.random) % u64::from(BLOCK - length + 1)) as u32;
            let kind = match next(&mut self.random) % 100 {
                0..45 => Kind::Read,
                45..85 => Kind::Write,
                85..93 => Kind::Discard,
                _ => Kind::Zero,
            };
            batch.push(Request { kind, block, pages: first..first + length });
            room -= length;
        }
        batch
    }

    /// Sends requests together, and checks each answer as it comes.
    fn batch(&mut self, requests: &[Request]) -> Result<(), ClientError> {
        let mut under_way = HashMap::with_capacity(requests.len());
        for request in requests {
            let length = request.pages.len() as u32 * PAGE_SIZE as u32;
            let offset = u64::from(self.shadow.page(request.block, request.pages.start)) * PAGE_SIZE as u64;
            self.payload.clear();
            let operation = match request.kind {
                Kind::Read => Operation::read(offset, length),
                Kind::Write => {
                    self.shadow.write(request.block, request.pages.clone(), &mut self.payload);
                    Operation::write(offset, &self.payload)
                }
                Kind::Discard => Operation::Trim { offset, length },
                Kind::Zero => Operation::WriteZeroes { offset, length, fast: false, no_hole: false },
            };
            under_way.insert(self.client.queue(operation), request);
        }
        let sent = Instant::now();
        self.client.send()?;
        for _ in requests {
            let reply = self.client.receive()?;
            let request = under_way[&reply.cookie];
            self.settle(request, reply.result.map(|()| &reply.data[..]), sent.elapsed());
        }
        Ok(())
    }

    fn settle(&mut self, request: &Request, result: Result<&[u8], impl std::fmt::Display>, took: Duration) {
        let Request { kind, block, pages } = request;
        let data = match result {
            Ok(data) => data,
            Err(error) => {
                self.tally.errors += 1;
                if *kind != Kind::Read {
                    self.shadow.forget(*block, pages.clone());
                }
                let page = self.shadow.page(*block, pages.start);
                return self
                    .tally
                    .complain(format!("{kind:?} of {} pages at page {page}: {error}", pages.len()));
            }
        };
        let row = *kind as usize;
        self.tally.requests[row] += 1;
        self.tally.pages[row] += pages.len() as u64;
        self.tally.latencies[row].record(took, 1);
        match kind {
            Kind::Read => self.shadow.check(*block, pages.start, data, |wrong| self.tally.mismatch(&wrong)),
            Kind::Write => {}
            Kind::Discard | Kind::Zero => self.shadow.clear(*block, pages.clone()),
        }
    }
}

/// A connection that only reads from now on.
#[derive(Debug)]
pub struct Reader {
    client: Client,
    tally: Tally,
}

impl Reader {
    /// Reads every page of `shadow`, which another connection wrote: flushed pages must be visible
    /// to every connection.
    pub fn sweep(&mut self, shadow: &Shadow) -> Result<(), ClientError> {
        for block in 0..shadow.blocks() {
            let page = shadow.page(block, 0);
            let read = Operation::read(u64::from(page) * PAGE_SIZE as u64, BLOCK * PAGE_SIZE as u32);
            match self.client.perform(read) {
                Ok(reply) => shadow.check(block, 0, &reply.data, |wrong| self.tally.mismatch(&wrong)),
                Err(ClientError::Failed(error)) => {
                    self.tally.errors += 1;
                    self.tally.complain(format!("final read of {BLOCK} pages at page {page}: {error}"));
                }
                Err(other) => return Err(other),
            }
        }
        Ok(())
    }

    /// Ends the connection in good order, and returns its counts.
    pub fn finish(self) -> Result<Tally, ClientError> {
        self.client.disconnect()?;
        Ok(self.tally)
    }
}
