//! Every store of this crate in the conformance suite, which all must pass.

use std::sync::Arc;
use weir_store::{Sim, Store, StoreUrl, Stripe, conformance, open};

fn store(url: &str) -> Arc<dyn Store> {
    open(&url.parse().expect("a URL")).expect("a store")
}

/// A store in files that no other program sees: they are unlinked as soon as they are open.
fn files(names: &[&str], dir: &str, options: &str) -> Arc<dyn Store> {
    let unique = format!("weir-conformance-{}-{:?}", std::process::id(), std::thread::current().id());
    let paths: Vec<String> = names.iter().map(|name| format!("{dir}/{unique}-{name}")).collect();
    let scheme = if paths.len() == 1 { "file" } else { "stripe" };
    let opened = store(&format!("{scheme}:{}?{options}", paths.join(",")));
    paths.iter().for_each(|path| std::fs::remove_file(path).expect("the file that was just opened"));
    opened
}

conformance!(host: store("host:129MiB"));
conformance!(sim_at_once: store("sim:size=1MiB,chunk=64KiB"));
conformance!(sim_out_of_order: store("sim:size=1MiB,chunk=64KiB,seed=7,delay=9"));
conformance!(sim_slow: store("sim:size=256KiB,chunk=64KiB,delay=2,latency_us=20"));
/// A stripe of three simulated members; the second is as fast as the two others together.
fn stripe_of_members(options: &str) -> Arc<dyn Store> {
    let member = |seed| match format!("sim:seed={seed},{options}").parse() {
        Ok(StoreUrl::Sim(url)) => Sim::open(url).expect("memory"),
        other => panic!("{other:?}"),
    };
    Arc::new(Stripe::by_speed("three".to_owned(), (1..4).map(member).collect(), &[1e6, 2e6, 1e6]))
}

conformance!(stripe_of_members: stripe_of_members("size=512KiB,chunk=64KiB"));
conformance!(stripe_of_members_out_of_order: stripe_of_members("size=512KiB,chunk=64KiB,delay=9"));
conformance!(file: files(&["a"], "/var/tmp", "size=2MiB&chunk=256KiB"));
conformance!(file_in_the_clear: files(&["a"], "/var/tmp", "size=2MiB&chunk=256KiB&encrypt=off"));
conformance!(file_in_the_page_cache: files(&["a"], "/dev/shm", "size=2MiB&chunk=256KiB"));
conformance!(stripe: files(&["a", "b", "c"], "/var/tmp", "size=3MiB&unit=16KiB"));
