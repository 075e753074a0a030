//! One process of the torture: it writes its pages in one order, reads them back in others,
//! rewrites some, and reads all of them a last time.

use crate::pattern::{self, Contents, Identity, Mismatch, Page, Random, WORDS, mix};
use crate::swap;
use std::time::{Duration, Instant};

/// Number of mismatches that are described; the others are only counted.
const DESCRIBED: u64 = 8;

/// The task of one process.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// The run's seed.
    pub seed: u64,
    /// The number of this process among the run's.
    pub process: u64,
    /// Number of pages that it touches.
    pub pages: usize,
    /// The kind of content of its pages.
    pub contents: Contents,
    /// KiB of used swap at which no more pages are touched; `None`: all are touched.
    pub until_swap_kib: Option<u64>,
    /// After that, rounds of reading everything back go on for at least this long; the last round
    /// always finishes.
    pub at_least: Duration,
}

/// Number of pages between two looks at swap use.
const LOOK_EACH: usize = 16;

/// The counts of a process's work.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Number of pages that it touched.
    pub touched: u64,
    /// Number of pages written, with rewrites.
    pub written: u64,
    /// Number of pages read back and compared.
    pub checked: u64,
    /// Number of pages that were not what was written.
    pub mismatches: u64,
    /// Number of requests that the device answered with an error.
    pub refused: u64,
    /// The longest time that one page took, in microseconds: its page fault, with all delays.
    pub longest_us: u64,
}

impl Tally {
    /// Adds another process's counts; the longest time is the longer of both.
    pub fn add(&mut self, other: Tally) {
        self.touched += other.touched;
        self.written += other.written;
        self.checked += other.checked;
        self.mismatches += other.mismatches;
        self.refused += other.refused;
        self.longest_us = self.longest_us.max(other.longest_us);
    }

    /// Formats the counts as one line, for the parent process.
    pub fn to_line(self) -> String {
        let Tally { touched, written, checked, mismatches, refused, longest_us } = self;
        format!("{touched} {written} {checked} {mismatches} {refused} {longest_us}")
    }

    /// Parses that line.
    pub fn from_line(line: &str) -> Option<Tally> {
        let mut numbers = line.split(' ').map(str::parse);
        let mut number = || numbers.next()?.ok();
        let touched = number()?;
        let (written, checked) = (number()?, number()?);
        let (mismatches, refused, longest_us) = (number()?, number()?, number()?);
        Some(Tally { touched, written, checked, mismatches, refused, longest_us })
    }
}

/// Does the work. Calls `complain` for the first mismatches.
pub fn run(work: Work, mut complain: impl FnMut(&str)) -> Tally {
    let writer = mix(work.seed ^ mix(work.process));
    let mut random = Random(writer);
    let mut memory = Memory::new(writer, work);
    let pages = memory.fill(work, &mut random);
    let started = Instant::now();
    loop {
        let last = started.elapsed() >= work.at_least;
        for number in random.order(pages) {
            memory.check(number as usize, &mut complain);
            if !last && random.draw().is_multiple_of(2) {
                memory.write(number as usize);
            }
        }
        if last {
            return memory.tally;
        }
    }
}

/// Counts a page with wrong content, and describes the first few.
pub(crate) fn describe(
    tally: &mut Tally,
    complain: &mut impl FnMut(&str),
    number: usize,
    wanted: &str,
    found: Mismatch,
) {
    tally.mismatches += 1;
    if tally.mismatches <= DESCRIBED {
        complain(&format!("page {number}, {wanted}: {found}"));
    }
}

/// The tortured pages, and the expected content of each.
struct Memory {
    writer: u64,
    contents: Contents,
    /// The words of the pages from `first` on. They are zeros that the kernel provides lazily: a
    /// page gets memory when the torture's order comes to it. (A vector of page-aligned elements
    /// would be zeroed at once.)
    words: Vec<u64>,
    first: usize,
    generations: Vec<u32>,
    tally: Tally,
    last: Instant,
}

impl Memory {
    fn new(writer: u64, Work { pages: count, contents, .. }: Work) -> Self {
        let words = vec![0; (count + 1) * WORDS];
        let first = words.as_ptr().align_offset(weir_core::PAGE_SIZE);
        Memory {
            writer,
            contents,
            words,
            first,
            generations: vec![0; count],
            tally: Tally::default(),
            last: Instant::now(),
        }
    }

