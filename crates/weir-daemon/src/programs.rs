//! The bounded programs of this daemon: `weir run` limits their RAM, and the volume holds the rest
//! of their memory. Each program has a pager, which connects to a socket of this module. The pager
//! sends reports, and the daemon sends orders. A pager that does not answer delays no other pager.

use crate::control::{Program, printable};
use crate::environment::Environment;
use crate::error::{Error, ErrorKind};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};
use weir_pager::link::{self, Order, Report};
use weir_system::local_socket::{self, SocketFile};

/// Largest number of processes in the list of bounded programs. Further processes are bounded too,
/// but they are not listed.
const PROGRAMS_MOST: usize = 256;
/// Time between two reports that no client has asked for, and shortest time over which a rate is
/// computed.
const EVERY: Duration = Duration::from_secs(1);
/// When a client asks for the list of programs, the daemon asks for a new report if the last one is
/// older than this.
const FRESH: Duration = Duration::from_millis(20);
/// Largest number of messages that are read from one pager at a time.
const MESSAGES: usize = 16;

/// The bounded programs of a daemon.
#[derive(Debug)]
pub struct Programs {
    all: Arc<Mutex<Vec<Bound>>>,
    environment: Environment,
    _file: SocketFile,
}

/// A pager, and what it has reported.
#[derive(Debug)]
struct Bound {
    pid: u32,
    name: String,
    socket: Arc<OwnedFd>,
    since: Instant,
    /// The time of the latest request for a report, until the report comes.
    asked: Option<Instant>,
    last: Option<Seen>,
    /// Two earlier reports. The rate of page faults counts from the report `then`. Later the report
    /// `next` replaces `then`.
    then: Option<Seen>,
    next: Option<Seen>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    at: Instant,
    report: Report,
}

impl Programs {
    /// Listens at `path`, on a thread of its own.
    ///
    /// # Errors
    /// Fails when the socket cannot be made.
    pub fn start(path: &Path, environment: &Environment) -> Result<Self, Error> {
        let failed = |error: &dyn std::fmt::Display| {
            let what = format!("--programs: cannot listen at {}: {error}; name another path", path.display());
            Error::new(ErrorKind::Control, what)
        };
        let (socket, file) =
            local_socket::listen(path, SocketType::SEQPACKET).map_err(|error| failed(&error))?;
        let all = Arc::new(Mutex::new(Vec::new()));
        let (programs, around) = (Arc::clone(&all), environment.clone());
        thread::Builder::new()
            .name("weir-programs".into())
            .spawn(move || run(&socket, &programs, &around))
            .map_err(|error| failed(&error))?;
        Ok(Programs { all, environment: environment.clone(), _file: file })
    }

    /// The bounded programs, as their last reports describe them.
    pub fn list(&self) -> Vec<Program> {
        let now = self.environment.clock.now();
        let mut all = lock(&self.all);
        for bound in &mut *all {
            if bound.last.is_none_or(|last| now.saturating_duration_since(last.at) > FRESH) {
                bound.ask(now);
            }
        }
        all.iter().map(|bound| bound.program(now)).collect()
    }

    /// Sends an order to a pager. The pager reads it at its next look, which may be late.
    ///
    /// # Errors
    /// Fails when no pager of the process is connected, or the pager has not read earlier orders.
    pub fn order(&self, pid: u32, order: Order) -> Result<(), Error> {
        let mut all = lock(&self.all);
        // A process may have a new connection after an exec, before the end of the old one is
        // noticed. So search from the newest.
        let Some(bound) = all.iter_mut().rev().find(|bound| bound.pid == pid) else {
            return Err(unbound(pid));
        };
        link::send(&*bound.socket, order).map_err(|error| {
            let what = match error.kind() {
                std::io::ErrorKind::WouldBlock => format!(
                    "process {pid} has not read the orders before; it is stopped or waits for its store: look at its state in /proc/{pid}/status"
                ),
                _ => format!("process {pid} takes no orders: {error}; weir status lists those that do"),
            };
            Error::new(ErrorKind::Refused, what)
        })
    }

    /// Kills the programs that are there when their run is over. A run that ends by itself waits
    /// for all of its programs, so this one was killed. The pages that its programs had moved out
    /// are gone, and nobody bounds their memory any more.
    pub fn end(&self) {
        for bound in &*lock(&self.all) {
            let process = Pid::from_raw(bound.pid.cast_signed());
            let Some(Ok(process)) = process.map(|pid| pidfd_open(pid, PidfdFlags::empty())) else { continue };
            // A pager that is connected belongs to a process that lives. So the descriptor above is
            // that process, and no later one of the same number.
            if bound.is_connected() {
                let _ = pidfd_send_signal(&process, Signal::KILL);
            }
        }
    }
}

