//! The numbers and structures of the FUSE protocol (include/uapi/linux/fuse.h, protocol 7), in the
//! host's byte order.
//!
//! Structures are read and written field by field. Compile-time assertions check that they have the
//! C compiler's layout: each field at a multiple of its size, nothing between them, and the size
//! that the kernel expects.

/// The protocol's major version.
pub const MAJOR: u32 = 7;
/// The minor version that the server speaks: that of `FUSE_NOTIFY_RESEND` (Linux 6.9). With an
/// older kernel both sides use that kernel's version.
pub const MINOR: u32 = 40;
/// The oldest minor version that the server accepts: that of `max_pages` (Linux 5.4).
pub const MINOR_LEAST: u32 = 31;
/// The node number of the root.
pub const ROOT: u64 = 1;
/// Bytes of the longest file name.
pub const NAME_MAX: u32 = 255;
/// The bit of `unique` that marks a request which is sent again.
pub const UNIQUE_RESEND: u64 = 1 << 63;

/// The opcodes of requests.
#[allow(missing_docs)] // the protocol's names say it
pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
}

/// The flags of `INIT`, by which kernel and server agree on features.
#[allow(missing_docs)] // the protocol's names say it
pub mod init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const DONT_MASK: u64 = 1 << 6;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const WRITEBACK_CACHE: u64 = 1 << 16;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const INIT_EXT: u64 = 1 << 30;
    /// The kernel can send unanswered requests again.
    pub const HAS_RESEND: u64 = 1 << 39;
    /// Requests may come by io_uring (Linux 6.14, if the module's parameter `enable_uring` allows
    /// it).
    pub const OVER_IO_URING: u64 = 1 << 41;
}

/// Flags that say how the kernel treats an open file.
pub mod open_flag {
    /// The file has no page cache: every read and write comes to the server.
    pub const DIRECT_IO: u32 = 1 << 0;
    /// Opening the file leaves its pages in the page cache.
    pub const KEEP_CACHE: u32 = 1 << 1;
    /// Writes of one file may come in parallel.
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Flags that say which fields of a `SETATTR` count.
#[allow(missing_docs)] // the protocol's names say it
pub mod setattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const CTIME: u32 = 1 << 10;
}

/// The number of the notification that asks for unanswered requests again.
pub const NOTIFY_RESEND: i32 = 7;

/// The type of a field, which has a fixed number of bytes on the wire.
trait Field: Sized {
    fn take(from: &mut &[u8]) -> Option<Self>;
    fn put(&self, into: &mut &mut [u8]);
}

macro_rules! number {
    ($($type:ty)*) => {$(
        impl Field for $type {
            #[inline]
            fn take(from: &mut &[u8]) -> Option<Self> {
                let (bytes, rest) = from.split_first_chunk()?;
                *from = rest;
                Some(<$type>::from_ne_bytes(*bytes))
            }
            #[inline]
            fn put(&self, into: &mut &mut [u8]) {
                let (front, rest) = std::mem::take(into).split_at_mut(size_of::<$type>());
                front.copy_from_slice(&self.to_ne_bytes());
                *into = rest;
            }
        }
    )*};
}
number!(u16 u32 i32 u64);

