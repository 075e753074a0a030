//! The ways to a card, found without taking its memory. Drivers may crash or hang over it: ask in a
//! process of its own.

use super::options::{Target, VramUrl};
use super::setup::Found;
use super::{Drivers, table::Path};
use libloading::Library;
use std::path::Path as FilePath;

/// A card, and the ways to its memory.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Its name.
    pub name: String,
    /// The ways that a store on it will have.
    pub ways: Vec<&'static str>,
    /// Each of the others, and why not.
    pub missing: Vec<(&'static str, String)>,
}

/// Looks at the cards that `url` names.
///
/// # Errors
/// When there is none: what was found instead.
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

/// Why a driver's library cannot be loaded; `None` if it can. Runs the library's initialisers.
pub fn why_not_loaded(library: &FilePath) -> Option<String> {
    // SAFETY: loading a driver's library runs its initialisers, which is what it is for.
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
