//! Facts that only NVIDIA's management library (NVML) knows: the card's memory that is free over
//! all processes, its other users, whether it drives a display, and its power. The library is
//! loaded at run time. Without it the answers are `None`.

use libloading::Library;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::Path;

type Handle = *mut c_void;

/// NVML, with one card.
pub struct Nvml {
    memory: unsafe extern "C" fn(Handle, *mut MemoryInfo) -> c_int,
    power: unsafe extern "C" fn(Handle, *mut c_uint) -> c_int,
    display: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    compute: Processes,
    graphics: Processes,
    shutdown: unsafe extern "C" fn() -> c_int,
    handle: Handle,
    driver: String,
    /// Keeps the library loaded, since these functions lie in it. The field is last, so that it is
    /// dropped last.
    _library: Library,
}

type Processes = unsafe extern "C" fn(Handle, *mut c_uint, *mut ProcessInfo) -> c_int;

// SAFETY: NVML is thread-safe, by its documentation.
unsafe impl Send for Nvml {}
// SAFETY: NVML is thread-safe, by its documentation.
unsafe impl Sync for Nvml {}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct MemoryInfo {
    /// Bytes of the card's memory in total.
    pub total: u64,
    /// Bytes of the card's memory that are free.
    pub free: u64,
    /// Bytes of the card's memory that are in use.
    pub used: u64,
}

/// `nvmlProcessInfo_v2_t`, which the `_v3` calls fill.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    used: u64,
    instance: c_uint,
    compute_instance: c_uint,
}

impl Nvml {
    /// Opens the card that has this `uuid` in Vulkan and CUDA; `None` without the library or the
    /// card.
    pub fn open(library: &Path, uuid: [u8; 16]) -> Option<Self> {
        // SAFETY: loading the vendor's library runs its initialisers; every symbol is used with the
        // signature that nvml.h gives it, and every output outlives its call.
        unsafe {
            let library = Library::new(library).ok()?;
            let init = *library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2\0").ok()?;
            let shutdown = *library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlShutdown\0").ok()?;
            let by_uuid = *library
                .get::<unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int>(
                    b"nvmlDeviceGetHandleByUUID\0",
                )
                .ok()?;
            let version = *library
                .get::<unsafe extern "C" fn(*mut c_char, c_uint) -> c_int>(b"nvmlSystemGetDriverVersion\0")
                .ok()?;
            let memory = *library.get(b"nvmlDeviceGetMemoryInfo\0").ok()?;
            let power = *library.get(b"nvmlDeviceGetPowerUsage\0").ok()?;
            let display = *library.get(b"nvmlDeviceGetDisplayActive\0").ok()?;
            let compute = *library.get::<Processes>(b"nvmlDeviceGetComputeRunningProcesses_v3\0").ok()?;
            let graphics = *library.get::<Processes>(b"nvmlDeviceGetGraphicsRunningProcesses_v3\0").ok()?;
            if init() != 0 {
                return None;
            }
            let mut handle = std::ptr::null_mut();
            let name = CString::new(uuid_text(uuid)).ok()?;
            if by_uuid(name.as_ptr(), &mut handle) != 0 {
                shutdown();
                return None;
            }
            let mut text = [0 as c_char; 96];
            let known = version(text.as_mut_ptr(), text.len() as c_uint) == 0;
            let driver = if known { super::engine::c_text(&text) } else { String::new() };
            let nvml = Nvml {
                memory,
                power,
                display,
                compute,
                graphics,
                shutdown,
                handle,
                driver,
                _library: library,
            };
            Some(nvml)
        }
    }

    /// The version of the loaded driver.
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// Bytes of the card's memory: free, in use, and in total.
    pub fn memory(&self) -> Option<MemoryInfo> {
        let mut memory = MemoryInfo::default();
        // SAFETY: the handle is the card's, the output outlives the call.
        (unsafe { (self.memory)(self.handle, &mut memory) } == 0).then_some(memory)
    }

    /// The card's power, in milliwatts.
    pub fn power_mw(&self) -> Option<u32> {
        let mut power = 0;
        // SAFETY: the handle is the card's, the output outlives the call.
        (unsafe { (self.power)(self.handle, &mut power) } == 0).then_some(power)
    }

    /// Whether a display is connected to the card.
    pub fn drives_display(&self) -> bool {
        let mut active = 0;
        // SAFETY: the handle is the card's, the output outlives the call.
        unsafe { (self.display)(self.handle, &mut active) == 0 && active != 0 }
    }

