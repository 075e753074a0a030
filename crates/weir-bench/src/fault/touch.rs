//! The child process of the fault benchmark. It goes through more memory than its limit lets it
//! keep in RAM.

use super::bare;
use crate::policy::Zipf;
use crate::report::percentile;
use crate::splitmix;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};
use weir_core::PAGE_SIZE;

const PAGE_WORDS: usize = PAGE_SIZE / size_of::<f64>();
/// Passes of one kind go on until there are at least `PASSES_MIN` of them and `PASSES_TIME` is
/// over.
const PASSES_MIN: u32 = 2;
const PASSES_TIME: Duration = Duration::from_millis(300);
/// Number of threads that go through the memory together, a part each.
pub(super) const THREADS: usize = 16;
/// Largest number of touches of single pages that are timed.
const TOUCHES_MAX: usize = 500_000;

/// The figures that one child process measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Touch {
    /// Seconds of a pass that reads all memory in order.
    pub sweep_read_s: f64,
    /// Seconds of a pass that changes every word in order.
    pub sweep_write_s: f64,
    /// Seconds of a pass in which 16 threads read a part of the memory each, in order.
    pub threads_read_s: f64,
    /// Seconds of a pass in which 16 threads change every word of a part each, in order.
    pub threads_write_s: f64,
    /// Seconds that a gate takes, for each bit of a word's index, from the lowest bit on. A gate is
    /// a pass that changes pairs of words whose indices differ in that bit alone. The two words of
    /// a pair lie 8 bytes apart for the lowest bit, and half of the memory for the highest.
    pub gates_s: Vec<f64>,
    /// Mean microseconds of touching a random page.
    pub uniform_us: f64,
    /// Median microseconds of touching a random page.
    pub uniform_p50_us: f64,
    /// 99th percentile of the microseconds of touching a random page.
    pub uniform_p99_us: f64,
    /// Mean microseconds of touching a page that is drawn by Zipf's law with exponent 0.99.
    pub zipf_us: f64,
    /// Number of words that did not have the expected content.
    pub mismatches: u64,
    /// The largest resident size, as /proc reports it.
    pub peak_kib: u64,
}

/// The way in which the child's memory in RAM is limited.
#[derive(Clone, Copy, Debug)]
pub enum Bound<'a> {
    /// The child itself has nothing to do: its parent process bounds it, or it has no limit.
    Outside,
    /// This memory cgroup bounds the child.
    Cgroup(&'a Path),
    /// The bare handler of page faults keeps at most this many bytes of the child in RAM.
    Bare(usize),
}

/// Runs the child's work.
///
/// # Errors
/// Fails when the child cannot enter its limit or has no memory.
pub fn touch(bytes: u64, time: Duration, bound: Bound<'_>) -> io::Result<Touch> {
    if let Bound::Cgroup(entrance) = bound {
        std::fs::write(entrance, "0")?;
    }
    let mut state = State::new(bytes as usize, bound)?;
    let mut touch = Touch::default();
    let mut sum = 0.0;
    touch.sweep_read_s = passes(|| sum += total(state.words));
    std::hint::black_box(sum);
    touch.sweep_write_s = passes(|| {
        add_one(state.words);
        state.added += 1.0;
    });
    let part = state.words.len().div_ceil(THREADS);
    touch.threads_read_s = passes(|| {
        std::thread::scope(|scope| {
            for words in state.words.chunks(part) {
                scope.spawn(|| std::hint::black_box(total(words)));
            }
        });
    });
    touch.threads_write_s = passes(|| {
        std::thread::scope(|scope| {
            for words in state.words.chunks_mut(part) {
                scope.spawn(|| add_one(words));
            }
        });
        state.added += 1.0;
    });
    for bit in 0..state.words.len().ilog2() {
        let begun = Instant::now();
        state.gate(bit);
        touch.gates_s.push(begun.elapsed().as_secs_f64());
    }
    let mut random = 0x9e37_79b9_7f4a_7c15;
    let pages = state.words.len() / PAGE_WORDS;
    let mut wrong = 0;
    let mut taken = singles(time, || {
        let page = splitmix(&mut random) as usize % pages;
        wrong += u64::from(!state.is_right(page * PAGE_WORDS));
    });
    touch.uniform_us = mean(&taken);
    touch.uniform_p50_us = percentile(&mut taken, 50.0) as f64 / 1e3;
    touch.uniform_p99_us = percentile(&mut taken, 99.0) as f64 / 1e3;
    let zipf = Zipf::new(pages as u32, 0.99);
    let taken = singles(time, || {
        let page = zipf.draw(&mut random) as usize;
        wrong += u64::from(!state.is_right(page * PAGE_WORDS));
    });
    touch.zipf_us = mean(&taken);
    wrong += (0..state.words.len()).filter(|&at| !state.is_right(at)).count() as u64;
    touch.mismatches = wrong;
    touch.peak_kib = peak_kib()?;
    Ok(touch)
}

/// The sum of the words, as eight sums. A single one would wait for each addition, not for memory.
fn total(words: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    for words in words.chunks_exact(sums.len()) {
        for (sum, word) in sums.iter_mut().zip(words) {
            *sum += word;
        }
    }
    sums.iter().sum()
}

/// Changes every word.
fn add_one(words: &mut [f64]) {
    words.iter_mut().for_each(|word| *word += 1.0);
}

/// Runs passes, and returns the mean time of one in seconds.
fn passes(mut pass: impl FnMut()) -> f64 {
    let begun = Instant::now();
    let mut count = 0;
    while count < PASSES_MIN || begun.elapsed() < PASSES_TIME {
        pass();
        count += 1;
    }
    begun.elapsed().as_secs_f64() / f64::from(count)
}

