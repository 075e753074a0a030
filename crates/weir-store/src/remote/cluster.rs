//! The answers by which the nodes of a cluster name the node of a hash slot.
//!
//! A cluster may move a hash slot to another node at any time. A node that no longer serves the
//! slot names its new node (`MOVED`). While a slot moves, its old node names the new one for keys
//! that have gone (`ASK`). A dead node cannot name another node. So the store then asks the other
//! nodes for the whole map of hash slots.

use super::placement::HASH_SLOTS;
use redis::{Connection, RedisResult, Value};

/// A range of hash slots: the first, the last, and the address of their node.
pub(super) type Range = (usize, usize, String);

/// Parses a node's answer that names another node: `MOVED 3999 127.0.0.1:6381`. If the address has
/// no host, the host is that of the node that answered.
pub(super) fn redirection(details: &str, asked: &str) -> Option<(usize, String)> {
    let (hash, address) = details.split_once(' ')?;
    let hash = hash.parse().ok().filter(|hash| *hash < HASH_SLOTS)?;
    let (host, port) = address.split_once(' ').map_or(address, |(address, _)| address).rsplit_once(':')?;
    let port: u16 = port.parse().ok().filter(|port| *port > 0)?;
    Some((hash, join(host, port, asked)?))
}

/// Joins a host and a port. `None` if the text `host` is neither a name nor an address. Status
/// shows the host, and a text with other characters could change the terminal.
fn join(host: &str, port: u16, asked: &str) -> Option<String> {
    let is_host = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:%[]".contains(&byte);
    match host {
        "" | "?" => Some(format!("{}:{port}", asked.rsplit_once(':').map_or(asked, |(host, _)| host))),
        host if host.len() < 256 && host.bytes().all(is_host) => Some(format!("{host}:{port}")),
        _ => None,
    }
}

/// Asks a node for the map of hash slots. `asked` is the node's address.
pub(super) fn map(connection: &mut Connection, asked: &str) -> RedisResult<Vec<Range>> {
    Ok(ranges(&redis::cmd("CLUSTER").arg("SLOTS").query(connection)?, asked))
}

/// Reads the answer to `CLUSTER SLOTS`. Leaves out what is no range of hash slots.
pub(super) fn ranges(answer: &Value, asked: &str) -> Vec<Range> {
    let Value::Array(ranges) = answer else { return Vec::new() };
    ranges.iter().filter_map(|range| read_range(range, asked)).collect()
}

fn read_range(range: &Value, asked: &str) -> Option<Range> {
    let Value::Array(range) = range else { return None };
    let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = &range[..] else { return None };
    let [host, Value::Int(port), ..] = &master[..] else { return None };
    let host = match host {
        Value::BulkString(host) => String::from_utf8(host.clone()).ok()?,
        _ => String::new(),
    };
    let hash = |value: &i64| usize::try_from(*value).ok().filter(|hash| *hash < HASH_SLOTS);
    let port = u16::try_from(*port).ok().filter(|port| *port > 0)?;
    Some((hash(first)?, hash(last)?, join(&host, port, asked)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirection_names_hash_slot_and_node_and_anything_else_is_none() {
        let read = |details| redirection(details, "10.0.0.7:6379");
        assert_eq!(read("3999 127.0.0.1:6381"), Some((3999, "127.0.0.1:6381".to_owned())));
        assert_eq!(read("1 ::1:6381"), Some((1, "::1:6381".to_owned())));
        assert_eq!(read("1 :6381"), Some((1, "10.0.0.7:6381".to_owned())));
        for wrong in [
            "",
            "1",
            "1 ",
            "1 host",
            "1 host:0",
            "1 host:99999",
            "16384 host:1",
            "-1 host:1",
            "x host:1",
            "1 \u{1b}[2J:1",
            "1 a,b:1",
        ] {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn a_range_of_the_map_is_read_and_anything_else_is_none() {
        let master = |host: &str, port| Value::Array(vec![Value::BulkString(host.into()), Value::Int(port)]);
        let read = |range: &[Value]| read_range(&Value::Array(range.to_vec()), "10.0.0.7:6379");
        let range = [Value::Int(0), Value::Int(5460), master("10.0.0.1", 6379), master("10.0.0.4", 6379)];
        assert_eq!(read(&range), Some((0, 5460, "10.0.0.1:6379".to_owned())));
        assert_eq!(read(&range[..2]), None, "no master");
        assert_eq!(read(&[Value::Int(0), Value::Int(16384), master("x", 1)]), None);
        assert_eq!(read(&[Value::Int(0), Value::Int(1), master("", 70_000)]), None);
        assert_eq!(read(&[Value::Int(0), Value::Int(1), master("a\nb", 1)]), None);
        let nameless = Value::Array(vec![Value::Nil, Value::Int(7)]);
        assert_eq!(read(&[Value::Int(0), Value::Int(1), nameless]), Some((0, 1, "10.0.0.7:7".to_owned())));
    }
}
