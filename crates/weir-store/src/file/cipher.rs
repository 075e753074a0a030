//! AES-256-XTS (IEEE Std 1619-2018) with a key that is never written to disk. After the store is
//! closed, nobody can decrypt its content, not even Weir. The key lies in a memfd, which a keeper
//! can pass from one daemon to the next. The key is gone when the last process closes the memfd.
//!
//! The mode is XTS because a slot is written again and again under one number, with no room beside
//! it for a nonce. A stream cipher would encrypt the old and the new content with one key stream,
//! which reveals both: an SSD still holds old blocks for a while. The tweak is the slot's number.
//! XTS hides content, but does not protect against changes; Weir's checksums notice those.
//!
//! Weir implements the mode itself, because a page is 256 independent blocks. It computes all
//! tweaks first, and then one call fills the processor's AES pipeline with eight blocks at a time.
//! Measured on a Xeon with AES-NI: 1.1 us a page. The crate `xts-mode` goes block after block and
//! takes 15 to 18 us; the tests compare with it.

use aes::Aes256;
use aes::cipher::{Array, Block, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use rustix::rand::GetRandomFlags;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use weir_core::{Memory, PAGE_SIZE, PageBytes, Slot};

type AesBlock = Block<Aes256>;

const BLOCKS: usize = PAGE_SIZE / size_of::<AesBlock>();

/// A key for content and a key for tweaks, both expanded. `Aes256` erases itself when dropped.
struct Keys {
    content: Aes256,
    tweak: Aes256,
}

/// A cipher with random keys. They lie in locked memory that no core dump shows, and are erased
/// when the cipher is dropped.
pub(super) struct Cipher {
    keys: NonNull<Keys>,
    /// Owns the memory that `keys` points to.
    memory: Memory,
    /// The random key, [`SECRET`] bytes, for the next daemon.
    secret: Memory,
}

/// Bytes of an XTS key: one AES-256 key for content, one for tweaks.
const SECRET: usize = 64;

// SAFETY: after construction the keys are only read, and `Keys` itself is Send.
unsafe impl Send for Cipher {}
// SAFETY: after construction the keys are only read, and `Keys` itself is Sync.
unsafe impl Sync for Cipher {}

impl Cipher {
    /// A cipher with a new key.
    pub(super) fn ephemeral() -> io::Result<Self> {
        let secret = Memory::shared("weir-key", PAGE_SIZE)?;
        // SAFETY: the mapping has a page, and nothing else refers to it yet.
        let bytes = unsafe { std::slice::from_raw_parts_mut(secret.as_ptr(), SECRET) };
        let mut filled = 0;
        while filled < SECRET {
            filled += rustix::rand::getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
        }
        Self::with_secret(secret)
    }

    /// The cipher of a daemon that has ended, from its [`secret`](Cipher::secret).
    pub(super) fn adopt(secret: OwnedFd) -> io::Result<Self> {
        Self::with_secret(Memory::adopt(secret)?)
    }

    fn with_secret(secret: Memory) -> io::Result<Self> {
        const { assert!(size_of::<Keys>() <= PAGE_SIZE && align_of::<Keys>() <= PAGE_SIZE) };
        let memory = Memory::anonymous(PAGE_SIZE)?;
        let half = |at: usize| {
            let mut half = [0; SECRET / 2];
            // SAFETY: the range lies within the page that holds the key. Nobody writes that page
            // again after the key was drawn.
            unsafe { half.as_mut_ptr().copy_from_nonoverlapping(secret.as_ptr().add(at), half.len()) };
            Array(half)
        };
        let (mut content, mut tweak) = (half(0), half(SECRET / 2));
        let keys = NonNull::new(memory.as_ptr().cast::<Keys>()).expect("a mapping is never null");
        // SAFETY: the memory is page-aligned, large enough by the assertion, and nothing else uses
        // the mapping.
        unsafe { keys.write(Keys { content: Aes256::new(&content), tweak: Aes256::new(&tweak) }) };
        erase(&mut content.0);
        erase(&mut tweak.0);
        Ok(Cipher { keys, memory, secret })
    }

    /// The memfd with the key. The kernel clears it when the last process closes it.
    pub(super) fn secret(&self) -> BorrowedFd<'_> {
        self.secret.fd().expect("the key lies in a memfd")
    }

    /// Whether the keys are locked in RAM. False if `RLIMIT_MEMLOCK` forbids it.
    pub(super) fn is_locked(&self) -> bool {
        self.memory.is_locked() && self.secret.is_locked()
    }

    fn keys(&self) -> &Keys {
        // SAFETY: the keys were written at construction, never move, and are dropped only with
        // `self`.
        unsafe { self.keys.as_ref() }
    }

    /// Encrypts `page`, which lies in `slot`, into `out`.
    pub(super) fn encrypt(&self, slot: Slot, page: &PageBytes, out: &mut PageBytes) {
        let tweaks = self.tweaks(slot);
        for ((out, block), tweak) in out.chunks_exact_mut(16).zip(page.chunks_exact(16)).zip(&tweaks) {
            out.copy_from_slice(&(word(block) ^ tweak).to_le_bytes());
        }
        self.keys().content.encrypt_blocks(AesBlock::slice_as_chunks_mut(out).0);
        mask(out, &tweaks);
    }

    /// Decrypts the content of `slot`.
    pub(super) fn decrypt(&self, slot: Slot, page: &mut PageBytes) {
        let tweaks = self.tweaks(slot);
        mask(page, &tweaks);
        self.keys().content.decrypt_blocks(AesBlock::slice_as_chunks_mut(page).0);
        mask(page, &tweaks);
    }

    /// The mask of each block: the encrypted slot number times x^j in GF(2^128), by IEEE 1619
    /// section 5.2.
    #[inline]
    fn tweaks(&self, slot: Slot) -> [u128; BLOCKS] {
        let mut first: AesBlock = Array(u128::from(slot.0).to_le_bytes());
        self.keys().tweak.encrypt_block(&mut first);
        let mut tweak = u128::from_le_bytes(first.0);
        [(); BLOCKS].map(|()| {
            let this = tweak;
            // Uses x^128 = x^7 + x^2 + x + 1, without a branch: the time must not reveal the tweak.
            let carry = ((tweak as i128) >> 127) as u128;
            tweak = (tweak << 1) ^ (carry & 0x87);
            this
        })
    }
}

