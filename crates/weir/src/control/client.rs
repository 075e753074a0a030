//! The asking end.

use super::{PATIENCE, Refusal, Request, SCHEMA, Status};
use crate::failure::Failure;
use serde::Serialize;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;

#[derive(Serialize)]
struct Envelope {
    schema: u32,
    #[serde(flatten)]
    request: Request,
}

/// Asks the daemon at `path` how it is.
///
/// # Errors
/// When none listens there, or it speaks another schema.
pub fn status(path: &Path) -> Result<Status, Failure> {
    let failed = |problem: String| {
        Failure::Failed(format!(
            "no status from {}: {problem}; is weir serve running with this --control?",
            path.display()
        ))
    };
    let line = ask(path, Request::Status).map_err(|error| failed(error.to_string()))?;
    serde_json::from_str(&line).map_err(|error| match serde_json::from_str::<Refusal>(&line) {
        Ok(refusal) => failed(refusal.error),
        Err(_) => failed(format!("the answer is not of schema {SCHEMA}: {error}")),
    })
}

fn ask(path: &Path, request: Request) -> io::Result<String> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut message = serde_json::to_vec(&Envelope { schema: SCHEMA, request })?;
    message.push(b'\n');
    stream.write_all(&message)?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(line)
}
