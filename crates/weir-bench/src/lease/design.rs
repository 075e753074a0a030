//! The duties of every design, so that all are driven alike.

use weir_lease::{Place, Token};

/// One way to remember references, for one thread's connections.
pub trait Design: Send {
    /// The control's name in a report.
    const NAME: &'static str;

    /// Takes one reference of each page for a connection and writes the tokens.
    fn take(&mut self, connection: u32, pages: &[Place], tokens: &mut [Token]);

    /// Gives references back and returns how many pages lost their last, where the design knows.
    fn give(&mut self, connection: u32, tokens: &[Token]) -> u32;

    /// Gives references back and says of which pages they were.
    fn give_pages(&mut self, connection: u32, tokens: &[Token], back: &mut Vec<u32>);

    /// Bytes of memory held now, without what several threads' parts share.
    fn bytes(&self) -> usize;

    /// Bytes that all parts share.
    fn shared_bytes(&self) -> usize {
        0
    }
}

/// Does nothing: what remains is the harness.
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
