//! From a name to a store.

use crate::{FileStore, Host, OpenError, Sim, Store, StoreUrl};
use std::sync::Arc;
use weir_core::PAGE_SIZE;

/// Opens the store that `url` names: takes its memory, allocates its file. May take seconds for a large one.
///
/// ```
/// let store = weir_store::open(&"host:1MiB".parse()?)?;
/// assert_eq!(store.slots(), 256);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When the room cannot be had, or the machine lacks what the store needs.
pub fn open(url: &StoreUrl) -> Result<Arc<dyn Store>, OpenError> {
    match url {
        StoreUrl::Host { size } => Ok(Arc::new(Host::new((size.0 / PAGE_SIZE as u64) as u32)?)),
        StoreUrl::Sim(sim) => Ok(Arc::new(Sim::open(sim.clone())?)),
        StoreUrl::File(file) => Ok(Arc::new(FileStore::open(file)?)),
        StoreUrl::Stripe(stripe) => Ok(Arc::new(FileStore::open_stripe(stripe)?)),
        StoreUrl::Vram { .. } => {
            Err(OpenError::new(url.to_string(), "this build has no such store; use host:SIZE"))
        }
    }
}
