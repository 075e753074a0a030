//! A keeper's record of a `vram:` store, besides the chunks' descriptors: its cards, their chunks,
//! and the costs of their paths. To measure the costs again would overwrite pages. The record is
//! lines of text in a memfd.

use super::table::{Cost, Direction, Path, Table};
use std::fmt::Write as _;
use weir_core::Memory;

/// The name under which the keeper holds the memfd with the record.
pub const PLAN: &str = "plan";
const HEADER: &str = "weir vram 1";

/// The name under which the keeper holds a chunk.
pub fn chunk_name(gpu: usize, chunk: usize) -> String {
    format!("chunk.{gpu}.{chunk}")
}

/// The record of one card.
#[derive(Clone, Copy, Debug)]
pub struct KeptGpu {
    pub uuid: [u8; 16],
    /// Whether Vulkan allocated the chunks; else CUDA did.
    pub mapped: bool,
    pub chunk_bytes: u64,
    /// Bytes of a chunk as the driver rounded them: an importer must give this size.
    pub allocation_bytes: u64,
    pub chunks: usize,
    pub slots: u32,
    pub table: Table,
}

impl KeptGpu {
    /// Checks whether these pages lie on the card with this UUID, and whether the driver that
    /// allocated them is there.
    ///
    /// # Errors
    /// Fails with a sentence when the pages lie on another card, or the driver that allocated them
    /// is missing.
    pub fn fits(&self, uuid: [u8; 16], has_vulkan: bool) -> Result<(), String> {
        if self.uuid != uuid {
            return Err("the pages lie on another GPU than the one found here".to_owned());
        }
        if self.mapped && !has_vulkan {
            return Err("the pages were allocated by Vulkan, which is not to be had now".to_owned());
        }
        Ok(())
    }
}

/// The record of a store: its cards, and the card of each chunk ([`super::store`]).
#[derive(Clone, Debug, Default)]
pub struct KeptStore {
    pub gpus: Vec<KeptGpu>,
    pub deal: Vec<(u16, u32)>,
}

impl KeptStore {
    pub fn to_text(&self) -> String {
        let mut text = format!("{HEADER}\n");
        for gpu in &self.gpus {
            let uuid = u128::from_be_bytes(gpu.uuid);
            let KeptGpu { mapped, chunk_bytes, allocation_bytes, chunks, slots, .. } = gpu;
            let mapped = u8::from(*mapped);
            let _ =
                writeln!(text, "gpu {uuid:032x} {mapped} {chunk_bytes} {allocation_bytes} {chunks} {slots}");
            for (path, direction) in WAYS {
                if let Some(cost) = gpu.table.get(path, direction) {
                    let Cost { first, each, neighbour, shared, neighbour_shared } = cost;
                    let (path, direction) = (path as usize, direction as usize);
                    let _ = writeln!(
                        text,
                        "cost {path} {direction} {first} {each} {neighbour} {shared} {neighbour_shared}"
                    );
                }
            }
        }
        for (gpu, chunk) in &self.deal {
            let _ = writeln!(text, "deal {gpu} {chunk}");
        }
        text
    }

    /// Parses the text of a record; `None` for any other text.
    pub fn from_text(text: &str) -> Option<Self> {
        let mut lines = text.trim_end_matches('\0').lines();
        (lines.next()? == HEADER).then_some(())?;
        let mut store = KeptStore::default();
        for line in lines {
            let (word, rest) = line.split_once(' ')?;
            let fields: Vec<&str> = rest.split(' ').collect();
            match (word, fields.as_slice()) {
                ("gpu", [uuid, mapped, chunk_bytes, allocation_bytes, chunks, slots]) => {
                    store.gpus.push(KeptGpu {
                        uuid: u128::from_str_radix(uuid, 16).ok()?.to_be_bytes(),
                        mapped: *mapped == "1",
                        chunk_bytes: chunk_bytes.parse().ok()?,
                        allocation_bytes: allocation_bytes.parse().ok()?,
                        chunks: chunks.parse().ok()?,
                        slots: slots.parse().ok()?,
                        table: Table::default(),
                    });
                }
                ("cost", [path, direction, figures @ ..]) if figures.len() == 5 => {
                    let [path, direction] = [path, direction].map(|text| text.parse::<usize>().ok());
                    let way = |(p, d): &&(Path, Direction)| {
                        Some(*p as usize) == path && Some(*d as usize) == direction
                    };
                    let (path, direction) = *WAYS.iter().find(way)?;
                    let mut of = figures.iter().map(|text| text.parse::<f64>().ok());
                    let mut next = || of.next().flatten();
                    let cost = Cost {
                        first: next()?,
                        each: next()?,
                        neighbour: next()?,
                        shared: next()?,
                        neighbour_shared: next()?,
                    };
                    store.gpus.last_mut()?.table.set(path, direction, cost);
                }
                ("deal", [gpu, chunk]) => store.deal.push((gpu.parse().ok()?, chunk.parse().ok()?)),
                _ => return None,
            }
        }
        (!store.gpus.is_empty()).then_some(store)
    }

