//! An endpoint from which Prometheus and other programs read the daemon's metrics: HTTP, one
//! request a connection, one connection at a time.
//!
//! A slow or silent client delays the other clients by at most [`PATIENCE`]. All of them together
//! take one thread and one request's memory from a daemon that carries swap.

use super::metrics::{self, Format};
use super::{PATIENCE, Service};
use crate::address::Address;
use crate::error::{Error, ErrorKind};
use rustix::net::SocketType;
use std::io::{self, Read, Write};
use std::net::{TcpListener, ToSocketAddrs as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread;
use std::time::Instant;
use weir_system::local_socket::{self, SocketFile};

/// Longest head of a request, in bytes; and largest number of header lines.
const HEAD_MOST: usize = 8192;
const HEADERS_MOST: usize = 64;
/// The media type in the `Accept` of a client that reads OpenMetrics.
const OPEN: &[u8] = b"application/openmetrics-text";

/// A listening endpoint. Dropping it removes a unix socket from the file system.
#[derive(Debug)]
pub struct Endpoint {
    _file: Option<SocketFile>,
}

impl Endpoint {
    /// Listens at `address`, and answers each `GET /metrics` with the status of `service`.
    ///
    /// # Errors
    /// Fails when other machines could reach the address, or the socket cannot be made.
    pub fn start(address: &Address, service: Arc<dyn Service>) -> Result<Self, Error> {
        let failed = |error: &dyn std::fmt::Display| {
            let what = format!("--metrics {address}: cannot listen there: {error}; choose another address");
            Error::new(ErrorKind::Control, what)
        };
        let (listener, file) = match address {
            Address::Unix(path) => {
                let (socket, file) =
                    local_socket::listen(path, SocketType::STREAM).map_err(|error| failed(&error))?;
                (Listener::Unix(UnixListener::from(socket)), Some(file))
            }
            Address::Tcp { host, port } => {
                let addresses = (host.as_str(), *port).to_socket_addrs().map_err(|error| failed(&error))?;
                let addresses: Vec<_> = addresses.collect();
                if let Some(exposed) = addresses.iter().find(|address| !address.ip().is_loopback()) {
                    let what = format!(
                        "--metrics {address} is {}, which other machines reach; accepted: unix:PATH, tcp:127.0.0.1:PORT, tcp:[::1]:PORT",
                        exposed.ip()
                    );
                    return Err(Error::new(ErrorKind::Config, what));
                }
                let socket = TcpListener::bind(&*addresses).map_err(|error| failed(&error))?;
                (Listener::Tcp(socket), None)
            }
        };
        listener.wait_for_clients().map_err(|error| failed(&error))?;
        thread::Builder::new()
            .name("weir-metrics".into())
            .spawn(move || {
                loop {
                    // A client that has gone needs no answer, and its error does not concern other
                    // clients.
                    if listener.accept().and_then(|client| answer(&mut { client }, &*service)).is_err() {
                        // Without free descriptors accept(2) fails at once. Let other threads run
                        // before the next attempt.
                        thread::yield_now();
                    }
                }
            })
            .map_err(|error| failed(&error))?;
        Ok(Endpoint { _file: file })
    }
}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    fn wait_for_clients(&self) -> io::Result<()> {
        match self {
            Listener::Unix(listener) => listener.set_nonblocking(false),
            Listener::Tcp(listener) => listener.set_nonblocking(false),
        }
    }

    fn accept(&self) -> io::Result<Client> {
        let socket: OwnedFd = match self {
            Listener::Unix(listener) => listener.accept()?.0.into(),
            Listener::Tcp(listener) => listener.accept()?.0.into(),
        };
        Ok(Client { socket, until: Instant::now() + PATIENCE })
    }
}

/// A connection that ends at a fixed time, however slowly its client reads or writes.
struct Client {
    socket: OwnedFd,
    until: Instant,
}

impl Client {
    /// Limits the next call to the time that the connection has left.
    fn limit(&self, which: rustix::net::sockopt::Timeout) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(rustix::net::sockopt::set_socket_timeout(&self.socket, which, Some(left))?)
    }
}

impl Read for Client {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.limit(rustix::net::sockopt::Timeout::Recv)?;
        Ok(rustix::net::recv(&self.socket, bytes, rustix::net::RecvFlags::empty())?.0)
    }
}

impl Write for Client {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.limit(rustix::net::sockopt::Timeout::Send)?;
        Ok(rustix::net::send(&self.socket, bytes, rustix::net::SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads one request, answers it, and disconnects.
fn answer(client: &mut (impl Read + Write), service: &dyn Service) -> io::Result<()> {
    let mut head = vec![0; HEAD_MOST];
    let mut read = 0;
    let (status, kind, body) = loop {
        let more = client.read(&mut head[read..])?;
        read += more;
        match parse(&head[..read]) {
            Asked::Metrics(format) => {
                break ("200 OK", format.content_type(), metrics::render(service.status(), format));
            }
            Asked::Other(status) => break (status, "text/plain", format!("{status}; ask GET /metrics\n")),
            Asked::Unknown if more == 0 || read == head.len() => return Ok(()),
            Asked::Unknown => {}
        }
    };
    write!(
        client,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// A client's request.
#[derive(PartialEq, Eq, Debug)]
enum Asked {
    Metrics(Format),
    /// Any other request, with the status line that answers it.
    Other(&'static str),
    /// The head of the request did not arrive whole.
    Unknown,
}

fn parse(head: &[u8]) -> Asked {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MOST];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(head) {
        Ok(httparse::Status::Partial) => Asked::Unknown,
        Ok(httparse::Status::Complete(_)) => {
            let path = request.path.and_then(|path| path.split('?').next());
            match (request.method, path) {
                (Some("GET"), Some("/metrics")) => {
                    let mut accepts =
                        request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("accept"));
                    let wants =
                        accepts.any(|header| header.value.windows(OPEN.len()).any(|part| part == OPEN));
                    Asked::Metrics(if wants { Format::OpenMetrics } else { Format::Text })
                }
                (Some("GET"), _) => Asked::Other("404 Not Found"),
                _ => Asked::Other("405 Method Not Allowed"),
            }
        }
        Err(_) => Asked::Other("400 Bad Request"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_understood_once_its_head_is_whole_and_what_is_none_is_refused() {
        let whole = b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\nAccept: application/openmetrics-text;q=0.5, */*\r\n\r\n";
        for length in 0..whole.len() {
            assert_eq!(parse(&whole[..length]), Asked::Unknown, "{length} bytes");
        }
        assert_eq!(parse(whole), Asked::Metrics(Format::OpenMetrics));
        let older = b"GET /metrics HTTP/1.1\r\nAccept: text/plain\r\n\r\n";
        assert_eq!(parse(older), Asked::Metrics(Format::Text));
        for (head, status) in [
            ("GET / HTTP/1.0\r\n\r\n", "404 Not Found"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
            ("{\"schema\":1}\n", "400 Bad Request"),
        ] {
            assert_eq!(parse(head.as_bytes()), Asked::Other(status), "{head:?}");
        }
    }
}
