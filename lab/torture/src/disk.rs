//! The same pages on a block device that may refuse requests for a while, for a program that goes
//! on after errors.
//!
//! A write that was answered with an error may have happened or not, so a page may have its content
//! or the earlier one. Once a newer generation was acknowledged or read, an older one is never
//! right.

use crate::pattern::{self, Contents, Identity, Mismatch, Random, WORDS, mix};
use crate::worker::{Tally, Work, describe};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};
use weir_core::PAGE_SIZE;

/// Pages of the longest request.
const RUN_MAX: usize = 8;
/// Longest time that a page may be refused once the work is done.
const PATIENCE: Duration = Duration::from_secs(120);
/// Pause before a refused page is asked for again.
const PAUSE: Duration = Duration::from_millis(100);

/// Writes and reads for the given time, then reads every page once more; errors may delay that only
/// for so long.
///
/// # Errors
/// Fails with an answer of the device other than that it could not do the request, or not in time.
pub fn run(work: Work, device: &Path, complain: impl FnMut(&str)) -> io::Result<Tally> {
    let file =
        OpenOptions::new().read(true).write(true).custom_flags(OFlags::DIRECT.bits() as i32).open(device)?;
    Torture::new(work, file, complain).run(work)
}

/// The possible contents of one page.
#[derive(Clone, Copy, Default)]
struct May {
    /// The oldest possible generation: acknowledged, or read.
    oldest: u32,
    /// The newest possible generation: its write was tried.
    newest: u32,
}

struct Torture<F> {
    file: File,
    writer: u64,
    contents: Contents,
    /// The device's page number of this process's first page.
    base: usize,
    pages: Vec<May>,
    /// The memory of a request.
    memory: Vec<weir_core::Page>,
    tally: Tally,
    complain: F,
}

impl<F: FnMut(&str)> Torture<F> {
    fn new(work: Work, file: File, complain: F) -> Self {
        Torture {
            file,
            writer: mix(work.seed ^ mix(work.process)),
            contents: work.contents,
            base: work.process as usize * work.pages,
            pages: vec![May::default(); work.pages],
            memory: vec![weir_core::Page::zeroed(); RUN_MAX],
            tally: Tally { touched: work.pages as u64, ..Tally::default() },
            complain,
        }
    }

    fn run(mut self, work: Work) -> io::Result<Tally> {
        let mut random = Random(self.writer);
        let begun = Instant::now();
        let (mut first, mut length) = (0, 1);
        while begun.elapsed() < work.at_least {
            // Every other request is for the same pages again: a late write is noticed if something
            // newer came meanwhile.
            if random.draw().is_multiple_of(2) {
                // Most requests are short, as page faults are.
                length = if random.draw().is_multiple_of(4) { RUN_MAX } else { 1 }.min(work.pages);
                first = (random.draw() % (work.pages - length + 1) as u64) as usize;
            }
            let done = match random.draw() % 2 {
                0 => self.write(first, length)?,
                _ => self.read(first, length)?,
            };
            if !done {
                self.tally.refused += 1;
            }
        }
        for number in 0..work.pages {
            let begun = Instant::now();
            while !self.read(number, 1)? {
                if begun.elapsed() > PATIENCE {
                    return Err(io::Error::other(format!(
                        "page {number} is refused {PATIENCE:?} after the work"
                    )));
                }
                std::thread::sleep(PAUSE);
            }
        }
        Ok(self.tally)
    }

    /// Writes the next generation of `length` pages; returns whether the device did.
    fn write(&mut self, first: usize, length: usize) -> io::Result<bool> {
        for index in 0..length {
            self.pages[first + index].newest += 1;
            let mut words = [0; WORDS];
            pattern::fill(&mut words, self.identity(first + index));
            for (bytes, word) in self.memory[index].chunks_exact_mut(8).zip(words) {
                bytes.copy_from_slice(&word.to_ne_bytes());
            }
        }
        let slices: Vec<_> = self.memory[..length].iter().map(|page| IoSlice::new(&page[..])).collect();
        let begun = Instant::now();
        let done = answered(rustix::io::pwritev(&self.file, &slices, self.at(first)), length)?;
        self.timed(begun);
        if done {
            for page in &mut self.pages[first..first + length] {
                page.oldest = page.newest;
            }
            self.tally.written += length as u64;
        }
        Ok(done)
    }

    /// Reads `length` pages and checks each; returns whether the device did.
    fn read(&mut self, first: usize, length: usize) -> io::Result<bool> {
        let at = self.at(first);
        let mut slices: Vec<_> =
            self.memory[..length].iter_mut().map(|page| IoSliceMut::new(&mut page[..])).collect();
        let begun = Instant::now();
        let done = answered(rustix::io::preadv(&self.file, &mut slices, at), length)?;
        self.timed(begun);
        if done {
            (0..length).for_each(|index| self.check(first + index, index));
        }
        Ok(done)
    }

