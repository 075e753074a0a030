//! The refusals of a cache, in the words that people read.

use std::sync::Arc;
use weir_cache::{Cache, Config};
use weir_store::Host;

#[test]
fn a_cache_that_cannot_be_is_refused_with_what_was_asked_for() {
    let default = Config::default();
    for (slots, config, words) in [
        (4096, Config { lanes: 0, ..default }, "; asked for 0 lanes, "),
        (
            4096,
            Config { dirty_high: 91, ..default },
            "and watermarks of at most 90 per cent, the lower first",
        ),
        (4096, Config { dirty_high: 10, dirty_low: 20, ..default }, " lanes, 20 and 10 per cent"),
        (16, default, "and a cache needs "),
    ] {
        let store = |slots| Arc::new(Host::new(slots).unwrap());
        let error = Cache::create(store(slots), store(64), config).err().unwrap().to_string();
        assert!(error.contains(words), "{error}");
    }
}
