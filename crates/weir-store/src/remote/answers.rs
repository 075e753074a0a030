//! The meaning of a node's answers. Every result here follows from the node's answer alone, and a
//! node may answer anything.

use super::operations::Kind;
use crate::Fault;
use redis::Value;

/// Longest text of a node that is told to people.
const TEXT_MAX: usize = 300;

/// The meaning of an answer for one job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Meaning {
    /// The node has kept the page of a write, or has answered a probe.
    Kept,
    /// A page with this stamp. The stamp is the one that the job asks for, or a later one.
    Page(u64),
    /// A page of zeros: the slot was never written.
    Zeros,
    /// The node has no page.
    Missing,
    /// A value that is not the page which the job asks for. `Some`: an older page of this slot,
    /// with its stamp. `None`: no page that the store sealed for this slot.
    Wrong(Option<u64>),
    /// Another node serves the page from now on (`MOVED`). The text is the rest of the node's
    /// message.
    Moved(String),
    /// Another node serves the page this time only (`ASK`). The text is the rest of the node's
    /// message.
    Ask(String),
    /// The node does not serve this page at present, but it serves its other pages.
    Later,
    /// The node serves no page at present. The text is the node's message.
    Away(String),
    /// The node refuses the command.
    Refused(Fault),
}

/// Returns the meaning of `value` as an answer to a job of this kind. `open` opens a sealed page of
/// the job's slot, and returns its stamp.
pub(super) fn meaning(kind: Kind, value: &Value, open: impl FnOnce(&[u8]) -> Option<u64>) -> Meaning {
    match (kind, value) {
        (_, Value::ServerError(error)) => {
            let details = error.details().unwrap_or_default();
            match error.code() {
                "MOVED" => Meaning::Moved(details.to_owned()),
                "ASK" => Meaning::Ask(details.to_owned()),
                "TRYAGAIN" => Meaning::Later,
                // The cluster as a whole is up, but no node serves this hash slot.
                "CLUSTERDOWN" if details.starts_with("Hash slot") => Meaning::Later,
                code if is_passing(code) => Meaning::Away(plain(&format!("{code}: {details}"))),
                "OOM" => Meaning::Refused(Fault::Io(libc::ENOSPC)),
                _ if kind == Kind::Probe => Meaning::Kept,
                _ => Meaning::Refused(Fault::Io(libc::EIO)),
            }
        }
        (Kind::Probe, _) | (Kind::Write(_) | Kind::Copy(_), Value::Okay) => Meaning::Kept,
        (Kind::Read(least), Value::BulkString(sealed)) => match open(sealed) {
            Some(stamp) if stamp >= least => Meaning::Page(stamp),
            opened => Meaning::Wrong(opened),
        },
        (Kind::Read(0), Value::Nil) => Meaning::Zeros,
        (Kind::Read(_), Value::Nil) => Meaning::Missing,
        _ => Meaning::Refused(Fault::Io(libc::EIO)),
    }
}

/// Whether a node's error says that the node cannot serve pages at present, and may later.
pub(super) fn is_passing(code: &str) -> bool {
    ["LOADING", "BUSY", "MASTERDOWN", "READONLY", "CLUSTERDOWN", "MISCONF", "NOREPLICAS"].contains(&code)
}

/// Finds the run ID in a node's answer to `INFO server`. Each process of a node has another run ID.
pub(super) fn run_id(about: &str) -> Option<&str> {
    about.lines().find_map(|line| line.strip_prefix("run_id:")).filter(|run| !run.is_empty())
}

/// Makes a text of a node fit to be shown: on one line, not too long, and without anything that
/// changes a terminal.
pub(super) fn plain(text: &str) -> String {
    text.chars().take(TEXT_MAX).map(|char| if char.is_control() { ' ' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(kind: Kind, answer: &str) -> Meaning {
        let value = redis::parse_redis_value(answer.as_bytes()).unwrap();
        meaning(kind, &value, |sealed| std::str::from_utf8(sealed).unwrap().parse().ok())
    }

    #[test]
    fn a_read_believes_only_a_page_that_is_as_new_as_the_acknowledged_one() {
        assert_eq!(of(Kind::Read(7), "$1\r\n7\r\n"), Meaning::Page(7));
        assert_eq!(of(Kind::Read(7), "$1\r\n8\r\n"), Meaning::Page(8));
        assert_eq!(of(Kind::Read(7), "$1\r\n6\r\n"), Meaning::Wrong(Some(6)));
        assert_eq!(of(Kind::Read(7), "$1\r\nx\r\n"), Meaning::Wrong(None));
        assert_eq!(of(Kind::Read(7), "$-1\r\n"), Meaning::Missing);
        assert_eq!(of(Kind::Read(0), "$-1\r\n"), Meaning::Zeros);
        for other in ["+OK\r\n", ":7\r\n", "*0\r\n", "-WRONGTYPE x\r\n", "+7\r\n"] {
            assert_eq!(of(Kind::Read(7), other), Meaning::Refused(Fault::Io(libc::EIO)), "{other}");
        }
    }

    #[test]
    fn a_write_is_kept_only_by_a_node_that_says_so() {
        assert_eq!(of(Kind::Write(7), "+OK\r\n"), Meaning::Kept);
        for other in ["+QUEUED\r\n", "$-1\r\n", ":1\r\n", "$2\r\nOK\r\n", "-NOPERM x\r\n"] {
            assert_eq!(of(Kind::Write(7), other), Meaning::Refused(Fault::Io(libc::EIO)), "{other}");
        }
        assert_eq!(of(Kind::Copy(7), "-OOM x\r\n"), Meaning::Refused(Fault::Io(libc::ENOSPC)));
    }

    #[test]
    fn an_error_of_one_page_is_none_of_its_node() {
        for kind in [Kind::Read(7), Kind::Write(7)] {
            assert_eq!(of(kind, "-TRYAGAIN Multiple keys\r\n"), Meaning::Later);
            assert_eq!(of(kind, "-CLUSTERDOWN Hash slot not served\r\n"), Meaning::Later);
            let down = Meaning::Away("CLUSTERDOWN: The cluster is down".to_owned());
            assert_eq!(of(kind, "-CLUSTERDOWN The cluster is down\r\n"), down);
            assert_eq!(of(kind, "-MOVED 1 a:1\r\n"), Meaning::Moved("1 a:1".to_owned()));
            assert_eq!(of(kind, "-ASK 1 a:1\r\n"), Meaning::Ask("1 a:1".to_owned()));
        }
    }

    #[test]
    fn a_text_of_a_node_changes_no_terminal_and_has_an_end() {
        assert_eq!(plain("a\u{1b}[2Jb\nc\u{9b}d"), "a [2Jb c d");
        assert_eq!(plain(&"x".repeat(1 << 20)).len(), TEXT_MAX);
        assert_eq!(run_id("# Server\r\nrun_id:abc\r\nport:1\r\n"), Some("abc"));
        assert_eq!(run_id("run_id:\r\nxrun_id:abc"), None);
    }
}
