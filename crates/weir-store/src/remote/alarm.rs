//! The alarm that wakes the thread which copies pages to nodes that lack them.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// The reason for which the thread was last woken, and the condition variable on which it waits.
#[derive(Debug, Default)]
pub(super) struct Alarm {
    state: Mutex<Call>,
    rung: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Call {
    #[default]
    Nothing,
    Wake,
    Close,
}

impl Alarm {
    fn ring(&self, call: Call) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if *state != Call::Close {
            *state = call;
        }
        self.rung.notify_one();
    }

    /// Tells the thread that a node came back, or that another process took its place.
    pub(super) fn wake(&self) {
        self.ring(Call::Wake);
    }

    /// Tells the thread that the store closes.
    pub(super) fn close(&self) {
        self.ring(Call::Close);
    }

    /// Waits until somebody rings the alarm, but no longer than `limit`. Returns the reason, or
    /// [`Call::Nothing`] after `limit`.
    pub(super) fn wait(&self, limit: Duration) -> Call {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.rung.wait_timeout_while(state, limit, |state| *state == Call::Nothing);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        let call = *state;
        if call == Call::Wake {
            *state = Call::Nothing;
        }
        call
    }

    pub(super) fn is_closed(&self) -> bool {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) == Call::Close
    }
}
