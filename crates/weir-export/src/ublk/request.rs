//! Translates descriptors into requests, and sorts the requests of a batch.

use super::uapi::{Descriptor, IO_NO_UNMAP, IO_SWAP, PAGE_SECTORS, SECTOR, op};
use weir_request::{Op, Request, Span};

/// The limits of a device, which its requests must keep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// Number of pages of the device.
    pub pages: u32,
    /// Number of pages of a request's buffer.
    pub buffer_pages: u32,
}

impl Rules {
    /// Translates `descriptor` into a request. Its range must be whole pages of the device, and its
    /// data must fit a buffer.
    ///
    /// # Errors
    /// Fails with a negative error number. It is `EOPNOTSUPP` for an operation that was never
    /// offered. It is `EINVAL` for a range that is not whole pages of the device or does not fit
    /// the buffer. The driver sends neither.
    pub fn check(&self, descriptor: &Descriptor) -> Result<Request, i32> {
        let op = match descriptor.op_flags as u8 {
            op::READ => Op::Read,
            op::WRITE => Op::Write,
            op::FLUSH => Op::Flush,
            op::DISCARD => Op::Discard,
            op::WRITE_ZEROES if descriptor.op_flags & IO_NO_UNMAP != 0 => Op::Zero,
            op::WRITE_ZEROES => Op::Discard,
            _ => return Err(-libc::EOPNOTSUPP),
        };
        if op == Op::Flush {
            return Ok(Request { op, span: Span { offset: 0, length: 0 }, fua: false });
        }
        let (start, sectors) = (descriptor.start_sector, u64::from(descriptor.sectors));
        let whole = start.is_multiple_of(PAGE_SECTORS) && sectors.is_multiple_of(PAGE_SECTORS);
        let device = u64::from(self.pages) * PAGE_SECTORS;
        let within = start.checked_add(sectors).is_some_and(|end| end <= device);
        let pages = sectors / PAGE_SECTORS;
        let fits = !matches!(op, Op::Read | Op::Write) || pages <= self.buffer_pages.into();
        if whole && within && fits && pages > 0 {
            let span = Span { offset: start * SECTOR, length: sectors * SECTOR };
            Ok(Request { op, span, fua: false })
        } else {
            Err(-libc::EINVAL)
        }
    }
}

/// The answer to a successful request: the number of bytes moved.
pub fn success(request: &Request) -> i32 {
    match request.op {
        Op::Read | Op::Write => request.span.length as i32,
        Op::Discard | Op::Zero | Op::Hole | Op::Flush => 0,
    }
}

/// Whether the kernel itself asks: it waits for memory, or a program waits for a page that was
/// swapped out.
pub fn is_swap(descriptor: &Descriptor) -> bool {
    descriptor.op_flags & IO_SWAP != 0
}

/// Moves the urgent requests to the front of a batch; otherwise keeps the order. Allocates nothing.
pub fn urgent_first<T>(batch: &mut [T], urgent: impl Fn(&T) -> bool) {
    let mut front = 0;
    for at in 0..batch.len() {
        if urgent(&batch[at]) {
            batch[front..=at].rotate_right(1);
            front += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RULES: Rules = Rules { pages: 1000, buffer_pages: 32 };

    fn descriptor(op_flags: u32, start_sector: u64, sectors: u32) -> Descriptor {
        Descriptor { op_flags, sectors, start_sector, address: 0 }
    }

    proptest! {
        #[test]
        fn a_request_that_passes_lies_within_the_device_and_its_buffer(
            op_flags in prop_oneof![0u32..8, any::<u32>()],
            start in prop_oneof![0u64..10_000, any::<u64>()],
            sectors in prop_oneof![0u32..10_000, any::<u32>()],
        ) {
            if let Ok(request) = RULES.check(&descriptor(op_flags, start, sectors))
                && request.op != Op::Flush
            {
                let span = request.span;
                prop_assert!(span.first() + u64::from(span.pages()) <= 1000);
                prop_assert!(span.pages() > 0 && span.offset == start * 512 && span.piece(0).len == 4096);
                let moves_data = matches!(request.op, Op::Read | Op::Write);
                prop_assert!(!moves_data || span.pages() <= 32);
                prop_assert_eq!(success(&request), if moves_data { sectors as i32 * 512 } else { 0 });
            }
        }

        #[test]
        fn the_urgent_come_first_and_nobody_overtakes_his_like(batch in proptest::collection::vec(any::<bool>(), 0..50)) {
            let mut ordered: Vec<(usize, bool)> = batch.iter().copied().enumerate().collect();
            urgent_first(&mut ordered, |(_, urgent)| *urgent);
            let mut expected: Vec<(usize, bool)> = batch.iter().copied().enumerate().collect();
            expected.sort_by_key(|(_, urgent)| !urgent);
            prop_assert_eq!(ordered, expected);
        }
    }

    #[test]
    fn operations_are_what_the_kernel_means_by_them() {
        let kind = |op_flags| RULES.check(&descriptor(op_flags, 8, 16)).map(|request| request.op);
        assert_eq!(kind(0), Ok(Op::Read));
        assert_eq!(kind(1 | IO_SWAP), Ok(Op::Write));
        assert_eq!(kind(2), Ok(Op::Flush));
        assert_eq!(kind(3), Ok(Op::Discard));
        assert_eq!(kind(4), Err(-libc::EOPNOTSUPP), "WRITE_SAME was never offered");
        assert_eq!(kind(5), Ok(Op::Discard), "zeros that need no room");
        assert_eq!(kind(5 | IO_NO_UNMAP), Ok(Op::Zero));
        assert_eq!(kind(13), Err(-libc::EOPNOTSUPP), "zones were never offered");
    }

    #[test]
    fn parts_of_pages_and_what_lies_outside_are_refused() {
        for (start, sectors) in
            [(4, 8), (8, 4), (8000, 8), (7992, 16), (u64::MAX - 7, 8), (0, 33 * 8), (0, 0)]
        {
            assert_eq!(RULES.check(&descriptor(1, start, sectors)), Err(-libc::EINVAL), "{start} {sectors}");
        }
        assert!(RULES.check(&descriptor(3, 0, 8000)).is_ok(), "a discard needs no buffer");
        assert!(is_swap(&descriptor(1 | IO_SWAP, 0, 8)) && !is_swap(&descriptor(1, 0, 8)));
    }
}
