//! TLS for TCP, as a relay in front of the server.
//!
//! A connection's TLS runs on a thread of its own, which passes the plaintext to the server through
//! a socket pair. So the threads that serve pages neither know of TLS nor allocate for it. The TLS
//! thread does allocate, so a device that carries swap must not use TLS.

use rustix::event::{PollFd, PollFlags, Timespec};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Largest number of bytes that a relay holds in each direction.
const BUFFER_BYTES: usize = 64 << 10;
/// Time limit of a client's TLS handshake, and of its last reads after the server has closed the
/// connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// Largest number of relays that run at once, each with a thread. More connections are refused.
const RELAYS_MAX: usize = 128;

static RELAYS: AtomicUsize = AtomicUsize::new(0);

/// A server's certificate and key, and the authority whose clients it accepts.
pub struct Identity {
    config: Arc<ServerConfig>,
    checks_clients: bool,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity(..)")
    }
}

/// The reason why a directory gives no usable certificate and key.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file is missing, or has wrong content.
    #[error(
        "{file}: {what}; a certificate directory holds server-cert.pem, server-key.pem and, to accept known clients only, ca-cert.pem"
    )]
    File {
        /// The file's name.
        file: String,
        /// The reason why the file cannot be used.
        what: String,
    },
    /// Certificate and key do not match, or are unusable.
    #[error("the certificate and key in {directory} cannot be used: {source}")]
    Unusable {
        /// The directory that holds the certificate and the key.
        directory: String,
        /// The error of rustls.
        source: rustls::Error,
    },
}

/// The keys that the `ring` library supports, for the error about any other key.
const KEYS: &str =
    "no key that can be used: RSA of 2048, 3072 or 4096 bits, ECDSA on P-256 or P-384, or Ed25519 can";

