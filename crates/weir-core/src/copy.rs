//! Copies of a page between memory of this program alone and memory that others may access at the
//! same moment.
//!
//! A plain `memcpy` of bytes that another thread writes is undefined behaviour in Rust, even if the
//! result is thrown away. The copies of this module are defined. On x86-64 a copy is one `rep
//! movsb`, which the compiler does not look into. It is as fast as memcpy there ("fast short rep
//! mov"). On other processors a copy goes word by word through relaxed atomics. A copy that raced
//! with a write may be torn, and then fails its checksum.

use crate::{PAGE_SIZE, PageBytes};

/// Prefetches a quarter of the page at `shared` for writing, as [`prefetch`](crate::prefetch) does
/// for reading. It is a hint that neither reads nor writes, so any address is allowed.
#[inline]
pub fn prefetch_for_write(shared: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for line in (0..PAGE_SIZE / 4).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        // SAFETY: a hint that touches no memory of the program; processors without it treat it as a
        // no-op.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(shared.wrapping_add(line).cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = shared;
}

/// Copies `page` to shared memory.
///
/// # Safety
/// `shared` must be valid for writes of [`PAGE_SIZE`] bytes, 8-byte aligned, and must not overlap
/// `page`.
#[inline]
pub unsafe fn page_to_shared(shared: *mut u8, page: &PageBytes) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the signature and the caller guarantee both ranges; the ABI guarantees that the
    // direction flag is clear.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rdi") shared => _, inout("rsi") page.as_ptr() => _, inout("rcx") PAGE_SIZE => _,
            options(nostack, preserves_flags),
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    for (at, word) in page.chunks_exact(8).enumerate() {
        let word = u64::from_ne_bytes(word.try_into().expect("chunk of 8"));
        // SAFETY: the loop stays within the page, and the caller guarantees the alignment.
        unsafe { std::sync::atomic::AtomicU64::from_ptr(shared.cast::<u64>().add(at)) }
            .store(word, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Copies `page` to shared memory past the caches. It is meant for many pages at once, none of
/// which is read soon. Memory that is not in the cache is written without being read first (230 ns
/// a page on the test host, 400 by [`page_to_shared`]). But other threads may see these stores in
/// any order. They may read only after [`settle`], which waits for all of the stores; any atomic
/// read-modify-write also waits for them.
///
/// # Safety
/// The same as for [`page_to_shared`]; and `shared` must be 16-byte aligned.
#[inline]
pub unsafe fn page_past_caches(shared: *mut u8, page: &PageBytes) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the signature and the caller guarantee both ranges, and 64 divides their length; SSE2
    // is in every x86-64.
    unsafe {
        std::arch::asm!(
            "2:",
            "movdqu {a}, [{from}]",
            "movdqu {b}, [{from} + 16]",
            "movdqu {c}, [{from} + 32]",
            "movdqu {d}, [{from} + 48]",
            "movntdq [{to}], {a}",
            "movntdq [{to} + 16], {b}",
            "movntdq [{to} + 32], {c}",
            "movntdq [{to} + 48], {d}",
            "add {from}, 64",
            "add {to}, 64",
            "sub {left}, 64",
            "jnz 2b",
            from = inout(reg) page.as_ptr() => _, to = inout(reg) shared => _, left = inout(reg) PAGE_SIZE => _,
            a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
            options(nostack),
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: the caller guarantees the range.
    unsafe {
        page_to_shared(shared, page);
    }
}

/// Waits until pages that this thread has copied by [`page_past_caches`] are visible to others.
#[inline]
pub fn settle() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: SSE is in every x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Copies a page from shared memory.
///
/// # Safety
/// `shared` must be valid for reads of [`PAGE_SIZE`] bytes, 8-byte aligned, and must not overlap
/// `page`.
#[inline]
pub unsafe fn page_from_shared(page: &mut PageBytes, shared: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: as in `page_to_shared`: the signature and the caller guarantee both ranges.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rdi") page.as_mut_ptr() => _, inout("rsi") shared => _, inout("rcx") PAGE_SIZE => _,
            options(nostack, preserves_flags),
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    for (at, word) in page.chunks_exact_mut(8).enumerate() {
        // SAFETY: as in `page_to_shared`: the loop stays within the page.
        let shared =
            unsafe { std::sync::atomic::AtomicU64::from_ptr(shared.cast::<u64>().cast_mut().add(at)) };
        word.copy_from_slice(&shared.load(std::sync::atomic::Ordering::Relaxed).to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Page;

    #[test]
    fn a_page_survives_the_way_out_and_in() {
        let mut page = Page::zeroed();
        for (at, byte) in page.iter_mut().enumerate() {
            *byte = (at * 7 + at / 256) as u8;
        }
        let (mut shared, mut back) = (Box::new(Page::zeroed()), Page::zeroed());
        // SAFETY: both are pages of this test, and they do not overlap.
        unsafe {
            page_to_shared(shared.as_mut_ptr(), &page);
            page_from_shared(&mut back, shared.as_ptr());
        }
        assert!(page == back && *shared == page);
        shared.fill(0);
        // SAFETY: both are pages of this test, and they do not overlap.
        unsafe { page_past_caches(shared.as_mut_ptr(), &page) };
        settle();
        assert!(*shared == page, "past the caches");
    }
}