macro_rules! structure {
    ($(#[$about:meta])* $name:ident, $size:literal { $($field:ident: $type:ty),* $(,)? }) => {
        $(#[$about])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[repr(C)]
        #[allow(missing_docs)] // the protocol's names say it
        pub struct $name { $(pub $field: $type),* }

        const _: () = {
            // Check C's layout without padding, on which `decode` and `encode` rely.
            let mut at = 0;
            $(assert!(std::mem::offset_of!($name, $field) == at, "a field lies elsewhere in C");
              at += size_of::<$type>();)*
            assert!(at == $size && size_of::<$name>() == $size, "the kernel's structure has another size");
        };

        impl $name {
            /// The structure's length on the wire.
            pub const BYTES: usize = $size;

            /// Takes the structure from the front of `from`; `None` if that is too short.
            #[inline]
            pub fn decode(from: &mut &[u8]) -> Option<Self> {
                Some($name { $($field: Field::take(from)?),* })
            }

            /// The structure's bytes on the wire.
            #[inline]
            pub fn encode(&self) -> [u8; $size] {
                let mut bytes = [0; $size];
                let mut into = &mut bytes[..];
                $(Field::put(&self.$field, &mut into);)*
                debug_assert!(into.is_empty());
                bytes
            }
        }

        impl Field for $name {
            #[inline]
            fn take(from: &mut &[u8]) -> Option<Self> {
                Self::decode(from)
            }
            #[inline]
            fn put(&self, into: &mut &mut [u8]) {
                let (front, rest) = std::mem::take(into).split_at_mut($size);
                front.copy_from_slice(&self.encode());
                *into = rest;
            }
        }
    };
}

structure!(
    /// The head of every request.
    InHeader, 40 { len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32, extensions: u16, padding: u16 }
);
structure!(
    /// The head of every reply. `error` is 0 or a negated errno. If `unique` is 0, `error` is a
    /// notification's number.
    OutHeader, 16 { len: u32, error: i32, unique: u64 }
);
structure!(
    /// The kernel's offer in `INIT`.
    InitIn, 16 { major: u32, minor: u32, max_readahead: u32, flags: u32 }
);
structure!(
    /// The server's answer to `INIT`. The rest of the kernel's structure is zero.
    InitOut, 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16, congestion_threshold: u16,
        max_write: u32, time_gran: u32, max_pages: u16, map_alignment: u16, flags2: u32, max_stack_depth: u32,
        unused_1: u64, unused_2: u64, unused_3: u64,
    }
);
structure!(
    /// A node's attributes.
    Attr, 88 {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64, atimensec: u32, mtimensec: u32,
        ctimensec: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32,
    }
);
structure!(
    /// The answer to a name that was found or made.
    EntryOut, 128 {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_nsec: u32,
        attr_valid_nsec: u32, attr: Attr,
    }
);
structure!(
    /// Attributes, with the time that the kernel may keep them.
    AttrOut, 104 { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr }
);
structure!(
    /// The argument of `SETATTR`.
    SetattrIn, 88 {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64, ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32, mode: u32, unused_1: u32, uid: u32, gid: u32, unused_2: u32,
    }
);
structure!(
    /// The argument of `MKNOD`, before the name.
    MknodIn, 16 { mode: u32, rdev: u32, umask: u32, padding: u32 }
);
structure!(
    /// The argument of `MKDIR`, before the name.
    MkdirIn, 8 { mode: u32, umask: u32 }
);
structure!(
    /// The argument of `RENAME2`, before the two names. `RENAME` has only the first field.
    Rename2In, 16 { new_directory: u64, flags: u32, padding: u32 }
);
structure!(
    /// The argument of `CREATE`, before the name.
    CreateIn, 16 { flags: u32, mode: u32, umask: u32, open_flags: u32 }
);
structure!(
    /// The argument of `OPEN` and `OPENDIR`.
    OpenIn, 8 { flags: u32, open_flags: u32 }
);
structure!(
    /// The answer to `OPEN` and `OPENDIR`.
    OpenOut, 16 { fh: u64, open_flags: u32, padding: u32 }
);
structure!(
    /// The argument of `RELEASE` and `RELEASEDIR`.
    ReleaseIn, 24 { fh: u64, flags: u32, release_flags: u32, lock_owner: u64 }
);
structure!(
    /// The argument of `READ` and `READDIR`.
    ReadIn, 40 { fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
);
structure!(
    /// The argument of `WRITE`, before the data.
    WriteIn, 40 { fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
);
structure!(
    /// The answer to `WRITE`.
    WriteOut, 8 { size: u32, padding: u32 }
);
structure!(
    /// The answer to `STATFS`.
    StatfsOut, 80 {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32, frsize: u32,
        padding: u32, spare_1: u64, spare_2: u64, spare_3: u64,
    }
);
structure!(
    /// The argument of `FALLOCATE`.
    FallocateIn, 32 { fh: u64, offset: u64, length: u64, mode: u32, padding: u32 }
);
structure!(
    /// The argument of `LSEEK`.
    LseekIn, 24 { fh: u64, offset: u64, whence: u32, padding: u32 }
);
structure!(
    /// One node of a `BATCH_FORGET`.
    ForgetOne, 16 { nodeid: u64, lookups: u64 }
);
structure!(
    /// A directory's entry, before its name; each entry begins at a multiple of 8.
    Dirent, 24 { ino: u64, offset: u64, name_bytes: u32, kind: u32 }
);

structure!(
    /// The fields of an io_uring's entry besides the request: `fuse_uring_ent_in_out`.
    RingRequest, 32 { flags: u64, commit: u64, payload: u32, padding: u32, reserved: u64 }
);
structure!(
    /// The argument of an io_uring's command: `fuse_uring_cmd_req`.
    RingCommand, 24 { flags: u64, commit: u64, queue: u16, padding_1: u16, padding_2: u32 }
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_structure_survives_its_bytes() {
        let header =
            InHeader { len: 80, opcode: opcode::WRITE, unique: 2, nodeid: 1, pid: 7, ..InHeader::default() };
        let bytes = header.encode();
        assert_eq!(InHeader::decode(&mut &bytes[..]), Some(header));
        assert_eq!(InHeader::decode(&mut &bytes[..39]), None);
        let entry = EntryOut {
            nodeid: 3,
            attr: Attr { size: 9, flags: 4, ..Attr::default() },
            ..EntryOut::default()
        };
        assert_eq!(EntryOut::decode(&mut &entry.encode()[..]), Some(entry));
    }
}
