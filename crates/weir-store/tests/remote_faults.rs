//! Nodes that do wrong. They cut and hold answers, refuse at the wrong moment, come back empty or
//! older, and lie. No page is ever older than the acknowledged one.

mod engine;

use engine::fake::{Act, Fake, Words};
use engine::{PATIENCE, all, open, page, read, write};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes, Slot};
use weir_store::{Fault, Lane, Progress, RemoteStore, State, Store, StoreUrl};

fn url(nodes: &[Fake], options: &str) -> String {
    let names: Vec<String> = nodes.iter().map(Fake::name).collect();
    format!("redis://{}?{options}", names.join(","))
}

fn refused(url: &str) -> String {
    match url.parse() {
        Ok(StoreUrl::Remote(url)) => RemoteStore::open(&url).map(drop).unwrap_err().to_string(),
        other => panic!("{other:?}"),
    }
}

fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Collects what the store tells of its nodes.
fn told(store: &RemoteStore) -> Arc<Mutex<Vec<(State, String)>>> {
    let told = Arc::new(Mutex::new(Vec::new()));
    let list = Arc::clone(&told);
    let tell = move |condition: &weir_store::Condition| {
        list.lock().unwrap().push((condition.state, condition.why.clone().unwrap_or_default()));
    };
    store.report().unwrap().when_changed(Arc::new(tell));
    told
}

fn is(words: &[Vec<u8>], command: &str) -> bool {
    words[0].eq_ignore_ascii_case(command.as_bytes())
}

#[test]
fn a_node_that_does_not_tell_what_matters_or_takes_no_pages_is_refused() {
    let nodes = [Fake::start()];
    let url = url(&nodes, "size=1MiB");
    let restore = |key, value: &str| nodes[0].state().settings.insert(key, value.to_owned());
    nodes[0].state().settings.remove("maxmemory");
    let error = refused(&url);
    assert!(
        error.contains("does not tell its settings") && error.contains("it knows no maxmemory"),
        "{error}"
    );
    restore("maxmemory", "much\u{1b}[2J");
    let error = refused(&url);
    assert!(error.contains("maxmemory is much [2J"), "{error}");
    restore("maxmemory", "0");
    nodes[0].state().settings.remove("maxmemory-policy");
    assert!(refused(&url).contains("it knows no maxmemory-policy"));
    restore("maxmemory-policy", "noeviction");
    let run = std::mem::take(&mut nodes[0].state().run);
    assert!(refused(&url).contains("does not name its process"));
    nodes[0].state().run = run;
    // A replica, and one that reads its file.
    for line in ["READONLY You can't write against a read only replica.", "LOADING it reads"] {
        nodes[0].plan(move |words, _| if is(words, "UNLINK") { Act::Say(line) } else { Act::Serve });
        let error = refused(&url);
        assert!(error.contains("takes no pages") && error.contains(&line[8..]), "{error}");
    }
    nodes[0].plan(|_, _| Act::Serve);
    open(&url);
}

#[test]
fn a_node_that_cannot_serve_is_away_once_and_back_once_however_long_that_takes() {
    for line in ["LOADING it reads", "READONLY a replica", "MISCONF no disk", "BUSY a script", "MASTERDOWN x"]
    {
        let nodes = [Fake::start()];
        let store = open(&url(&nodes, "size=1MiB"));
        let mut lane = store.lane(8).unwrap();
        // Both threads are connected.
        assert_eq!(write(&mut *lane, 3, 1), Ok(()));
        assert_eq!(read(&mut *lane, 3), Ok(page(1)));
        let told = told(&store);
        let refusals = Arc::new(AtomicU64::new(0));
        let (count, mut is_cut) = (Arc::clone(&refusals), false);
        nodes[0].plan(move |words, _| {
            let refuses = ["SET", "UNLINK"].iter().any(|command| is(words, command));
            count.fetch_add(u64::from(refuses), Ordering::Relaxed);
            // The other thread connects again, which says nothing of this one.
            let cuts = !refuses && is(words, "GET") && !std::mem::replace(&mut is_cut, true);
            match (refuses, cuts) {
                (true, _) => Act::Say(line),
                (_, true) => Act::Cut,
                _ => Act::Serve,
            }
        });
        assert_eq!(lane.write(0, Slot(3), &page(2)), Progress::Queued);
        lane.submit();
        // The page is there meanwhile.
        eventually("it tries", || refusals.load(Ordering::Relaxed) > 0);
        eventually("it is away", || store.state(0) == State::Unreachable);
        let mut reader = store.lane(8).unwrap();
        assert_eq!(read(&mut *reader, 3), Ok(page(1)), "{line}");
        let before = refusals.load(Ordering::Relaxed);
        eventually("it tries again", || refusals.load(Ordering::Relaxed) > before + 3);
        assert_eq!(store.state(0), State::Unreachable);
        nodes[0].plan(|_, _| Act::Serve);
        eventually("it is back", || store.state(0) == State::Online);
        // It was tried within two seconds, or is an error by now and lands all the same.
        eventually("the write", || {
            lane.poll(Instant::now(), &mut |_| {});
            read(&mut *reader, 3) == Ok(page(2))
        });
        let told = told.lock().unwrap();
        let states: Vec<State> = told.iter().map(|(state, _)| *state).collect();
        assert_eq!(states, [State::Unreachable, State::Online], "{told:?}");
        assert!(told[0].1.contains(&line[..4]), "{told:?}");
    }
}

