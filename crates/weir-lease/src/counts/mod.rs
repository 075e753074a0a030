//! Reference counts of pages. They tell a table that a connection has returned the last reference
//! to a page.

mod owned;
mod shared;

pub use owned::OwnedCounts;
pub use shared::SharedCounts;

use crate::token::Place;

/// Counts the references of each page. [`NoCounts`] is for callers that count elsewhere (as Linux'
/// page pool does), [`OwnedCounts`] for the pages of one table, and [`SharedCounts`] for pages that
/// several tables lend.
pub trait PageCounts {
    /// Notes one more reference. Returns `false`, and notes nothing, if there is no such page or
    /// its count is full.
    fn take(&mut self, place: Place) -> bool;

    /// Notes that a reference has come back. Returns `true` if it was the page's last.
    fn give(&mut self, place: Place) -> bool;
}

/// Counts nothing and takes no memory. So no return of a page is reported as its last.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoCounts;

impl PageCounts for NoCounts {
    #[inline]
    fn take(&mut self, _: Place) -> bool {
        true
    }

    #[inline]
    fn give(&mut self, _: Place) -> bool {
        false
    }
}

/// For each region the index of its first page, in one array of the pages of all regions.
#[derive(Clone, Debug)]
struct Regions {
    /// For each region the index of its first page in one array of all pages, and its number of
    /// pages, which is 0 for absent regions.
    spans: alloc::boxed::Box<[(usize, u32)]>,
}

impl Regions {
    /// Makes the regions; also returns the number of all their pages.
    fn new(pages: &[u32]) -> (Self, usize) {
        let mut end = 0;
        let spans = pages
            .iter()
            .take(256)
            .map(|&pages| {
                let first = end;
                end += pages as usize;
                (first, pages)
            })
            .collect();
        (Regions { spans }, end)
    }

    #[inline]
    fn index(&self, place: Place) -> Option<usize> {
        let &(first, pages) = self.spans.get(usize::from(place.region))?;
        (place.page < pages).then_some(first + place.page as usize)
    }
}
