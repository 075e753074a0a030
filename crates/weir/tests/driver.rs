//! A card's driver that fails under a daemon: no page is lost, each client gets an answer, and the
//! reason is reported.

mod common;

use common::{Daemon, Ends, PATIENCE, WEIR, has_lavapipe};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use weir_export::nbd::client::{Client, ClientError};

const PAGE: usize = 4096;
const PAGES: u64 = 256;
const WRITERS: u64 = 3;

/// The content of page `page` in generation `generation`; no two are alike.
fn stamped(page: u64, generation: u64) -> Vec<u8> {
    let words = (0..PAGE as u64 / 16).flat_map(|at| [page << 32 | at, generation]);
    words.flat_map(u64::to_le_bytes).collect()
}

/// Puts a libcuda without a GPU into `directory`.
fn fake_cuda(directory: &Path) {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../weir-store/tests/fake_cuda/fake_cuda.c");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-pthread", "-w", "-DBATCH_13", "-o"])
        .arg(directory.join("libcuda.so.1"))
        .arg(source)
        .status()
        .expect("cc, the C compiler");
    assert!(built.success(), "cc {source}");
}

/// Starts a daemon on a card with the fake driver, whose context dies as the file `dies` in its
/// directory says.
fn start(name: &str, flags: &[&str]) -> Daemon {
    Daemon::spawn(name, flags, |command, directory| {
        Daemon::with_nbd(command, directory);
        fake_cuda(directory);
        command.env("LD_LIBRARY_PATH", directory).env("FAKE_CUDA_DIES", directory.join("dies"));
        command.env("FAKE_CUDA_HOLDS", "cuEventQuery").env("FAKE_CUDA_HELD", directory.join("held"));
        command.stderr(fs::File::create(directory.join("log")).unwrap());
    })
}

fn log(scene: &Daemon) -> String {
    fs::read_to_string(scene.directory.join("log")).unwrap()
}

fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is() {
        assert!(begun.elapsed() < PATIENCE, "no {what} for {PATIENCE:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Has the driver fail `times` times under load, by `fail`, and checks every page meanwhile and
/// afterwards. A connection may end, but no request is answered with an error.
fn survive(scene: &Daemon, times: u64, connection_may_end: bool, fail: impl Fn(u64)) {
    drop(scene.connect());
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let _ends = Ends(&stop);
        for writer in 0..WRITERS {
            let (stop, rounds) = (&stop, &rounds);
            scope.spawn(move || {
                let mut client = scene.connect();
                let mine: Vec<u64> = (writer..PAGES).step_by(WRITERS as usize).collect();
                let mut generation = 0;
                while !stop.load(Ordering::Relaxed) {
                    generation += 1;
                    for &page in &mine {
                        let done = |client: &mut Client| {
                            client.write(page * PAGE as u64, &stamped(page, generation))?;
                            client.read(page * PAGE as u64, PAGE as u32)
                        };
                        let read = loop {
                            match done(&mut client) {
                                Ok(read) => break read,
                                Err(error) => {
                                    let refused = matches!(error, ClientError::Failed(_));
                                    assert!(connection_may_end && !refused, "page {page}: {error:?}");
                                    client = scene.connect();
                                }
                            }
                        };
                        assert!(read == stamped(page, generation), "page {page} is not what was written");
                    }
                    // No other client writes these pages, so all must have their content.
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for time in 0..times {
            let before = rounds.load(Ordering::Relaxed);
            eventually("load", || {
                rounds.load(Ordering::Relaxed) >= before + 2 * WRITERS || stop.load(Ordering::Relaxed)
            });
            fail(time);
            let after = rounds.load(Ordering::Relaxed);
            eventually("load after it", || {
                rounds.load(Ordering::Relaxed) >= after + 2 * WRITERS || stop.load(Ordering::Relaxed)
            });
        }
    });
    let status = scene.status();
    assert_eq!(status["read"]["corrupt"], 0);
    assert_eq!(status["protection"]["io_allocations"], 0);
}

fn tell(scene: &Daemon, how: &str) {
    let file = scene.directory.join("dies");
    fs::write(scene.directory.join("dies.new"), how).unwrap();
    fs::rename(scene.directory.join("dies.new"), &file).unwrap();
    eventually("end of the context", || !file.exists());
}

#[test]
fn a_context_that_dies_leaves_the_window_and_is_told_of() {
    if !has_lavapipe() {
        println!(
            "skipped: a_context_that_dies_leaves_the_window_and_is_told_of: Mesa's software renderer (mesa-vulkan-drivers)"
        );
        return;
    }
    for options in ["&path=engine&ring=off", "&path=ring&ring=on"] {
        let store = format!("vram:lavapipe?size=8MiB&chunk=1MiB{options}");
        let mut scene = start("dies", &["--store", &store]);
        let pid = |scene: &Daemon| scene.status()["pid"].clone();
        drop(scene.connect());
        let first = pid(&scene);
        survive(&scene, 1, false, |_| tell(&scene, "l"));
        assert_eq!(pid(&scene), first, "one process all the time");
        eventually("line", || log(&scene).contains("CUDA is lost"));
        let status = scene.status();
        let condition = &status["stores"][0]["conditions"][0];
        assert!(condition["why"].as_str().unwrap().contains("719"), "{condition}");
        assert_eq!(
            (condition["state"].as_str(), &condition["ways"]),
            (Some("online"), &serde_json::json!(["mapped"]))
        );
        assert!(condition["since_unix_s"].as_u64().unwrap() > 1_600_000_000);
        let text = String::from_utf8(scene.weir(&["status"]).stdout).unwrap();
        assert!(text.contains("by mapped") && text.contains("CUDA is lost"), "{text}");
        assert_eq!(log(&scene).matches("CUDA is lost").count(), 1, "{}", log(&scene));
        assert_eq!(scene.terminate(), Some(0));
    }
}

#[test]
fn a_driver_that_crashes_or_hangs_costs_a_daemon_and_no_page() {
    if !has_lavapipe() {
        println!(
            "skipped: a_driver_that_crashes_or_hangs_costs_a_daemon_and_no_page: Mesa's software renderer (mesa-vulkan-drivers)"
        );
        return;
    }
    let store = "vram:lavapipe?size=8MiB&chunk=1MiB&path=engine&ring=off";
    let mut scene = start("segv", &["--keeper", "--store", store]);
    survive(&scene, 2, true, |_| {
        // The next daemon opens CUDA a while after it serves.
        eventually("CUDA", || {
            scene.status()["stores"][0]["conditions"][0]["ways"] == serde_json::json!(["mapped", "engine"])
        });
        tell(&scene, "s");
    });
    assert_eq!(scene.terminate(), Some(0));
}

#[test]
fn by_cuda_alone_pages_are_kept_without_being_asked_and_the_next_process_has_them() {
    let mut scene = start("alone", &["--store", "vram:0?size=8MiB&chunk=2MiB"]);
    survive(&scene, 3, true, |_| tell(&scene, "f"));
    let said = log(&scene);
    assert!(said.contains("as with --keeper"), "{said}");
    assert_eq!(said.matches("its pages are there for another process").count(), 3, "{said}");
    assert!(
        said.matches("slower by far than through the window").count() >= 4,
        "each daemon says so: {said}"
    );
    assert_eq!(scene.terminate(), Some(0));
}

#[test]
fn by_cuda_alone_a_call_that_never_comes_back_costs_a_daemon_and_no_page() {
    let mut scene = start("hangs", &["--store", "vram:0?size=8MiB&chunk=2MiB"]);
    survive(&scene, 1, true, |_| {
        let held = scene.directory.join("held");
        fs::write(&held, "").unwrap();
        eventually("end of a daemon", || log(&scene).contains("its pages are there for another process"));
        fs::remove_file(held).unwrap();
    });
    let said = log(&scene);
    assert!(
        said.contains("a call into the driver had no answer")
            || said.contains("a batch of copies had no answer"),
        "{said}"
    );
    assert_eq!(scene.terminate(), Some(0));
}

fn doctor(directory: &Path, held: bool) -> (Output, String) {
    let mut command = Command::new(WEIR);
    command.args(["doctor"]).env("LD_LIBRARY_PATH", directory);
    if held {
        fs::write(directory.join("held"), "").unwrap();
        command.env("FAKE_CUDA_HOLDS", "cuInit").env("FAKE_CUDA_HELD", directory.join("held"));
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, text)
}

#[test]
fn doctor_opens_what_it_reports_and_waits_for_no_driver() {
    let directory = std::env::temp_dir().join(format!("weir-{}-doctor", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    fake_cuda(&directory);
    // Vulkan's loader may wait for a real card of this machine; the checks are about the fake one.
    let (_, text) = doctor(&directory, false);
    assert!(text.contains("Fake GPU: by engine; not by mapped: "), "{text}");
    let begun = Instant::now();
    let (output, text) = doctor(&directory, true);
    assert!(text.contains("FAIL cards") && text.contains("did not answer in 8 s"), "{text}");
    assert_eq!(output.status.code(), Some(1));
    assert!(begun.elapsed() < PATIENCE, "it waited for the driver");
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn doctor_fails_with_the_step_where_a_vulkan_driver_s_library_is_missing() {
    if !has_lavapipe() {
        println!(
            "skipped: doctor_fails_with_the_step_where_a_vulkan_driver_s_library_is_missing: Vulkan's loader (libvulkan1)"
        );
        return;
    }
    let directory = std::env::temp_dir().join(format!("weir-{}-icd", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let file = directory.join("nvidia_icd.json");
    fs::write(&file, r#"{"file_format_version":"1.0.1","ICD":{"library_path":"libGLX_no_such.so.0","api_version":"1.4.312"}}"#)
        .unwrap();
    let output = Command::new(WEIR).arg("doctor").env("VK_DRIVER_FILES", &file).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let vulkan =
        text.lines().skip_while(|line| !line.contains(" vulkan ")).take(2).collect::<Vec<_>>().join(" ");
    assert!(vulkan.starts_with("FAIL ") && vulkan.contains("libGLX_no_such.so.0"), "{text}");
    assert!(vulkan.contains("-> install") && vulkan.contains("libglx0 libegl1"), "{text}");
    assert_eq!(output.status.code(), Some(1));
    fs::remove_dir_all(&directory).unwrap();
}
