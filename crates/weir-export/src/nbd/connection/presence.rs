//! Checks whether a connection's client is still there.
//!
//! A client that gives a connection up sends its unanswered requests again on another one, and
//! newer writes after that. The kernel's client does so after its I/O timeout, and shuts the socket
//! down first. From then on no write of this connection may take effect. That holds for a write
//! that a slow store has delayed. It also holds for one that waited in the socket, because this
//! thread had no processor or the process was stopped. So before anything is written or published,
//! the client must have been there a moment ago.

use super::super::transmission::{Event, Parser};
use super::super::wire::{REQUEST_BYTES, command};
use super::{Connection, Ending};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::RecvFlags;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use weir_device::PageLane;

/// The time when the client was last seen, and whether it is leaving in order.
pub(super) struct Presence<'a> {
    /// The time when the client was last seen, by the coarse clock. A read of that clock takes a
    /// few nanoseconds.
    seen: Duration,
    /// The last bytes that were received from the client.
    tail: [u8; REQUEST_BYTES],
    /// Whether the client is about to disconnect in order. Its earlier requests are still to be
    /// done.
    leaves: bool,
    closing: &'a AtomicBool,
}

impl<'a> Presence<'a> {
    /// The presence of a client before the first check.
    pub fn new(closing: &'a AtomicBool) -> Self {
        Presence { seen: Duration::ZERO, tail: [0; REQUEST_BYTES], leaves: false, closing }
    }

    /// Notes bytes that were received.
    #[inline]
    pub fn received(&mut self, bytes: &[u8]) {
        let new = &bytes[bytes.len().saturating_sub(REQUEST_BYTES)..];
        self.tail.copy_within(new.len().., 0);
        self.tail[REQUEST_BYTES - new.len()..].copy_from_slice(new);
    }

    /// Notes that the client has sent its last request. From then on the client may leave, and the
    /// requests that it has sent are done all the same.
    pub fn has_said_goodbye(&mut self) {
        self.leaves = true;
    }

    /// Whether the client has sent its last request. That request may still lie in the socket.
    pub fn is_leaving(&self) -> bool {
        self.leaves
    }

    /// Whether this server has shut the socket for reading, which looks as if the client had.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }
}

impl<L: PageLane> Connection<'_, L> {
    /// Checks that the client has been there within one tick of the kernel, 1 to 10 ms.
    ///
    /// # Errors
    /// Fails when the client has gone without a request to disconnect.
    #[inline]
    pub(super) fn see_client(&mut self) -> Result<(), Ending> {
        let now = weir_core::clock::coarse();
        if now == self.presence.seen {
            return Ok(());
        }
        self.presence.seen = now;
        self.look_for_client()
    }

    /// Checks that the client is there now.
    ///
    /// # Errors
    /// Fails as [`see_client`](Connection::see_client) does.
    pub(super) fn look_for_client(&mut self) -> Result<(), Ending> {
        if self.presence.leaves || self.presence.is_closing() || !has_hung_up(self.socket) {
            return Ok(());
        }
        self.presence.leaves = self.ends_with_goodbye();
        if self.presence.leaves { Ok(()) } else { Err(Ending::Closed) }
    }

    /// The outcome of a send. It is no error if the client has closed the connection after its last
    /// request: such a client need not wait for the answers.
    pub(super) fn unless_leaving(&mut self, sent: rustix::io::Result<()>) -> Result<(), Ending> {
        let Err(errno) = sent else { return Ok(()) };
        let ending = Ending::from(errno);
        if ending == Ending::Closed && !self.presence.leaves {
            self.presence.leaves = self.ends_with_goodbye();
        }
        if ending == Ending::Closed && self.presence.leaves { Ok(()) } else { Err(ending) }
    }

    /// Whether the last request of a client that has closed its end asked for a disconnect. Returns
    /// false if the socket still holds more bytes than the buffer of headers can take: such a
    /// client has not waited for its answers.
    fn ends_with_goodbye(&mut self) -> bool {
        // Use the buffer of headers for a look at the socket's bytes: it is free while a send
        // waits, and between two sends.
        let waiting = &mut self.desk.heads[..];
        let Ok((count, _)) =
            rustix::net::recv(self.socket, &mut *waiting, RecvFlags::PEEK | RecvFlags::DONTWAIT)
        else {
            return false;
        };
        if count == waiting.len() {
            return false;
        }
        self.presence.received(&self.desk.heads[..count]);
        let last = Parser::new().next(&mut &self.presence.tail[..]);
        matches!(last, Ok(Some(Event::Request(request))) if request.command == command::DISC)
    }
}

