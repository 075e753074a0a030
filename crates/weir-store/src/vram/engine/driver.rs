//! The part of the CUDA driver interface that Weir uses, found in `libcuda.so.1` at run time.
//!
//! The declarations of thirty functions are written by hand. The alternative is a crate of forty
//! thousand lines that builds only with a CUDA toolkit, or for one version of CUDA. The types
//! follow `cuda.h`. Each symbol has the version suffix that the header's macros give it.

use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::Path;

/// An address in the card's or the host's memory: CUDA gives both one address space.
pub type DevicePtr = u64;
/// `CUdevice`.
pub type Device = c_int;
/// `CUcontext`.
pub type ContextHandle = *mut c_void;
/// `CUstream`.
pub type Stream = *mut c_void;
/// `CUevent`.
pub type Event = *mut c_void;
/// `CUmodule`.
pub type Module = *mut c_void;
/// `CUfunction`.
pub type Function = *mut c_void;
/// `CUexternalMemory`.
pub type ExternalMemory = *mut c_void;

/// A `CUresult` that is an error.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CudaError(pub c_int);

impl CudaError {
    /// The answer of a query whose work has not ended yet. It is no failure.
    pub const NOT_READY: CudaError = CudaError(600);
    /// No memory of the size that was asked for is free.
    pub const OUT_OF_MEMORY: CudaError = CudaError(2);

    /// Whether the context, or the card, has failed for good. CUDA calls such errors sticky: after
    /// one, every call returns the same error until the process ends.
    pub fn is_sticky(self) -> bool {
        // The numbers are from cuda.h: DEINITIALIZED, ECC_UNCORRECTABLE, HARDWARE_STACK_ERROR ..
        // LAUNCH_FAILED (which includes ILLEGAL_ADDRESS and ILLEGAL_INSTRUCTION), LAUNCH_TIMEOUT,
        // SYSTEM_NOT_READY, UNKNOWN.
        matches!(self.0, 4 | 46 | 214 | 220 | 226 | 700 | 702 | 714..=719 | 802 | 999)
    }
}

impl fmt::Debug for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            1 => "invalid value",
            2 => "out of memory",
            3 => "not initialized",
            4 => "deinitialized",
            46 => "device unavailable",
            100 => "no device",
            101 => "invalid device",
            201 => "invalid context",
            214 => "uncorrectable ECC error",
            218 => "invalid PTX",
            222 => "PTX newer than the driver",
            400 => "invalid handle",
            600 => "not ready",
            700 => "illegal address",
            702 => "launch timeout",
            715 => "illegal instruction",
            716 => "misaligned address",
            719 => "launch failed",
            801 => "not supported",
            803 => "driver and library versions differ",
            999 => "unknown error",
            _ => return write!(f, "CUDA error {}", self.0),
        };
        write!(f, "CUDA error {} ({name})", self.0)
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl std::error::Error for CudaError {}

