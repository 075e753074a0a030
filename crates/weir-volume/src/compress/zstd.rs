//! Zstandard in memory that is taken once. A context in a buffer of Weir's own never asks for more
//! (`ZSTD_initStaticCCtx`, zstd.h).

use std::io;
use std::ptr::NonNull;
use weir_core::{PAGE_SIZE, PageBytes};
use zstd_sys as sys;

/// The compression level. zram's default is level 3, which takes half as long again and makes pages
/// only a few per cent smaller.
const LEVEL: i32 = 1;

/// Memory for a zstd context, aligned as zstd requires.
struct Workspace(Box<[u64]>);

impl Workspace {
    fn new(bytes: usize) -> Self {
        Workspace(vec![0; bytes.div_ceil(8)].into())
    }
}

pub(super) struct Compressor {
    context: NonNull<sys::ZSTD_CCtx>,
    parameters: sys::ZSTD_parameters,
    /// Owns the memory of the context.
    _workspace: Workspace,
}

// SAFETY: a context is plain memory that nothing else refers to, and every use needs `&mut`.
unsafe impl Send for Compressor {}

impl Compressor {
    pub fn new() -> io::Result<Self> {
        // SAFETY: both functions are pure.
        let (mut parameters, bytes) = unsafe {
            let parameters = sys::ZSTD_getParams(LEVEL, PAGE_SIZE as u64, 0);
            (parameters, sys::ZSTD_estimateCCtxSize_usingCParams(parameters.cParams))
        };
        // The length of an expanded page is known, so it need not be stored.
        parameters.fParams.contentSizeFlag = 0;
        let mut workspace = Workspace::new(bytes);
        // SAFETY: the memory is aligned to 8 bytes, and as long as said. It lies on the heap, so it
        // never moves, and lives as long as the context. Nothing else uses it.
        let context =
            unsafe { sys::ZSTD_initStaticCCtx(workspace.0.as_mut_ptr().cast(), workspace.0.len() * 8) };
        let context = NonNull::new(context).ok_or_else(too_little)?;
        let mut made = Compressor { context, parameters, _workspace: workspace };
        // The context uses all its workspace for the first page. So a workspace that is too small
        // fails here and not later.
        let mut page = [0; PAGE_SIZE];
        page.iter_mut().enumerate().for_each(|(at, byte)| *byte = ((at * at) >> 3) as u8);
        made.compress(&page, &mut [0; super::WORST]).ok_or_else(too_little)?;
        Ok(made)
    }

    pub fn compress(&mut self, page: &PageBytes, out: &mut [u8]) -> Option<usize> {
        // SAFETY: the context was initialised; source and destination are as long as said, and do
        // not overlap.
        let length = unsafe {
            sys::ZSTD_compress_advanced(
                self.context.as_ptr(),
                out.as_mut_ptr().cast(),
                out.len(),
                page.as_ptr().cast(),
                PAGE_SIZE,
                std::ptr::null(),
                0,
                self.parameters,
            )
        };
        fine(length)
    }
}

pub(super) struct Expander {
    context: NonNull<sys::ZSTD_DCtx>,
    /// Owns the memory of the context.
    _workspace: Workspace,
}

// SAFETY: as for the compressor: nothing else refers to the context, and every use needs `&mut`.
unsafe impl Send for Expander {}

impl Expander {
    pub fn new() -> io::Result<Self> {
        // SAFETY: the function is pure.
        Self::within(unsafe { sys::ZSTD_estimateDCtxSize() })
    }

    /// Makes an expander with `bytes` bytes of memory.
    fn within(bytes: usize) -> io::Result<Self> {
        let mut workspace = Workspace::new(bytes);
        // SAFETY: as for the compressor: the memory is aligned, long enough, never moves, and
        // nothing else uses it.
        let context =
            unsafe { sys::ZSTD_initStaticDCtx(workspace.0.as_mut_ptr().cast(), workspace.0.len() * 8) };
        Ok(Expander { context: NonNull::new(context).ok_or_else(too_little)?, _workspace: workspace })
    }

    pub fn expand(&mut self, bytes: &[u8], page: &mut PageBytes) -> Option<usize> {
        // SAFETY: the context was initialised; source and destination are as long as said, and do
        // not overlap. The decoder checks what it reads.
        let length = unsafe {
            sys::ZSTD_decompressDCtx(
                self.context.as_ptr(),
                page.as_mut_ptr().cast(),
                PAGE_SIZE,
                bytes.as_ptr().cast(),
                bytes.len(),
            )
        };
        fine(length)
    }
}

fn fine(length: usize) -> Option<usize> {
    // SAFETY: the function is pure.
    (unsafe { sys::ZSTD_isError(length) } == 0).then_some(length)
}

fn too_little() -> io::Error {
    io::Error::other("zstd's context does not fit into the memory that zstd itself asked for")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_context_that_does_not_fit_is_refused_before_its_first_page() {
        let Err(error) = Expander::within(64) else { panic!("64 bytes are enough") };
        assert_eq!(
            error.to_string(),
            "zstd's context does not fit into the memory that zstd itself asked for"
        );
    }
}
