//! Which parts of a range are holes.

use super::super::transmission::{self as reply, Request};
use super::super::wire::{command_flag, extent_flag};
use super::{Connection, Ending, HEAD_MAX};
use weir_core::{PAGE_SIZE, PageNo};

/// Extents of one block status.
const EXTENTS_MAX: usize = 512;

impl Connection<'_> {
    pub(super) fn block_status(&mut self, request: &Request) -> Result<(), Ending> {
        let lane = &self.desk.lane;
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
            let start = at;
            let kind = flags(at / PAGE_SIZE as u64);
            while at < end && flags(at / PAGE_SIZE as u64) == kind {
                at = (at / PAGE_SIZE as u64 + 1) * PAGE_SIZE as u64;
            }
            extents[count] = reply::extent((at.min(end) - start) as u32, kind);
            count += 1;
        }
        self.make_ack_room(HEAD_MAX + 8 * count)?;
        self.acknowledge(&reply::block_status_chunk(request.cookie, count))?;
        self.acknowledge(extents[..count].as_flattened())
    }
}
