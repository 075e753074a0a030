//! Builds and steers the fake `libcuda` of `fake_cuda.c`.

use libloading::Library;
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A copy of the fake, alone in its file, so that what one test injects no other sees.
pub struct FakeCuda {
    path: PathBuf,
    library: Library,
}

/// Which batch-copy symbol the "driver" has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Batch {
    None,
    Cuda12,
    Cuda13,
}

impl FakeCuda {
    pub fn build(batch: Batch) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("libcuda-fake-{}-{number}.so", std::process::id()));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_cuda/fake_cuda.c");
        let define = match batch {
            Batch::None => "-DBATCH_NONE",
            Batch::Cuda12 => "-DBATCH_12",
            Batch::Cuda13 => "-DBATCH_13",
        };
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-pthread", "-w", define, "-o"])
            .args([path.as_os_str(), source.as_ref()])
            .status()
            .expect("cc, the C compiler");
        assert!(built.success(), "cc {source}");
        // SAFETY: our own library, without initialisers.
        let library = unsafe { Library::new(&path) }.expect("the library just built");
        FakeCuda { path, library }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// From its `skip`-th call on, `call` answers `code`: `times` times, or for good if that is
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

    /// From now on a call that names more copies kills the context.
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

    /// The context dies of `code`; `for_good`: so does every later one of this process.
    pub fn die(&self, code: i32, for_good: bool) {
        // SAFETY: the signature is the one in fake_cuda.c.
        unsafe {
            let die = self.library.get::<unsafe extern "C" fn(c_int, c_int)>(b"fake_cuda_die\0").expect("it");
            die(code, c_int::from(for_good));
        }
    }

    /// Copies made one by one, batches, and copies inside batches, so far.
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
