//! Dead connections of a device replaced, only when the kernel no longer reads from them.
//!
//! A reader that has the header of a reply may wait for whoever sent the request, a program that
//! waits for a processor with the request's lock held. Then it takes the reply's data from the
//! socket that the connection has by that time (drivers/block/nbd.c, nbd_handle_reply): from the
//! replacement, where another reply begins. The page is damaged, and so is every reply behind it.
//! One that is only late to wake finds its socket freed (docs/nbd.md).
//!
//! The kernel picks which dead connection it replaces. So none is offered before there are as many
//! readers as the server has connections with the kernel: then no reader is a dead one's.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

/// A look at a server's connections with the kernel, perhaps those of several devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Look {
    /// Those that the server has.
    pub served: usize,
    /// Those that the kernel reads from; as many where that is not seen.
    pub read: usize,
    /// Those of the device in question among them, where that is known.
    pub own: Option<usize>,
}

/// The connections of a device, from both ends.
pub trait Ends {
    /// How they are.
    fn look(&self) -> Look;
    /// Ends all of the server's.
    fn hang_up(&self);
    /// Makes a connection and offers it to the kernel, which does not say whether one was dead.
    ///
    /// # Errors
    /// When the server or the kernel refuses it.
    fn offer(&mut self) -> Result<(), NotReplaced>;
}

/// Why connections are not replaced.
#[derive(Debug, thiserror::Error)]
pub enum NotReplaced {
    /// No new one can be made.
    #[error("{0}")]
    Server(String),
    /// The kernel refuses it.
    #[error("the kernel refuses a new connection")]
    Kernel(#[source] io::Error),
    /// The kernel took a new one and does not read from it yet.
    #[error("the kernel does not read from a new connection yet")]
    Unread,
}

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Both ends agree when they have for so long: a reader that has not begun is not seen.
    pub steady: Duration,
    /// A dead connection's reader and the server may need so long to notice, and a new one's reader
    /// to begin, which takes memory.
    pub patience: Duration,
    /// Between two looks, at most.
    pub nap: Duration,
}

impl Pace {
    /// For a device whose requests fail after `reconnect_timeout` without a connection.
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
    /// None was dead.
    Whole,
    /// Dead connections were replaced.
    Replaced,
    /// The same, though the kernel still had so many readers that nobody serves. Each waits for a
    /// request that itself waits for a connection, and will find its reply to be an old one; or it
    /// has not run for all of that time.
    Forced(usize),
}

/// Replaces what is dead of a device's `connections`.
///
/// # Errors
/// See [`NotReplaced`]; some may have been replaced.
pub fn replace(ends: &mut impl Ends, connections: usize, pace: Pace) -> Result<Outcome, NotReplaced> {
    let (alive, left) = match agreed(ends, None, pace) {
        Ok(look) if look.own.is_some_and(|own| own >= connections) => return Ok(Outcome::Whole),
        // Where it is not known, more is offered than is dead: the kernel does not use that.
        Ok(look) => (look.own.unwrap_or(0), 0),
        Err(_) => {
            ends.hang_up();
            (0, agreed(ends, Some(0), pace).map_or_else(|look| look.read, |_| 0))
        }
    };
    for number in alive + 1..=connections {
        // One at a time: where only one is dead, the server may have a seat for one only.
        ends.offer()?;
        if left == 0 && !begun(ends, number, pace) {
            return Err(NotReplaced::Unread);
        }
    }
    Ok(if left == 0 { Outcome::Replaced } else { Outcome::Forced(left) })
}

/// Waits until both ends have seen the same number of connections, the `wanted` one if there is
/// one, for a while. Returns the last look, as an error where they do not agree.
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

/// Asks `enough`, of the time that has passed, until it is or patience ends.
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

    /// A connection as the kernel has it.
    #[derive(Clone, Copy)]
    struct Connection {
        is_dead: bool,
        /// The server still has its end.
        is_served: bool,
        /// Its reader leaves at the `n`th look from now on, once it is dead.
        reader: Option<u32>,
    }

    const ALIVE: Connection = Connection { is_dead: false, is_served: true, reader: Some(5) };
    const DEAD: Connection = Connection { is_dead: true, is_served: false, reader: None };

    struct Kernel {
        connections: RefCell<Vec<Connection>>,
        are_seen: bool,
        others: usize,
        offers: usize,
        /// Replaced with a reader of the dead one still there.
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
            // Another device's connections are there all the time.
            Look { served: served + self.others, read: read + self.others, own: Some(read) }
        }

        fn hang_up(&self) {
            for connection in self.connections.borrow_mut().iter_mut() {
                (connection.is_dead, connection.is_served) = (true, false);
            }
        }

        fn offer(&mut self) -> Result<(), NotReplaced> {
            self.offers += 1;
            // The first dead one, as the kernel does it.
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

    /// Replaces, and says what came of it with the offers made.
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
        struct Deaf;
        impl Ends for Deaf {
            fn look(&self) -> Look {
                Look { served: 0, read: 0, own: Some(0) }
            }
            fn hang_up(&self) {}
            fn offer(&mut self) -> Result<(), NotReplaced> {
                Ok(())
            }
        }
        assert!(matches!(replace(&mut Deaf, 2, PACE), Err(NotReplaced::Unread)));
    }
}
