//! Random numbers from a seed.

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): 64 bits of state, a few instructions, and
/// random enough to decide about faults.
#[derive(Clone, Debug)]
pub(super) struct Chance(u64);

impl Chance {
    /// The random numbers of lane number `lane` of a store with `seed`.
    pub(super) fn of_lane(seed: u64, lane: u64) -> Self {
        let mut chance = Chance(seed);
        let base = chance.bits();
        Chance(base ^ lane.wrapping_mul(0xd129_0d30_9a5b_8b6f))
    }

    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns true with `probability`.
    pub(super) fn happens(&mut self, probability: f64) -> bool {
        // Uses 53 bits: a double in [0, 1) has no more.
        ((self.bits() >> 11) as f64) < probability * (1u64 << 53) as f64
    }

    /// A random number below `limit`, or 0 if `limit` is 0.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chance_keeps_its_probability_and_its_bounds() {
        let mut chance = Chance::of_lane(1, 0);
        let hits = (0..100_000).filter(|_| chance.happens(0.01)).count();
        assert!((900..1_100).contains(&hits), "{hits} of 100,000 at 1%");
        assert!((0..1000).all(|_| chance.happens(1.0) && !chance.happens(0.0)));
        let mut seen = [false; 7];
        (0..1000).for_each(|_| seen[chance.below(7) as usize] = true);
        assert_eq!(seen, [true; 7]);
    }

    #[test]
    fn lanes_of_one_seed_differ_and_a_lane_repeats_itself() {
        let first = |lane| Chance::of_lane(9, lane).bits();
        assert_eq!(first(0), first(0));
        assert_ne!(first(0), first(1));
    }
}