/// Touches single pages, and returns the nanoseconds that each touch took.
fn singles(time: Duration, mut touch: impl FnMut()) -> Vec<u64> {
    let begun = Instant::now();
    let mut taken = Vec::with_capacity(TOUCHES_MAX);
    while begun.elapsed() < time && taken.len() < TOUCHES_MAX {
        let before = Instant::now();
        touch();
        taken.push(before.elapsed().as_nanos() as u64);
    }
    taken
}

fn mean(taken: &[u64]) -> f64 {
    taken.iter().sum::<u64>() as f64 / 1e3 / taken.len().max(1) as f64
}

/// Memory whose expected content is always known. Its words are floating-point numbers, but nothing
/// is ever rounded: a pass adds 1 to each word, and a gate only swaps two words and changes the
/// sign of one.
struct State {
    words: &'static mut [f64],
    added: f64,
    /// For each bit of a word's index, the number of gates that were applied to it.
    turns: [u32; usize::BITS as usize],
}

impl State {
    fn new(bytes: usize, bound: Bound<'_>) -> io::Result<State> {
        let map = || {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            // SAFETY: a fresh mapping at an address of the kernel's choice overlaps no other. It is
            // never unmapped.
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) }
        };
        let start = map()?;
        let advise = |at, advice| {
            // SAFETY: advice on how large pages are changes no content. A kernel without huge pages
            // returns EINVAL.
            let _ = unsafe { rustix::mm::madvise(at, bytes, advice) };
        };
        match bound {
            // Ask for huge pages, as a careful program does.
            Bound::Outside => advise(start, Advice::LinuxHugepage),
            // Ask for small pages, since swap takes pages of 4 KiB. When the kernel must split a
            // huge page while the child is at its limit, it may kill the child.
            Bound::Cgroup(_) => advise(start, Advice::LinuxNoHugepage),
            Bound::Bare(limit) => {
                let store = map()?;
                advise(start, Advice::LinuxNoHugepage);
                advise(store, Advice::LinuxNoHugepage);
                bare::bound(start.expose_provenance(), store.expose_provenance(), bytes, limit)?;
            }
        }
        // SAFETY: the memory is mapped for this many bytes, in whole pages, and nothing else uses
        // it.
        let words = unsafe { std::slice::from_raw_parts_mut(start.cast::<f64>(), bytes / size_of::<f64>()) };
        for (at, word) in words.iter_mut().enumerate() {
            *word = first(at);
        }
        Ok(State { words, added: 0.0, turns: [0; usize::BITS as usize] })
    }

    /// Applies a gate: turns each pair of words `(a, b)` whose indices differ in `bit` alone into
    /// `(-b, a)`.
    fn gate(&mut self, bit: u32) {
        let apart = 1 << bit;
        for pair in self.words.chunks_exact_mut(2 * apart) {
            let (low, high) = pair.split_at_mut(apart);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (-*b, *a);
            }
        }
        self.turns[bit as usize] += 1;
    }

    fn is_right(&self, at: usize) -> bool {
        let (mut from, mut is_negative) = (at, false);
        for (bit, turns) in self.turns.iter().enumerate() {
            let is_high = at >> bit & 1 != 0;
            match turns % 4 {
                1 => {
                    from ^= 1 << bit;
                    is_negative ^= !is_high;
                }
                2 => is_negative ^= true,
                3 => {
                    from ^= 1 << bit;
                    is_negative ^= is_high;
                }
                _ => {}
            }
        }
        let value = first(from) + self.added;
        self.words[at] == if is_negative { -value } else { value }
    }
}

/// The first content of a word: half of each page compresses to nothing, half does not compress.
fn first(at: usize) -> f64 {
    if at % PAGE_WORDS < PAGE_WORDS / 2 { (splitmix(&mut (at as u64)) >> 16) as f64 } else { 1.0 }
}

fn peak_kib() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    peak.and_then(|peak| peak.split_whitespace().next()?.parse().ok())
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_known_after_any_number_of_gates_and_a_wrong_one_is_seen() {
        let mut state = State::new(4 * PAGE_SIZE, Bound::Outside).expect("memory");
        state.words.iter_mut().for_each(|word| *word += 1.0);
        state.added += 1.0;
        let all = |state: &State| (0..state.words.len()).all(|at| state.is_right(at));
        for bit in [0, 3, 0, 10, 3, 3, 10, 0, 0, 10] {
            state.gate(bit);
            assert!(all(&state), "after a gate on {bit}");
        }
        state.words[777] += 1.0;
        assert!(!all(&state));
    }

    #[test]
    fn a_child_without_a_limit_finds_everything_right() {
        let touched = touch(1 << 21, Duration::from_millis(20), Bound::Outside).expect("memory");
        assert_eq!(touched.mismatches, 0);
        assert!(touched.sweep_read_s > 0.0 && touched.gates_s.len() == 18);
        assert!(touched.gates_s.iter().all(|seconds| *seconds > 0.0));
    }

    #[test]
    fn a_bare_handler_keeps_what_is_out() {
        let limit = 64 * PAGE_SIZE;
        match touch(1 << 21, Duration::from_millis(50), Bound::Bare(limit)) {
            Ok(touched) => assert_eq!(touched.mismatches, 0),
            Err(error) => println!("\nskipped: a_bare_handler_keeps_what_is_out: {error}"),
        }
    }
}
