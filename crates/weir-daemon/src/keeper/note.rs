//! Notes that a daemon leaves to the next: JSON in a memfd that the keeper holds. A note is
//! replaced as a whole, so the next daemon reads the old note or the new one, never a part.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use weir_core::{Memory, sealed_memfd};

/// Writes a note into a memfd that a keeper takes.
///
/// # Errors
/// Fails when there is no memory.
pub fn write_note(note: &impl Serialize) -> io::Result<OwnedFd> {
    let text = serde_json::to_vec(note)?;
    let file = File::from(sealed_memfd("weir-note", Memory::whole(text.len()))?);
    file.write_all_at(&text, 0)?;
    Ok(file.into())
}

/// Reads what [`write_note`] wrote.
///
/// # Errors
/// Fails when the memfd holds no such note.
pub fn read_note<T: DeserializeOwned>(note: OwnedFd) -> io::Result<T> {
    let file = File::from(note);
    let mut text = vec![0; file.metadata()?.len() as usize];
    file.read_exact_at(&mut text, 0)?;
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    Ok(serde_json::from_slice(&text[..end])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_says_what_was_written_however_long() {
        for count in [0, 1, 3, 5000] {
            let list: Vec<_> = (0..count).map(|number| format!("device {number}")).collect();
            let note = write_note(&list).expect("there is memory");
            assert_eq!(read_note::<Vec<String>>(note).expect("it is a list"), list);
        }
    }
}
