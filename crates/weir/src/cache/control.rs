//! A cache's control socket: one request a connection, lines of JSON. The socket is its owner's
//! alone (mode 0600).
//!
//! `{"schema":1,"request":"status"}` is answered by a [`Report`] on one line. `flush`, `detach` and
//! `{"request":"mode","mode":"..."}` are answered by any number of lines
//! `{"schema":1,"dirty_bytes":N}` and a last one: `{"schema":1}`, or `{"schema":1,"error":"..."}`.
//! `{"request":"trace","requests":N,"seconds":N}` is answered by any number of lines
//! `{"schema":1,"pages":[N,...]}`, and a last one `{"schema":1,"lost":N}`. `give-back`, `take`,
//! `sleep` and `wake` are asked for and answered as at a daemon's control socket
//! ([`weir_daemon::control`]), and so is `{"request":"resize","bytes":N}`. `grow` is answered as
//! `flush` is.

use super::memory::Job;
use super::report::Report;
use crate::failure;
use rustix::net::SocketType;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;
use weir_cli::failure::Failure;
use weir_daemon::control::{Moved, Progress, SCHEMA, make_run_time_directory};
use weir_system::local_socket::{self, BindError, SocketFile};

/// Time that a client may take for its request.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time for which the end of a cache waits for the answers to its last requests.
const LAST: Duration = if cfg!(test) { Duration::from_secs(600) } else { PATIENCE };
/// Time that a client may leave its answer unread.
const UNREAD: Duration = if cfg!(test) { Duration::from_millis(50) } else { PATIENCE };
/// Longest request, in bytes.
const REQUEST_MOST: u64 = 4096;

/// A request to the cache.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case")]
pub enum Request {
    /// Report the cache's status.
    Status,
    /// Write all dirty pages home.
    Flush,
    /// Change the cache's mode: where writes go.
    Mode {
        /// The mode from now on.
        mode: String,
    },
    /// Write all dirty pages home, and end.
    Detach,
    /// Give `bytes` of memory back, or all.
    GiveBack {
        /// Number of bytes; `None`: all.
        #[serde(default)]
        bytes: Option<u64>,
    },
    /// Take `bytes` of memory again, or all that was given back.
    Take {
        /// Number of bytes; `None`: all.
        #[serde(default)]
        bytes: Option<u64>,
    },
    /// Give all memory back, until the machine has slept.
    Sleep,
    /// Take again the memory that [`Sleep`](Self::Sleep) gave back.
    Wake,
    /// Use `bytes` of the store from now on, or all. If the client disconnects, the cache stops the
    /// resize.
    Resize {
        /// Number of bytes; `None`: all.
        #[serde(default)]
        bytes: Option<u64>,
    },
    /// Make the device as large as its home is now.
    Grow,
    /// Record which pages requests use.
    Trace {
        /// Largest number of requests to record.
        requests: u64,
        /// Longest time to record, in seconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seconds: Option<u32>,
    },
}

/// One line of the cache's answer to a request.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Answer {
    schema: u32,
    /// Bytes that must still be written home. The last line of an answer has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dirty_bytes: Option<u64>,
    /// Pages that requests have used, in order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pages: Option<Vec<u32>>,
    /// Number of requests that a trace lacks. Only the last line of a trace has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lost: Option<u64>,
    /// The progress of a give-back or a take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    progress: Option<Progress>,
    /// The outcome of a give-back or a take. Only its last line has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    result: Option<Moved>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Envelope {
    schema: u32,
    #[serde(flatten)]
    request: Request,
}

/// A cache's answers to requests.
pub trait Service: Send + Sync + 'static {
    /// Reports the cache's status.
    fn report(&self) -> Report;

    /// Records which pages requests use, and hands them to `tell` in parts. Ends once `tell`
    /// returns false, the number of requests or seconds is reached, or the cache ends. Returns the
    /// number of requests that came too fast to be recorded.
    ///
    /// # Errors
    /// The error is one line: what is wrong, and the next step.
    fn trace(
        &self,
        requests: u64,
        seconds: Option<u32>,
        tell: &mut dyn FnMut(Vec<u32>) -> bool,
    ) -> Result<u64, String>;

    /// Gives memory back or takes it again. Calls `tell` with the progress, which returns whether
    /// the client still listens.
    ///
    /// # Errors
    /// The error is one line: what is wrong, and the next step.
    fn reclaim(&self, job: Job, tell: &mut dyn FnMut(Progress) -> bool) -> Result<Moved, String>;

    /// Serves any other request. Calls `tell` with the number of bytes that are still dirty.
    ///
    /// # Errors
    /// The error is one line: what is wrong, and the next step.
    fn serve(&self, request: &Request, tell: &mut dyn FnMut(u64)) -> Result<(), String>;
}

