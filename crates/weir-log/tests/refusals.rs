//! The refusals of a log, in the words that people read.

use std::sync::Arc;
use weir_log::{Config, Log};
use weir_store::Host;

#[test]
fn a_log_that_cannot_be_is_refused_with_what_was_asked_for() {
    for (config, words) in [
        (Config { segment_pages: 1, ..Config::default() }, "asked for 1 pages, 1 members, 8 lanes"),
        (
            Config { members: 0, ..Config::default() },
            "a log has segments of 2 to 285 pages (8 at least if it is durable), a member and a lane",
        ),
        (Config::default(), "what its cleaner needs for itself; asked for 816: make the log smaller"),
    ] {
        let error = Log::create(Arc::new(Host::new(1024).unwrap()), config).err().unwrap().to_string();
        assert!(error.contains(words), "{error}");
    }
}
