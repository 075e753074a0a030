//! The memory of one chunk, and its source.

use crate::vram::Trouble;
use crate::vram::engine::{Context, DeviceMemory};
use crate::vram::mapped::{Allocation, Device};
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::{Arc, OnceLock};

/// The drivers from which chunks get their memory.
#[derive(Debug)]
pub struct Source {
    /// The Vulkan device that gives mapped memory, if there is one.
    pub gpu: Option<Arc<Device>>,
    /// CUDA's context on the card. It may be set later, or never.
    cuda: OnceLock<Arc<Context>>,
    /// Each path that was missing when the card was found, and why.
    pub refused: Vec<(&'static str, String)>,
}

/// One chunk's memory. CUDA's mapping of it is dropped before the memory itself.
#[derive(Debug)]
pub struct ChunkMemory {
    device: Option<DeviceMemory>,
    mapped: Option<Allocation>,
    /// A descriptor by which CUDA will import the memory that is mapped already.
    unopened: Option<OwnedFd>,
}

impl Source {
    /// Makes a source of memory from the drivers that the machine has: Vulkan's device, CUDA's
    /// context, or both.
    pub fn new(gpu: Option<Arc<Device>>, cuda: Option<Arc<Context>>) -> Self {
        Source { gpu, cuda: cuda.map_or_else(OnceLock::new, OnceLock::from), refused: Vec::new() }
    }

    /// CUDA's context on this card, as long as it works.
    pub fn cuda(&self) -> Option<&Arc<Context>> {
        self.cuda.get().filter(|cuda| !cuda.is_lost())
    }

    /// CUDA's context on this card, if it has failed.
    #[inline]
    pub fn dead(&self) -> Option<&Arc<Context>> {
        self.cuda.get().filter(|cuda| cuda.is_lost())
    }

    /// CUDA's context on this card, working or failed.
    pub fn context(&self) -> Option<&Arc<Context>> {
        self.cuda.get()
    }

    /// Notes that a path is missing, with the reason.
    pub fn refuses(mut self, way: &'static str, why: Option<String>) -> Self {
        self.refused.extend(why.map(|why| (way, why)));
        self
    }

    /// Adds CUDA's engines, for memory that is [taken](Self::take) later; memory that exists must
    /// be [imported](ChunkMemory::import). Called once.
    pub fn add_cuda(&self, cuda: &Arc<Context>) {
        let _ = self.cuda.set(Arc::clone(cuda));
    }

    /// Returns this source of memory without CUDA's context.
    pub fn without_cuda(self) -> Self {
        Source { gpu: self.gpu, cuda: OnceLock::new(), refused: self.refused }
    }

    /// Takes `bytes` of device memory. If there is a Vulkan device, it allocates and maps the
    /// memory. CUDA then imports it, unless CUDA is missing or has failed. Without a Vulkan device,
    /// CUDA allocates the memory.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn take(&self, bytes: u64) -> Result<ChunkMemory, Trouble> {
        let Some(gpu) = &self.gpu else {
            let cuda = self.cuda().ok_or(Trouble::NoDriver)?;
            return Ok(ChunkMemory { device: Some(cuda.allocate(bytes)?), mapped: None, unopened: None });
        };
        let mut memory = ChunkMemory { device: None, mapped: Some(gpu.allocate(bytes)?), unopened: None };
        if let Some(cuda) = self.cuda() {
            memory.import(cuda)?;
        }
        Ok(memory)
    }

    /// Takes over a chunk's memory that another process allocated and exported as `fd`.
    ///
    /// With `later`, CUDA is still being opened. It will import the memory when it is open.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn adopt(&self, fd: OwnedFd, bytes: u64, later: bool) -> Result<ChunkMemory, Trouble> {
        let Some(gpu) = &self.gpu else {
            let cuda = self.cuda().ok_or(Trouble::NoDriver)?;
            return Ok(ChunkMemory { device: Some(cuda.adopt(&fd, bytes)?), mapped: None, unopened: None });
        };
        // An import by CUDA takes its descriptor over, so each import gets a descriptor of its own.
        let second = (later || self.cuda().is_some()).then(|| fd.try_clone()).transpose();
        let unopened = second.map_err(|_| Trouble::NoDescriptor)?;
        let mut memory = ChunkMemory { device: None, mapped: Some(gpu.adopt(fd, bytes)?), unopened };
        if let Some(cuda) = self.cuda() {
            memory.import(cuda)?;
        }
        Ok(memory)
    }
}

impl ChunkMemory {
    /// Makes CUDA import the memory, if it has not done so yet.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn import(&mut self, cuda: &Arc<Context>) -> Result<(), Trouble> {
        let (None, Some(mapped)) = (&self.device, &self.mapped) else { return Ok(()) };
        let fd = match self.unopened.take() {
            Some(fd) => fd,
            None => mapped.export()?,
        };
        self.device = Some(cuda.import(fd, mapped.bytes)?);
        Ok(())
    }

    /// Drops CUDA's mapping of the memory, and the descriptor from which CUDA was to import it,
    /// because CUDA cannot be opened.
    pub fn forget_cuda(&mut self) {
        (self.device, self.unopened) = (None, None);
    }

    /// Bytes of the memory, as the driver rounded them.
    pub fn allocation_bytes(&self) -> u64 {
        let device = self.device.as_ref().map_or(0, |device| device.bytes);
        self.mapped.as_ref().map_or(device, |mapped| mapped.bytes)
    }

    /// The memory's address for the processor; null if it is not mapped.
    pub fn host(&self) -> *mut u8 {
        let host = self.mapped.as_ref().and_then(Allocation::host);
        host.map_or(ptr::null_mut(), NonNull::as_ptr)
    }

    /// The memory's address for the card: an address for CUDA, a buffer for a transfer queue; 0 if
    /// only the processor reaches it.
    pub fn device(&self) -> u64 {
        match (&self.device, &self.mapped) {
            (Some(device), _) => device.address,
            (None, Some(mapped)) if mapped.host().is_none() => mapped.buffer(),
            _ => 0,
        }
    }

    /// Splits the memory into CUDA's mapping and Vulkan's allocation, which the caller then owns.
    pub fn into_parts(self) -> (Option<DeviceMemory>, Option<Allocation>) {
        (self.device, self.mapped)
    }

    /// Overwrites the memory with zeros.
    ///
    /// # Errors
    /// Fails when the card did not write the zeros.
    pub fn clear(&self) -> Result<(), Trouble> {
        match (&self.mapped, &self.device) {
            (Some(mapped), _) => Ok(mapped.clear()?),
            (None, Some(device)) => Ok(device.clear()?),
            (None, None) => Ok(()),
        }
    }

    /// Exports a descriptor that keeps the memory alive.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn export(&self) -> Result<OwnedFd, Trouble> {
        match (&self.mapped, &self.device) {
            (Some(mapped), _) => Ok(mapped.export()?),
            (None, Some(device)) => Ok(device.export()?),
            (None, None) => Err(Trouble::NoDriver),
        }
    }
}