/// A control socket that answers requests. Dropping it removes the socket.
pub struct Control {
    file: SocketFile,
    under_way: Arc<UnderWay>,
}

impl Control {
    /// The path of the socket.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Removes the socket, and waits until the requests under way have their answers. The process
    /// may exit then: it waits for no client that does not read.
    pub fn end(self) {
        drop(self.file);
        let count = self.under_way.count.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.under_way.none.wait_timeout_while(count, LAST, |count| *count > 0);
    }
}

/// The requests that are served now.
#[derive(Default)]
struct UnderWay {
    count: Mutex<usize>,
    none: Condvar,
}

impl UnderWay {
    fn change(&self, change: impl FnOnce(usize) -> usize) {
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        *count = change(*count);
        self.none.notify_all();
    }
}

/// Listens at `path`, with a thread for each request.
///
/// # Errors
/// Fails when another cache listens at `path`, or the socket cannot be made.
pub fn listen(path: &Path, service: Arc<dyn Service>) -> Result<Control, Failure> {
    make_run_time_directory(path).map_err(failure::of)?;
    let shown = path.display();
    let (socket, file) = local_socket::listen(path, SocketType::STREAM).map_err(|error| match error {
        BindError::InUse(_) => Failure::Failed(format!(
            "a cache already answers at {shown}; weir cache detach ends it, --control PATH is for another one"
        )),
        error => Failure::Failed(format!("{}; --control names another", weir_cli::failure::chain(&error))),
    })?;
    let listener = UnixListener::from(socket);
    listener.set_nonblocking(false).map_err(Failure::failed)?;
    let under_way = Arc::new(UnderWay::default());
    let served = Arc::clone(&under_way);
    let answer_all = move || {
        for client in listener.incoming().flatten() {
            let (service, served) = (Arc::clone(&service), Arc::clone(&served));
            // If no thread can be started for the client, it is disconnected.
            let _ = thread::Builder::new().name("weir-cache-job".into()).spawn(move || {
                // A client that went away needs no answer.
                let _ = hear(&client).and_then(|line| {
                    served.change(|count| count + 1);
                    let answered = answer(&client, &line, &*service);
                    served.change(|count| count - 1);
                    answered
                });
            });
        }
    };
    thread::Builder::new().name("weir-cache-control".into()).spawn(answer_all).map_err(Failure::failed)?;
    Ok(Control { file, under_way })
}

/// Reads a client's request.
fn hear(client: &UnixStream) -> io::Result<String> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(UNREAD))?;
    let mut line = String::new();
    BufReader::new(client.take(REQUEST_MOST)).read_line(&mut line)?;
    Ok(line)
}

fn answer(client: &UnixStream, line: &str, service: &dyn Service) -> io::Result<()> {
    let error = match serde_json::from_str::<Envelope>(line) {
        Ok(Envelope { schema: SCHEMA, request: Request::Status }) => {
            return write_line(client, &service.report());
        }
        Ok(Envelope { schema: SCHEMA, request: Request::Trace { requests, seconds } }) => {
            let line = |pages| Answer { schema: SCHEMA, pages: Some(pages), ..Answer::default() };
            let mut sent = Ok(());
            let result = service.trace(requests, seconds, &mut |pages| {
                sent = write_line(client, &line(pages));
                sent.is_ok()
            });
            // A part of the line may have been sent. So no other line can follow.
            sent?;
            let (lost, error) = (result.as_ref().ok().copied(), result.err());
            return write_line(client, &Answer { schema: SCHEMA, lost, error, ..Answer::default() });
        }
        Ok(Envelope { schema: SCHEMA, request }) if job_of(&request).is_some() => {
            let line = Answer { schema: SCHEMA, ..Answer::default() };
            let mut reads = true;
            // If the client has gone, the work goes on all the same, unless it is a resize.
            let mut tell = |progress| {
                let line = Answer { progress: Some(progress), ..line.clone() };
                reads = reads && write_line(client, &line).is_ok();
                reads
            };
            let job = job_of(&request).expect("it was just seen");
            let result = service.reclaim(job, &mut tell);
            let (result, error) = (result.as_ref().ok().copied(), result.err());
            return write_line(client, &Answer { result, error, ..line });
        }
        Ok(Envelope { schema: SCHEMA, request }) => {
            // Once the client has failed to read a line, send it no more progress: each line could
            // delay the work by all the time that a client may take.
            let mut reads = true;
            let mut tell = |dirty| {
                let progress = Answer { schema: SCHEMA, dirty_bytes: Some(dirty), ..Answer::default() };
                reads = reads && write_line(client, &progress).is_ok();
            };
            service.serve(&request, &mut tell).err()
        }
        Ok(Envelope { schema, .. }) => Some(format!("schema {schema} is not spoken here; use {SCHEMA}")),
        Err(error) => Some(format!("no request of a cache: {error}")),
    };
    write_line(client, &Answer { schema: SCHEMA, error, ..Answer::default() })
}

