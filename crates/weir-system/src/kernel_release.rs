//! Kernel releases, and the first one of each feature that Weir relies on.

/// The first kernel whose ublk driver lists its features, so that weir serve --ublk can use it.
pub const UBLK: (u32, u32) = (6, 5);
/// The first kernel whose ublk driver is known to survive its daemon's death under load
/// (docs/ublk.md). Debian's 6.12.95 crashes. Later stable kernels are repaired, such as 6.12.117,
/// but the first two numbers of a release do not tell that.
pub const UBLK_SURVIVES: (u32, u32) = (6, 16);
/// The first kernel that can repeat unanswered requests to a daemon that takes over
/// (`FUSE_NOTIFY_RESEND`).
pub const FUSE_RESENDS: (u32, u32) = (6, 9);
/// The first kernel whose `/proc/PID/fdinfo` names the FUSE connection of a descriptor.
pub const FUSE_NAMES_CONNECTIONS: (u32, u32) = (6, 16);

/// Parses a release: `(6, 12)` for `6.12.9-amd64`.
pub fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse().ok());
    Some((numbers.next()?, numbers.next()?))
}
