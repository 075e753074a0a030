//! Messages on a connection's socket: the greetings with their descriptors, and the bytes that wake
//! a client.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, sendmsg,
};

/// Largest number of descriptors of a message.
const FDS: usize = 2 + crate::wire::WINDOWS_MAX as usize;

/// Sends one message, with at most as many descriptors as the server's welcome can have.
///
/// # Errors
/// Fails with the error of `sendmsg`; with `EPIPE` instead of a signal when the other side is gone.
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

/// Sends the byte that wakes a client. The call never blocks, even if the socket is in blocking
/// mode. If the socket has no room for the byte, earlier bytes in the socket wake the client.
pub fn ring(socket: impl AsFd) {
    // An error is ignored: if the client has gone, the server notices the end of the socket
    // elsewhere.
    let _ = rustix::net::send(socket, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Takes the bytes that [`ring`] sent. `false`: the other side is gone.
///
/// # Errors
/// Fails with the errors of `recv`.
pub fn take_rings(socket: impl AsFd) -> io::Result<bool> {
    use rustix::io::Errno;
    loop {
        match recv(&socket, &mut [0; 1], RecvFlags::DONTWAIT) {
            // A reset: the server closed the socket before it had read this client's greeting.
            Ok((0, _)) | Err(Errno::CONNRESET) => return Ok(false),
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(true),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Reads the first message and leaves the message in the queue. So this call does not close the
/// message's descriptors: the last close of a descriptor can take as long as its owner likes (TCP
/// with `SO_LINGER`). Returns the message's length, or 0 when the other side is gone.
///
/// # Errors
/// Fails with the errors of `recv`; with `WouldBlock` when there is no message.
pub fn peek(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<usize> {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    Ok(rustix::io::retry_on_intr(|| recv(&socket, &mut *bytes, flags))?.0)
}

/// Receives one message. Returns its length, 0 when the other side is gone, and its descriptors.
///
/// # Errors
/// Fails with the error of `recvmsg`; with `EMFILE` when this process has no room for the
/// descriptors.
pub fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut attempt = || {
        rustix::io::retry_on_intr(|| {
            recvmsg(&socket, &mut [IoSliceMut::new(bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)
        })
    };
    let message = match attempt() {
        // The other side closed its socket before it had read this side's message. The kernel
        // reports this error once. Then the kernel still delivers the other side's message: a
        // server's refusal.
        Err(rustix::io::Errno::CONNRESET) => attempt()?,
        received => received?,
    };
    let mut fds = Vec::new();
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            fds.extend(received);
        }
    }
    // The kernel drops the descriptors that do not fit, and delivers the rest of the message.
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(rustix::io::Errno::MFILE.into());
    }
    Ok((message.bytes, fds))
}