/// The job for a request that gives memory back, takes memory or changes the size; else `None`.
fn job_of(request: &Request) -> Option<Job> {
    match *request {
        Request::GiveBack { bytes } => Some(Job::GiveBack(bytes)),
        Request::Take { bytes } => Some(Job::Take(bytes)),
        Request::Sleep => Some(Job::Sleep),
        Request::Wake => Some(Job::Wake),
        Request::Resize { bytes } => Some(Job::Resize(bytes)),
        _ => None,
    }
}

fn write_line(mut client: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    client.write_all(&line)
}

/// Asks the cache at `path` for its status.
///
/// # Errors
/// Fails when no cache answers at `path`.
pub fn status(path: &Path) -> Result<Report, Failure> {
    let line = send(path, &Request::Status)?.lines().next();
    let line = line.unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()));
    let report = line.and_then(|line| Ok(serde_json::from_str(&line)?));
    report.map_err(|error| unreachable(path, &error))
}

/// Sends a request to the cache at `path`. For each line of progress, calls `tell` with the number
/// of bytes that must still be written home.
///
/// # Errors
/// Fails when no cache answers at `path`, or with the cache's own error when it cannot do what was
/// asked.
pub fn ask(path: &Path, request: &Request, tell: &mut dyn FnMut(u64)) -> Result<(), Failure> {
    for line in send(path, request)?.lines() {
        let line = line.and_then(|line| Ok(serde_json::from_str::<Answer>(&line)?));
        let answer = line.map_err(|error| unreachable(path, &error))?;
        match answer {
            Answer { error: Some(error), .. } => return Err(Failure::Failed(error)),
            Answer { dirty_bytes: None, .. } => return Ok(()),
            Answer { dirty_bytes: Some(dirty), .. } => tell(dirty),
        }
    }
    Err(unreachable(path, &io::ErrorKind::UnexpectedEof.into()))
}

