//! Where the server listens: a unix socket of its owner's, or TCP, under TLS or only for this machine.

use super::tls::Identity;
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::fmt;
use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

/// An address to listen on, with what protects it.
#[derive(Clone, Debug)]
pub enum Listen {
    /// A socket in the file system that only its owner can use (mode 0600).
    Unix(PathBuf),
    /// TCP; every connection must begin TLS.
    Tls {
        /// A name or an address.
        host: String,
        /// 0 lets the system choose.
        port: u16,
        /// The server's certificate and key.
        identity: Arc<Identity>,
    },
    /// TCP in the clear, on a loopback address only.
    Insecure {
        /// A name or an address; all it stands for must be loopback.
        host: String,
        /// 0 lets the system choose.
        port: u16,
    },
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listen::Unix(path) => write!(f, "unix:{}", path.display()),
            Listen::Tls { host, port, .. } | Listen::Insecure { host, port } if host.contains(':') => {
                write!(f, "tcp:[{host}]:{port}")
            }
            Listen::Tls { host, port, .. } | Listen::Insecure { host, port } => {
                write!(f, "tcp:{host}:{port}")
            }
        }
    }
}

/// Why an address cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Somebody answers there.
    #[error("{0}: another server listens there; stop it or choose another path")]
    InUse(String),
    /// There is a file that is no socket.
    #[error("{0}: a file that is no socket is in the way; remove it or choose another path")]
    NotASocket(String),
    /// TCP without TLS on an address that others reach.
    #[error(
        "{address}: {resolved} is not a loopback address, and without TLS anyone who reaches it reads and writes \
         every page; give it a certificate, or listen on 127.0.0.1 or a unix socket"
    )]
    Exposed {
        /// As it was asked for.
        address: String,
        /// What it stands for.
        resolved: std::net::IpAddr,
    },
    /// The system refuses.
    #[error("{address}: cannot listen there: {source}")]
    Io {
        /// As it was asked for.
        address: String,
        /// What it said.
        source: io::Error,
    },
}

/// A socket that listens. A unix socket's file goes when this does.
#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    /// What was asked for, with the port that was chosen.
    pub bound: Listen,
    /// A unix socket's file: its device and inode, so that only our own is removed.
    file: Option<(PathBuf, u64, u64)>,
}

impl Listener {
    pub fn bind(listen: &Listen) -> Result<Listener, ListenError> {
        match listen {
            Listen::Unix(path) => bind_unix(listen, path),
            Listen::Tls { host, port, .. } | Listen::Insecure { host, port } => bind_tcp(listen, host, *port),
        }
    }

    /// Takes a connection that is waiting, non-blocking; `None` where there is none.
    pub fn accept(&self) -> io::Result<Option<OwnedFd>> {
        match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => {
                if !matches!(self.bound, Listen::Unix(_)) {
                    // Replies are sent whole, and should not wait for one another.
                    rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
                    rustix::net::sockopt::set_socket_keepalive(&socket, true)?;
                }
                Ok(Some(socket))
            }
            // A client that gave up before it was accepted is nobody's error.
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {
                Ok(None)
            }
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some((path, device, inode)) = &self.file {
            let ours = std::fs::symlink_metadata(path)
                .is_ok_and(|file| (file.dev(), file.ino()) == (*device, *inode));
            if ours {
                // Where it cannot be removed it is stale, and the next server will replace it.
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

fn bind_unix(listen: &Listen, path: &Path) -> Result<Listener, ListenError> {
    let failed =
        |errno: rustix::io::Errno| ListenError::Io { address: listen.to_string(), source: errno.into() };
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    let new = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
    };
    let socket = new().map_err(failed)?;
    // Before bind: the file then has this mode from its first moment (net/unix/af_unix.c, unix_bind_bsd).
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed)?;
    match rustix::net::bind(&socket, &address) {
        Ok(()) => {}
        Err(rustix::io::Errno::ADDRINUSE) => {
            let is_socket = std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
            if !is_socket {
                return Err(ListenError::NotASocket(listen.to_string()));
            }
            match rustix::net::connect(new().map_err(failed)?, &address) {
                // Left behind by a server that was killed.
                Err(rustix::io::Errno::CONNREFUSED) => {}
                _ => return Err(ListenError::InUse(listen.to_string())),
            }
            rustix::fs::unlink(path).map_err(failed)?;
            rustix::net::bind(&socket, &address).map_err(failed)?;
        }
        Err(errno) => return Err(failed(errno)),
    }
    rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
    let file = std::fs::symlink_metadata(path)
        .map_err(|source| ListenError::Io { address: listen.to_string(), source })?;
    Ok(Listener { socket, bound: listen.clone(), file: Some((path.to_owned(), file.dev(), file.ino())) })
}

fn bind_tcp(listen: &Listen, host: &str, port: u16) -> Result<Listener, ListenError> {
    let failed = |source| ListenError::Io { address: listen.to_string(), source };
    let addresses: Vec<_> = (host, port).to_socket_addrs().map_err(failed)?.collect();
    if matches!(listen, Listen::Insecure { .. })
        && let Some(exposed) = addresses.iter().find(|address| !address.ip().is_loopback())
    {
        return Err(ListenError::Exposed { address: listen.to_string(), resolved: exposed.ip() });
    }
    let listener = TcpListener::bind(&addresses[..]).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let chosen = listener.local_addr().map_err(failed)?.port();
    let mut bound = listen.clone();
    if let Listen::Tls { port, .. } | Listen::Insecure { port, .. } = &mut bound {
        *port = chosen;
    }
    Ok(Listener { socket: listener.into(), bound, file: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("weir-listen-{name}-{}", std::process::id()))
    }

    #[test]
    fn a_unix_socket_is_its_owners_alone_and_goes_with_the_server() {
        let path = path("mode");
        let listener = Listener::bind(&Listen::Unix(path.clone())).unwrap();
        let mode = std::fs::symlink_metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = Listener::bind(&Listen::Unix(path.clone())).unwrap_err();
        assert!(matches!(error, ListenError::InUse(_)), "{error}");
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced_and_any_other_file_is_not() {
        let path = path("stale");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap()); // std leaves the file behind
        assert!(path.exists());
        let ours = Listener::bind(&Listen::Unix(path.clone())).unwrap();

        // A socket that has taken the place of ours meanwhile is not ours to remove.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, b"precious").unwrap();
        drop(ours);
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        let error = Listener::bind(&Listen::Unix(path.clone())).unwrap_err();
        assert!(matches!(error, ListenError::NotASocket(_)), "{error}");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn tcp_without_tls_is_for_this_machine_only() {
        let insecure = |host: &str| Listener::bind(&Listen::Insecure { host: host.into(), port: 0 });
        assert!(matches!(insecure("0.0.0.0").unwrap_err(), ListenError::Exposed { .. }));
        let listener = insecure("127.0.0.1").unwrap();
        assert!(!listener.bound.to_string().ends_with(":0"), "{}", listener.bound);
    }
}