#[test]
fn a_page_that_is_not_served_at_present_leaves_the_others_of_its_node_alone() {
    for line in ["TRYAGAIN it moves", "CLUSTERDOWN Hash slot not served"] {
        let nodes = [Fake::start()];
        let store = open(&url(&nodes, "size=1MiB"));
        let mut lane = store.lane(8).unwrap();
        for slot in 0..8 {
            assert_eq!(write(&mut *lane, slot, slot), Ok(()));
        }
        let told = told(&store);
        let (key, asked) = (store.key(Slot(3)).into_bytes(), Arc::new(AtomicU64::new(0)));
        let count = Arc::clone(&asked);
        nodes[0].plan(move |words, _| {
            // The first three times.
            let refuses = words.get(1) == Some(&key) && count.fetch_add(1, Ordering::Relaxed) < 3;
            if refuses { Act::Say(line) } else { Act::Serve }
        });
        let reads: Vec<_> = (0..8).map(|slot| (Slot(slot), None)).collect();
        for (slot, (result, content)) in all(&mut *lane, &reads).into_iter().enumerate() {
            assert_eq!((result, content), (Ok(()), page(slot as u32)), "{line}");
        }
        assert!(asked.load(Ordering::Relaxed) > 3);
        assert!(told.lock().unwrap().is_empty(), "{:?}", told.lock().unwrap());
    }
}

#[test]
fn an_answer_that_stops_in_its_middle_costs_its_pages_a_wait_and_with_two_copies_nothing() {
    for copies in [1, 2] {
        let nodes = [Fake::start(), Fake::start()];
        let store = open(&url(&nodes[..copies], &format!("size=1MiB&copies={copies}")));
        let mut lane = store.lane(32).unwrap();
        let fill = |by: u32| -> Vec<_> { (0..24).map(|slot| (Slot(slot), Some(page(slot + by)))).collect() };
        let reads: Vec<_> = (0..24).map(|slot| (Slot(slot), None)).collect();
        assert!(all(&mut *lane, &fill(0)).iter().all(|(result, _)| result.is_ok()));
        for command in ["GET", "SET"] {
            // In the middle of a batch: some answers come whole, and then a part of one.
            let mut count = 0;
            nodes[0].holds.store(true, Ordering::Relaxed);
            nodes[0].plan(move |words, _| {
                let counts = is(words, command) && words[1].last() != Some(&b'e');
                count += i32::from(counts);
                if counts && count == 9 { Act::Hold(3) } else { Act::Serve }
            });
            let operations = if command == "GET" { reads.clone() } else { fill(50) };
            let results = all(&mut *lane, &operations);
            let late = results.iter().filter(|(result, _)| *result == Err(Fault::Timeout)).count();
            assert!(results.iter().all(|(result, _)| [Ok(()), Err(Fault::Timeout)].contains(result)));
            assert!(copies == 1 || late == 0, "{late} of two copies");
            let is_write = command == "SET";
            // The thread that writes gives the connection up, and its writes land by the next one.
            if !is_write {
                nodes[0].holds.store(false, Ordering::Relaxed);
            }
            // Late writes settle, and land before those that come now.
            let mut settled = 0;
            eventually("late writes", || {
                lane.poll(Instant::now(), &mut |done| panic!("{done:?} was answered"));
                lane.settled(&mut |_| settled += 1);
                !is_write || settled >= late
            });
            nodes[0].holds.store(false, Ordering::Relaxed);
            assert!(all(&mut *lane, &fill(90)).iter().all(|(result, _)| result.is_ok()));
            for (slot, (result, content)) in all(&mut *lane, &reads).into_iter().enumerate() {
                assert_eq!((result, content), (Ok(()), page(slot as u32 + 90)));
            }
        }
        assert_eq!(store.counts().forged, 0);
    }
}

/// Random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % below
    }
}

/// Refusals that an engine may have at any time.
const LINES: [&str; 13] = [
    "LOADING it reads",
    "READONLY a replica",
    "MASTERDOWN no master",
    "BUSY a script",
    "CLUSTERDOWN The cluster is down",
    "CLUSTERDOWN Hash slot not served",
    "TRYAGAIN it moves",
    "MOVED 1 127.0.0.1:1",
    "ASK 1 127.0.0.1:1",
    "OOM it is full",
    "MISCONF no disk",
    "NOPERM no",
    "ERR what",
];

/// Values that the node had at some time.
type Older = Vec<HashMap<Vec<u8>, Vec<u8>>>;

