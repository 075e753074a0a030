//! Greetings and descriptors over the socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recv, recvmsg, sendmsg,
};

/// Descriptors that a message may carry.
const FDS: usize = 2 + crate::wire::WINDOWS_MAX as usize;

/// Sends one message with the descriptors that a welcome has, at most.
///
/// # Errors
/// What `sendmsg` says; `EPIPE` instead of a signal when the other side is gone.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let sent = rustix::io::retry_on_intr(|| {
        sendmsg(&socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)
    })?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Sends the byte that wakes a client. Never waits: the socket's own flags do not matter, and where
/// nothing more fits the client has enough to wake up for.
pub fn ring(socket: impl AsFd) {
    // A client that has gone is noticed by its socket's end.
    let _ = rustix::net::send(socket, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Takes the bytes that [`ring`] sent. `false`: the other side is gone.
///
/// # Errors
/// Those of `recv`.
pub fn take_rings(socket: impl AsFd) -> io::Result<bool> {
    use rustix::io::Errno;
    loop {
        match recv(&socket, &mut [0; 1], RecvFlags::DONTWAIT) {
            // It closed with our greeting in its queue, which it never takes out.
            Ok((0, _)) | Err(Errno::CONNRESET) => return Ok(false),
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(true),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Looks at the first message and leaves it where it is. So descriptors in it are not closed here,
/// for the last close of a descriptor takes as long as its owner likes (TCP with `SO_LINGER`). Says
/// how long the message is, 0 when the other side is gone.
///
/// # Errors
/// Those of `recv`; `WouldBlock` when there is none.
pub fn peek(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<usize> {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    Ok(rustix::io::retry_on_intr(|| recv(&socket, &mut *bytes, flags))?.0)
}

/// Receives one message: its length, 0 when the other side is gone, and the descriptors that came
/// along.
///
/// # Errors
/// What `recvmsg` says.
pub fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut attempt = || {
        rustix::io::retry_on_intr(|| {
            recvmsg(&socket, &mut [IoSliceMut::new(bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)
        })
    };
    let message = match attempt() {
        // The other side closed before it had read what we sent. The kernel says so once, before
        // what it still holds for us: a server's refusal.
        Err(rustix::io::Errno::CONNRESET) => attempt()?,
        received => received?,
    };
    let mut fds = Vec::new();
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            fds.extend(received);
        }
    }
    Ok((message.bytes, fds))
}
