//! `weir status`: asks the daemon for its status, and lists bounded programs.

use crate::cli::StatusOptions;
use crate::run::{all, without_daemon};
use crate::{failure, on};
use serde_json::json;
use weir_cli::failure::Failure;
use weir_daemon::control::{self, SCHEMA};

/// Prints the daemon's answer, and then the programs that `weir run` bounds.
pub fn run(options: &StatusOptions) -> Result<(), Failure> {
    let path = options.control.clone().unwrap_or_else(control::find);
    // If the user named a daemon, show no other daemon's programs.
    let programs = if options.control.is_none() { all() } else { Vec::new() };
    let mut has_said = !programs.is_empty();
    if !options.json {
        programs.iter().for_each(|program| print!("{program}"));
        let runs = if options.control.is_none() { without_daemon() } else { Vec::new() };
        has_said |= !runs.is_empty();
        for run in runs {
            println!(
                "run       process {run}: its daemon does not answer; its programs wait for the next one, or have lost the memory that was out"
            );
        }
    }
    if has_said && !path.exists() {
        if options.json {
            let answer = json!({ "schema": SCHEMA, "programs": programs });
            println!("{}", serde_json::to_string_pretty(&answer).map_err(Failure::failed)?);
        }
        return Ok(());
    }
    if let Some(directory) = on::parts::among(&path).filter(|_| !options.json) {
        print!("{}", on::parts::lines(&directory)?);
    }
    let mut status = control::status(&path).map_err(failure::of)?;
    if options.json {
        status.programs.extend(programs);
        println!("{}", serde_json::to_string_pretty(&status).map_err(Failure::failed)?);
    } else {
        print!("{status}");
    }
    Ok(())
}
