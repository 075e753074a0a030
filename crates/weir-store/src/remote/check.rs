//! The check whether a node may be trusted with pages. It runs for each node when the store is
//! opened, when a node joins a cluster later, and when another process takes a node's place.

use super::answers::{is_passing, plain, run_id};
use super::url::RemoteUrl;
use crate::{OpenError, OpenErrorKind};
use redis::{Connection, ErrorKind, RedisError, RedisResult, Value};
use std::io;
use weir_core::{ByteSize, PAGE_SIZE};

/// Bytes of memory that a node takes for a page. These are the value (rounded up to a size of its
/// allocator), the key, and the entry in its table. Measured over 20,000 pages with Redis 7.0.15
/// and jemalloc 5.3: 5,215.
const PER_PAGE: u64 = 5300;

/// Refuses a node that could drop pages, or takes none. `key` is a key of the store without a
/// value.
pub(super) fn check(
    store: &str,
    node: &str,
    connection: &mut Connection,
    url: &RemoteUrl,
    cluster: bool,
    key: &str,
) -> Result<(), OpenError> {
    if is_in_cluster(connection).map_err(|error| no_answer(store, node, &error))? != cluster {
        let (is, others) = if cluster { ("no part of a", "are") } else { ("part of a", "are not") };
        let what = format!(
            "node {node} is {is} cluster, and others {others}: name nodes of one cluster, or of none"
        );
        return Err(OpenError::new(OpenErrorKind::Layout, store, what));
    }
    if process(connection).map_err(|error| no_answer(store, node, &error))?.is_empty() {
        let what = format!(
            "node {node} does not name its process (run_id of INFO server), so nobody would notice that it was \
             started anew"
        );
        return Err(OpenError::new(OpenErrorKind::Layout, store, what));
    }
    if let Err(error) = serves("UNLINK", key, connection) {
        let what = format!(
            "node {node} takes no pages: {}; name masters, and wait until they are ready",
            plain(&error.to_string())
        );
        return Err(OpenError::new(OpenErrorKind::Layout, store, what));
    }
    if !url.check {
        return Ok(());
    }
    let setting = |connection: &mut Connection, key: &str| -> RedisResult<String> {
        let pair: Vec<String> = redis::cmd("CONFIG").arg("GET").arg(key).query(connection)?;
        let unknown = || RedisError::from(io::Error::other(format!("it knows no {key}")));
        pair.into_iter().nth(1).ok_or_else(unknown)
    };
    let denied = |error: RedisError| {
        let what = format!(
            "node {node} does not tell its settings: {}; allow CONFIG GET, or give check=off if it has no \
             memory limit below {} and its policy is noeviction",
            plain(&error.to_string()),
            ByteSize(needed(url)),
        );
        OpenError::new(OpenErrorKind::Denied, store, what)
    };
    let most = setting(connection, "maxmemory").map_err(denied)?;
    let no_size = |_| denied(io::Error::other(format!("maxmemory is {most}")).into());
    let most: u64 = most.parse().map_err(no_size)?;
    let policy = setting(connection, "maxmemory-policy").map_err(denied)?;
    if most > 0 && policy != "noeviction" {
        let what = format!(
            "node {node} throws pages away where memory is short (maxmemory-policy {}): set it to noeviction",
            plain(&policy)
        );
        return Err(OpenError::new(OpenErrorKind::Layout, store, what));
    }
    if most > 0 && most < needed(url) {
        let what = format!(
            "node {node} may take {} of memory, and its share of the pages takes {}: raise maxmemory, or give a \
             smaller size",
            ByteSize(most),
            ByteSize(needed(url)),
        );
        return Err(OpenError::new(OpenErrorKind::NoMemory { wanted: needed(url), had: most }, store, what));
    }
    Ok(())
}

/// Whether a node is part of a cluster.
pub(super) fn is_in_cluster(connection: &mut Connection) -> RedisResult<bool> {
    let about: String = redis::cmd("INFO").arg("cluster").query(connection)?;
    Ok(about.contains("cluster_enabled:1"))
}

/// Returns the run ID of a node's process; empty if the node does not name it.
pub(super) fn process(connection: &mut Connection) -> RedisResult<String> {
    let about: String = redis::cmd("INFO").arg("server").query(connection)?;
    Ok(run_id(&about).unwrap_or_default().to_owned())
}

/// Sends a command for a key without a value. Fails if the node says that it cannot serve at
/// present, and ignores other errors. A node that is starting, or that is a replica, shows this
/// only when it is asked for a key.
pub(super) fn serves(command: &str, key: &str, connection: &mut Connection) -> RedisResult<()> {
    match redis::cmd(command).arg(key).query::<Value>(connection) {
        Err(error)
            if error.is_io_error()
                || error.is_timeout()
                || error.code().is_some_and(is_passing)
                    && !error.detail().unwrap_or_default().starts_with("Hash slot") =>
        {
            Err(error)
        }
        _ => Ok(()),
    }
}

/// The error for a node that does not answer.
pub(super) fn no_answer(store: &str, node: &str, error: &RedisError) -> OpenError {
    let why = plain(&error.to_string());
    let what = match (error.code(), error.kind()) {
        (Some("NOAUTH"), _) => format!("node {node} asks for a password: {why}; give password-file=PATH"),
        (_, ErrorKind::AuthenticationFailed) => {
            format!("node {node} refuses the login: {why}; mend user or password-file")
        }
        _ if error.is_connection_refusal() => {
            format!("node {node} cannot be reached: {why}; start its engine")
        }
        (_, ErrorKind::Io) => {
            format!("node {node} does not answer: {why}; look at its engine, and at the network")
        }
        _ => format!("node {node} does not answer as Redis does: {why}"),
    };
    OpenError::new(OpenErrorKind::NoDevice, store, what)
}

/// Bytes of memory that a node needs for its share of the pages.
fn needed(url: &RemoteUrl) -> u64 {
    let pages = url.size.0 / PAGE_SIZE as u64 * u64::from(url.copies);
    pages.div_ceil(url.nodes.len() as u64) * PER_PAGE
}
