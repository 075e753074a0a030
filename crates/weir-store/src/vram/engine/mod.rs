//! The copy engines of an NVIDIA card, by the CUDA driver interface.
//!
//! A copy takes about 6 us to start (18 us if the card was idle), whatever its size. So the engine
//! is for large and for many copies: one call hands over a whole batch, and neighbours in a batch
//! become one copy. The engine does not use the compute units, so it works beside the programs of
//! the card's owner.

mod batch;
mod driver;

pub use batch::BatchLane;
pub use driver::{CallError, CudaError, DevicePtr, text as c_text};

use crate::vram::condition::Death;
use driver::{
    AccessDesc, AllocationProp, ContextHandle, Device, Driver, ExternalMemory, ExternalMemoryBuffer,
    ExternalMemoryHandle, Function, LOCATION_DEVICE, MemLocation, Module, Stream, check, text,
};
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`, `.._MINOR` and `.._MULTIPROCESSOR_COUNT`.
const ATTRIBUTE_MAJOR: c_int = 75;
const ATTRIBUTE_MINOR: c_int = 76;
const ATTRIBUTE_MULTIPROCESSORS: c_int = 16;
/// `CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID`, `.._BUS_ID` and `.._DEVICE_ID`.
const ATTRIBUTES_PCI: [c_int; 3] = [50, 33, 34];
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const HANDLE_POSIX_FD: c_int = 1;
/// Chunks that CUDA allocates begin at multiples of this, which is a multiple of every card's
/// granularity.
const ALIGNMENT: usize = 2 << 20;

/// Largest number of copies that one call to the driver names, for each direction. If it is 1, each
/// copy is a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchCopies {
    /// Largest number of copies from the card in one call.
    pub reads: u32,
    /// Largest number of copies to the card in one call.
    pub writes: u32,
}

/// The way to name a card to CUDA.
#[derive(Clone, Copy, Debug)]
pub enum Which {
    /// The card that has this UUID in Vulkan.
    Uuid([u8; 16]),
    /// The card at this index by PCI address, as Vulkan's cards are counted. CUDA's own count
    /// begins with the fastest card.
    Index(usize),
}

/// A card's primary context.
pub struct Context {
    driver: Driver,
    device: Device,
    handle: ContextHandle,
    /// This context's number, never 0. Each thread notes the number of its current context.
    number: u64,
    lost: AtomicBool,
    death: OnceLock<Death>,
    died: OnceLock<Instant>,
    /// Whether the driver has destroyed the context. Then its handles must not be used any more. A
    /// thread that drops a handle reads this first, and holds this lock until the handle is gone.
    retired: RwLock<bool>,
    batch_copies: BatchCopies,
    /// The card's name from the driver.
    pub name: String,
    /// The card's UUID, which Vulkan and NVML use too.
    pub uuid: [u8; 16],
    /// The compute capability, major and minor: (9, 0) on Hopper.
    pub capability: (i32, i32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
}

// SAFETY: any thread may call the driver interface. A context is made current on the calling thread
// before each use, and the handle itself is only passed on.
unsafe impl Send for Context {}
// SAFETY: as for Send: any thread may call the driver interface.
unsafe impl Sync for Context {}

thread_local! {
    /// The number of the context that Weir made current on this thread; 0 for none.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

impl Context {
    /// Opens a card with the driver library at `library`. `batch_copies` limits the copies that one
    /// call names.
    ///
    /// # Errors
    /// Fails with a sentence when there is no library, when CUDA does not list the card, or when
    /// the versions of library and driver differ.
    pub fn open(library: &Path, which: Which, batch_copies: BatchCopies) -> Result<Arc<Self>, String> {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let driver = Driver::load(library)?;
        let found = find(&driver, which).map_err(|error| error.to_string())?;
        let (device, uuid) = found.ok_or_else(|| format!("CUDA does not list the card {which:?}"))?;
        let attribute = |which| attribute(&driver, device, which);
        let mut name = [0 as c_char; 128];
        let mut handle = ptr::null_mut();
        // SAFETY: the outputs outlive the calls; the flags are set before the context exists.
        let opened = unsafe {
            // Set no flag: CUDA must neither spin in the driver nor make I/O threads wait for one
            // another. Weir polls instead.
            let _ = (driver.context_flags)(device, 0);
            check("cuDeviceGetName", (driver.device_name)(name.as_mut_ptr(), name.len() as c_int, device))
                .and_then(|()| {
                    check("cuDevicePrimaryCtxRetain", (driver.context_retain)(&mut handle, device))
                })
        };
        opened.map_err(|error| error.to_string())?;
        let capability = attribute(ATTRIBUTE_MAJOR)
            .and_then(|major| Ok((major, attribute(ATTRIBUTE_MINOR)?)))
            .map_err(|error| error.to_string())?;
        let multiprocessors = attribute(ATTRIBUTE_MULTIPROCESSORS).map_err(|error| error.to_string())? as u32;
        let context = Context {
            device,
            handle,
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            lost: AtomicBool::new(false),
            death: OnceLock::new(),
            died: OnceLock::new(),
            retired: RwLock::new(false),
            batch_copies,
            name: text(&name),
            uuid,
            capability,
            multiprocessors,
            driver,
        };
        context.enter().map_err(|error| error.to_string())?;
        Ok(Arc::new(context))
    }

    /// Whether a call returned an error after which every later call fails.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Marks the context as dead.
    pub(super) fn declare_lost(&self, death: Death) {
        let _ = self.death.set(death);
        let _ = self.died.set(Instant::now());
        self.lost.store(true, Ordering::Release);
    }

    /// Time from the context's death until `now`.
    pub(super) fn dead_for(&self, now: Instant) -> Duration {
        self.died.get().map_or(Duration::ZERO, |&died| now.saturating_duration_since(died))
    }

    /// The reason why the context died, once it is [lost](Self::is_lost).
    pub(super) fn death(&self) -> Option<Death> {
        self.death.get().copied()
    }

    /// Makes the driver destroy a dead context, with all its resources on the card. After that,
    /// operations that were under way can change nothing. From then on the context may only be used
    /// to drop values that were made from it. The driver may take any time.
    pub(super) fn retire(&self) {
        let mut retired = self.retired.write().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut *retired, true) {
            drop(retired);
            // SAFETY: `open` retained the context once, and nothing made from it is used any more.
            let _ = unsafe { (self.driver.context_release)(self.device) };
        }
    }

    /// Calls `end` with the driver, to destroy a resource of this context. Does nothing if the
    /// driver has destroyed the context with all its resources.
    fn end(&self, end: impl FnOnce(&Driver)) {
        let retired = self.retired.read().unwrap_or_else(PoisonError::into_inner);
        if !*retired && self.enter().is_ok() {
            end(&self.driver);
        }
    }

    /// Largest number of copies that one call names: copies to the card if `write` is true, else
    /// from it. 1: each copy is a call.
    pub fn batch_copies(&self, write: bool) -> usize {
        (if write { self.batch_copies.writes } else { self.batch_copies.reads }) as usize
    }

    /// Whether the driver takes a batch of copies in one call (CUDA 12.8 and later).
    pub fn has_batch_copy(&self) -> bool {
        self.driver.copy_batch_13.is_some() || self.driver.copy_batch_12.is_some()
    }

    /// Makes this context current on the calling thread, if it is not.
    fn enter(&self) -> Result<(), CallError> {
        if self.is_lost() {
            // Do not touch the context: the driver may have destroyed it already.
            let error = match self.death() {
                Some(Death::Answered(CallError { error, .. })) => error,
                _ => CudaError(999),
            };
            return Err(CallError { call: "its dead context", error });
        }
        if CURRENT.get() == self.number {
            return Ok(());
        }
        // SAFETY: the handle is retained as long as `self` lives.
        self.check("cuCtxSetCurrent", unsafe { (self.driver.context_set)(self.handle) })?;
        CURRENT.set(self.number);
        Ok(())
    }

    /// Does the same as [`check`], and notes errors after which every later call fails.
    fn check(&self, call: &'static str, result: c_int) -> Result<(), CallError> {
        check(call, result).inspect_err(|error| {
            if error.error.is_sticky() {
                self.declare_lost(Death::Answered(*error));
            }
        })
    }

    /// Returns the free and the total bytes of the card.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn memory(&self) -> Result<(u64, u64), CallError> {
        self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: the outputs outlive the call.
        self.check("cuMemGetInfo", unsafe { (self.driver.mem_info)(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }

    /// Maps memory that Vulkan exported.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn import(self: &Arc<Self>, fd: OwnedFd, bytes: u64) -> Result<DeviceMemory, CallError> {
        self.enter()?;
        let raw = fd.into_raw_fd();
        let handle = ExternalMemoryHandle {
            kind: 1, // CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD
            padding: 0,
            fd: raw,
            union_rest: [0; 3],
            size: bytes,
            flags: 0,
            reserved: [0; 16],
        };
        let mut external: ExternalMemory = ptr::null_mut();
        // SAFETY: the structures outlive the calls. A successful import owns the descriptor. After
        // a failed one this function owns it, and closes it.
        unsafe {
            if let Err(error) =
                self.check("cuImportExternalMemory", (self.driver.import_memory)(&mut external, &handle))
            {
                drop(OwnedFd::from_raw_fd(raw));
                return Err(error);
            }
            let buffer = ExternalMemoryBuffer { offset: 0, size: bytes, flags: 0, reserved: [0; 16] };
            let mut address = 0;
            let mapped = (self.driver.map_imported)(&mut address, external, &buffer);
            if let Err(error) = self.check("cuExternalMemoryGetMappedBuffer", mapped) {
                let _ = (self.driver.destroy_imported)(external);
                return Err(error);
            }
            Ok(DeviceMemory { context: Arc::clone(self), address, bytes, origin: Origin::Imported(external) })
        }
    }

    /// Takes device memory by CUDA alone, for machines without Vulkan. The processor cannot reach
    /// such memory.
    ///
    /// # Errors
    /// Fails with the driver's error, above all when the card has no memory left.
    pub fn allocate(self: &Arc<Self>, bytes: u64) -> Result<DeviceMemory, CallError> {
        self.enter()?;
        let size = (bytes as usize).next_multiple_of(ALIGNMENT);
        let location = MemLocation { kind: LOCATION_DEVICE, id: self.device };
        let prop = AllocationProp {
            kind: 1, // CU_MEM_ALLOCATION_TYPE_PINNED
            handle_types: HANDLE_POSIX_FD,
            location,
            win32: ptr::null_mut(),
            compression: 0,
            rdma: 0,
            usage: 0,
            reserved: [0; 4],
        };
        let mut handle = 0u64;
        // SAFETY: output and structure outlive the call.
        unsafe { self.check("cuMemCreate", (self.driver.vmm_create)(&mut handle, size, &prop, 0))? };
        self.map(handle, size)
    }

    /// Takes over device memory that another process's CUDA allocated and exported.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn adopt(self: &Arc<Self>, fd: &OwnedFd, bytes: u64) -> Result<DeviceMemory, CallError> {
        self.enter()?;
        let mut handle = 0u64;
        // The parameter is a pointer, but for a file descriptor CUDA expects the descriptor's
        // number in it. The import does not take the descriptor over.
        let raw = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the output outlives the call, the descriptor is open.
        unsafe {
            let imported = (self.driver.vmm_import)(&mut handle, raw, HANDLE_POSIX_FD);
            self.check("cuMemImportFromShareableHandle", imported)?;
        }
        self.map(handle, bytes as usize)
    }

    /// Maps device memory at an address of the card. If that fails, `handle` is released.
    fn map(self: &Arc<Self>, handle: u64, size: usize) -> Result<DeviceMemory, CallError> {
        let location = MemLocation { kind: LOCATION_DEVICE, id: self.device };
        let access = AccessDesc { location, flags: 3 }; // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        let d = &self.driver;
        let mut address = 0u64;
        // SAFETY: the outputs and structures outlive the calls. After an error the earlier steps
        // are undone in reverse.
        unsafe {
            let mapped = self
                .check("cuMemAddressReserve", (d.vmm_reserve)(&mut address, size, ALIGNMENT, 0, 0))
                .and_then(|()| self.check("cuMemMap", (d.vmm_map)(address, size, 0, handle, 0)))
                .and_then(|()| self.check("cuMemSetAccess", (d.vmm_access)(address, size, &access, 1)));
            if let Err(error) = mapped {
                let _ = (d.vmm_unmap)(address, size);
                let _ = (d.vmm_unreserve)(address, size);
                let _ = (d.vmm_release)(handle);
                return Err(error);
            }
        }
        let origin = Origin::Own { handle, size };
        Ok(DeviceMemory { context: Arc::clone(self), address, bytes: size as u64, origin })
    }

    /// Takes pinned host memory, which the card reaches at the same address.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn pinned(self: &Arc<Self>, bytes: usize) -> Result<Pinned, CallError> {
        self.enter()?;
        let mut address = ptr::null_mut();
        // SAFETY: the output outlives the call; flags: portable, and mapped for the card.
        let result = unsafe { (self.driver.host_alloc)(&mut address, bytes, 0x1 | 0x2) };
        self.check("cuMemHostAlloc", result)?;
        let address = NonNull::new(address.cast::<u8>())
            .ok_or(CallError { call: "cuMemHostAlloc", error: CudaError::OUT_OF_MEMORY })?;
        // SAFETY: `bytes` bytes at `address` were just allocated.
        unsafe { ptr::write_bytes(address.as_ptr(), 0, bytes) };
        Ok(Pinned { context: Arc::clone(self), address, bytes })
    }

    /// Makes a new stream.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn stream(self: &Arc<Self>) -> Result<OwnStream, CallError> {
        self.enter()?;
        let mut stream = ptr::null_mut();
        // SAFETY: the output outlives the call; 1 is CU_STREAM_NON_BLOCKING.
        self.check("cuStreamCreate", unsafe { (self.driver.stream_create)(&mut stream, 1, 0) })?;
        Ok(OwnStream { context: Arc::clone(self), stream })
    }

    /// Loads PTX and finds its one entry.
    ///
    /// # Errors
    /// Fails with the driver's error, above all when its compiler refuses the code.
    pub fn kernel(self: &Arc<Self>, ptx: &CStr, entry: &CStr) -> Result<Kernel, CallError> {
        self.enter()?;
        let mut module: Module = ptr::null_mut();
        let mut function: Function = ptr::null_mut();
        // SAFETY: both texts are C strings that outlive the calls.
        unsafe {
            let loaded = (self.driver.module_load)(&mut module, ptx.as_ptr().cast::<c_void>());
            self.check("cuModuleLoadData", loaded)?;
            let found = (self.driver.module_function)(&mut function, module, entry.as_ptr());
            if let Err(error) = self.check("cuModuleGetFunction", found) {
                let _ = (self.driver.module_unload)(module);
                return Err(error);
            }
        }
        Ok(Kernel { context: Arc::clone(self), module, function })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !*self.retired.get_mut().unwrap_or_else(PoisonError::into_inner) {
            // SAFETY: `open` retained the context once. All resources made from it hold an Arc, and
            // are gone.
            let _ = unsafe { (self.driver.context_release)(self.device) };
        }
        if CURRENT.get() == self.number {
            CURRENT.set(0);
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("name", &self.name).field("capability", &self.capability).finish()
    }
}

fn find(driver: &Driver, which: Which) -> Result<Option<(Device, [u8; 16])>, CallError> {
    let mut cards = Vec::new();
    // SAFETY: every output outlives its call; cuInit comes first, as the interface demands.
    unsafe {
        check("cuInit", (driver.init)(0))?;
        let mut count = 0;
        check("cuDeviceGetCount", (driver.device_count)(&mut count))?;
        for index in 0..count {
            let (mut device, mut uuid) = (0, [0; 16]);
            check("cuDeviceGet", (driver.device_get)(&mut device, index))?;
            check("cuDeviceGetUuid", (driver.device_uuid)(&mut uuid, device))?;
            let mut pci = [0; 3];
            for (number, which) in pci.iter_mut().zip(ATTRIBUTES_PCI) {
                *number = attribute(driver, device, which)?;
            }
            cards.push((pci, device, uuid));
        }
    }
    cards.sort_by_key(|&(pci, ..)| pci);
    let found = match which {
        Which::Uuid(wanted) => cards.iter().find(|(.., uuid)| *uuid == wanted),
        Which::Index(index) => cards.get(index),
    };
    Ok(found.map(|&(_, device, uuid)| (device, uuid)))
}

fn attribute(driver: &Driver, device: Device, which: c_int) -> Result<c_int, CallError> {
    let mut value = 0;
    // SAFETY: `value` outlives the call.
    check("cuDeviceGetAttribute", unsafe { (driver.device_attribute)(&mut value, which, device) })
        .map(|()| value)
}

/// Device memory with an address that copies and kernels use.
pub struct DeviceMemory {
    context: Arc<Context>,
    /// The memory's first address.
    pub address: DevicePtr,
    /// The memory's length in bytes.
    pub bytes: u64,
    origin: Origin,
}

enum Origin {
    Imported(ExternalMemory),
    Own { handle: u64, size: usize },
}

// SAFETY: the driver accepts these handles and addresses from any thread.
unsafe impl Send for DeviceMemory {}
// SAFETY: the driver accepts these handles from any thread, and `&DeviceMemory` only reads.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    /// Overwrites the memory with zeros and waits for that. Nothing else may use it meanwhile.
    ///
    /// # Errors
    /// Fails when the card did not write the zeros.
    pub fn clear(&self) -> Result<(), CallError> {
        let stream = self.context.stream()?;
        let d = &self.context.driver;
        // SAFETY: the range belongs to this memory.
        let started = unsafe { (d.set_bytes)(self.address, 0, self.bytes as usize, stream.stream) };
        self.context.check("cuMemsetD8Async", started)?;
        stream.synchronize()
    }

    /// Exports a descriptor of memory that CUDA allocated. Memory that Vulkan allocated is exported
    /// by Vulkan.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn export(&self) -> Result<OwnedFd, CallError> {
        let Origin::Own { handle, .. } = self.origin else {
            return Err(CallError { call: "cuMemExportToShareableHandle", error: CudaError(801) });
        };
        self.context.enter()?;
        let mut fd: c_int = -1;
        let d = &self.context.driver;
        // SAFETY: the output is an int for this handle type, and this function owns the new
        // descriptor.
        unsafe {
            let exported = (d.vmm_export)((&raw mut fd).cast::<c_void>(), handle, HANDLE_POSIX_FD, 0);
            self.context.check("cuMemExportToShareableHandle", exported)?;
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let origin = &self.origin;
        // SAFETY: this context made the memory, and its owner has checked that no copy uses it any
        // more. An error here can neither be reported nor undone.
        self.context.end(|d| unsafe {
            match *origin {
                Origin::Imported(external) => {
                    let _ = (d.mem_free)(self.address);
                    let _ = (d.destroy_imported)(external);
                }
                Origin::Own { handle, size } => {
                    let _ = (d.vmm_unmap)(self.address, size);
                    let _ = (d.vmm_unreserve)(self.address, size);
                    let _ = (d.vmm_release)(handle);
                }
            }
        });
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({:#x}, {} bytes)", self.address, self.bytes)
    }
}

/// Pinned host memory, which the card reads and writes by itself.
pub struct Pinned {
    context: Arc<Context>,
    address: NonNull<u8>,
    /// The memory's length in bytes.
    pub bytes: usize,
}

// SAFETY: this is plain memory. Its holder ensures that processor and card do not access it at the
// same time.
unsafe impl Send for Pinned {}
// SAFETY: as for Send; `&Pinned` returns only the address.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// The pinned memory's first address, which both the processor and the card use.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// The pinned memory's first address as the number that the driver's calls take.
    pub fn device(&self) -> DevicePtr {
        self.address.as_ptr() as DevicePtr
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let address = self.address.as_ptr().cast::<c_void>();
        self.context.end(|driver| {
            // SAFETY: this context allocated the memory, and nothing uses it any more.
            let _ = unsafe { (driver.host_free)(address) };
        });
    }
}

/// A CUDA stream: its copies and kernels run in the order in which they were started.
pub struct OwnStream {
    context: Arc<Context>,
    stream: Stream,
}

// SAFETY: the driver accepts this handle from any thread.
unsafe impl Send for OwnStream {}

impl OwnStream {
    /// Waits until all work in the stream has ended.
    ///
    /// # Errors
    /// Fails with the error of the first copy or kernel in the stream that failed.
    pub fn synchronize(&self) -> Result<(), CallError> {
        self.context.enter()?;
        // SAFETY: the stream is alive.
        self.context
            .check("cuStreamSynchronize", unsafe { (self.context.driver.stream_synchronize)(self.stream) })
    }

    /// Whether all work in the stream has ended.
    ///
    /// # Errors
    /// Fails with the error of the first copy or kernel in the stream that failed.
    pub fn is_idle(&self) -> Result<bool, CallError> {
        self.context.enter()?;
        // SAFETY: the stream is alive.
        let result = unsafe { (self.context.driver.stream_query)(self.stream) };
        if CudaError(result) == CudaError::NOT_READY {
            return Ok(false);
        }
        self.context.check("cuStreamQuery", result).map(|()| true)
    }

    /// Starts a copy from host memory, which must stay alive until the stream is idle.
    ///
    /// # Errors
    /// Fails with the driver's error.
    ///
    /// # Safety
    /// Both ranges must be valid for `bytes` until the stream has been synchronised.
    pub unsafe fn copy_to_device(
        &self,
        to: DevicePtr,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), CallError> {
        self.context.enter()?;
        // SAFETY: the caller guarantees that both ranges are valid.
        let result =
            unsafe { (self.context.driver.copy_to_device)(to, from.cast::<c_void>(), bytes, self.stream) };
        self.context.check("cuMemcpyHtoDAsync", result)
    }

    /// Starts a copy to host memory, which must stay alive until the stream is idle.
    ///
    /// # Errors
    /// Fails with the driver's error.
    ///
    /// # Safety
    /// Both ranges must be valid for `bytes` until the stream has been synchronised.
    pub unsafe fn copy_to_host(&self, to: *mut u8, from: DevicePtr, bytes: usize) -> Result<(), CallError> {
        self.context.enter()?;
        // SAFETY: the caller guarantees that both ranges are valid.
        let result =
            unsafe { (self.context.driver.copy_to_host)(to.cast::<c_void>(), from, bytes, self.stream) };
        self.context.check("cuMemcpyDtoHAsync", result)
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        let stream = self.stream;
        self.context.end(|driver| {
            // SAFETY: this context made the stream. Its owner has waited for the work that matters
            // to it; any other work in the stream finishes by itself.
            let _ = unsafe { (driver.stream_destroy)(stream) };
        });
    }
}

/// A kernel and the module that holds it.
pub struct Kernel {
    context: Arc<Context>,
    module: Module,
    function: Function,
}

// SAFETY: the driver accepts these handles from any thread.
unsafe impl Send for Kernel {}

impl Kernel {
    /// Starts the kernel on `stream` with one argument, a pointer.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn launch(
        &self,
        stream: &OwnStream,
        blocks: u32,
        threads: u32,
        argument: DevicePtr,
    ) -> Result<(), CallError> {
        self.context.enter()?;
        let mut argument = argument;
        let mut arguments = [(&raw mut argument).cast::<c_void>()];
        let none = ptr::null_mut();
        let shared: c_uint = 0;
        // SAFETY: the kernel takes one 64-bit argument; the driver copies it before it returns.
        let result = unsafe {
            let launch = self.context.driver.launch;
            let arguments = arguments.as_mut_ptr();
            launch(self.function, blocks, 1, 1, threads, 1, 1, shared, stream.stream, arguments, none)
        };
        self.context.check("cuLaunchKernel", result)
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        let module = self.module;
        self.context.end(|driver| {
            // SAFETY: this context loaded the module, and its kernel has ended.
            let _ = unsafe { (driver.module_unload)(module) };
        });
    }
}
