//! `cargo run --release -p weir-bench --example disk -- [DIRECTORY] [--json FILE]`: `file:` beside fio's io_uring.

use std::path::PathBuf;
use weir_bench::disk::{Options, run};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut options = Options::default();
    let mut json: Option<PathBuf> = None;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => json = arguments.next().map(Into::into),
            directory => options.directory = directory.into(),
        }
    }
    let report = run(&options)?;
    println!("{report}");
    if let Some(path) = json {
        report.write_json(&path)?;
    }
    Ok(())
}
