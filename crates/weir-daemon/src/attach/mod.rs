//! `weir attach` and `weir detach`: connect the kernel's NBD client to a server, and disconnect it.

mod attachment;
mod device;
mod readers;
mod replace;
mod watch;

pub use attachment::Attachment;
pub(crate) use watch::{Attachments, NOTE};

use crate::address::Address;
use crate::control;
use crate::error::{Error, ErrorKind};
use device::{Kernel, Terms};
use readers::Readers;
use std::fs;
use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use weir_core::chain;
use weir_core::log::{Level, Log};
use weir_export::nbd::client::{self, Client, ClientError, Wish};
use weir_system::device_use;

/// The largest request that the kernel sends, in KiB. One connection's buffer has room for it.
const MAX_SECTORS_KB: &str = "256";

/// Time for which the number of a device's readers must not change before a reconnection by hand
/// goes on.
const STEADY: Duration = Duration::from_millis(200);

/// Longest time until the kernel shows a new device, or has taken a device away.
const SETTLE: Duration = Duration::from_secs(5);

/// A device that is to be connected to a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Attach {
    /// The server's address.
    pub address: Address,
    /// The device, `/dev/nbd0`; `None`: a free one.
    pub device: Option<PathBuf>,
    /// The export's name.
    pub name: String,
    /// Number of connections. Each is a hardware queue of the device.
    pub connections: u16,
    /// Seconds that one request may take before its connection is given up.
    pub request_timeout: u16,
    /// Seconds that requests wait for a new connection when none is left, before they fail.
    pub reconnect_timeout: u16,
    /// Whether to replace the dead connections of a device that exists.
    pub reconnect: bool,
    /// The control socket of the server's daemon; `None`: [`control::find`].
    pub control: Option<PathBuf>,
}

impl Attach {
    /// A request to attach to the server at `address`, with the defaults of the command line.
    pub fn to(address: Address) -> Self {
        Attach {
            address,
            device: None,
            name: String::new(),
            connections: 2,
            request_timeout: 5,
            reconnect_timeout: 600,
            reconnect: false,
            control: None,
        }
    }
}

/// Connects a device to a server and returns its number.
///
/// # Errors
/// Fails when the server or the kernel refuses.
pub fn connect(options: &Attach, log: &Log) -> Result<u32, Error> {
    let index = options.device.as_deref().map(number).transpose()?;
    let mut kernel = Kernel::open().map_err(|error| no_kernel(&error))?;
    let refused = |error: io::Error| {
        let device =
            options.device.as_ref().map_or("an NBD device".into(), |device| device.display().to_string());
        refusal(format!("the kernel refused to connect {device}: {error}{}", advice(&error)))
    };
    if let Some(index) = index.filter(|_| options.reconnect) {
        for _ in 0..options.connections {
            wait_for_readers(index);
            let (socket, server) = open(options)?;
            // The kernel drops the socket if no connection is dead, and does not say so.
            kernel.reconnect(index, &terms(options, &server), &[socket]).map_err(refused)?;
        }
        return remember(options, index, log).map(|()| index);
    }
    let (first, server) = open(options)?;
    let mut sockets = vec![first];
    if options.connections > 1 && !server.multi_conn() {
        return Err(refusal(format!(
            "{} does not promise that {} connections see each other's writes; give --connections 1",
            options.address, options.connections
        )));
    }
    for _ in 1..options.connections {
        sockets.push(open(options)?.0);
    }
    let index = kernel.connect(index, &terms(options, &server), &sockets).map_err(refused)?;
    settle(|| sectors(index) == Some(server.bytes / 512));
    let queue = PathBuf::from(format!("/sys/block/nbd{index}/queue/max_sectors_kb"));
    if let Err(error) = fs::write(&queue, MAX_SECTORS_KB) {
        (log)(
            Level::Warning,
            format_args!(
                "cannot set {} to {MAX_SECTORS_KB}: {error}; large requests will be slower",
                queue.display()
            ),
        );
    }
    if let Err(error) = remember(options, index, log) {
        // The server is about to go, and with it all connections of the device.
        return Err(error.unless_undone(disconnect(&mut kernel, index), || format!("/dev/nbd{index} stays")));
    }
    Ok(index)
}

fn open(options: &Attach) -> Result<(OwnedFd, client::Terms), Error> {
    negotiate(&options.address, &Wish { name: options.name.clone(), structured: false, allocation: false })
}

