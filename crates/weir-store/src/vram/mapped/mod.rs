//! Device memory that the processor reaches with loads and stores, through Vulkan.
//!
//! Vulkan is the one interface by which every vendor maps video memory into a process. A memory
//! type that is `DEVICE_LOCAL`, `HOST_VISIBLE` and `HOST_COHERENT` at once lies on the card and
//! behind the PCIe window. (CUDA cannot map device memory for the processor: `mmap` of its dma-buf
//! gives ENOTSUPP.) The loader and the driver are opened at run time, so the same program starts on
//! a machine without a GPU.
//!
//! One chunk is one `vkAllocateMemory`, because that is the unit in which memory can be given back
//! to its owner, exported as a file descriptor, and imported by CUDA.

mod choice;
pub mod copy;
pub mod queue;

pub use choice::{Card, Listed, Refusal, list};

use super::answer_limit;
use ash::vk;
use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// A Vulkan device, opened only for its memory.
pub struct Device {
    /// The card of the device.
    pub card: Card,
    device: ash::Device,
    instance: ash::Instance,
    external: ash::khr::external_memory_fd::Device,
    /// The resources for clearing chunks, under a lock. Only workers clear chunks.
    clearing: Mutex<Clearing>,
    /// The device's only queue, and the lock that a thread takes to submit to it.
    queue: vk::Queue,
    queue_turn: Mutex<()>,
    /// Keeps the loader's library. The field is last, so that it outlives everything made from it.
    _entry: ash::Entry,
}

struct Clearing {
    pool: vk::CommandPool,
    commands: vk::CommandBuffer,
    fence: vk::Fence,
}

/// One chunk of mapped device memory. Dropping it frees the memory; the caller clears it first.
pub struct Allocation {
    gpu: Arc<Device>,
    memory: vk::DeviceMemory,
    buffer: vk::Buffer,
    host: Option<NonNull<u8>>,
    /// Bytes as the driver rounded them: an importer must give this size.
    pub bytes: u64,
}

// SAFETY: the mapping is plain memory that belongs to no thread, and Vulkan's handles may move
// between threads. `Allocation` returns only the address, and its users order their accesses.
unsafe impl Send for Allocation {}
// SAFETY: `&Allocation` reads only fields that never change, such as the mapping's address.
unsafe impl Sync for Allocation {}

/// A failed call of Vulkan's, with its result.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("{call} answered {result:?}")]
pub struct VulkanError {
    /// The name of the call.
    pub call: &'static str,
    /// The result code that the call returned.
    pub result: vk::Result,
}

impl VulkanError {
    /// Whether the call failed because there is too little free memory.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self.result, vk::Result::ERROR_OUT_OF_DEVICE_MEMORY | vk::Result::ERROR_OUT_OF_HOST_MEMORY)
    }

    /// Whether the card is lost, so that nothing on it can be reached any more.
    pub fn is_lost(&self) -> bool {
        self.result == vk::Result::ERROR_DEVICE_LOST
    }
}

/// Adds the call's name to Vulkan's bare result.
trait Named<T> {
    fn of(self, call: &'static str) -> Result<T, VulkanError>;
}

impl<T> Named<T> for Result<T, vk::Result> {
    fn of(self, call: &'static str) -> Result<T, VulkanError> {
        self.map_err(|result| VulkanError { call, result })
    }
}

impl Device {
    /// Opens a Vulkan device on `card`.
    ///
    /// # Errors
    /// Fails when the driver refuses to open the device.
    fn open(entry: ash::Entry, instance: ash::Instance, card: Card) -> Result<Self, VulkanError> {
        let physical = card.physical;
        // SAFETY: `physical` belongs to `instance`; every create-info outlives its call.
        unsafe {
            let mut extensions = vec![ash::khr::external_memory_fd::NAME.as_ptr()];
            if card.has_budget(&instance) {
                extensions.push(ash::ext::memory_budget::NAME.as_ptr());
            }
            let queues = [vk::DeviceQueueCreateInfo::default()
                .queue_family_index(card.queue)
                .queue_priorities(&[0.0])];
            let info = vk::DeviceCreateInfo::default()
                .queue_create_infos(&queues)
                .enabled_extension_names(&extensions);
            let device = instance.create_device(physical, &info, None).of("vkCreateDevice")?;
            let external = ash::khr::external_memory_fd::Device::new(&instance, &device);
            let queue = device.get_device_queue(card.queue, 0);
            let clearing = match Clearing::new(&device, card.queue) {
                Ok(clearing) => clearing,
                Err(error) => {
                    device.destroy_device(None);
                    return Err(error);
                }
            };
            Ok(Device {
                card,
                device,
                instance,
                external,
                clearing: Mutex::new(clearing),
                queue,
                queue_turn: Mutex::new(()),
                _entry: entry,
            })
        }
    }

