//! `cargo run --release -p weir-bench --example queue [SINGLE MULTI PRODUCERS ROUNDS [FILE.json [FILE.html]]]`:
//! the queue benchmark without the rest of Weir, as `weir bench queue` runs it.

use std::path::Path;
use std::process::ExitCode;

use weir_bench::queue::{Options, run};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut options = Options::default();
    let counts = [&mut options.single, &mut options.multi, &mut options.producers, &mut options.rounds];
    for (count, text) in counts.into_iter().zip(&arguments) {
        match text.parse() {
            Ok(number) => *count = number,
            Err(_) => {
                eprintln!(
                    "queue: {text:?} is not a number; the source's own arguments are 300000 600000 8 10"
                );
                return ExitCode::from(2);
            }
        }
    }
    let files = arguments.get(4..).unwrap_or_default();
    let outcome = run(&options).map_err(Box::<dyn std::error::Error>::from).and_then(|report| {
        print!("{report}");
        if let Some(json) = files.first() {
            report.write_json(Path::new(json))?;
        }
        if let Some(html) = files.get(1) {
            report.write_html(Path::new(html))?;
        }
        Ok(report.all_met())
    });
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("queue: {error}");
            ExitCode::FAILURE
        }
    }
}
