//! `weir volume`: makes, lists, resizes and removes volumes of a running daemon.

use crate::cli::{Control, VolumeCommand};
use crate::failure;
use crate::progress::Shown;
use weir_cli::failure::Failure;
use weir_core::ByteSize;
use weir_daemon::control::{self, Request, Status};

/// Does one subcommand.
pub fn run(command: VolumeCommand) -> Result<(), Failure> {
    match command {
        VolumeCommand::Create { name, size, control } => {
            let did = format!("made {name}, {size}; NBD clients ask for the export {name}");
            change(&control, Request::VolumeCreate { name, bytes: size.0 }, &did)
        }
        VolumeCommand::Resize { name, size, control } => {
            let did = format!("{name} has {size} now");
            change(&control, Request::VolumeResize { name, bytes: size.0 }, &did)
        }
        VolumeCommand::Remove { name, control } => {
            let did = format!("removed {name}");
            change(&control, Request::VolumeRemove { name }, &did)
        }
        VolumeCommand::List { json, control } => {
            list(&control::status(&control.socket()).map_err(failure::of)?, json)
        }
    }
}

fn change(control: &Control, request: Request, did: &str) -> Result<(), Failure> {
    let mut shown = Shown::new("discarding", |far, left| eprintln!("discarding: {far}{left}"));
    let outcome = control::ask_for(&control.socket(), request, |far| {
        // Before the daemon begins to discard pages, its lines of progress only show that it is
        // alive. They have a total of 0.
        if far.total_bytes > 0 {
            shown.show(far.bytes, far.total_bytes);
        }
    });
    drop(shown);
    outcome.map_err(failure::of)?;
    println!("{did}");
    Ok(())
}

fn list(status: &Status, json: bool) -> Result<(), Failure> {
    if json {
        let list = serde_json::json!({
            "schema": status.schema, "volumes": status.volumes, "free_bytes": status.free_bytes,
        });
        println!("{list}");
        return Ok(());
    }
    let width = status.volumes.iter().map(|volume| volume.name.len()).max().unwrap_or(0);
    for (at, volume) in status.volumes.iter().enumerate() {
        let note = match (at, volume.is_changing) {
            (0, _) => "  the daemon's own",
            (_, true) => "  is losing pages",
            _ => "",
        };
        println!("{:width$}  {:>9}{note}", volume.name, ByteSize(volume.bytes).to_string());
    }
    println!("room for {} more", ByteSize(status.free_bytes));
    Ok(())
}
