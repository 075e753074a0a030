//! The simplest handler of page faults, as a control: one thread brings one page for each page
//! fault. For each page that it brings, it moves the oldest one out. Its store is memory of the
//! same process, and pages move by reference.

use rustix::event::{PollFd, PollFlags, poll};
use std::collections::VecDeque;
use std::io;
use weir_core::PAGE_SIZE;
use weir_pager::{Event, Stopped, Uffd};

/// Bounds the resident part of the `bytes` bytes that begin at `base`. A page that is moved out
/// lies at the same offset from `store`.
pub fn bound(base: usize, store: usize, bytes: usize, limit: usize) -> io::Result<()> {
    let uffd = Uffd::open().map_err(io::Error::other)?;
    for start in [base, store] {
        uffd.register(start, start + bytes)?;
    }
    std::thread::spawn(move || {
        // This thread has no caller to return an error to, and without the handler the program
        // would wait for ever. So the process ends.
        if let Err(error) = answer(&uffd, base, store, bytes, limit) {
            eprintln!("weir: the bare handler: {error}");
            std::process::exit(1);
        }
    });
    Ok(())
}

fn answer(uffd: &Uffd, base: usize, store: usize, bytes: usize, limit: usize) -> io::Result<()> {
    let mut order = VecDeque::new();
    let mut is_out = vec![false; bytes / PAGE_SIZE];
    loop {
        let Some(event) = uffd.read()? else {
            poll(&mut [PollFd::new(uffd, PollFlags::IN)], None)?;
            continue;
        };
        let Event::Fault(address) = event else { continue };
        let at = address / PAGE_SIZE * PAGE_SIZE;
        if order.len() * PAGE_SIZE >= limit
            && let Some(victim) = order.pop_front()
        {
            moved(uffd.move_pages(store + (victim - base), victim, PAGE_SIZE))?;
            is_out[(victim - base) / PAGE_SIZE] = true;
        }
        let is_out = &mut is_out[(at - base) / PAGE_SIZE];
        if std::mem::take(is_out) {
            moved(uffd.move_pages(at, store + (at - base), PAGE_SIZE))?;
            uffd.wake(at, PAGE_SIZE);
        } else {
            moved(uffd.zero(at, PAGE_SIZE))?;
        }
        order.push_back(at);
    }
}

/// Accepts a move of pages that succeeded although the kernel reports an error. Linux 6.18 may try
/// a page again after it has moved the page, and then finds the page at its new address.
fn moved(result: Result<(), Stopped>) -> io::Result<()> {
    match result {
        Ok(()) | Err(Stopped { why: rustix::io::Errno::EXIST, .. }) => Ok(()),
        Err(Stopped { why, .. }) => Err(why.into()),
    }
}
