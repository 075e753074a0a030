//! Builds and controls the fake `libcuda` of `fake_cuda.c`.

use libloading::Library;
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A copy of the fake library in a file of its own, so that errors which one test injects do not
/// affect another.
pub struct FakeCuda {
    path: PathBuf,
    library: Library,
}

/// The batch-copy symbol that the fake driver has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BatchCopy {
    None,
    Cuda12,
    Cuda13,
}

impl FakeCuda {
    pub fn build(batch: BatchCopy) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("libcuda-fake-{}-{number}.so", std::process::id()));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_cuda/fake_cuda.c");
        let define = match batch {
            BatchCopy::None => "-DBATCH_NONE",
            BatchCopy::Cuda12 => "-DBATCH_12",
            BatchCopy::Cuda13 => "-DBATCH_13",
        };
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-pthread", "-w", define, "-o"])
            .args([path.as_os_str(), source.as_ref()])
            .status()
            .expect("cc, the C compiler");
        assert!(built.success(), "cc {source}");
        // SAFETY: the library is this test's own, without initialisers.
        let library = unsafe { Library::new(&path) }.expect("the library just built");
        FakeCuda { path, library }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Has `call` return `code` from its `skip`-th call on: `times` times, or for ever if that is
    /// negative.
    pub fn fail(&self, call: &str, skip: i32, times: i32, code: i32) {
        let call = CString::new(call).expect("a name");
        // SAFETY: the signature is the one in fake_cuda.c; the name is copied before the call
        // returns.
        unsafe {
            let fail = self
                .library
                .get::<unsafe extern "C" fn(*const c_char, c_int, c_int, c_int)>(b"fake_cuda_fail\0")
                .expect("fake_cuda_fail");
            fail(call.as_ptr(), skip, times, code);
        }
    }

    /// From now on `call` does not return, until this is called with an empty name.
    pub fn hold(&self, call: &str) {
        let call = CString::new(call).expect("a name");
        // SAFETY: the signature is the one in fake_cuda.c; the name is copied before the call
        // returns.
        unsafe {
            let hold =
                self.library.get::<unsafe extern "C" fn(*const c_char)>(b"fake_cuda_hold\0").expect("it");
            hold(call.as_ptr());
        }
    }

    /// From now on a call that names more copies than this kills the context.
    pub fn limit_batches(&self, copies: i32) {
        // SAFETY: the signature is the one in fake_cuda.c.
        unsafe {
            let limit =
                self.library.get::<unsafe extern "C" fn(c_int)>(b"fake_cuda_batch_limit\0").expect("it");
            limit(copies);
        }
    }

    /// The most copies that one call has named so far.
    pub fn largest_batch(&self) -> i32 {
        // SAFETY: the signature is the one in fake_cuda.c.
        unsafe {
            let largest = self
                .library
                .get::<unsafe extern "C" fn() -> c_int>(b"fake_cuda_batch_largest\0")
                .expect("it");
            largest()
        }
    }

    /// Has the context die with `code`; with `for_good`, every later context of this process too.
    pub fn die(&self, code: i32, for_good: bool) {
        // SAFETY: the signature is the one in fake_cuda.c.
        unsafe {
            let die = self.library.get::<unsafe extern "C" fn(c_int, c_int)>(b"fake_cuda_die\0").expect("it");
            die(code, c_int::from(for_good));
        }
    }

    /// Numbers so far of single copies, batches, and copies inside batches.
    pub fn copies(&self) -> [i32; 3] {
        // SAFETY: the signature is the one in fake_cuda.c.
        unsafe {
            let copies =
                self.library.get::<unsafe extern "C" fn(c_int) -> c_int>(b"fake_cuda_copies\0").expect("it");
            [0, 1, 2].map(|which| copies(which))
        }
    }
}

impl Drop for FakeCuda {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