/// Has a node do one command of `odds` wrong, while `is_bad`. With `lies` it also answers with
/// values that are older, of another page, or changed, and is replaced by an older or empty one.
fn misbehave(
    node: &Fake,
    seed: u64,
    odds: u64,
    lies: bool,
    is_bad: &Arc<AtomicBool>,
    counts: &Arc<[AtomicU64; 2]>,
) {
    let mut random = Random(seed | 1);
    let (is_bad, counts, mut older) = (Arc::clone(is_bad), Arc::clone(counts), Older::new());
    node.plan(move |words, values| {
        let is_read = is(words, "GET");
        if !is_bad.load(Ordering::Relaxed) || !is_read && !is(words, "SET") || random.below(odds) > 0 {
            return Act::Serve;
        }
        if random.below(8) == 0 && older.len() < 8 {
            older.push(values.clone());
        }
        let part = random.below(4200) as usize;
        let act = match random.below(if lies && is_read { 15 } else { 6 }) {
            0 | 1 => Act::Say(LINES[random.below(LINES.len() as u64) as usize]),
            2 => Act::Cut,
            3 => Act::CutAfter(part),
            4 => Act::CutAfter(part % 8),
            5 => Act::Stall(part, Duration::from_millis(random.below(40))),
            lie => {
                let before = older.get(random.below(8) as usize).and_then(|values| values.get(&words[1]));
                let value = match lie % 3 {
                    0 => before.cloned(),
                    1 => values.values().nth(random.below(16) as usize).cloned(),
                    _ => values.get(&words[1]).cloned().map(|mut value| {
                        let at = part % value.len();
                        value[at] ^= 1;
                        value
                    }),
                };
                let Some(value) = value.filter(|value| values.get(&words[1]) != Some(value)) else {
                    return Act::Serve;
                };
                counts[1].fetch_add(1, Ordering::Relaxed);
                return Act::Answer(value);
            }
        };
        counts[0].fetch_add(1, Ordering::Relaxed);
        act
    });
}

/// A page as the test knows it: the newest version that was acknowledged, the newest that was
/// written, and whether a write of it may still land.
#[derive(Clone, Copy, Default)]
struct Known {
    kept: u32,
    written: u32,
    is_late: bool,
}

fn version(slot: u32, version: u32) -> PageBytes {
    page(slot << 20 | version)
}

/// Reads and writes pages at random, `turns` times. Returns the number of operations, and of those
/// that were refused.
fn play(lane: &mut dyn Lane, pages: &mut [Known], random: &mut Random, turns: u64) -> (u64, u64) {
    let (mut done, mut refused) = (0, 0);
    for _ in 0..turns {
        lane.settled(&mut |slot| pages[slot.0 as usize].is_late = false);
        let first = random.below(pages.len() as u64 - 12) as usize;
        let mut operations = Vec::new();
        for (slot, known) in pages.iter_mut().enumerate().skip(first).take(12) {
            if known.is_late || random.below(3) == 0 {
                continue;
            }
            let write = random.below(2) == 0;
            known.written += u32::from(write);
            operations.push((Slot(slot as u32), write.then(|| version(slot as u32, known.written))));
        }
        for ((slot, write), (result, content)) in operations.iter().zip(all(lane, &operations)) {
            let known = &mut pages[slot.0 as usize];
            done += 1;
            refused += u64::from(result.is_err());
            match (write, result) {
                (Some(_), Ok(())) => known.kept = known.written,
                (Some(_), Err(fault)) => known.is_late = fault == Fault::Timeout,
                (None, Ok(())) => {
                    let found = (known.kept..=known.written).find(|it| content == version(slot.0, *it));
                    let never_written = known.kept == 0 && content == [0; PAGE_SIZE];
                    assert!(found.is_some() || never_written, "{slot:?} is older than {}", known.kept);
                }
                (None, Err(_)) => {}
            }
        }
    }
    (done, refused)
}

