//! Copies of pages through the PCIe window.
//!
//! A large BAR is mapped write-combining: the processor may gather stores and send whole lines, but
//! it caches nothing. This has two consequences for the copies.
//!
//! *Writes* are posted. A non-temporal 64-byte store leaves as one full-line packet, and the
//! processor does not wait for it. So a page takes 64 stores and one `sfence`. After the fence the
//! page is on its way, before any later store.
//!
//! *Reads* are a round trip each (1.5 us on the H200). A plain load asks for 8 to 32 bytes and
//! waits: 74 us a page. `movntdqa` fetches a whole line into a fill buffer, and one line for each
//! fill buffer can be under way at once. That takes 5.3 us a page: 64 lines, with about 18 in
//! flight.

use std::sync::OnceLock;
use weir_core::PAGE_SIZE;

/// A function that copies one page. Both pointers must be valid for a page, and the device's side
/// aligned to 64 bytes.
type CopyPage = unsafe fn(src: *const u8, dst: *mut u8);

/// The copy functions with the widest instructions of this processor.
#[derive(Clone, Copy, Debug)]
pub struct Copies {
    /// The name of the instructions that the functions use, for reports.
    pub name: &'static str,
    to_device: CopyPage,
    from_device: CopyPage,
}

impl Copies {
    /// The best copy functions for this processor, found once.
    pub fn detect() -> Self {
        static BEST: OnceLock<Copies> = OnceLock::new();
        *BEST.get_or_init(|| Copies::all()[0])
    }

    /// All copy functions that run on this processor, the best first; never empty. For benchmarks
    /// and tests.
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            use x86::*;
            if is_x86_feature_detected!("avx512f") {
                all.push(Copies { name: "avx512", to_device: store_512, from_device: load_512 });
            }
            if is_x86_feature_detected!("avx2") {
                all.push(Copies { name: "avx2", to_device: store_256, from_device: load_256 });
            }
            if is_x86_feature_detected!("sse4.1") {
                all.push(Copies { name: "sse4.1", to_device: store_128, from_device: load_128 });
            }
        }
        all.push(Copies { name: "plain", to_device: plain, from_device: plain });
        all
    }

    /// Prefetches the code of a copy.
    #[inline]
    pub fn prefetch(&self, to_device: bool) {
        let code = if to_device { self.to_device } else { self.from_device };
        prefetch_lines(code as *const u8, 3);
    }

    /// Stores a page into device memory and makes it globally visible: the device sees this
    /// thread's later stores, such as a doorbell, after the page.
    ///
    /// # Safety
    /// `src` and `dst` must be valid for a page and not overlap, and `dst` must be aligned to 64
    /// bytes.
    #[inline]
    pub unsafe fn to_device(&self, src: *const u8, dst: *mut u8) {
        // SAFETY: the caller guarantees the pointers; the instructions were detected before the
        // function was chosen.
        unsafe { (self.to_device)(src, dst) };
        fence_stores();
    }

    /// Loads a page from device memory afresh: no line that an earlier load fetched is used again.
    ///
    /// # Safety
    /// `src` and `dst` must be valid for a page and not overlap, and `src` must be aligned to 64
    /// bytes.
    #[inline]
    pub unsafe fn from_device(&self, src: *const u8, dst: *mut u8) {
        fence_loads();
        // SAFETY: the caller guarantees the pointers; the instructions were detected before the
        // function was chosen.
        unsafe { (self.from_device)(src, dst) }
    }
}

