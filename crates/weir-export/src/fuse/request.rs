//! Requests as the kernel sends them: takes bytes and gives a [`Request`]. It has no descriptor, so
//! it is tested and fuzzed as a plain function.

use super::wire::{
    CreateIn, FallocateIn, ForgetOne, InHeader, InitIn, LseekIn, MkdirIn, MknodIn, OpenIn, ReadIn, ReleaseIn,
    Rename2In, SetattrIn, WriteIn, opcode,
};
use std::fmt;

/// A request with its header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message<'a> {
    /// The request's header.
    pub header: InHeader,
    /// The operation that the request asks for.
    pub request: Request<'a>,
}

/// A name in a directory: not empty, without `/` and without zero bytes.
pub type Name<'a> = &'a [u8];

/// An operation that the kernel asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)] // the protocol's names say it
pub enum Request<'a> {
    Init {
        offer: InitIn,
        flags: u64,
    },
    Destroy,
    Lookup {
        name: Name<'a>,
    },
    Forget {
        lookups: u64,
    },
    BatchForget {
        list: Forgets<'a>,
    },
    Getattr,
    Setattr {
        change: SetattrIn,
    },
    Readlink,
    Symlink {
        name: Name<'a>,
        target: &'a [u8],
    },
    Mknod {
        how: MknodIn,
        name: Name<'a>,
    },
    Mkdir {
        how: MkdirIn,
        name: Name<'a>,
    },
    Unlink {
        name: Name<'a>,
    },
    Rmdir {
        name: Name<'a>,
    },
    Rename {
        to_directory: u64,
        flags: u32,
        from: Name<'a>,
        to: Name<'a>,
    },
    Link {
        node: u64,
        name: Name<'a>,
    },
    Open {
        how: OpenIn,
    },
    Opendir,
    Create {
        how: CreateIn,
        name: Name<'a>,
    },
    Release {
        what: ReleaseIn,
    },
    Releasedir {
        what: ReleaseIn,
    },
    Read {
        what: ReadIn,
    },
    Readdir {
        what: ReadIn,
    },
    Write {
        what: WriteIn,
        data: &'a [u8],
    },
    Statfs,
    Fallocate {
        what: FallocateIn,
    },
    Lseek {
        what: LseekIn,
    },
    /// Tells that a program no longer waits for an earlier request. The server answers that request
    /// all the same.
    Interrupt,
    /// Any other operation.
    Unknown {
        opcode: u32,
    },
}

/// The nodes of a `BATCH_FORGET`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Forgets<'a>(&'a [u8]);

impl Iterator for Forgets<'_> {
    type Item = ForgetOne;

    fn next(&mut self) -> Option<ForgetOne> {
        ForgetOne::decode(&mut self.0)
    }
}

/// A request whose length contradicts its content, or whose name is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Malformed {
    /// The request's opcode; 0 if there was not even a header.
    pub opcode: u32,
    /// The request's number, which the answer repeats; 0 if the request is too short to have one.
    pub unique: u64,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a request with opcode {} that is too short or names what is no name", self.opcode)
    }
}

impl std::error::Error for Malformed {}

/// Parses one request: the bytes of one read of `/dev/fuse`.
///
/// # Errors
/// Fails when the bytes are no request.
pub fn parse(bytes: &[u8]) -> Result<Message<'_>, Malformed> {
    let mut rest = bytes;
    let header = InHeader::decode(&mut rest).ok_or(Malformed { opcode: 0, unique: 0 })?;
    let malformed = Malformed { opcode: header.opcode, unique: header.unique };
    // Extensions follow the operation; the server asks for none.
    let extensions = usize::from(header.extensions) * 8;
    if header.len as usize != bytes.len() || extensions > rest.len() {
        return Err(malformed);
    }
    rest = &rest[..rest.len() - extensions];
    let request = body(header.opcode, rest).ok_or(malformed)?;
    Ok(Message { header, request })
}