    /// Bytes of device memory that this process could still have, as the driver estimates.
    pub fn free_bytes(&self) -> u64 {
        self.card.budget(&self.instance).unwrap_or(self.card.bytes)
    }

    /// Takes `bytes` of device memory, mapped and exportable.
    ///
    /// # Errors
    /// Fails with the driver's error, above all when the card has no memory left.
    pub fn allocate(self: &Arc<Self>, bytes: u64) -> Result<Allocation, VulkanError> {
        self.allocation(bytes, self.card.memory_type, self.card.window, true, None)
    }

    /// Takes host memory and maps it, for copies by the card from it and to it.
    ///
    /// # Errors
    /// Fails with the driver's error.
    fn staging(self: &Arc<Self>, bytes: u64) -> Result<Allocation, VulkanError> {
        self.allocation(bytes, self.card.staging_type, true, false, None)
    }

    /// Maps memory that another process allocated for a chunk, and exported as `fd`. Until the
    /// memory is mapped here, that descriptor keeps it alive.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn adopt(self: &Arc<Self>, fd: OwnedFd, bytes: u64) -> Result<Allocation, VulkanError> {
        self.allocation(bytes, self.card.memory_type, self.card.window, true, Some(fd))
    }

    fn allocation(
        self: &Arc<Self>,
        bytes: u64,
        memory_type: u32,
        mapped: bool,
        shared: bool,
        fd: Option<OwnedFd>,
    ) -> Result<Allocation, VulkanError> {
        let kind = vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD;
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(kind);
        let info = vk::BufferCreateInfo::default()
            .size(bytes)
            .usage(vk::BufferUsageFlags::TRANSFER_DST | vk::BufferUsageFlags::TRANSFER_SRC);
        let info = if shared { info.push_next(&mut external) } else { info };
        // SAFETY: the handles belong to this device; after every error the handles made so far are
        // destroyed.
        unsafe {
            let buffer = self.device.create_buffer(&info, None).of("vkCreateBuffer")?;
            let destroy = |error| {
                self.device.destroy_buffer(buffer, None);
                error
            };
            let needs = self.device.get_buffer_memory_requirements(buffer);
            let mut export = vk::ExportMemoryAllocateInfo::default().handle_types(kind);
            let mut import = vk::ImportMemoryFdInfoKHR::default().handle_type(kind);
            let info =
                vk::MemoryAllocateInfo::default().allocation_size(needs.size).memory_type_index(memory_type);
            let info = match &fd {
                Some(fd) => {
                    import = import.fd(fd.as_raw_fd());
                    info.push_next(&mut import)
                }
                None if shared => info.push_next(&mut export),
                None => info,
            };
            let memory = self.device.allocate_memory(&info, None).of("vkAllocateMemory").map_err(destroy)?;
            // A successful import owns the descriptor; after a failed one this function still owns
            // it.
            let _ = fd.map(IntoRawFd::into_raw_fd);
            let free = |error| {
                self.device.free_memory(memory, None);
                destroy(error)
            };
            self.device.bind_buffer_memory(buffer, memory, 0).of("vkBindBufferMemory").map_err(free)?;
            let host = if mapped {
                let whole = self.device.map_memory(memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty());
                let host = NonNull::new(whole.of("vkMapMemory").map_err(free)?.cast::<u8>());
                let none = VulkanError { call: "vkMapMemory", result: vk::Result::ERROR_MEMORY_MAP_FAILED };
                Some(host.ok_or(none).map_err(free)?)
            } else {
                None
            };
            Ok(Allocation { gpu: Arc::clone(self), memory, buffer, host, bytes: needs.size })
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let clearing = self.clearing.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: every allocation holds the Device, so only these handles of the device are left.
        unsafe {
            self.device.destroy_fence(clearing.fence, None);
            self.device.destroy_command_pool(clearing.pool, None);
            self.device.destroy_device(None);
            self.instance.destroy_instance(None);
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("card", &self.card).finish_non_exhaustive()
    }
}

impl Clearing {
    /// # Safety
    /// `device` must have queues of `family`.
    unsafe fn new(device: &ash::Device, family: u32) -> Result<Self, VulkanError> {
        // SAFETY: the caller guarantees that the device has queues of `family`. After every error,
        // the handles that were made are destroyed.
        unsafe {
            let info = vk::CommandPoolCreateInfo::default()
                .queue_family_index(family)
                .flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER);
            let pool = device.create_command_pool(&info, None).of("vkCreateCommandPool")?;
            let destroy = |error| {
                device.destroy_command_pool(pool, None);
                error
            };
            let info = vk::CommandBufferAllocateInfo::default().command_pool(pool).command_buffer_count(1);
            let commands =
                device.allocate_command_buffers(&info).of("vkAllocateCommandBuffers").map_err(destroy)?[0];
            let fence = device
                .create_fence(&vk::FenceCreateInfo::default(), None)
                .of("vkCreateFence")
                .map_err(destroy)?;
            Ok(Clearing { pool, commands, fence })
        }
    }

    /// Fills the buffer with zeros and waits for it.
    fn clear(&mut self, gpu: &Device, buffer: vk::Buffer) -> Result<(), VulkanError> {
        // A card fills its memory at terabytes a second. So if a fill takes longer than this limit,
        // the card has hung.
        let limit = answer_limit().as_nanos() as u64;
        let (device, commands) = (&gpu.device, [self.commands]);
        // SAFETY: `&mut self` makes this the only user of its command buffer, whose previous
        // submission has ended. The queue is locked for each submission.
        unsafe {
            let begin =
                vk::CommandBufferBeginInfo::default().flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
            device.begin_command_buffer(self.commands, &begin).of("vkBeginCommandBuffer")?;
            device.cmd_fill_buffer(self.commands, buffer, 0, vk::WHOLE_SIZE, 0);
            device.end_command_buffer(self.commands).of("vkEndCommandBuffer")?;
            let submit = [vk::SubmitInfo::default().command_buffers(&commands)];
            let turn = gpu.queue_turn.lock().unwrap_or_else(PoisonError::into_inner);
            device.queue_submit(gpu.queue, &submit, self.fence).of("vkQueueSubmit")?;
            drop(turn);
            device.wait_for_fences(&[self.fence], true, limit).of("vkWaitForFences")?;
            device.reset_fences(&[self.fence]).of("vkResetFences")
        }
    }
}

impl Allocation {
    /// The memory's address for the processor; `None` if the card has no window onto it.
    pub fn host(&self) -> Option<NonNull<u8>> {
        self.host
    }

