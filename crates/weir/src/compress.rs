//! `--compress`: what pages are compressed by.

use clap::ValueEnum;
use weir_volume::Compression;

/// An algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Algorithm {
    /// The least time.
    Lz4,
    /// Smaller, and slower.
    Zstd,
}

impl From<Algorithm> for Compression {
    fn from(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::Lz4 => Compression::Lz4,
            Algorithm::Zstd => Compression::Zstd,
        }
    }
}