/// The error for a process that has no pager at this daemon.
pub(crate) fn unbound(pid: u32) -> Error {
    let what = format!("process {pid} is not bounded by this daemon; weir status lists those that are");
    Error::new(ErrorKind::Refused, what)
}

fn lock(all: &Mutex<Vec<Bound>>) -> MutexGuard<'_, Vec<Bound>> {
    all.lock().expect("nobody panics while holding it")
}

/// Accepts pagers and reads their reports, for as long as the process lives.
fn run(listener: &OwnedFd, all: &Mutex<Vec<Bound>>, environment: &Environment) {
    let clock = &environment.clock;
    let mut looked = clock.now();
    loop {
        let sockets: Vec<Arc<OwnedFd>> = lock(all).iter().map(|bound| Arc::clone(&bound.socket)).collect();
        let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
        fds.extend(sockets.iter().map(|socket| PollFd::new(&**socket, PollFlags::IN)));
        clock.wait(&mut fds, EVERY.saturating_sub(clock.now().saturating_duration_since(looked)));
        let now = clock.now();
        lock(all).retain_mut(|bound| bound.hear(now));
        for _ in 0..MESSAGES {
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => {
                    let mut all = lock(all);
                    // If the list is full, disconnect the pager. Its process stays bounded all the
                    // same.
                    let has_room = all.len() < PROGRAMS_MOST;
                    all.extend(Bound::new(socket, now).filter(|_| has_room));
                }
                Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => break,
                Err(_) => {
                    // No descriptor is free. The listener stays ready, so wait before the next
                    // attempt.
                    clock.sleep(EVERY);
                    break;
                }
            }
        }
        if now.saturating_duration_since(looked) >= EVERY {
            looked = now;
            lock(all).iter_mut().for_each(|bound| bound.ask(now));
        }
    }
}

impl Bound {
    /// A pager that has connected; `None`: it has gone already.
    fn new(socket: OwnedFd, now: Instant) -> Option<Self> {
        let peer = rustix::net::sockopt::socket_peercred(&socket).ok()?;
        let pid = peer.pid.as_raw_nonzero().get().cast_unsigned();
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let name = printable(name.trim_end());
        let socket = Arc::new(socket);
        let mut bound =
            Bound { pid, name, socket, since: now, asked: None, last: None, then: None, next: None };
        bound.ask(now);
        Some(bound)
    }

    /// Asks for a report, unless an earlier request has no answer yet. So a stopped pager is asked
    /// once.
    fn ask(&mut self, now: Instant) {
        if self.asked.is_none() && link::send(&*self.socket, Order::Report).is_ok() {
            self.asked = Some(now);
        }
    }

    fn is_connected(&self) -> bool {
        let mut socket = [PollFd::new(&*self.socket, PollFlags::RDHUP)];
        matches!(rustix::event::poll(&mut socket, Some(&Timespec::default())), Ok(0))
    }

    /// Reads the reports that have come. Returns false if the pager has gone.
    fn hear(&mut self, now: Instant) -> bool {
        for _ in 0..MESSAGES {
            match link::receive(&*self.socket) {
                Ok(Some(report)) => self.take(Seen { at: now, report }),
                Ok(None) => break,
                Err(_) => return false,
            }
        }
        true
    }

    fn take(&mut self, seen: Seen) {
        self.asked = None;
        self.last = Some(seen);
        let next = *self.next.get_or_insert(seen);
        if seen.at.saturating_duration_since(next.at) >= EVERY {
            self.then = self.next.replace(seen);
        }
    }

