//! The memory of an io_uring's entry: a page that begins with the kernel's `fuse_uring_req_header`,
//! then the payload.
//!
//! The header has three parts: the request's own header at 0 (where the kernel then expects the
//! answer's), the part for its opcode at 128, and lengths at 256. Put together, they are the bytes
//! that a read of `/dev/fuse` returns. So the parser of those requests serves here too.

use super::super::reply::Reply;
use super::super::request::{self, Malformed, Message};
use super::super::wire::{InHeader, OutHeader, RingRequest, opcode};
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::io::IoSlice;
use weir_core::PAGE_SIZE;

/// The offset of the payload in an entry.
pub const PAYLOAD_AT: usize = PAGE_SIZE;
/// Bytes of `fuse_uring_req_header`.
pub const HEADERS: usize = LENGTHS_AT + RingRequest::BYTES;
/// Bytes of the longest request other than a write: a name and a link's target, and the headers.
pub const SMALL_MAX: usize = 2 * PAGE_SIZE;

const OPERATION_AT: usize = 128;
const OPERATION_MAX: usize = LENGTHS_AT - OPERATION_AT;
const LENGTHS_AT: usize = 256;
/// Bytes of the longest answer to a write.
const WRITE_ANSWER_MAX: usize = 64;

/// An entry as the kernel filled it.
#[derive(Clone, Copy, Debug)]
pub struct Incoming {
    header: InHeader,
    /// The request's commit number. The command that answers the request must name it.
    pub commit: u64,
    payload: usize,
}

impl Incoming {
    pub fn read(memory: &[u8]) -> Incoming {
        let header = InHeader::decode(&mut &memory[..]).expect("an entry has more than a page");
        let lengths = RingRequest::decode(&mut &memory[LENGTHS_AT..]).expect("an entry has more than a page");
        Incoming { header, commit: lengths.commit, payload: lengths.payload as usize }
    }

    /// Number of bytes that the request has for its opcode, without the payload. `None` if the
    /// lengths contradict each other, or exceed the entry's memory.
    fn operation(&self, room: usize) -> Option<usize> {
        let operation = (self.header.len as usize).checked_sub(InHeader::BYTES)?.checked_sub(self.payload)?;
        (operation <= OPERATION_MAX && self.payload <= room).then_some(operation)
    }

    /// Parses the request, passes it to `serve`, and puts the answer that `serve` gives where the
    /// kernel expects it. Returns the answer's length.
    ///
    /// # Errors
    /// Fails with the errors of `serve`.
    pub fn answer(
        self,
        memory: &mut [u8],
        scratch: &mut [u8; SMALL_MAX],
        serve: impl FnOnce(Result<Message<'_>, Malformed>, &dyn Reply) -> rustix::io::Result<()>,
    ) -> rustix::io::Result<usize> {
        let malformed = Malformed { opcode: self.header.opcode, unique: self.header.unique };
        let operation = self.operation(memory.len() - PAYLOAD_AT);
        let front = InHeader::BYTES + operation.unwrap_or(0);
        let (header, bytes) = if self.header.opcode == opcode::WRITE {
            // Put the headers directly before the data, which begin at a page. The parsed request
            // borrows this memory, so its answer goes into other memory.
            let start = PAYLOAD_AT - front;
            memory.copy_within(OPERATION_AT..OPERATION_AT + front - InHeader::BYTES, start + InHeader::BYTES);
            memory.copy_within(..InHeader::BYTES, start);
            let mut small = [0; WRITE_ANSWER_MAX];
            let reply = Answer::to(&mut small, self.header.unique);
            let message = match operation {
                Some(_) => request::parse(&memory[start..PAYLOAD_AT + self.payload]),
                None => Err(malformed),
            };
            serve(message, &reply)?;
            let (header, bytes) = reply.sent();
            memory[PAYLOAD_AT..PAYLOAD_AT + bytes].copy_from_slice(&small[..bytes]);
            (header, bytes)
        } else {
            let (page, payload) = memory.split_at_mut(PAYLOAD_AT);
            let whole = front + self.payload;
            let message = match operation {
                Some(operation) if whole <= SMALL_MAX => {
                    scratch[..InHeader::BYTES].copy_from_slice(&page[..InHeader::BYTES]);
                    scratch[InHeader::BYTES..front].copy_from_slice(&page[OPERATION_AT..][..operation]);
                    scratch[front..whole].copy_from_slice(&payload[..self.payload]);
                    request::parse(&scratch[..whole])
                }
                _ => Err(malformed),
            };
            let reply = Answer::to(payload, self.header.unique);
            serve(message, &reply)?;
            reply.sent()
        };
        memory[..OutHeader::BYTES].copy_from_slice(&header);
        let lengths = RingRequest { commit: self.commit, payload: bytes as u32, ..RingRequest::default() };
        memory[LENGTHS_AT..][..RingRequest::BYTES].copy_from_slice(&lengths.encode());
        Ok(bytes)
    }
}

/// An answer that is being put into an entry.
struct Answer<'a> {
    body: RefCell<&'a mut [u8]>,
    sent: Cell<([u8; OutHeader::BYTES], usize)>,
}