/// Has the cache at `path` use this many bytes of its store from now on; `None`: all. Calls `tell`
/// with the progress.
///
/// # Errors
/// Fails when no cache answers at `path`, or with the cache's own error.
pub fn resize(path: &Path, bytes: Option<u64>, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Failure> {
    for line in send(path, &Request::Resize { bytes })?.lines() {
        let line = line.and_then(|line| Ok(serde_json::from_str::<Answer>(&line)?));
        match line.map_err(|error| unreachable(path, &error))? {
            Answer { error: Some(error), .. } => return Err(Failure::Failed(error)),
            Answer { result: Some(moved), .. } => return Ok(moved),
            Answer { progress: Some(far), .. } => tell(far),
            Answer { .. } => break,
        }
    }
    Err(unreachable(path, &io::ErrorKind::UnexpectedEof.into()))
}

/// Has the cache at `path` record which pages requests use, and calls `tell` with the pages of each
/// line. Returns the number of requests that the trace lacks. `None`: the cache has ended
/// meanwhile, or this client did not read for so long that the cache has disconnected it.
///
/// # Errors
/// Fails when no cache answers at `path`, with the cache's own error, or with that of `tell`.
pub fn trace(
    path: &Path,
    options: (u64, Option<u32>),
    tell: &mut dyn FnMut(&[u32]) -> Result<(), Failure>,
) -> Result<Option<u64>, Failure> {
    let (requests, seconds) = options;
    let mut answers = send(path, &Request::Trace { requests, seconds })?;
    let mut line = String::new();
    loop {
        line.clear();
        answers.read_line(&mut line).map_err(|error| unreachable(path, &error))?;
        if !line.ends_with('\n') {
            return Ok(None);
        }
        match serde_json::from_str(&line).map_err(|error| unreachable(path, &error.into()))? {
            Answer { error: Some(error), .. } => return Err(Failure::Failed(error)),
            Answer { lost: Some(lost), .. } => return Ok(Some(lost)),
            Answer { pages, .. } => tell(&pages.unwrap_or_default())?,
        }
    }
}

fn send(path: &Path, request: &Request) -> Result<BufReader<UnixStream>, Failure> {
    let attempt = || -> io::Result<_> {
        let client = UnixStream::connect(path)?;
        write_line(&client, &Envelope { schema: SCHEMA, request: request.clone() })?;
        Ok(BufReader::new(client))
    };
    attempt().map_err(|error| unreachable(path, &error))
}

fn unreachable(path: &Path, error: &io::Error) -> Failure {
    let path = path.display();
    Failure::Failed(match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => format!(
            "no cache answers at {path}; weir cache create makes one, --control names the socket of another"
        ),
        io::ErrorKind::PermissionDenied => format!("the cache at {path} answers its owner alone: use sudo"),
        _ => format!("no answer from {path}: {error}; is it a cache's control socket, and of this version?"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A test's service. It sends a trace of more pages than a socket holds, and tells when the
    /// sender has given up.
    struct Large(std::sync::mpsc::Sender<()>);

    impl Service for Large {
        fn report(&self) -> Report {
            unreachable!("nobody asks")
        }

        fn trace(
            &self,
            _requests: u64,
            _seconds: Option<u32>,
            tell: &mut dyn FnMut(Vec<u32>) -> bool,
        ) -> Result<u64, String> {
            assert!(tell(vec![1]) && !tell(vec![u32::MAX; 1 << 20]), "nobody reads");
            self.0.send(()).unwrap();
            Ok(0)
        }

        fn reclaim(&self, _job: Job, _tell: &mut dyn FnMut(Progress) -> bool) -> Result<Moved, String> {
            unreachable!("nobody asks")
        }

        fn serve(&self, _request: &Request, _tell: &mut dyn FnMut(u64)) -> Result<(), String> {
            Ok(())
        }
    }

    #[test]
    fn a_trace_that_its_client_does_not_read_ends_within_a_line_and_has_the_lines_before() {
        let path = std::env::temp_dir().join(format!("weir-trace-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let (done, is_done) = std::sync::mpsc::channel();
        let cache = thread::spawn(move || {
            let (client, _) = listener.accept().unwrap();
            answer(&client, &hear(&client)?, &Large(done))
        });
        let mut told = Vec::new();
        let result = trace(&path, (9, None), &mut |pages| {
            told.extend_from_slice(pages);
            is_done.recv().unwrap();
            Ok(())
        });
        assert_eq!((told, result.unwrap()), (vec![1], None));
        assert!(cache.join().unwrap().is_err());
        std::fs::remove_file(&path).unwrap();
    }

    /// A test's service that says when it has a request, and waits to be told how to go on.
    struct Waits(std::sync::mpsc::SyncSender<()>, Mutex<std::sync::mpsc::Receiver<()>>);

    impl Service for Waits {
        fn report(&self) -> Report {
            unreachable!("nobody asks")
        }

        fn trace(&self, _: u64, _: Option<u32>, _: &mut dyn FnMut(Vec<u32>) -> bool) -> Result<u64, String> {
            unreachable!("nobody asks")
        }

        fn reclaim(&self, _job: Job, _tell: &mut dyn FnMut(Progress) -> bool) -> Result<Moved, String> {
            unreachable!("nobody asks")
        }

        fn serve(&self, _request: &Request, _tell: &mut dyn FnMut(u64)) -> Result<(), String> {
            self.0.send(()).unwrap();
            self.1.lock().unwrap().recv().unwrap();
            Ok(())
        }
    }

    #[test]
    fn the_end_waits_for_the_answer_to_a_request_that_it_ends_by() {
        let path = std::env::temp_dir().join(format!("weir-last-answer-{}", std::process::id()));
        let (has_begun, begun) = std::sync::mpsc::sync_channel(1);
        let (go_on, goes_on) = std::sync::mpsc::sync_channel(1);
        let control = listen(&path, Arc::new(Waits(has_begun, Mutex::new(goes_on)))).unwrap();
        let asked = path.clone();
        let client = thread::spawn(move || ask(&asked, &Request::Detach, &mut |_| {}));
        begun.recv().unwrap();
        let end = thread::spawn(move || control.end());
        while path.exists() {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_millis(100));
        assert!(!end.is_finished(), "the client has no answer yet");
        go_on.send(()).unwrap();
        client.join().unwrap().unwrap();
        end.join().unwrap();
    }
}
