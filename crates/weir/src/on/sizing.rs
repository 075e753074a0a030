//! Chooses the device's size if no option gives one.
//!
//! The rules are those of nbd-vram's installer. A card gives all of its memory except for 1 GiB,
//! which is left to its other users. If it drives a display, 3 GiB are left to them. If that much
//! cannot be had, 512 MiB less is tried, again and again. If others have taken memory already, as
//! much as the store's floor stays free too. With less free memory, the store would have to give
//! memory back at once.

use weir_core::ByteSize;
use weir_store::VramUrl;
use weir_store::vram::GpuMemory;

const MIB: u64 = 1 << 20;

/// Memory left to others on a card that only computes.
pub const HEADROOM: ByteSize = ByteSize(1 << 30);
/// Memory left to others on a card that drives a display.
pub const HEADROOM_DISPLAY: ByteSize = ByteSize(3 << 30);
/// Difference between the size of a failed try and the size of the next try.
pub const STEP: ByteSize = ByteSize(512 * MIB);
/// Least size that is worth a device.
pub const LEAST: ByteSize = ByteSize(256 * MIB);
/// Memory that a daemon without a backing takes beyond its device's size for each part, for writes
/// under way. It is 1.25 MiB for each connection and thread. `weir on` makes at most 14 of these
/// for one part, and 8 for each further one.
const UNDER_WAY: ByteSize = ByteSize(32 * MIB);

/// A card's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Card {
    /// The card's memory in total.
    pub total: ByteSize,
    /// The card's free memory, if that is known.
    pub free: Option<ByteSize>,
    /// Whether a display is connected to the card.
    pub display: bool,
}

impl Card {
    /// Memory of this card that is left to other programs.
    pub fn headroom(self) -> ByteSize {
        if self.display { HEADROOM_DISPLAY } else { HEADROOM }
    }

    /// The card's free memory; if that is not known, all its memory.
    pub fn free(self) -> ByteSize {
        self.free.unwrap_or(self.total)
    }
}

/// The cards whose memory makes up the size. An integrated GPU does not count, since its memory is
/// RAM. A card that no store can open is listed too if it has more memory than must be left to
/// others. Then the refusal can name it.
pub fn cards(all: &[GpuMemory]) -> Vec<Card> {
    let card = |it: &GpuMemory| {
        let card = Card { total: it.total, free: it.free, display: it.display };
        (it.is_usable || card.total > card.headroom()).then_some(card)
    };
    all.iter().filter_map(card).collect()
}

/// Memory that a daemon of `parts` parts may take of each card beyond the device's size: whole
/// chunks that have room for the writes under way.
pub fn beyond(url: &VramUrl, parts: u64) -> ByteSize {
    ByteSize((UNDER_WAY.0 * parts).next_multiple_of(url.chunk.0))
}

/// Memory that one card can give: all of its memory, except for what is left to others. If less is
/// free, the card gives its free memory, except for the store's floor and for what the daemon takes
/// beyond its size. The result is rounded down to a multiple of the store's chunk, or of 128 MiB
/// if that is more. `None` if it is less than [`LEAST`].
pub fn of_card(card: Card, url: &VramUrl, parts: u64) -> Option<ByteSize> {
    let spare = card.free().0.saturating_sub(url.floor.0).saturating_sub(beyond(url, parts).0);
    let lent = card.total.0.saturating_sub(card.headroom().0).min(spare);
    let step = url.chunk.max(VramUrl::CHUNK).0;
    let lent = ByteSize(lent / step * step);
    (lent >= LEAST).then_some(lent)
}

/// Memory that all cards can give together. The store takes equal parts of each, so the smallest
/// card decides.
pub fn of_cards(cards: &[Card], url: &VramUrl, parts: u64) -> Option<ByteSize> {
    let least = cards.iter().map(|card| of_card(*card, url, parts)).min().flatten()?;
    Some(ByteSize(least.0 * cards.len() as u64))
}

