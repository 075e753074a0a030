//! A mount that lives without a server. The test is alone in its process: a program that another
//! test started would inherit its files, and wait for the mount.

mod fuse_mounts;

use fuse_mounts::{eventually, kept, open, quiet, serve, volume};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::fs;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::thread;
use weir_core::seal::SealedAllocator;
use weir_export::fuse::mount::{MountError, is_mounted, is_served};
use weir_export::fuse::{Config, ServeError, Server};

#[global_allocator]
static ALLOCATOR: SealedAllocator = SealedAllocator;

#[test]
fn a_mount_that_the_kernel_keeps_without_a_server_is_replaced_and_who_waits_for_it_is_told() {
    if !rustix::process::geteuid().is_root() {
        println!("\nskipped: only root may end a connection by a forced unmount");
        return;
    }
    let point = std::env::temp_dir().join(format!("weir-fuse-test-kept-{}", std::process::id()));
    let volume = volume(100, 1);
    let config = Config { threads: 1, ring: false, ..Config::default() };
    let Some(first) = serve(&volume, &config, &point) else { return };
    let file = open(first.file());
    // While a descriptor is being sent through a socket, only the kernel holds it: the connection
    // lives, and no process serves it.
    let (sender, receiver) = UnixStream::pair().unwrap();
    let kept: Vec<OwnedFd> = kept(&first).into_values().collect();
    first.abandon();
    // A descriptor is held, so a server may still answer.
    let refused = Server::start(&volume, &config, &point, &quiet()).err();
    assert!(matches!(refused, Some(ServeError::Mount(MountError::Silent(_)))), "{refused:?}");
    assert!(is_served(&point));
    send(&sender, kept);
    let waiting = thread::spawn(move || file.write_at(&[1], 0));
    let second = Server::start(&volume, &config, &point, &quiet()).unwrap();
    eventually("who waits is not told", || waiting.is_finished());
    assert!(waiting.join().unwrap().is_err());
    open(second.file()).write_all_at(&[1], 0).unwrap();
    drop(second);
    assert!(!is_mounted(&point));
    fs::remove_file(&point).unwrap();
    drop(receiver);
}

/// Sends descriptors into a socket, and closes them here.
fn send(socket: &UnixStream, fds: Vec<OwnedFd>) {
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
    rustix::net::sendmsg(socket, &[IoSlice::new(&[0])], &mut control, SendFlags::empty()).unwrap();
    drop(fds);
}
