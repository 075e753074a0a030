//! Signals that would end the program, noticed between its steps.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use weir_cli::failure::Failure;
use weir_system::signals::END;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static FLAGS: Mutex<Vec<Arc<AtomicBool>>> = Mutex::new(Vec::new());

/// From here on a signal does not end this process in the middle of a step: it is noticed between
/// steps.
pub fn watch() -> Result<(), Failure> {
    for signal in END {
        let flag: Arc<AtomicBool> = Arc::default();
        signal_hook::flag::register(signal, Arc::clone(&flag)).map_err(Failure::failed)?;
        FLAGS.lock().expect("nobody panics while holding it").push(flag);
    }
    Ok(())
}

/// Whether a signal has come.
pub fn came() -> bool {
    let flags = FLAGS.lock().expect("nobody panics while holding it");
    if flags.iter().any(|flag| flag.swap(false, Ordering::Relaxed)) {
        INTERRUPTED.store(true, Ordering::Relaxed);
    }
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Forgets the signals that have come, so that the undoing of changes goes on to its end.
pub fn forget() {
    came();
    INTERRUPTED.store(false, Ordering::Relaxed);
}

/// Call this between two steps.
///
/// # Errors
/// Fails when a signal has come.
pub fn check() -> Result<(), Failure> {
    if came() { Err(Failure::Failed("interrupted".to_owned())) } else { Ok(()) }
}
