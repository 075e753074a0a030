//! Chooses the card, and its memory type. Only this code decides which memory counts as VRAM.
//!
//! Three kinds of memory look like a card's and are not suited. An integrated GPU's "device-local"
//! heap is the system's RAM, and so is a software renderer's. A card without Resizable BAR has a
//! real heap that the processor can see, but of only 256 MiB. Swapped pages in the first two would
//! only move from RAM to RAM. So all three are refused, with a sentence that says which kind was
//! found.

use super::{Device, Named, VulkanError};
use ash::vk;
use std::ffi::CStr;
use std::fmt;
use weir_core::ByteSize;

/// Largest number of bytes of the window onto a card, if PCI resizable BAR is turned off.
const SMALL_BAR: u64 = 512 << 20;

/// A card whose memory the processor can reach.
#[derive(Clone, Debug)]
pub struct Card {
    /// The card's name from its driver, such as `NVIDIA H200`.
    pub name: String,
    /// The card's UUID, which CUDA uses too.
    pub uuid: [u8; 16],
    /// The version of the driver's library. `None` unless the driver is NVIDIA's: how others encode
    /// theirs is not known.
    pub driver: Option<String>,
    /// Bytes of the heap from which chunks are taken.
    pub bytes: u64,
    /// Whether this is a processor that acts as a GPU. The store uses it only if the URL names it.
    pub software: bool,
    /// Whether the processor sees the whole heap; else pages go by the transfer queue.
    pub window: bool,
    pub(super) physical: vk::PhysicalDevice,
    pub(super) memory_type: u32,
    pub(super) staging_type: u32,
    pub(super) heap: usize,
    pub(super) queue: u32,
    /// The PCI address: domain, bus, device, function; `nvidia-smi` counts cards in this order.
    pci: [u32; 4],
}

/// A card that a store could open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// The PCI address as the kernel writes it: `0000:03:00.0`.
    pub address: String,
    /// Bytes of the memory heap from which the store takes memory.
    pub total: u64,
    /// Bytes that this process could still take from the heap. `None` if the driver gives no
    /// estimate.
    pub free: Option<u64>,
}

/// The reason why the machine has no mapped VRAM. With any of these reasons, the store may still
/// work through CUDA.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// There is no `libvulkan.so.1`.
    #[error("no Vulkan loader ({0}); install libvulkan1")]
    NoLoader(String),
    /// The loader found no driver, or the driver failed.
    #[error(transparent)]
    Vulkan(#[from] VulkanError),
    /// There are devices, and none of them is suitable.
    #[error("no GPU with its own memory in reach of the processor: {0}")]
    NoneSuitable(String),
    /// There are fewer cards than the index asks for.
    #[error("GPU {asked} of {have}: `weir doctor` lists them")]
    NoSuchIndex {
        /// The index that the URL names.
        asked: usize,
        /// The number of cards that were found.
        have: usize,
    },
}

impl fmt::Display for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.window { "mapped" } else { "by the transfer queue (Resizable BAR is off)" };
        write!(f, "{}, {} {how}", self.name, ByteSize(self.bytes))
    }
}

impl Device {
    /// Opens card number `index`, counted by PCI address as `nvidia-smi` does. With `software`,
    /// opens a software renderer, for tests.
    ///
    /// # Errors
    /// Fails when the machine has no card with this index. The error names the cards that were
    /// found instead.
    ///
    /// With `blind` no card's memory counts as visible, as if Resizable BAR were off.
    pub fn find(index: usize, software: bool, blind: bool) -> Result<Self, Refusal> {
        let (entry, instance) = begin()?;
        match choose(&instance, index, software, blind) {
            Ok(card) => Ok(Device::open(entry, instance, card)?),
            Err(refusal) => {
                // SAFETY: everything made from the instance is gone.
                unsafe { instance.destroy_instance(None) };
                Err(refusal)
            }
        }
    }
}

