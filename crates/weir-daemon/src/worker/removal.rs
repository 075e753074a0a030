//! Removals of volumes, and of their last pages: the workers discard the pages.

use super::workers::Workers;
use crate::control::Progress;
use crate::error::{Error, ErrorKind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weir_core::PAGE_SIZE;
use weir_queue::{Item, Work, has_item};
use weir_volume::{Removal, Volume};

/// Number of pages that are discarded in a row. The slots of these pages become free afterwards.
const PAGES_AT_ONCE: u32 = 4096;
/// Time between two looks at whether the daemon stops.
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug)]
struct Discard {
    item: Item<Discard>,
    workers: Arc<Workers>,
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
        let mut mover = this.workers.mover(0);
        while !mover.remove(&mut removal, PAGES_AT_ONCE) {
            this.left.store(removal.pages_left(), Ordering::Relaxed);
            if this.workers.is_stopping() {
                return;
            }
        }
        drop(mover);
        // Whoever asked waits for this.
        let _ = ended.send(removal);
    }
}

/// Discards the pages on the workers' first thread. Waits for the end of that, and calls `tell`
/// meanwhile.
pub fn discard(
    workers: &Arc<Workers>,
    removal: Removal,
    tell: &mut dyn FnMut(Progress),
) -> Result<Option<Arc<Volume>>, Error> {
    let pages = removal.pages_left();
    let stopping = || Error::new(ErrorKind::Refused, "the daemon is stopping");
    let (end, ended) = channel();
    let work = Mutex::new(Some((removal, end)));
    let left = AtomicU32::new(pages);
    let job = Arc::new(Discard { item: Item::new(), workers: Arc::clone(workers), work, left });
    if !workers.queue().schedule(&job) {
        return Err(stopping());
    }
    loop {
        match ended.recv_timeout(LOOK_EVERY) {
            Ok(removal) => return Ok(removal.rest().expect("it has ended")),
            Err(RecvTimeoutError::Timeout) if !workers.is_stopping() => {
                let [total_bytes, bytes] = [pages, pages - job.left.load(Ordering::Relaxed)]
                    .map(|pages| u64::from(pages) * PAGE_SIZE as u64);
                tell(Progress { bytes, total_bytes, pages: bytes / PAGE_SIZE as u64 });
            }
            Err(_) => return Err(stopping()),
        }
    }
}
