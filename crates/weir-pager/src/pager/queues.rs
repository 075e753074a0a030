//! The order in which single pages go.
//!
//! The pager sees which pages a thread lacks, and not which ones it uses. A page that comes back
//! soon after it has gone is used more often than others. So a page first comes into the queue for
//! probation. If it comes back soon after that, it comes into the main queue, from which pages go
//! later. S3-FIFO (SOSP 2023) has the same two queues, and also bits that tell of each use.

use super::blocks::{Bits, Ghosts, has, set};
use crate::BLOCK_PAGES;
use std::collections::{BTreeMap, VecDeque};

/// Single pages in place, divided by this number, are the share of the queue for probation.
const PROBATION_SHARE: usize = 8;
/// Least number of pages that go in one epoch.
const EPOCH_MIN: usize = 64;
/// Largest number of pages that the kernel may refuse to move in one search of a queue.
const REFUSED_MAX: usize = 96;

const PROBATION: usize = 0;
const MAIN: usize = 1;

/// A single page in place.
#[derive(Clone, Copy, Debug)]
pub struct Single {
    /// The number of its block.
    pub id: u32,
    pub page: u16,
    /// Number of single pages that had come before it.
    came: u16,
}

const _: () = assert!(BLOCK_PAGES <= u16::MAX as usize);

/// All single pages in place. There may also be entries of pages that are no longer single pages.
#[derive(Debug, Default)]
pub struct Queues {
    queues: [VecDeque<Single>; 2],
    /// Number of single pages that have come.
    came: u16,
    /// Each epoch lasts until half as many pages have gone as single pages are in place.
    epoch: u32,
    gone: usize,
}

/// A search for pages that can go.
#[derive(Debug, Default)]
pub struct Search {
    queue: usize,
    /// For each queue the number of entries that were put back, and of pages that cannot go.
    tried: [usize; 2],
    refused: [usize; 2],
}

impl Search {
    /// Whether a page was tried and put back.
    pub fn has_tried(&self) -> bool {
        self.tried != [0, 0]
    }
}

impl Queues {
    pub fn len(&self) -> usize {
        self.queues.iter().map(VecDeque::len).sum()
    }

    /// Notes that a page is in place.
    pub fn came(&mut self, id: u32, page: usize, ghosts: &Ghosts) {
        let queue = if ghosts.has(page, self.epoch) { MAIN } else { PROBATION };
        self.queues[queue].push_back(Single { id, page: page as u16, came: self.came });
        self.came = self.came.wrapping_add(1);
    }

    /// Notes that a page has gone to the store. `there`: number of single pages in place.
    pub fn went(&mut self, page: usize, ghosts: &mut Ghosts, there: usize) {
        ghosts.note(page, self.epoch);
        self.gone += 1;
        if self.gone >= EPOCH_MIN.max(there / 2) {
            (self.epoch, self.gone) = (self.epoch.wrapping_add(1), 0);
        }
    }

    /// Whether the page is among the `newest` that have come.
    pub fn is_among(&self, single: Single, newest: usize) -> bool {
        usize::from(self.came.wrapping_sub(single.came)) < newest
    }

    /// Removes the next page to go from its queue. `there`: number of single pages in place.
    /// `newest`: number of the newest pages, which stay. `None`: all have been tried, or too many
    /// cannot go.
    pub fn next(&mut self, search: &mut Search, there: usize, newest: usize) -> Option<Single> {
        let len = |queue: usize| self.queues[queue].len();
        let may_go = |queue: usize| len(queue) > search.tried[queue] && search.refused[queue] < REFUSED_MAX;
        let share = (there / PROBATION_SHARE).max(newest + EPOCH_MIN);
        search.queue = match may_go(PROBATION) {
            true if len(PROBATION) > share || !may_go(MAIN) => PROBATION,
            _ => MAIN,
        };
        if may_go(search.queue) { self.queues[search.queue].pop_front() } else { None }
    }

    /// Puts the page back that was removed last. `is_refused`: the kernel does not move it.
    pub fn put_back(&mut self, search: &mut Search, single: Single, is_refused: bool) {
        search.tried[search.queue] += 1;
        search.refused[search.queue] += usize::from(is_refused);
        self.queues[search.queue].push_back(single);
    }

    /// Puts the page back that was removed last. It is the next one again.
    pub fn put_first(&mut self, search: &Search, single: Single) {
        self.queues[search.queue].push_front(single);
    }

    /// Puts a page back that could not be written. It goes after all others.
    pub fn keep(&mut self, single: Single) {
        self.queues[MAIN].push_back(single);
    }