/// At full scale for ten minutes. `WEIR_SEED` is another course of events.
#[test]
fn whatever_nodes_do_no_page_is_older_than_the_acknowledged_one_and_all_are_usable_afterwards() {
    let full = std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full");
    let first: u64 = std::env::var("WEIR_SEED").map_or(7, |seed| seed.parse().unwrap());
    let begun = Instant::now();
    let mut sums = [0; 7];
    for seed in first.. {
        // One copy or two, with lies or without: each of the four in turn.
        let (copies, lies) = (1 + seed % 2, seed / 2 % 2 == 0);
        let nodes = [(); 3].map(|()| Fake::start());
        let store = open(&url(&nodes, &format!("size=16MiB&copies={copies}")));
        let mut lane = store.lane(32).unwrap();
        let (is_bad, counts) =
            (Arc::new(AtomicBool::new(true)), Arc::new([(); 2].map(|()| AtomicU64::new(0))));
        for (number, node) in nodes.iter().enumerate() {
            misbehave(node, seed * 1000 + number as u64, 25, lies, &is_bad, &counts);
        }
        // Some slots of every extent, by number.
        let mut pages = vec![Known::default(); store.slots() as usize];
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut replaced = 0;
        for _ in 0..if full { 12 } else { 3 } {
            let (done, refused) = play(&mut *lane, &mut pages[..256], &mut random, 40);
            sums[0] += done;
            sums[1] += refused;
            // A node dies, and one that is empty or older takes its place.
            let victim = &nodes[random.below(3) as usize];
            if lies && copies == 1 {
                let half = victim.state().values.clone().into_iter().filter(|_| random.below(2) == 0);
                let older = half.collect();
                play(&mut *lane, &mut pages[..256], &mut random, 5);
                victim.replace(older);
                replaced += 1;
            } else if !lies {
                victim.replace(HashMap::new());
                replaced += 1;
            }
        }
        sums[4] += replaced;
        is_bad.store(false, Ordering::Relaxed);
        // Once nodes do right, everything can be written and read.
        eventually("late writes settle", || {
            lane.poll(Instant::now(), &mut |_| {});
            lane.settled(&mut |slot| pages[slot.0 as usize].is_late = false);
            pages.iter().all(|known| !known.is_late)
        });
        eventually("nodes are back", || (0..3).all(|member| store.state(member) == State::Online));
        let writes: Vec<_> = (0..256).map(|slot| (Slot(slot), Some(version(slot, 1 << 19)))).collect();
        let fills = all(&mut *lane, &writes);
        assert!(fills.iter().all(|(result, _)| result.is_ok()), "seed {seed}");
        for slot in 0..256 {
            assert_eq!(read(&mut *lane, slot), Ok(version(slot, 1 << 19)), "seed {seed}");
        }
        let found = store.counts();
        sums[2] += counts[0].load(Ordering::Relaxed);
        sums[3] += counts[1].load(Ordering::Relaxed);
        sums[5] += found.forged;
        sums[6] += found.lost;
        assert!(lies || found.forged == 0, "seed {seed}: {found:?}");
        drop(lane);
        drop(store);
        let left = nodes.iter().map(|node| node.state().values.len()).sum::<usize>();
        assert_eq!(left, 0, "seed {seed}: values are left behind");
        if seed + 1 >= first + 4 && (!full || begun.elapsed() > Duration::from_secs(600)) {
            break;
        }
    }
    assert!(sums[3] > 0 && sums[5] > 0, "nobody lied: {sums:?}");
    for (name, value) in
        ["operations", "refused", "faults", "lies", "replaced", "found_wrong", "found_missing"]
            .iter()
            .zip(sums)
    {
        println!("figure: nodes {name} {value} higher");
    }
    println!("figure: nodes older_pages 0 lower 0");
}

#[test]
fn an_answer_from_before_a_write_takes_nothing_from_the_copy_that_was_written_since() {
    let nodes = [Fake::start(), Fake::start()];
    let store = open(&url(&nodes, "size=1MiB&copies=2"));
    let (told, key) = (told(&store), store.key(Slot(3)).into_bytes());
    let first = &nodes[store.member(Slot(3)) as usize];
    let has_both = || eventually("both copies", || store.counts().lacking == 0);
    let mut lane = store.lane(8).unwrap();
    let mut version = 0;
    let copied = loop {
        version += 1;
        nodes.iter().for_each(|node| node.plan(|_, _| Act::Serve));
        eventually("the write", || write(&mut *lane, 3, version) == Ok(()));
        has_both();
        // The node has thrown the page away, and its answer is under way for long.
        first.state().values.remove(&key);
        first.holds.store(true, Ordering::Relaxed);
        let name = key.clone();
        first.plan(
            move |words, _| {
                if is(words, "GET") && words[1] == name { Act::Hold(0) } else { Act::Serve }
            },
        );
        let before = (store.counts().lost, told.lock().unwrap().len());
        eventually("the other node's page", || read(&mut *lane, 3) == Ok(page(version)));
        eventually("the write", || write(&mut *lane, 3, version + 1) == Ok(()));
        has_both();
        version += 1;
        let copied = store.counts().copied;
        // From here on no copy is made anew, so one that is marked as lacking stays so.
        for node in &nodes {
            node.plan(|words, _| if is(words, "SET") { Act::Say("OOM it is full") } else { Act::Serve });
        }
        first.holds.store(false, Ordering::Relaxed);
        let is_heard = || store.counts().lost > before.0;
        eventually("the late answer", || is_heard() || told.lock().unwrap().len() > before.1);
        // A machine that stalls has given the connection up. Then nobody has heard the answer.
        if is_heard() {
            break copied;
        }
    };
    // The thread that has heard it hears this one later.
    assert_eq!(read(&mut *lane, 4), Ok([0; PAGE_SIZE]));
    let counts = store.counts();
    assert_eq!((counts.lacking, counts.copied), (0, copied), "{counts:?} {:?}", told.lock().unwrap());
    assert_eq!(read(&mut *lane, 3), Ok(page(version)));
}

