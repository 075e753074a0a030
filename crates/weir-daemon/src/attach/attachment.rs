//! A device that the kernel's NBD client has connected to the daemon. The daemon notes it down, so
//! that the next daemon can connect the device again.

use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use weir_core::Memory;

/// A connected device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Attachment {
    /// The device's number: 0 is `/dev/nbd0`.
    pub device: u32,
    /// The server's address: `unix:` with an absolute path, or `tcp:`.
    pub address: String,
    /// The export's name.
    pub name: String,
    /// The number of the device's connections.
    pub connections: u16,
    /// Seconds that one request may take before the kernel gives its connection up.
    pub request_timeout: u16,
    /// Seconds that requests wait for a new connection when none is left.
    pub reconnect_timeout: u16,
}

/// Writes the list into a memfd, for the keeper to hold.
///
/// # Errors
/// Fails when there is no memory.
pub fn write_note(list: &[Attachment]) -> io::Result<OwnedFd> {
    use rustix::fs::{MemfdFlags, SealFlags};
    let text = serde_json::to_vec(list)?;
    let fd = rustix::fs::memfd_create("weir-attached", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let file = File::from(fd);
    file.set_len(Memory::whole(text.len()) as u64)?;
    file.write_all_at(&text, 0)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file.into())
}

/// Reads a list that [`write_note`] has written.
///
/// # Errors
/// Fails when `note` holds no such list.
pub fn read_note(note: OwnedFd) -> io::Result<Vec<Attachment>> {
    let file = File::from(note);
    let mut text = vec![0; file.metadata()?.len() as usize];
    file.read_exact_at(&mut text, 0)?;
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    Ok(serde_json::from_slice(&text[..end])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attachment(device: u32) -> Attachment {
        Attachment {
            device,
            address: "unix:/run/weir/nbd.sock".into(),
            name: String::new(),
            connections: 2,
            request_timeout: 5,
            reconnect_timeout: 600,
        }
    }

    #[test]
    fn a_note_says_what_was_written_however_long() {
        for count in [0, 1, 3, 100] {
            let list: Vec<_> = (0..count).map(attachment).collect();
            let note = write_note(&list).expect("there is memory");
            assert_eq!(read_note(note).expect("it is a list"), list);
        }
    }
}