    /// Number of other processes with a context on the card. Inside a container NVML may not name
    /// this process; then one unknown process counts as this one.
    pub fn others(&self) -> u32 {
        let own = std::process::id();
        let mut pids: Vec<u32> = Vec::with_capacity(64);
        for list in [self.compute, self.graphics] {
            let mut infos = [ProcessInfo::default(); 64];
            let mut count = infos.len() as c_uint;
            // SAFETY: the array holds `count` entries, as the call is told.
            let result = unsafe { list(self.handle, &mut count, infos.as_mut_ptr()) };
            // The value 7 is NVML_ERROR_INSUFFICIENT_SIZE: the array is full, and there are more
            // processes.
            let filled = if result == 0 || result == 7 { (count as usize).min(infos.len()) } else { 0 };
            pids.extend(infos[..filled].iter().map(|info| info.pid));
        }
        pids.sort_unstable();
        pids.dedup();
        let unknown = if pids.contains(&own) { 1 } else { usize::from(!pids.is_empty()) };
        (pids.len() - unknown) as u32
    }
}

/// A card as NVML describes it.
pub struct Told {
    /// The card's PCI address as the kernel writes it.
    pub address: String,
    /// The card's memory in bytes: free, in use, and in total.
    pub memory: MemoryInfo,
    /// Whether a display is connected to the card.
    pub display: bool,
}

/// Every card that the library knows, in the order of PCI addresses; none without the library.
pub fn all(library: &Path) -> Vec<Told> {
    let mut cards = unordered(library).unwrap_or_default();
    cards.sort_unstable_by(|a, b| a.address.cmp(&b.address));
    cards
}

fn unordered(library: &Path) -> Option<Vec<Told>> {
    // SAFETY: loading NVML runs its initialisers, each symbol has the signature that nvml.h gives
    // it, and no handle is used after the shutdown.
    unsafe {
        let library = Library::new(library).ok()?;
        let init = *library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2\0").ok()?;
        let shutdown = *library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlShutdown\0").ok()?;
        let count =
            *library.get::<unsafe extern "C" fn(*mut c_uint) -> c_int>(b"nvmlDeviceGetCount_v2\0").ok()?;
        let by_index = *library
            .get::<unsafe extern "C" fn(c_uint, *mut Handle) -> c_int>(b"nvmlDeviceGetHandleByIndex_v2\0")
            .ok()?;
        let pci = *library
            .get::<unsafe extern "C" fn(Handle, *mut PciInfo) -> c_int>(b"nvmlDeviceGetPciInfo_v3\0")
            .ok()?;
        let memory = *library
            .get::<unsafe extern "C" fn(Handle, *mut MemoryInfo) -> c_int>(b"nvmlDeviceGetMemoryInfo\0")
            .ok()?;
        let display = *library
            .get::<unsafe extern "C" fn(Handle, *mut c_int) -> c_int>(b"nvmlDeviceGetDisplayActive\0")
            .ok()?;
        if init() != 0 {
            return None;
        }
        let card = |index| {
            let (mut handle, mut at) = (std::ptr::null_mut(), PciInfo::default());
            let (mut bytes, mut active) = (MemoryInfo::default(), 0);
            // A card that has fallen off the bus still has an index, but answers no call.
            let answers = by_index(index, &mut handle) == 0
                && pci(handle, &mut at) == 0
                && memory(handle, &mut bytes) == 0;
            answers.then(|| Told {
                address: format!("{:04x}:{:02x}:{:02x}.0", at.domain, at.bus, at.device),
                memory: bytes,
                display: display(handle, &mut active) == 0 && active != 0,
            })
        };
        let mut number = 0;
        let known = count(&mut number) == 0;
        let cards = (0..if known { number } else { 0 }).filter_map(card).collect();
        shutdown();
        Some(cards)
    }
}

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Default)]
struct PciInfo {
    legacy: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    ids: [c_uint; 2],
    text: [u8; 32],
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: this pairs with the init in `open`; NVML counts both.
        unsafe { (self.shutdown)() };
    }
}

impl std::fmt::Debug for Nvml {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nvml").field("driver", &self.driver).finish_non_exhaustive()
    }
}

/// A UUID as NVML writes it: `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
fn uuid_text(uuid: [u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvidia_smi_writes_it() {
        let uuid = *b"\x01\x23\x45\x67\x89\xab\xcd\xef\x00\x11\x22\x33\x44\x55\x66\x77";
        assert_eq!(uuid_text(uuid), "GPU-01234567-89ab-cdef-0011-223344556677");
    }
}
