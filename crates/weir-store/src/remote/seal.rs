//! The sealed form in which a node keeps a page: AES-256-GCM with a key that ends with the store.
//!
//! ```text
//! 0         8                         4104          4120
//! +---------+-------------------------+-------------+
//! |  stamp  |  page, encrypted        |  tag        |
//! +---------+-------------------------+-------------+
//! ```
//!
//! The nonce is the stamp: the number of the write, which no other write has. The tag also covers
//! the stamp and the slot. So a value that was changed, moved to another slot or made up cannot be
//! opened. A value that is older than the acknowledged write has an older stamp.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use rustix::rand::GetRandomFlags;
use std::io;
use std::ptr::NonNull;
use weir_core::{Memory, PAGE_SIZE, PageBytes, Slot};

const STAMP: usize = size_of::<u64>();
const TAG: usize = 16;

/// Bytes of a sealed page.
pub(super) const SEALED: usize = STAMP + PAGE_SIZE + TAG;

/// The error for a value that is not a page of this store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Forged;

/// The key, in locked memory that core files leave out.
pub(super) struct Seal {
    key: NonNull<LessSafeKey>,
    memory: Memory,
}

// SAFETY: after construction the key is only read, and `LessSafeKey` is Send.
unsafe impl Send for Seal {}
// SAFETY: after construction the key is only read, and `LessSafeKey` is Sync.
unsafe impl Sync for Seal {}

impl Seal {
    /// Makes a new random key to encrypt pages with. It is never written to any file.
    pub(super) fn ephemeral() -> io::Result<Self> {
        const { assert!(size_of::<LessSafeKey>() <= PAGE_SIZE && align_of::<LessSafeKey>() <= PAGE_SIZE) };
        let mut secret = [0; 32];
        let mut filled = 0;
        while filled < secret.len() {
            filled += rustix::rand::getrandom(&mut secret[filled..], GetRandomFlags::empty())?;
        }
        let memory = Memory::anonymous(PAGE_SIZE)?;
        let key = NonNull::new(memory.as_ptr().cast::<LessSafeKey>()).expect("a mapping is never null");
        let unbound = UnboundKey::new(&AES_256_GCM, &secret).expect("32 bytes are a key");
        // SAFETY: page-aligned, large enough by the assertion, and nothing else uses the mapping.
        unsafe { key.write(LessSafeKey::new(unbound)) };
        std::hint::black_box(&mut secret).fill(0);
        Ok(Seal { key, memory })
    }

    fn key(&self) -> &LessSafeKey {
        // SAFETY: the key was written at construction. It never moves, and is erased only with
        // `self`.
        unsafe { self.key.as_ref() }
    }

    /// Seals `page` for `slot` as write number `stamp`, into `sealed`. Two calls with different
    /// pages or slots must not have the same stamp.
    pub(super) fn close(&self, slot: Slot, stamp: u64, page: &PageBytes, sealed: &mut [u8; SEALED]) {
        let (head, rest) = sealed.split_at_mut(STAMP);
        let (content, tag) = rest.split_at_mut(PAGE_SIZE);
        head.copy_from_slice(&stamp.to_le_bytes());
        content.copy_from_slice(page);
        let made = self
            .key()
            .seal_in_place_separate_tag(nonce(stamp), Aad::from(slot.0.to_le_bytes()), content)
            .expect("a page is far below the cipher's limit");
        tag.copy_from_slice(made.as_ref());
    }

    /// Opens a value that a node returned for `slot`, into `page`. Returns the value's stamp.
    pub(super) fn open(&self, slot: Slot, sealed: &[u8], page: &mut PageBytes) -> Result<u64, Forged> {
        let sealed: &[u8; SEALED] = sealed.try_into().map_err(|_| Forged)?;
        let stamp = u64::from_le_bytes(sealed[..STAMP].try_into().expect("eight bytes"));
        page.copy_from_slice(&sealed[STAMP..STAMP + PAGE_SIZE]);
        let tag = Tag::try_from(&sealed[STAMP + PAGE_SIZE..]).map_err(|_| Forged)?;
        self.key()
            .open_in_place_separate_tag(nonce(stamp), Aad::from(slot.0.to_le_bytes()), tag, page, 0..)
            .map_err(|_| Forged)?;
        Ok(stamp)
    }
}

impl Drop for Seal {
    fn drop(&mut self) {
        // SAFETY: the crate `ring` keeps no other pointer to the key, and nobody reads the key any
        // more. The whole mapping belongs to `self`.
        unsafe { std::ptr::write_bytes(self.memory.as_ptr(), 0, PAGE_SIZE) };
        std::hint::black_box(&self.memory);
    }
}

fn nonce(stamp: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[..STAMP].copy_from_slice(&stamp.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_opens_in_its_slot_as_it_was() {
        let seal = Seal::ephemeral().unwrap();
        let (page, mut sealed, mut opened) = ([7; PAGE_SIZE], [0; SEALED], [0; PAGE_SIZE]);
        seal.close(Slot(3), 41, &page, &mut sealed);
        assert_eq!(seal.open(Slot(3), &sealed, &mut opened), Ok(41));
        assert_eq!(opened, page);
        let same = sealed[STAMP..].iter().filter(|&&byte| byte == 7).count();
        assert!(same < PAGE_SIZE / 64, "{same} bytes are in the clear");
    }

    #[test]
    fn a_value_that_was_changed_moved_or_made_up_does_not_open() {
        let seal = Seal::ephemeral().unwrap();
        let (page, mut sealed, mut opened) = ([7; PAGE_SIZE], [0; SEALED], [0; PAGE_SIZE]);
        seal.close(Slot(3), 41, &page, &mut sealed);
        for at in [0, STAMP - 1, STAMP, STAMP + PAGE_SIZE - 1, STAMP + PAGE_SIZE, SEALED - 1] {
            let mut changed = sealed;
            changed[at] ^= 1;
            assert_eq!(seal.open(Slot(3), &changed, &mut opened), Err(Forged), "byte {at}");
        }
        assert_eq!(seal.open(Slot(4), &sealed, &mut opened), Err(Forged), "of another slot");
        assert_eq!(seal.open(Slot(3), &sealed[1..], &mut opened), Err(Forged), "too short");
        let other = Seal::ephemeral().unwrap();
        assert_eq!(other.open(Slot(3), &sealed, &mut opened), Err(Forged), "of another store");
    }
}
