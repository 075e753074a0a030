//! Replaces a device's dead connections, but only once the kernel no longer reads from them.
//!
//! The kernel has a reader thread for each connection. When it has read the header of a reply, it
//! takes the lock of the request. The program that sent the request may hold this lock while it
//! waits for a processor. Then the reader reads the reply's data, from the socket that the
//! connection has by then (drivers/block/nbd.c, nbd_handle_reply). If the connection was replaced
//! meanwhile, that socket brings another reply. So the page is wrong, and so is every later reply.
//! A reader that wakes even later uses a socket that has been freed (docs/nbd.md).
//!
//! The kernel picks which dead connection it replaces. So Weir offers a new connection only while
//! the kernel has no more readers than the server has live connections. Then no reader belongs to a
//! dead connection.

use crate::error::Error;
use std::io;
use std::thread;
use std::time::{Duration, Instant};
use weir_core::chain;

/// The number of connections at the server's and at the kernel's end, at one moment. They may
/// belong to several devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Look {
    /// The number of connections that the server has.
    pub served: usize,
    /// The number of connections that the kernel reads from; the same as `served` where readers
    /// cannot be seen.
    pub read: usize,
    /// The number of readers of the device whose connections are replaced, if it is known.
    pub own: Option<usize>,
}

/// The connections of a device, from both ends.
pub trait Ends {
    /// Counts the connections as they are now.
    fn look(&self) -> Look;
    /// Closes all of the server's ends.
    fn hang_up(&self);
    /// Makes a connection and offers it to the kernel, which does not say whether one was dead.
    ///
    /// # Errors
    /// Fails when the server or the kernel refuses it.
    fn offer(&mut self) -> Result<(), NotReplaced>;
}

/// The reason why connections were not replaced.
#[derive(Debug, thiserror::Error)]
pub enum NotReplaced {
    /// The server gives no new connection.
    #[error("{}", chain(.0))]
    Server(Error),
    /// The kernel refuses the new connection.
    #[error("the kernel refuses a new connection")]
    Kernel(#[source] io::Error),
    /// The kernel took a new connection and does not read from it yet.
    #[error("the kernel does not read from a new connection yet")]
    Unread,
}

/// The waiting times of a replacement.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// For this long the server and the kernel must agree on the number of connections. One look is
    /// not enough, because a reader that has not begun yet is not seen.
    pub steady: Duration,
    /// A dead connection's reader and the server may need this long to notice its death. A new
    /// connection's reader may need this long to begin, because it needs memory for that.
    pub patience: Duration,
    /// The longest pause between two looks.
    pub nap: Duration,
}

impl Pace {
    /// The waiting times for a device whose requests fail once it has had no connection for
    /// `reconnect_timeout`.
    pub fn within(reconnect_timeout: Duration) -> Pace {
        Pace {
            steady: Duration::from_millis(100),
            patience: Duration::from_secs(10).min(reconnect_timeout / 3),
            nap: Duration::from_millis(20),
        }
    }
}

/// The outcome for a device's connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// No connection was dead.
    Whole,
    /// Dead connections were replaced.
    Replaced,
    /// Dead connections were replaced, though the kernel still had this many readers of connections
    /// that the server has lost. Such a reader may have a reply to a request that waits for a
    /// connection. The reader waits for that request, and later drops the reply as an old one. Or
    /// the reader got no processor for all of [`Pace::patience`].
    Forced(usize),
}

