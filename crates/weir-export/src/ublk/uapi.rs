//! The ublk driver's interface: numbers and layouts as `include/uapi/linux/ublk_cmd.h` documents
//! them.
//!
//! This module has the commands only in their ioctl encoding (Linux 6.4). The server asks for
//! `GET_FEATURES` (6.5) first, so it needs Linux 6.5.

use weir_core::PAGE_SIZE;

/// The path of the device that takes control commands.
pub const CONTROL_PATH: &str = "/dev/ublk-control";

/// Bytes of a sector, the unit of offsets and lengths.
pub const SECTOR: u64 = 512;
/// Number of sectors in a page.
pub const PAGE_SECTORS: u64 = PAGE_SIZE as u64 / SECTOR;

/// Largest number of requests of a queue that the driver allows.
pub const QUEUE_DEPTH_MAX: u16 = 4096;

/// The device number that asks for any free one.
pub const ANY_DEVICE: u32 = u32::MAX;
/// The queue number of a command that concerns no queue.
pub const NO_QUEUE: u16 = u16::MAX;

const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// Encodes a command as `_IOR` and `_IOWR` of `asm-generic/ioctl.h` do: direction, size, type,
/// number.
const fn encode(direction: u32, number: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | number
}

const fn control(direction: u32, number: u32) -> u32 {
    encode(direction, number, size_of::<ControlCommand>())
}

const fn io(number: u32) -> u32 {
    encode(READ_WRITE, number, size_of::<IoCommand>())
}

/// Asks which processors a queue serves; the driver puts a mask into the buffer.
pub const GET_QUEUE_AFFINITY: u32 = control(READ, 0x01);
/// Asks for a [`DeviceInfo`]; the driver puts it into the buffer.
pub const GET_DEV_INFO: u32 = control(READ, 0x02);
/// Makes a device. The buffer holds the wished [`DeviceInfo`], and afterwards the granted one.
pub const ADD_DEV: u32 = control(READ_WRITE, 0x04);
/// Removes a stopped device; waits until every process has closed its character device.
pub const DEL_DEV: u32 = control(READ_WRITE, 0x05);
/// Publishes the block device; `data` is the server's process. Waits until every request of every
/// queue has been fetched.
pub const START_DEV: u32 = control(READ_WRITE, 0x06);
/// Removes the block device, even while it is in use.
pub const STOP_DEV: u32 = control(READ_WRITE, 0x07);
/// Sets the [`Parameters`] in the buffer.
pub const SET_PARAMS: u32 = control(READ_WRITE, 0x08);
/// Begins to take a device over from a server that died.
pub const START_USER_RECOVERY: u32 = control(READ_WRITE, 0x10);
/// Ends the takeover of a device from a dead server. Waits, as `START_DEV` does, until every
/// request has been fetched.
pub const END_USER_RECOVERY: u32 = control(READ_WRITE, 0x11);
/// Asks for the driver's features; the driver puts a mask of `FEATURE_` bits into the buffer. Linux
/// 6.5.
pub const GET_FEATURES: u32 = control(READ, 0x13);
/// Does the same as `STOP_DEV`, but fails with `EBUSY` while a process has the block device open.
/// Linux 7.0.
pub const TRY_STOP_DEV: u32 = control(READ_WRITE, 0x17);

/// Offers a buffer for a request; completes when the first request comes.
pub const FETCH_REQ: u32 = io(0x20);
/// Answers a request, and offers its buffer for the next one.
pub const COMMIT_AND_FETCH_REQ: u32 = io(0x21);

/// The result of a fetch when the device has gone.
pub const RESULT_ABORT: i32 = -libc::ENODEV;