fn begin() -> Result<(ash::Entry, ash::Instance), Refusal> {
    // SAFETY: loading runs the loader's initialisers, as every Vulkan program does.
    let entry = unsafe { ash::Entry::load() }.map_err(|error| Refusal::NoLoader(error.to_string()))?;
    let app = vk::ApplicationInfo::default().application_name(c"weir").api_version(vk::API_VERSION_1_1);
    let info = vk::InstanceCreateInfo::default().application_info(&app);
    // SAFETY: `info` outlives the call.
    let instance = unsafe { entry.create_instance(&info, None) }.of("vkCreateInstance")?;
    Ok((entry, instance))
}

/// The discrete cards, in the order of `vram:0`, `vram:1`, ... None is opened, so this is cheap.
/// Empty without Vulkan.
pub fn list() -> Vec<Listed> {
    listed(false)
}

fn listed(software: bool) -> Vec<Listed> {
    let Ok((_entry, instance)) = begin() else { return Vec::new() };
    let listed =
        |card: Card| Listed { address: address(card.pci), total: card.bytes, free: card.budget(&instance) };
    let (fit, _) = cards(&instance, software, false).unwrap_or_default();
    let listed = fit.into_iter().map(listed).collect();
    // SAFETY: everything made from the instance is gone.
    unsafe { instance.destroy_instance(None) };
    listed
}

/// A PCI address as the kernel writes it.
fn address([domain, bus, device, function]: [u32; 4]) -> String {
    format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
}

impl Card {
    /// Whether the driver reports budgets (VK_EXT_memory_budget).
    pub(super) fn has_budget(&self, instance: &ash::Instance) -> bool {
        // SAFETY: the physical device belongs to this instance.
        let extensions = unsafe { instance.enumerate_device_extension_properties(self.physical) };
        let is_budget =
            |it: &vk::ExtensionProperties| it.extension_name_as_c_str() == Ok(ash::ext::memory_budget::NAME);
        extensions.is_ok_and(|extensions| extensions.iter().any(is_budget))
    }

    /// Bytes of the card's memory that this process could still have, if the driver estimates that.
    pub(super) fn budget(&self, instance: &ash::Instance) -> Option<u64> {
        if !self.has_budget(instance) {
            return None;
        }
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut properties = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        // SAFETY: the physical device belongs to this instance; both structures outlive the call.
        unsafe { instance.get_physical_device_memory_properties2(self.physical, &mut properties) };
        Some(budget.heap_budget[self.heap].saturating_sub(budget.heap_usage[self.heap]))
    }
}

/// The suitable cards in the order of their PCI addresses, and a sentence for each that is
/// unsuitable.
fn cards(
    instance: &ash::Instance,
    software: bool,
    blind: bool,
) -> Result<(Vec<Card>, Vec<String>), VulkanError> {
    // SAFETY: the instance is alive.
    let physicals = unsafe { instance.enumerate_physical_devices() }.of("vkEnumeratePhysicalDevices")?;
    let (mut fit, mut unfit) = (Vec::new(), Vec::new());
    for physical in physicals {
        match judge(instance, physical, software, blind) {
            Ok(card) => fit.push(card),
            Err(why) => unfit.push(why),
        }
    }
    fit.sort_by_key(|card| card.pci);
    Ok((fit, unfit))
}

fn choose(instance: &ash::Instance, index: usize, software: bool, blind: bool) -> Result<Card, Refusal> {
    let (mut fit, unfit) = cards(instance, software, blind)?;
    let have = fit.len();
    if index < have {
        return Ok(fit.swap_remove(index));
    }
    if have > 0 {
        return Err(Refusal::NoSuchIndex { asked: index, have });
    }
    Err(Refusal::NoneSuitable(if unfit.is_empty() {
        "Vulkan lists none".to_owned()
    } else {
        unfit.join("; ")
    }))
}

