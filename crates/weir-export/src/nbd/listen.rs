//! The addresses on which the server listens: a unix socket that only its owner can use, TCP under
//! TLS, or TCP within this machine.

use super::tls::Identity;
use rustix::net::{SocketFlags, SocketType};
use std::fmt;
use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use weir_system::local_socket::{self, BindError, SocketFile};

/// An address to listen on, with what protects it.
#[derive(Clone, Debug)]
pub enum Listen {
    /// A socket in the file system that only its owner can use (mode 0600).
    Unix(PathBuf),
    /// TCP; every connection must begin TLS.
    Tls {
        /// A host name or an address.
        host: String,
        /// The port; 0 lets the system choose.
        port: u16,
        /// The server's certificate and key.
        identity: Arc<Identity>,
    },
    /// TCP in the clear, on a loopback address only.
    Insecure {
        /// A host name or an address; every address that it stands for must be loopback.
        host: String,
        /// The port; 0 lets the system choose.
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

/// The reason why the server cannot listen on an address.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The unix socket cannot be made.
    #[error(transparent)]
    Local(#[from] BindError),
    /// Other machines could reach the address by TCP without TLS.
    #[error(
        "{address}: {resolved} is not a loopback address, and without TLS anyone who reaches it reads and writes \
         every page; give it a certificate, or listen on 127.0.0.1 or a unix socket"
    )]
    Exposed {
        /// The address that was asked for.
        address: String,
        /// The address to which the name resolves.
        resolved: std::net::IpAddr,
    },
    /// The system refuses to listen there.
    #[error("{address}: cannot listen there: {source}")]
    Io {
        /// The address that was asked for.
        address: String,
        /// The system's error.
        source: io::Error,
    },
}

/// A socket that listens. Dropping it removes a unix socket's file.
#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    /// The address that was asked for, with the port that was chosen.
    pub bound: Listen,
    /// A unix socket's file.
    _file: Option<SocketFile>,
}

impl Listener {
    pub fn bind(listen: &Listen) -> Result<Listener, ListenError> {
        match listen {
            Listen::Unix(path) => {
                let (socket, file) = local_socket::listen(path, SocketType::STREAM)?;
                Ok(Listener { socket, bound: listen.clone(), _file: Some(file) })
            }
            Listen::Tls { host, port, .. } | Listen::Insecure { host, port } => bind_tcp(listen, host, *port),
        }
    }

    /// Takes a connection that is waiting; `None` if there is none. Its socket does not block.
    pub fn accept(&self) -> io::Result<Option<OwnedFd>> {
        match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => {
                if !matches!(self.bound, Listen::Unix(_)) {
                    // Each reply is sent whole, so it must not wait for the acknowledgement of an
                    // earlier one.
                    rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
                    rustix::net::sockopt::set_socket_keepalive(&socket, true)?;
                }
                Ok(Some(socket))
            }
            // A client that gave up before it was accepted is no error.
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
    Ok(Listener { socket: listener.into(), bound, _file: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_without_tls_is_for_this_machine_only() {
        let insecure = |host: &str| Listener::bind(&Listen::Insecure { host: host.into(), port: 0 });
        assert!(matches!(insecure("0.0.0.0").unwrap_err(), ListenError::Exposed { .. }));
        let listener = insecure("127.0.0.1").unwrap();
        assert!(!listener.bound.to_string().ends_with(":0"), "{}", listener.bound);
    }
}