/// The device outlives its server.
pub const FEATURE_USER_RECOVERY: u64 = 1 << 3;
/// Requests that the dead server had not answered are given to the next one.
pub const FEATURE_USER_RECOVERY_REISSUE: u64 = 1 << 4;
/// The feature bit: commands are encoded as ioctls are.
pub const FEATURE_IOCTL_ENCODE: u64 = 1 << 6;
/// The kernel can quiesce a device. Weir does not use that, but the bit shows that the driver
/// survives its server's death under load (Linux 6.16). In older drivers, completions that are
/// under way when the server dies may outlive their io_uring. The kernel then follows a NULL
/// pointer in `tctx_task_work_run`. That was seen on Debian's 6.12.95, but not on 6.12.117, which
/// has the repair and not this bit.
pub const FEATURE_QUIESCE: u64 = 1 << 12;
/// The kernel knows `TRY_STOP_DEV`.
pub const FEATURE_SAFE_STOP: u64 = 1 << 17;

/// The device is not started, or is stopped.
pub const STATE_DEAD: u16 = 0;
/// The device is served.
pub const STATE_LIVE: u16 = 1;
/// The device's server died; its requests wait.
pub const STATE_QUIESCED: u16 = 2;

/// Operations: the lower 8 bits of [`Descriptor::op_flags`].
pub mod op {
    /// Reads from the device.
    pub const READ: u8 = 0;
    /// Writes to the device.
    pub const WRITE: u8 = 1;
    /// Makes acknowledged writes durable.
    pub const FLUSH: u8 = 2;
    /// Discards a range, whose content is no longer needed.
    pub const DISCARD: u8 = 3;
    /// Writes zeros.
    pub const WRITE_ZEROES: u8 = 5;
}

/// The flag of a write of zeros that must not discard: the range keeps its room.
pub const IO_NO_UNMAP: u32 = 1 << 15;
/// The flag of a request by which the kernel swaps.
pub const IO_SWAP: u32 = 1 << 16;

/// The device keeps acknowledged writes in a cache until it is flushed.
pub const ATTRIBUTE_VOLATILE_CACHE: u32 = 1 << 2;

/// [`Parameters::basic`] is filled in.
pub const PARAMETERS_BASIC: u32 = 1;
/// [`Parameters::discard`] is filled in.
pub const PARAMETERS_DISCARD: u32 = 2;

/// A structure of the ublk interface without padding, so that all its bytes are fields.
///
/// # Safety
/// Implementors must be `repr(C)` without padding, and every pattern of bits must be a valid value.
pub unsafe trait Plain: Copy + 'static {
    /// The structure's bytes.
    fn bytes(&self) -> &[u8] {
        // SAFETY: a `Plain` value has no padding, so all its bytes are initialised.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }

    /// The structure's bytes, to be filled in.
    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and every pattern of bits is a value.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::from_mut(self).cast(), size_of::<Self>()) }
    }
}

/// Declares structures of the ublk interface. Each has its size and its fields' offsets, which must
/// be those of the kernel's header.
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
            // The fields' sizes add up to the structure's, so there is no padding.
            assert!(0 $(+ size_of::<$type>())* == $size);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };
        // SAFETY: the type is repr(C), of integers and arrays of them, and the assertion above
        // proves that it has no padding.
        unsafe impl Plain for $name {}
    )*};
}

