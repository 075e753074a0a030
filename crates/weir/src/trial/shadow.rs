//! The shadow: the expected content of each page.
//!
//! A written page names its number and its generation in its first 16 bytes. The rest follows from
//! both and the run's seed. So the shadow needs four bytes a page, and can tell which page and
//! which version of it a wrong answer contains.

use std::fmt;
use weir_core::{PAGE_SIZE, PageBytes};

/// A page whose generation is a multiple of this number consists of one repeated value, which a
/// volume stores without a slot.
const UNIFORM_EVERY: u32 = 8;

/// The pages of one connection: those of every `of`-th block, beginning with block `index`.
#[derive(Debug)]
pub struct Shadow {
    seed: u64,
    index: u32,
    of: u32,
    /// The generation of each page; 0 means that the page reads as zeros.
    generations: Vec<u32>,
}

/// Number of pages in a block. A block is the largest request, and all its pages belong to one
/// connection.
pub const BLOCK: u32 = 32;

/// A page that does not hold what was written to it last.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// The page's number.
    pub page: u32,
    /// The generation that was expected.
    expected: u32,
    /// The page number and generation that the page's content names.
    says: (u64, u64),
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mismatch { page, expected, says: (number, generation) } = self;
        write!(
            f,
            "page {page} ought to hold its generation {expected} (0: zeros); it begins as page {number:#x}, \
             generation {generation:#x}"
        )
    }
}

impl Shadow {
    /// A shadow of `blocks` blocks whose pages read as zeros.
    pub fn new(seed: u64, index: u32, of: u32, blocks: u32) -> Self {
        Shadow { seed, index, of, generations: vec![0; (blocks * BLOCK) as usize] }
    }

    /// Number of blocks in the shadow.
    pub fn blocks(&self) -> u32 {
        self.generations.len() as u32 / BLOCK
    }

    /// The page number, in the device, of page `at` of the shadow's block `block`.
    pub fn page(&self, block: u32, at: u32) -> u32 {
        (block * self.of + self.index) * BLOCK + at
    }

    /// Notes that pages are written anew, and appends their content to `out`.
    pub fn write(&mut self, block: u32, pages: std::ops::Range<u32>, out: &mut Vec<u8>) {
        for at in pages {
            let page = self.page(block, at);
            let generation = &mut self.generations[(block * BLOCK + at) as usize];
            *generation = (*generation & !(ZEROED | UNKNOWN)) + 1;
            out.extend_from_slice(&content(self.seed, page, *generation));
        }
    }

    /// Notes that pages have become zeros.
    pub fn clear(&mut self, block: u32, pages: std::ops::Range<u32>) {
        for at in pages {
            self.generations[(block * BLOCK + at) as usize] |= ZEROED;
        }
    }

    /// Notes that pages may have any content. Their change was refused, and the device may have
    /// done a part of it.
    pub fn forget(&mut self, block: u32, pages: std::ops::Range<u32>) {
        for at in pages {
            self.generations[(block * BLOCK + at) as usize] |= UNKNOWN;
        }
    }

    /// Compares what was read of a block, from page `first` on, with the expected content. Calls
    /// `wrong` for each page that differs.
    pub fn check(&self, block: u32, first: u32, bytes: &[u8], mut wrong: impl FnMut(Mismatch)) {
        let (pages, rest) = bytes.as_chunks::<PAGE_SIZE>();
        debug_assert!(rest.is_empty());
        for (at, bytes) in (first..).zip(pages) {
            let generation = self.generations[(block * BLOCK + at) as usize];
            if generation & UNKNOWN != 0 {
                continue;
            }
            let page = self.page(block, at);
            let expected = if generation & ZEROED != 0 { 0 } else { generation };
            let same = if expected == 0 {
                bytes.iter().all(|byte| *byte == 0)
            } else {
                *bytes == content(self.seed, page, expected)
            };
            if !same {
                let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
                wrong(Mismatch { page, expected, says: (word(0), word(8)) });
            }
        }
    }

    /// Number of pages that hold content.
    pub fn written(&self) -> u64 {
        let held = |generation: &u32| *generation != 0 && generation & (ZEROED | UNKNOWN) == 0;
        self.generations.iter().copied().filter(held).count() as u64
    }
}

