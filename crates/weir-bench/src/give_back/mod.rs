//! `weir bench give-back`: memory is given back and taken again while programs use the device,
//! through a real daemon and real NBD connections. It measures the speed, and what those programs
//! notice. With a GPU it also measures the main case. Another process allocates most of the card,
//! step by step, and Weir gives memory back without a request.

mod card;
mod load;

pub use card::{Allocated, allocate};

use crate::report::{Goal, Report, Row, Runs};
use crate::steps::Steps;
use load::Load;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use weir_core::ByteSize;

/// Longest time until a daemon serves, and until it answers a request.
const PATIENCE: Duration = Duration::from_secs(120);

/// The plan of the give-back benchmark.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The path of the weir program.
    pub weir: PathBuf,
    /// The URL of the store whose memory is given back and taken.
    pub store: String,
    /// The URL of the store below the measured one. It must have room for the whole device.
    pub below: String,
    /// The size of the served block device, in bytes. Every page of it is in use.
    pub size: ByteSize,
    /// Number of times that half of the device's size is given back and taken again.
    pub cycles: usize,
    /// Number of programs that use the block device while memory is given back and taken.
    pub users: usize,
    /// The steps in which another process allocates the card; `None`: there is no such process.
    pub steps: Option<ByteSize>,
}

/// The reason why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum GiveBackError {
    /// The daemon, or the process that allocates, failed.
    #[error("{what}: {why}")]
    Process {
        /// The name of the process.
        what: &'static str,
        /// The reason why the process failed.
        why: String,
    },
    /// An NBD connection broke.
    #[error("a connection to the daemon failed")]
    Client(#[from] weir_export::nbd::client::ClientError),
    /// A file or socket failed.
    #[error("cannot run the benchmark")]
    Io(#[from] io::Error),
}

/// Runs the benchmark.
///
/// # Errors
/// Fails when the daemon does not start, or does not do what it is asked.
pub fn run(plan: &Plan) -> Result<Report, GiveBackError> {
    let mut report = Report::new("give-back", plan.cycles.max(1));
    let daemon = Daemon::start(plan)?;
    let load = Load::start(&daemon.path("nbd"), plan.size, plan.users)?;
    // The bar has a step for the load alone before the cycles, and one for it after them. Each
    // cycle has two steps: half of the device is given back, and taken again.
    let bar = Steps::new(2 + 2 * plan.cycles + usize::from(plan.steps.is_some()));
    bar.part("the load alone");
    load.during(Duration::from_secs(1))?;
    let before = load.during(Duration::from_secs(3))?;
    bar.end();
    let half = plan.size.0 / 2;
    let (mut gave, mut took) = (Runs::default(), Runs::default());
    let (mut giving, mut taking) = (Runs::default(), Runs::default());
    for _ in 0..plan.cycles {
        bar.part("give back");
        load.reset();
        gave.push(daemon.ask("give-back", half)?);
        giving.push(load.taken()?.p99_us);
        bar.end();
        bar.part("take");
        load.reset();
        took.push(daemon.ask("take", half)?);
        taking.push(load.taken()?.p99_us);
        bar.end();
    }
    bar.part("the load alone");
    let after = load.during(Duration::from_secs(3))?;
    bar.end();
    if plan.cycles > 0 {
        report.rows.extend([
            Row::higher("give_back", "gb_s", gave.median()).goal(Goal::Value(8.0)),
            Row::lower("give_back", "user_p99_us", giving.median())
                .beside("before", before.p99_us)
                .goal(Goal::Ratio(4.0)),
            Row::higher("take", "gb_s", took.median()),
            Row::lower("take", "user_p99_us", taking.median()).beside("before", before.p99_us),
            Row::lower("afterwards", "user_p99_us", after.p99_us).beside("before", before.p99_us),
        ]);
    }
    if let Some(step) = plan.steps {
        bar.part("another process");
        steps(step, &daemon, &load, &mut report)?;
    }
    let total = load.stop()?;
    let worker = daemon.request("\"status\"")?["background"].clone();
    let count = |key: &str| worker[key].as_u64().unwrap_or(0) as f64;
    report.rows.extend([
        Row::lower("worker", "items", count("items")),
        Row::higher("worker", "items_per_batch", count("items") / count("batches").max(1.0)),
        Row::higher("worker", "longest_batch", count("longest_batch")),
        Row::lower("worker", "wakes_per_item", count("wakes") / count("items").max(1.0)),
        Row::higher("pages", "checked", total.checked as f64),
        Row::lower("pages", "mismatches", total.mismatches as f64).goal(Goal::Value(0.0)),
    ]);
    Ok(report)
}

/// Runs another process that allocates 90% of the card, and then ends.
fn steps(step: ByteSize, daemon: &Daemon, load: &Load, report: &mut Report) -> Result<(), GiveBackError> {
    let quiet = load.during(Duration::from_secs(2))?;
    let held = daemon.held_bytes()?;
    load.reset();
    let output = Command::new("/proc/self/exe")
        .args(["allocate", "--step", &step.0.to_string()])
        .stderr(Stdio::inherit())
        .output()?;
    let during = load.taken()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let failed = |why: String| GiveBackError::Process { what: "the process that allocates", why };
    let allocated: Allocated = text
        .lines()
        .last()
        .and_then(|line| serde_json::from_str(line).ok())
        .ok_or_else(|| failed(format!("{} after {text:?}", output.status)))?;
    let began = Instant::now();
    // Wait until the daemon has taken its memory again. Up to 1 GiB may be missing: the governor
    // leaves its `spare` of the card free, and one chunk more.
    while daemon.held_bytes()? + (1 << 30) < held && began.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(50));
    }
    let back = began.elapsed();
    report.rows.extend([
        Row::higher("steps", "of_card", allocated.bytes as f64 / allocated.total as f64)
            .goal(Goal::Value(0.89)),
        Row::lower("steps", "p50_ms", allocated.p50_ms),
        Row::lower("steps", "longest_ms", allocated.longest_ms).goal(Goal::Value(250.0)),
        Row::lower("steps", "user_p99_us", during.p99_us)
            .beside("before", quiet.p99_us)
            .goal(Goal::Ratio(4.0)),
        Row::lower("steps", "room_back_s", back.as_secs_f64())
            .goal(Goal::Value(PATIENCE.as_secs_f64() - 1.0)),
    ]);
    Ok(())
}

