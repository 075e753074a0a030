//! The ublk driver's interface: numbers and layouts as `include/uapi/linux/ublk_cmd.h` documents
//! them.
//!
//! Only the commands in their ioctl encoding (Linux 6.4) are here, and `GET_FEATURES` (6.5) is
//! asked first, so 6.5 is the oldest kernel.

use weir_core::PAGE_SIZE;

/// The device for control commands.
pub const CONTROL_PATH: &str = "/dev/ublk-control";

/// A sector, the unit of offsets and lengths.
pub const SECTOR: u64 = 512;
/// Sectors of a page.
pub const PAGE_SECTORS: u64 = PAGE_SIZE as u64 / SECTOR;

/// The deepest queue that the driver makes.
pub const QUEUE_DEPTH_MAX: u16 = 4096;

/// Asks for any free device number.
pub const ANY_DEVICE: u32 = u32::MAX;
/// The queue of a command that is about no queue.
pub const NO_QUEUE: u16 = u16::MAX;

const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// As `_IOR` and `_IOWR` of `asm-generic/ioctl.h`: direction, size, type, number.
const fn encode(direction: u32, number: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | number
}

const fn control(direction: u32, number: u32) -> u32 {
    encode(direction, number, size_of::<ControlCommand>())
}

const fn io(number: u32) -> u32 {
    encode(READ_WRITE, number, size_of::<IoCommand>())
}

/// Which processors a queue serves; a mask into the buffer.
pub const GET_QUEUE_AFFINITY: u32 = control(READ, 0x01);
/// A [`DeviceInfo`] into the buffer.
pub const GET_DEV_INFO: u32 = control(READ, 0x02);
/// A [`DeviceInfo`] in the buffer, as wished, and back as granted.
pub const ADD_DEV: u32 = control(READ_WRITE, 0x04);
/// Forgets a stopped device; waits for everybody who has its character device open.
pub const DEL_DEV: u32 = control(READ_WRITE, 0x05);
/// Publishes the block device; `data` is the server's process. Waits until every request of every
/// queue has been fetched.
pub const START_DEV: u32 = control(READ_WRITE, 0x06);
/// Takes the block device away, whoever uses it.
pub const STOP_DEV: u32 = control(READ_WRITE, 0x07);
/// [`Parameters`] in the buffer.
pub const SET_PARAMS: u32 = control(READ_WRITE, 0x08);
/// Begins to take over from a server that died.
pub const START_USER_RECOVERY: u32 = control(READ_WRITE, 0x10);
/// Ends it; as `START_DEV`.
pub const END_USER_RECOVERY: u32 = control(READ_WRITE, 0x11);
/// A mask of `FEATURE_` bits into the buffer. Linux 6.5.
pub const GET_FEATURES: u32 = control(READ, 0x13);
/// As `STOP_DEV`, but refused with `EBUSY` while somebody has the block device open. Linux 7.0.
pub const TRY_STOP_DEV: u32 = control(READ_WRITE, 0x17);

/// Offers a buffer for a request; completes with the first one.
pub const FETCH_REQ: u32 = io(0x20);
/// Answers a request and offers the buffer again.
pub const COMMIT_AND_FETCH_REQ: u32 = io(0x21);

/// A fetch's result where the device has gone.
pub const RESULT_ABORT: i32 = -libc::ENODEV;

/// The device outlives its server.
pub const FEATURE_USER_RECOVERY: u64 = 1 << 3;
/// Requests that the dead server had not answered are given to the next one.
pub const FEATURE_USER_RECOVERY_REISSUE: u64 = 1 << 4;
/// Commands are encoded as ioctls are.
pub const FEATURE_IOCTL_ENCODE: u64 = 1 << 6;
/// The kernel knows how to quiesce a device. Not used: it tells drivers that survive their server's
/// death under load (Linux 6.16) from older ones, in which completions that are on their way then
/// may outlive the ring that they are for (a NULL pointer in `tctx_task_work_run`, seen on Debian's
/// 6.12.95; not on 6.12.117, which has the repair and not the flag).
pub const FEATURE_QUIESCE: u64 = 1 << 12;
/// The kernel knows `TRY_STOP_DEV`.
pub const FEATURE_SAFE_STOP: u64 = 1 << 17;

