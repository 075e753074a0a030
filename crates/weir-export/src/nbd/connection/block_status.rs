//! Block status: says which parts of a range are holes.

use super::super::transmission::{self as reply, Request};
use super::super::wire::{command_flag, extent_flag};
use super::{Connection, Ending, HEAD_MAX};
use weir_core::{PAGE_SIZE, PageNo};
use weir_device::PageLane;

/// Largest number of extents in one block status.
const EXTENTS_MAX: usize = 512;

impl<L: PageLane> Connection<'_, L> {
    pub(super) fn block_status(&mut self, request: &Request) -> Result<(), Ending> {
        let lane = &*self.desk.requests.lane();
        let flags = |page: u64| {
            let page = PageNo(page as u32);
            match (lane.mapped(page), lane.known_zero(page)) {
                (false, _) => extent_flag::HOLE | extent_flag::ZERO,
                (true, true) => extent_flag::ZERO,
                (true, false) => 0,
            }
        };
        let end = request.offset + u64::from(request.length);
        let most = if request.flags & command_flag::REQ_ONE != 0 { 1 } else { EXTENTS_MAX };
        let mut extents = [[0u8; 8]; EXTENTS_MAX];
        let (mut count, mut at) = (0, request.offset);
        while at < end && count < most {
            let (next, kind) = next_extent(at, end, flags);
            extents[count] = reply::extent((next - at) as u32, kind);
            (at, count) = (next, count + 1);
        }
        self.make_ack_room(HEAD_MAX + 8 * count)?;
        self.acknowledge(&reply::block_status_chunk(request.cookie, count))?;
        self.acknowledge(extents[..count].as_flattened())
    }
}

/// The extent that begins at `start`: the offset of its end, and the flags of all its pages. A
/// page's flags may change between two looks. A second look at the first page could find other
/// flags, and make the extent empty. So that page is looked at only once.
fn next_extent(start: u64, end: u64, flags: impl Fn(u64) -> u32) -> (u64, u32) {
    let (mut page, kind) = (start / PAGE_SIZE as u64, flags(start / PAGE_SIZE as u64));
    loop {
        page += 1;
        let at = (page * PAGE_SIZE as u64).min(end);
        if at == end || flags(page) != kind {
            return (at, kind);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::next_extent;
    use std::cell::Cell;

    #[test]
    fn an_extent_has_a_page_at_least_however_often_it_changes_between_two_looks() {
        let looks = Cell::new(0);
        let changing = |_| {
            looks.set(looks.get() + 1);
            looks.get() % 2
        };
        let (mut at, mut count) = (100, 0);
        while at < 10 * 4096 {
            let (next, _) = next_extent(at, 10 * 4096, changing);
            assert!(next > at && (next % 4096 == 0), "{at}..{next}");
            (at, count) = (next, count + 1);
        }
        assert!((5..=10).contains(&count), "{count}");
    }

    #[test]
    fn neighbours_of_a_kind_are_one_extent_within_the_range() {
        let kind = |page| u32::from(page >= 3);
        assert_eq!(next_extent(100, 50_000, kind), (3 * 4096, 0));
        assert_eq!(next_extent(3 * 4096, 50_000, kind), (50_000, 1));
        assert_eq!(next_extent(5, 6, kind), (6, 0));
    }
}
