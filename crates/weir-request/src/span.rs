//! A range of bytes, cut into pages.

use std::ops::Range;
use weir_core::{PAGE_SIZE, PageNo};

const PAGE: u64 = PAGE_SIZE as u64;

/// A range of bytes of a device, or of any other row of pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// The offset of the range's first byte.
    pub offset: u64,
    /// The range's length in bytes.
    pub length: u64,
}

/// The bytes of a span that lie in one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The page's number.
    pub page: u64,
    /// The piece's offset in the page, in bytes.
    pub within: usize,
    /// The piece's offset in the span, in bytes.
    pub from: u64,
    /// The piece's length in bytes.
    pub len: usize,
}

impl Span {
    /// The span of whole pages from `first` on.
    pub fn pages_from(first: PageNo, pages: u32) -> Span {
        Span { offset: u64::from(first.0) * PAGE, length: u64::from(pages) * PAGE }
    }

    /// The number of the page in which the span begins.
    pub fn first(&self) -> u64 {
        self.offset / PAGE
    }

    /// The number of pages that the span touches.
    pub fn pages(&self) -> u32 {
        if self.length == 0 { 0 } else { ((self.offset + self.length).div_ceil(PAGE) - self.first()) as u32 }
    }

    /// The piece of the span in the page at index `at`.
    #[inline]
    pub fn piece(&self, at: u32) -> Piece {
        let page = self.first() + u64::from(at);
        let start = self.offset.max(page * PAGE);
        let end = (self.offset + self.length).min((page + 1) * PAGE);
        Piece {
            page,
            within: (start % PAGE) as usize,
            from: start - self.offset,
            len: (end - start) as usize,
        }
    }

    /// The part of a page with which the span begins, the numbers of its whole pages, and the part
    /// of a page with which it ends. Each of the three may be empty.
    pub fn parts(&self) -> (Span, Range<u64>, Span) {
        let end = self.offset + self.length;
        let whole = self.offset.div_ceil(PAGE)..end / PAGE;
        let span = |from: u64, to: u64| Span { offset: from, length: to - from };
        if whole.start <= whole.end {
            (span(self.offset, whole.start * PAGE), whole.clone(), span(whole.end * PAGE, end))
        } else {
            // The span lies within one page and touches neither of the page's ends.
            (*self, whole.end..whole.end, span(end, end))
        }
    }

    /// Number of whole pages in a row from index `at` on, within the span.
    #[inline]
    pub(crate) fn whole_from(&self, at: u32) -> u32 {
        let start = self.piece(at);
        let left = self.length - start.from;
        if start.within == 0 { (left / PAGE) as u32 } else { 0 }
    }
}

impl Piece {
    /// The piece's bytes within the page.
    pub fn range(&self) -> Range<usize> {
        self.within..self.within + self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_pieces_of_a_span_follow_each_other_and_add_up(offset in 0u64..20_000, length in 0u64..20_000) {
            let span = Span { offset, length };
            let mut next = offset;
            for at in 0..span.pages() {
                let piece = span.piece(at);
                prop_assert!(piece.len > 0 && piece.range().end <= PAGE_SIZE);
                prop_assert_eq!(piece.page * PAGE + piece.within as u64, next);
                prop_assert_eq!(piece.from, next - offset);
                let whole = (at..span.pages()).take_while(|at| span.piece(*at).len == PAGE_SIZE).count();
                prop_assert_eq!(span.whole_from(at), whole as u32);
                next += piece.len as u64;
            }
            prop_assert_eq!(next, offset + length);
            let (head, whole, tail) = span.parts();
            let pieces = (0..span.pages()).map(|at| span.piece(at));
            let (all, some): (Vec<_>, Vec<_>) = pieces.partition(|piece| piece.len == PAGE_SIZE);
            prop_assert_eq!(all.iter().map(|piece| piece.page).collect::<Vec<_>>(), whole.collect::<Vec<_>>());
            let edges = [head, tail].into_iter().filter(|edge| edge.length > 0).map(|edge| edge.piece(0));
            prop_assert!(edges.map(|edge| (edge.page, edge.range())).eq(some.iter().map(|piece| (piece.page, piece.range()))));
        }
    }
}