/// A device that is not started, or is stopped.
pub const STATE_DEAD: u16 = 0;
/// One that serves.
pub const STATE_LIVE: u16 = 1;
/// One whose server died; its requests wait.
pub const STATE_QUIESCED: u16 = 2;

/// The lower 8 bits of [`Descriptor::op_flags`].
pub mod op {
    /// From the device.
    pub const READ: u8 = 0;
    /// To the device.
    pub const WRITE: u8 = 1;
    /// Makes acknowledged writes durable.
    pub const FLUSH: u8 = 2;
    /// The content is of no use any more.
    pub const DISCARD: u8 = 3;
    /// Zeros.
    pub const WRITE_ZEROES: u8 = 5;
}

/// Zeros that must keep their room.
pub const IO_NO_UNMAP: u32 = 1 << 15;
/// The kernel swaps.
pub const IO_SWAP: u32 = 1 << 16;

/// [`Parameters::basic`] is filled in.
pub const PARAMETERS_BASIC: u32 = 1;
/// [`Parameters::discard`] is filled in.
pub const PARAMETERS_DISCARD: u32 = 2;

/// A structure of the interface, without padding, so that it is no more than its bytes.
///
/// # Safety
/// `repr(C)`, no padding, and every pattern of bits is a value.
pub unsafe trait Plain: Copy + 'static {
    /// Its bytes.
    fn bytes(&self) -> &[u8] {
        // SAFETY: a `Plain` value has no padding, so all its bytes are initialised.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }

    /// Its bytes, to be filled in.
    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and every pattern of bits is a value.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::from_mut(self).cast(), size_of::<Self>()) }
    }
}

/// Declares structures of the interface, each with its size and the offsets of its fields, as the
/// header's ABI has them.
macro_rules! plain {
    ($($(#[$meta:meta])* $name:ident: $size:literal { $($(#[$field_meta:meta])* $field:ident: $type:ty = $offset:literal,)* })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
        }
        const _: () = {
            assert!(size_of::<$name>() == $size);
            // The fields' sizes add up: there is no padding.
            assert!(0 $(+ size_of::<$type>())* == $size);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };
        // SAFETY: repr(C) of integers and arrays of them, asserted above to be without padding.
        unsafe impl Plain for $name {}
    )*};
}

