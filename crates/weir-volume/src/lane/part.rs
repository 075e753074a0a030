//! Partial writes: a page's old content is read, patched, and written to a new slot. A page that
//! moves is a partial write with an empty patch.

use super::count::Started;
use super::located::Located;
use super::packing::{EVERY_MEMBER, Packed};
use super::publish::Written;
use super::{Lane, Work, fill};
use crate::entry::{Entry, Place};
use weir_core::{PAGE_SIZE, PageBytes, PageNo};
use weir_store::{Fault, Progress, Ticket};

/// The state of a partial write under way. A page move reuses this with an empty patch.
pub(super) struct Part {
    pub(super) base: Box<PageBytes>,
    /// The bytes to write; empty in a lane that only moves pages.
    pub(super) patch: Box<[u8]>,
    pub(super) offset: usize,
    pub(super) len: usize,
    /// The old place of a page that only moves. If the page lies in another place by now, nothing
    /// is left to do.
    pub(super) moving: Option<Place>,
}

impl Lane {
    /// Writes a part of a page atomically; `offset + bytes.len()` is at most a page. The rest of
    /// the page keeps its content, even if another lane writes the page at the same time. This
    /// takes longer than to write a whole page, so callers align when they can.
    pub fn write_part(&mut self, ticket: Ticket, page: PageNo, offset: usize, bytes: &[u8]) -> Progress {
        let page = self.at(page);
        self.enter();
        let started = self.sample();
        self.start_part(ticket, started, page, (offset, bytes), None)
    }

    /// Writes `page` anew with its present content, if it still lies at `from`. The page goes into
    /// the first store that this lane may use and that has room. If another lane writes the page
    /// meanwhile, no move is needed.
    pub(crate) fn move_page(&mut self, ticket: Ticket, page: PageNo, from: Place) -> Progress {
        self.enter();
        self.start_part(ticket, None, page, (0, &[]), Some(from))
    }

    fn start_part(
        &mut self,
        ticket: Ticket,
        started: Option<Started>,
        page: PageNo,
        (offset, bytes): (usize, &[u8]),
        moving: Option<Place>,
    ) -> Progress {
        let (Some(&part), Some(op)) = (self.idle_parts.last(), self.idle_op()) else {
            return Progress::Full;
        };
        self.idle_parts.pop();
        let state = &mut self.parts[part as usize];
        state.patch[..bytes.len()].copy_from_slice(bytes);
        (state.offset, state.len, state.moving) = (offset, bytes.len(), moving);
        assert!(offset + bytes.len() <= PAGE_SIZE, "a part lies within its page");
        let from = Located { page, entry: Entry::default(), checksum: None, packed: false };
        self.start(ticket, started, Work::Part { part, from, to: None });
        match self.advance_part(op, None) {
            Progress::Queued => Progress::Queued,
            Progress::Full => {
                self.stalled.push(op);
                Progress::Queued
            }
            Progress::Done(result) => {
                let ended = self.end(op);
                if moving.is_none() {
                    self.metrics().write_ended(ended.work.place(), started, result);
                }
                Progress::Done(result)
            }
        }
    }

    /// Makes the next poll restart a partial write whose page another lane has written. Until then
    /// the lane's owner can notice that the write's client has gone.
    pub(super) fn begin_part_again(&mut self, op: u32) -> Progress {
        let op = &mut self.ops[op as usize];
        op.looks = op.looks.saturating_add(1);
        if let Work::Part { to, .. } = &mut op.work {
            *to = None;
        }
        Progress::Full
    }

    /// Continues a partial write as far as possible without waiting. `answer` is the store's answer
    /// to the read or the write that was under way. After [`Progress::Full`] the next poll tries
    /// again.
    pub(super) fn advance_part(&mut self, op: u32, mut answer: Option<Result<(), Fault>>) -> Progress {
        loop {
            let Work::Part { part, from, to } = self.ops[op as usize].work else {
                unreachable!("operation {op} is no partial write")
            };
            match (answer.take(), to) {
                // No read or write of this operation is under way: begin with the page's present
                // content.
                (None, _) => {
                    self.enter();
                    let from = match self.parts[part as usize].moving {
                        None => self.pool.locate(from.page),
                        // The volume of a page that moves may have been removed meanwhile.
                        Some(place) => match self.pool.locate_in_volume(from.page) {
                            Some(from) if from.entry.place() == place => from,
                            _ => return Progress::Done(Ok(())),
                        },
                    };
                    self.ops[op as usize].work = Work::Part { part, from, to: None };
                    let base = &mut self.parts[part as usize].base;
                    answer = Some(match from.entry.place() {
                        Place::Empty => {
                            base.fill(0);
                            Ok(())
                        }
                        Place::Fill(value) => {
                            fill(base, value);
                            Ok(())
                        }
                        Place::Lost => Err(Fault::Lost),
                        Place::Stored { store, slot } => match self.stores[store].lane.read(op, slot, base) {
                            Progress::Done(result) => result,
                            Progress::Full => return Progress::Full,
                            Progress::Queued => {
                                self.under_way += 1;
                                self.ops[op as usize].found = self.looking.begin();
                                return Progress::Queued;
                            }
                        },
                    });
                }
                // The old content is here: patch it and send it out.
                (Some(Ok(())), None) => {
                    if let Err(fault) = from.verify(&self.parts[part as usize].base) {
                        return Progress::Done(Err(fault));
                    }
                    if from.page == EVERY_MEMBER {
                        self.note_members(part);
                        return Progress::Done(Ok(()));
                    }
                    if self.packing.is_some() {
                        match self.pack_part(op, part, &from) {
                            Ok(Packed::Joined) => {
                                let to = Some(Entry::default());
                                self.ops[op as usize].work = Work::Part { part, from, to };
                                return Progress::Queued;
                            }
                            Ok(Packed::Full) => return Progress::Full,
                            Ok(Packed::Not) => {}
                            Err(fault) => return Progress::Done(Err(fault)),
                        }
                    }
                    let state = &mut self.parts[part as usize];
                    let range = state.offset..state.offset + state.len;
                    state.base[range].copy_from_slice(&state.patch[..state.len]);
                    let parts = std::mem::take(&mut self.parts);
                    let bytes = &parts[part as usize].base;
                    // A page that only moves keeps its generation, and must still lie in its old
                    // place.
                    let (generation, condition) = match parts[part as usize].moving {
                        Some(_) => (from.entry.generation(), Some(from.entry)),
                        None => (from.entry.next_generation(), None),
                    };
                    let (written, entry) = self.write_from(op, from.page, bytes, generation, condition);
                    self.parts = parts;
                    match written {
                        Written::Published => {
                            self.ops[op as usize].work.goes_to(entry);
                            return Progress::Done(Ok(()));
                        }
                        Written::Overtaken => return self.begin_part_again(op),
                        Written::Failed(fault) => return Progress::Done(Err(fault)),
                        Written::Full => return Progress::Full,
                        Written::Queued => {
                            self.ops[op as usize].work = Work::Part { part, from, to: Some(entry) };
                            return Progress::Queued;
                        }
                    }
                }
                // The store has written the new content: publish it.
                (Some(Ok(())), Some(entry)) => {
                    let condition = self.parts[part as usize].moving.map(|_| from.entry);
                    if self.publish(from.page, entry, condition) {
                        return Progress::Done(Ok(()));
                    }
                    self.unclaim(entry);
                    return self.begin_part_again(op);
                }
                (Some(Err(fault)), to) => {
                    if let Some(entry) = to {
                        self.unclaim_failed(entry, fault);
                    }
                    return Progress::Done(Err(fault));
                }
            }
        }
    }
}
