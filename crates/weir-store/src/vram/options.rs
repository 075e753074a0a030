//! The options of a `vram:` URL.
//!
//! `vram:` names every GPU, `vram:0` the first as `nvidia-smi` counts, and `vram:lavapipe` a
//! software renderer for tests. Options come after a question mark: `vram:0?size=16GiB&ring=off`.

use super::engine::BatchCopies;
use crate::url::{Exact, Query, UrlProblem, pairs, size, split_query, value};
use std::fmt;
use weir_core::ByteSize;

/// The cards that a URL names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// Every discrete GPU, striped.
    All,
    /// One GPU.
    Index(u32),
    /// Mesa's lavapipe: its memory is RAM, not VRAM, but it is good for tests.
    Software,
}

/// The conditions for the resident kernel to be on the card.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RingMode {
    /// The resident kernel is on the card under load, while no other process uses the card. It is
    /// never on a card that drives a display.
    #[default]
    Auto,
    /// The resident kernel is on the card whenever no other process uses the card.
    On,
    /// The resident kernel is never on the card.
    Off,
}

/// The path that pages take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PathMode {
    /// The path is chosen by the costs that were measured at the start.
    #[default]
    Auto,
    /// Pages go by the processor, through the window.
    Mapped,
    /// Pages go by the copy engines.
    Engine,
    /// Pages go by the resident kernel, and through the window while the kernel is away.
    Ring,
}

/// The parts of a `vram:` URL.
#[derive(Clone, PartialEq, Debug)]
pub struct VramUrl {
    /// The cards that the URL names.
    pub target: Target,
    /// Bytes of device memory; `None`: all that is free above the floor.
    pub size: Option<ByteSize>,
    /// Bytes of a chunk: a power of two, from 1 MiB to 4 GiB.
    pub chunk: ByteSize,
    /// Bytes of device memory that stay free for the card's other users.
    pub floor: ByteSize,
    /// The mode of the resident kernel.
    pub ring: RingMode,
    /// The path of pages; `None`: the URL does not say, which means auto.
    pub path: Option<PathMode>,
    /// Number of the resident kernel's thread blocks; 0 for the default.
    pub blocks: u32,
    /// Whether to use the processor's window onto the card. With false, a card counts as one
    /// without a window.
    pub window: bool,
    /// Largest number of copies that one call to the copy engine's driver names, for reads and for
    /// writes. If it is 1, each copy is a call. `None`: the URL does not say, which means
    /// [`ENGINE_BATCH`](Self::ENGINE_BATCH) for reads and 1 for writes.
    pub engine_batch: Option<u32>,
}

const KEYS: &[&str] = &["size", "chunk", "floor", "ring", "path", "blocks", "window", "engine_batch"];
const RINGS: [(&str, RingMode); 3] = [("auto", RingMode::Auto), ("on", RingMode::On), ("off", RingMode::Off)];
const WINDOWS: [(&str, bool); 2] = [("on", true), ("off", false)];
const PATHS: [(&str, PathMode); 4] = [
    ("auto", PathMode::Auto),
    ("mapped", PathMode::Mapped),
    ("engine", PathMode::Engine),
    ("ring", PathMode::Ring),
];

impl VramUrl {
    /// The default size of a chunk.
    pub const CHUNK: ByteSize = ByteSize(128 << 20);
    /// The default of the memory that is left to the card's other users.
    pub const FLOOR: ByteSize = ByteSize(512 << 20);

    /// The default number of copies from the card that one call names. It is a quarter of the
    /// largest number that a daemon ever named, and none of those calls failed. Each copy to the
    /// card is a call of its own: with batches of them, even of 64, NVIDIA's driver 580.159.04
    /// stopped its own channel to the card (docs/gpu.md).
    pub const ENGINE_BATCH: u32 = 64;
    /// The largest number of copies in a call that the URL may ask for. The benchmark that looks
    /// for the number at which a driver fails goes up to this.
    pub const ENGINE_BATCH_MAX: u32 = 4096;

    /// The default options, for one card or all.
    pub fn new(target: Target) -> Self {
        VramUrl {
            target,
            size: None,
            chunk: Self::CHUNK,
            floor: Self::FLOOR,
            ring: RingMode::Auto,
            path: None,
            blocks: 0,
            window: true,
            engine_batch: None,
        }
    }

    /// Largest number of copies that one call to the driver may name.
    pub(super) fn batch_copies(&self) -> BatchCopies {
        match self.engine_batch {
            Some(copies) => BatchCopies { reads: copies, writes: copies },
            None => BatchCopies { reads: Self::ENGINE_BATCH, writes: 1 },
        }
    }