/// Replaces the dead ones among a device's `connections`.
///
/// # Errors
/// Fails with [`NotReplaced`]; some connections may have been replaced.
pub fn replace(ends: &mut impl Ends, connections: usize, pace: Pace) -> Result<Outcome, NotReplaced> {
    let (alive, left) = match agreed(ends, None, pace) {
        Ok(look) if look.own.is_some_and(|own| own >= connections) => return Ok(Outcome::Whole),
        // The number of dead connections is unknown, so offer as many as there can be. The kernel
        // drops those that it cannot use.
        Ok(look) => (look.own.unwrap_or(0), 0),
        Err(_) => {
            ends.hang_up();
            (0, agreed(ends, Some(0), pace).map_or_else(|look| look.read, |_| 0))
        }
    };
    for number in alive + 1..=connections {
        // Offer connections one at a time: if only one is dead, the server may have room for only
        // one.
        ends.offer()?;
        if left == 0 && !begun(ends, number, pace) {
            return Err(NotReplaced::Unread);
        }
    }
    Ok(if left == 0 { Outcome::Replaced } else { Outcome::Forced(left) })
}

/// Waits until the kernel and the server have agreed on the number of connections for a while. With
/// `wanted`, they must agree on that number. Returns the last look, as an error if they do not
/// agree.
fn agreed(ends: &impl Ends, wanted: Option<usize>, pace: Pace) -> Result<Look, Look> {
    let (mut last, mut since) = (ends.look(), Duration::ZERO);
    let mut agree = false;
    wait(pace, |passed| {
        let look = ends.look();
        if look != last {
            (last, since) = (look, passed);
        }
        agree = look.read == look.served && wanted.is_none_or(|wanted| wanted == look.served);
        agree && passed - since >= pace.steady
    });
    if agree { Ok(last) } else { Err(last) }
}

/// Waits until the kernel reads from `number` connections of the device.
fn begun(ends: &impl Ends, number: usize, pace: Pace) -> bool {
    let mut has = false;
    wait(pace, |_| {
        has = ends.look().own.is_none_or(|own| own >= number);
        has
    });
    has
}