/// Stores 64 bytes past the cache. On x86-64 the processor gathers them in a buffer and sends them
/// to the card as one packet.
///
/// # Safety
/// `dst` must be valid for 64 bytes and aligned to 64.
#[inline]
pub unsafe fn store_line(line: &[u64; 8], dst: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE2 is part of x86-64; the caller guarantees `dst`, and `line` holds 64 bytes.
    unsafe {
        use std::arch::x86_64::*;
        for quarter in 0..4 {
            let from = line.as_ptr().cast::<__m128i>().add(quarter);
            _mm_stream_si128(dst.cast::<__m128i>().add(quarter), _mm_loadu_si128(from));
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller guarantees `dst`, whose alignment suffices for words.
    unsafe {
        for (word, value) in line.iter().enumerate() {
            dst.cast::<u64>().add(word).write_volatile(*value);
        }
    }
}

/// Prefetches lines of code or data at any address, without reading them.
#[inline]
pub fn prefetch_lines(at: *const u8, lines: usize) {
    for line in 0..lines {
        let at = at.wrapping_add(line * 64);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch has no visible effect, whatever the address.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast::<i8>());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }
}

/// A store fence: every earlier store, also non-temporal ones, is visible before any later store.
#[inline]
pub fn fence_stores() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// A full fence. The processor may answer a streaming load from a buffer that an earlier streaming
/// load filled, and the fence empties that buffer (Intel SDM, volume 1, 12.10.3).
#[inline]
fn fence_loads() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE2 is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_mfence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// Copies without streaming instructions: correct, and slow on real device memory.
unsafe fn plain(src: *const u8, dst: *mut u8) {
    // SAFETY: the caller guarantees the pointers.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, PAGE_SIZE) }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Copy functions, one pair for each width of register. They issue all loads of a group before
    //! the group's first store, so that the processor's fill buffers stay busy.
    //!
    //! The compiler must not unroll the loops over groups. A page that comes after a pause finds
    //! the code out of the cache. A kilobyte of straight code would then cost more cache misses
    //! than the page.

    use std::arch::x86_64::*;
    use std::hint::black_box;
    use weir_core::PAGE_SIZE;

    #[target_feature(enable = "avx512f")]
    pub unsafe fn store_512(src: *const u8, dst: *mut u8) {
        // SAFETY: both sides hold a page; `dst` is aligned to 64 bytes.
        unsafe {
            for group in 0..black_box(PAGE_SIZE / 64 / 4) {
                for line in group * 4..group * 4 + 4 {
                    let value = _mm512_loadu_si512(src.cast::<__m512i>().add(line));
                    _mm512_stream_si512(dst.cast::<__m512i>().add(line), value);
                }
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    pub unsafe fn load_512(src: *const u8, dst: *mut u8) {
        const GROUP: usize = 16;
        let (src, dst) = (src.cast::<__m512i>(), dst.cast::<__m512i>());
        // SAFETY: both sides hold a page; `src` is aligned to 64 bytes.
        unsafe {
            for group in 0..black_box(PAGE_SIZE / 64 / GROUP) {
                let mut lines = [_mm512_setzero_si512(); GROUP];
                for (at, line) in lines.iter_mut().enumerate() {
                    *line = _mm512_stream_load_si512(src.add(group * GROUP + at));
                }
                for (at, line) in lines.iter().enumerate() {
                    _mm512_storeu_si512(dst.add(group * GROUP + at), *line);
                }
            }
        }
    }

    #[target_feature(enable = "avx2")]
    pub unsafe fn store_256(src: *const u8, dst: *mut u8) {
        // SAFETY: both sides hold a page; `dst` is aligned to 64 bytes.
        unsafe {
            for group in 0..black_box(PAGE_SIZE / 32 / 8) {
                for half in group * 8..group * 8 + 8 {
                    let value = _mm256_loadu_si256(src.cast::<__m256i>().add(half));
                    _mm256_stream_si256(dst.cast::<__m256i>().add(half), value);
                }
            }
        }
    }

    #[target_feature(enable = "avx2")]
    pub unsafe fn load_256(src: *const u8, dst: *mut u8) {
        const GROUP: usize = 8;
        let (src, dst) = (src.cast::<__m256i>(), dst.cast::<__m256i>());
        // SAFETY: both sides hold a page; `src` is aligned to 64 bytes.
        unsafe {
            for group in 0..black_box(PAGE_SIZE / 32 / GROUP) {
                let mut halves = [_mm256_setzero_si256(); GROUP];
                for (at, half) in halves.iter_mut().enumerate() {
                    *half = _mm256_stream_load_si256(src.add(group * GROUP + at));
                }
                for (at, half) in halves.iter().enumerate() {
                    _mm256_storeu_si256(dst.add(group * GROUP + at), *half);
                }
            }
        }
    }

    #[target_feature(enable = "sse2")]
    pub unsafe fn store_128(src: *const u8, dst: *mut u8) {
        // SAFETY: both sides hold a page; `dst` is aligned to 64 bytes.
        unsafe {
            for quarter in 0..PAGE_SIZE / 16 {
                let value = _mm_loadu_si128(src.cast::<__m128i>().add(quarter));
                _mm_stream_si128(dst.cast::<__m128i>().add(quarter), value);
            }
        }
    }

    #[target_feature(enable = "sse4.1")]
    pub unsafe fn load_128(src: *const u8, dst: *mut u8) {
        const GROUP: usize = 8;
        let (src, dst) = (src.cast::<__m128i>(), dst.cast::<__m128i>());
        // SAFETY: both sides hold a page; `src` is aligned to 64 bytes.
        unsafe {
            for group in 0..black_box(PAGE_SIZE / 16 / GROUP) {
                let mut quarters = [_mm_setzero_si128(); GROUP];
                for (at, quarter) in quarters.iter_mut().enumerate() {
                    *quarter = _mm_stream_load_si128(src.add(group * GROUP + at));
                }
                for (at, quarter) in quarters.iter().enumerate() {
                    _mm_storeu_si128(dst.add(group * GROUP + at), *quarter);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use weir_core::Page;

    proptest! {
        #[test]
        fn every_width_copies_every_byte_wherever_the_other_side_lies(seed: u64, offset in 0usize..64) {
            // The host's side of a copy may have any alignment, as in a network's buffer. Only the
            // device's side is aligned.
            let mut random = seed | 1;
            let mut plain = vec![0u8; PAGE_SIZE + 64];
            for byte in &mut plain {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                *byte = (random >> 56) as u8;
            }
            for copies in Copies::all() {
                let mut device = Page::zeroed();
                let mut back = vec![0xa5u8; PAGE_SIZE + 64];
                // SAFETY: every buffer holds a page after the offset, and a Page is aligned to
                // 4096.
                unsafe {
                    copies.to_device(plain.as_ptr().add(offset), device.as_mut_ptr());
                    copies.from_device(device.as_ptr(), back.as_mut_ptr().add(offset));
                }
                prop_assert_eq!(&device[..], &plain[offset..offset + PAGE_SIZE], "{} to", copies.name);
                prop_assert_eq!(&back[offset..offset + PAGE_SIZE], &device[..], "{} from", copies.name);
                prop_assert!(back[..offset].iter().all(|&byte| byte == 0xa5), "{} before", copies.name);
                prop_assert!(back[offset + PAGE_SIZE..].iter().all(|&byte| byte == 0xa5), "{} after", copies.name);
            }
        }
    }
}