fn error(unique: u64, errno: Errno) -> [u8; OutHeader::BYTES] {
    OutHeader { len: OutHeader::BYTES as u32, error: -errno.raw_os_error(), unique }.encode()
}

impl<'a> Answer<'a> {
    /// An answer for an entry. Until `serve` gives the real one, it is the error for an unknown
    /// request.
    fn to(body: &'a mut [u8], unique: u64) -> Answer<'a> {
        Answer { body: RefCell::new(body), sent: Cell::new((error(unique, Errno::NOSYS), 0)) }
    }

    fn sent(&self) -> ([u8; OutHeader::BYTES], usize) {
        self.sent.get()
    }
}

impl Reply for Answer<'_> {
    fn send(&self, slices: &[IoSlice<'_>]) -> rustix::io::Result<()> {
        let Some((header, body)) = slices.split_first() else { return Err(Errno::INVAL) };
        let header: [u8; OutHeader::BYTES] = (**header).try_into().map_err(|_| Errno::INVAL)?;
        let mut room = self.body.borrow_mut();
        let mut at = 0;
        for slice in body {
            let Some(to) = room.get_mut(at..at + slice.len()) else {
                // No request asks for more bytes than an entry holds. If `serve` gives more all the
                // same, the program gets an I/O error.
                let unique = OutHeader::decode(&mut &header[..]).map_or(0, |header| header.unique);
                self.sent.set((error(unique, Errno::IO), 0));
                return Ok(());
            };
            to.copy_from_slice(slice);
            at += slice.len();
        }
        self.sent.set((header, at));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::request::Request;
    use super::super::super::wire::{ReadIn, WriteIn};
    use super::*;
    use proptest::prelude::*;

    const PAYLOAD: usize = 2 * PAGE_SIZE;

    fn put(opcode: u32, operation: &[u8], payload: &[u8]) -> Vec<u8> {
        let mut memory = vec![0xaa; PAYLOAD_AT + PAYLOAD];
        let len = (InHeader::BYTES + operation.len() + payload.len()) as u32;
        let header = InHeader { len, opcode, unique: 8, nodeid: 1, ..InHeader::default() };
        memory[..InHeader::BYTES].copy_from_slice(&header.encode());
        memory[OPERATION_AT..][..operation.len()].copy_from_slice(operation);
        let lengths = RingRequest { commit: 8, payload: payload.len() as u32, ..RingRequest::default() };
        memory[LENGTHS_AT..][..RingRequest::BYTES].copy_from_slice(&lengths.encode());
        memory[PAYLOAD_AT..][..payload.len()].copy_from_slice(payload);
        memory
    }

    fn answered(memory: &[u8]) -> (OutHeader, &[u8]) {
        let header = OutHeader::decode(&mut &memory[..]).unwrap();
        let lengths = RingRequest::decode(&mut &memory[LENGTHS_AT..]).unwrap();
        (header, &memory[PAYLOAD_AT..][..lengths.payload as usize])
    }

    fn answer(
        memory: &mut [u8],
        serve: impl FnOnce(Result<Message<'_>, Malformed>, &dyn Reply) -> rustix::io::Result<()>,
    ) -> usize {
        Incoming::read(memory).answer(memory, &mut [0; SMALL_MAX], serve).unwrap()
    }

    #[test]
    fn a_request_is_put_together_and_its_answer_taken_apart() {
        let what = ReadIn { offset: 4096, size: 5000, ..ReadIn::default() };
        let mut memory = put(opcode::READ, &what.encode(), b"");
        let data: Vec<u8> = (0..5000).map(|at| at as u8).collect();
        answer(&mut memory, |message, reply| {
            assert_eq!(message.unwrap().request, Request::Read { what });
            reply.answer(8, &data)
        });
        let (header, body) = answered(&memory);
        assert_eq!((header.unique, header.error, header.len), (8, 0, 5016));
        assert_eq!(body, data);

        let mut memory = put(opcode::LOOKUP, b"", b"name\0");
        answer(&mut memory, |message, reply| {
            assert_eq!(message.unwrap().request, Request::Lookup { name: b"name" });
            reply.refuse(8, Errno::NOENT)
        });
        assert_eq!(answered(&memory).0.error, -2);
    }

    #[test]
    fn a_writes_data_are_looked_at_where_they_lie_and_the_answer_follows() {
        let what = WriteIn { offset: 1, size: 4096, ..WriteIn::default() };
        let data = [7; 4096];
        let mut memory = put(opcode::WRITE, &what.encode(), &data);
        let place = memory[PAYLOAD_AT..].as_ptr();
        answer(&mut memory, |message, reply| {
            let Request::Write { data: found, .. } = message.unwrap().request else { panic!("a write") };
            reply.answer(8, &[1; 8])?;
            assert_eq!(found, data, "the answer does not come over the data");
            assert_eq!(found.as_ptr(), place);
            Ok(())
        });
        assert_eq!(answered(&memory).1, [1; 8]);
    }

    #[test]
    fn what_is_not_answered_or_answered_with_too_much_is_an_error() {
        let mut memory = put(opcode::STATFS, b"", b"");
        answer(&mut memory, |_, _| Ok(()));
        assert_eq!(answered(&memory).0.error, -Errno::NOSYS.raw_os_error());
        let mut memory = put(opcode::STATFS, b"", b"");
        answer(&mut memory, |_, reply| reply.answer(8, &[0; PAYLOAD + 1]));
        assert_eq!((answered(&memory).0.error, answered(&memory).1.len()), (-Errno::IO.raw_os_error(), 0));
    }

    proptest! {
        #[test]
        fn whatever_lies_in_an_entry_is_answered_within_it(
            len in prop_oneof![any::<u32>(), 0u32..20_000], payload in prop_oneof![any::<u32>(), 0u32..10_000],
            opcode in 0u32..60, front in proptest::collection::vec(any::<u8>(), PAYLOAD_AT), seed: u8,
        ) {
            let mut memory = vec![seed; PAYLOAD_AT + PAYLOAD];
            memory[..PAYLOAD_AT].copy_from_slice(&front);
            memory[..8].copy_from_slice(&[len.to_ne_bytes(), opcode.to_ne_bytes()].concat());
            memory[LENGTHS_AT + 16..][..4].copy_from_slice(&payload.to_ne_bytes());
            let bytes = answer(&mut memory, |message, reply| match message {
                Ok(Message { request: Request::Write { what, data }, .. }) => {
                    assert_eq!(data.len(), what.size as usize);
                    reply.answer(1, &[0; 8])
                }
                Ok(_) => reply.answer(1, &[9; 100]),
                Err(malformed) => reply.refuse(malformed.unique, Errno::INVAL),
            });
            prop_assert!(bytes <= 100 && answered(&memory).1.len() == bytes);
        }
    }
}
