//! The ranges of page numbers that volumes have. There are far more page numbers than pages. So
//! each range is placed with free numbers behind it, and volumes can grow.

use std::ops::Range;
use weir_core::PageNo;

/// Number of page numbers that belong to no page: the highest ones. In a slot's record each of
/// these stands for a pack.
pub(crate) const PACKS: u32 = 1 << 13;
/// Number of pages that a record can name, which bounds a volume to 8 TiB less 32 MiB.
pub const PAGES_MAX: u32 = (1 << 31) - PACKS;
/// Number of pages whose entries are one page of memory: a part of the map.
pub(crate) const PART: u32 = 512;

/// The ranges in use, in order. Each begins with a [part](PART) of the map, and shares no part with
/// another.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    all: Vec<Range<u32>>,
}

/// Rounds the end of a range of pages up to a whole part of the map.
pub(crate) fn whole(end: u32) -> u32 {
    end.next_multiple_of(PART)
}

/// The first generation of the pages of a new volume, or of a volume's growth. `birth` counts
/// volumes and growths. A mover may still be writing a page of an earlier volume with the same page
/// number. It must not take the new page for the old one, so their generations must lie far apart.
/// The multiplication by the golden ratio sees to that: the first generations of 1,000 successive
/// births are at least 25,000 apart.
pub(crate) fn generation(birth: u64) -> u32 {
    (birth as u32).wrapping_mul(0x9e37_79b9) >> 6
}

impl Ranges {
    /// Number of pages of all ranges together.
    pub fn pages(&self) -> u32 {
        self.all.iter().map(|range| range.end - range.start).sum()
    }

    /// The ranges of page numbers that no volume has.
    pub fn gaps(&self) -> impl Iterator<Item = Range<u32>> {
        let starts = std::iter::once(0).chain(self.all.iter().map(|range| range.end));
        let ends = self.all.iter().map(|range| range.start).chain([PAGES_MAX]);
        starts.zip(ends).map(|(start, end)| start..end)
    }

    /// Number of the map's words that have memory: those of all ranges. Memory is taken by whole
    /// [parts](PART) of the map, so a range counts up to the end of its last part.
    pub fn words(&self) -> u64 {
        self.all.iter().map(|range| u64::from(whole(range.end) - range.start)).sum()
    }

    /// Whether a range has this page.
    pub fn has(&self, page: PageNo) -> bool {
        self.from(page.0).is_some_and(|range| range.start <= page.0)
    }

    /// The range with this page, or else the first range behind it.
    pub fn from(&self, page: u32) -> Option<Range<u32>> {
        self.all.get(self.all.partition_point(|it| it.end <= page)).cloned()
    }

    /// The end of the last range.
    pub fn end(&self) -> u32 {
        self.all.last().map_or(0, |range| range.end)
    }

    /// Finds a free range for `pages` pages, in the middle of the longest free one; the first range
    /// of all begins at page 0. `Err` is the length of the longest free range, which is too short.
    pub fn find(&self, pages: u32) -> Result<Range<u32>, u32> {
        let free = self.gaps().map(|gap| (whole(gap.start), gap.end)).max_by_key(|(start, end)| end - start);
        let (start, end) = free.expect("there is an end behind the last range");
        let last = (end - start).checked_sub(pages).ok_or(end - start)?;
        let middle = if self.all.is_empty() { 0 } else { (end - start) / 2 };
        let first = start + middle.min(last) / PART * PART;
        Ok(first..first + pages)
    }

    /// Adds a volume's range. Returns `false` if the range is empty, does not begin with a part of
    /// the map, or shares a part with another volume.
    pub fn insert(&mut self, range: Range<u32>) -> bool {
        let at = self.all.partition_point(|it| it.end <= range.start);
        let end = self.all.get(at).map_or(PAGES_MAX, |next| next.start);
        let begins = at.checked_sub(1).map_or(0, |before| whole(self.all[before].end));
        let fits = range.start >= begins && range.end <= end;
        if !fits || range.is_empty() || !range.start.is_multiple_of(PART) {
            return false;
        }
        self.all.insert(at, range);
        true
    }