impl Identity {
    /// Reads the files `server-cert.pem` and `server-key.pem`, which have the same names for QEMU,
    /// nbdkit and libnbd. If there is a `ca-cert.pem`, clients must show a certificate that it has
    /// signed.
    ///
    /// # Errors
    /// Fails when a file is missing, is no PEM, or the key does not match the certificate.
    pub fn from_directory(directory: &Path) -> Result<Identity, IdentityError> {
        let file = |name: &str| directory.join(name);
        let failed = |name: &str, error: &dyn fmt::Display| IdentityError::File {
            file: file(name).display().to_string(),
            what: error.to_string(),
        };
        let certificates = |name: &str| {
            CertificateDer::pem_file_iter(file(name))
                .and_then(Iterator::collect::<Result<Vec<_>, _>>)
                .map_err(|error| failed(name, &error))
        };
        let chain = certificates("server-cert.pem")?;
        let key = PrivateKeyDer::from_pem_file(file("server-key.pem"))
            .map_err(|error| failed("server-key.pem", &error))?;
        // Check the key here, since later errors name no file.
        rustls::crypto::ring::sign::any_supported_type(&key).map_err(|_| failed("server-key.pem", &KEYS))?;
        // A `ca-cert.pem` that cannot be read, or is a link to nothing, counts as present. Its
        // owner put it there so that the server does not accept every client.
        let checks_clients = match std::fs::symlink_metadata(file("ca-cert.pem")) {
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => return Err(failed("ca-cert.pem", &error)),
            Ok(_) => true,
        };
        let unusable =
            |source| IdentityError::Unusable { directory: directory.display().to_string(), source };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(unusable)?;
        let builder = if checks_clients {
            let mut roots = RootCertStore::empty();
            for root in certificates("ca-cert.pem")? {
                roots.add(root).map_err(unusable)?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|error| failed("ca-cert.pem", &error))?;
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        let config = Arc::new(builder.with_single_cert(chain, key).map_err(unusable)?);
        Ok(Identity { config, checks_clients })
    }
}

impl Identity {
    /// Whether clients must show a certificate.
    pub fn checks_clients(&self) -> bool {
        self.checks_clients
    }
}

/// Begins TLS on `socket` and returns the plaintext end, non-blocking.
///
/// # Errors
/// Fails when too many relays run, or the system has no threads or descriptors left.
pub(super) fn relay(identity: &Identity, socket: OwnedFd) -> io::Result<OwnedFd> {
    struct Permit;
    impl Drop for Permit {
        fn drop(&mut self) {
            RELAYS.fetch_sub(1, Ordering::Relaxed);
        }
    }
    if RELAYS.fetch_add(1, Ordering::Relaxed) >= RELAYS_MAX {
        RELAYS.fetch_sub(1, Ordering::Relaxed);
        return Err(ErrorKind::ResourceBusy.into());
    }
    let permit = Permit;
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    theirs.set_nonblocking(true)?;
    let mut session = ServerConnection::new(Arc::clone(&identity.config)).map_err(io::Error::other)?;
    session.set_buffer_limit(Some(BUFFER_BYTES));
    let socket = TcpStream::from(socket);
    std::thread::Builder::new().name("weir-nbd-tls".to_owned()).spawn(move || {
        let _permit = permit;
        // The relay's error is not needed: the server logs the end of the plaintext connection.
        let _ = Relay { session, socket, plain: ours, received: Vec::new(), sent: 0 }.run();
    })?;
    Ok(theirs.into())
}

struct Relay {
    session: ServerConnection,
    socket: TcpStream,
    plain: UnixStream,
    /// Plaintext from the client, of which the first `sent` bytes have been passed on.
    received: Vec<u8>,
    sent: usize,
}

impl Relay {
    fn run(&mut self) -> io::Result<()> {
        let start = Instant::now();
        let mut buffer = vec![0; BUFFER_BYTES];
        let (mut client_open, mut server_open) = (true, true);
        let mut closing: Option<Instant> = None;
        loop {
            if self.session.is_handshaking() && start.elapsed() > PATIENCE {
                return Err(ErrorKind::TimedOut.into());
            }
            while self.session.wants_write() && again(self.session.write_tls(&mut self.socket))?.is_some() {}
            client_open &= self.pass_on(&mut buffer)?;
            // Read more only after earlier plaintext has been passed on. So the session holds at
            // most one buffer of it.
            if server_open && !self.session.is_handshaking() && !self.session.wants_write() {
                match again(self.plain.read(&mut buffer))? {
                    Some(0) => {
                        server_open = false;
                        closing = Some(Instant::now());
                        self.session.send_close_notify();
                        continue;
                    }
                    Some(read) => {
                        // The session has room for as many bytes as `buffer` holds, so all bytes
                        // are written.
                        self.session.writer().write_all(&buffer[..read])?;
                        continue;
                    }
                    None => {}
                }
            }
            let done = !server_open && !self.session.wants_write();
            if done || closing.is_some_and(|since| since.elapsed() > PATIENCE) {
                return Ok(());
            }
            if !client_open && self.session.is_handshaking() {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            self.wait(client_open, server_open)?;
            if client_open && self.sent == self.received.len() {
                match again(self.session.read_tls(&mut self.socket))? {
                    Some(0) => {
                        client_open = false;
                        self.plain.shutdown(Shutdown::Write)?;
                    }
                    Some(_) => {
                        if let Err(error) = self.session.process_new_packets() {
                            // Send the TLS alert that tells the client the reason, if it still
                            // reads.
                            let _ = self.session.write_tls(&mut self.socket);
                            return Err(io::Error::other(error));
                        }
                    }
                    None => {}
                }
            }
        }
    }

    /// Passes the client's plaintext on, as far as the server takes it. Returns false once the
    /// client has ended its side.
    fn pass_on(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        loop {
            while self.sent < self.received.len() {
                match again(self.plain.write(&self.received[self.sent..]))? {
                    Some(written) => self.sent += written,
                    None => return Ok(true),
                }
            }
            self.received.clear();
            self.sent = 0;
            match again(self.session.reader().read(buffer))? {
                Some(0) => {
                    self.plain.shutdown(Shutdown::Write)?;
                    return Ok(false);
                }
                Some(read) => self.received.extend_from_slice(&buffer[..read]),
                None => return Ok(true),
            }
        }
    }

    fn wait(&self, client_open: bool, server_open: bool) -> io::Result<()> {
        let waiting = self.sent < self.received.len();
        let flags = |read: bool, write: bool| {
            let read = if read { PollFlags::IN } else { PollFlags::empty() };
            read | if write { PollFlags::OUT } else { PollFlags::empty() }
        };
        let wants_write = self.session.wants_write();
        let takes_plain = server_open && !wants_write && !self.session.is_handshaking();
        let asked = [
            (self.socket.as_fd(), flags(client_open && !waiting, wants_write)),
            (self.plain.as_fd(), flags(takes_plain, waiting)),
        ];
        // A running deadline is checked once a second. An established connection has none, and
        // causes no wake-ups.
        let limited = self.session.is_handshaking() || !server_open;
        let second = Timespec { tv_sec: 1, tv_nsec: 0 };
        wait_for(asked, limited.then_some(&second))
    }
}

/// Waits for the events asked of either descriptor. A descriptor with no events asked is left out:
/// poll would report its hang-up again and again.
fn wait_for(asked: [(BorrowedFd<'_>, PollFlags); 2], limit: Option<&Timespec>) -> io::Result<()> {
    let mut fds = asked.map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags));
    let fds = match asked.map(|(_, flags)| flags.is_empty()) {
        [false, false] => &mut fds[..],
        [false, true] => &mut fds[..1],
        [true, false] => &mut fds[1..],
        [true, true] => &mut [],
    };
    match rustix::event::poll(fds, limit) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Turns an error that says "try again" into `None`.
fn again<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_has_hung_up_wakes_nobody_unless_it_is_asked() {
        let (dead, peer) = UnixStream::pair().unwrap();
        drop(peer);
        let (live, mut peer) = UnixStream::pair().unwrap();
        let wait = |dead_flags, live_flags| {
            let begun = Instant::now();
            let limit = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            wait_for([(dead.as_fd(), dead_flags), (live.as_fd(), live_flags)], Some(&limit)).unwrap();
            wait_for([(live.as_fd(), live_flags), (dead.as_fd(), dead_flags)], Some(&limit)).unwrap();
            begun.elapsed() >= Duration::from_millis(200)
        };
        assert!(wait(PollFlags::empty(), PollFlags::IN), "it waits for the other");
        assert!(wait(PollFlags::empty(), PollFlags::empty()));
        assert!(!wait(PollFlags::IN, PollFlags::IN), "its end is asked for");
        peer.write_all(b"x").unwrap();
        assert!(!wait(PollFlags::empty(), PollFlags::IN), "the other has something");
    }
}
