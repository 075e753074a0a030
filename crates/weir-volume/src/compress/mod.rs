//! Compression of pages, which takes no memory while pages move.

mod zstd;

use lz4_flex::block::CompressTable;
use std::fmt;
use std::io;
use weir_core::{PAGE_SIZE, PageBytes};

/// The compression algorithm.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Compression {
    /// LZ4, which takes the least time.
    Lz4,
    /// Zstandard at level 1. It compresses more than LZ4, and takes longer.
    Zstd,
}

impl Compression {
    /// The algorithm's number in a pack.
    pub(crate) fn code(self) -> u8 {
        match self {
            Compression::Lz4 => 1,
            Compression::Zstd => 2,
        }
    }

    pub(crate) fn of_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Compression::Lz4),
            2 => Some(Compression::Zstd),
            _ => None,
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Compression::Lz4 => "lz4",
            Compression::Zstd => "zstd",
        })
    }
}

/// Bytes of a buffer that holds any page compressed by either algorithm. So neither algorithm has
/// to check for the buffer's end.
pub(crate) const WORST: usize = PAGE_SIZE + 1024;
const _: () = assert!(WORST >= lz4_flex::block::get_maximum_output_size(PAGE_SIZE));

/// The compressor and expander of one thread. It takes all its memory when it is made.
pub(crate) struct Codec {
    compress: Option<Compressor>,
    expand_zstd: Option<zstd::Expander>,
}

enum Compressor {
    Lz4(CompressTable),
    Zstd(zstd::Compressor),
}

impl Codec {
    /// Makes a codec that compresses by the algorithm `with`, and expands that algorithm's pages.
    /// If `any` is set, it also expands those of the other algorithms.
    ///
    /// # Errors
    /// Fails when there is no memory for the codec.
    pub fn new(with: Option<Compression>, any: bool) -> io::Result<Self> {
        let compress = match with {
            None => None,
            Some(Compression::Lz4) => Some(Compressor::Lz4(CompressTable::small())),
            Some(Compression::Zstd) => Some(Compressor::Zstd(zstd::Compressor::new()?)),
        };
        let expand_zstd = (any || with == Some(Compression::Zstd)).then(zstd::Expander::new).transpose()?;
        Ok(Codec { compress, expand_zstd })
    }

    /// The algorithm that this codec compresses with.
    pub fn compression(&self) -> Option<Compression> {
        self.compress.as_ref().map(|compressor| match compressor {
            Compressor::Lz4(_) => Compression::Lz4,
            Compressor::Zstd(_) => Compression::Zstd,
        })
    }

    /// Compresses a page, and returns the number of compressed bytes. `None`: the page cannot be
    /// compressed.
    pub fn compress(&mut self, page: &PageBytes, out: &mut [u8; WORST]) -> Option<usize> {
        match self.compress.as_mut()? {
            Compressor::Lz4(table) => lz4_flex::block::compress_into_with_table(page, out, table).ok(),
            Compressor::Zstd(zstd) => zstd.compress(page, out),
        }
    }

    /// Expands a compressed page. Returns whether the bytes were one whole compressed page.
    #[must_use]
    pub fn expand(&mut self, compression: Compression, bytes: &[u8], page: &mut PageBytes) -> bool {
        let length = match compression {
            Compression::Lz4 => lz4_flex::block::decompress_into(bytes, page).ok(),
            Compression::Zstd => self.expand_zstd.as_mut().and_then(|zstd| zstd.expand(bytes, page)),
        };
        length == Some(PAGE_SIZE)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn codecs() -> [Codec; 2] {
        [Compression::Lz4, Compression::Zstd].map(|with| Codec::new(Some(with), false).unwrap())
    }

    proptest! {
        #[test]
        fn a_page_comes_back_as_it_was(words in prop::collection::vec(any::<u8>(), 1..600), step in 1..64usize) {
            let mut page = [0; PAGE_SIZE];
            for (at, byte) in page.iter_mut().enumerate() {
                *byte = words[at / step % words.len()];
            }
            for mut codec in codecs() {
                let (mut small, mut back) = ([0; WORST], [7; PAGE_SIZE]);
                let length = codec.compress(&page, &mut small).unwrap();
                let with = codec.compression().unwrap();
                prop_assert!(codec.expand(with, &small[..length], &mut back));
                prop_assert!(back == page);
                prop_assert!(!codec.expand(with, &small[..length - 1], &mut back), "a part of it is no page");
            }
        }

        #[test]
        fn rubbish_is_refused_or_expands_to_something(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
            for mut codec in codecs() {
                let with = codec.compression().unwrap();
                let _ = codec.expand(with, &bytes, &mut [0; PAGE_SIZE]);
            }
        }
    }

    #[test]
    fn what_is_like_text_becomes_less_than_half_and_noise_does_not_fail() {
        let mut text = [0; PAGE_SIZE];
        for (at, line) in text.chunks_mut(32).enumerate() {
            let said = format!("{at:>6} the quick brown fox jumps\n");
            line.copy_from_slice(&said.as_bytes()[..line.len()]);
        }
        let mut noise = [0u8; PAGE_SIZE];
        let mut state = 1u64;
        for byte in &mut noise {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (state >> 56) as u8;
        }
        for mut codec in codecs() {
            let mut small = [0; WORST];
            assert!(codec.compress(&text, &mut small).unwrap() < PAGE_SIZE / 2);
            assert!(codec.compress(&noise, &mut small).unwrap() >= PAGE_SIZE);
        }
    }
}
