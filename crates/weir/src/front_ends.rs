//! The flags of front ends, which `weir serve` and `weir cache` have in common.

use clap::Args;
use std::path::PathBuf;
use weir_cli::failure::Failure;
use weir_daemon::Address;
use weir_daemon::config::{Nbd, Ublk};

/// Parses a name without control characters, so that a line can hold it.
pub fn name(text: &str) -> Result<String, String> {
    if text.contains(char::is_control) {
        return Err("accepted: a name without control characters, such as a newline".into());
    }
    Ok(text.to_owned())
}

/// The flags of a server by NBD.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct NbdOptions {
    /// Serve by NBD at unix:PATH or tcp:HOST:PORT. May be repeated.
    #[arg(long, value_name = "ADDRESS")]
    pub nbd: Vec<Address>,

    /// Serve TCP under TLS, with server-cert.pem and server-key.pem of this directory; if it has a
    /// ca-cert.pem, clients must show a certificate that it has signed. Not for swap.
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "insecure")]
    pub tls: Option<PathBuf>,

    /// Serve TCP without TLS; on the loopback interface only.
    #[arg(long)]
    pub insecure: bool,

    /// Connections that can be served at a time; each has a thread and its memory from the start.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub connections: u16,
}

impl NbdOptions {
    /// The options as a daemon takes them, if there is an address to listen on.
    ///
    /// # Errors
    /// Fails if a flag has no use without another one.
    pub fn nbd(self) -> Result<Option<Nbd>, Failure> {
        let by_tcp = self.nbd.iter().any(|address| matches!(address, Address::Tcp { .. }));
        if !by_tcp && (self.tls.is_some() || self.insecure) {
            return Err(Failure::Usage(format!(
                "{} is about TCP, and no --nbd tcp:HOST:PORT is given: leave it out, or give one",
                if self.insecure { "--insecure" } else { "--tls" }
            )));
        }
        let NbdOptions { nbd: addresses, tls, insecure, connections } = self;
        Ok((!addresses.is_empty()).then_some(Nbd { addresses, connections, tls, insecure }))
    }
}

/// The flags of a block device of the ublk driver.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct UblkOptions {
    /// Serve as a block device of the kernel's ublk driver; the status has its name,
    /// /dev/ublkbN. As root, Linux 6.5 or newer.
    #[arg(long)]
    pub ublk: bool,

    /// Queues of the ublk device, each with a thread and its memory [default: one a processor, 4 at
    /// most].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub queues: Option<u16>,

    /// Requests of 128 KiB that each queue of the ublk device may have in flight.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub depth: u16,
}

impl UblkOptions {
    /// The options as a daemon takes them, if there is to be a device.
    ///
    /// # Errors
    /// Fails if a flag has no use without another one.
    pub fn ublk(self) -> Result<Option<Ublk>, Failure> {
        let UblkOptions { ublk, queues, depth } = self;
        if queues.is_some() && !ublk {
            return Err(Failure::Usage("--queues are those of a ublk device: accepted with --ublk".into()));
        }
        Ok(ublk.then_some(Ublk { queues, depth }))
    }
}
