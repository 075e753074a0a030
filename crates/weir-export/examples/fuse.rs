//! Serves host memory as a file (or, given a directory, as a RAM disk), by FUSE, until a line comes
//! on standard input: `cargo run --example fuse -- FILE [SPIN_US]`.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use weir_core::log::{Level, to_stderr};
use weir_export::fuse::{Config, Server};
use weir_store::Host;
use weir_volume::Volume;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().ok_or("which FILE?")?;
    let spin_us = arguments.next().map_or(Ok(0), |text| text.parse())?;
    let config = Config { spin: Duration::from_micros(spin_us), ..Config::default() };
    let shape = weir_volume::Config { pages: 65_536, lanes: config.threads, depth: 64 };
    let volume = Volume::create(shape, vec![Arc::new(Host::new(shape.slots())?)])?;
    let start = if Path::new(&file).is_dir() { Server::ram_disk } else { Server::start };
    let server = start(&volume, &config, Path::new(&file), &to_stderr(Level::Info))?;
    println!("{} is {} bytes", server.file().display(), volume.bytes());
    std::io::stdin().read_line(&mut String::new())?;
    println!("{:?}", server.stats());
    server.stop(Duration::from_secs(2));
    Ok(())
}
