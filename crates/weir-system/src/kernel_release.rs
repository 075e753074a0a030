//! Kernel releases, and from which on Weir can rely on what.

/// Since when the ublk driver says what it can do, and weir serve --ublk can use it.
pub const UBLK: (u32, u32) = (6, 5);
/// Since when that driver is known to survive its daemon's death under load (docs/ublk.md).
/// Debian's 6.12.95 dies of it; stable kernels have taken the repair over since (6.12.117 has it),
/// which a release's first two numbers do not say.
pub const UBLK_SURVIVES: (u32, u32) = (6, 16);
/// Since when a new daemon can have the kernel send again what the one before had in hand
/// (`FUSE_NOTIFY_RESEND`).
pub const FUSE_RESENDS: (u32, u32) = (6, 9);
/// Since when `/proc/PID/fdinfo` says of which FUSE connection a descriptor is.
pub const FUSE_NAMES_CONNECTIONS: (u32, u32) = (6, 16);

/// `(6, 12)` of `6.12.9-amd64`.
pub fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse().ok());
    Some((numbers.next()?, numbers.next()?))
}
