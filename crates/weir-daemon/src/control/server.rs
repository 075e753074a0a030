//! The daemon's end of the control socket.

use super::{
    Acknowledged, Line, Moved, PATIENCE, Progress, REQUEST_MOST, Refusal, Reply, Request, SCHEMA, Service,
    make_run_time_directory,
};
use crate::error::{Error, ErrorKind};
use rustix::net::SocketType;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;
use weir_core::chain;
use weir_pager::link::Order;
use weir_system::local_socket::{self, BindError, SocketFile};

/// Largest number of long requests of one kind at a time. Each has a thread that waits for the
/// worker, or for the keeper.
const LONG_MOST: usize = 16;

/// Longest silence towards the client of a long request. The client would give up after
/// [`PATIENCE`], though the request goes on.
const SAY_EVERY: Duration = Duration::from_secs(1);

/// A listening control socket. Dropping it removes the socket from the file system.
#[derive(Debug)]
pub struct Server {
    _file: SocketFile,
}

impl Server {
    /// Listens at `path`, and answers each request with `service` on a thread of its own.
    ///
    /// # Errors
    /// Fails when another daemon listens at `path`, or the socket cannot be made.
    pub fn start(path: &Path, service: Arc<dyn Service>) -> Result<Self, Error> {
        let failed = |error: io::Error| {
            let what = format!(
                "cannot listen at {}: {error}; is its directory there, and writable? --control names another",
                path.display()
            );
            Error::new(ErrorKind::Control, what)
        };
        make_run_time_directory(path)?;
        let (socket, file) = local_socket::listen(path, SocketType::STREAM).map_err(|error| match error {
            BindError::InUse(path) => Error::new(
                ErrorKind::Control,
                format!(
                    "a daemon already answers at {}; stop it, or give another --control PATH",
                    path.display()
                ),
            ),
            BindError::NotASocket { path, kind } => Error::new(
                ErrorKind::Control,
                format!("{} is {kind}; give another --control PATH", path.display()),
            ),
            BindError::Io { source, .. } => failed(source),
        })?;
        let listener = UnixListener::from(socket);
        listener.set_nonblocking(false).map_err(failed)?;
        let server = Server { _file: file };
        thread::Builder::new()
            .name("weir-control".into())
            .spawn(move || {
                let long = Long::default();
                for client in listener.incoming() {
                    // A client that has gone needs no answer, and its error does not concern other
                    // clients.
                    let _ = client.and_then(|client| answer(client, &service, &long));
                }
            })
            .map_err(failed)?;
        Ok(server)
    }
}

/// The numbers of long requests under way. Each kind has a number of its own. So however many
/// changes of volumes wait for one another, memory is still given back before the machine sleeps.
#[derive(Default)]
struct Long {
    volumes: Count,
    memory: Count,
    sleeps: Count,
    devices: Count,
}

type Count = Arc<AtomicUsize>;

/// A long request under way, which counts until this is dropped.
struct Begun(Count);

