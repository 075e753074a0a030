//! Signatures on a disk: the marks that identify file systems, volume managers and partition
//! tables.
//!
//! Offsets and marks are libblkid's (util-linux, libblkid/src/superblocks and partitions). A device
//! with a mark holds somebody's data, and is taken only with an explicit option.

/// A mark at an offset from the device's start, or from its end if the offset is negative.
struct Mark {
    of: &'static str,
    at: i64,
    bytes: &'static [u8],
}

const MARKS: &[Mark] = &[
    // docs/log-format.md specifies this mark.
    Mark { of: "a durable log of weir cache", at: 0, bytes: b"WEIR DURABLE LOG\n" },
    Mark { of: "ext2, ext3 or ext4", at: 0x438, bytes: b"\x53\xef" },
    Mark { of: "XFS", at: 0, bytes: b"XFSB" },
    Mark { of: "Btrfs", at: 0x1_0040, bytes: b"_BHRfS_M" },
    Mark { of: "F2FS", at: 0x400, bytes: b"\x10\x20\xf5\xf2" },
    Mark { of: "EROFS", at: 0x400, bytes: b"\xe2\xe1\xf5\xe0" },
    Mark { of: "bcachefs or bcache", at: 0x1018, bytes: b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca" },
    Mark { of: "bcachefs", at: 0x1018, bytes: b"\xc6\x85\x73\xf6\x66\xce\x90\xa9" },
    Mark { of: "swap", at: 4096 - 10, bytes: b"SWAPSPACE2" },
    Mark { of: "swap", at: 4096 - 10, bytes: b"SWAP-SPACE" },
    Mark { of: "suspended system (hibernation)", at: 4096 - 10, bytes: b"S1SUSPEND" },
    Mark { of: "LUKS", at: 0, bytes: b"LUKS\xba\xbe" },
    Mark { of: "BitLocker", at: 3, bytes: b"-FVE-FS-" },
    Mark { of: "LVM", at: 0x218, bytes: b"LVM2 001" },
    Mark { of: "LVM", at: 0x018, bytes: b"LVM2 001" },
    Mark { of: "Linux RAID (1.1)", at: 0, bytes: b"\xfc\x4e\x2b\xa9" },
    Mark { of: "Linux RAID (1.2)", at: 0x1000, bytes: b"\xfc\x4e\x2b\xa9" },
    Mark { of: "Linux RAID (1.0)", at: -0x2000, bytes: b"\xfc\x4e\x2b\xa9" },
    Mark { of: "Linux RAID (0.90)", at: -0x1_0000, bytes: b"\xfc\x4e\x2b\xa9" },
    Mark { of: "ZFS", at: 0x2_0000, bytes: b"\x0c\xb1\xba\x00" },
    Mark { of: "ZFS", at: 0x2_0000, bytes: b"\x00\x00\x00\x00\x00\xba\xb1\x0c" },
    Mark { of: "ZFS", at: 0x1_ffd8, bytes: b"\x11\x7a\x0c\xb1\x7a\xda\x10\x02" },
    Mark { of: "NTFS", at: 3, bytes: b"NTFS    " },
    Mark { of: "exFAT", at: 3, bytes: b"EXFAT   " },
    Mark { of: "ISO 9660", at: 0x8001, bytes: b"CD001" },
    Mark { of: "UDF", at: 0x8001, bytes: b"BEA01" },
    Mark { of: "SquashFS", at: 0, bytes: b"hsqs" },
    Mark { of: "JFS", at: 0x8000, bytes: b"JFS1" },
    Mark { of: "ReiserFS", at: 0x1_0034, bytes: b"ReIsEr" },
    Mark { of: "NILFS2", at: 0x406, bytes: b"\x34\x34" },
    Mark { of: "dm-verity", at: 0, bytes: b"verity\0\0" },
    Mark { of: "dm-integrity", at: 0, bytes: b"integrt\0" },
    Mark { of: "a partition table (GPT)", at: 0x200, bytes: b"EFI PART" },
    Mark { of: "a partition table (GPT, 4 KiB sectors)", at: 0x1000, bytes: b"EFI PART" },
    Mark { of: "a partition table (GPT, backup)", at: -0x200, bytes: b"EFI PART" },
    // This mark comes last: FAT and others end their boot sector with it too.
    Mark { of: "a boot sector (partition table or FAT)", at: 0x1fe, bytes: b"\x55\xaa" },
];

/// Bytes of a device's start, and of its end, that must be searched.
pub(super) const LOOK: usize = 192 << 10;

/// Finds a mark in the first or last [`LOOK`] bytes, and returns the name of the system that writes
/// it. If the device is smaller, searches all of it.
pub(super) fn find(start: &[u8], end: &[u8]) -> Option<&'static str> {
    let found = |mark: &Mark| {
        let (place, at) = match usize::try_from(mark.at) {
            Ok(at) => (start, Some(at)),
            Err(_) => (end, end.len().checked_sub(mark.at.unsigned_abs() as usize)),
        };
        at.and_then(|at| place.get(at..)?.get(..mark.bytes.len())).is_some_and(|bytes| bytes == mark.bytes)
    };
    MARKS.iter().find(|mark| found(mark)).map(|mark| mark.of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_device_of_any_size_has_no_mark() {
        for bytes in [0, 512, 4096, LOOK] {
            assert_eq!(find(&vec![0; bytes], &vec![0; bytes]), None);
        }
    }

    #[test]
    fn every_mark_lies_within_what_is_looked_at() {
        for mark in MARKS {
            let mut place = [vec![0; LOOK], vec![0; LOOK]];
            let at = if mark.at < 0 { LOOK as i64 + mark.at } else { mark.at } as usize;
            place[usize::from(mark.at < 0)][at..at + mark.bytes.len()].copy_from_slice(mark.bytes);
            let [start, end] = &place;
            assert!(find(start, end).is_some(), "{}", mark.of);
        }
    }
}