plain! {
    /// `struct ublksrv_ctrl_cmd`: travels inside a submission of a ring with 128-byte entries.
    ControlCommand: 32 {
        /// Which device.
        device: u32 = 0,
        /// Which queue, or [`NO_QUEUE`].
        queue: u16 = 4,
        /// The buffer's length.
        length: u16 = 6,
        /// The buffer.
        address: u64 = 8,
        /// The command's argument.
        data: u64 = 16,
        /// Of unprivileged devices only.
        path_length: u16 = 24,
        /// Zero.
        pad: u16 = 26,
        /// Zero.
        reserved: u32 = 28,
    }

    /// `struct ublksrv_ctrl_dev_info`.
    DeviceInfo: 64 {
        /// Hardware queues.
        queues: u16 = 0,
        /// Requests of each queue.
        depth: u16 = 2,
        /// One of the `STATE_` numbers.
        state: u16 = 4,
        /// Zero.
        pad0: u16 = 6,
        /// Bytes of a request's buffer.
        buffer_bytes: u32 = 8,
        /// The device's number.
        device: u32 = 12,
        /// The server's process.
        server: i32 = 16,
        /// Zero.
        pad1: u32 = 20,
        /// `FEATURE_` bits.
        flags: u64 = 24,
        /// The server's own; the driver keeps it and does not look at it.
        mark: u64 = 32,
        /// The user who made it.
        owner_user: u32 = 40,
        /// The group of the user who made it.
        owner_group: u32 = 44,
        /// Zero.
        reserved1: u64 = 48,
        /// Zero.
        reserved2: u64 = 56,
    }

    /// `struct ublk_param_basic`.
    BasicParameters: 32 {
        /// Read-only, rotational, with a volatile cache and so on: ours is nothing of it.
        attributes: u32 = 0,
        /// Logical block size, as a power of two.
        logical_shift: u8 = 4,
        /// Physical block size, as a power of two.
        physical_shift: u8 = 5,
        /// Best size of a request, as a power of two.
        optimal_shift: u8 = 6,
        /// Least good size of a request, as a power of two.
        minimal_shift: u8 = 7,
        /// The longest request.
        max_sectors: u32 = 8,
        /// Zero: requests may begin anywhere.
        chunk_sectors: u32 = 12,
        /// The device's size.
        device_sectors: u64 = 16,
        /// Zero: a request's memory may be in any pieces.
        boundary_mask: u64 = 24,
    }

    /// `struct ublk_param_discard`.
    DiscardParameters: 20 {
        /// Zero: aligned to the device.
        alignment: u32 = 0,
        /// Bytes that are discarded at least.
        granularity: u32 = 4,
        /// The longest discard.
        max_discard_sectors: u32 = 8,
        /// The longest write of zeros.
        max_zeroes_sectors: u32 = 12,
        /// Ranges of one request.
        max_segments: u16 = 16,
        /// Zero.
        reserved: u16 = 18,
    }

    /// The first part of `struct ublk_params`; the driver takes any length.
    Parameters: 64 {
        /// Its length.
        length: u32 = 0,
        /// `PARAMETERS_` bits.
        types: u32 = 4,
        /// Size and shape.
        basic: BasicParameters = 8,
        /// Discards.
        discard: DiscardParameters = 40,
        /// Where the device's number would follow, which only the driver writes.
        rest: u32 = 60,
    }

    /// `struct ublksrv_io_desc`: a request, in memory that the driver writes.
    Descriptor: 24 {
        /// 8 bits of [`op`], then flags.
        op_flags: u32 = 0,
        /// How long.
        sectors: u32 = 4,
        /// The first sector.
        start_sector: u64 = 8,
        /// The buffer that its data lie in.
        address: u64 = 16,
    }

    /// `struct ublksrv_io_cmd`: travels inside a submission.
    IoCommand: 16 {
        /// Which queue.
        queue: u16 = 0,
        /// Which request.
        tag: u16 = 2,
        /// Bytes done, or a negative error number.
        result: i32 = 4,
        /// The buffer for the next request of this tag.
        address: u64 = 8,
    }
}

/// A queue's descriptors in the mapping of the character device: its offset there, and its length.
pub fn descriptors(queue: u16, depth: u16) -> (u64, usize) {
    let whole = |requests: u16| (usize::from(requests) * size_of::<Descriptor>()).next_multiple_of(PAGE_SIZE);
    (u64::from(queue) * whole(QUEUE_DEPTH_MAX) as u64, whole(depth))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header says `_IOR('u', 0x02, struct ublksrv_ctrl_cmd)` and so on.
    #[test]
    fn commands_have_the_numbers_of_the_header() {
        for (command, number) in [
            (GET_QUEUE_AFFINITY, 0x8020_7501),
            (GET_DEV_INFO, 0x8020_7502),
            (ADD_DEV, 0xc020_7504),
            (DEL_DEV, 0xc020_7505),
            (START_DEV, 0xc020_7506),
            (STOP_DEV, 0xc020_7507),
            (SET_PARAMS, 0xc020_7508),
            (START_USER_RECOVERY, 0xc020_7510),
            (END_USER_RECOVERY, 0xc020_7511),
            (GET_FEATURES, 0x8020_7513),
            (TRY_STOP_DEV, 0xc020_7517),
            (FETCH_REQ, 0xc010_7520),
            (COMMIT_AND_FETCH_REQ, 0xc010_7521),
        ] {
            assert_eq!(command, number, "{command:#x} is not {number:#x}");
        }
    }

    #[test]
    fn a_structure_is_its_bytes_and_back() {
        let command = IoCommand { queue: 1, tag: 2, result: -5, address: 0x1122_3344_5566_7788 };
        assert_eq!(command.bytes()[..8], [1, 0, 2, 0, 0xfb, 0xff, 0xff, 0xff]);
        let mut back = IoCommand::default();
        back.bytes_mut().copy_from_slice(command.bytes());
        assert_eq!(back, command);
    }

    #[test]
    fn queues_descriptors_lie_as_far_apart_as_the_deepest_queue_needs() {
        assert_eq!(descriptors(0, 64), (0, 4096));
        assert_eq!(descriptors(3, 256), (3 * 98_304, 8192));
    }
}
