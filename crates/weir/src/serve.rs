//! `weir serve`: the daemon in the foreground, with the options of the command line or of a file.

use crate::cli::{LogLevel, ServeOptions};
use crate::{config, failure, progress};
use std::time::Duration;
use weir_cli::failure::Failure;
use weir_core::log::{self, Level};
use weir_daemon::config::{Fuse, Share};
use weir_daemon::{Config, serve};

/// Runs the daemon until it is told to stop.
pub fn run(options: ServeOptions) -> Result<(), Failure> {
    let file = options.config.clone();
    let options = match &file {
        Some(path) => config::read(path)?,
        None => options,
    };
    let log = log::to_stderr(match options.log {
        LogLevel::Warn => Level::Warning,
        LogLevel::Info => Level::Info,
    });
    let config = daemon(options)?;
    match serve::run(&config, file.as_deref(), &log, progress::show(&log)).map_err(failure::of)? {
        0 => Ok(()),
        code => Err(Failure::Ended(code)),
    }
}

/// The options as a daemon's configuration, with the checks that are about flags alone.
fn daemon(options: ServeOptions) -> Result<Config, Failure> {
    Ok(Config {
        stores: options.store,
        backing: options.backing,
        size: options.size,
        pool: options.pool,
        compress: options.compress.map(Into::into),
        name: options.name,
        nbd: options.nbd.nbd()?,
        fuse: options.fuse.map(|file| Fuse { file, threads: options.fuse_threads }),
        share: options.share.map(|path| Share {
            path,
            in_place: options.share_in_place,
            threads: options.share_threads,
        }),
        ublk: options.ublk.ublk()?,
        spin: Duration::from_micros(options.spin_us.into()),
        cpu_latency: options.cpu_latency,
        swap: options.swap,
        unsafe_no_flusher: options.unsafe_no_flusher,
        keeper: options.keeper,
        start_report: options.start_report,
        control: options.control,
        metrics: options.metrics,
        programs: options.programs,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser as _;
    use weir_daemon::config::{Nbd, Ublk};

    #[test]
    fn the_library_s_defaults_are_those_of_the_command_line() {
        let command = [
            "weir",
            "serve",
            "--store",
            "host:1MiB",
            "--nbd",
            "unix:/n",
            "--fuse",
            "/f",
            "--share",
            "/s",
            "--ublk",
        ];
        let Command::Serve(options) = Cli::try_parse_from(command).expect("right").command else {
            panic!("weir serve")
        };
        let expected = Config {
            stores: vec!["host:1MiB".parse().expect("a store")],
            nbd: Some(Nbd { addresses: vec!["unix:/n".parse().expect("an address")], ..Nbd::default() }),
            fuse: Some(Fuse::at("/f")),
            share: Some(Share::at("/s")),
            ublk: Some(Ublk::default()),
            ..Config::default()
        };
        assert_eq!(daemon(options).expect("right"), expected);
    }
}