impl Begun {
    /// Counts one more request. `Err`: there are too many.
    fn one_more(count: &Count) -> Result<Self, Error> {
        let begun = Begun(Arc::clone(count));
        if count.fetch_add(1, Ordering::Relaxed) < LONG_MOST {
            return Ok(begun);
        }
        let what = format!("{LONG_MOST} such requests are under way; wait for one of them");
        Err(Error::new(ErrorKind::Refused, what))
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Reads one request, answers it, and disconnects. A slow or silent client costs no more than
/// [`PATIENCE`]. A long request has a thread of its own, and goes on even if its client leaves.
fn answer(client: UnixStream, service: &Arc<dyn Service>, long: &Long) -> io::Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new((&client).take(REQUEST_MOST)).read_line(&mut line)?;
    let service = Arc::clone(service);
    match parse(&line) {
        Ok(Request::Status) => write_line(&client, &service.status()),
        Ok(Request::GiveBack { bytes }) => {
            at_length(client, &long.memory, move |tell| service.give_back(bytes, tell))
        }
        Ok(Request::GiveBackSpare) => {
            at_length(client, &long.memory, move |tell| service.give_back_spare(tell))
        }
        Ok(Request::Take { bytes }) => at_length(client, &long.memory, move |tell| service.take(bytes, tell)),
        Ok(Request::Sleep) => at_length(client, &long.sleeps, move |tell| service.sleep(tell)),
        Ok(Request::Wake) => at_length(client, &long.sleeps, move |tell| service.wake(tell)),
        Ok(Request::VolumeCreate { name, bytes }) => {
            at_length(client, &long.volumes, move |_| service.create_volume(&name, bytes))
        }
        Ok(Request::VolumeResize { name, bytes }) => {
            at_length(client, &long.volumes, move |tell| service.resize_volume(&name, bytes, tell))
        }
        Ok(Request::VolumeRemove { name }) => {
            at_length(client, &long.volumes, move |tell| service.remove_volume(&name, tell))
        }
        Ok(Request::Attached(device)) => aside(client, &long.devices, move || service.attached(device)),
        Ok(Request::Detached { device }) => aside(client, &long.devices, move || service.detached(device)),
        Ok(Request::Limit { pid, bytes }) => acknowledge(&client, service.order(pid, Order::Limit(bytes))),
        Ok(Request::Evict { pid }) => acknowledge(&client, service.order(pid, Order::Evict)),
        Err(error) => acknowledge(&client, Err(Error::new(ErrorKind::Refused, error))),
    }
}

fn acknowledge(client: &UnixStream, done: Result<(), Error>) -> io::Result<()> {
    match done {
        Ok(()) => write_line(client, &Acknowledged { schema: SCHEMA }),
        Err(error) => {
            let stopping = error.kind() == ErrorKind::Stopping;
            write_line(client, &Refusal { schema: SCHEMA, error: chain(&error), stopping })
        }
    }
}

/// Runs `work` on a thread of its own, and then acknowledges the request. The keeper may be slow,
/// and other clients need not wait for the keeper.
fn aside(
    client: UnixStream,
    count: &Count,
    work: impl FnOnce() -> Result<(), Error> + Send + 'static,
) -> io::Result<()> {
    let begun = match Begun::one_more(count) {
        Ok(begun) => begun,
        Err(error) => return acknowledge(&client, Err(error)),
    };
    thread::Builder::new().name("weir-control-job".into()).spawn(move || {
        let done = work();
        drop(begun);
        // A client that has gone needs no answer.
        let _ = acknowledge(&client, done);
    })?;
    Ok(())
}

/// Runs `work` on a thread of its own. Another thread sends the client the progress and the
/// outcome. While `work` reports nothing, that thread repeats the last progress. A report may be
/// late, since `work` may wait for other work or for a slow keeper.
fn at_length(
    client: UnixStream,
    count: &Count,
    work: impl FnOnce(&mut dyn FnMut(Progress)) -> Result<Moved, Error> + Send + 'static,
) -> io::Result<()> {
    let begun = match Begun::one_more(count) {
        Ok(begun) => begun,
        Err(error) => return acknowledge(&client, Err(error)),
    };
    let (tell, news) = channel();
    // If the client has gone, this thread ends. The work goes on all the same.
    let say = move || {
        let mut last = Progress { bytes: 0, total_bytes: 0, pages: 0 };
        loop {
            let line = match news.recv_timeout(SAY_EVERY) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => Line::Progress(last),
                Err(RecvTimeoutError::Disconnected) => return,
            };
            if let Line::Progress(progress) = &line {
                last = *progress;
            }
            if write_line(&client, &Reply { schema: SCHEMA, line }).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("weir-control-say".into()).spawn(say)?;
    thread::Builder::new().name("weir-control-job".into()).spawn(move || {
        let _begun = begun;
        let outcome = work(&mut |progress| drop(tell.send(Line::Progress(progress))));
        let _ = tell.send(outcome.map_or_else(|error| Line::Error(chain(&error)), Line::Result));
    })?;
    Ok(())
}

fn write_line(mut client: &UnixStream, message: &impl serde::Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    client.write_all(&line)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_hears_of_work_that_says_nothing_before_its_patience_ends() {
        let (server, client) = UnixStream::pair().expect("sockets");
        client.set_read_timeout(Some(PATIENCE)).expect("a time");
        let (go_on, wait) = channel();
        let moved = Moved { bytes: 7, left_bytes: 0, pages: 0, seconds: 0.0 };
        let work = move |_: &mut dyn FnMut(Progress)| {
            wait.recv().expect("the test lets it go on");
            Ok(moved)
        };
        at_length(server, &Arc::default(), work).expect("threads");
        let mut lines = BufReader::new(&client).lines().map(|line| {
            let reply: Reply = serde_json::from_str(&line.expect("a line in time")).expect("a reply");
            reply.line
        });
        assert_eq!(lines.next(), Some(Line::Progress(Progress { bytes: 0, total_bytes: 0, pages: 0 })));
        go_on.send(()).expect("the work waits");
        assert_eq!(lines.find(|line| !matches!(line, Line::Progress(_))), Some(Line::Result(moved)));
    }
}
