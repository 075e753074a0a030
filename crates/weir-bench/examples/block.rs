//! `cargo run --release -p weir-bench --example block -- target/release/weir [CASE]... [--runs N] [--json FILE]`: Weir's
//! NBD server beside nbdkit's.

use std::path::PathBuf;
use weir_bench::block::{Plan, run};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut plan = Plan { weir: arguments.next().ok_or("which weir program?")?.into(), ..Plan::default() };
    let mut json: Option<PathBuf> = None;
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => json = arguments.next().map(Into::into),
            "--runs" => plan.runs = arguments.next().ok_or("how many runs?")?.parse()?,
            case => plan.only.push(case.to_owned()),
        }
    }
    let report = run(&plan)?;
    println!("{report}");
    if let Some(path) = json {
        report.write_json(&path)?;
    }
    Ok(())
}