/// Calls `enough` with the time that has passed, until it returns true or [`Pace::patience`] is
/// over.
fn wait(pace: Pace, mut enough: impl FnMut(Duration) -> bool) {
    let (begun, mut nap) = (Instant::now(), Duration::from_millis(1).min(pace.nap));
    while !enough(begun.elapsed()) && begun.elapsed() < pace.patience {
        thread::sleep(nap);
        nap = (2 * nap).min(pace.nap);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    const PACE: Pace = Pace {
        steady: Duration::from_millis(20),
        patience: Duration::from_secs(2),
        nap: Duration::from_millis(1),
    };

    /// A connection as the test's kernel sees it.
    #[derive(Clone, Copy)]
    struct Connection {
        is_dead: bool,
        /// Whether the server still holds its end of the connection.
        is_served: bool,
        /// Number of polls after which the thread that reads from a dead connection ends.
        reader: Option<u32>,
    }

    const ALIVE: Connection = Connection { is_dead: false, is_served: true, reader: Some(5) };
    const DEAD: Connection = Connection { is_dead: true, is_served: false, reader: None };

    struct Kernel {
        connections: RefCell<Vec<Connection>>,
        are_seen: bool,
        others: usize,
        offers: usize,
        /// The number of dead connections that were replaced although they still had a reader.
        damaged: usize,
    }

    fn kernel(connections: &[Connection]) -> Kernel {
        Kernel {
            connections: RefCell::new(connections.to_vec()),
            are_seen: true,
            others: 0,
            offers: 0,
            damaged: 0,
        }
    }

    impl Ends for Kernel {
        fn look(&self) -> Look {
            let mut connections = self.connections.borrow_mut();
            for connection in connections.iter_mut().filter(|connection| connection.is_dead) {
                connection.reader = connection.reader.and_then(|looks| looks.checked_sub(1));
            }
            let count = |what: fn(&Connection) -> bool| {
                connections.iter().filter(|connection| what(connection)).count()
            };
            let served = count(|connection| connection.is_served);
            let read = if self.are_seen { count(|connection| connection.reader.is_some()) } else { served };
            // The connections of other devices never change.
            Look { served: served + self.others, read: read + self.others, own: Some(read) }
        }

        fn hang_up(&self) {
            for connection in self.connections.borrow_mut().iter_mut() {
                (connection.is_dead, connection.is_served) = (true, false);
            }
        }

        fn offer(&mut self) -> Result<(), NotReplaced> {
            self.offers += 1;
            // Replaces the first dead connection, as the kernel does.
            if let Some(dead) = self.connections.borrow_mut().iter_mut().find(|connection| connection.is_dead)
            {
                self.damaged += usize::from(dead.reader.is_some());
                *dead = ALIVE;
            }
            Ok(())
        }
    }

    fn late(looks: u32) -> Connection {
        Connection { reader: Some(looks), ..DEAD }
    }

    /// Runs a replacement. Returns its outcome and the number of connections offered.
    fn outcome(kernel: &mut Kernel) -> (Outcome, usize) {
        let count = kernel.connections.borrow().len();
        let outcome = replace(kernel, count, PACE).expect("nobody refuses");
        assert!(kernel.connections.borrow().iter().all(|connection| !connection.is_dead));
        (outcome, kernel.offers)
    }

    #[test]
    fn nothing_is_offered_where_none_is_dead() {
        assert_eq!(outcome(&mut kernel(&[ALIVE; 4])), (Outcome::Whole, 0));
    }

    #[test]
    fn as_many_are_offered_as_are_dead() {
        assert_eq!(outcome(&mut kernel(&[DEAD; 2])), (Outcome::Replaced, 2));
        assert_eq!(outcome(&mut kernel(&[ALIVE, DEAD, ALIVE])), (Outcome::Replaced, 1));
    }

    #[test]
    fn other_devices_of_the_server_stay() {
        let mut kernel = Kernel { others: 3, ..kernel(&[DEAD, ALIVE]) };
        assert_eq!(outcome(&mut kernel), (Outcome::Replaced, 1));
    }

    #[test]
    fn a_late_reader_is_waited_for_whichever_connection_it_has() {
        for connections in [[late(30), DEAD], [DEAD, late(30)], [late(10), late(50)], [late(30), ALIVE]] {
            let mut kernel = kernel(&connections);
            let (outcome, _) = outcome(&mut kernel);
            assert_eq!((outcome, kernel.damaged), (Outcome::Replaced, 0));
        }
    }

    #[test]
    fn a_server_that_does_not_notice_is_hung_up() {
        let unnoticed = Connection { is_served: true, ..DEAD };
        let mut kernel = kernel(&[unnoticed, ALIVE]);
        assert_eq!(outcome(&mut kernel), (Outcome::Replaced, 2));
        assert_eq!(kernel.damaged, 0);
    }

    #[test]
    fn a_reader_that_stays_is_not_waited_for_without_end() {
        assert_eq!(outcome(&mut kernel(&[late(u32::MAX), DEAD])), (Outcome::Forced(1), 2));
    }

    #[test]
    fn where_readers_are_not_seen_the_server_s_end_decides() {
        let mut kernel = Kernel { are_seen: false, ..kernel(&[DEAD, ALIVE]) };
        assert_eq!(outcome(&mut kernel), (Outcome::Replaced, 1));
    }

    #[test]
    fn a_connection_that_nobody_reads_is_said() {
        struct Deaf(Option<rustix::io::Errno>);
        impl Ends for Deaf {
            fn look(&self) -> Look {
                Look { served: 0, read: 0, own: Some(0) }
            }
            fn hang_up(&self) {}
            fn offer(&mut self) -> Result<(), NotReplaced> {
                self.0.map_or(Ok(()), |errno| Err(NotReplaced::Kernel(errno.into())))
            }
        }
        assert!(matches!(replace(&mut Deaf(None), 2, PACE), Err(NotReplaced::Unread)));
        let refused = replace(&mut Deaf(Some(rustix::io::Errno::NOSPC)), 2, PACE).unwrap_err();
        assert_eq!(refused.to_string(), "the kernel refuses a new connection");
    }
}