fn body(opcode: u32, mut rest: &[u8]) -> Option<Request<'_>> {
    let rest = &mut rest;
    Some(match opcode {
        opcode::INIT => {
            let offer = InitIn::decode(rest)?;
            let more = u32_of(rest).unwrap_or(0);
            let more = if u64::from(offer.flags) & super::wire::init::INIT_EXT != 0 { more } else { 0 };
            Request::Init { offer, flags: u64::from(offer.flags) | u64::from(more) << 32 }
        }
        opcode::DESTROY => Request::Destroy,
        opcode::LOOKUP => Request::Lookup { name: name(rest)? },
        opcode::FORGET => Request::Forget { lookups: u64_of(rest)? },
        opcode::BATCH_FORGET => {
            let count = u32_of(rest)? as usize;
            let bytes = rest.get(4..)?.get(..count.checked_mul(ForgetOne::BYTES)?)?;
            Request::BatchForget { list: Forgets(bytes) }
        }
        opcode::GETATTR => Request::Getattr,
        opcode::SETATTR => Request::Setattr { change: SetattrIn::decode(rest)? },
        opcode::READLINK => Request::Readlink,
        opcode::SYMLINK => Request::Symlink { name: name(rest)?, target: text(rest)? },
        opcode::MKNOD => Request::Mknod { how: MknodIn::decode(rest)?, name: name(rest)? },
        opcode::MKDIR => Request::Mkdir { how: MkdirIn::decode(rest)?, name: name(rest)? },
        opcode::UNLINK => Request::Unlink { name: name(rest)? },
        opcode::RMDIR => Request::Rmdir { name: name(rest)? },
        opcode::RENAME => {
            Request::Rename { to_directory: u64_of(rest)?, flags: 0, from: name(rest)?, to: name(rest)? }
        }
        opcode::RENAME2 => {
            let how = Rename2In::decode(rest)?;
            Request::Rename {
                to_directory: how.new_directory,
                flags: how.flags,
                from: name(rest)?,
                to: name(rest)?,
            }
        }
        opcode::LINK => Request::Link { node: u64_of(rest)?, name: name(rest)? },
        opcode::OPEN => Request::Open { how: OpenIn::decode(rest)? },
        opcode::OPENDIR => Request::Opendir,
        opcode::CREATE => Request::Create { how: CreateIn::decode(rest)?, name: name(rest)? },
        opcode::RELEASE => Request::Release { what: ReleaseIn::decode(rest)? },
        opcode::RELEASEDIR => Request::Releasedir { what: ReleaseIn::decode(rest)? },
        opcode::READ => Request::Read { what: ReadIn::decode(rest)? },
        opcode::READDIR => Request::Readdir { what: ReadIn::decode(rest)? },
        opcode::WRITE => {
            let what = WriteIn::decode(rest)?;
            Request::Write { what, data: rest.get(..what.size as usize)? }
        }
        opcode::STATFS => Request::Statfs,
        opcode::FALLOCATE => Request::Fallocate { what: FallocateIn::decode(rest)? },
        opcode::LSEEK => Request::Lseek { what: LseekIn::decode(rest)? },
        opcode::INTERRUPT => Request::Interrupt,
        opcode => Request::Unknown { opcode },
    })
}

fn u64_of(from: &mut &[u8]) -> Option<u64> {
    let (bytes, rest) = from.split_first_chunk()?;
    *from = rest;
    Some(u64::from_ne_bytes(*bytes))
}

fn u32_of(from: &mut &[u8]) -> Option<u32> {
    let (bytes, rest) = from.split_first_chunk()?;
    *from = rest;
    Some(u32::from_ne_bytes(*bytes))
}

/// Takes a text that ends with a zero byte, and the zero byte. Returns the text.
fn text<'a>(from: &mut &'a [u8]) -> Option<&'a [u8]> {
    let end = from.iter().position(|byte| *byte == 0)?;
    let (text, rest) = from.split_at(end);
    *from = &rest[1..];
    Some(text)
}

