//! Pages of a Weir volume, used where they lie.
//!
//! A client connects to the server's unix socket and gets an *area*: memory that only it and the
//! server share, sealed against shrinking. It asks for pages by writing into a ring in the area;
//! each page arrives in a *frame* of the area, with a [`Token`](weir_lease::Token) that says who
//! holds it. The client uses the page in place, and returns tokens in ranges. While both are busy
//! no system call is made.
//!
//! Where the server allows it, a client with [`Options::in_place`] gets the stores' own memory too,
//! to read: then its tokens stand for the slots in which the pages lie, and nothing is copied at
//! all. docs/share.md says what that costs.
//!
//! A client may hold as many frames as its area has and no more; whatever it held when its socket
//! closes, be it by SIGKILL, is free again. Its area belongs to it alone, so what it scribbles
//! there harms nobody else.
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
pub mod wire;

pub use area::{Area, Layout, Ring, Window};
pub use client::{Client, Completion, Error, Lease, Options};
pub use socket::{peek, receive, ring, send};