    /// Writes the record into a memfd for the keeper.
    ///
    /// # Errors
    /// Fails when there is no memory for the record.
    pub fn to_memory(&self) -> std::io::Result<Memory> {
        let text = self.to_text();
        let memory = Memory::shared("weir-vram-plan", text.len())?;
        // SAFETY: the mapping is new, at least as long as the text, and only this process has it so
        // far.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), memory.as_ptr(), text.len()) };
        Ok(memory)
    }

    /// Reads the record from a memfd that the keeper held.
    pub fn from_memory(memory: &Memory) -> Option<Self> {
        // SAFETY: the mapping has this length, is sealed against shrinking, and the process that
        // wrote it has ended.
        let bytes = unsafe { std::slice::from_raw_parts(memory.as_ptr(), memory.len()) };
        Self::from_text(std::str::from_utf8(bytes).ok()?)
    }
}

const WAYS: [(Path, Direction); 6] = [
    (Path::Mapped, Direction::Read),
    (Path::Mapped, Direction::Write),
    (Path::Engine, Direction::Read),
    (Path::Engine, Direction::Write),
    (Path::Ring, Direction::Read),
    (Path::Ring, Direction::Write),
];

/// Checks whether the driver's libraries and the loaded module have the same version, as far as
/// both are known. They differ after an upgrade without a reboot, and then nothing guarantees that
/// the libraries import the older module's memory correctly.
///
/// `loaded` is the content of `/proc/driver/nvidia/version`.
pub fn agree(libraries: Option<&str>, loaded: Option<&str>) -> Result<(), String> {
    let version =
        |word: &&str| word.contains('.') && word.bytes().all(|byte| byte == b'.' || byte.is_ascii_digit());
    let loaded = loaded.and_then(|text| text.lines().next()?.split_whitespace().find(version));
    match (libraries, loaded) {
        (Some(libraries), Some(loaded)) if libraries != loaded => Err(format!(
            "the loaded driver is {loaded} and its libraries are {libraries}: the pages stay where they are; install {loaded}'s \
             libraries again, or move the pages with `weir off` before the reboot"
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_read_back_as_it_was_written() {
        let mut table = Table::default();
        let cost = Cost { first: 1.5, each: 0.1, neighbour: 2.0, shared: 1e-3, neighbour_shared: 7.0 };
        table.set(Path::Ring, Direction::Write, cost);
        let gpu = KeptGpu {
            uuid: *b"0123456789abcdef",
            mapped: true,
            chunk_bytes: 128 << 20,
            allocation_bytes: (128 << 20) + 4096,
            chunks: 1100,
            slots: 36_000_000,
            table,
        };
        assert_eq!(gpu.fits(gpu.uuid, true), Ok(()));
        let other = gpu.fits([0; 16], true).unwrap_err();
        assert_eq!(other, "the pages lie on another GPU than the one found here");
        let blind = gpu.fits(gpu.uuid, false).unwrap_err();
        assert_eq!(blind, "the pages were allocated by Vulkan, which is not to be had now");
        let store = KeptStore {
            gpus: vec![gpu, KeptGpu { mapped: false, ..gpu }],
            deal: vec![(0, 0), (1, 0), (0, 1)],
        };
        let read = KeptStore::from_memory(&store.to_memory().unwrap()).unwrap();
        assert_eq!(read.to_text(), store.to_text());
        assert_eq!(read.gpus[0].table.get(Path::Ring, Direction::Write), Some(cost));
        assert_eq!(read.gpus[0].table.get(Path::Ring, Direction::Read), None);
        assert_eq!((read.gpus[0].uuid, read.gpus[1].mapped, read.deal.len()), (gpu.uuid, false, 3));
    }

    #[test]
    fn what_is_no_such_text_is_refused() {
        for text in
            ["", "weir vram 2\n", "weir vram 1\n", "weir vram 1\ngpu 1 2\n", "weir vram 1\ndeal 0 0\n"]
        {
            assert!(KeptStore::from_text(text).is_none(), "{text:?}");
        }
    }

    #[test]
    fn versions_must_be_the_same_where_both_are_known() {
        let loaded = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x)\nGCC version:  gcc 13.2.0\n";
        assert_eq!(agree(Some("580.159.04"), Some(loaded)), Ok(()));
        let why = agree(Some("585.10.01"), Some(loaded)).unwrap_err();
        assert!(
            why.starts_with("the loaded driver is 580.159.04 and its libraries are 585.10.01: "),
            "{why}"
        );
        assert_eq!((agree(None, Some(loaded)), agree(Some("1.2"), None)), (Ok(()), Ok(())));
    }
}
