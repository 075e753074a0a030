//! The control of the disk benchmark: fio's io_uring engine.

use super::{Case, DiskError, Figures};
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
use weir_core::{ByteSize, PAGE_SIZE};

/// The offset of a store's first page in its file.
const HEADER: usize = 1 << 20;

/// The control: fio on a store's file. It leaves the store's header alone, and overwrites the
/// pages.
pub(super) struct Control {
    pub path: PathBuf,
    pub size: ByteSize,
    pub time: Duration,
}

impl Control {
    pub(super) fn run(&self, case: Case) -> Result<Figures, DiskError> {
        let result = self.fio(case)?;
        let side = &result["jobs"][0][if case.write { "write" } else { "read" }];
        let figure = |value: &Value| {
            value
                .as_f64()
                .ok_or_else(|| DiskError::Fio("its JSON lacks a figure that version 3 has".to_owned()))
        };
        let percentile = |key: &str| figure(&side["clat_ns"]["percentile"][key]);
        // Weir's latencies include the submission, and fio's `clat` does not. So add the mean time
        // of fio's submissions.
        let submission = figure(&side["slat_ns"]["mean"])?;
        Ok(Figures {
            pages_per_second: figure(&side["bw_bytes"])? / PAGE_SIZE as f64,
            p50_us: (percentile("50.000000")? + submission) / 1e3,
            p99_us: (percentile("99.000000")? + submission) / 1e3,
        })
    }

    fn fio(&self, case: Case) -> Result<Value, DiskError> {
        let direction = match (case.pages, case.write) {
            (1, true) => "randwrite",
            (1, false) => "randread",
            (_, true) => "write",
            (_, false) => "read",
        };
        let output = Command::new("fio")
            .args([
                "--name=control",
                "--ioengine=io_uring",
                "--direct=1",
                "--fixedbufs=1",
                "--registerfiles=1",
            ])
            .args(["--output-format=json", "--refill_buffers=0"])
            .arg(format!("--filename={}", self.path.display()))
            .arg(format!("--offset={HEADER}"))
            .arg(format!("--size={}", self.size.0))
            .arg(format!("--rw={direction}"))
            .arg(format!("--bs={}", case.pages * PAGE_SIZE))
            .arg(format!("--iodepth={}", case.batch))
            .arg(format!("--iodepth_batch_submit={}", case.batch))
            .arg(format!("--iodepth_batch_complete_min={}", case.batch))
            .args(["--time_based", "--norandommap"])
            .arg(format!("--runtime={}ms", self.time.as_millis()))
            .output()
            .map_err(|error| DiskError::Fio(error.to_string()))?;
        if !output.status.success() {
            return Err(DiskError::Fio(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| DiskError::Fio(error.to_string()))
    }
}
