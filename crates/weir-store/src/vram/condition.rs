//! The condition of a card, for people: its last event, when it happened, and why.

use super::engine::CallError;
use std::fmt;
use std::time::{Duration, SystemTime};

/// Greatest age of a line in the kernel's log that can belong to an event now.
const RECENT: Duration = Duration::from_secs(30);

/// The reason why CUDA's context is dead.
#[derive(Clone, Copy, Debug)]
pub enum Death {
    /// A call returned an error after which every later call fails.
    Answered(CallError),
    /// The driver or the card did not answer in time.
    NoAnswer(&'static str),
}

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Death::Answered(error) => error.fmt(f),
            Death::NoAnswer(what) => write!(f, "{what} had no answer in {:?}", super::answer_limit()),
        }
    }
}

/// The last thing that happened to a card.
#[derive(Clone, Debug)]
pub struct Turn {
    pub since: SystemTime,
    pub why: Option<String>,
}

impl Turn {
    pub fn now(why: Option<String>) -> Self {
        Turn { since: SystemTime::now(), why }
    }
}

/// The driver's last message in the kernel's log (`Xid ...`), if it is recent and this process may
/// read it.
pub fn xid() -> Option<String> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let log = rustix::fs::open("/dev/kmsg", flags, Mode::empty()).ok()?;
    let now = weir_core::clock::monotonic();
    let mut last = None;
    let mut record = [0; 8192];
    loop {
        match rustix::io::read(&log, &mut record) {
            // The kernel overwrote records before they were read. The next read gets newer ones.
            Err(rustix::io::Errno::PIPE) => {}
            Err(_) | Ok(0) => return last,
            Ok(length) => last = recent(&String::from_utf8_lossy(&record[..length]), now).or(last),
        }
    }
}

/// Returns the driver's message about a card from a record of the kernel's log
/// (`6,339,5140900,-;NVRM: Xid ...`). `None` if the record is old, or has no such message.
fn recent(record: &str, now: Duration) -> Option<String> {
    let (head, text) = record.split_once(';')?;
    let at = Duration::from_micros(head.split(',').nth(2)?.parse().ok()?);
    let text = text.lines().next()?.strip_prefix("NVRM: ")?;
    (text.starts_with("Xid ") && now.saturating_sub(at) < RECENT).then(|| text.chars().take(200).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recent_message_of_the_driver_is_told_and_no_other() {
        let at = |seconds| Duration::from_secs(seconds);
        let record = "4,812,204705619,-;NVRM: Xid (PCI:0000:00:06): 32, pid=785, name=weir, channel 0x0000000a\n SUBSYSTEM=x\n";
        let told = "Xid (PCI:0000:00:06): 32, pid=785, name=weir, channel 0x0000000a";
        assert_eq!(recent(record, at(205)).as_deref(), Some(told));
        assert_eq!(recent(record, at(300)), None, "too long ago");
        assert_eq!(recent("4,812,204705619,-;NVRM: GPU at PCI:0000:00:06\n", at(205)), None);
        assert_eq!(recent("4,812,204705619,-;usb 1-1: new device\n", at(205)), None);
        assert_eq!(recent("no record", at(205)), None);
    }
}
