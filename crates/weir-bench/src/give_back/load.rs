//! Programs that use the device: each has pages of its own, reads one, checks it, writes another,
//! and notes the times.

use super::GiveBackError;
use crate::report::percentile;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE, PageBytes};
use weir_export::nbd::client::{Client, ClientError, Wish};

/// Number of pages in one write, while the device is filled.
const FILL: u64 = 256;
/// Number of latencies that are stored between two resets; later ones overwrite earlier ones.
const NOTED: usize = 1 << 20;

/// The latencies that the programs measured.
#[derive(Clone, Copy, Debug)]
pub struct Noticed {
    pub p99_us: f64,
}

/// Counts over all programs: pages that were read and checked, and pages with wrong content.
#[derive(Clone, Copy, Debug, Default)]
pub struct Total {
    pub checked: u64,
    pub mismatches: u64,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    checked: AtomicU64,
    mismatches: AtomicU64,
    times: Mutex<Vec<u64>>,
}

/// The programs that use the device, each as a thread.
pub struct Load {
    shared: Arc<Shared>,
    users: Vec<JoinHandle<Result<(), ClientError>>>,
}

impl Load {
    /// Fills the whole device, then starts `users` programs.
    pub fn start(socket: &Path, size: ByteSize, users: usize) -> Result<Self, GiveBackError> {
        let users = users.max(1) as u64;
        let pages = size.0 / PAGE_SIZE as u64 / users;
        let mut clients = Vec::new();
        for user in 0..users {
            clients.push((user * pages, Client::unix(socket, &Wish::default())?));
        }
        std::thread::scope(|scope| {
            let fills: Vec<_> = clients
                .iter_mut()
                .map(|(first, client)| scope.spawn(|| fill(client, *first, pages)))
                .collect();
            fills.into_iter().try_for_each(|fill| fill.join().expect("no panic"))
        })?;
        let shared = Arc::new(Shared::default());
        let users = clients.into_iter().map(|(first, client)| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || {
                let outcome = work(client, first, pages, &shared);
                shared.stop.store(true, Ordering::Relaxed);
                outcome
            })
        });
        Ok(Load { users: users.collect(), shared })
    }

    /// Drops the latencies that were noted so far.
    pub fn reset(&self) {
        self.times().clear();
    }

    /// The latencies that were noted since the last reset.
    pub fn taken(&self) -> Result<Noticed, GiveBackError> {
        if self.shared.stop.load(Ordering::Relaxed) {
            return Err(GiveBackError::Process {
                what: "a user of the device",
                why: "its connection broke".into(),
            });
        }
        let mut times = std::mem::take(&mut *self.times());
        Ok(Noticed { p99_us: percentile(&mut times, 99.0) as f64 / 1e3 })
    }

    /// Lets the programs work for `length`. Returns the latencies of that time.
    pub fn during(&self, length: Duration) -> Result<Noticed, GiveBackError> {
        self.reset();
        std::thread::sleep(length);
        self.taken()
    }

    /// Ends the programs, and returns their counts.
    pub fn stop(self) -> Result<Total, GiveBackError> {
        self.shared.stop.store(true, Ordering::Relaxed);
        for user in self.users {
            user.join().expect("no panic")?;
        }
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Ok(Total { checked: read(&self.shared.checked), mismatches: read(&self.shared.mismatches) })
    }

    fn times(&self) -> std::sync::MutexGuard<'_, Vec<u64>> {
        self.shared.times.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Fills a page with the content of its write number `round`. No two words are equal, so that the
/// page does not compress.
fn stamp(bytes: &mut PageBytes, page: u64, round: u32) {
    let seed = page << 24 ^ u64::from(round);
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = (seed ^ (at as u64) << 52).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&(value ^ value >> 29).to_le_bytes());
    }
}

fn fill(client: &mut Client, first: u64, pages: u64) -> Result<(), ClientError> {
    let mut bytes = vec![0; FILL as usize * PAGE_SIZE];
    for start in (0..pages).step_by(FILL as usize) {
        let count = FILL.min(pages - start);
        for (at, page) in bytes.as_chunks_mut::<PAGE_SIZE>().0.iter_mut().take(count as usize).enumerate() {
            stamp(page, first + start + at as u64, 0);
        }
        client.write((first + start) * PAGE_SIZE as u64, &bytes[..count as usize * PAGE_SIZE])?;
    }
    Ok(())
}

fn work(mut client: Client, first: u64, pages: u64, shared: &Shared) -> Result<(), ClientError> {
    let mut rounds = vec![0u32; pages as usize];
    let mut expected = [0; PAGE_SIZE];
    let mut random = first.wrapping_mul(0x2545_f491_4f6c_dd1d) | 1;
    while !shared.stop.load(Ordering::Relaxed) {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = (random >> 33) % pages;
        let (page, round) = (first + at, &mut rounds[at as usize]);
        let offset = page * PAGE_SIZE as u64;
        let is_write = random >> 32 & 1 == 1;
        *round += u32::from(is_write);
        stamp(&mut expected, page, *round);
        let began = Instant::now();
        let found = if is_write {
            client.write(offset, &expected)?;
            None
        } else {
            Some(client.read(offset, PAGE_SIZE as u32)?)
        };
        let took = began.elapsed().as_nanos() as u64;
        if let Some(found) = found {
            shared.checked.fetch_add(1, Ordering::Relaxed);
            shared.mismatches.fetch_add(u64::from(found != expected), Ordering::Relaxed);
        }
        let mut times = shared.times.lock().unwrap_or_else(PoisonError::into_inner);
        if times.len() < NOTED {
            times.push(took);
        } else {
            times[random as usize % NOTED] = took;
        }
    }
    // At the end read every page once more, also the pages of requests that failed.
    for (at, round) in (0..).zip(&rounds) {
        let page = first + at;
        stamp(&mut expected, page, *round);
        let found = client.read(page * PAGE_SIZE as u64, PAGE_SIZE as u32)?;
        shared.checked.fetch_add(1, Ordering::Relaxed);
        shared.mismatches.fetch_add(u64::from(found != expected), Ordering::Relaxed);
    }
    Ok(())
}
