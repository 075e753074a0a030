//! Finds the paths to a card without taking its memory. Drivers may crash or hang in this, so call
//! it in a process of its own.

use super::options::{Target, VramUrl};
use super::setup::Found;
use super::{Drivers, table::Path};
use libloading::Library;
use std::path::Path as FilePath;

/// A card, and the paths to its memory.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The card's name.
    pub name: String,
    /// The paths that a store on the card will have.
    pub ways: Vec<&'static str>,
    /// Each path that the card will not have, with the reason.
    pub missing: Vec<(&'static str, String)>,
}

/// Checks the cards that `url` names.
///
/// # Errors
/// Fails when the machine has no card that `url` names. The error names the cards that were found
/// instead.
pub fn look(url: &VramUrl) -> Result<Vec<Seen>, String> {
    let drivers = Drivers::default();
    if url.target != Target::All {
        return Ok(vec![Found::look(url, &drivers)?.seen(url)]);
    }
    let mut cards = Vec::new();
    loop {
        let url = VramUrl { target: Target::Index(cards.len() as u32), ..url.clone() };
        match Found::look(&url, &drivers) {
            Ok(found) => cards.push(found.seen(&url)),
            Err(why) if cards.is_empty() => return Err(why),
            Err(_) => return Ok(cards),
        }
    }
}

/// The reason why a driver's library cannot be loaded; `None` if it can. Runs the library's
/// initialisers.
pub fn why_not_loaded(library: &FilePath) -> Option<String> {
    // SAFETY: loading a driver's library runs its initialisers, as it must.
    unsafe { Library::new(library) }.err().map(|error| error.to_string())
}

impl Found {
    fn seen(&self, url: &VramUrl) -> Seen {
        let source = self.source();
        let name = match (&source.gpu, source.cuda()) {
            (Some(gpu), _) => gpu.card.to_string(),
            (None, Some(cuda)) => cuda.name.clone(),
            (None, None) => String::new(),
        };
        let has_window = source.gpu.as_ref().is_some_and(|gpu| gpu.card.window);
        let mut missing = source.refused.clone();
        let ring = match (has_window, source.cuda()) {
            (true, Some(cuda)) => self.no_ring(url, cuda),
            (false, _) => Some("it needs the window".to_owned()),
            (true, None) => Some("it needs CUDA".to_owned()),
        };
        let has_engine = source.cuda().is_some() || (source.gpu.is_some() && !has_window);
        let has = [has_window, has_engine, ring.is_none()];
        let ways = [Path::Mapped, Path::Engine, Path::Ring].into_iter().zip(has);
        missing.extend(ring.map(|why| (Path::Ring.name(), why)));
        Seen { name, ways: ways.filter(|&(_, has)| has).map(|(path, _)| path.name()).collect(), missing }
    }
}
