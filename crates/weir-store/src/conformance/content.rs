//! Test pages whose content tells in which slot they belong.

use weir_core::{PAGE_SIZE, PageBytes, Slot};

/// The content of the `serial`-th write of `slot`. It differs in every word from every other
/// content. So a page in the wrong slot, an older one, and a mixture of two are all noticed.
pub fn content(slot: Slot, serial: u32) -> PageBytes {
    let mut page = [0; PAGE_SIZE];
    let mut state = u64::from(slot.0) << 32 | u64::from(serial);
    for word in page.chunks_exact_mut(8) {
        // The constant is odd, so that the states do not repeat within 2^64 steps. The
        // multiplication spreads each state over all bits of its word.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&(state ^ (state >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb).to_le_bytes());
    }
    page[..4].copy_from_slice(&slot.0.to_le_bytes());
    page[4..8].copy_from_slice(&serial.to_le_bytes());
    page
}

/// The slot and the serial number that a page's content names, for messages.
pub(super) fn label(page: &PageBytes) -> String {
    let word = |at: usize| u32::from_le_bytes(page[at..at + 4].try_into().expect("4 of 4096 bytes"));
    let (slot, serial) = (word(0), word(4));
    if content(Slot(slot), serial) == *page {
        format!("write {serial} of slot {slot}")
    } else {
        format!("no page that was ever written ({:02x?}..)", &page[..16])
    }
}