    /// Parses the text after `vram:`.
    pub(crate) fn parse(text: &str) -> Result<Self, UrlProblem> {
        let (card, query) = split_query(text);
        let mut url = VramUrl::new(match card {
            "" => Target::All,
            "lavapipe" => Target::Software,
            index => {
                Target::Index(value("gpu", index, "a GPU's number, such as 0, or nothing for every GPU")?)
            }
        });
        for (key, text) in pairs(query, '&', KEYS)? {
            match key {
                "size" => url.size = Some(size(key, text)?),
                "chunk" => url.chunk = chunk(text)?,
                "floor" => url.floor = value(key, text, "a size, such as 512MiB")?,
                "ring" => url.ring = one_of(key, text, &RINGS, "auto, on or off")?,
                "path" => url.path = Some(one_of(key, text, &PATHS, "auto, mapped, engine or ring")?),
                "window" => url.window = one_of(key, text, &WINDOWS, "on or off")?,
                "engine_batch" => url.engine_batch = Some(engine_batch(text)?),
                _ => url.blocks = value(key, text, "a number of blocks, such as 128")?,
            }
        }
        Ok(url)
    }
}

fn chunk(text: &str) -> Result<ByteSize, UrlProblem> {
    let expected = "a power of two from 1MiB to 4GiB, such as 128MiB";
    let chunk: ByteSize = value("chunk", text, expected)?;
    if chunk.0.is_power_of_two() && (1 << 20..=4 << 30).contains(&chunk.0) {
        Ok(chunk)
    } else {
        Err(UrlProblem::Value { key: "chunk", value: text.to_owned(), expected })
    }
}

fn engine_batch(text: &str) -> Result<u32, UrlProblem> {
    let expected = "a number of copies from 1 to 4096, such as 64; 1 for a call each";
    let copies: u32 = value("engine_batch", text, expected)?;
    if (1..=VramUrl::ENGINE_BATCH_MAX).contains(&copies) {
        Ok(copies)
    } else {
        Err(UrlProblem::Value { key: "engine_batch", value: text.to_owned(), expected })
    }
}

fn one_of<T: Copy>(
    key: &'static str,
    text: &str,
    choices: &[(&str, T)],
    expected: &'static str,
) -> Result<T, UrlProblem> {
    let chosen = choices.iter().find(|&&(name, _)| name == text).map(|&(_, chosen)| chosen);
    chosen.ok_or_else(|| UrlProblem::Value { key, value: text.to_owned(), expected })
}

fn name_of<T: PartialEq>(value: &T, choices: &[(&'static str, T)]) -> &'static str {
    choices.iter().find(|(_, choice)| choice == value).map_or("", |&(name, _)| name)
}

impl fmt::Display for VramUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.target {
            Target::All => f.write_str("vram:")?,
            Target::Index(index) => write!(f, "vram:{index}")?,
            Target::Software => f.write_str("vram:lavapipe")?,
        }
        let mut query = Query::new(f, "?", "&");
        query.pair(self.size.is_some(), "size", Exact(self.size.unwrap_or_default()))?;
        query.pair(self.chunk != Self::CHUNK, "chunk", Exact(self.chunk))?;
        query.pair(self.floor != Self::FLOOR, "floor", Exact(self.floor))?;
        query.pair(self.ring != RingMode::default(), "ring", name_of(&self.ring, &RINGS))?;
        query.pair(self.path.is_some(), "path", name_of(&self.path.unwrap_or_default(), &PATHS))?;
        query.pair(self.blocks != 0, "blocks", self.blocks)?;
        query.pair(!self.window, "window", name_of(&self.window, &WINDOWS))?;
        query.pair(self.engine_batch.is_some(), "engine_batch", self.engine_batch.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StoreUrl;

    #[test]
    fn a_url_says_card_and_options() {
        let url = "vram:1?size=16GiB&chunk=64MiB&floor=1GiB&ring=off&path=mapped&blocks=64&window=off&engine_batch=16";
        let StoreUrl::Vram(read) = url.parse().unwrap() else { panic!("a vram URL") };
        assert_eq!(read.target, Target::Index(1));
        assert_eq!((read.size, read.chunk.0, read.floor.0), (Some(ByteSize(16 << 30)), 64 << 20, 1 << 30));
        assert_eq!((read.ring, read.path, read.blocks), (RingMode::Off, Some(PathMode::Mapped), 64));
        assert_eq!(read.engine_batch, Some(16));
        assert_eq!(read.to_string(), url);
        assert_eq!("vram:0?path=auto".parse::<StoreUrl>().unwrap().to_string(), "vram:0?path=auto");
        assert_eq!("vram:lavapipe".parse(), Ok(StoreUrl::Vram(VramUrl::new(Target::Software))));
    }

    #[test]
    fn a_wrong_value_is_told_what_would_be_right() {
        for (url, hint) in [
            ("vram:first", "such as 0"),
            ("vram:0?chunk=100MiB", "power of two"),
            ("vram:0?ring=maybe", "auto, on or off"),
            ("vram:0?path=dma", "mapped, engine or ring"),
            ("vram:0?engine_batch=0", "from 1 to 4096"),
            ("vram:0?engine_batch=5000", "from 1 to 4096"),
            ("vram:0?engine_batch=many", "from 1 to 4096"),
            ("vram:0?colour=red", "accepted: size, chunk"),
        ] {
            let error = url.parse::<StoreUrl>().unwrap_err().to_string();
            assert!(error.contains(hint) && error.contains(url), "{url}: {error}");
        }
    }
}
