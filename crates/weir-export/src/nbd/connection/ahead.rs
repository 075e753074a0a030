//! Long writes, whose payload the carrier receives while what came before is worked on.

use super::super::flight::CHUNK_MAX;
use super::super::pool::Loan;
use super::super::transmission::{Event, Parser, Request};
use super::slow::CARRIED;
use super::{Connection, Ending};
use std::time::Duration;
use weir_core::PAGE_SIZE;

/// How often a store is looked at while a client makes a pause within a payload: for two seconds, then the store has answered.
const STORE_LOOK: Duration = Duration::from_millis(1);

impl Connection<'_> {
    /// Where much of a write's payload is still to come, has the carrier receive the next part of it. The part of a page with which
    /// `unparsed` ends goes there too.
    pub(super) fn receive_ahead(&mut self, request: &Request, parser: &Parser, unparsed: &mut &[u8]) {
        let ragged = unparsed.len() % PAGE_SIZE;
        let (pages, rest) = unparsed.split_at(unparsed.len() - ragged);
        if request.length < CARRIED
            || !request.offset.is_multiple_of(PAGE_SIZE as u64)
            || parser.left() < pages.len() + CHUNK_MAX as usize
        {
            return;
        }
        if self.hired.is_none() {
            self.hired = self.desk.carriers.hire(self.socket);
        }
        let Some(carrier) = self.hired.as_ref().filter(|carrier| carrier.is_still()) else { return };
        let Some(mut loan) = self.desk.chunks.borrow() else { return };
        loan[..ragged].copy_from_slice(rest);
        let whole = CHUNK_MAX as usize;
        carrier.receive(loan, ragged..whole);
        (self.ahead, *unparsed) = (Some(whole), pages);
    }

    /// Takes what the carrier was asked to receive, part after part, to the end of the payload. Returns how the connection ended, if
    /// it did.
    pub(super) fn take_ahead(&mut self, parser: &mut Parser) -> Result<Option<Ending>, Ending> {
        while let Some(whole) = self.ahead {
            let (loan, filled) = self.wait_ahead()?;
            self.ahead = None;
            self.counters.batches.add(1);
            self.presence.received(&loan[..filled]);
            let is_torn = filled < whole;
            let next = (parser.left() - filled).min(CHUNK_MAX as usize);
            if !is_torn && next > 0 {
                // Into memory of its own: this part is still to be looked at. Where there is none, this thread receives the rest.
                self.ahead = self.hired.as_ref().zip(self.desk.chunks.borrow()).map(|(carrier, loan)| {
                    carrier.receive(loan, 0..next);
                    next
                });
            }
            self.plan(parser, &loan[..filled]);
            let mut bytes = &loan[..filled];
            while let Some(event) = parser.next(&mut bytes).map_err(Ending::Violation)? {
                let Event::Payload(payload) = event else { unreachable!("it ends with the payload") };
                self.payload(&payload)?;
            }
            drop(loan);
            self.end_batch()?;
            if is_torn {
                self.end_torn()?;
                return Ok(Some(Ending::Torn));
            }
        }
        Ok(None)
    }

    /// Waits for the carrier, and meanwhile answers what slow stores finish.
    fn wait_ahead(&mut self) -> Result<(Loan, usize), Ending> {
        loop {
            let Some(carrier) = &self.hired else { return Err(Ending::Closed) };
            let patience = match (self.desk.flight.is_empty(), self.desk.lane.must_poll()) {
                (true, _) => None,
                (false, true) => Some(Duration::ZERO),
                // A client that is within a payload has the next part of it there sooner than a store answers.
                (false, false) => Some(STORE_LOOK),
            };
            if let Some(received) = carrier.received(patience)? {
                self.counters.carried.add(1);
                return Ok(received);
            }
            if !self.take_completions()? && self.desk.lane.must_poll() {
                self.desk.lane.rest();
            }
        }
    }
}