    /// The memory's handle for the card's transfer queue.
    pub fn buffer(&self) -> u64 {
        vk::Handle::as_raw(self.buffer)
    }

    /// Exports a descriptor of this memory, for CUDA or for another process. The memory lives while
    /// a descriptor is open.
    ///
    /// # Errors
    /// Fails with the driver's error, above all when too many files are open.
    pub fn export(&self) -> Result<OwnedFd, VulkanError> {
        let info = vk::MemoryGetFdInfoKHR::default()
            .memory(self.memory)
            .handle_type(vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD);
        // SAFETY: this device allocated the memory for export, and this function owns the new
        // descriptor.
        unsafe {
            let fd = self.gpu.external.get_memory_fd(&info).of("vkGetMemoryFdKHR")?;
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }

    /// Overwrites the memory with zeros. Nothing else may use it meanwhile.
    ///
    /// # Errors
    /// Fails when the card did not write the zeros.
    pub fn clear(&self) -> Result<(), VulkanError> {
        let mut clearing = self.gpu.clearing.lock().unwrap_or_else(PoisonError::into_inner);
        clearing.clear(&self.gpu, self.buffer)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: this device made the handles, and nothing uses them any more: the owner is being
        // dropped.
        unsafe {
            if self.host.is_some() {
                self.gpu.device.unmap_memory(self.memory);
            }
            self.gpu.device.destroy_buffer(self.buffer, None);
            self.gpu.device.free_memory(self.memory, None);
        }
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocation")
            .field("bytes", &self.bytes)
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}
