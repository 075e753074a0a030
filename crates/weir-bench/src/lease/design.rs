//! The common interface of all designs. Through it the benchmark uses all of them in the same way.

use weir_lease::{Place, Token};

/// A design that records references, for the connections of one thread.
pub trait Design: Send {
    /// The design's name as a control in a report.
    const NAME: &'static str;

    /// Takes one reference of each page for a connection, and writes the tokens.
    fn take(&mut self, connection: u32, pages: &[Place], tokens: &mut [Token]);

    /// Returns references. Returns how many pages lost their last reference, if the design knows.
    fn give(&mut self, connection: u32, tokens: &[Token]) -> u32;

    /// Returns references, and appends their pages to `back`.
    fn give_pages(&mut self, connection: u32, tokens: &[Token], back: &mut Vec<u32>);

    /// Bytes of memory that this part of the design, which is one thread's, holds now. Memory that
    /// the parts of several threads share does not count.
    fn bytes(&self) -> usize;

    /// Bytes of memory that the parts of a design share. Each thread has one part.
    fn shared_bytes(&self) -> usize {
        0
    }
}

/// A design that records nothing. Its time is the time of the harness.
pub struct Nothing;

impl Design for Nothing {
    const NAME: &'static str = "harness";

    fn take(&mut self, _: u32, pages: &[Place], tokens: &mut [Token]) {
        for (token, place) in tokens.iter_mut().zip(pages) {
            token.0 = place.page;
        }
    }

    fn give(&mut self, connection: u32, tokens: &[Token]) -> u32 {
        std::hint::black_box((connection, tokens));
        0
    }

    fn give_pages(&mut self, _: u32, tokens: &[Token], back: &mut Vec<u32>) {
        back.extend(tokens.iter().map(|token| token.0));
    }

    fn bytes(&self) -> usize {
        0
    }
}
