//! An echo server, which does the least that a server can: it keeps no pages. It answers reads from
//! one buffer that stays in the cache, drops writes, and spins for the next request without ever
//! sleeping. The rest of a request's time belongs to the client, the socket and the client's
//! wake-up. No server of pages on this machine answers this client faster.

use super::server::Directory;
use super::{BlockError, Plan};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use std::io::{self, IoSlice, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use weir_export::nbd::handshake::{Export, Handshake, INPUT_MAX, Step, Tls, greeting};
use weir_export::nbd::transmission::{Event, Parser, data_chunk, simple_reply};
use weir_export::nbd::wire::command;

/// Bytes of the longest request that is answered.
const REQUEST_MAX: usize = 1 << 20;

/// The server. It runs as threads of this process.
pub(super) struct Echo {
    pub socket: PathBuf,
    stop: Arc<AtomicBool>,
}

impl Echo {
    pub fn start(plan: &Plan, directory: &Directory) -> Result<Echo, BlockError> {
        let socket = directory.socket("echo");
        let listener = UnixListener::bind(&socket).map_err(BlockError::Directory)?;
        let export = Export {
            name: String::new(),
            description: String::new(),
            bytes: plan.size.0,
            read_only: false,
            clears: true,
        };
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let (export, stopped) = (export.clone(), Arc::clone(&stopped));
                // A client that breaks its connection ends only its own thread.
                std::thread::spawn(move || serve(stream, &export, &stopped));
            }
        });
        Ok(Echo { socket, stop })
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Connect once: the accepting thread waits for a connection, and after this one it sees
        // `stop`.
        let _ = UnixStream::connect(&self.socket);
    }
}

fn serve(mut stream: UnixStream, export: &Export, stop: &AtomicBool) -> io::Result<()> {
    let mut input = vec![0; INPUT_MAX.max(2 * REQUEST_MAX)];
    let (mut filled, mut output) = (0, Vec::new());
    let mut handshake = Handshake::new(export, Tls::Off);
    stream.write_all(&greeting())?;
    let structured = loop {
        let (used, step) = handshake.advance(&input[..filled], true, &mut output);
        input.copy_within(used..filled, 0);
        filled -= used;
        stream.write_all(&output)?;
        output.clear();
        match step {
            Step::Transmission(negotiated) => break negotiated.structured,
            Step::Again => {}
            Step::NeedMore => filled += some(stream.read(&mut input[filled..])?)?,
            Step::StartTls | Step::Close(_) => return Ok(()),
        }
    };
    let page = vec![0x5a; REQUEST_MAX];
    let mut parser = Parser::new();
    let mut written = 0;
    loop {
        let mut rest = &input[..filled];
        while let Some(event) = parser.next(&mut rest).map_err(io::Error::other)? {
            let ((head, used), length) = match event {
                Event::Request(request) if request.command == command::DISC => return Ok(()),
                Event::Request(request) if request.command == command::WRITE && request.length > 0 => {
                    written = request.cookie;
                    continue;
                }
                Event::Payload(payload) if payload.left > 0 => continue,
                Event::Payload(_) => (head(&simple_reply(written, None)), 0),
                Event::Request(request) if request.command == command::READ => {
                    let length = (request.length as usize).min(REQUEST_MAX);
                    if structured {
                        (head(&data_chunk(request.cookie, true, request.offset, request.length)), length)
                    } else {
                        (head(&simple_reply(request.cookie, None)), length)
                    }
                }
                Event::Request(request) => (head(&simple_reply(request.cookie, None)), 0),
            };
            send(&stream, &mut [IoSlice::new(&head[..used]), IoSlice::new(&page[..length])])?;
        }
        let left = rest.len();
        input.copy_within(filled - left..filled, 0);
        filled = left;
        filled += loop {
            match rustix::net::recv(&stream, &mut input[filled..], RecvFlags::DONTWAIT) {
                Ok((received, _)) => break some(received)?,
                Err(rustix::io::Errno::AGAIN) if !stop.load(Ordering::Relaxed) => {
                    (0..8).for_each(|_| std::hint::spin_loop());
                }
                Err(errno) => return Err(errno.into()),
            }
        };
    }
}

/// Returns the head of a reply, which goes before the reply's data. The `usize` says how many bytes
/// of the array the head has.
fn head(bytes: &[u8]) -> ([u8; 28], usize) {
    let mut head = [0; 28];
    head[..bytes.len()].copy_from_slice(bytes);
    (head, bytes.len())
}

fn send(stream: &UnixStream, mut parts: &mut [IoSlice<'_>]) -> io::Result<()> {
    while parts.iter().any(|part| !part.is_empty()) {
        let sent =
            rustix::net::sendmsg(stream, parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?;
        IoSlice::advance_slices(&mut parts, sent);
    }
    Ok(())
}

/// Returns the number of bytes received, unless the client has left.
fn some(received: usize) -> io::Result<usize> {
    if received == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(received) }
}
