//! The check whether a node may be trusted with pages. It runs for each node when the store is
//! opened, and again when another process takes a node's place.

use super::url::RemoteUrl;
use crate::{OpenError, OpenErrorKind};
use redis::{Connection, RedisResult};
use weir_core::{ByteSize, PAGE_SIZE};

/// Bytes of memory that a node takes for a page. These are the value (rounded up to a size of its
/// allocator), the key, and the entry in its table. Measured over 20,000 pages with Redis 7.0.15
/// and jemalloc 5.3: 5,215.
const PER_PAGE: u64 = 5300;

/// Refuses a node that could drop pages.
pub(super) fn check(
    store: &str,
    node: &str,
    connection: &mut Connection,
    url: &RemoteUrl,
    cluster: bool,
) -> Result<(), OpenError> {
    if is_in_cluster(connection).map_err(|error| no_answer(store, node, &error))? != cluster {
        let (is, others) = if cluster { ("no part of a", "are") } else { ("part of a", "are not") };
        let what = format!(
            "node {node} is {is} cluster, and others {others}: name nodes of one cluster, or of none"
        );
        return Err(OpenError::new(OpenErrorKind::Layout, store, what));
    }
    if !url.check {
        return Ok(());
    }
    let setting = |connection: &mut Connection, key: &str| -> RedisResult<String> {
        let pair: Vec<String> = redis::cmd("CONFIG").arg("GET").arg(key).query(connection)?;
        Ok(pair.into_iter().nth(1).unwrap_or_default())
    };
    let denied = |error: redis::RedisError| {
        let what = format!(
            "node {node} does not tell its settings: {error}; allow CONFIG GET, or give check=off if it has no \
             memory limit below {} and its policy is noeviction",
            ByteSize(needed(url)),
        );
        OpenError::new(OpenErrorKind::Denied, store, what)
    };
    let most: u64 = setting(connection, "maxmemory").map_err(denied)?.parse().unwrap_or(0);
    let policy = setting(connection, "maxmemory-policy").map_err(denied)?;
    if most > 0 && policy != "noeviction" {
        let what = format!(
            "node {node} throws pages away where memory is short (maxmemory-policy {policy}): set it to noeviction",
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

/// The error for a node that does not answer.
pub(super) fn no_answer(store: &str, node: &str, error: &redis::RedisError) -> OpenError {
    let what = format!("node {node} does not answer as Redis does: {error}");
    OpenError::new(OpenErrorKind::NoDevice, store, what)
}

/// Bytes of memory that a node needs for its share of the pages.
fn needed(url: &RemoteUrl) -> u64 {
    let pages = url.size.0 / PAGE_SIZE as u64 * u64::from(url.copies);
    pages.div_ceil(url.nodes.len() as u64) * PER_PAGE
}
