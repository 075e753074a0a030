//! The daemon's end.

use super::{PATIENCE, REQUEST_MOST, Refusal, Request, SCHEMA, Status};
use crate::failure::Failure;
use std::fs;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;

/// A listening control socket. Dropping it removes the socket from the file system.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
}

impl Server {
    /// Listens at `path` and answers each request for status by what `status` returns, on a thread of its own.
    ///
    /// # Errors
    /// When another daemon listens there, or the socket cannot be made.
    pub fn start(path: &Path, status: impl Fn() -> Status + Send + 'static) -> Result<Self, Failure> {
        let failed = |error: io::Error| {
            Failure::Failed(format!(
                "cannot listen at {}: {error}; give another --control PATH",
                path.display()
            ))
        };
        make_room(path)?;
        let listener = UnixListener::bind(path).map_err(failed)?;
        let server = Server { path: path.to_owned() };
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        thread::Builder::new()
            .name("weir-control".into())
            .spawn(move || {
                for client in listener.incoming() {
                    // A client that went away needs no answer, and nobody else is concerned.
                    let _ = client.and_then(|client| answer(&client, &status));
                }
            })
            .map_err(failed)?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Makes the directory, and removes the socket of a daemon that is gone; never anything else.
fn make_room(path: &Path) -> Result<(), Failure> {
    if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(|error| {
            Failure::Failed(format!(
                "cannot make {}: {error}; give another --control PATH",
                directory.display()
            ))
        })?;
    }
    match fs::symlink_metadata(path) {
        Err(_) => Ok(()),
        Ok(there) if !there.file_type().is_socket() => Err(Failure::Failed(format!(
            "{} is there and no socket; give another --control PATH",
            path.display()
        ))),
        Ok(_) if UnixStream::connect(path).is_ok() => Err(Failure::Failed(format!(
            "a daemon already answers at {}; stop it, or give another --control PATH",
            path.display()
        ))),
        Ok(_) => fs::remove_file(path).map_err(Failure::failed),
    }
}

/// Reads one line, answers it, and hangs up. A slow or silent client costs [`PATIENCE`], no more.
fn answer(client: &UnixStream, status: &impl Fn() -> Status) -> io::Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new(client.take(REQUEST_MOST)).read_line(&mut line)?;
    let mut reply = match parse(&line) {
        Ok(Request::Status) => serde_json::to_vec(&status())?,
        Err(error) => serde_json::to_vec(&Refusal { schema: SCHEMA, error })?,
    };
    reply.push(b'\n');
    let mut client = client;
    client.write_all(&reply)
}

fn parse(line: &str) -> Result<Request, String> {
    let message: serde_json::Value =
        serde_json::from_str(line).map_err(|error| format!("the request is no line of JSON: {error}"))?;
    match message.get("schema").and_then(serde_json::Value::as_u64) {
        Some(schema) if schema == u64::from(SCHEMA) => {
            serde_json::from_value(message).map_err(|error| format!("unknown request: {error}"))
        }
        Some(schema) => Err(format!("schema {schema} is not spoken here; use {SCHEMA}")),
        None => Err(format!("the request names no schema; use {SCHEMA}")),
    }
}
