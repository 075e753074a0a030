//! Unix sockets that a server listens on. Only the server's user can connect. A socket is never
//! taken from a live server, and only its own server removes it.

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use weir_core::file_kind;

/// Largest number of connections that may wait to be accepted.
const BACKLOG: i32 = 128;

/// The reason why a server cannot listen on a unix socket.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// A server answers at the path.
    #[error("unix:{}: another server listens there; stop it or choose another path", .0.display())]
    InUse(PathBuf),
    /// The file at the path is not a socket.
    #[error("unix:{}: {kind} is in the way; choose another path", path.display())]
    NotASocket {
        /// The path that was asked for.
        path: PathBuf,
        /// The kind of the file at the path, with an article.
        kind: &'static str,
    },
    /// The system refuses to make the socket.
    #[error("unix:{}: cannot listen there, in a directory that must exist and be writable", path.display())]
    Io {
        /// The socket's path.
        path: PathBuf,
        /// The error of the system call that failed.
        #[source]
        source: io::Error,
    },
}

/// The file of a listening socket. Dropping this removes the file, unless another file is at the
/// path by then.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    /// The path of the socket's file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|file| (file.dev(), file.ino()) == (self.device, self.inode));
        if ours {
            // A socket that cannot be removed is stale, and the next server will replace it.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Listens at `path`, non-blocking, mode 0600. A socket that a dead server left is replaced.
///
/// # Errors
/// Fails when a server listens at the path, when a file that is no socket is there, or when the
/// system refuses.
pub fn listen(path: &Path, kind: SocketType) -> Result<(OwnedFd, SocketFile), BindError> {
    let failed = |errno: Errno| BindError::Io { path: path.to_owned(), source: errno.into() };
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    let new = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)
    };
    let socket = new().map_err(failed)?;
    // Set the mode before bind: the socket's file then has that mode as soon as it exists
    // (net/unix/af_unix.c, unix_bind_bsd).
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed)?;
    match rustix::net::bind(&socket, &address) {
        Ok(()) => {}
        Err(Errno::ADDRINUSE) => {
            // If the file is gone by now, `connect` below fails.
            if let Ok(there) = std::fs::symlink_metadata(path)
                && !there.file_type().is_socket()
            {
                return Err(BindError::NotASocket { path: path.to_owned(), kind: file_kind(there.mode()) });
            }
            match rustix::net::connect(new().map_err(failed)?, &address) {
                // A server that was killed left the socket.
                Err(Errno::CONNREFUSED) => {}
                // A server that is too busy to answer counts as alive, and so does a server of
                // another socket type.
                _ => return Err(BindError::InUse(path.to_owned())),
            }
            rustix::fs::unlink(path).map_err(failed)?;
            rustix::net::bind(&socket, &address).map_err(failed)?;
        }
        Err(errno) => return Err(failed(errno)),
    }
    rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
    let file =
        std::fs::symlink_metadata(path).map_err(|source| BindError::Io { path: path.to_owned(), source })?;
    Ok((socket, SocketFile { path: path.to_owned(), device: file.dev(), inode: file.ino() }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const KINDS: [SocketType; 2] = [SocketType::STREAM, SocketType::SEQPACKET];

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("weir-socket-{name}-{}", std::process::id()))
    }

    #[test]
    fn a_unix_socket_is_its_owners_alone_and_goes_with_the_server() {
        let path = path("mode");
        for kind in KINDS {
            let listener = listen(&path, kind).unwrap();
            let mode = std::fs::symlink_metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            // Check for servers of either socket type.
            for other in KINDS {
                let error = listen(&path, other).unwrap_err();
                assert!(matches!(error, BindError::InUse(_)), "{error}");
            }
            drop(listener);
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_stale_socket_is_replaced_and_any_other_file_is_not() {
        let path = path("stale");
        // A listener of the standard library leaves its file when it is dropped.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let ours = listen(&path, SocketType::STREAM).unwrap();

        // A file that has replaced the socket's file meanwhile must not be removed.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, b"precious").unwrap();
        drop(ours);
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        let error = listen(&path, SocketType::STREAM).unwrap_err();
        assert!(error.to_string().contains("a file is in the way"), "{error}");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_server_removes_no_other_servers_socket() {
        let path = path("other");
        let first = listen(&path, SocketType::SEQPACKET).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _second = listen(&path, SocketType::SEQPACKET).unwrap();
        drop(first);
        assert!(path.exists(), "the second server's socket was removed by the first");
    }
}
