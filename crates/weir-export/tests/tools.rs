//! Clients of other projects, from Debian's packages libnbd-bin, python3-libnbd, qemu-utils, fio
//! and nbdkit.
//!
//! `tests/torture tools` is the full scale: 60 s of fio's verification by 16 jobs, images of 1 GiB.

mod common;

use common::{Served, few, have, noise};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use weir_core::{ByteSize, PAGE_SIZE};
use weir_export::nbd::Config;
use weir_store::{Sim, SimUrl};

const MIB: usize = 1 << 20;

/// Runs a program to its end and returns what it printed.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}\n{err}", output.status);
    out.into_owned()
}

/// A file that is removed when the test ends.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        Scratch(std::env::temp_dir().join(format!("weir-tools-{name}-{}", std::process::id())))
    }

    fn with(name: &str, content: &[u8]) -> Scratch {
        let scratch = Scratch::new(name);
        std::fs::write(&scratch.0, content).unwrap();
        scratch
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn is_full_scale() -> bool {
    std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full")
}

/// An image with data, holes and pages of one value.
fn image(bytes: usize) -> Vec<u8> {
    let mut image = noise(5, bytes);
    image[bytes / 4..bytes / 2].fill(0);
    image[bytes / 2..bytes / 2 + MIB].fill(0xa5);
    image
}

#[test]
fn nbdinfo_sees_the_export_as_it_is() {
    if !have("nbdinfo", "libnbd-bin") {
        return;
    }
    let served = Served::host("nbdinfo", 4096, &few());
    let info = run(Command::new("nbdinfo").args(["--json", &served.uri()]));
    for said in [
        "\"export-size\": 16777216",
        "\"protocol\": \"newstyle-fixed\"",
        "\"structured\": true",
        "\"can_multi_conn\": true",
        "\"can_fua\": true",
        "\"can_flush\": true",
        "\"can_trim\": true",
        "\"can_fast_zero\": true",
        "\"can_cache\": true",
        "\"can_df\": true",
        "\"block_size_minimum\": 1",
        "\"block_size_preferred\": 4096",
        "\"block_size_maximum\": 33554432",
        "base:allocation",
    ] {
        assert!(info.contains(said), "{said} is missing in {info}");
    }
    let list = run(Command::new("nbdinfo").args(["--list", "--json", &served.uri()]));
    assert!(list.contains("\"export-name\": \"weir\""), "{list}");
    served.client().write(0, &noise(1, 65_536)).unwrap();
    let map = run(Command::new("nbdinfo").args(["--map", "--totals", &served.uri()]));
    assert!(map.contains("65536") && map.contains("hole,zero"), "{map}");
    served.shutdown();
}

#[test]
fn nbdcopy_brings_an_image_in_and_out_over_several_connections() {
    if !have("nbdcopy", "libnbd-bin") {
        return;
    }
    let bytes = if is_full_scale() { 1 << 30 } else { 64 * MIB };
    let served = Served::host("nbdcopy", (bytes / PAGE_SIZE) as u32, &few());
    let (from, to) = (Scratch::with("copy-in", &image(bytes)), Scratch::new("copy-out"));
    run(Command::new("nbdcopy").args(["--threads=4", "--connections=4"]).arg(from.path()).arg(served.uri()));
    run(Command::new("nbdcopy").args(["--threads=4", "--connections=4"]).arg(served.uri()).arg(to.path()));
    assert!(std::fs::read(from.path()).unwrap() == std::fs::read(to.path()).unwrap());
    assert!(served.server().stats().connections >= 8);
    served.shutdown();
}

#[test]
fn nbdsh_is_answered_on_every_command() {
    if !have("nbdsh", "python3-libnbd") {
        return;
    }
    let served = Served::host("nbdsh", 1024, &few());
    let script = format!(
        r#"
h.add_meta_context("base:allocation")
h.set_strict_mode(0)
h.connect_uri("{uri}")
assert h.get_size() == 4 << 20
h.pwrite(b"x" * 10000, 777, nbd.CMD_FLAG_FUA)
assert h.pread(10000, 777) == b"x" * 10000
assert h.pread(777, 0) == bytes(777)
h.zero(5000, 1000, nbd.CMD_FLAG_NO_HOLE)
assert h.pread(5000, 1000) == bytes(5000)
h.trim(4 << 20, 0)
h.cache(4096, 0)
h.flush()
entries = []
h.block_status(4 << 20, 0, lambda *a: entries.append(a[2]))
assert entries == [[4 << 20, 3]], entries
chunks = []
h.pwrite(b"y" * 65536, 65536)
h.pread_structured(65536, 65536, lambda *a: chunks.append(a[2]), nbd.CMD_FLAG_DF)
assert chunks == [nbd.READ_DATA], chunks
for bad in (lambda: h.pread(4096, 4 << 20), lambda: h.pwrite(b"z" * 4096, (4 << 20) - 1),
            lambda: h.zero(10, 10, nbd.CMD_FLAG_FAST_ZERO), lambda: h.trim(1, 1 << 62)):
    try:
        bad()
    except nbd.Error as error:
        pass
    else:
        raise AssertionError("not refused")
assert h.pread(65536, 65536) == b"y" * 65536
h.shutdown()
"#,
        uri = served.uri()
    );
    // The module is Debian's, so the python3 that is found must be Debian's too.
    run(Command::new("nbdsh").env("PATH", "/usr/bin:/bin").args(["-c", &script]));
    served.shutdown();
}

#[test]
fn qemu_img_converts_to_and_from_it_and_qemu_io_reads_what_it_wrote() {
    if !have("qemu-img", "qemu-utils") {
        return;
    }
    let bytes = if is_full_scale() { 1 << 30 } else { 32 * MIB };
    let served = Served::host("qemu", (bytes / PAGE_SIZE) as u32, &few());
    let (from, to) = (Scratch::with("qemu-in", &image(bytes)), Scratch::new("qemu-out"));
    let raw = ["convert", "-f", "raw", "-O", "raw"];
    run(Command::new("qemu-img").args(raw).arg("-n").arg(from.path()).arg(served.uri()));
    run(Command::new("qemu-img").args(raw).arg(served.uri()).arg(to.path()));
    assert!(std::fs::read(from.path()).unwrap() == std::fs::read(to.path()).unwrap());
    run(Command::new("qemu-img")
        .args(["compare", "-f", "raw", "-F", "raw"])
        .arg(from.path())
        .arg(served.uri()));
    let said = run(Command::new("qemu-io").args(["-f", "raw"]).arg(served.uri()).args([
        "-c",
        "write -P 7 1000 70000",
        "-c",
        "read -P 7 1000 70000",
        "-c",
        "write -z 4096 8192",
        "-c",
        "read -P 0 4096 8192",
        "-c",
        "discard 0 1M",
        "-c",
        "flush",
        "-c",
        "aio_write -P 9 0 4M",
        "-c",
        "aio_flush",
        "-c",
        "read -P 9 0 4M",
    ]));
    assert!(!said.contains("Pattern verification failed") && !said.contains("error"), "{said}");
    served.shutdown();
}

#[test]
fn fio_verifies_random_mixed_writes_of_several_jobs() {
    if !have("fio", "fio") {
        return;
    }
    let jobs = if is_full_scale() { 16 } else { 4 };
    let config = Config { connections: jobs, ..Config::default() };
    let served = Served::host("fio", jobs as u32 * 4096, &config);
    let how_long =
        if is_full_scale() { ["--time_based", "--runtime=60"] } else { ["--loops=3", "--group_reporting=0"] };
    let said = run(Command::new("fio").args(how_long).args([
        "--name=verify",
        "--ioengine=nbd",
        &format!("--uri={}", served.uri()),
        "--rw=randrw",
        "--bsrange=4k-64k",
        "--size=16m",
        &format!("--numjobs={jobs}"),
        "--offset_increment=16m",
        "--iodepth=16",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--verify_backlog=64",
        "--output-format=terse",
    ]));
    assert!(said.lines().count() >= jobs, "{said}");
    let stats = served.server().stats();
    println!("figure: fio_verify jobs {jobs} higher");
    println!("figure: fio_verify requests {} higher", stats.requests);
    println!("figure: fio_verify errors {} lower 0", stats.errors);
    assert_eq!(served.server().stats().errors, 0);
    assert_eq!(served.volume.status().read_faults, 0);
    served.shutdown();
}

#[test]
fn nbdkits_filters_in_front_of_it_change_nothing_that_is_true() {
    if !have("nbdkit", "nbdkit") || !have("nbdcopy", "libnbd-bin") {
        return;
    }
    // checkwrite compares each write with the stored content; delay lets requests overtake one
    // another.
    let served = Served::host("filters", 4096, &few());
    let content = Scratch::with("filters", &image(16 * MIB));
    run(Command::new("nbdcopy").arg(content.path()).arg(served.uri()));
    let through = |filter: &str, setting: Option<&str>, run_this: &str| {
        run(Command::new("nbdkit")
            .args(["--exit-with-parent", "--unix", "-"])
            .arg(format!("--filter={filter}"))
            .arg("nbd")
            .args(setting)
            .arg(format!("uri={}", served.uri()))
            .arg("shared=true")
            .args(["--run", run_this]))
    };
    let copy = format!("nbdcopy '{}' \"$uri\"", content.path().display());
    through("checkwrite", None, &copy);
    let out = Scratch::new("filters-out");
    through("delay", Some("delay-read=1ms"), &format!("nbdcopy \"$uri\" '{}'", out.path().display()));
    assert!(std::fs::read(content.path()).unwrap() == std::fs::read(out.path()).unwrap());
    served.shutdown();
}

#[test]
fn nbdcopy_reports_a_page_that_cannot_be_read() {
    if !have("nbdcopy", "libnbd-bin") {
        return;
    }
    let served = Served::over("unreadable", 1024, &few(), |slots| {
        let size = ByteSize(u64::from(slots) * PAGE_SIZE as u64);
        Arc::new(Sim::open(SimUrl { size, lost_slot: Some(50), ..SimUrl::default() }).unwrap())
    });
    let (from, to) = (Scratch::with("unreadable-in", &noise(1, 4 * MIB)), Scratch::new("unreadable-out"));
    // There are more slots than pages, so sometimes the slot that loses its content holds no page.
    // In each round the pages lie in other slots.
    let output = (0..20).find_map(|_| {
        run(Command::new("nbdcopy").arg(from.path()).arg(served.uri()));
        let output = Command::new("nbdcopy").arg(served.uri()).arg(to.path()).output().unwrap();
        if output.status.success() {
            let same = std::fs::read(from.path()).unwrap() == std::fs::read(to.path()).unwrap();
            assert!(same, "a lost page went unnoticed");
        }
        (!output.status.success()).then_some(output)
    });
    let output = output.expect("20 rounds and no page in the slot that loses");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("Input/output error"), "{said}");
    served.shutdown();
}