/// Returns a suitable card, or the reason why it is unsuitable.
fn judge(
    instance: &ash::Instance,
    physical: vk::PhysicalDevice,
    software: bool,
    blind: bool,
) -> Result<Card, String> {
    let mut ids = vk::PhysicalDeviceIDProperties::default();
    let mut pci = vk::PhysicalDevicePCIBusInfoPropertiesEXT::default();
    let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut ids).push_next(&mut pci);
    // SAFETY: `physical` belongs to `instance`. The chained structures outlive the calls, and a
    // driver that does not know one leaves it unchanged.
    let (memory, families, extensions) = unsafe {
        instance.get_physical_device_properties2(physical, &mut properties);
        (
            instance.get_physical_device_memory_properties(physical),
            instance.get_physical_device_queue_family_properties(physical),
            instance.enumerate_device_extension_properties(physical).unwrap_or_default(),
        )
    };
    let kind = properties.properties.device_type;
    let name =
        properties.properties.device_name_as_c_str().unwrap_or(c"unnamed").to_string_lossy().into_owned();
    let wanted = if software { vk::PhysicalDeviceType::CPU } else { vk::PhysicalDeviceType::DISCRETE_GPU };
    if kind != wanted {
        return Err(format!("{name} {}", not_a_card(kind)));
    }
    let lacks = |what: &str| format!("{name} lacks what a store needs: {what}");
    let has = |name: &CStr| extensions.iter().any(|it| it.extension_name_as_c_str() == Ok(name));
    if !has(ash::khr::external_memory_fd::NAME) {
        return Err(lacks("VK_KHR_external_memory_fd"));
    }
    let queue = families
        .iter()
        .position(|family| {
            family
                .queue_flags
                .intersects(vk::QueueFlags::TRANSFER | vk::QueueFlags::COMPUTE | vk::QueueFlags::GRAPHICS)
        })
        .ok_or_else(|| lacks("a queue that copies"))?;
    let visible = visible_memory(&memory, software).filter(|_| !blind);
    let (memory_type, heap, bytes) = match visible {
        Some(found) => found,
        None => hidden_memory(&memory, software).ok_or_else(|| lacks("memory of its own"))?,
    };
    let staging_type = staging_memory(&memory).ok_or_else(|| lacks("memory that it shares with the host"))?;
    Ok(Card {
        name,
        driver: nvidia_version(properties.properties.vendor_id, properties.properties.driver_version),
        uuid: ids.device_uuid,
        bytes,
        software,
        window: visible.is_some(),
        physical,
        memory_type,
        staging_type,
        heap,
        queue: queue as u32,
        pci: [pci.pci_domain, pci.pci_bus, pci.pci_device, pci.pci_function],
    })
}

/// NVIDIA packs its version into 10, 8, 8 and 6 bits.
fn nvidia_version(vendor: u32, version: u32) -> Option<String> {
    const NVIDIA: u32 = 0x10de;
    let [major, minor, third] = [version >> 22, version >> 14 & 0xff, version >> 6 & 0xff];
    (vendor == NVIDIA).then(|| format!("{major}.{minor:02}.{third:02}"))
}

fn not_a_card(kind: vk::PhysicalDeviceType) -> &'static str {
    match kind {
        vk::PhysicalDeviceType::INTEGRATED_GPU => "is integrated, its memory is the system's RAM",
        vk::PhysicalDeviceType::CPU => "is a software renderer, its memory is the system's RAM",
        vk::PhysicalDeviceType::VIRTUAL_GPU => "is a virtual GPU, whose memory may be anywhere",
        _ => "is no discrete GPU",
    }
}

