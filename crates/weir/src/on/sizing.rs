//! How large the device is to be when nobody says.
//!
//! The rules are those of nbd-vram's installer: what a card has, less 1 GiB for whoever else uses it, less 3 GiB where it drives a
//! display; and where that is not to be had, 512 MiB less, again and again.

use weir_core::ByteSize;

const MIB: u64 = 1 << 20;

/// What is left to others on a card that only computes.
pub const HEADROOM: ByteSize = ByteSize(1 << 30);
/// What is left to others on a card that drives a display.
pub const HEADROOM_DISPLAY: ByteSize = ByteSize(3 << 30);
/// By how much a try is smaller than the one that failed.
pub const STEP: ByteSize = ByteSize(512 * MIB);
/// Less than this is not worth a device.
pub const LEAST: ByteSize = ByteSize(256 * MIB);

/// A card's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Card {
    /// All of it.
    pub total: ByteSize,
    /// What nobody has now, where that is known.
    pub free: Option<ByteSize>,
    /// Whether a display hangs on it.
    pub display: bool,
}

/// What one card can lend: its total less the headroom, and no more than is free now; whole steps of 128 MiB, the chunk of
/// the store. `None` where that is less than [`LEAST`].
pub fn of_card(card: Card) -> Option<ByteSize> {
    let headroom = if card.display { HEADROOM_DISPLAY } else { HEADROOM };
    let lent = card.total.0.saturating_sub(headroom.0).min(card.free.map_or(u64::MAX, |free| free.0));
    let lent = ByteSize(lent / (128 * MIB) * (128 * MIB));
    (lent >= LEAST).then_some(lent)
}

/// What all cards can lend together. The store takes equal parts of each, so the smallest decides.
pub fn of_cards(cards: &[Card]) -> Option<ByteSize> {
    let least = cards.iter().map(|card| of_card(*card)).min().flatten()?;
    Some(ByteSize(least.0 * cards.len() as u64))
}

/// The sizes to try, one after another, until one is to be had.
pub fn tries(first: ByteSize) -> impl Iterator<Item = ByteSize> {
    std::iter::successors(Some(first), |last| last.0.checked_sub(STEP.0).map(ByteSize))
        .enumerate()
        .take_while(|(at, size)| *at == 0 || *size >= LEAST)
        .map(|(_, size)| size)
}

/// One of `parts` equal parts, in whole pages; for GPU memory in whole chunks of 128 MiB.
pub fn part(size: ByteSize, parts: u64, unit: u64) -> ByteSize {
    ByteSize(size.0 / parts / unit * unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn gib(gib: u64) -> ByteSize {
        ByteSize(gib << 30)
    }

    #[test]
    fn a_card_keeps_1_gib_for_others_and_3_with_a_display() {
        let card = |display| Card { total: gib(8), free: None, display };
        assert_eq!(of_card(card(false)), Some(gib(7)));
        assert_eq!(of_card(card(true)), Some(gib(5)));
    }

    #[test]
    fn what_others_have_taken_already_is_not_lent() {
        let card = Card { total: gib(8), free: Some(gib(2)), display: false };
        assert_eq!(of_card(card), Some(gib(2)));
        assert_eq!(
            of_card(Card { total: gib(2), free: None, display: true }),
            None,
            "nothing is left to lend"
        );
    }

    #[test]
    fn the_smallest_of_several_cards_decides() {
        let card = |total| Card { total: gib(total), free: None, display: false };
        assert_eq!(of_cards(&[card(8), card(24)]), Some(gib(14)));
        assert_eq!(of_cards(&[card(8), card(1)]), None);
        assert_eq!(of_cards(&[]), None);
    }

    #[test]
    fn a_size_that_is_not_to_be_had_is_tried_again_512_mib_smaller() {
        let sizes: Vec<u64> = tries(gib(2)).map(|size| size.0 / MIB).collect();
        assert_eq!(sizes, [2048, 1536, 1024, 512]);
        let small: Vec<u64> = tries(ByteSize(100 * MIB)).map(|size| size.0 / MIB).collect();
        assert_eq!(small, [100], "what was asked for is tried once, however small");
    }

    proptest! {
        #[test]
        fn parts_are_equal_whole_and_never_more_than_the_whole(size in 0u64..1 << 44, parts in 1u64..64) {
            let part = part(ByteSize(size), parts, 4096);
            prop_assert!(part.0 * parts <= size);
            prop_assert!(size - part.0 * parts < parts * 4096);
            prop_assert_eq!(part.0 % 4096, 0);
        }

        #[test]
        fn nothing_is_lent_that_the_headroom_needs(total in 0u64..1 << 40, display: bool) {
            let card = Card { total: ByteSize(total), free: None, display };
            if let Some(size) = of_card(card) {
                let headroom = if display { HEADROOM_DISPLAY } else { HEADROOM };
                prop_assert!(size.0 + headroom.0 <= total);
            }
        }
    }
}