    /// Largest number of pages to which the range that begins at `first` can grow.
    pub fn most(&self, first: u32) -> u32 {
        let next = self.all.iter().find(|range| range.start > first);
        next.map_or(PAGES_MAX, |next| next.start) - first
    }

    /// Changes the number of pages of the range that begins at `first`; with 0 the range is free.
    pub fn resize(&mut self, first: u32, pages: u32) {
        self.all.iter_mut().filter(|it| it.start == first).for_each(|it| it.end = first + pages);
        self.all.retain(|range| !range.is_empty());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_range_begins_in_the_middle_of_the_longest_free_one_and_has_its_parts_of_the_map_for_itself() {
        let mut ranges = Ranges::default();
        let first = ranges.find(700).unwrap();
        assert!(first == (0..700) && ranges.insert(first));
        let second = ranges.find(1).unwrap();
        let middle = (1024 + (PAGES_MAX - 1024) / 2) / PART * PART;
        assert!(second == (middle..middle + 1) && ranges.insert(second.clone()), "{second:?}");
        for range in [700..800, 1000..1025, 0..1, 1024..middle + 1, middle..middle + 1, 1024..1024] {
            assert!(!ranges.insert(range.clone()), "{range:?}");
        }
        assert!(ranges.insert(1024..1025) && ranges.insert(middle - PART..middle));
        assert_eq!(ranges.most(0), 1024);
        assert_eq!(ranges.most(middle), PAGES_MAX - middle);
        let most = ranges.find(PAGES_MAX).unwrap_err();
        assert_eq!(ranges.find(most).map(|range| range.len()), Ok(most as usize), "exactly that fits");
        assert_eq!(ranges.find(most + 1), Err(most));
        assert_eq!((ranges.pages(), ranges.words()), (700 + 1 + 1 + 512, 1024 + 512 + 512 + 512));
        let gaps: Vec<_> = ranges.gaps().collect();
        assert_eq!(gaps, [0..0, 700..1024, 1025..middle - PART, middle..middle, middle + 1..PAGES_MAX]);
        ranges.resize(1024, 0);
        assert_eq!(
            [0, 699, 700, middle].map(|at| ranges.from(at).unwrap().start),
            [0, 0, middle - PART, middle]
        );
        assert_eq!(ranges.from(middle + 1), None);
        assert_eq!(
            [0, 699, 700, middle - 1, middle, middle + 1].map(|at| ranges.has(PageNo(at))),
            [true, true, false, true, true, false]
        );
    }

    #[test]
    fn generations_of_births_that_follow_one_another_are_far_apart() {
        let mut births: Vec<u32> = (0..1000).map(generation).collect();
        assert_eq!(births[0], 0);
        births.sort_unstable();
        assert!(births.windows(2).all(|two| two[1] - two[0] > 25_000) && births[999] < 1 << 26);
    }

    proptest! {
        #[test]
        fn ranges_never_meet(sizes in proptest::collection::vec((1..5000u32, any::<bool>()), 1..60)) {
            let mut ranges = Ranges::default();
            for (size, removes) in sizes {
                let found = ranges.find(size).unwrap();
                prop_assert!(ranges.insert(found.clone()));
                let grown = ranges.most(found.start).min(size + 600);
                ranges.resize(found.start, grown);
                if removes {
                    let first = ranges.from(size * 7).map_or(found.start, |range| range.start);
                    ranges.resize(first, 0);
                }
                prop_assert!(ranges.all.windows(2).all(|two| whole(two[0].end) <= two[1].start));
                prop_assert!(ranges.all.iter().all(|it| !it.is_empty() && it.start % PART == 0));
            }
        }
    }
}