impl Drop for Cipher {
    fn drop(&mut self) {
        // SAFETY: the keys were written at construction and are not used after this.
        unsafe { self.keys.drop_in_place() };
        // SAFETY: this value owns the whole mapping, and no typed value lies in it any more.
        erase(unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.memory.len()) });
    }
}

impl std::fmt::Debug for Cipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cipher(AES-256-XTS)")
    }
}

fn word(block: &[u8]) -> u128 {
    u128::from_le_bytes(block.try_into().expect("a block of 16 bytes"))
}

fn mask(page: &mut PageBytes, tweaks: &[u128; BLOCKS]) {
    for (block, tweak) in page.chunks_exact_mut(16).zip(tweaks) {
        block.copy_from_slice(&(word(block) ^ tweak).to_le_bytes());
    }
}

/// Overwrites the bytes with zeros, which the compiler must not remove.
fn erase(bytes: &mut [u8]) {
    bytes.fill(0);
    std::hint::black_box(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn with_key(key: &[u8; SECRET]) -> Cipher {
        let secret = Memory::shared("weir-test-key", PAGE_SIZE).unwrap();
        // SAFETY: the mapping has a page, and only this thread knows it.
        unsafe { secret.as_ptr().copy_from_nonoverlapping(key.as_ptr(), SECRET) };
        Cipher::with_secret(secret).unwrap()
    }

    fn hex<const N: usize>(text: &str) -> [u8; N] {
        std::array::from_fn(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap())
    }

    #[test]
    fn the_first_blocks_are_those_of_ieee_1619_vector_10() {
        // The test vector is IEEE 1619 Annex B, vector 10: XTS-AES-256, data unit ff, content 00 01
        // 02 .. ff.
        let key = hex::<64>(concat!(
            "2718281828459045235360287471352662497757247093699959574966967627",
            "3141592653589793238462643383279502884197169399375105820974944592"
        ));
        let page: PageBytes = std::array::from_fn(|at| at as u8);
        let mut out = [0; PAGE_SIZE];
        with_key(&key).encrypt(Slot(0xff), &page, &mut out);
        assert_eq!(out[..32], hex::<32>("1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn it_agrees_with_another_implementation_and_undoes_itself(
            key in proptest::array::uniform32(any::<u8>()), slot: u32, seed: u32,
        ) {
            let key: [u8; 64] = std::array::from_fn(|at| key[at % 32].wrapping_add(at as u8));
            let page: PageBytes = std::array::from_fn(|at| ((at as u32 * 31) ^ seed) as u8);
            let cipher = with_key(&key);
            let mut out = [0; PAGE_SIZE];
            cipher.encrypt(Slot(slot), &page, &mut out);

            let half = |at: usize| Aes256::new(&Array(<[u8; 32]>::try_from(&key[at..at + 32]).unwrap()));
            let oracle = xts_mode::Xts128::new(half(0), half(32));
            let mut expected = page;
            oracle.encrypt_sector(&mut expected, xts_mode::get_tweak_default(slot.into()));
            prop_assert!(out == expected);

            cipher.decrypt(Slot(slot), &mut out);
            prop_assert!(out == page);
        }
    }

    #[test]
    fn the_next_daemon_reads_what_the_last_one_wrote() {
        let (first, page) = (Cipher::ephemeral().unwrap(), [7; PAGE_SIZE]);
        let mut out = [0; PAGE_SIZE];
        first.encrypt(Slot(9), &page, &mut out);
        let kept = first.secret().try_clone_to_owned().unwrap();
        drop(first);
        Cipher::adopt(kept).unwrap().decrypt(Slot(9), &mut out);
        assert!(out == page);
    }

    #[test]
    fn no_two_ciphers_share_a_key_and_no_two_slots_a_tweak() {
        let (first, second) = (Cipher::ephemeral().unwrap(), Cipher::ephemeral().unwrap());
        let encrypt = |cipher: &Cipher, slot| {
            let mut out = [0; PAGE_SIZE];
            cipher.encrypt(Slot(slot), &[0; PAGE_SIZE], &mut out);
            out
        };
        assert!(encrypt(&first, 0) == encrypt(&first, 0));
        assert!(encrypt(&first, 0) != encrypt(&first, 1));
        assert!(encrypt(&first, 0) != encrypt(&second, 0));
    }
}