/// Chooses a memory type that is on the device, visible to the host and coherent, in the largest
/// heap that has one. Prefers an uncached type: memory that a discrete card's driver maps as cached
/// lies in RAM.
fn visible_memory(memory: &vk::PhysicalDeviceMemoryProperties, software: bool) -> Option<(u32, usize, u64)> {
    use vk::MemoryPropertyFlags as Flags;
    let wanted = Flags::DEVICE_LOCAL | Flags::HOST_VISIBLE | Flags::HOST_COHERENT;
    let heaps = memory.memory_heaps_as_slice();
    let on_device = |heap: &vk::MemoryHeap| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL);
    let best = memory
        .memory_types_as_slice()
        .iter()
        .enumerate()
        .filter(|(_, kind)| kind.property_flags.contains(wanted))
        .filter(|(_, kind)| software || !kind.property_flags.contains(Flags::HOST_CACHED))
        .filter(|(_, kind)| on_device(&heaps[kind.heap_index as usize]))
        // Of equal types the first is used: drivers list the plainest type first.
        .rev()
        .max_by_key(|(_, kind)| heaps[kind.heap_index as usize].size);
    let (index, kind) = best?;
    let heap = kind.heap_index as usize;
    let bytes = heaps[heap].size;
    let largest = heaps.iter().filter(|heap| on_device(heap)).map(|heap| heap.size).max().unwrap_or(bytes);
    if bytes < SMALL_BAR && largest > bytes {
        return None;
    }
    Some((index as u32, heap, bytes))
}

/// Chooses memory that only the card sees, in its largest heap.
fn hidden_memory(memory: &vk::PhysicalDeviceMemoryProperties, software: bool) -> Option<(u32, usize, u64)> {
    use vk::MemoryPropertyFlags as Flags;
    let heaps = memory.memory_heaps_as_slice();
    let types = memory.memory_types_as_slice().iter().enumerate();
    let (index, kind) = types
        .filter(|(_, kind)| kind.property_flags.contains(Flags::DEVICE_LOCAL))
        .filter(|(_, kind)| software || !kind.property_flags.contains(Flags::HOST_CACHED))
        .filter(|(_, kind)| heaps[kind.heap_index as usize].flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL))
        .rev()
        .max_by_key(|(_, kind)| heaps[kind.heap_index as usize].size)?;
    let heap = kind.heap_index as usize;
    Some((index as u32, heap, heaps[heap].size))
}

