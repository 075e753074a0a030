//! A keeper inside the process of a test.

use crate::Keep;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The descriptors that the keeper holds, by name.
#[derive(Debug, Default)]
pub struct Shelf(Mutex<BTreeMap<String, OwnedFd>>);

impl Shelf {
    /// The names of the descriptors that the shelf holds, in order.
    pub fn names(&self) -> Vec<String> {
        self.held().keys().cloned().collect()
    }

    /// Takes out the descriptor that the shelf holds under a name.
    pub fn take(&self, name: &str) -> Option<OwnedFd> {
        self.held().remove(name)
    }

    /// Copies the descriptor that the shelf holds under a name.
    pub fn copy(&self, name: &str) -> Option<OwnedFd> {
        Some(self.held().get(name)?.try_clone().expect("a descriptor is left"))
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<String, OwnedFd>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keep for Shelf {
    fn hold(&self, name: &str, fd: BorrowedFd<'_>, _is_memory: bool) -> io::Result<()> {
        self.held().insert(name.to_owned(), fd.try_clone_to_owned()?);
        Ok(())
    }

    fn let_go(&self, name: &str) -> io::Result<()> {
        self.held().remove(name);
        Ok(())
    }
}
