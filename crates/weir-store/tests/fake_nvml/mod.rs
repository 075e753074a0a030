//! Builds and controls the fake `libnvidia-ml` of `fake_nvml.c`.

use libloading::Library;
use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A copy of the fake with a card of its own.
pub struct FakeNvml {
    path: PathBuf,
    card: PathBuf,
    _library: Library,
}

/// The card that the fake library reports.
#[derive(Clone, Copy, Debug)]
pub struct Card {
    pub free: u64,
    pub total: u64,
    pub display: bool,
    /// Number of processes on the card besides this one.
    pub others: u32,
}

impl FakeNvml {
    pub fn build(card: Card) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let name = format!("libnvml-fake-{}-{number}", std::process::id());
        let path = directory.join(format!("{name}.so"));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_nvml/fake_nvml.c");
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-w", "-o"])
            .args([path.as_os_str(), source.as_ref()])
            .status()
            .expect("cc, the C compiler");
        assert!(built.success(), "cc {source}");
        // SAFETY: the library is this test's own, without initialisers.
        let library = unsafe { Library::new(&path) }.expect("the library just built");
        let fake = FakeNvml { path, card: directory.join(format!("{name}.card")), _library: library };
        fake.set(card);
        let file = CString::new(fake.card.to_str().expect("UTF-8")).expect("no NUL");
        // SAFETY: the signature is the one in fake_nvml.c; the name is copied before the call
        // returns.
        unsafe {
            let tell =
                fake._library.get::<unsafe extern "C" fn(*const c_char)>(b"fake_nvml_file\0").expect("it");
            tell(file.as_ptr());
        }
        fake
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets the reported card from now on.
    pub fn set(&self, card: Card) {
        let line = format!("{} {} {} {}\n", card.free, card.total, u8::from(card.display), card.others);
        let new = self.card.with_extension("new");
        std::fs::write(&new, line).and_then(|()| std::fs::rename(&new, &self.card)).expect("written");
    }
}

impl Drop for FakeNvml {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        let _ = std::fs::remove_file(&self.card);
    }
}
