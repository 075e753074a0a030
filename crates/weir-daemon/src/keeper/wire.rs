//! The messages between keeper and daemon: datagrams on a socket pair. Each has a word and a name,
//! and some also carry a descriptor.
//!
//! | from | datagram | meaning |
//! |---|---|---|
//! | keeper | `have KIND NAME` + fd | an earlier daemon gave this to the keeper |
//! | keeper | `begin FORMAT` | the new daemon has got everything; it is of this [`FORMAT`] |
//! | daemon | `hold KIND NAME` + fd | hold this; answered by `held` or `refused REASON` |
//! | daemon | `took NAME OFFSET BYTES` | the memory under that name has new pages in this range: lock them too |
//! | daemon | `drop NAME` | close the descriptor under that name; answered by `dropped` |
//! | daemon | `opening` | the daemon is about to listen: from here on clients may have pages in it |
//! | daemon | `ready` | the daemon serves; sent again after it has taken more memory |
//! | daemon | `ending` | the daemon was told to stop, and no client needs its pages: start no other |
//! | daemon | `staying` | the daemon was told to stop, and is in use: if it dies, start another |
//! | daemon | `replacing` | the daemon was told to make way for the program that is installed now |
//!
//! The word KIND is `memory` (a sealed memfd, to be mapped and locked) or `descriptor` (to be held
//! open).

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The version of the handoff from one daemon to the next: these datagrams, the names, and the
/// layout of the memory under them (page map, slot records, the stores' memory). A program of
/// another format takes nothing over. The keeper then goes back to its own program.
pub const FORMAT: u32 = 2;

/// Longest datagram in bytes; names are short.
const MESSAGE_MAX: usize = 256;

/// The kind of a descriptor that the keeper holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A sealed memfd, which the keeper maps and locks.
    Memory,
    /// A descriptor of a thing that lives as long as the descriptor is open.
    Descriptor,
}

impl Kind {
    pub fn word(self) -> &'static str {
        match self {
            Kind::Memory => "memory",
            Kind::Descriptor => "descriptor",
        }
    }

    pub fn parse(word: &str) -> Option<Self> {
        [Kind::Memory, Kind::Descriptor].into_iter().find(|kind| kind.word() == word)
    }
}

/// A received datagram.
#[derive(Debug)]
pub struct Message {
    pub text: String,
    pub fd: Option<OwnedFd>,
}

/// Splits a datagram into its first word and the rest.
pub fn split(text: &str) -> (&str, &str) {
    text.split_once(' ').unwrap_or((text, ""))
}

/// Sends one datagram.
pub fn send(socket: impl AsFd, text: &str, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(text.as_bytes())], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives one datagram; `None` when the other side is gone.
pub fn receive(socket: impl AsFd) -> io::Result<Option<Message>> {
    let mut bytes = [0; MESSAGE_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let buffers = &mut [IoSliceMut::new(&mut bytes)];
        match rustix::net::recvmsg(&socket, buffers, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(None),
            result => break result?,
        }
    };
    if received.bytes == 0 {
        return Ok(None);
    }
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let text = String::from_utf8_lossy(&bytes[..received.bytes]).into_owned();
    Ok(Some(Message { text, fd }))
}
