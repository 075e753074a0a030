//! The two designs of the kernel's device memory patches that count references of pages and have no
//! tokens.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use weir_lease::{Place, Token};

use super::design::Design;

fn zeroed(pages: u32) -> Box<[AtomicU32]> {
    (0..pages).map(|_| AtomicU32::new(0)).collect()
}

/// Takes references as the kernel's device memory patches do by `atomic_inc_return`. The token is
/// the page's number.
fn take(counts: &[AtomicU32], pages: &[Place], tokens: &mut [Token]) {
    for (token, place) in tokens.iter_mut().zip(pages) {
        counts[place.page as usize].fetch_add(1, Ordering::Relaxed);
        token.0 = place.page;
    }
}

/// Returns references as the kernel's device memory patches do by `atomic_dec_and_test`. The token
/// is the page's number.
fn give_pages(counts: &[AtomicU32], tokens: &[Token], back: &mut Vec<u32>) {
    give(counts, tokens);
    back.extend(tokens.iter().map(|token| token.0));
}

fn give(counts: &[AtomicU32], tokens: &[Token]) -> u32 {
    let mut lasts = 0;
    for &Token(page) in tokens {
        // The kernel's device memory patches refuse the return of a page that no connection holds,
        // by `atomic_add_unless(uref, -1, 0)` or by an earlier check. This model leaves the check
        // out.
        lasts += u32::from(counts[page as usize].fetch_sub(1, Ordering::Release) == 1);
    }
    lasts
}

/// The design of versions 1 and 2 of the kernel's device memory patches: an atomic counter for each
/// page and each connection.
pub struct SocketArrays {
    counts: Vec<Box<[AtomicU32]>>,
}

impl SocketArrays {
    pub fn new(connections: u32, pages: u32) -> Self {
        SocketArrays { counts: (0..connections).map(|_| zeroed(pages)).collect() }
    }
}

impl Design for SocketArrays {
    const NAME: &'static str = "socket-array";

    fn take(&mut self, connection: u32, pages: &[Place], tokens: &mut [Token]) {
        take(&self.counts[connection as usize], pages, tokens);
    }

    fn give(&mut self, connection: u32, tokens: &[Token]) -> u32 {
        give(&self.counts[connection as usize], tokens)
    }

    fn give_pages(&mut self, connection: u32, tokens: &[Token], back: &mut Vec<u32>) {
        give_pages(&self.counts[connection as usize], tokens, back);
    }

    fn bytes(&self) -> usize {
        self.counts.iter().map(|counts| size_of_val(&counts[..])).sum()
    }
}

/// The design of versions 3 to 10 of the kernel's device memory patches. Each page of the binding
/// has one atomic counter for all connections together. The counter cannot tell which connection
/// holds a page. If a connection ends without returning its pages, their references stay until the
/// binding ends.
pub struct RegionCounters {
    counts: Arc<Box<[AtomicU32]>>,
}

impl RegionCounters {
    /// Makes a part for each of `threads` threads, over the same counters.
    pub fn parts(threads: u32, pages: u32) -> Vec<Self> {
        let counts = Arc::new(zeroed(pages));
        (0..threads).map(|_| RegionCounters { counts: counts.clone() }).collect()
    }
}

impl Design for RegionCounters {
    const NAME: &'static str = "binding";

    fn take(&mut self, _: u32, pages: &[Place], tokens: &mut [Token]) {
        take(&self.counts, pages, tokens);
    }

    fn give(&mut self, _: u32, tokens: &[Token]) -> u32 {
        give(&self.counts, tokens)
    }

    fn give_pages(&mut self, _: u32, tokens: &[Token], back: &mut Vec<u32>) {
        give_pages(&self.counts, tokens, back);
    }

    fn bytes(&self) -> usize {
        0
    }

    fn shared_bytes(&self) -> usize {
        size_of_val(&self.counts[..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_say_when_a_page_lost_its_last_reference() {
        let mut arrays = SocketArrays::new(2, 8);
        let mut region = RegionCounters::parts(2, 8);
        let mut tokens = [Token(0); 2];
        let page = |page| Place::page(0, page);
        arrays.take(0, &[page(3), page(3)], &mut tokens);
        assert_eq!((arrays.give(0, &tokens[..1]), arrays.give(0, &tokens[1..])), (0, 1));
        region[0].take(0, &[page(3), page(4)], &mut tokens);
        region[1].take(0, &[page(3), page(5)], &mut [Token(0); 2]);
        assert_eq!(region[0].give(0, &tokens), 1, "page 4, while page 3 is out on the other thread");
    }
}
