//! The FUSE handshake: kernel and server agree on the protocol before anything else.

use super::super::device::{Device, Incoming};
use super::super::reply::Reply as _;
use super::super::request::{self, Request};
use super::super::wire::{InitIn, InitOut, MAJOR, MINOR, MINOR_LEAST, init};
use super::ServeError;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::io;
use std::os::fd::AsFd as _;
use weir_core::PAGE_SIZE;

/// Longest time that the kernel may take to send its first request.
const HELLO_WITHIN: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// The buffer that the kernel requires before its first request (`FUSE_MIN_READ_BUFFER`), and more.
const HELLO_BYTES: usize = 64 << 10;
/// Largest number of background requests in flight: those for which no program waits. All requests
/// of a loop device are background requests.
const BACKGROUND_MAX: u16 = 512;

/// The options of the handshake, beside those that the server always asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Wish {
    /// Bytes of the largest read or write.
    pub io_max: u32,
    /// Whether requests are to come by io_uring.
    pub ring: bool,
}

/// Answers the kernel's first request. Returns the flags that the kernel offered.
pub(super) fn greet(connection: &Device, wish: Wish) -> Result<u64, ServeError> {
    let failed =
        |error: io::Error| ServeError::Kernel(format!("the kernel's FUSE does not say hello: {error}"));
    let mut input = vec![0; HELLO_BYTES];
    let mut fds = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)];
    loop {
        if rustix::event::poll(&mut fds, Some(&HELLO_WITHIN)).map_err(|errno| failed(errno.into()))? == 0 {
            return Err(failed(io::ErrorKind::TimedOut.into()));
        }
        let Incoming::Request(length) = connection.read(&mut input).map_err(|errno| failed(errno.into()))?
        else {
            continue;
        };
        let message = request::parse(&input[..length]).map_err(|error| failed(io::Error::other(error)))?;
        let (offer, flags) = offered(&message.request).map_err(failed)?;
        let (answer, more) = reply_to(&offer, flags, wish)?;
        connection.answer(message.header.unique, &answer.encode()).map_err(|errno| failed(errno.into()))?;
        if !more {
            return Ok(flags);
        }
    }
}

/// The kernel's offer, from its first request.
fn offered(first: &Request<'_>) -> io::Result<(InitIn, u64)> {
    match first {
        Request::Init { offer, flags } => Ok((*offer, *flags)),
        _ => Err(io::Error::other("it began with another request")),
    }
}

/// The answer to the kernel's offer, and whether the kernel will offer again.
fn reply_to(offer: &InitIn, flags: u64, wish: Wish) -> Result<(InitOut, bool), ServeError> {
    if offer.major > MAJOR {
        // The kernel will make another offer, with the server's version.
        return Ok((InitOut { major: MAJOR, minor: MINOR, ..InitOut::default() }, true));
    }
    if offer.major < MAJOR || offer.minor < MINOR_LEAST {
        return Err(ServeError::Kernel(format!(
            "this kernel speaks FUSE {}.{}; {MAJOR}.{MINOR_LEAST} is needed (Linux 5.4)",
            offer.major, offer.minor
        )));
    }
    let want = init::ASYNC_READ
        | init::BIG_WRITES
        | init::ASYNC_DIO
        | init::PARALLEL_DIROPS
        | init::MAX_PAGES
        | init::INIT_EXT
        | init::HAS_RESEND;
    let want = if wish.ring { want | init::OVER_IO_URING } else { want };
    let agreed = flags & want;
    let answer = InitOut {
        major: MAJOR,
        minor: MINOR.min(offer.minor),
        max_readahead: offer.max_readahead,
        flags: agreed as u32,
        flags2: (agreed >> 32) as u32,
        max_background: BACKGROUND_MAX,
        congestion_threshold: BACKGROUND_MAX,
        max_write: wish.io_max,
        time_gran: 1,
        max_pages: (wish.io_max as usize / PAGE_SIZE) as u16,
        ..InitOut::default()
    };
    Ok((answer, false))
}

#[cfg(test)]
mod tests {
    use super::super::super::range::IO_MAX;
    use super::*;

    const WISH: Wish = Wish { io_max: IO_MAX, ring: false };

    #[test]
    fn the_kernels_offer_is_answered_by_what_both_know() {
        let offer = |major, minor| InitIn { major, minor, max_readahead: 131_072, flags: 0 };
        let (answer, more) =
            reply_to(&offer(7, 45), init::HAS_RESEND | init::ASYNC_DIO | 1 << 60, WISH).unwrap();
        assert!(!more);
        assert_eq!((answer.minor, answer.max_pages, answer.max_write), (MINOR, 256, 1 << 20));
        assert_eq!((answer.flags, answer.flags2), (1 << 15, 1 << 7));
        let (answer, more) = reply_to(&offer(8, 0), 0, WISH).unwrap();
        assert!(more && answer.major == 7);
        for (major, minor) in [(7, 30), (6, 40)] {
            let error = reply_to(&offer(major, minor), 0, WISH).unwrap_err().to_string();
            let words = format!("this kernel speaks FUSE {major}.{minor}; 7.31 is needed (Linux 5.4)");
            assert_eq!(error, words);
        }
    }

    #[test]
    fn a_kernel_that_begins_with_another_request_is_refused() {
        let error = offered(&Request::Destroy).unwrap_err().to_string();
        assert_eq!(error, "it began with another request");
    }

    #[test]
    fn rings_are_agreed_on_where_both_want_them() {
        let offer = InitIn { major: 7, minor: 45, max_readahead: 0, flags: 0 };
        let wish = Wish { io_max: 128 << 10, ring: true };
        let agreed = |offered, wish| reply_to(&offer, offered, wish).unwrap().0;
        let answer = agreed(init::OVER_IO_URING, wish);
        assert_eq!((answer.flags2, answer.max_write, answer.max_pages), (1 << 9, 128 << 10, 32));
        assert_eq!((agreed(0, wish).flags2, agreed(init::OVER_IO_URING, WISH).flags2), (0, 0));
    }
}