    /// Writes each page once, or only the first ones, until that much swap is in use. Returns how
    /// many.
    fn fill(&mut self, work: Work, random: &mut Random) -> usize {
        let mut pages = work.pages;
        if let Some(most) = work.until_swap_kib {
            let full = |page: usize| {
                page.is_multiple_of(LOOK_EACH) && swap::used_kib().is_ok_and(|used| used >= most)
            };
            pages = (0..work.pages).take_while(|page| !full(*page)).inspect(|page| self.write(*page)).count();
        } else {
            random.order(pages).into_iter().for_each(|number| self.write(number as usize));
        }
        self.tally.touched = pages as u64;
        pages
    }

    fn page(&mut self, number: usize) -> &mut Page {
        let words = &mut self.words[self.first + number * WORDS..][..WORDS];
        words.try_into().expect("a slice of so many words")
    }

    fn identity(&self, number: usize) -> Identity {
        let generation = u64::from(self.generations[number]);
        Identity { writer: self.writer, number: number as u64, generation, contents: self.contents }
    }

    fn write(&mut self, number: usize) {
        self.generations[number] += 1;
        let identity = self.identity(number);
        pattern::fill(self.page(number), identity);
        self.tally.written += 1;
        self.clock();
    }

    fn check(&mut self, number: usize, complain: &mut impl FnMut(&str)) {
        let identity = self.identity(number);
        if let Err(mismatch) = pattern::check(self.page(number), identity) {
            let wanted = format!("generation {}", identity.generation);
            describe(&mut self.tally, complain, number, &wanted, mismatch);
        }
        self.tally.checked += 1;
        self.clock();
    }

    fn clock(&mut self) {
        let now = Instant::now();
        let took = now.duration_since(self.last).as_micros() as u64;
        self.tally.longest_us = self.tally.longest_us.max(took);
        self.last = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: Work = Work {
        seed: 1,
        process: 0,
        pages: 300,
        contents: Contents::Noise,
        until_swap_kib: None,
        at_least: Duration::ZERO,
    };

    #[test]
    fn every_page_is_written_and_read_back() {
        let tally = run(WORK, |line| panic!("{line}"));
        assert_eq!((tally.touched, tally.written, tally.checked, tally.mismatches), (300, 300, 300, 0));
    }

    #[test]
    fn so_much_swap_in_use_ends_the_filling_and_what_was_touched_is_read_back() {
        let none = run(Work { until_swap_kib: Some(0), ..WORK }, |line| panic!("{line}"));
        assert_eq!((none.touched, none.written, none.checked), (0, 0, 0));
        let all = run(Work { until_swap_kib: Some(u64::MAX), ..WORK }, |line| panic!("{line}"));
        assert_eq!((all.touched, all.written, all.checked, all.mismatches), (300, 300, 300, 0));
    }

    #[test]
    fn rounds_go_on_for_the_time_given_and_rewrite_about_half() {
        let tally = run(Work { at_least: Duration::from_secs(1), ..WORK }, |line| panic!("{line}"));
        assert!(tally.checked >= 600 && tally.checked.is_multiple_of(300), "{tally:?}");
        assert!(tally.written > 300 && tally.written < tally.checked, "{tally:?}");
    }

    #[test]
    fn a_page_changed_behind_its_back_is_counted_and_described() {
        let mut memory = Memory::new(9, Work { pages: 4, ..WORK });
        (0..4).for_each(|number| memory.write(number));
        memory.page(2)[100] ^= 1;
        let mut said = Vec::new();
        (0..4).for_each(|number| memory.check(number, &mut |line: &str| said.push(line.to_owned())));
        assert_eq!(memory.tally.mismatches, 1);
        assert_eq!(said, ["page 2, generation 1: damaged from byte 800"]);
    }

    #[test]
    fn a_tally_survives_its_line() {
        let tally = Tally { touched: 5, written: 1, checked: 2, mismatches: 3, refused: 6, longest_us: 4 };
        assert_eq!(Tally::from_line(&tally.to_line()), Some(tally));
        assert_eq!(Tally::from_line("5 1 2 x 6 4"), None);
    }
}
