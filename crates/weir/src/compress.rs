//! `--compress`: the algorithm that compresses pages.

use clap::ValueEnum;
use weir_volume::Compression;

/// An algorithm that compresses pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Algorithm {
    /// Takes the least time.
    Lz4,
    /// Compresses more, and takes longer.
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