#[test]
fn a_clean_up_whose_connection_breaks_goes_on_where_it_stopped() {
    let nodes = [Fake::start()];
    let store = open(&url(&nodes, "size=16MiB"));
    let mut lane = store.lane(64).unwrap();
    let writes: Vec<_> = (0..2048).map(|slot| (Slot(slot), Some(page(slot)))).collect();
    assert!(all(&mut *lane, &writes).iter().all(|(result, _)| result.is_ok()));
    assert_eq!(nodes[0].state().values.len(), writes.len());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let list = Arc::clone(&asked);
    nodes[0].plan(move |words, _| {
        // The threads of the store ask for a key without a value.
        if !is(words, "UNLINK") || words[1].ends_with(b"none") {
            return Act::Serve;
        }
        let mut list = list.lock().unwrap();
        list.push(words[1..].to_vec());
        if list.len() % 2 == 0 { Act::Cut } else { Act::Serve }
    });
    let told = told(&store);
    drop(lane);
    drop(store);
    assert_eq!(nodes[0].state().values.len(), 0, "{:?}", told.lock().unwrap());
    let asked = asked.lock().unwrap();
    let done: Vec<_> = asked.iter().step_by(2).flatten().collect();
    let once: std::collections::HashSet<_> = done.iter().collect();
    assert_eq!((done.len(), once.len()), (writes.len(), writes.len()), "{} commands", asked.len());
    assert!(!told.lock().unwrap().iter().any(|(_, why)| why.contains("are left there")));
}

#[test]
fn a_value_whose_write_was_never_answered_is_deleted_too() {
    let nodes = [Fake::start()];
    let store = open(&url(&nodes, "size=1MiB"));
    let mut lane = store.lane(8).unwrap();
    nodes[0].plan(|words, _| if is(words, "SET") { Act::CutAfter(0) } else { Act::Serve });
    assert_eq!(lane.write(0, Slot(3), &page(1)), Progress::Queued);
    lane.submit();
    eventually("the value", || nodes[0].has(&store.key(Slot(3))));
    drop(lane);
    nodes[0].plan(|_, _| Act::Serve);
    drop(store);
    assert_eq!(nodes[0].state().values.len(), 0);
}

#[test]
fn a_store_on_many_nodes_that_do_not_answer_closes_in_one_time_limit_and_says_what_is_left() {
    // One after the other, each would take its time: some minutes.
    let nodes: Vec<Fake> = (0..40).map(|_| Fake::start()).collect();
    let store = open(&url(&nodes, "size=640MiB"));
    let mut lane = store.lane(64).unwrap();
    let slots = (0..store.slots()).step_by(1024);
    let writes: Vec<_> = slots.map(|slot| (Slot(slot), Some(page(slot)))).collect();
    assert!(all(&mut *lane, &writes).iter().all(|(result, _)| result.is_ok()));
    let told = told(&store);
    // One answers. By chance a node may have no value.
    let answers = (0..40).max_by_key(|&number| nodes[number].state().values.len()).unwrap();
    for (_, node) in nodes.iter().enumerate().filter(|(number, _)| *number != answers) {
        node.plan(|words, _| if is(words, "UNLINK") { Act::Hold(0) } else { Act::Serve });
    }
    drop(lane);
    let begun = Instant::now();
    drop(store);
    let took = begun.elapsed();
    nodes.iter().for_each(|node| node.holds.store(false, Ordering::Relaxed));
    assert!(took < PATIENCE, "{took:?}");
    let told = told.lock().unwrap();
    let left: usize = told
        .iter()
        .filter_map(|(_, why)| why.split_once(" values are left there")?.0.parse::<usize>().ok())
        .sum();
    assert!(left > writes.len() / 2 && left < writes.len(), "{left} of {}: {told:?}", writes.len());
    assert_eq!(nodes[answers].state().values.len(), 0);
}

/// Two nodes that have a copy of slot 3 each: the one that reads ask first, and the other one.
fn with_two_copies(nodes: &[Fake], store: &RemoteStore, lane: &mut dyn Lane) -> (usize, usize) {
    assert_eq!(write(lane, 3, 1), Ok(()));
    let key = store.key(Slot(3));
    let is_kept = || nodes.iter().all(|node| node.has(&key)) && store.counts().lacking == 0;
    eventually("both copies", is_kept);
    let first = store.member(Slot(3)) as usize;
    (first, 1 - first)
}