fn name<'a>(from: &mut &'a [u8]) -> Option<Name<'a>> {
    text(from).filter(|name| !name.is_empty() && !name.contains(&b'/'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(opcode: u32, body: &[u8]) -> Vec<u8> {
        let header =
            InHeader { len: (40 + body.len()) as u32, opcode, unique: 8, nodeid: 1, ..InHeader::default() };
        [&header.encode()[..], body].concat()
    }

    #[test]
    fn requests_are_what_their_bytes_say() {
        let bytes = message(opcode::LOOKUP, b"file\0");
        assert_eq!(parse(&bytes).unwrap().request, Request::Lookup { name: b"file" });
        let what = WriteIn { fh: 1, offset: 4096, size: 3, ..WriteIn::default() };
        let bytes = message(opcode::WRITE, &[&what.encode()[..], b"abc"].concat());
        assert_eq!(parse(&bytes).unwrap().request, Request::Write { what, data: b"abc" });
        let how = Rename2In { new_directory: 5, flags: 1, padding: 0 };
        let bytes = message(opcode::RENAME2, &[&how.encode()[..], b"a\0b\0"].concat());
        let expected = Request::Rename { to_directory: 5, flags: 1, from: b"a", to: b"b" };
        assert_eq!(parse(&bytes).unwrap().request, expected);
        let bytes = message(opcode::SYMLINK, b"name\0../to/there\0");
        assert_eq!(
            parse(&bytes).unwrap().request,
            Request::Symlink { name: b"name", target: b"../to/there" }
        );
        let pairs = [ForgetOne { nodeid: 2, lookups: 1 }, ForgetOne { nodeid: 3, lookups: 9 }];
        let list = [&[2, 0, 0, 0, 0, 0, 0, 0][..], &pairs[0].encode(), &pairs[1].encode()].concat();
        let bytes = message(opcode::BATCH_FORGET, &list);
        let Request::BatchForget { list } = parse(&bytes).unwrap().request else { panic!("a batch") };
        assert_eq!(list.collect::<Vec<_>>(), pairs);
        assert_eq!(parse(&message(999, b"x")).unwrap().request, Request::Unknown { opcode: 999 });
    }

    #[test]
    fn what_is_too_short_or_no_name_is_refused_with_the_request_to_answer() {
        for (opcode, body) in [
            (opcode::LOOKUP, &b"no end"[..]),
            (opcode::LOOKUP, b"\0"),
            (opcode::MKDIR, b"12345678a/b\0"),
            (opcode::WRITE, &[0; 39]),
            (opcode::READ, &[0; 8]),
            (opcode::BATCH_FORGET, &[255; 40]),
            (opcode::RENAME, b"12345678one\0"),
        ] {
            assert_eq!(
                parse(&message(opcode, body)),
                Err(Malformed { opcode, unique: 8 }),
                "{opcode} {body:?}"
            );
        }
        assert_eq!(parse(&[0; 39]), Err(Malformed { opcode: 0, unique: 0 }));
        let mut long = message(opcode::STATFS, b"");
        long.push(0);
        assert!(parse(&long).is_err(), "the length says less");
        let over = WriteIn { size: 4, ..WriteIn::default() };
        assert!(parse(&message(opcode::WRITE, &[&over.encode()[..], b"abc"].concat())).is_err());
    }

    proptest! {
        #[test]
        fn whatever_comes_is_a_request_within_its_bytes_or_refused(
            opcode in 0u32..60, extensions in 0u16..4, body in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let len = (InHeader::BYTES + body.len()) as u32;
            let header = InHeader { len, opcode, extensions, ..InHeader::default() };
            let bytes = [&header.encode()[..], &body].concat();
            if let Ok(Message { request: Request::Write { what, data }, .. }) = parse(&bytes) {
                prop_assert_eq!(data.len(), what.size as usize);
            }
        }
    }
}