/// The flag in a page's generation that says that the page has been zeroed since. The generation
/// itself is kept, and the next write counts on from it. So no content is written twice.
const ZEROED: u32 = 1 << 31;

/// The flag in a page's generation that says that a change of the page failed. Its content is
/// unknown then.
const UNKNOWN: u32 = 1 << 30;

fn content(seed: u64, page: u32, generation: u32) -> PageBytes {
    let mut bytes = [0; PAGE_SIZE];
    let mut state = seed ^ u64::from(page) << 32 ^ u64::from(generation);
    if generation.is_multiple_of(UNIFORM_EVERY) {
        let value = (next(&mut state) as u32 | 1).to_le_bytes();
        bytes.as_chunks_mut().0.fill(value);
        return bytes;
    }
    for word in bytes.as_chunks_mut::<8>().0 {
        *word = next(&mut state).to_le_bytes();
    }
    bytes[..8].copy_from_slice(&u64::from(page).to_le_bytes());
    bytes[8..16].copy_from_slice(&u64::from(generation).to_le_bytes());
    bytes
}

/// SplitMix64 (Steele et al., OOPSLA 2014): a few multiplications a word, and every seed is good.
pub fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: [u32; 0] = [];

    fn mismatches(shadow: &Shadow, block: u32, first: u32, bytes: &[u8]) -> Vec<u32> {
        let mut pages = Vec::new();
        shadow.check(block, first, bytes, |wrong| pages.push(wrong.page));
        pages
    }

    #[test]
    fn what_was_written_last_passes_and_nothing_else_does() {
        let mut shadow = Shadow::new(1, 1, 4, 3);
        let (mut older, mut newer) = (Vec::new(), Vec::new());
        shadow.write(2, 5..9, &mut older);
        assert_eq!(mismatches(&shadow, 2, 5, &older), NONE);
        shadow.write(2, 6..7, &mut newer);
        let page = shadow.page(2, 6);
        assert_eq!(page, (2 * 4 + 1) * BLOCK + 6);
        assert_eq!(mismatches(&shadow, 2, 5, &older), [page]);
        assert_eq!(mismatches(&shadow, 2, 6, &newer), NONE);
        // The right content in the wrong place, one flipped bit, and zeros: all three are found.
        assert_eq!(mismatches(&shadow, 2, 7, &newer), [page + 1]);
        newer[4000] ^= 1;
        assert_eq!(mismatches(&shadow, 2, 6, &newer), [page]);
        assert_eq!(mismatches(&shadow, 2, 6, &[0; PAGE_SIZE]), [page]);
    }

    #[test]
    fn cleared_pages_are_zeros_and_their_old_content_never_comes_again() {
        let mut shadow = Shadow::new(1, 0, 1, 1);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        shadow.write(0, 0..1, &mut first);
        assert_eq!(shadow.written(), 1);
        shadow.clear(0, 0..1);
        assert_eq!(shadow.written(), 0);
        assert_eq!(mismatches(&shadow, 0, 0, &[0; PAGE_SIZE]), NONE);
        assert_eq!(mismatches(&shadow, 0, 0, &first), [0]);
        shadow.write(0, 0..1, &mut second);
        assert_ne!(first, second);
    }

    #[test]
    fn a_page_whose_change_was_refused_may_hold_anything_until_it_is_written() {
        let mut shadow = Shadow::new(1, 0, 1, 1);
        let (mut refused, mut written) = (Vec::new(), Vec::new());
        shadow.write(0, 3..4, &mut refused);
        shadow.forget(0, 3..4);
        assert_eq!(mismatches(&shadow, 0, 3, &[9; PAGE_SIZE]), NONE);
        shadow.write(0, 3..4, &mut written);
        assert_eq!(mismatches(&shadow, 0, 3, &written), NONE);
        assert_eq!(mismatches(&shadow, 0, 3, &refused), [3]);
    }

    #[test]
    fn some_generations_are_one_value_and_it_is_never_zero() {
        let page = content(7, 3, UNIFORM_EVERY);
        let value = weir_core::uniform_value(&page);
        assert!(value.is_some_and(|value| value != 0));
        assert_eq!(weir_core::uniform_value(&content(7, 3, UNIFORM_EVERY + 1)), None);
    }
}
