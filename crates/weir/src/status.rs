//! `weir status`: asks the daemon for its status.

use crate::cli::StatusOptions;
use crate::on;
use weir_cli::failure::Failure;

/// Prints the daemon's answer.
pub fn run(options: &StatusOptions) -> Result<(), Failure> {
    let path = options.control.clone().unwrap_or_else(on::parts::find);
    if let Some(directory) = on::parts::among(&path).filter(|_| !options.json) {
        print!("{}", on::parts::lines(&directory)?);
        // The first part may be off, and that has been reported.
        if !path.exists() {
            return Ok(());
        }
    }
    let status = on::parts::status(&path)?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&status).map_err(Failure::failed)?);
    } else {
        print!("{status}");
    }
    Ok(())
}
