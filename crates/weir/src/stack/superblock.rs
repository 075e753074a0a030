//! The superblock of bcache, as far as Weir reads it: the set to which a device belongs, and
//! whether a cache has pages that the device lacks. Its layout is `struct cache_sb` of the kernel's
//! bcache_ondisk.h.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Offset of the superblock on a device.
const AT: u64 = 4096;
/// Bytes of the superblock that are read: up to its flags.
const BYTES: usize = 112;
const MAGIC: [u8; 16] = *b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81";

/// The pages that a device lacks, as its superblock says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lack {
    /// No cache belongs to the device.
    NoCache,
    /// A cache belongs to the device and has no page that the device lacks.
    Clean,
    /// A cache has pages that the device lacks.
    Dirty,
    /// The device was used without its cache, while the cache had pages that the device lacks.
    Stale,
}

/// The superblock of bcache on a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Superblock {
    /// The device's identity.
    pub uuid: String,
    /// The identity of the set to which the device belongs.
    pub set: String,
    /// The pages that the device lacks. It means nothing on the device of a cache.
    pub lack: Lack,
}

/// Reads a device's superblock; `None` if it has none.
///
/// # Errors
/// Fails when the device cannot be read.
pub fn read(device: &Path) -> io::Result<Option<Superblock>> {
    let mut bytes = [0; BYTES];
    match File::open(device)?.read_exact_at(&mut bytes, AT) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        result => result.map(|()| parse(&bytes)),
    }
}

fn parse(bytes: &[u8; BYTES]) -> Option<Superblock> {
    let (uuid, set) = (&bytes[40..56], &bytes[56..72]);
    let flags = u64::from_le_bytes(bytes[104..112].try_into().ok()?);
    let lack = match flags >> 61 & 3 {
        0 => Lack::NoCache,
        1 => Lack::Clean,
        2 => Lack::Dirty,
        _ => Lack::Stale,
    };
    (bytes[24..40] == MAGIC).then(|| Superblock { uuid: written(uuid), set: written(set), lack })
}

/// An identity as sysfs and make-bcache write it.
pub fn written(uuid: &[u8]) -> String {
    let digits: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| digits.get(part).unwrap_or_default());
    parts.join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_superblock_says_whose_the_device_is_and_whether_it_lacks_pages() {
        let mut bytes = [0; BYTES];
        assert_eq!(parse(&bytes), None);
        bytes[24..40].copy_from_slice(&MAGIC);
        bytes[40..56].copy_from_slice(&[0x11; 16]);
        bytes[56..72].copy_from_slice(&[0xab; 16]);
        // The last byte of the flags, as a kernel wrote it.
        for (flags, lack) in
            [(0x00, Lack::NoCache), (0x20, Lack::Clean), (0x40, Lack::Dirty), (0x60, Lack::Stale)]
        {
            (bytes[104], bytes[111]) = (1, flags);
            let found = parse(&bytes).expect("a superblock");
            assert_eq!(found.lack, lack);
            assert_eq!(found.uuid, "11111111-1111-1111-1111-111111111111");
            assert_eq!(found.set, "abababab-abab-abab-abab-abababababab");
        }
    }

    #[test]
    fn a_device_too_short_for_a_superblock_has_none_and_one_that_is_missing_is_an_error() {
        let path = std::env::temp_dir().join(format!("weir-superblock-{}", std::process::id()));
        std::fs::write(&path, [0; AT as usize + 9]).expect("written");
        assert_eq!(read(&path).expect("readable"), None);
        std::fs::remove_file(&path).expect("removed");
        assert!(read(&path).is_err());
    }
}