    fn check(&mut self, number: usize, index: usize) {
        let identity = self.identity(number);
        let may = self.pages[number];
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(self.memory[index].chunks_exact(8)) {
            *word = u64::from_ne_bytes(bytes.try_into().expect("a chunk of eight"));
        }
        let found = match pattern::check(&words, identity) {
            Ok(()) => Ok(may.newest),
            Err(Mismatch::Zeros) if may.oldest == 0 => Ok(0),
            Err(Mismatch::Stale { generation })
                if (u64::from(may.oldest)..identity.generation).contains(&generation) =>
            {
                Ok(generation as u32)
            }
            Err(mismatch) => Err(mismatch),
        };
        self.tally.checked += 1;
        match found {
            Ok(generation) => self.pages[number].oldest = generation,
            Err(mismatch) => {
                let wanted = format!("generations {} to {}", may.oldest, may.newest);
                describe(&mut self.tally, &mut self.complain, number, &wanted, mismatch);
            }
        }
    }

    fn identity(&self, number: usize) -> Identity {
        let generation = u64::from(self.pages[number].newest);
        Identity { writer: self.writer, number: number as u64, generation, contents: self.contents }
    }

    fn at(&self, number: usize) -> u64 {
        ((self.base + number) * PAGE_SIZE) as u64
    }

    fn timed(&mut self, begun: Instant) {
        self.tally.longest_us = self.tally.longest_us.max(begun.elapsed().as_micros() as u64);
    }
}

/// Whether the whole request was done. An error of a device that stalls is no error of the
/// torture's.
fn answered(result: rustix::io::Result<usize>, pages: usize) -> io::Result<bool> {
    match result {
        Ok(bytes) => Ok(bytes == pages * PAGE_SIZE),
        Err(Errno::IO | Errno::TIMEDOUT) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    const WORK: Work = Work {
        seed: 3,
        process: 1,
        pages: 64,
        contents: Contents::Noise,
        until_swap_kib: None,
        at_least: Duration::from_millis(300),
    };

    fn file(name: &str) -> (std::path::PathBuf, File) {
        let path = std::env::temp_dir().join(format!("weir-torture-{name}-{}", std::process::id()));
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path);
        let file = open.expect("a temporary file");
        file.set_len((2 * WORK.pages * PAGE_SIZE) as u64).expect("room");
        (path, file)
    }

    #[test]
    fn a_device_that_keeps_what_it_is_given_passes() {
        let (path, file) = file("keeps");
        let tally = Torture::new(WORK, file, |line: &str| panic!("{line}")).run(WORK).expect("done");
        std::fs::remove_file(path).expect("removed");
        assert_eq!((tally.touched, tally.mismatches, tally.refused), (64, 0, 0));
        assert!(tally.written > 0 && tally.checked > 64, "{tally:?}");
    }

    #[test]
    fn a_refused_write_may_be_there_or_not_but_what_was_seen_does_not_go_back() {
        let (path, file) = file("refused");
        let device = file.try_clone().expect("another");
        let mut said = Vec::new();
        let mut torture = Torture::new(WORK, file, |line: &str| said.push(line.to_owned()));
        let at = torture.at(5);
        let mut content = [0; PAGE_SIZE];
        assert!(torture.write(5, 1).expect("written"));
        device.read_exact_at(&mut content, at).expect("read");
        let first = content;
        // A failed write was tried, and its outcome is unknown.
        torture.pages[5].newest = 2;
        assert!(torture.read(5, 1).expect("the first is still right"));
        assert!(torture.write(5, 1).expect("written"));
        torture.pages[5].oldest = 1;
        assert!(torture.read(5, 1).expect("so is the newest"));
        assert_eq!((torture.pages[5].oldest, torture.tally.mismatches), (3, 0));
        device.write_all_at(&first, at).expect("an old write lands");
        assert!(torture.read(5, 1).expect("read"));
        device.write_all_at(&[0; PAGE_SIZE], at).expect("zeros");
        assert!(torture.read(5, 1).expect("read"));
        assert_eq!(torture.tally.mismatches, 2);
        std::fs::remove_file(path).expect("removed");
        assert_eq!(
            said,
            ["page 5, generations 3 to 3: stale, generation 1", "page 5, generations 3 to 3: all zeros"]
        );
    }

    #[test]
    fn only_what_stalls_is_forgiven() {
        assert!(answered(Ok(PAGE_SIZE), 1).expect("done"));
        assert!(!answered(Ok(0), 1).expect("short"));
        assert!(!answered(Err(Errno::IO), 1).expect("refused"));
        assert!(!answered(Err(Errno::TIMEDOUT), 1).expect("refused"));
        assert!(answered(Err(Errno::NOSPC), 1).is_err());
    }
}