plain! {
    /// `struct ublksrv_ctrl_cmd`: a control command, inside a submission of an io_uring with
    /// 128-byte entries.
    ControlCommand: 32 {
        /// The device's number.
        device: u32 = 0,
        /// The queue's number, or [`NO_QUEUE`].
        queue: u16 = 4,
        /// The buffer's length in bytes.
        length: u16 = 6,
        /// The buffer's address.
        address: u64 = 8,
        /// The command's argument.
        data: u64 = 16,
        /// Length of the path of a device. Only unprivileged devices have one.
        path_length: u16 = 24,
        /// Reserved: always zero.
        pad: u16 = 26,
        /// Reserved: always zero.
        reserved: u32 = 28,
    }

    /// `struct ublksrv_ctrl_dev_info`: a device's state and parameters.
    DeviceInfo: 64 {
        /// Number of hardware queues.
        queues: u16 = 0,
        /// Largest number of requests in flight at each queue.
        depth: u16 = 2,
        /// The device's state, one of the `STATE_` numbers.
        state: u16 = 4,
        /// Reserved: always zero.
        pad0: u16 = 6,
        /// Bytes of a request's buffer.
        buffer_bytes: u32 = 8,
        /// The device's number.
        device: u32 = 12,
        /// The server's process id.
        server: i32 = 16,
        /// Reserved: always zero.
        pad1: u32 = 20,
        /// The device's `FEATURE_` bits.
        flags: u64 = 24,
        /// A number of the server's own, which the driver stores and does not read.
        mark: u64 = 32,
        /// The user who made the device.
        owner_user: u32 = 40,
        /// The group of the user who made the device.
        owner_group: u32 = 44,
        /// Reserved: always zero.
        reserved1: u64 = 48,
        /// Reserved: always zero.
        reserved2: u64 = 56,
    }

    /// `struct ublk_param_basic`: a device's size, its block sizes and the limits of its requests.
    BasicParameters: 32 {
        /// Bits for read-only, rotational and so on. Weir sets at most
        /// [`ATTRIBUTE_VOLATILE_CACHE`].
        attributes: u32 = 0,
        /// The logical block size, as a power of two.
        logical_shift: u8 = 4,
        /// The physical block size, as a power of two.
        physical_shift: u8 = 5,
        /// The best size of a request, as a power of two.
        optimal_shift: u8 = 6,
        /// The smallest efficient size of a request, as a power of two.
        minimal_shift: u8 = 7,
        /// The longest request, in sectors.
        max_sectors: u32 = 8,
        /// Zero, which means that requests may begin anywhere.
        chunk_sectors: u32 = 12,
        /// The device's size in sectors.
        device_sectors: u64 = 16,
        /// Zero, which means that a request's memory may be in any pieces.
        boundary_mask: u64 = 24,
    }

    /// `struct ublk_param_discard`: the limits of discards.
    DiscardParameters: 20 {
        /// Zero, which means that discards need no further alignment than the device's.
        alignment: u32 = 0,
        /// Bytes of the smallest discard.
        granularity: u32 = 4,
        /// The longest discard, in sectors.
        max_discard_sectors: u32 = 8,
        /// The longest write of zeros, in sectors.
        max_zeroes_sectors: u32 = 12,
        /// Largest number of ranges of one request.
        max_segments: u16 = 16,
        /// Reserved: always zero.
        reserved: u16 = 18,
    }

    /// The first part of `struct ublk_params`: the parameters of a device. The driver takes any
    /// length.
    Parameters: 64 {
        /// The length of this structure in bytes.
        length: u32 = 0,
        /// The `PARAMETERS_` bits of the parts that are filled in.
        types: u32 = 4,
        /// The device's size, its block sizes and the limits of its requests.
        basic: BasicParameters = 8,
        /// The limits of discards.
        discard: DiscardParameters = 40,
        /// Room for the device's number, which only the driver writes.
        rest: u32 = 60,
    }

    /// `struct ublksrv_io_desc`: a request, in memory that the driver writes.
    Descriptor: 24 {
        /// The operation in 8 bits of [`op`], then flags.
        op_flags: u32 = 0,
        /// The range's length in sectors.
        sectors: u32 = 4,
        /// The range's first sector.
        start_sector: u64 = 8,
        /// The address of the buffer for the data.
        address: u64 = 16,
    }

    /// `struct ublksrv_io_cmd`: a queue's command, inside a submission.
    IoCommand: 16 {
        /// The queue's number.
        queue: u16 = 0,
        /// The request's tag.
        tag: u16 = 2,
        /// The number of bytes done, or a negative error number.
        result: i32 = 4,
        /// The address of the buffer for the next request of this tag.
        address: u64 = 8,
    }
}

/// The part of the character device's mapping that holds a queue's descriptors: its offset and its
/// length.
pub fn descriptors(queue: u16, depth: u16) -> (u64, usize) {
    let whole = |requests: u16| (usize::from(requests) * size_of::<Descriptor>()).next_multiple_of(PAGE_SIZE);
    (u64::from(queue) * whole(QUEUE_DEPTH_MAX) as u64, whole(depth))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header defines the commands as `_IOR('u', 0x02, struct ublksrv_ctrl_cmd)` and so on.
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
