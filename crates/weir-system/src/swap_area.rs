//! The header of a swap area, as mkswap writes it (include/linux/swap.h, `union swap_header`).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use weir_core::{ByteSize, PAGE_SIZE};

/// The label that `blkid` shows.
const LABEL: &[u8] = b"weir";
const MAGIC: &[u8; 10] = b"SWAPSPACE2";
const VERSION: u32 = 1;

// Offsets of the header's fields in the first page. The page's first 1024 bytes belong to a boot
// sector.
const AT_VERSION: usize = 1024;
const AT_LAST_PAGE: usize = 1028;
const AT_UUID: usize = 1036;
const AT_LABEL: usize = 1052;
const AT_MAGIC: usize = PAGE_SIZE - MAGIC.len();

/// The first page of a swap area of `pages` pages. `None` if the area has no page besides the first
/// one, or more pages than the header can count.
fn header(pages: u64, uuid: [u8; 16]) -> Option<[u8; PAGE_SIZE]> {
    let last = u32::try_from(pages.checked_sub(1)?).ok().filter(|last| *last > 0)?;
    let mut page = [0; PAGE_SIZE];
    let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
    put(AT_VERSION, &VERSION.to_ne_bytes());
    put(AT_LAST_PAGE, &last.to_ne_bytes());
    put(AT_UUID, &uuid);
    put(AT_LABEL, LABEL);
    put(AT_MAGIC, MAGIC);
    Some(page)
}

/// Makes all of a device a swap area.
///
/// # Errors
/// Fails when the device cannot be written or is too small or too large, or when the kernel's pages
/// do not have 4096 bytes.
pub fn make(device: &Path, size: ByteSize) -> io::Result<()> {
    check(rustix::param::page_size())?;
    let file = OpenOptions::new().read(true).write(true).open(device)?;
    write(&file, size.0)
}

/// Refuses a kernel whose pages do not have 4096 bytes. Such a kernel would look for the magic
/// bytes at the end of a page of its own size.
fn check(page: usize) -> io::Result<()> {
    if page != PAGE_SIZE {
        return Err(io::Error::other(format!("this kernel's pages have {page} bytes, not {PAGE_SIZE}")));
    }
    Ok(())
}

/// Writes the header of a swap area that takes the whole device, which has `bytes` bytes.
///
/// # Errors
/// Fails with the error of the write to the device; with `InvalidInput` if the device is too small
/// or too large for a swap area.
fn write(device: &File, bytes: u64) -> io::Result<()> {
    let page = header(bytes / PAGE_SIZE as u64, random_uuid()?).ok_or(io::ErrorKind::InvalidInput)?;
    device.write_all_at(&page, 0)?;
    device.sync_all()
}

/// Makes a random UUID of version 4 (RFC 9562).
fn random_uuid() -> io::Result<[u8; 16]> {
    let mut uuid = [0; 16];
    rustix::rand::getrandom(&mut uuid, rustix::rand::GetRandomFlags::empty())?;
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    Ok(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn blkid_reads_what_is_written() {
        let path = std::env::temp_dir().join(format!("weir-swap-area-{}", std::process::id()));
        let file = File::create_new(&path).expect("a file");
        file.set_len(1 << 20).expect("its size");
        write(&file, 1 << 20).expect("the header");
        let output = Command::new("/sbin/blkid").args(["-p", "-o", "export"]).arg(&path).output();
        let swaplabel = Command::new("/sbin/swaplabel").arg(&path).output();
        std::fs::remove_file(&path).expect("removed");
        let (Ok(blkid), Ok(swaplabel)) = (output, swaplabel) else {
            println!("skipped: no blkid or no swaplabel");
            return;
        };
        let text = String::from_utf8_lossy(&blkid.stdout).into_owned();
        for line in ["TYPE=swap", "VERSION=1", "LABEL=weir"] {
            assert!(text.lines().any(|seen| seen == line), "{text}");
        }
        let label = String::from_utf8_lossy(&swaplabel.stdout).into_owned();
        assert!(label.contains("LABEL: weir"), "{label}");
    }

    #[test]
    fn no_area_is_made_where_none_fits() {
        for pages in [0, 1, 1 << 33] {
            assert_eq!(header(pages, [0; 16]), None, "{pages} pages");
        }
        assert!(header(2, [0; 16]).is_some());
        let error = check(16384).unwrap_err().to_string();
        assert_eq!(error, "this kernel's pages have 16384 bytes, not 4096");
        check(4096).unwrap();
    }
}