#[test]
fn a_read_takes_the_page_of_a_node_that_is_only_slow_while_the_other_one_says_nothing() {
    let nodes = [Fake::start(), Fake::start()];
    let store = open(&url(&nodes, "size=1MiB&copies=2"));
    let mut lane = store.lane(8).unwrap();
    let (slow, silent) = with_two_copies(&nodes, &store, &mut *lane);
    nodes[slow].plan(|words, _| if is(words, "GET") { Act::Hold(0) } else { Act::Serve });
    // The slow node answers right after the other one has been asked too.
    let (is_asked, holds) = (Arc::new(AtomicBool::new(false)), Arc::clone(&nodes[slow].holds));
    let asked = Arc::clone(&is_asked);
    nodes[silent].plan(move |words, _| {
        if !is(words, "GET") {
            return Act::Serve;
        }
        asked.store(true, Ordering::Relaxed);
        holds.store(false, Ordering::Relaxed);
        Act::Hold(0)
    });
    let result = read(&mut *lane, 3);
    // The silent node has answered no read until here, so the page is the slow one's.
    assert!(nodes[silent].holds.swap(false, Ordering::Relaxed));
    assert_eq!(result, Ok(page(1)));
    assert!(is_asked.load(Ordering::Relaxed), "nobody has asked the other node");
}

#[test]
fn a_read_asks_a_node_again_whose_connection_broke_while_the_other_one_says_nothing() {
    let nodes = [Fake::start(), Fake::start()];
    let store = open(&url(&nodes, "size=1MiB&copies=2"));
    for order in [false, true] {
        let mut lane = store.lane(8).unwrap();
        let (first, second) = with_two_copies(&nodes, &store, &mut *lane);
        let (silent, breaks) = if order { (first, second) } else { (second, first) };
        nodes[silent].holds.store(true, Ordering::Relaxed);
        nodes[silent].plan(|words, _| if is(words, "GET") { Act::Hold(0) } else { Act::Serve });
        let mut is_cut = false;
        nodes[breaks].plan(move |words, _| {
            let cuts = is(words, "GET") && !std::mem::replace(&mut is_cut, true);
            if cuts { Act::Cut } else { Act::Serve }
        });
        assert_eq!(read(&mut *lane, 3), Ok(page(1)), "{order}");
        for node in &nodes {
            node.plan(|_, _| Act::Serve);
            node.holds.store(false, Ordering::Relaxed);
        }
        eventually("nodes are back", || (0..2).all(|member| store.state(member) == State::Online));
    }
}

#[test]
fn a_page_whose_first_copy_is_gone_is_copied_from_the_second_though_that_is_marked_too() {
    let nodes = [Fake::start(), Fake::start()];
    let store = open(&url(&nodes, "size=1MiB&copies=2"));
    let mut lane = store.lane(8).unwrap();
    let (first, second) = with_two_copies(&nodes, &store, &mut *lane);
    let key = store.key(Slot(3));
    // The second node is another process with the same values. So the copy there is marked, and it
    // is there all the same. Reads are refused for now, so the node is away.
    nodes[first].plan(|words, _| if is(words, "GET") { Act::Say("TRYAGAIN it moves") } else { Act::Serve });
    nodes[second].plan(|words, _| match words {
        words if is(words, "GET") => Act::Say("LOADING it reads"),
        // It is full, so nobody can copy the page there again.
        words if is(words, "SET") => Act::Say("OOM it is full"),
        _ => Act::Serve,
    });
    let values = nodes[second].state().values.clone();
    nodes[second].replace(values);
    assert_eq!(read(&mut *lane, 3), Err(Fault::Timeout));
    eventually("the second node's mark", || store.counts().gone == 1);
    eventually("the second node is away", || store.state(second as u32) != State::Online);
    // The first node is another process without values.
    nodes[first].plan(|_, _| Act::Serve);
    nodes[first].replace(HashMap::new());
    assert_eq!(read(&mut *lane, 3), Err(Fault::Timeout));
    eventually("the first node's mark", || store.counts().gone == 2);
    assert!(store.counts().lacking == 1 && !nodes[first].has(&key));
    nodes[second].plan(|words, _| if is(words, "SET") { Act::Say("OOM it is full") } else { Act::Serve });
    eventually("both copies", || store.counts().lacking == 0);
    let value = |node: &Fake| node.state().values.get(key.as_bytes()).cloned();
    assert!(value(&nodes[first]).is_some() && value(&nodes[first]) == value(&nodes[second]));
    assert_eq!(read(&mut *lane, 3), Ok(page(1)));
}

/// Polls until late writes of these slots have settled, each of them once.
fn settle(lane: &mut dyn Lane, late: &[u32]) {
    let mut settled = Vec::new();
    eventually("late writes", || {
        lane.poll(Instant::now(), &mut |done| panic!("{done:?} was answered"));
        lane.settled(&mut |slot| settled.push(slot.0));
        settled.len() >= late.len()
    });
    settled.sort_unstable();
    assert_eq!(settled, late);
}

