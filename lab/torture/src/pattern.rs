//! The content written into a page, and the check of a page that reads otherwise.

use std::fmt;

/// Number of 64-bit words in a page.
pub const WORDS: usize = weir_core::PAGE_SIZE / 8;

/// One page of the tortured memory.
pub type Page = [u64; WORDS];

/// The kind of content that pages have, for a compressor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub enum Contents {
    /// Content that cannot be compressed.
    #[default]
    Noise,
    /// Content that compresses to a half to a sixth of its size.
    Small,
    /// The kinds take turns: noise, twice compressible content, and one repeated 32-bit value.
    Mixed,
}

/// The identity of a page's content: its writer, its number, and its generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The run's seed with the process's number mixed in.
    pub writer: u64,
    /// The page's number within its process.
    pub number: u64,
    /// The number of the page's content, counted from 1.
    pub generation: u64,
    /// The kind of pages that the run writes.
    pub contents: Contents,
}

/// The wrong content that was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mismatch {
    /// The page is zeros: it was lost.
    Zeros,
    /// The page has an earlier content, whole.
    Stale {
        /// The generation that was found.
        generation: u64,
    },
    /// Another page of the run is there, whole.
    Misplaced {
        /// The identity that its content names.
        found: Identity,
    },
    /// The content was never written: it is torn or damaged.
    Damaged {
        /// Index of the first word that differs.
        word: usize,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mismatch::Zeros => write!(f, "all zeros"),
            Mismatch::Stale { generation } => write!(f, "stale, generation {generation}"),
            Mismatch::Misplaced { found: Identity { writer, number, generation, .. } } => {
                write!(f, "page {number} of writer {writer:#x}, generation {generation}")
            }
            Mismatch::Damaged { word } => write!(f, "damaged from byte {}", word * 8),
        }
    }
}

/// Fills a page with the one content of `identity`: three words that name it, then a body that
/// follows from them. A page of one value has no room for a name; the value follows from the
/// identity.
pub fn fill(page: &mut Page, identity: Identity) {
    for (word, value) in page.iter_mut().zip(words(identity)) {
        *word = value;
    }
}

/// Compares a page with the content of `identity`.
///
/// # Errors
/// Fails with the wrong content that was found.
pub fn check(page: &Page, identity: Identity) -> Result<(), Mismatch> {
    match page.iter().zip(words(identity)).position(|(&found, wanted)| found != wanted) {
        None => Ok(()),
        Some(word) => Err(diagnose(page, identity, word)),
    }
}

fn diagnose(page: &Page, wanted: Identity, word: usize) -> Mismatch {
    if page.iter().all(|&word| word == 0) {
        return Mismatch::Zeros;
    }
    let found = Identity { writer: page[0], number: page[1], generation: page[2], ..wanted };
    if page.iter().zip(words(found)).any(|(&found, wanted)| found != wanted) {
        return Mismatch::Damaged { word };
    }
    if (found.writer, found.number) == (wanted.writer, wanted.number) {
        return Mismatch::Stale { generation: found.generation };
    }
    Mismatch::Misplaced { found }
}

/// The words of a page's content.
fn words(identity: Identity) -> impl Iterator<Item = u64> {
    let Identity { writer, number, generation, contents } = identity;
    let seed = mix(writer ^ mix(number ^ mix(generation)));
    // One in this many words is random, and the others are all the same; 0: no word is random.
    let drawn = match (contents, number % 4) {
        (Contents::Mixed, 3) => 0,
        (Contents::Noise, _) | (Contents::Mixed, 0) => 1,
        (Contents::Small | Contents::Mixed, _) => 4 << (mix(number) % 3),
    };
    let same = if drawn == 0 { (seed >> 32) | (seed >> 32 << 32) } else { seed };
    let (name, mut body) = ([writer, number, generation], Random(seed));
    (0..WORDS).map(move |at| match name.get(at) {
        Some(word) if drawn > 0 => *word,
        _ if drawn > 0 && at % drawn == 0 => body.draw(),
        _ => same,
    })
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), which mixes a value's bits.
pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Random numbers from a seed: SplitMix64.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Every index below `count` once, in a random order by the seed (Fisher and Yates).
    pub fn order(&mut self, count: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..count as u32).collect();
        for last in (1..count).rev() {
            let other = (self.draw() % (last as u64 + 1)) as usize;
            order.swap(last, other);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn page(identity: Identity) -> Page {
        let mut page = [0; WORDS];
        fill(&mut page, identity);
        page
    }

    const WANTED: Identity = Identity { writer: 7, number: 3, generation: 2, contents: Contents::Noise };

    #[test]
    fn a_page_as_written_passes() {
        assert_eq!(check(&page(WANTED), WANTED), Ok(()));
    }

    #[test]
    fn each_way_to_lose_a_page_is_told_from_the_others() {
        assert_eq!(check(&[0; WORDS], WANTED), Err(Mismatch::Zeros));
        let older = Identity { generation: 1, ..WANTED };
        assert_eq!(check(&page(older), WANTED), Err(Mismatch::Stale { generation: 1 }));
        let other = Identity { number: 4, ..WANTED };
        assert_eq!(check(&page(other), WANTED), Err(Mismatch::Misplaced { found: other }));
        let stranger = Identity { writer: 8, ..WANTED };
        assert_eq!(check(&page(stranger), WANTED), Err(Mismatch::Misplaced { found: stranger }));
        let mut torn = page(WANTED);
        torn[256..].copy_from_slice(&page(older)[256..]);
        assert_eq!(check(&torn, WANTED), Err(Mismatch::Damaged { word: 256 }));
    }

    #[test]
    fn pages_of_every_kind_differ_from_each_other_and_from_their_own_past() {
        for contents in [Contents::Noise, Contents::Small, Contents::Mixed] {
            let mut seen = std::collections::HashSet::new();
            for number in 0..200 {
                for generation in 1..4 {
                    let identity = Identity { number, generation, contents, ..WANTED };
                    let page = page(identity);
                    assert_eq!(check(&page, identity), Ok(()));
                    assert!(seen.insert(page), "{identity:?} is like another");
                }
            }
        }
    }

    #[test]
    fn mixed_pages_are_a_quarter_of_one_value_and_half_of_them_repeat_themselves() {
        let distinct = |number| {
            let page = page(Identity { number, contents: Contents::Mixed, ..WANTED });
            page.iter().collect::<std::collections::HashSet<_>>().len()
        };
        assert_eq!(distinct(3), 1);
        assert_eq!(distinct(0), WORDS);
        for number in [1, 2, 5, 6] {
            assert!(distinct(number) <= WORDS / 4 + 4, "page {number}");
        }
    }

    proptest! {
        #[test]
        fn no_single_bit_can_flip_unseen(word in 0..WORDS, bit in 0..64) {
            let mut page = page(WANTED);
            page[word] ^= 1_u64 << bit;
            prop_assert!(check(&page, WANTED).is_err());
        }

        #[test]
        fn an_order_names_every_index_once(seed: u64, count in 0..2000_usize) {
            let mut order = Random(seed).order(count);
            order.sort_unstable();
            prop_assert!(order.into_iter().eq(0..count as u32));
        }
    }
}