/// Chooses host memory for the copies: cached, if there is such a type, since the processor reads
/// from it.
fn staging_memory(memory: &vk::PhysicalDeviceMemoryProperties) -> Option<u32> {
    use vk::MemoryPropertyFlags as Flags;
    let wanted = Flags::HOST_VISIBLE | Flags::HOST_COHERENT;
    let rank = |flags: Flags| (flags.contains(Flags::HOST_CACHED), !flags.contains(Flags::DEVICE_LOCAL));
    let types = memory.memory_types_as_slice().iter().enumerate();
    types
        .filter(|(_, kind)| kind.property_flags.contains(wanted))
        .rev()
        .max_by_key(|(_, kind)| rank(kind.property_flags))
        .map(|(index, _)| index as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vk::MemoryPropertyFlags as Flags;

    #[test]
    fn a_card_beyond_the_last_is_refused_with_their_number() {
        let error = Device::find(1, true, false).expect_err("there is one renderer").to_string();
        assert_eq!(error, "GPU 1 of 1: `weir doctor` lists them");
    }

    /// Makes a card's memory properties. `types` are the memory types (flags, index of the heap),
    /// and `heaps` the heaps (bytes, whether they are on the device).
    fn memory(types: &[(Flags, u32)], heaps: &[(u64, bool)]) -> vk::PhysicalDeviceMemoryProperties {
        let mut memory = vk::PhysicalDeviceMemoryProperties {
            memory_type_count: types.len() as u32,
            memory_heap_count: heaps.len() as u32,
            ..Default::default()
        };
        for (slot, &(flags, heap)) in memory.memory_types.iter_mut().zip(types) {
            *slot = vk::MemoryType { property_flags: flags, heap_index: heap };
        }
        for (slot, &(size, local)) in memory.memory_heaps.iter_mut().zip(heaps) {
            let flags = if local { vk::MemoryHeapFlags::DEVICE_LOCAL } else { vk::MemoryHeapFlags::empty() };
            *slot = vk::MemoryHeap { size, flags };
        }
        memory
    }

    const BAR: Flags = Flags::from_raw(
        Flags::DEVICE_LOCAL.as_raw() | Flags::HOST_VISIBLE.as_raw() | Flags::HOST_COHERENT.as_raw(),
    );

    #[test]
    fn a_packed_version_is_read_as_nvidia_writes_it() {
        assert_eq!(nvidia_version(0x10de, 580 << 22 | 159 << 14 | 4 << 6).as_deref(), Some("580.159.04"));
        assert_eq!(nvidia_version(0x1002, 1), None);
    }

    #[test]
    fn the_whole_heap_of_a_card_with_a_large_window_is_taken() {
        // The memory types are those of an H200: the card's memory, the host's, and one type that
        // is both.
        let host = Flags::HOST_VISIBLE | Flags::HOST_COHERENT;
        let types = [(Flags::DEVICE_LOCAL, 0), (host, 1), (host | Flags::HOST_CACHED, 1), (BAR, 0)];
        let memory = memory(&types, &[(143_771 << 20, true), (128 << 30, false)]);
        assert_eq!(visible_memory(&memory, false), Some((3, 0, 143_771 << 20)));
    }

    #[test]
    fn a_256_mib_window_is_left_alone_and_the_memory_behind_it_taken() {
        let host = Flags::HOST_VISIBLE | Flags::HOST_COHERENT;
        let types = [(Flags::DEVICE_LOCAL, 0), (host, 1), (host | Flags::HOST_CACHED, 1), (BAR, 2)];
        let memory = memory(&types, &[(8 << 30, true), (16 << 30, false), (256 << 20, true)]);
        assert_eq!(visible_memory(&memory, false), None);
        assert_eq!(hidden_memory(&memory, false), Some((0, 0, 8 << 30)));
        assert_eq!(staging_memory(&memory), Some(2));
    }

    #[test]
    fn cached_or_host_memory_that_calls_itself_visible_is_no_vram() {
        let cached = memory(&[(BAR | Flags::HOST_CACHED, 0)], &[(8 << 30, true)]);
        assert_eq!(visible_memory(&cached, false), None);
        assert!(visible_memory(&cached, true).is_some(), "a software renderer may be chosen by name");
        let host = memory(&[(BAR, 0)], &[(8 << 30, false)]);
        assert_eq!(visible_memory(&host, false), None);
    }

    #[test]
    fn an_address_is_written_as_the_kernel_writes_it() {
        assert_eq!(address([0, 0x3, 0, 0]), "0000:03:00.0");
        assert_eq!(address([0x1_0000, 0xc1, 0x1f, 7]), "10000:c1:1f.7");
    }

    #[test]
    fn what_is_listed_is_what_is_opened() {
        for software in [false, true] {
            let open = (0..).map_while(|index| Device::find(index, software, false).ok());
            let opened: Vec<_> = open.map(|gpu| (address(gpu.card.pci), gpu.card.bytes)).collect();
            let listed: Vec<_> = listed(software).into_iter().map(|it| (it.address, it.total)).collect();
            assert_eq!(listed, opened);
        }
    }

    #[test]
    fn a_software_renderer_is_refused_unless_it_is_asked_for() {
        // Without a software renderer this checks nothing. CI's list of packages has one.
        match Device::find(0, true, false) {
            Ok(gpu) => assert!(gpu.card.software && gpu.card.driver.is_none()),
            Err(Refusal::NoLoader(_)) => return,
            Err(refusal) => panic!("{refusal}"),
        }
        if let Ok(gpu) = Device::find(0, false, false) {
            assert!(!gpu.card.software, "{} passed for a discrete GPU", gpu.card);
        }
    }
}
