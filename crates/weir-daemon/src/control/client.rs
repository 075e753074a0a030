//! The client's end of the control socket.

use super::{Line, Moved, PATIENCE, Program, Progress, Refusal, Reply, Request, SCHEMA, Status};
use crate::attach::Attachment;
use crate::error::{Error, ErrorKind};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Longest status, in bytes: another user's daemon may send anything.
const ANSWER_MOST: u64 = 4 << 20;

#[derive(Serialize)]
struct Envelope {
    schema: u32,
    #[serde(flatten)]
    request: Request,
}

/// Asks the daemon at `path` for its status.
///
/// # Errors
/// Fails when no daemon listens at `path`, or it speaks another schema.
pub fn status(path: &Path) -> Result<Status, Error> {
    let failed =
        |kind, problem: String| Error::new(kind, format!("no status from {}: {problem}", path.display()));
    let line = ask(path, Request::Status).map_err(|error| unreachable(path, &error))?;
    serde_json::from_str(&line).map_err(|error| match serde_json::from_str::<Refusal>(&line) {
        Ok(refusal) => failed(ErrorKind::Refused, refusal.error),
        Err(_) => failed(
            ErrorKind::Unreachable,
            format!(
                "what answers there is no daemon of this version ({error}); --control names a daemon's control socket, which is none of --nbd or --share"
            ),
        ),
    })
}

/// Asks the daemon at `path` to give memory back or to take it. Calls `tell` with the progress.
///
/// # Errors
/// Fails when no daemon listens at `path`, or with the daemon's error when it cannot do what was
/// asked.
pub fn ask_for(path: &Path, request: Request, mut tell: impl FnMut(Progress)) -> Result<Moved, Error> {
    let broken = |error: io::Error| unreachable(path, &error);
    for line in BufReader::new(send(path, request).map_err(broken)?).lines() {
        let reply: Reply = serde_json::from_str(&line.map_err(broken)?)
            .map_err(|error| broken(io::Error::other(format!("not of schema {SCHEMA}: {error}"))))?;
        match reply.line {
            Line::Progress(progress) => tell(progress),
            Line::Result(moved) => return Ok(moved),
            Line::Error(error) => return Err(Error::new(ErrorKind::Refused, error)),
        }
    }
    Err(broken(io::ErrorKind::UnexpectedEof.into()))
}

/// The error for a daemon that does not answer, with the reason and the next step.
fn unreachable(path: &Path, error: &io::Error) -> Error {
    let path = path.display();
    let what = match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => format!(
            "no daemon answers at {path}; weir on turns swap on, weir serve runs a daemon without, --control names the socket of another"
        ),
        io::ErrorKind::PermissionDenied => {
            format!("the daemon at {path} answers its owner alone: use sudo")
        }
        _ => format!("no answer from {path}: {error}; is it a daemon's control socket, and of this version?"),
    };
    Error::new(ErrorKind::Unreachable, what)
}

/// Tells the daemon at `path` that the kernel's NBD client has connected `device` to that
/// daemon.
///
/// # Errors
/// Fails with one line when no daemon listens at `path`, or with the daemon's error.
pub fn attached(path: &Path, device: Attachment) -> Result<(), Error> {
    tell(path, Request::Attached(device))
}

/// Tells the daemon at `path` that the kernel's NBD client has disconnected `device`.
///
/// # Errors
/// Fails as [`attached`] does.
pub fn detached(path: &Path, device: u32) -> Result<(), Error> {
    tell(path, Request::Detached { device })
}

/// Tells the daemon at `path` to pass a limit or an eviction to the pager of a bounded program.
///
/// # Errors
/// Fails as [`attached`] does.
pub fn order(path: &Path, request: Request) -> Result<(), Error> {
    tell(path, request)
}

/// The bounded programs of the daemon at `path`, and the user id of the process that answers there.
///
/// # Errors
/// Fails when no daemon answers at `path`.
pub fn programs(path: &Path) -> Result<(u32, Vec<Program>), Error> {
    #[derive(Deserialize)]
    struct Answer {
        #[serde(default)]
        programs: Vec<Program>,
    }
    let ask = || {
        let stream = send(path, Request::Status)?;
        let user = rustix::net::sockopt::socket_peercred(&stream)?.uid.as_raw();
        let mut line = String::new();
        BufReader::new(stream.take(ANSWER_MOST)).read_line(&mut line)?;
        let answer: Answer = serde_json::from_str(&line)?;
        Ok((user, answer.programs))
    };
    ask().map_err(|error| unreachable(path, &error))
}

fn tell(path: &Path, request: Request) -> Result<(), Error> {
    let line = ask(path, request).map_err(|error| unreachable(path, &error))?;
    let refused = |refusal: Refusal| {
        let kind = if refusal.stopping { ErrorKind::Stopping } else { ErrorKind::Refused };
        Err(Error::new(kind, refusal.error))
    };
    serde_json::from_str(&line).map_or(Ok(()), refused)
}

fn ask(path: &Path, request: Request) -> io::Result<String> {
    let mut line = String::new();
    BufReader::new(send(path, request)?.take(ANSWER_MOST)).read_line(&mut line)?;
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
