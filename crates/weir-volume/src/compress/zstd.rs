//! Zstandard in memory that is taken once: a context in a buffer of ours never asks for more
//! (`ZSTD_initStaticCCtx`, zstd.h).

use std::io;
use std::ptr::NonNull;
use weir_core::{PAGE_SIZE, PageBytes};
use zstd_sys as sys;

/// zram's default is 3, which takes half as long again for a few per cent.
const LEVEL: i32 = 1;

/// Memory for a context, aligned as it asks for.
struct Workspace(Box<[u64]>);

impl Workspace {
    fn new(bytes: usize) -> Self {
        Workspace(vec![0; bytes.div_ceil(8)].into())
    }
}

pub(super) struct Compressor {
    context: NonNull<sys::ZSTD_CCtx>,
    parameters: sys::ZSTD_parameters,
    /// The memory of the context.
    _workspace: Workspace,
}

// SAFETY: a context is plain memory that it alone refers to, used by whoever has it by `&mut`.
unsafe impl Send for Compressor {}

impl Compressor {
    pub fn new() -> io::Result<Self> {
        // SAFETY: pure functions of their arguments.
        let (mut parameters, bytes) = unsafe {
            let parameters = sys::ZSTD_getParams(LEVEL, PAGE_SIZE as u64, 0);
            (parameters, sys::ZSTD_estimateCCtxSize_usingCParams(parameters.cParams))
        };
        // How long it will be is known.
        parameters.fParams.contentSizeFlag = 0;
        let mut workspace = Workspace::new(bytes);
        // SAFETY: the memory is aligned to 8 bytes, as long as said, and lives as long as the
        // context: it never moves, being on the heap, and nobody else uses it.
        let context =
            unsafe { sys::ZSTD_initStaticCCtx(workspace.0.as_mut_ptr().cast(), workspace.0.len() * 8) };
        let context = NonNull::new(context).ok_or_else(too_little)?;
        let mut made = Compressor { context, parameters, _workspace: workspace };
        // The context needs all its workspace for the first page already, so a workspace that is
        // too small shows here and not later.
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
    /// The memory of the context.
    _workspace: Workspace,
}

// SAFETY: as for the compressor.
unsafe impl Send for Expander {}

impl Expander {
    pub fn new() -> io::Result<Self> {
        // SAFETY: a pure function.
        let mut workspace = Workspace::new(unsafe { sys::ZSTD_estimateDCtxSize() });
        // SAFETY: as for the compressor.
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
    // SAFETY: a pure function.
    (unsafe { sys::ZSTD_isError(length) } == 0).then_some(length)
}

fn too_little() -> io::Error {
    io::Error::other("zstd's context does not fit into the memory that zstd itself asked for")
}
