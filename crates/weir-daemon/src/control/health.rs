//! The answer to "is all well, and if not, what now?", from a daemon's status alone.

use super::Status;
use super::status::Protection;
use weir_core::PAGE_SIZE;

/// A problem, and what a user can do about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// The thing that has the problem, and what is wrong with it.
    pub what: String,
    /// The next step for a user who has the problem.
    pub next: &'static str,
}

/// Every problem that a status shows, the gravest first. Empty: all is well.
pub fn problems(status: &Status) -> Vec<Problem> {
    let mut found = Vec::new();
    let mut add = |what: String, next| found.push(Problem { what, next });
    let count = |number: u64, one: &str, many: &str| {
        if number == 1 { format!("1 {one}") } else { format!("{number} {many}") }
    };
    if status.read.corrupt > 0 {
        let pages = count(status.read.corrupt, "page was", "pages were");
        add(
            format!("{pages} not what had been written; the reader got an I/O error"),
            "weir off, and do not use that card or disk again before it is tested",
        );
    }
    for store in &status.stores {
        let next = match store.state.as_str() {
            "lost" => "weir off, then weir on; programs that ask for its pages get I/O errors",
            "unreachable" => "wait, and look again; the lines of that store below say why",
            "draining" => "none: its pages move to other stores while these have room",
            _ => continue,
        };
        add(format!("store {} is {}", store.url, store.state), next);
    }
    let (read, write) = (status.read.faults.saturating_sub(status.read.corrupt), status.write.faults);
    if read + write > 0 {
        let pages = count(read + write, "request for a page", "requests for a page");
        add(format!("{pages} failed since the start"), "look for the first cause in the daemon's log");
    }
    let Protection { swap, io_flusher, memory_locked, oom_exempt, io_allocations } = status.protection;
    if swap && !(io_flusher && memory_locked && oom_exempt) {
        let lacks =
            [(io_flusher, "flusher"), (memory_locked, "locked memory"), (oom_exempt, "OOM exemption")];
        let lacks: Vec<&str> = lacks.iter().filter(|(has, _)| !has).map(|(_, name)| *name).collect();
        add(
            format!("swap without {}: the machine may freeze once its memory is full", lacks.join(", ")),
            "weir off, then weir on without --unsafe-no-flusher, outside of a container",
        );
    }
    if status.upgrade_failed {
        add(
            format!("the program that is installed now does not serve, so weir {} does", status.version),
            "look for the reason in the daemon's log; weir off, then weir on starts the installed one",
        );
    }
    if io_allocations > 0 {
        let times = count(io_allocations, "allocation", "allocations");
        add(
            format!("{times} on I/O threads: a bug of Weir"),
            "report it, with the output of weir status --json",
        );
    }
    for condition in status.stores.iter().flat_map(|store| &store.conditions) {
        if condition.state == "online" && condition.is_slow() {
            let what = format!("{} is slower than it can be: its memory is not mapped", condition.part);
            add(what, "weir doctor says what is missing");
        }
    }
    found
}

/// The gain: the memory that stored pages would take in RAM, less the RAM that Weir takes for them.
pub fn gained_bytes(status: &Status) -> u64 {
    let in_ram = status.stores.iter().filter(|store| is_ram(&store.url));
    let taken: u64 = in_ram.map(|store| store.slots_used).sum();
    let pages = (status.volume.stored + status.volume.filled).saturating_sub(taken);
    pages * PAGE_SIZE as u64
}

fn is_ram(url: &str) -> bool {
    url.starts_with("host:") || url.starts_with("sim:")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whats(status: &Status) -> Vec<String> {
        problems(status).into_iter().map(|problem| problem.what).collect()
    }

    #[test]
    fn a_daemon_without_faults_on_online_stores_is_well() {
        assert_eq!(problems(&Status::example(1000)), []);
    }

    #[test]
    fn each_problem_is_named_once_the_gravest_first() {
        let mut status = Status::example(1000);
        status.read.faults = 3;
        status.read.corrupt = 2;
        status.stores[0].state = "lost".to_owned();
        status.protection.io_flusher = false;
        status.upgrade_failed = true;
        status.protection.io_allocations = 1;
        assert_eq!(
            whats(&status),
            [
                "2 pages were not what had been written; the reader got an I/O error",
                "store host:1MiB is lost",
                "1 request for a page failed since the start",
                "swap without flusher: the machine may freeze once its memory is full",
                "the program that is installed now does not serve, so weir 0 does",
                "1 allocation on I/O threads: a bug of Weir",
            ]
        );
        status.protection.swap = false;
        assert!(!whats(&status).iter().any(|what| what.starts_with("swap")), "no swap, no need");
    }

    #[test]
    fn pages_in_host_memory_gain_nothing_and_filled_pages_and_pages_on_a_card_do() {
        let mut status = Status::example(0);
        status.volume.filled = 10;
        assert_eq!(gained_bytes(&status), 10 * PAGE_SIZE as u64, "64 pages lie in RAM as before");
        status.stores[0].url = "vram:0".to_owned();
        assert_eq!(gained_bytes(&status), 74 * PAGE_SIZE as u64);
    }
}
