//! One chunk's memory, and where it comes from.

use crate::vram::Trouble;
use crate::vram::engine::{Context, DeviceMemory};
use crate::vram::mapped::{Allocation, Device};
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::{Arc, OnceLock};

/// The source of chunks' memory.
#[derive(Debug)]
pub struct Source {
    /// Mapped memory, where Vulkan gives it.
    pub gpu: Option<Arc<Device>>,
    /// The card's engines, where CUDA is; they may come later.
    cuda: OnceLock<Arc<Context>>,
    /// Each way that was not to be had when the card was found, and why.
    pub refused: Vec<(&'static str, String)>,
}

/// One chunk's memory; the engine's view of it is dropped before what it is a view of.
#[derive(Debug)]
pub struct Memory {
    device: Option<DeviceMemory>,
    mapped: Option<Allocation>,
    /// By which CUDA will import what was mapped already.
    unopened: Option<OwnedFd>,
}

impl Source {
    /// A source of the drivers that there are.
    pub fn new(gpu: Option<Arc<Device>>, cuda: Option<Arc<Context>>) -> Self {
        Source { gpu, cuda: cuda.map_or_else(OnceLock::new, OnceLock::from), refused: Vec::new() }
    }

    /// The card's engines, while they live.
    pub fn cuda(&self) -> Option<&Arc<Context>> {
        self.cuda.get().filter(|cuda| !cuda.is_lost())
    }

    /// The card's engines, once they have died.
    #[inline]
    pub fn dead(&self) -> Option<&Arc<Context>> {
        self.cuda.get().filter(|cuda| cuda.is_lost())
    }

    /// The card's engines, dead or alive.
    pub fn context(&self) -> Option<&Arc<Context>> {
        self.cuda.get()
    }

    /// Notes a way that is not to be had, and why.
    pub fn refuses(mut self, way: &'static str, why: Option<String>) -> Self {
        self.refused.extend(why.map(|why| (way, why)));
        self
    }

    /// They are there from now on, for memory that is [taken](Self::take) later; what there is must
    /// be [imported](Memory::import). Once.
    pub fn add_cuda(&self, cuda: &Arc<Context>) {
        let _ = self.cuda.set(Arc::clone(cuda));
    }

    /// The same without them.
    pub fn without_cuda(self) -> Self {
        Source { gpu: self.gpu, cuda: OnceLock::new(), refused: self.refused }
    }

    /// Takes `bytes` of device memory, mapped and imported as far as this machine can.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn take(&self, bytes: u64) -> Result<Memory, Trouble> {
        let Some(gpu) = &self.gpu else {
            let cuda = self.cuda().ok_or(Trouble::NoDriver)?;
            return Ok(Memory { device: Some(cuda.allocate(bytes)?), mapped: None, unopened: None });
        };
        let mut memory = Memory { device: None, mapped: Some(gpu.allocate(bytes)?), unopened: None };
        if let Some(cuda) = self.cuda() {
            memory.import(cuda)?;
        }
        Ok(memory)
    }

    /// Takes over memory that another process allocated in the same way and that `fd` keeps alive.
    ///
    /// `later`: CUDA is still being opened, and will import it then.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn adopt(&self, fd: OwnedFd, bytes: u64, later: bool) -> Result<Memory, Trouble> {
        let Some(gpu) = &self.gpu else {
            let cuda = self.cuda().ok_or(Trouble::NoDriver)?;
            return Ok(Memory { device: Some(cuda.adopt(&fd, bytes)?), mapped: None, unopened: None });
        };
        // An import owns its descriptor, so each gets one.
        let second = (later || self.cuda().is_some()).then(|| fd.try_clone()).transpose();
        let unopened = second.map_err(|_| Trouble::NoDescriptor)?;
        let mut memory = Memory { device: None, mapped: Some(gpu.adopt(fd, bytes)?), unopened };
        if let Some(cuda) = self.cuda() {
            memory.import(cuda)?;
        }
        Ok(memory)
    }
}

impl Memory {
    /// Has CUDA see it too, if it does not.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn import(&mut self, cuda: &Arc<Context>) -> Result<(), Trouble> {
        let (None, Some(mapped)) = (&self.device, &self.mapped) else { return Ok(()) };
        let fd = match self.unopened.take() {
            Some(fd) => fd,
            None => mapped.export()?,
        };
        self.device = Some(cuda.import(fd, mapped.bytes)?);
        Ok(())
    }

    /// CUDA will not come: lets go of its view, and of what was held for that.
    pub fn forget_cuda(&mut self) {
        (self.device, self.unopened) = (None, None);
    }

    /// Bytes as the driver rounded them.
    pub fn allocation_bytes(&self) -> u64 {
        let device = self.device.as_ref().map_or(0, |device| device.bytes);
        self.mapped.as_ref().map_or(device, |mapped| mapped.bytes)
    }

    /// Its address for the processor; null if there is none.
    pub fn host(&self) -> *mut u8 {
        let host = self.mapped.as_ref().and_then(Allocation::host);
        host.map_or(ptr::null_mut(), NonNull::as_ptr)
    }

    /// Where the card sees it: an address for CUDA, a buffer for a transfer queue; 0 if only the
    /// processor sees it.
    pub fn device(&self) -> u64 {
        match (&self.device, &self.mapped) {
            (Some(device), _) => device.address,
            (None, Some(mapped)) if mapped.host().is_none() => mapped.buffer(),
            _ => 0,
        }
    }

    /// Both parts, for an owner of its own.
    pub fn into_parts(self) -> (Option<DeviceMemory>, Option<Allocation>) {
        (self.device, self.mapped)
    }

    /// Overwrites it with zeros.
    ///
    /// # Errors
    /// When the card did not do it.
    pub fn clear(&self) -> Result<(), Trouble> {
        match (&self.mapped, &self.device) {
            (Some(mapped), _) => Ok(mapped.clear()?),
            (None, Some(device)) => Ok(device.clear()?),
            (None, None) => Ok(()),
        }
    }

    /// A descriptor that keeps it alive.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn export(&self) -> Result<OwnedFd, Trouble> {
        match (&self.mapped, &self.device) {
            (Some(mapped), _) => Ok(mapped.export()?),
            (None, Some(device)) => Ok(device.export()?),
            (None, None) => Err(Trouble::NoDriver),
        }
    }
}
