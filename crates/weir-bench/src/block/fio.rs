//! fio's NBD engine, as the client of the benchmark.

use super::server::Server;
use super::{BlockError, Case, Figures};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use weir_core::ByteSize;

/// Writes every page once.
pub(super) fn fill(server: &Server, size: ByteSize) -> Result<(), BlockError> {
    let fill =
        Case { id: "fill", write: true, sequential: true, block: 1 << 20, jobs: 1, depth: 4, pause: 0 };
    fio(&server.socket, fill, size, &[]).map(drop)
}

/// Writes every page once more, in random order.
pub(super) fn scatter(server: &Server, size: ByteSize) -> Result<(), BlockError> {
    let scatter = Case::pages("scatter", true, 1, 32);
    fio(&server.socket, scatter, size, &[]).map(drop)
}

/// Runs a case for `time` on a server that is a process of its own.
pub(super) fn run(
    server: &Server,
    case: Case,
    size: ByteSize,
    time: Duration,
) -> Result<Figures, BlockError> {
    let before = server.cpu_time();
    let (mut figures, requests) = latencies(&server.socket, case, size, time)?;
    let after = server.cpu_time();
    let [user, system] =
        [0, 1].map(|mode| (after[mode] - before[mode]).as_secs_f64() * 1e6 / requests.max(1.0));
    (figures.cpu_us, figures.user_us) = (user + system, user);
    Ok(figures)
}

/// Runs a case for `time`; returns the figures that the client measures, and the number of its
/// requests.
pub(super) fn latencies(
    socket: &Path,
    case: Case,
    size: ByteSize,
    time: Duration,
) -> Result<(Figures, f64), BlockError> {
    let runtime = format!("--runtime={}ms", time.as_millis());
    let mut more = vec!["--time_based", &runtime, "--norandommap"];
    let pause = format!("--thinktime={}ms", case.pause);
    if case.pause > 0 {
        more.push(&pause);
    }
    let result = fio(socket, case, size, &more)?;
    let side = &result["jobs"][0][if case.write { "write" } else { "read" }];
    let figure = |value: &Value| {
        value.as_f64().ok_or_else(|| failed("its JSON lacks a figure that version 3 has".to_owned()))
    };
    let percentile = |key: &str| figure(&side["clat_ns"]["percentile"][key]).map(|value| value / 1e3);
    let figures = Figures {
        per_second: figure(&side["iops"])?,
        p50_us: percentile("50.000000")?,
        p99_us: percentile("99.000000")?,
        cpu_us: 0.0,
        user_us: 0.0,
    };
    Ok((figures, figure(&side["total_ios"])?))
}

fn fio(socket: &Path, case: Case, size: ByteSize, more: &[&str]) -> Result<Value, BlockError> {
    let direction = match (case.sequential, case.write) {
        (false, false) => "randread",
        (false, true) => "randwrite",
        (true, false) => "read",
        (true, true) => "write",
    };
    let output = Command::new("fio")
        .args(["--name=block", "--ioengine=nbd", "--group_reporting", "--randrepeat=1"])
        .arg("--output-format=json")
        .arg(format!("--uri=nbd+unix:///?socket={}", socket.display()))
        .arg(format!("--rw={direction}"))
        .arg(format!("--bs={}", case.block))
        .arg(format!("--numjobs={}", case.jobs))
        .arg(format!("--iodepth={}", case.depth))
        .arg(format!("--size={}", size.0))
        .args(more)
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    // fio's NBD engine may print a line of its own before fio's JSON report.
    let text = String::from_utf8_lossy(&output.stdout);
    let report = text.find('{').map_or("", |start| &text[start..]);
    serde_json::from_str(report).map_err(|error| failed(error.to_string()))
}

fn failed(what: String) -> BlockError {
    BlockError::Program { program: "fio".to_owned(), what, package: "fio" }
}
