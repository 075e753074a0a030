//! Random numbers from a seed: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).

#[derive(Clone)]
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Self {
        Chance(seed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A random number of `from..to`.
    pub fn within(&mut self, from: u32, to: u32) -> u32 {
        from + (((self.bits() >> 32) * u64::from(to - from)) >> 32) as u32
    }

    /// Returns true once in `times`.
    pub fn one_in(&mut self, times: u32) -> bool {
        self.within(0, times) == 0
    }

    /// Returns one of `choices`.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.within(0, choices.len() as u32) as usize]
    }
}
