//! The refusals of a cache, in the words that people read.

use std::sync::Arc;
use weir_cache::{Cache, Config};
use weir_device::PageDevice as _;
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

#[test]
fn a_lane_too_many_is_refused_until_another_is_gone() {
    let store = |slots| Arc::new(Host::new(slots).unwrap());
    let cache = Cache::create(store(4096), store(64), Config { lanes: 2, ..Config::default() }).unwrap();
    let mut lanes = Vec::new();
    let error = loop {
        match cache.open() {
            Ok(lane) => lanes.push(lane),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.ends_with(&format!("all {} lanes are in use; configure more", lanes.len())), "{error}");
    lanes.pop();
    lanes.push(cache.open().unwrap());
}
