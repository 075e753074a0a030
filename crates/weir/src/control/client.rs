//! The asking end.

use super::{Line, Moved, PATIENCE, Progress, Refusal, Reply, Request, SCHEMA, Status};
use crate::attach::Attachment;
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

/// Asks the daemon at `path` to give memory back, or with `take` to take it again, and calls `tell` while it does.
///
/// # Errors
/// When no daemon listens there, or with its own words when it cannot.
pub fn ask_for(
    path: &Path,
    take: bool,
    bytes: Option<u64>,
    mut tell: impl FnMut(Progress),
) -> Result<Moved, Failure> {
    let request = if take { Request::Take { bytes } } else { Request::GiveBack { bytes } };
    let broken = |error: io::Error| {
        Failure::Failed(format!(
            "no answer from {}: {error}; is weir serve running with this --control?",
            path.display()
        ))
    };
    for line in BufReader::new(send(path, request).map_err(broken)?).lines() {
        let reply: Reply = serde_json::from_str(&line.map_err(broken)?)
            .map_err(|error| broken(io::Error::other(format!("not of schema {SCHEMA}: {error}"))))?;
        match reply.line {
            Line::Progress(progress) => tell(progress),
            Line::Result(moved) => return Ok(moved),
            Line::Error(error) => return Err(Failure::Failed(error)),
        }
    }
    Err(broken(io::ErrorKind::UnexpectedEof.into()))
}

/// Tells the daemon at `path` of a device that the kernel has connected to it.
///
/// # Errors
/// One line: none listens there, or its own words when it cannot remember it.
pub fn attached(path: &Path, device: Attachment) -> Result<(), String> {
    tell(path, Request::Attached(device))
}

/// Tells the daemon at `path` of a device that the kernel has let go.
///
/// # Errors
/// As [`attached`].
pub fn detached(path: &Path, device: u32) -> Result<(), String> {
    tell(path, Request::Detached { device })
}

fn tell(path: &Path, request: Request) -> Result<(), String> {
    let line =
        ask(path, request).map_err(|error| format!("no daemon answers at {}: {error}", path.display()))?;
    serde_json::from_str::<Refusal>(&line).map_or(Ok(()), |refusal| Err(refusal.error))
}

fn ask(path: &Path, request: Request) -> io::Result<String> {
    let mut line = String::new();
    BufReader::new(send(path, request)?).read_line(&mut line)?;
    Ok(line)
}

fn send(path: &Path, request: Request) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut message = serde_json::to_vec(&Envelope { schema: SCHEMA, request })?;
    message.push(b'\n');
    stream.write_all(&message)?;
    Ok(stream)
}