/// The sizes to try, one after another, until the memory can be had.
pub fn tries(first: ByteSize) -> impl Iterator<Item = ByteSize> {
    std::iter::successors(Some(first), |last| last.0.checked_sub(STEP.0).map(ByteSize))
        .enumerate()
        .take_while(|(at, size)| *at == 0 || *size >= LEAST)
        .map(|(_, size)| size)
}

/// The size of one of `parts` equal parts: a multiple of `unit` bytes.
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

    fn vram() -> VramUrl {
        VramUrl::new(weir_store::vram::Target::All)
    }

    fn lent(card: Card) -> Option<ByteSize> {
        of_card(card, &vram(), 1)
    }

    /// Memory that the store takes of each card for a device of this size, rounded up as the store
    /// rounds.
    fn taken(size: ByteSize, cards: u64, url: &VramUrl, parts: u64) -> u64 {
        let all = (part(size, parts, url.chunk.0).0 + UNDER_WAY.0) * parts;
        all.div_ceil(cards).next_multiple_of(url.chunk.0)
    }

    #[test]
    fn a_card_keeps_1_gib_for_others_and_3_with_a_display() {
        let card = |display| Card { total: gib(8), free: None, display };
        assert_eq!(lent(card(false)), Some(gib(7)));
        assert_eq!(lent(card(true)), Some(gib(5)));
    }

    #[test]
    fn of_what_others_have_left_the_floor_and_a_chunk_for_writes_under_way_stay_free() {
        let mib = |mib| Some(ByteSize(mib * MIB));
        let desktop = Card { total: gib(8), free: mib(4608), display: true };
        assert_eq!(lent(desktop), mib(4608 - 512 - 128));
        let large = VramUrl { chunk: gib(1), floor: gib(1), ..vram() };
        assert_eq!(of_card(desktop, &large, 1), mib(2048));
        assert_eq!(of_card(desktop, &vram(), 4), mib(4608 - 512 - 128), "four parts need no more");
        assert_eq!(of_card(desktop, &vram(), 5), mib(4608 - 512 - 256), "five need another chunk");
        assert_eq!(lent(Card { total: gib(8), free: mib(800), display: false }), None);
        assert_eq!(lent(Card { total: gib(2), free: None, display: true }), None, "nothing is left to lend");
    }

    #[test]
    fn what_an_integrated_gpu_has_of_the_ram_is_no_card() {
        let memory = |total, display, is_usable| GpuMemory {
            address: String::new(),
            total: gib(total),
            free: None,
            display,
            is_usable,
        };
        let all = [memory(2, true, false), memory(16, false, false), memory(1, true, true)];
        let sizes: Vec<_> = cards(&all).iter().map(|card| card.total).collect();
        assert_eq!(sizes, [gib(16), gib(1)]);
    }

    #[test]
    fn the_smallest_of_several_cards_decides() {
        let card = |total| Card { total: gib(total), free: None, display: false };
        let of_cards = |cards: &[Card]| of_cards(cards, &vram(), 1);
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
        fn nothing_is_lent_that_the_headroom_or_the_floor_needs(
            total in 0u64..1 << 40,
            used in 0u64..1 << 36,
            display: bool,
            cards in 1u64..9,
            parts in 1u64..17,
            chunk in 20u32..33,
        ) {
            let free = total.saturating_sub(used);
            let card = Card { total: ByteSize(total), free: Some(ByteSize(free)), display };
            let url = VramUrl { chunk: ByteSize(1 << chunk), ..vram() };
            if let Some(size) = of_card(card, &url, parts) {
                prop_assert!(size.0 + card.headroom().0 <= total);
                let taken = taken(ByteSize(size.0 * cards), cards, &url, parts);
                prop_assert!(taken + url.floor.0 <= free, "{taken} of {free} are taken for {size}");
            }
        }
    }
}
