//! A keyed hash of a page. By it the pager knows which pages the store has already.
//!
//! The hash is NH, as in UMAC (RFC 4418), with words of 64 bits. NH adds a word of the key to each
//! word of the page, multiplies the results in pairs, and sums the products. A multiplication by
//! another key folds the sum of 128 bits to 64. For any two different pages, chosen without the
//! key, three keys in 2^64 at most give equal hashes. Hashing a page takes less time than copying
//! the page.

use rustix::rand::GetRandomFlags;
use std::io;
use weir_core::{PAGE_SIZE, PageBytes};

const WORDS: usize = PAGE_SIZE / 8;

/// The key of the hash.
pub(crate) struct Key {
    words: Box<[u64; WORDS]>,
    fold: u128,
}

impl Key {
    /// Makes a key that nobody can guess.
    ///
    /// # Errors
    /// Fails with the system's error.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; PAGE_SIZE + 16];
        let mut filled = 0;
        while filled < bytes.len() {
            filled += rustix::rand::getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
        }
        let mut words = bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word));
        Ok(Self::new(|| words.next().unwrap_or_default()))
    }

    /// Makes a key of random words, which `next` returns.
    fn new(mut next: impl FnMut() -> u64) -> Self {
        let mut words = Box::new([0; WORDS]);
        words.fill_with(&mut next);
        Key { words, fold: (u128::from(next()) << 64 | u128::from(next())) | 1 }
    }

    /// The hash of a page. It is never 0.
    pub fn hash(&self, page: &PageBytes) -> u64 {
        let (pairs, _) = page.as_chunks::<16>();
        let (keys, _) = self.words.as_chunks::<2>();
        // Four sums: with one sum, each product would have to wait for the product before.
        let mut sums = [0u128; 4];
        for (pairs, keys) in pairs.chunks_exact(4).zip(keys.chunks_exact(4)) {
            for at in 0..4 {
                let pair = u128::from_le_bytes(pairs[at]);
                let first = (pair as u64).wrapping_add(keys[at][0]);
                let second = ((pair >> 64) as u64).wrapping_add(keys[at][1]);
                sums[at] = sums[at].wrapping_add(u128::from(first) * u128::from(second));
            }
        }
        let sum = sums.into_iter().fold(0, u128::wrapping_add);
        ((sum.wrapping_mul(self.fold) >> 64) as u64).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(seed: u64) -> Key {
        let mut state = seed;
        Key::new(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state ^ state >> 29
        })
    }

    #[test]
    fn pages_that_differ_in_one_bit_or_in_the_order_of_their_words_have_different_hashes() {
        let key = key(1);
        let mut page = [0; PAGE_SIZE];
        for (at, word) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *word = (at as u64).to_le_bytes();
        }
        let hash = key.hash(&page);
        assert_eq!(key.hash(&page), hash);
        for bit in 0..PAGE_SIZE * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(key.hash(&page), hash, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        for at in 1..PAGE_SIZE / 8 {
            let mut other = page;
            other.as_chunks_mut::<8>().0.swap(0, at);
            assert_ne!(key.hash(&other), hash, "word {at}");
        }
    }

    #[test]
    fn the_hash_depends_on_each_word_of_the_key() {
        let hashes: std::collections::BTreeSet<u64> =
            (1..1000).map(|seed| key(seed).hash(&[0; PAGE_SIZE])).collect();
        assert_eq!(hashes.len(), 999);
        let mut other = key(1);
        let hash = other.hash(&[0; PAGE_SIZE]);
        for at in 0..WORDS {
            other.words[at] ^= 1 << 7;
            assert_ne!(other.hash(&[0; PAGE_SIZE]), hash, "word {at}");
            other.words[at] ^= 1 << 7;
        }
    }
}