#[test]
fn late_writes_of_a_silent_node_leave_room_in_the_lane_for_the_pages_of_the_others() {
    let nodes = [Fake::start(), Fake::start()];
    let store = open(&url(&nodes, "size=256MiB"));
    let silent = store.member(Slot(0));
    // Of 64 extents, the other node has some.
    let other = (0..store.slots()).find(|slot| store.member(Slot(*slot)) != silent).unwrap();
    let mut lane = store.lane(256).unwrap();
    let node = &nodes[silent as usize];
    node.plan(|words, _| if is(words, "SET") { Act::Hold(0) } else { Act::Serve });
    let fill = |by: u32| -> Vec<_> { (0..128).map(|slot| (Slot(slot), Some(page(slot + by)))).collect() };
    let late = all(&mut *lane, &fill(0));
    assert!(late.iter().all(|(result, _)| *result == Err(Fault::Timeout)));
    let again = all(&mut *lane, &fill(500));
    assert_eq!(write(&mut *lane, other, 1), Ok(()));
    assert_eq!(read(&mut *lane, other), Ok(page(1)));
    let refused = Err(Fault::Io(libc::ETIMEDOUT));
    assert!(again.iter().all(|(result, _)| *result == refused));
    assert_eq!(lane.write(0, Slot(0), &page(2)), Progress::Done(refused));
    // The node answers.
    node.holds.store(false, Ordering::Relaxed);
    settle(&mut *lane, &(0..128).collect::<Vec<_>>());
    assert!(all(&mut *lane, &fill(900)).iter().all(|(result, _)| result.is_ok()));
    let reads: Vec<_> = (0..128).map(|slot| (Slot(slot), None)).collect();
    for (slot, (result, content)) in all(&mut *lane, &reads).into_iter().enumerate() {
        assert_eq!((result, content), (Ok(()), page(slot as u32 + 900)));
    }
}

#[test]
fn writes_of_a_node_with_a_late_one_take_half_of_the_lane_and_those_of_all_three_quarters() {
    let nodes = [(); 3].map(|()| Fake::start());
    let store = open(&url(&nodes, "size=256MiB"));
    let on = &store;
    let of = |member| (0..store.slots()).filter(move |slot| on.member(Slot(*slot)) == member).take(16);
    let of: Vec<Vec<u32>> = (0..3).map(|member| of(member).collect()).collect();
    let mut lane = store.lane(32).unwrap();
    for node in &nodes[..2] {
        node.plan(|words, _| if is(words, "SET") { Act::Hold(0) } else { Act::Serve });
    }
    assert_eq!(write(&mut *lane, of[0][0], 1), Err(Fault::Timeout));
    let refused = Progress::Done(Err(Fault::Io(libc::ETIMEDOUT)));
    let put = |lane: &mut dyn Lane, slot| lane.write(slot, Slot(slot), &page(2));
    // One of the sixteen is late.
    assert!(of[0][1..].iter().all(|slot| put(&mut *lane, *slot) == Progress::Queued));
    assert_eq!(put(&mut *lane, of[0][0]), refused);
    assert!(of[1][..8].iter().all(|slot| put(&mut *lane, *slot) == Progress::Queued));
    // The rest is for reads. These writes may still be answered in time, so the caller waits.
    assert_eq!(put(&mut *lane, of[1][8]), Progress::Full);
    assert_eq!(put(&mut *lane, of[2][0]), Progress::Full);
    lane.submit();
    let mut told = 0;
    eventually("timeouts", || {
        lane.poll(Instant::now(), &mut |done| {
            assert_eq!(done.result, Err(Fault::Timeout));
            told += 1;
        });
        told == 23
    });
    assert_eq!(put(&mut *lane, of[2][0]), refused);
    assert_eq!(read(&mut *lane, of[2][0]), Ok([0; PAGE_SIZE]));
    nodes.iter().for_each(|node| node.holds.store(false, Ordering::Relaxed));
    let mut late: Vec<u32> = of[0].iter().chain(&of[1][..8]).copied().collect();
    late.sort_unstable();
    settle(&mut *lane, &late);
    for slot in of.into_iter().flatten() {
        assert_eq!(write(&mut *lane, slot, 3), Ok(()));
    }
}

#[test]
fn a_write_is_taken_while_one_of_its_two_nodes_answers_however_many_are_late_at_the_other() {
    let nodes = [(); 3].map(|()| Fake::start());
    let store = open(&url(&nodes, "size=256MiB&copies=2"));
    let mut lane = store.lane(32).unwrap();
    let has = |slot: &u32, node: usize| nodes[node].has(&store.key(Slot(*slot)));
    // A page of each extent shows its nodes.
    let firsts: Vec<u32> = (0..store.slots()).step_by(1024).collect();
    let writes: Vec<_> = firsts.iter().map(|slot| (Slot(*slot), Some(page(1)))).collect();
    assert!(all(&mut *lane, &writes).iter().all(|(result, _)| result.is_ok()));
    eventually("both copies", || firsts.iter().all(|slot| (0..3).filter(|at| has(slot, *at)).count() == 2));
    let away = firsts.iter().copied().find(|slot| !has(slot, 2)).unwrap();
    let half = firsts.iter().copied().find(|slot| has(slot, 2)).unwrap();
    for node in &nodes[..2] {
        node.plan(|words, _| match words {
            words if is(words, "SET") || is(words, "UNLINK") => Act::Say("LOADING it reads"),
            _ => Act::Serve,
        });
    }
    let are_away = || (0..2).all(|member| store.state(member) == State::Unreachable);
    assert_eq!(write(&mut *lane, away, 2), Err(Fault::Timeout));
    eventually("two nodes are away", are_away);
    let writes: Vec<_> = (1..9).map(|by| (Slot(away + by), Some(page(2)))).collect();
    assert!(all(&mut *lane, &writes).iter().all(|(result, _)| *result == Err(Fault::Timeout)));
    let refused = Progress::Done(Err(Fault::Io(libc::ETIMEDOUT)));
    assert_eq!(lane.write(0, Slot(away + 9), &page(2)), refused);
    assert_eq!(write(&mut *lane, half, 2), Ok(()));
    nodes.iter().for_each(|node| node.plan(|_, _| Act::Serve));
    eventually("all writes are taken", || write(&mut *lane, away + 9, 3) == Ok(()));
}