/// Waits until the number of the kernel's reader threads for the device is steady. By then the
/// readers of dead connections have probably gone, and a new connection's reader has begun (see
/// [`replace`]).
fn wait_for_readers(index: u32) {
    let readers = Readers::of(index);
    let (mut last, mut since, begun) = (readers.count(), Instant::now(), Instant::now());
    while last.is_some() && since.elapsed() < STEADY && begun.elapsed() < SETTLE {
        std::thread::sleep(Duration::from_millis(10));
        let now = readers.count();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
}

fn terms(options: &Attach, server: &client::Terms) -> Terms {
    Terms {
        bytes: server.bytes,
        flags: server.flags,
        request_timeout: Duration::from_secs(options.request_timeout.into()),
        reconnect_timeout: Duration::from_secs(options.reconnect_timeout.into()),
    }
}

/// Tells the server's daemon which device it serves, so that the daemon can replace lost
/// connections. A foreign server has no control socket, and its device works without one.
///
/// # Errors
/// Fails when the daemon is stopping. Any other error is only logged.
fn remember(options: &Attach, index: u32, log: &Log) -> Result<(), Error> {
    let address = match &options.address {
        Address::Unix(path) => Address::Unix(std::path::absolute(path).unwrap_or_else(|_| path.clone())),
        tcp @ Address::Tcp { .. } => tcp.clone(),
    };
    let attachment = Attachment {
        device: index,
        address: address.to_string(),
        name: options.name.clone(),
        connections: options.connections,
        request_timeout: options.request_timeout,
        reconnect_timeout: options.reconnect_timeout,
    };
    let path = options.control.clone().unwrap_or_else(control::find);
    let remembered = if path.exists() { control::attached(&path, attachment) } else { Ok(()) };
    remembered.or_else(|error| match error.kind() {
        ErrorKind::Stopping => Err(error),
        _ => {
            (log)(
                Level::Warning,
                format_args!("{}; after a crash of the server run weir attach --reconnect", chain(&error)),
            );
            Ok(())
        }
    })
}

/// Disconnects a device, unless something uses it.
pub fn detach(device: &Path, control: Option<&Path>) -> Result<(), Error> {
    let index = number(device)?;
    let user = device_use::user(&format!("/dev/nbd{index}"))
        .map_err(|error| refusal(format!("cannot tell who uses /dev/nbd{index}: {error}")))?;
    if let Some(user) = user {
        return Err(refusal(format!("/dev/nbd{index} is in use {user} first, or its data would be lost")));
    }
    let mut kernel = Kernel::open().map_err(|error| no_kernel(&error))?;
    disconnect(&mut kernel, index)?;
    let path = control.map_or_else(control::find, Path::to_owned);
    if path.exists() {
        // A daemon that still has the device in its list notices that the device is gone.
        let _ = control::detached(&path, index);
    }
    Ok(())
}

fn disconnect(kernel: &mut Kernel, index: u32) -> Result<(), Error> {
    kernel.disconnect(index).map_err(|error| {
        refusal(format!("the kernel refused to let /dev/nbd{index} go: {error}{}", advice(&error)))
    })?;
    settle(|| sectors(index) == Some(0));
    Ok(())
}

fn negotiate(address: &Address, wish: &Wish) -> Result<(OwnedFd, client::Terms), Error> {
    let failed = |error: ClientError| Error::because(ErrorKind::Attach, address.to_string(), error);
    let connect = |source| ClientError::Connect { address: address.to_string(), source };
    match address {
        Address::Unix(path) => {
            let socket = UnixStream::connect(path).map_err(|error| failed(connect(error)))?;
            let stream = socket.try_clone().map_err(|error| failed(error.into()))?;
            let client = Client::over(Box::new(stream), wish).map_err(failed)?;
            Ok((socket.into(), *client.terms()))
        }
        Address::Tcp { host, port } => {
            let socket =
                TcpStream::connect((host.as_str(), *port)).map_err(|error| failed(connect(error)))?;
            let stream = socket.try_clone().map_err(|error| failed(error.into()))?;
            socket.set_nodelay(true).map_err(|error| failed(error.into()))?;
            let client = Client::over(Box::new(stream), wish).map_err(failed)?;
            Ok((socket.into(), *client.terms()))
        }
    }
}

/// Returns 7 for `/dev/nbd7`.
fn number(device: &Path) -> Result<u32, Error> {
    let name = device.strip_prefix("/dev").unwrap_or(device).to_str();
    name.and_then(|name| name.strip_prefix("nbd")?.parse().ok()).ok_or_else(|| {
        let what = format!("--device cannot be {device:?}; accepted: /dev/nbd0, /dev/nbd1, ...");
        Error::new(ErrorKind::Config, what)
    })
}

fn sectors(index: u32) -> Option<u64> {
    fs::read_to_string(format!("/sys/block/nbd{index}/size")).ok()?.trim().parse().ok()
}

/// Waits until the kernel has finished a change that it has accepted.
fn settle(done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() && begun.elapsed() < SETTLE {
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn refusal(what: String) -> Error {
    Error::new(ErrorKind::Attach, what)
}

fn no_kernel(error: &io::Error) -> Error {
    refusal(match error.raw_os_error() {
        Some(libc::ENOENT) => {
            "this kernel has no NBD client: run modprobe nbd, or see weir doctor".to_owned()
        }
        _ => format!("cannot speak to the kernel's NBD client: {error}"),
    })
}

fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => "; run as root",
        Some(libc::EBUSY) => "; it is in use: give another --device, or none",
        Some(libc::ENOSPC) => "; none of its connections is dead",
        Some(libc::EINVAL) => "; is it connected?",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_nbd_devices_have_a_number() {
        for (device, index) in [("/dev/nbd0", 0), ("nbd15", 15)] {
            assert_eq!(number(Path::new(device)).ok(), Some(index), "{device}");
        }
        for device in ["/dev/sda", "/dev/nbd", "/dev/nbd0p1", "/tmp/nbd0", ""] {
            let error = number(Path::new(device)).expect_err("no device");
            assert_eq!(error.kind(), ErrorKind::Config, "{device}");
        }
    }
}
