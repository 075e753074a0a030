//! Pages of a Weir volume, which local programs use in place.
//!
//! A client connects to the server's unix socket and gets an *area*: memory that only the two
//! share, sealed against shrinking. The client asks for pages by writing into a ring in the area.
//! Each page arrives in a *frame* of the area, with a [`Token`](weir_lease::Token), which names the
//! page while the client holds it. The client uses the page in place, and returns tokens in ranges.
//! While both sides are busy, neither makes a system call.
//!
//! If the server allows it, a client with [`Options::in_place`] also gets the stores' own memory,
//! for reading. Then its tokens stand for the slots of the pages, and nothing is copied at all.
//! docs/share.md describes what that costs.
//!
//! A client may hold as many frames as its area has and no more. When its socket closes, even by
//! SIGKILL, everything that it held is free again. Its area belongs to it alone, so nothing that it
//! writes there harms another client.
//!
//! [`wire`] is the format, which docs/share.md describes for other languages;
//! `include/weir_share.h` is a client in C.
//!
//! ```no_run
//! use weir_share::{Client, Options};
//!
//! let mut client = Client::connect("/run/weir/share.sock".as_ref(), Options::default())?;
//! let lease = client.read(42)?;
//! println!("the first byte of page 42 is {}", client.page(&lease)[0]);
//! client.give(lease)?;
//! # Ok::<(), weir_share::Error>(())
//! ```

mod area;
mod client;
mod socket;
mod turn;
pub mod wire;

pub use area::{Area, Layout, Ring, Window};
pub use client::{Client, Completion, Error, Frames, Lease, Options};
pub use socket::{peek, receive, ring, send};

pub use turn::{Offers, Turns, first_turns, short_turns};

use std::path::{Path, PathBuf};

/// Largest number of threads of a daemon's share server, and of threads of a pager that use them.
pub const THREADS_MOST: u16 = 8;

/// The path of a daemon's share socket with this number. A daemon whose share server has several
/// threads has a socket for each: `path`, `path.1`, `path.2` and so on.
pub fn path_of(path: &Path, number: u16) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    if number > 0 {
        path.push(format!(".{number}"));
    }
    path.into()
}