    fn program(&self, now: Instant) -> Program {
        let Seen { at, report } = self.last.unwrap_or(Seen { at: self.since, report: Report::default() });
        let then = self.then.or(self.next).unwrap_or(Seen { at, report });
        let between = at.saturating_duration_since(then.at).as_secs_f64();
        let faults = report.faults.saturating_sub(then.report.faults);
        Program {
            pid: self.pid,
            name: self.name.clone(),
            limit_bytes: report.limit,
            resident_bytes: report.resident,
            blocks: report.blocks,
            single_pages: report.singles,
            stored_bytes: report.stored,
            faults: report.faults,
            faults_per_s: if between > 0.0 { faults as f64 / between } else { 0.0 },
            fault_s: report.waited_ns as f64 / 1e9,
            prefetched: report.ahead,
            prefetched_used: report.ahead_used,
            prefetch_hit_rate: (report.ahead > 0)
                .then(|| (report.ahead_used as f64 / report.ahead as f64).min(1.0)),
            lost_blocks: report.lost,
            evictions: report.evictions,
            store: match report.store {
                0 => "online",
                Report::FULL => "full",
                _ => "failed",
            }
            .to_owned(),
            troubled: Vec::new(),
            silent_s: self.asked.map_or(0.0, |asked| now.saturating_duration_since(asked).as_secs_f64()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::AddressFamily;

    /// Reads the orders at a pager's end of the socket. Returns their number.
    fn asked(pager: &OwnedFd) -> usize {
        let mut bytes = [0; 64];
        let mut count = 0;
        while rustix::net::recv(pager, &mut bytes, rustix::net::RecvFlags::DONTWAIT).is_ok() {
            count += 1;
        }
        count
    }

    #[test]
    fn an_order_reaches_the_pager_of_its_process_and_no_other() {
        let path = std::env::temp_dir().join(format!("weir-programs-{}", std::process::id()));
        let log: weir_core::log::Log = Arc::new(|_: weir_core::log::Level, _: std::fmt::Arguments<'_>| {});
        let programs = Programs::start(&path, &Environment::of_machine(&log)).unwrap();
        let mut pager = link::Link::to(&path);
        while programs.list().is_empty() {
            let _ = pager.order();
            thread::yield_now();
        }
        let own = std::process::id();
        programs.order(own, Order::Limit(7)).unwrap();
        let orders: Vec<_> = std::iter::from_fn(|| pager.order()).collect();
        assert!(orders.contains(&Order::Limit(7)), "{orders:?}");
        pager.report(&Report { limit: 7, ..Report::default() });
        while programs.list()[0].limit_bytes != 7 {
            thread::yield_now();
        }
        let refused = programs.order(own + 1, Order::Evict).expect_err("nobody").to_string();
        assert!(refused.contains("is not bounded by this daemon"), "{refused}");
        drop(pager);
        while !programs.list().is_empty() {
            thread::yield_now();
        }
    }

    #[test]
    fn a_pager_that_reads_no_orders_and_one_that_has_gone_are_told_apart() {
        let path = std::env::temp_dir().join(format!("weir-programs-deaf-{}", std::process::id()));
        let (_socket, file) = local_socket::listen(&path, SocketType::SEQPACKET).unwrap();
        let (ours, pager) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let log: weir_core::log::Log = Arc::new(|_: weir_core::log::Level, _: std::fmt::Arguments<'_>| {});
        let bound = Bound::new(ours, Instant::now()).expect("a peer");
        let all = Arc::new(Mutex::new(vec![bound]));
        let programs = Programs { all, environment: Environment::of_machine(&log), _file: file };
        let own = std::process::id();
        let refused = (0..).find_map(|_| programs.order(own, Order::Evict).err()).expect("it is full");
        let words = format!("process {own} has not read the orders before; it is stopped or waits");
        assert!(refused.to_string().starts_with(&words), "{refused}");
        drop(pager);
        let refused = programs.order(own, Order::Evict).expect_err("it has gone").to_string();
        assert!(refused.starts_with(&format!("process {own} takes no orders: ")), "{refused}");
    }

    #[test]
    fn rates_are_over_a_second_or_more_and_a_silent_pager_is_asked_once() {
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let begun = Instant::now();
        let at = |ms: u64| begun + Duration::from_millis(ms);
        let mut bound = Bound::new(ours, begun).expect("a peer");
        bound.asked = None;
        assert_eq!((bound.pid, asked(&theirs)), (std::process::id(), 1));
        let seen = |ms: u64, faults: u64| Seen { at: at(ms), report: Report { faults, ..Report::default() } };
        for (ms, faults, rate) in
            [(0, 100, 0.0), (500, 200, 200.0), (1000, 300, 200.0), (1500, 800, 466.0), (3000, 800, 250.0)]
        {
            bound.take(seen(ms, faults));
            let told = bound.program(at(ms)).faults_per_s;
            assert!((told - rate).abs() < 1.0, "{told} at {ms}");
        }
        (0..1000).for_each(|ms| bound.ask(at(4000 + ms)));
        let silent = bound.program(at(9000)).silent_s;
        assert!((4.9..5.1).contains(&silent), "{silent}");
        assert_eq!(asked(&theirs), 1, "it was asked again");
        assert!(bound.hear(at(9000)));
        drop(theirs);
        assert!(!bound.hear(at(9001)), "it has gone");
    }
}