    /// Removes the entries for which `is_there` is false. Of several entries of one page, one
    /// stays: the program may drop a page and use it again.
    pub fn retain(&mut self, is_there: impl Fn(&Single) -> bool) {
        let mut seen: BTreeMap<u32, Bits> = BTreeMap::new();
        for queue in self.queues.iter_mut().rev() {
            let is_first = |single: &Single| {
                let (seen, page) = (seen.entry(single.id).or_default(), usize::from(single.page));
                let is_first = is_there(single) && !has(seen, page);
                set(seen, page, true);
                is_first
            };
            // The newest entry stays.
            queue.make_contiguous().reverse();
            queue.retain(is_first);
            queue.make_contiguous().reverse();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The next page to go, of `there` pages in place.
    fn next(queues: &mut Queues, there: usize) -> Option<usize> {
        queues.next(&mut Search::default(), there, 0).map(|single| single.page.into())
    }

    #[test]
    fn a_page_that_comes_back_soon_goes_after_those_that_came_once() {
        let (mut queues, mut ghosts) = (Queues::default(), Ghosts::default());
        (0..200).for_each(|page| queues.came(0, page, &ghosts));
        assert_eq!(next(&mut queues, 200), Some(0), "the oldest goes");
        queues.went(0, &mut ghosts, 200);
        queues.came(0, 0, &ghosts);
        assert_eq!(next(&mut queues, 200), Some(1));
        queues.came(0, 200, &ghosts);
        // Once only a share of them is left on probation, page 0 is the next one.
        let gone: Vec<usize> = std::iter::from_fn(|| next(&mut queues, 200)).collect();
        assert_eq!(gone.iter().position(|page| *page == 0), Some(199 - EPOCH_MIN));
        assert_eq!(gone.len(), 200);
    }

    #[test]
    fn a_page_that_comes_back_late_counts_as_new() {
        for (others, is_soon) in [(0, true), (99, true), (197, true), (199, false), (1000, false)] {
            let (mut queues, mut ghosts) = (Queues::default(), [Ghosts::default(), Ghosts::default()]);
            queues.went(7, &mut ghosts[0], 200);
            (0..others).for_each(|page| queues.went(page % BLOCK_PAGES, &mut ghosts[1], 200));
            assert_eq!(ghosts[0].has(7, queues.epoch), is_soon, "{others}");
            // The block's other pages go later, and change nothing for it.
            queues.went(8, &mut ghosts[0], 200);
            assert_eq!(ghosts[0].has(7, queues.epoch), is_soon, "{others}");
            assert!(ghosts[0].has(8, queues.epoch) && !ghosts[0].has(9, queues.epoch));
        }
    }

    #[test]
    fn both_queues_are_searched_though_all_pages_of_one_cannot_go() {
        for stays in [PROBATION, MAIN] {
            let (mut queues, mut ghosts) = (Queues::default(), Ghosts::default());
            for page in 0..400 {
                if page % 2 == MAIN {
                    queues.went(page, &mut ghosts, 4000);
                }
                queues.came(0, page, &ghosts);
            }
            let mut search = Search::default();
            let mut gone = 0;
            while let Some(single) = queues.next(&mut search, 400, 0) {
                let is_refused = usize::from(single.page) % 2 == stays;
                gone += usize::from(!is_refused);
                if is_refused {
                    queues.put_back(&mut search, single, true);
                }
            }
            assert_eq!((gone, search.refused[stays]), (200, REFUSED_MAX), "{stays}");
            // Those that come last stay as long as others can go, and then nothing goes.
            let mut search = Search::default();
            while let Some(single) = queues.next(&mut search, 200, 200) {
                assert!(queues.is_among(single, 401));
                queues.put_back(&mut search, single, false);
            }
            assert_eq!((search.tried[stays], queues.len()), (200, 200));
        }
    }

    /// Misses in 100 accesses by Zipf's law (exponent 0.99), over four times as many pages as are
    /// in place.
    #[test]
    fn skewed_accesses_miss_less_often_than_in_one_queue() {
        const THERE: usize = 1024;
        let mut sums = Vec::new();
        let mut sum = 0.0;
        for rank in 1..=4 * THERE {
            sum += (rank as f64).powf(-0.99);
            sums.push(sum);
        }
        let misses = |has_ghosts: bool| {
            let mut queues = Queues::default();
            let mut ghosts = vec![Ghosts::default(); 4 * THERE / BLOCK_PAGES];
            let (mut there, mut count) = (vec![false; 4 * THERE], 0);
            let (mut chance, mut misses) = (7u64, 0);
            for access in 0..200_000 {
                chance = chance.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                let at = (chance >> 11) as f64 / (1u64 << 53) as f64 * sum;
                let number = sums.partition_point(|sum| *sum < at).min(4 * THERE - 1);
                if there[number] {
                    continue;
                }
                misses += usize::from(access >= 100_000);
                let (id, page) = (number / BLOCK_PAGES, number % BLOCK_PAGES);
                if count == THERE {
                    let gone = queues.next(&mut Search::default(), count, 0).unwrap();
                    let (id, page) = (gone.id as usize, usize::from(gone.page));
                    there[id * BLOCK_PAGES + page] = false;
                    count -= 1;
                    if has_ghosts {
                        queues.went(page, &mut ghosts[id], count);
                    }
                }
                queues.came(id as u32, page, &ghosts[id]);
                (there[number], count) = (true, count + 1);
            }
            misses as f64 / 1000.0
        };
        let (one, two) = (misses(false), misses(true));
        assert!(two < 0.85 * one, "{two} {one}");
    }
}
