//! Test pages whose content names them.
//!
//! Every 64-byte line of a page begins with a word made of the page's number, its generation and
//! the line's index. So a page in the wrong slot, an older one, or one torn between two writes is
//! noticed. Stamping and checking take some 40 ns each. The figures of deep rows include that time,
//! those of single operations do not.

use weir_core::PageBytes;

/// Fills `page` with the content of `generation` of page `number`.
#[inline]
pub fn stamp(page: &mut PageBytes, number: u32, generation: u32) {
    let word = identity(number, generation);
    for (line, bytes) in page.chunks_exact_mut(64).enumerate() {
        bytes[..8].copy_from_slice(&(word ^ place(line)).to_le_bytes());
    }
}

/// Whether `page` has the content of `generation` of page `number`, in every line.
#[inline]
pub fn is_stamped(page: &PageBytes, number: u32, generation: u32) -> bool {
    let word = identity(number, generation);
    let mut different = 0;
    for (line, bytes) in page.chunks_exact(64).enumerate() {
        let found = u64::from_le_bytes(bytes[..8].try_into().expect("8 of 64 bytes"));
        different |= found ^ word ^ place(line);
    }
    different == 0
}

fn identity(number: u32, generation: u32) -> u64 {
    u64::from(number) << 32 | u64::from(generation)
}

fn place(line: usize) -> u64 {
    (line as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Random numbers for addresses (xorshift64*; Marsaglia 2003): seeded, and a nanosecond each.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Makes random numbers from any seed.
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next random number below `bound`.
    #[inline]
    pub fn below(&mut self, bound: u32) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let high = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        ((high * u64::from(bound)) >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_core::PAGE_SIZE;

    #[test]
    fn a_page_is_told_from_its_neighbour_its_elder_and_a_mixture() {
        let mut page = [0xa5; PAGE_SIZE];
        stamp(&mut page, 7, 3);
        assert!(is_stamped(&page, 7, 3));
        assert!(!is_stamped(&page, 8, 3) && !is_stamped(&page, 7, 2));
        let mut torn = page;
        stamp(&mut torn, 7, 4);
        torn[..64].copy_from_slice(&page[..64]);
        assert!(!is_stamped(&torn, 7, 4) && !is_stamped(&torn, 7, 3));
    }

    #[test]
    fn random_numbers_reach_every_place() {
        let mut random = Random::new(1);
        let mut seen = [false; 64];
        (0..10_000).for_each(|_| seen[random.below(64) as usize] = true);
        assert!(seen.iter().all(|&seen| seen));
    }
}
