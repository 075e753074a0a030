//! `weir volume`: makes, lists, resizes and removes volumes of a running daemon.

use crate::cli::{Control, VolumeCommand};
use crate::failure;
use crate::progress::Shown;
use weir_cli::failure::Failure;
use weir_core::ByteSize;
use weir_daemon::control::{self, Moved, Request, Status};

/// Does one subcommand.
pub fn run(command: VolumeCommand) -> Result<(), Failure> {
    match command {
        VolumeCommand::Create { name, size, control } => {
            let bytes = size.map(|size| size.0);
            let made = change(&control, Request::VolumeCreate { name: name.clone(), bytes })?;
            let status = control::status(&control.socket()).map_err(failure::of)?;
            println!("made {name}, {}; {}", ByteSize(made.bytes), way(&status, &name));
            Ok(())
        }
        VolumeCommand::Resize { name, size, control } => {
            change(&control, Request::VolumeResize { name: name.clone(), bytes: size.0 })?;
            println!("{name} has {size} now");
            Ok(())
        }
        VolumeCommand::Remove { name, control } => {
            change(&control, Request::VolumeRemove { name: name.clone() })?;
            println!("removed {name}");
            Ok(())
        }
        VolumeCommand::List { json, control } => {
            list(&control::status(&control.socket()).map_err(failure::of)?, json)
        }
    }
}

/// The way to a new volume: its own device or file, or else its NBD export.
fn way(status: &Status, name: &str) -> String {
    let its = status.exports.iter().filter(|export| export.volume.as_deref() == Some(name));
    let devices: Vec<&str> = its.map(|export| &*export.address).collect();
    match devices.is_empty() {
        true => format!("NBD clients ask for the export {name}"),
        false => format!("it is {}", devices.join(" and ")),
    }
}

fn change(control: &Control, request: Request) -> Result<Moved, Failure> {
    let mut shown = Shown::new("discarding", |far, left| eprintln!("discarding: {far}{left}"));
    let outcome = control::ask_for(&control.socket(), request, |far| {
        // Before the daemon begins to discard pages, its lines of progress only show that it is
        // alive. They have a total of 0.
        if far.total_bytes > 0 {
            shown.show(far.bytes, far.total_bytes);
        }
    });
    drop(shown);
    outcome.map_err(failure::of)
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
    for volume in &status.volumes {
        let note = match (volume.is_own, volume.is_changing) {
            (true, _) => "  the daemon's own",
            (_, true) => "  is losing pages",
            _ => "",
        };
        println!("{:width$}  {:>9}{note}", volume.name, ByteSize(volume.bytes).to_string());
    }
    println!("room for {} more", ByteSize(status.free_bytes));
    Ok(())
}
