//! The messages between processor and card, as bytes: the counterpart of `kernel.cu`.
//!
//! Sequence numbers are 32 bits and wrap. A lane's number `n` lies in slot `n % depth`. The depth
//! divides 2^32, so the order of slots continues across the wrap. Two numbers that share a slot
//! differ by at least the depth, so a slot that still shows the previous number is never mistaken
//! for the next.

/// Largest number of lanes that the kernel can serve: the length of an array in its code.
pub const LANES: usize = 32;
/// Number of threads in one thread block of the kernel: each thread moves 16 bytes of a page.
pub const THREADS: u32 = 256;
/// Bytes from one descriptor to the next: a cache line, so that each leaves the processor as one
/// packet.
pub const DESCRIPTOR: usize = 64;

/// The number of the first descriptor in a fresh ring. It is not 0, since memory that nobody has
/// written has zeros there.
pub const FIRST: u32 = u32::MAX - 4095;

/// One lane, in the form that the kernel reads when it starts.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct LaneBlock {
    /// The address of the descriptors, in the card's memory.
    pub ring: u64,
    /// The address, in the host's memory, of one word for each slot: the number that the kernel
    /// served there last.
    pub done: u64,
    /// The number of the first descriptor that the kernel serves.
    pub head: u32,
    /// Number of the ring's slots.
    pub depth: u32,
    /// Fills the block to half a cache line.
    pub unused: [u32; 2],
}

/// The control block: the arguments of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ControlBlock {
    /// Any value but 0 tells the kernel to leave.
    pub stop: u32,
    /// Number of thread blocks that serve a lane.
    pub blocks: u32,
    /// Fills the cache line.
    pub unused: [u32; 14],
    /// For each lane, the block that describes it to the kernel.
    pub lanes: [LaneBlock; LANES],
}

/// The descriptor that asks for a copy of a page from one address to another.
#[inline]
pub fn descriptor(seq: u32, from: u64, to: u64) -> [u64; 8] {
    let seq = u64::from(seq);
    [seq, from, seq, to, 0, 0, 0, 0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn the_ptx_was_compiled_from_the_source_beside_it() {
        let source = include_bytes!("kernel.cu");
        let ptx = include_str!("kernel.ptx");
        let sum = format!("{:08x}", crc32c(source));
        let first = ptx.lines().next().unwrap_or_default();
        assert!(first.contains(&sum), "kernel.cu is {sum}, but {first:?}: run build-kernel.sh");
        assert!(ptx.contains(".target sm_70"), "compute capability 7.0 and later");
    }

    /// CRC-32C, bit by bit: speed does not matter here.
    fn crc32c(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0u32, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 })
        })
    }

    #[test]
    fn the_layout_is_the_kernels() {
        // kernel.cu must agree: struct lane is 32 bytes, and struct control has its lanes from byte
        // 64 on.
        assert_eq!(size_of::<LaneBlock>(), 32);
        assert_eq!(offset_of!(LaneBlock, head), 16);
        assert_eq!(offset_of!(LaneBlock, depth), 20);
        assert_eq!(offset_of!(ControlBlock, blocks), 4);
        assert_eq!(offset_of!(ControlBlock, lanes), 64);
        let source = include_str!("kernel.cu");
        assert!(source.contains(&format!("lanes[{LANES}];")), "both sides know {LANES} lanes");
    }

    #[test]
    fn a_descriptor_says_its_number_in_both_quarters() {
        let line = descriptor(7, 0x1000, 0x2000);
        assert_eq!(line[..4], [7, 0x1000, 7, 0x2000]);
    }
}