/// A failed call, with the error that it returned.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("{call} answered {error}")]
pub struct CallError {
    /// The name of the call.
    pub call: &'static str,
    /// The error that the call returned.
    pub error: CudaError,
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemLocation {
    pub kind: c_int,
    pub id: c_int,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub const LOCATION_DEVICE: c_int = 1;

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemcpyAttributes {
    pub source_order: c_int,
    pub source: MemLocation,
    pub destination: MemLocation,
    pub flags: c_uint,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AllocationProp {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: MemLocation,
    pub win32: *mut c_void,
    pub compression: u8,
    pub rdma: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AccessDesc {
    pub location: MemLocation,
    pub flags: c_int,
}

/// `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`; its union is sixteen bytes, of which a file descriptor uses
/// four.
#[repr(C)]
pub struct ExternalMemoryHandle {
    pub kind: c_int,
    pub padding: c_int,
    pub fd: c_int,
    pub union_rest: [c_int; 3],
    pub size: u64,
    pub flags: c_uint,
    pub reserved: [c_uint; 16],
}

/// `CUDA_EXTERNAL_MEMORY_BUFFER_DESC`.
#[repr(C)]
pub struct ExternalMemoryBuffer {
    pub offset: u64,
    pub size: u64,
    pub flags: c_uint,
    pub reserved: [c_uint; 16],
}

macro_rules! driver {
    (
        required { $($name:ident = $symbol:literal ($($arg:ty),*);)* }
        optional { $($oname:ident = $osymbol:literal ($($oarg:ty),*);)* }
    ) => {
        /// The driver's functions, each with its C signature, which returns a `CUresult`.
        #[allow(non_snake_case, reason = "the field names are the functions' own")]
        pub struct Driver {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> c_int,)*
            $(pub(super) $oname: Option<unsafe extern "C" fn($($oarg),*) -> c_int>,)*
            /// Keeps the library loaded, since these functions lie in it. The field is last, so
            /// that it is dropped last.
            _library: Library,
        }

        impl Driver {
            /// Finds every function in `library`.
            ///
            /// # Errors
            /// Fails with the loader's message when the library or a required symbol is missing.
            pub fn load(library: &Path) -> Result<Self, String> {
                // SAFETY: loading the vendor's library runs its initialisers, as it must; each
                // symbol is used with the signature that cuda.h gives it.
                unsafe {
                    let library = Library::new(library).map_err(|error| error.to_string())?;
                    $(let $name = *library.get::<unsafe extern "C" fn($($arg),*) -> c_int>($symbol)
                        .map_err(|error| error.to_string())?;)*
                    $(let $oname = library.get::<unsafe extern "C" fn($($oarg),*) -> c_int>($osymbol)
                        .ok().map(|symbol| *symbol);)*
                    Ok(Driver { $($name,)* $($oname,)* _library: library })
                }
            }
        }
    };
}

driver! {
    required {
        init = b"cuInit\0" (c_uint);
        device_count = b"cuDeviceGetCount\0" (*mut c_int);
        device_get = b"cuDeviceGet\0" (*mut Device, c_int);
        device_uuid = b"cuDeviceGetUuid\0" (*mut [u8; 16], Device);
        device_name = b"cuDeviceGetName\0" (*mut c_char, c_int, Device);
        device_attribute = b"cuDeviceGetAttribute\0" (*mut c_int, c_int, Device);
        context_retain = b"cuDevicePrimaryCtxRetain\0" (*mut ContextHandle, Device);
        context_release = b"cuDevicePrimaryCtxRelease_v2\0" (Device);
        context_flags = b"cuDevicePrimaryCtxSetFlags_v2\0" (Device, c_uint);
        context_set = b"cuCtxSetCurrent\0" (ContextHandle);
        mem_info = b"cuMemGetInfo_v2\0" (*mut usize, *mut usize);
        stream_create = b"cuStreamCreateWithPriority\0" (*mut Stream, c_uint, c_int);
        stream_destroy = b"cuStreamDestroy_v2\0" (Stream);
        stream_query = b"cuStreamQuery\0" (Stream);
        stream_synchronize = b"cuStreamSynchronize\0" (Stream);
        event_create = b"cuEventCreate\0" (*mut Event, c_uint);
        event_record = b"cuEventRecord\0" (Event, Stream);
        event_query = b"cuEventQuery\0" (Event);
        event_destroy = b"cuEventDestroy_v2\0" (Event);
        host_alloc = b"cuMemHostAlloc\0" (*mut *mut c_void, usize, c_uint);
        host_free = b"cuMemFreeHost\0" (*mut c_void);
        copy_to_device = b"cuMemcpyHtoDAsync_v2\0" (DevicePtr, *const c_void, usize, Stream);
        copy_to_host = b"cuMemcpyDtoHAsync_v2\0" (*mut c_void, DevicePtr, usize, Stream);
        set_bytes = b"cuMemsetD8Async\0" (DevicePtr, u8, usize, Stream);
        import_memory = b"cuImportExternalMemory\0" (*mut ExternalMemory, *const ExternalMemoryHandle);
        map_imported = b"cuExternalMemoryGetMappedBuffer\0"
            (*mut DevicePtr, ExternalMemory, *const ExternalMemoryBuffer);
        destroy_imported = b"cuDestroyExternalMemory\0" (ExternalMemory);
        mem_free = b"cuMemFree_v2\0" (DevicePtr);
        vmm_create = b"cuMemCreate\0" (*mut u64, usize, *const AllocationProp, u64);
        vmm_release = b"cuMemRelease\0" (u64);
        vmm_reserve = b"cuMemAddressReserve\0" (*mut DevicePtr, usize, usize, DevicePtr, u64);
        vmm_unreserve = b"cuMemAddressFree\0" (DevicePtr, usize);
        vmm_map = b"cuMemMap\0" (DevicePtr, usize, usize, u64, u64);
        vmm_unmap = b"cuMemUnmap\0" (DevicePtr, usize);
        vmm_access = b"cuMemSetAccess\0" (DevicePtr, usize, *const AccessDesc, usize);
        vmm_import = b"cuMemImportFromShareableHandle\0" (*mut u64, *mut c_void, c_int);
        vmm_export = b"cuMemExportToShareableHandle\0" (*mut c_void, u64, c_int, u64);
        module_load = b"cuModuleLoadData\0" (*mut Module, *const c_void);
        module_unload = b"cuModuleUnload\0" (Module);
        module_function = b"cuModuleGetFunction\0" (*mut Function, Module, *const c_char);
        launch = b"cuLaunchKernel\0" (
            Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Stream,
            *mut *mut c_void, *mut *mut c_void
        );
    }
    optional {
        // The batch copy of CUDA 13 no longer returns the index of a copy that failed. Its symbol
        // is new, but cuda.h calls both functions `cuMemcpyBatchAsync`.
        copy_batch_13 = b"cuMemcpyBatchAsync_v2\0" (
            *const DevicePtr, *const DevicePtr, *const usize, usize,
            *const MemcpyAttributes, *const usize, usize, Stream
        );
        copy_batch_12 = b"cuMemcpyBatchAsync\0" (
            *const DevicePtr, *const DevicePtr, *const usize, usize,
            *const MemcpyAttributes, *const usize, usize, *mut usize, Stream
        );
    }
}

/// Turns a `CUresult` into a result that names the call.
pub(super) fn check(call: &'static str, result: c_int) -> Result<(), CallError> {
    if result == 0 { Ok(()) } else { Err(CallError { call, error: CudaError(result) }) }
}

/// Reads a C string that CUDA wrote.
pub fn text(bytes: &[c_char]) -> String {
    // SAFETY: c_char has u8's size, and every value of it is valid; the slice has the same length.
    let bytes = unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<u8>(), bytes.len()) };
    CStr::from_bytes_until_nul(bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_that_cuda_h_gives_them() {
        // A C program printed the sizes of these structures with cuda.h 12.8 and 13.0.
        assert_eq!(size_of::<MemcpyAttributes>(), 24);
        assert_eq!(size_of::<AllocationProp>(), 32);
        assert_eq!(size_of::<AccessDesc>(), 12);
        assert_eq!(size_of::<ExternalMemoryHandle>(), 104);
        assert_eq!(size_of::<ExternalMemoryBuffer>(), 88);
        assert_eq!(std::mem::offset_of!(ExternalMemoryHandle, fd), 8, "the union holds pointers");
        assert_eq!(std::mem::offset_of!(ExternalMemoryHandle, size), 24);
    }

    #[test]
    fn a_missing_library_is_a_sentence() {
        let error = Driver::load(Path::new("/nonexistent/libcuda.so.1")).err().expect("no such library");
        assert!(error.contains("libcuda"), "{error}");
    }

    #[test]
    fn sticky_errors_are_those_after_which_the_context_is_dead() {
        for code in [700, 702, 715, 719, 214, 999] {
            assert!(CudaError(code).is_sticky(), "{code}");
        }
        for code in [1, 2, 400, 600, 801] {
            assert!(!CudaError(code).is_sticky(), "{code}");
        }
    }
}
