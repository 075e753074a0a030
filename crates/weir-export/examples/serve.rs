//! Serves a volume in host memory by NBD until its standard input ends.
//!
//! `cargo run --release -p weir-export --example serve -- 256MiB /tmp/weir.sock
//! [SPIN_MICROSECONDS]`, then for example `nbdinfo nbd+unix:///?socket=/tmp/weir.sock`.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;
use weir_core::log::{Level, to_stderr};
use weir_core::{ByteSize, PAGE_SIZE};
use weir_export::nbd::{Config, Listen, Server};
use weir_store::Host;
use weir_volume::Volume;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let size: ByteSize = arguments.next().ok_or("which size?")?.parse()?;
    let socket = arguments.next().ok_or("which socket?")?;
    let spin = arguments.next().map_or(Ok(0), |text| text.parse())?;

    let config = Config { spin: Duration::from_micros(spin), ..Config::default() };
    let shape = weir_volume::Config {
        pages: u32::try_from(size.0 / PAGE_SIZE as u64)?,
        lanes: config.connections,
        depth: 64,
    };
    let volume = Volume::create(shape, vec![Arc::new(Host::new(shape.slots())?)])?;
    let listen = [Listen::Unix(socket.into())];
    let server = Server::start(&volume, &config, &listen, &to_stderr(Level::Warning))?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    println!("{:?}", server.stats());
    server.shutdown(Duration::from_secs(2));
    Ok(())
}