/// Whether the other side sends no more. Bytes that it sent may still wait to be received.
fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // If the poll fails, the client counts as there. If the client has gone, the next send will
    // fail.
    rustix::event::poll(&mut fds, Some(&now)).is_ok()
        && fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}

#[cfg(test)]
mod tests {
    use super::super::super::handshake::Negotiated;
    use super::super::super::stats::Counters;
    use super::super::super::transmission::Request;
    use super::super::{Shared, Worker};
    use super::*;
    use crate::spin::{Spin, SpinGate};
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use weir_core::{PAGE_SIZE, PageNo};
    use weir_store::{Host, Progress};
    use weir_volume::{Config, Volume};

    fn request(command: u16, page: u64) -> Vec<u8> {
        let length = if command == command::DISC { 0 } else { PAGE_SIZE as u32 };
        Request { flags: 0, command, cookie: page, offset: page * PAGE_SIZE as u64, length }.encode().to_vec()
    }

    fn write(page: u64, fill: u8) -> Vec<u8> {
        // The test's page must not repeat one value, since such a page would take no slot.
        let mut payload = [fill; PAGE_SIZE];
        payload[0] = !fill;
        [&request(command::WRITE, page)[..], &payload].concat()
    }

    /// Serves a client that sent `bytes` and closed its end before the server looked. Each page
    /// holds 1 at first. Returns how the connection ended, and the pages' content afterwards.
    fn serve_late(bytes: &[u8], closing: bool) -> (Ending, Vec<u8>) {
        let config = Config { pages: 64, lanes: 2, depth: 16 };
        let volume = Volume::create(config, vec![Arc::new(Host::new(config.slots()).unwrap())]).unwrap();
        let mut lane = volume.lane().unwrap();
        for page in 0..64 {
            let written = lane.write(0, PageNo(page), write(0, 1)[REQUEST_BYTES..].try_into().unwrap());
            assert_eq!(written, Progress::Done(Ok(())));
        }
        lane.submit();
        let mut worker = Worker::new(volume.lane().unwrap(), &Shared::new(1).unwrap()).unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(bytes).unwrap();
        drop(theirs);
        let negotiated = Negotiated {
            structured: false,
            allocation: false,
            bytes: volume.bytes(),
            read_only: false,
            clears: true,
        };
        let (closing, gate, counters) = (AtomicBool::new(closing), SpinGate::new(1), Counters::default());
        let mut spin = Spin::new(&gate, Duration::ZERO);
        let ending = worker.serve(ours.as_fd(), negotiated, &closing, &[], &mut spin, &counters);
        let pages = (0..64).map(|page| {
            let mut bytes = [0; PAGE_SIZE];
            assert_eq!(lane.read(0, PageNo(page), &mut bytes), Progress::Done(Ok(())));
            bytes[1]
        });
        (ending, pages.collect())
    }

    #[test]
    fn what_waited_in_the_socket_of_a_client_that_has_gone_is_not_done() {
        let (ending, pages) = serve_late(&[write(3, 2), write(4, 2)].concat(), false);
        assert_eq!((ending, pages), (Ending::Closed, vec![1; 64]));
        for command in [command::TRIM, command::WRITE_ZEROES] {
            assert_eq!(serve_late(&request(command, 5), false), (Ending::Closed, vec![1; 64]));
        }
    }

    #[test]
    fn a_client_that_leaves_by_the_request_for_it_is_served_whole() {
        for writes in [1, 40] {
            let mut sent: Vec<u8> = (0..writes).flat_map(|page| write(page, 2)).collect();
            sent.extend(request(command::DISC, 0));
            let (ending, pages) = serve_late(&sent, false);
            let expected: Vec<u8> = (0..64).map(|page| if page < writes { 2 } else { 1 }).collect();
            assert_eq!((ending, pages), (Ending::Disconnect, expected));
        }
    }

    #[test]
    fn what_has_been_received_when_the_server_shuts_down_is_done() {
        let (_, pages) = serve_late(&write(3, 2), true);
        assert_eq!((pages[2], pages[3]), (1, 2));
    }
}
