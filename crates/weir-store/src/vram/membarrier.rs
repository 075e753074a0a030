//! A fence by `membarrier(2)`: one thread makes the call, and all threads of the process get the
//! fence.
//!
//! A lane first stores what it is about to use, and then loads the state that says whether it may.
//! The thread that removes memory, or stops the kernel, first stores that state, and then loads
//! what lanes use. One of the two must see what the other stored, so each store must be visible
//! before the load after it. For a lane, a fence in each operation would ensure that. But
//! operations come far more often than removals. So the thread that removes calls `membarrier(2)`,
//! which makes every processor that runs this process execute a fence (`membarrier(2)`, "pairing").

use std::sync::OnceLock;
use std::sync::atomic::{Ordering, fence};

const GLOBAL: libc::c_int = 1;
const PRIVATE_EXPEDITED: libc::c_int = 8;
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 16;

/// Every thread of this process has executed a full fence when this returns.
pub fn all_threads() {
    static COMMAND: OnceLock<libc::c_int> = OnceLock::new();
    let command = *COMMAND.get_or_init(|| match membarrier(REGISTER_PRIVATE_EXPEDITED) {
        true => PRIVATE_EXPEDITED,
        false => GLOBAL, // Milliseconds instead of microseconds, and there since Linux 4.3.
    });
    fence(Ordering::SeqCst);
    let done = membarrier(command);
    assert!(
        done,
        "membarrier({command}) failed; Weir needs Linux 4.14 or later, and a filter that allows it"
    );
    fence(Ordering::SeqCst);
}

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: membarrier takes two integers and touches no memory of this process.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}
