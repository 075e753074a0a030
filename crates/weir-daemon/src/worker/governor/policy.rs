//! Decides when a card's memory is given back, and when it is taken again: a pure function of the
//! values read, and of their times.
//!
//! The card's owner comes first. So giving back is quick and runs ahead of a program that
//! allocates. Taking is slow and waits until no program has allocated for a while.

use std::time::Duration;
use weir_store::Headroom;

/// The most memory that Weir gives back beyond what the floor asks for. Weir gives back as much
/// more as free memory fell since the last look, up to this limit. A program that allocates is
/// likely to allocate more soon.
const AHEAD_MOST: u64 = 1 << 30;
/// Memory may be taken once no program has allocated for this long.
const QUIET: Duration = Duration::from_secs(5);
/// The limit that replaces [`QUIET`] on a card with a display. There, free memory changes with
/// every window that opens or closes.
const QUIET_DISPLAY: Duration = Duration::from_secs(30);
/// Largest number of chunks taken at a time, and the time between two takes.
const TAKE_MOST: u32 = 4;
const TAKE_EVERY: Duration = Duration::from_millis(250);
/// Time until the next attempt after nothing could be given back.
const RETRY: Duration = Duration::from_secs(1);

/// After a program came to the card or allocated there, the governor looks at the card often: for
/// this long, and at this interval.
const CLOSE_FOR: Duration = Duration::from_secs(10);
const CLOSE: Duration = Duration::from_millis(10);
/// After [`CLOSE_FOR`] the governor looks less often, but more often than at rest: for this long,
/// and at this interval.
const NEAR_FOR: Duration = Duration::from_secs(60);
const NEAR: Duration = Duration::from_millis(100);
/// Intervals between two looks at rest. The second is for a card with a display, and for a card
/// where the governor is not told that a program comes.
const REST: Duration = Duration::from_secs(1);
const REST_UNTOLD: Duration = Duration::from_millis(250);

/// A card's state at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// The time of the look, since a fixed moment.
    pub at: Duration,
    /// The card's free memory and its floor.
    pub room: Headroom,
    /// Number of the card's chunks that can be given back.
    pub held: u32,
    /// Number of chunks that this policy has given back, and that may be taken.
    pub away: u32,
    /// Whether a program has opened the card since the last look.
    pub newcomer: bool,
    /// Whether arrivals of programs are reported.
    pub told: bool,
}

/// The governor's next act.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    Nothing,
    GiveBack(u32),
    Take(u32),
}

/// One card's policy.
#[derive(Debug, Default)]
pub struct Policy {
    /// Free memory and held chunks after the last look. The effect of the policy's own step is
    /// included.
    seen: Option<(u64, u32)>,
    /// The time when a program last came to the card or allocated, or when free memory was last
    /// below the floor.
    stirred: Option<Duration>,
    taken: Option<Duration>,
    refused: Option<Duration>,
}

impl Policy {
    /// Returns the next step, and the longest time until the next look.
    pub fn step(&mut self, look: &Look) -> (Step, Duration) {
        let Headroom { free, floor, chunk, display, .. } = look.room;
        // Memory that Weir took on request (`weir take`, the end of a sleep) is not another
        // program's allocation.
        let own = |held| u64::from(look.held.saturating_sub(held)) * chunk;
        let fell = self.seen.map_or(0, |(before, held)| before.saturating_sub(free + own(held)));
        self.seen = Some((free, look.held));
        // A driver itself changes the free memory a little all the time, so only a larger change
        // counts.
        if look.newcomer || fell >= chunk / 2 || free < floor {
            self.stirred = Some(look.at);
        }
        let since = |moment: Option<Duration>| moment.map(|moment| look.at.saturating_sub(moment));
        let wanted = floor + if fell >= chunk / 2 { fell.min(AHEAD_MOST) } else { 0 };
        let may_try = since(self.refused).is_none_or(|since| since >= RETRY);
        if free < wanted && look.held > 0 && may_try {
            let chunks = (wanted + chunk - free).div_ceil(chunk);
            let chunks = u32::try_from(chunks).unwrap_or(u32::MAX).min(look.held);
            return (Step::GiveBack(chunks), Duration::ZERO);
        }
        let quiet = if display { QUIET_DISPLAY } else { QUIET };
        let is_quiet = since(self.stirred).is_none_or(|since| since >= quiet);
        let may_take = since(self.taken).is_none_or(|since| since >= TAKE_EVERY) && may_try;
        let spare = look.room.spare_chunks().min(look.away);
        if is_quiet && may_take && spare > 0 {
            self.taken = Some(look.at);
            return (Step::Take(spare.min(TAKE_MOST)), TAKE_EVERY);
        }
        let again = match since(self.stirred) {
            Some(since) if since < CLOSE_FOR => CLOSE,
            _ if spare > 0 => TAKE_EVERY,
            Some(since) if since < NEAR_FOR => NEAR,
            _ if look.told && !display => REST,
            _ => REST_UNTOLD,
        };
        (Step::Nothing, again)
    }