#[test]
fn a_late_write_that_one_of_its_two_nodes_keeps_ends_though_the_other_one_never_answers() {
    let nodes = [Fake::start(), Fake::start()];
    let store = open(&url(&nodes, "size=16MiB&copies=2"));
    let mut lane = store.lane(16).unwrap();
    for node in &nodes {
        node.plan(|words, _| match words {
            words if is(words, "SET") || is(words, "UNLINK") => Act::Say("LOADING it reads"),
            _ => Act::Serve,
        });
    }
    assert_eq!(write(&mut *lane, 9, 1), Err(Fault::Timeout));
    eventually("both are away", || (0..2).all(|member| store.state(member) == State::Unreachable));
    // These wait for both nodes.
    let writes: Vec<_> = (0..4).map(|slot| (Slot(slot), Some(page(slot)))).collect();
    assert!(all(&mut *lane, &writes).iter().all(|(result, _)| *result == Err(Fault::Timeout)));
    nodes[0].plan(|_, _| Act::Serve);
    let mut settled = Vec::new();
    eventually("late writes", || {
        lane.poll(Instant::now(), &mut |done| panic!("{done:?} was answered"));
        lane.settled(&mut |slot| settled.push(slot.0));
        (0..4).all(|slot| settled.contains(&slot))
    });
    assert!(all(&mut *lane, &writes).iter().all(|(result, _)| result.is_ok()));
}

/// Has a node call itself a part of a cluster. `of` has all hash slots of that.
fn in_a_cluster(node: &Fake, of: &Fake, does: impl Fn(&Words) -> Option<Act> + Send + 'static) {
    let port = of.port;
    let slots = format!("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:{port}\r\n");
    let about = format!("run_id:{}\r\ncluster_enabled:1\r\n", node.state().run);
    node.plan(move |words, _| match does(words) {
        Some(act) => act,
        None if is(words, "INFO") => Act::Answer(about.clone().into_bytes()),
        None if is(words, "CLUSTER") => Act::Send(slots.clone().into_bytes()),
        None => Act::Serve,
    });
}

#[test]
fn a_node_that_joins_a_cluster_later_is_checked_before_a_page_goes_there() {
    for (is_nameless, words) in [(true, "does not name its process"), (false, "allkeys-lru): set it to")] {
        let nodes = [Fake::start(), Fake::start()];
        let joins = nodes[1].name();
        // The first node sends each page on to the second, which nobody knows at the opening.
        let elsewhere = format!("-ASK 1 {joins}\r\n");
        in_a_cluster(&nodes[0], &nodes[0], move |words| {
            let is_page = is(words, "SET") || is(words, "GET");
            is_page.then(|| Act::Send(elsewhere.clone().into_bytes()))
        });
        in_a_cluster(&nodes[1], &nodes[0], move |words| {
            (is_nameless && is(words, "INFO")).then(|| Act::Answer(b"cluster_enabled:1\r\n".to_vec()))
        });
        let policy = |policy: &str| {
            nodes[1].state().settings.extend(
                [("maxmemory", "1000000000"), ("maxmemory-policy", policy)]
                    .map(|(key, value)| (key, value.to_owned())),
            );
        };
        policy(if is_nameless { "noeviction" } else { "allkeys-lru" });
        let store = open(&url(&nodes[..1], "size=1MiB"));
        let mut lane = store.lane(8).unwrap();
        assert_eq!(write(&mut *lane, 3, 1), Err(Fault::Timeout), "{words}");
        let conditions = || store.report().unwrap().conditions();
        eventually("the node is away", || {
            conditions().get(1).is_some_and(|node| node.state == State::Unreachable)
        });
        let condition = conditions().remove(1);
        assert!(condition.part == joins && condition.why.unwrap().contains(words), "{words}");
        assert!(nodes[1].state().values.is_empty(), "{words}");
        // It is made fit.
        policy("noeviction");
        in_a_cluster(&nodes[1], &nodes[0], |_| None);
        eventually("the node is taken", || write(&mut *lane, 4, 2) == Ok(()));
        assert!(nodes[1].has(&store.key(Slot(4))));
        assert_eq!(read(&mut *lane, 4), Ok(page(2)));
    }
}
