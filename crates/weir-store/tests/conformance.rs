//! Every store of this crate, through the suite that all must pass.

use std::sync::Arc;
use weir_store::{Store, conformance, open};

fn store(url: &str) -> Arc<dyn Store> {
    open(&url.parse().expect("a URL")).expect("a store")
}

conformance!(host: store("host:129MiB"));
conformance!(sim_at_once: store("sim:size=1MiB,chunk=64KiB"));
conformance!(sim_out_of_order: store("sim:size=1MiB,chunk=64KiB,seed=7,delay=9"));
conformance!(sim_slow: store("sim:size=256KiB,chunk=64KiB,delay=2,latency_us=20"));
