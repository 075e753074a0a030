//! A kernel swaps to a volume through FUSE and a loop device, under a memory limit, and every page
//! comes back intact.
//!
//! If a process may not set the I/O flusher flag, the server must refuse to carry swap; the test
//! then goes on without it. `WEIR_SWAP_MIB=1536 WEIR_SWAP_PROCESSES=8 WEIR_SWAP_SECONDS=300 cargo
//! test --release -p weir-torture --test fuse_swap` is the full scale.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use weir_core::log::{Level, to_stderr};
use weir_core::seal::{Policy, SealedAllocator, seal};
use weir_export::fuse::{Config, ServeError, Server};
use weir_store::Host;
use weir_system::loop_device::LoopDevice;
use weir_volume::Volume;

#[global_allocator]
static ALLOCATOR: SealedAllocator = SealedAllocator;

/// The parts of the test. They are removed in this order, whatever happens.
struct Scene {
    swap: Option<PathBuf>,
    device: Option<LoopDevice>,
    server: Option<Server>,
}

impl Drop for Scene {
    fn drop(&mut self) {
        if let Some(path) = self.swap.take() {
            let done = tool("swapoff", &[&path]);
            if !done {
                eprintln!("swapoff {} failed: do it by hand", path.display());
            }
        }
        if let Some(device) = self.device.take()
            && let Err(error) = device.detach()
        {
            eprintln!("{error}");
        }
        drop(self.server.take());
    }
}

fn tool(name: &str, arguments: &[&Path]) -> bool {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    Command::new(name).args(arguments).env("PATH", path).status().is_ok_and(|status| status.success())
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn every_page_that_a_kernel_swaps_to_the_file_comes_back() {
    let (mib, processes, seconds) =
        (number("WEIR_SWAP_MIB", 96), number("WEIR_SWAP_PROCESSES", 2), number("WEIR_SWAP_SECONDS", 2));
    let pages = (mib * 256) as u32 + 4096;
    let shape = weir_volume::Config { pages, lanes: 4, depth: 64 };
    let volume = Volume::create(shape, vec![Arc::new(Host::new(shape.slots()).unwrap())]).unwrap();
    let point = std::env::temp_dir().join(format!("weir-torture-swap-{}", std::process::id()));
    let log = to_stderr(Level::Warning);
    let safe = Config { swap: true, spin: Duration::from_micros(50), ..Config::default() };
    let server = match Server::start(&volume, &safe, &point, &log) {
        Ok(server) => server,
        Err(ServeError::Mount(error)) => return println!("\nskipped: no FUSE mount here: {error}"),
        // The flag is not set in a test's main thread, or may not be read: the server refuses in
        // both cases.
        Err(ServeError::Flusher(_) | ServeError::Config(_)) => {
            let unsafe_config = Config { unsafe_no_flusher: true, ..safe };
            Server::start(&volume, &unsafe_config, &point, &log).unwrap()
        }
        Err(error) => panic!("{error}"),
    };
    let mut scene = Scene { swap: None, device: None, server: Some(server) };
    let device = match LoopDevice::attach(scene.server.as_ref().unwrap().file()) {
        Ok(device) => device,
        Err(error) => return println!("\nskipped: no loop device here: {error}"),
    };
    let path = device.path().to_owned();
    scene.device = Some(device);
    if !tool("mkswap", &[Path::new("--quiet"), &path])
        || !tool("swapon", &[Path::new("--priority"), Path::new("31000"), &path])
    {
        return println!("\nskipped: {} cannot be swapped to here", path.display());
    }
    scene.swap = Some(path);
    seal(Policy::Abort);

    let limit = format!("{}MiB", mib / 3);
    let output = Command::new(env!("CARGO_BIN_EXE_torture"))
        .args(["--size", &format!("{mib}MiB"), "--limit", &limit, "--processes", &processes.to_string()])
        .args(["--seconds", &seconds.to_string()])
        .output()
        .unwrap();
    let (said, complained) = (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    );
    if complained.contains("a memory limit needs root") {
        return println!("\nskipped: no memory cgroup here: {}", complained.trim());
    }
    println!("{said}{complained}");
    assert!(output.status.success(), "{}", output.status);
    let row = |name: &str| {
        let line = said.lines().find(|line| line.trim_start().starts_with(name)).unwrap_or_default();
        line.split_whitespace().nth(1).and_then(|value| value.parse::<f64>().ok()).unwrap_or(-1.0)
    };
    assert!(row("pages_swapped_out") > 0.0 && row("swap_peak_mib") > 0.0);
    assert_eq!((row("mismatches"), row("killed")), (0.0, 0.0));
    let stats = scene.server.as_ref().unwrap().stats();
    assert!(stats.writes > 0 && stats.reads > 0 && stats.errors == 0, "{stats:?}");
    println!("{stats:?}");
}