    /// Notes the outcome of a step: the number of chunks given back or taken, and the free memory
    /// now.
    pub fn done(&mut self, at: Duration, step: Step, chunks: u32, free: Option<u64>) {
        if chunks == 0 && step != Step::Nothing {
            self.refused = Some(at);
        }
        // A change of free memory by Weir itself is not another program's allocation.
        if let Some((before, held)) = &mut self.seen {
            *before = free.unwrap_or(*before);
            match step {
                Step::Nothing => {}
                Step::GiveBack(_) => *held = held.saturating_sub(chunks),
                Step::Take(_) => *held += chunks,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const MS: Duration = Duration::from_millis(1);

    /// A simulated card with its owner's programs and Weir on it, in steps of a millisecond.
    struct Card {
        now: Duration,
        total: u64,
        others: u64,
        held: u32,
        away: u32,
        /// Whether the card gives nothing back, as when no store has room.
        refuses: bool,
        policy: Policy,
        look_at: Duration,
        /// The step under way, and its end time. A chunk takes 21 ms: 5 ms, and 16 ms in which its
        /// pages move at 8 GB/s. Both were measured.
        at_work: Option<(Step, Duration)>,
        newcomer: bool,
        looks: u32,
        asked: u32,
        given: u32,
        taken: u32,
    }

    impl Card {
        fn new(total: u64, held: u32) -> Self {
            Card {
                now: Duration::ZERO,
                total,
                others: 0,
                held,
                away: 0,
                refuses: false,
                policy: Policy::default(),
                look_at: Duration::ZERO,
                at_work: None,
                newcomer: false,
                looks: 0,
                asked: 0,
                given: 0,
                taken: 0,
            }
        }

        fn free(&self) -> u64 {
            self.total - self.others - u64::from(self.held) * 128 * MIB
        }

        fn room(&self) -> Headroom {
            let (floor, spare, chunk) = (512 * MIB, 1024 * MIB, 128 * MIB);
            Headroom { free: self.free(), total: self.total, display: false, floor, spare, chunk }
        }

        fn tick(&mut self) {
            self.now += MS;
            if let Some((step, end)) = self.at_work {
                if self.now < end {
                    // Chunks are given back one by one, and each is free as soon as it is empty.
                    return;
                }
                let chunks = match step {
                    _ if self.refuses => 0,
                    Step::GiveBack(chunks) => {
                        self.held -= 1;
                        self.away += 1;
                        self.given += 1;
                        if chunks > 1 {
                            self.at_work = Some((Step::GiveBack(chunks - 1), self.now + 21 * MS));
                            return;
                        }
                        1
                    }
                    Step::Take(chunks) => {
                        let chunks = chunks.min((self.free() / (128 * MIB)) as u32);
                        self.held += chunks;
                        self.away -= chunks;
                        self.taken += chunks;
                        chunks
                    }
                    Step::Nothing => 0,
                };
                self.at_work = None;
                self.policy.done(self.now, step, chunks, Some(self.free()));
            }
            if self.now < self.look_at && !self.newcomer {
                return;
            }
            self.looks += 1;
            let newcomer = std::mem::take(&mut self.newcomer);
            let look = Look {
                at: self.now,
                room: self.room(),
                held: self.held,
                away: self.away,
                newcomer,
                told: true,
            };
            let (step, again) = self.policy.step(&look);
            self.look_at = self.now + again;
            if step != Step::Nothing {
                self.asked += 1;
                self.at_work = Some((step, self.now + 21 * MS));
            }
        }

        /// Allocates as soon as there is room. Returns the time that passed.
        fn allocate(&mut self, bytes: u64) -> Duration {
            let asked = self.now;
            while self.free() < bytes {
                self.tick();
                assert!(self.now - asked < Duration::from_secs(5), "memory never comes");
            }
            self.others += bytes;
            self.now - asked
        }

        fn rest(&mut self, length: Duration) {
            let end = self.now + length;
            while self.now < end {
                self.tick();
            }
        }
    }

    struct Chance(u64);

    impl Chance {
        fn within(&mut self, from: u64, to: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            from + (self.0 >> 33) % (to - from)
        }
    }

    #[test]
    fn whoever_allocates_step_by_step_never_waits_long_and_weir_takes_the_room_back() {
        for seed in 0..200 {
            let mut chance = Chance(seed);
            let chunks = chance.within(80, 1000) as u32;
            let total = u64::from(chunks) * 128 * MIB + 1100 * MIB;
            let mut card = Card::new(total, chunks);
            card.rest(Duration::from_millis(chance.within(0, 5000)));
            // A process comes, makes its context, and allocates in steps of 256 MiB up to 90% of
            // the card.
            card.newcomer = true;
            card.rest(Duration::from_millis(chance.within(0, 400)));
            let mut longest = card.allocate(chance.within(300, 600) * MIB);
            let pause = chance.within(0, 300);
            while card.others + 256 * MIB <= total / 10 * 9 {
                longest = longest.max(card.allocate(256 * MIB));
                card.rest(Duration::from_millis(chance.within(0, pause + 1)));
            }
            assert!(longest <= 250 * MS, "seed {seed}: a step waited {longest:?}");
            assert!(
                u64::from(card.given) * 128 * MIB <= card.others + 2048 * MIB,
                "seed {seed}: no more than was needed"
            );
            // The process ends. All chunks come back, and then nothing changes.
            card.rest(Duration::from_secs(20));
            assert_eq!(card.taken, 0, "seed {seed}: what somebody uses is not taken");
            card.others = 0;
            card.rest(Duration::from_secs(6) + 70 * MS * chunks);
            // The policy leaves 1152 MiB to the card's owner: `spare` bytes, and the size of one
            // chunk. The card has only 1100 MiB that are in no chunk. So up to two chunks stay
            // away.
            assert!(card.away <= 2, "seed {seed}: {} chunks have not come back", card.away);
            card.rest(NEAR_FOR);
            let looks = card.looks;
            card.rest(Duration::from_secs(100));
            assert!(card.looks - looks <= 100, "seed {seed}: {} looks in 100 s of rest", card.looks - looks);
        }
    }

    #[test]
    fn memory_that_comes_and_goes_is_not_chased() {
        for seed in 0..100 {
            let mut chance = Chance(seed);
            let mut card = Card::new(24 << 30, 180);
            let _ = card.allocate(400 * MIB);
            for _ in 0..50 {
                // Each allocation is smaller than the floor. A larger one fails at first, and the
                // policy does not see failed allocations.
                let bytes = chance.within(64, 500) * MIB;
                let _ = card.allocate(bytes);
                card.rest(Duration::from_millis(chance.within(0, 2400)));
                card.others -= bytes;
                card.rest(Duration::from_millis(chance.within(0, 2400)));
            }
            // Chunks that were given back stay away while a program allocates every few seconds.
            assert!(card.taken <= 8, "seed {seed}: {} given, {} taken", card.given, card.taken);
            assert!(card.given <= 40, "seed {seed}: {} given", card.given);
        }
    }

    #[test]
    fn where_nothing_can_be_given_it_asks_once_a_second_and_no_more() {
        let mut card = Card::new(24 << 30, 180);
        card.refuses = true;
        card.others = (24 << 30) - 180 * 128 * MIB - 100 * MIB;
        card.rest(Duration::from_secs(10));
        let last = card.policy.refused.expect("it tried");
        assert!(card.given == 0 && card.now - last <= RETRY + 100 * MS);
        assert!(card.asked <= 10, "asked {} times in 10 s", card.asked);
    }

    #[test]
    fn beside_a_display_memory_is_taken_only_after_half_a_minute() {
        let room = |free: u64| Headroom {
            free,
            total: 8 << 30,
            display: true,
            floor: 512 * MIB,
            spare: 3 << 30,
            chunk: 128 * MIB,
        };
        let mut policy = Policy::default();
        let look = |at: u64, free, newcomer| Look {
            at: Duration::from_secs(at),
            room: room(free),
            held: 10,
            away: 10,
            newcomer,
            told: true,
        };
        assert_eq!(policy.step(&look(0, 5 << 30, true)).0, Step::Nothing);
        assert_eq!(policy.step(&look(20, 5 << 30, false)).0, Step::Nothing);
        assert_eq!(policy.step(&look(31, 5 << 30, false)).0, Step::Take(4));
    }

    #[test]
    fn what_weir_itself_was_told_to_take_is_nobodys_allocation() {
        let room = |free: u64| Headroom {
            free,
            total: 24 << 30,
            display: false,
            floor: 512 * MIB,
            spare: 1024 * MIB,
            chunk: 128 * MIB,
        };
        let look = |at: u64, free, held| Look {
            at: Duration::from_secs(at),
            room: room(free),
            held,
            away: 0,
            newcomer: false,
            told: true,
        };
        let mut policy = Policy::default();
        assert_eq!(policy.step(&look(0, (1 << 30) + 100 * 128 * MIB, 0)).0, Step::Nothing);
        assert_eq!(policy.step(&look(1, 1 << 30, 100)), (Step::Nothing, REST), "it was weir take");
        assert_eq!(policy.step(&look(2, 512 * MIB, 100)).0, Step::GiveBack(5), "now it was not");
    }
}