/// The daemon, and the directory of its sockets.
struct Daemon {
    directory: PathBuf,
    child: Child,
}

impl Daemon {
    fn start(plan: &Plan) -> Result<Self, GiveBackError> {
        let directory = std::env::temp_dir().join(format!("weir-bench-give-back-{}", std::process::id()));
        std::fs::create_dir(&directory)?;
        let mut command = Command::new(&plan.weir);
        command.args(["serve", "--log", "warn", "--size", &plan.size.0.to_string()]);
        command.args(["--store", &plan.store, "--store", &plan.below]);
        command.args(["--connections", &(plan.users + 1).to_string()]);
        command.arg("--nbd").arg(format!("unix:{}", directory.join("nbd").display()));
        command.arg("--control").arg(directory.join("control"));
        let child = command.stdin(Stdio::null()).spawn();
        let child = child.inspect_err(|_| drop(std::fs::remove_dir_all(&directory)))?;
        let mut daemon = Daemon { directory, child };
        let began = Instant::now();
        while UnixStream::connect(daemon.path("control")).is_err() {
            let ended = daemon.child.try_wait()?;
            if ended.is_some() || began.elapsed() > PATIENCE {
                let why = ended.map_or_else(|| "it does not listen".to_owned(), |status| status.to_string());
                return Err(GiveBackError::Process { what: "the daemon", why });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(daemon)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Sends a request; returns the last line that the control socket answers.
    fn request(&self, request: &str) -> Result<serde_json::Value, GiveBackError> {
        let mut stream = UnixStream::connect(self.path("control"))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(format!("{{\"schema\":1,\"request\":{request}}}\n").as_bytes())?;
        let last = BufReader::new(stream).lines().last().unwrap_or_else(|| Ok(String::new()))?;
        serde_json::from_str(&last).map_err(|error| GiveBackError::Process {
            what: "the daemon",
            why: format!("{error} in {last:?}"),
        })
    }

    /// Has the daemon give back or take `bytes` bytes. Returns the speed in GB/s.
    fn ask(&self, what: &str, bytes: u64) -> Result<f64, GiveBackError> {
        let answer = self.request(&format!("\"{what}\",\"bytes\":{bytes}"))?;
        let number = |key: &str| answer["result"][key].as_f64();
        match (number("bytes"), number("seconds")) {
            (Some(bytes), Some(seconds)) => Ok(bytes / seconds.max(1e-9) / 1e9),
            _ => Err(GiveBackError::Process { what: "the daemon", why: answer.to_string() }),
        }
    }

    /// Bytes of memory that the volume's first store holds now.
    fn held_bytes(&self) -> Result<u64, GiveBackError> {
        let status = self.request("\"status\"")?;
        let store = &status["stores"][0];
        let number = |value: &serde_json::Value| value.as_u64().unwrap_or(0);
        let chunks = &store["chunks"];
        Ok((number(&chunks["held"]) + number(&chunks["reserve"])) * number(&store["chunk_bytes"]))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
