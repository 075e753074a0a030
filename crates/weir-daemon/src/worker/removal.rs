//! Removals of volumes, and of their last pages: the workers discard the pages.

use crate::control::Progress;
use crate::error::{Error, ErrorKind};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weir_core::PAGE_SIZE;
use weir_queue::{Item, Queue, Work, has_item};
use weir_volume::{Mover, Removal, Volume};

/// Number of pages that are discarded in a row. The slots of these pages become free afterwards.
const PAGES_AT_ONCE: u32 = 4096;
/// Time between two looks at whether the daemon stops.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The threads that discard pages.
pub trait Discarders: Send + Sync + fmt::Debug {
    /// The queue of the thread that discards.
    fn queue(&self) -> &Queue;

    /// Calls `of` with that thread's mover.
    fn with_mover(&self, of: &mut dyn FnMut(&mut Mover));

    /// Whether the threads are to end.
    fn is_stopping(&self) -> bool;
}

#[derive(Debug)]
struct Discard {
    item: Item<Discard>,
    by: Arc<dyn Discarders>,
    /// The removal, and the way to tell its end.
    work: Mutex<Option<(Removal, Sender<Removal>)>>,
    /// Number of pages that are not discarded yet.
    left: AtomicU32,
}

has_item!(Discard, item);

impl Work for Discard {
    type Pointer = Arc<Discard>;

    fn run(this: Arc<Discard>) {
        let work = this.work.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some((mut removal, ended)) = work else { return };
        let mut has_ended = false;
        this.by.with_mover(&mut |mover| {
            while !has_ended && !this.by.is_stopping() {
                has_ended = mover.remove(&mut removal, PAGES_AT_ONCE);
                this.left.store(removal.pages_left(), Ordering::Relaxed);
            }
        });
        if has_ended {
            // The caller of `discard` may have left because the daemon stops.
            let _ = ended.send(removal);
        }
    }
}

/// Discards the pages on one of the threads. Waits for the end of that, and calls `tell` meanwhile.
pub fn discard(
    by: Arc<dyn Discarders>,
    removal: Removal,
    tell: &mut dyn FnMut(Progress),
) -> Result<Option<Arc<Volume>>, Error> {
    let pages = removal.pages_left();
    let (end, ended) = channel();
    let work = Mutex::new(Some((removal, end)));
    let job = Arc::new(Discard { item: Item::new(), by, work, left: AtomicU32::new(pages) });
    if !job.by.queue().schedule(&job) {
        return Err(stopping());
    }
    loop {
        match ended.recv_timeout(LOOK_EVERY) {
            Ok(removal) => return Ok(removal.rest().expect("it has ended")),
            Err(RecvTimeoutError::Timeout) if !job.by.is_stopping() => {
                let [total_bytes, bytes] = [pages, pages - job.left.load(Ordering::Relaxed)]
                    .map(|pages| u64::from(pages) * PAGE_SIZE as u64);
                tell(Progress { bytes, total_bytes, pages: bytes / PAGE_SIZE as u64 });
            }
            Err(_) => return Err(stopping()),
        }
    }
}

/// The error of a change that the daemon's end has interrupted.
pub fn stopping() -> Error {
    Error::new(ErrorKind::Refused, "the daemon is stopping, so the volume does not change now")
}
