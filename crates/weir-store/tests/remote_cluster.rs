//! Pages on a cluster of real engines that moves its hash slots meanwhile.

mod engine;

use engine::{Engine, PATIENCE, Stop, all, cluster, open, page, read, url, write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use weir_core::Slot;
use weir_store::{Fault, OpenErrorKind, RemoteStore, State, Store, StoreUrl, conformance};

/// The hash slot of a key, as an engine says.
fn hash_of(engine: &Engine, key: &str) -> String {
    match engine.call(&["CLUSTER", "KEYSLOT", key]) {
        Some(redis::Value::Int(hash)) => hash.to_string(),
        other => panic!("{other:?}"),
    }
}

/// Moves a hash slot with its keys, a few at a time, as `redis-cli --cluster reshard` does. Once
/// the first keys have gone, it calls `pause`.
fn migrate(engines: &[Engine], hash: &str, from: usize, to: usize, pause: impl FnOnce()) {
    let id = |at: usize| engines[at].text(&["CLUSTER", "MYID"]);
    let (from_id, to_id, port) = (id(from), id(to), engines[to].port.to_string());
    assert_eq!(engines[to].text(&["CLUSTER", "SETSLOT", hash, "IMPORTING", &from_id]), "OK");
    assert_eq!(engines[from].text(&["CLUSTER", "SETSLOT", hash, "MIGRATING", &to_id]), "OK");
    let mut pause = Some(pause);
    loop {
        let keys = match engines[from].call(&["CLUSTER", "GETKEYSINSLOT", hash, "8"]) {
            Some(redis::Value::Array(keys)) => keys,
            other => panic!("{other:?}"),
        };
        if keys.is_empty() {
            break;
        }
        let mut words = ["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"].map(str::to_owned).to_vec();
        words.extend(keys.into_iter().map(|key| redis::from_redis_value::<String>(key).unwrap()));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        assert_eq!(engines[from].text(&words), "OK");
        pause.take().into_iter().for_each(|pause| pause());
    }
    for at in [to, from] {
        assert_eq!(engines[at].text(&["CLUSTER", "SETSLOT", hash, "NODE", &to_id]), "OK");
    }
}

/// Random reads and writes, each checked, until `stop`.
fn load(store: &RemoteStore, slots: &[Slot], stop: &AtomicBool, done: &AtomicU64) -> Vec<u32> {
    let mut lane = store.lane(32).unwrap();
    let mut versions = vec![0; slots.len()];
    let mut state: u64 = 7;
    while !stop.load(Ordering::Relaxed) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let first = (state >> 33) as usize % (slots.len() - 16);
        let operations: Vec<_> = (first..first + 16)
            .map(|at| {
                let write = state >> (at - first) & 1 == 0;
                versions[at] += u32::from(write);
                (slots[at], write.then(|| page(slots[at].0.wrapping_add(versions[at]))))
            })
            .collect();
        for ((slot, write), (result, content)) in operations.iter().zip(all(&mut *lane, &operations)) {
            let version = versions[first + slots[first..].iter().position(|other| other == slot).unwrap()];
            assert_eq!(result, Ok(()), "{slot:?} {}", write.is_some());
            assert!(write.is_some() || content == page(slot.0.wrapping_add(version)), "{slot:?}");
        }
        done.fetch_add(16, Ordering::Relaxed);
    }
    versions
}

/// At full scale every hash slot with pages moves ten times, once to each other node in turn.
#[test]
fn hash_slots_move_under_load_and_no_page_is_lost_or_refused() {
    let name = "hash_slots_move_under_load_and_no_page_is_lost_or_refused";
    // The last engine has nothing at first, and joins after the store was opened.
    let Some(mut engines) = cluster(3, 2, name) else { return };
    let full = std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full");
    let store = open(&url(&engines[..1], "size=64MiB"));
    assert_eq!(store.report().unwrap().conditions().len(), 2, "nodes with hash slots");
    let slots: Vec<Slot> = (0..store.slots()).step_by(16).map(Slot).collect();
    let mut lane = store.lane(32).unwrap();
    let fill: Vec<_> = slots.iter().map(|slot| (*slot, Some(page(slot.0)))).collect();
    assert!(all(&mut *lane, &fill).iter().all(|(result, _)| result.is_ok()));
    let mut hashes: Vec<String> = slots.iter().map(|slot| hash_of(&engines[0], &store.key(*slot))).collect();
    // One for each extent, but for an accident of the store's number: CRC16 is linear, so one pair
    // of equal hash slots brings more. In one store of a thousand there are ten.
    hashes.sort();
    hashes.dedup();
    assert!((8..=16).contains(&hashes.len()), "{hashes:?}");

    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let versions = std::thread::scope(|scope| {
        let stopping = Stop(&stop);
        let worker = scope.spawn(|| load(&store, &slots, &stop, &done));
        for turn in 0..if full { 10 } else { 1 } {
            for hash in hashes.iter().step_by(2) {
                let owner = |engine: &Engine| {
                    !engine.call(&["CLUSTER", "COUNTKEYSINSLOT", hash]).eq(&Some(redis::Value::Int(0)))
                };
                let from = engines.iter().position(owner).unwrap();
                let to = if turn == 0 { 2 } else { (from + 1) % 3 };
                // The load goes on while a hash slot moves, and between two moves.
                let wait = || {
                    let (begun, before) = (Instant::now(), done.load(Ordering::Relaxed));
                    while done.load(Ordering::Relaxed) < before + 64 && !worker.is_finished() {
                        assert!(begun.elapsed() < PATIENCE, "nothing is read or written any more");
                        std::thread::yield_now();
                    }
                };
                migrate(&engines, hash, from, to, wait);
                wait();
            }
        }
        drop(stopping);
        worker.join().unwrap()
    });
    let reads: Vec<_> = slots.iter().map(|slot| (*slot, None)).collect();
    for ((slot, version), (result, content)) in slots.iter().zip(versions).zip(all(&mut *lane, &reads)) {
        assert_eq!(result, Ok(()), "{slot:?}");
        assert!(content == page(slot.0.wrapping_add(version)), "{slot:?}");
    }
    let counts = store.counts();
    println!(
        "{} hash slots moved by turns, {} operations, 0 refused, 0 wrong: {counts:?}",
        hashes.len() / 2,
        done.load(Ordering::Relaxed)
    );
    let moves = hashes.len().div_ceil(2) * if full { 10 } else { 1 };
    println!("figure: cluster_under_load moved_hash_slots {moves} higher");
    println!("figure: cluster_under_load operations {} higher", done.load(Ordering::Relaxed));
    println!("figure: cluster_under_load redirected {} higher", counts.redirected);
    println!("figure: cluster_under_load wrong_or_refused 0 lower 0");
    assert!(counts.redirected > 0);
    assert_eq!((counts.forged, counts.lost), (0, 0));
    assert_eq!(store.report().unwrap().conditions().len(), 3, "the node that joined");

    // A master that dies takes its own pages with it, and no others.
    let few: Vec<Slot> = slots.iter().copied().step_by(16).collect();
    let is_there = |slot: &Slot| {
        let key = store.key(*slot);
        engines[2].call(&["EXISTS", &key]) == Some(redis::Value::Int(1))
    };
    let there: Vec<bool> = few.iter().map(is_there).collect();
    assert!(there.contains(&true) && there.contains(&false));
    engines[2].kill();
    let reads: Vec<_> = few.iter().map(|slot| (*slot, None)).collect();
    for ((slot, dead), (result, _)) in few.iter().zip(there).zip(all(&mut *lane, &reads)) {
        assert_eq!(result, if dead { Err(Fault::Timeout) } else { Ok(()) }, "{slot:?}");
    }
    assert_eq!(store.state(0), State::Unreachable);
    drop(lane);
    drop(store);
    for engine in &engines[..2] {
        assert_eq!(engine.keys(), 0, "keys are left behind");
    }
}

/// Whether a replica has all that its master has.
fn is_followed(master: &Engine, replica: &Engine) -> bool {
    let about = |engine: &Engine| engine.text(&["INFO", "replication"]);
    let field =
        |about: &str, name: &str| about.lines().find_map(|line| line.strip_prefix(name).map(str::to_owned));
    let (first, last) = (about(master), about(replica));
    last.contains("master_link_status:up")
        && field(&first, "master_repl_offset:") == field(&last, "slave_repl_offset:")
}

#[test]
fn a_replica_takes_the_place_of_a_master_that_dies() {
    let name = "a_replica_takes_the_place_of_a_master_that_dies";
    let Some(mut engines) = cluster(4, 3, name) else { return };
    let master = engines[0].text(&["CLUSTER", "MYID"]);
    assert_eq!(engines[3].text(&["CLUSTER", "REPLICATE", &master]), "OK");
    let store = open(&url(&engines, "size=64MiB"));
    let mut lane = store.lane(32).unwrap();
    let slots: Vec<Slot> = (0..store.slots()).step_by(128).map(Slot).collect();
    let fill: Vec<_> = slots.iter().map(|slot| (*slot, Some(page(slot.0)))).collect();
    assert!(all(&mut *lane, &fill).iter().all(|(result, _)| result.is_ok()));
    let begun = Instant::now();
    while !is_followed(&engines[0], &engines[3]) {
        assert!(begun.elapsed() < PATIENCE, "the replica does not follow");
        std::thread::sleep(Duration::from_millis(50));
    }
    engines[0].kill();
    let reads: Vec<_> = slots.iter().map(|slot| (*slot, None)).collect();
    let begun = Instant::now();
    loop {
        let results = all(&mut *lane, &reads);
        for (slot, (result, content)) in slots.iter().zip(&results) {
            assert!(result.is_err() || *content == page(slot.0), "{slot:?}");
            assert!([Ok(()), Err(Fault::Timeout)].contains(result), "{slot:?}: {result:?}");
        }
        if results.iter().all(|(result, _)| result.is_ok()) && store.state(0) == State::Online {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{:?}", store.report().unwrap().conditions());
    }
    assert_eq!(write(&mut *lane, 0, 9), Ok(()));
    assert_eq!(read(&mut *lane, 0), Ok(page(9)));
}

#[test]
fn a_cluster_keeps_the_contract_of_a_store_and_is_left_empty() {
    let name = "a_cluster_keeps_the_contract_of_a_store_and_is_left_empty";
    let Some(engines) = cluster(3, 3, name) else { return };
    for claim in [
        conformance::a_lane_has_room_for_its_depth as fn(&dyn Store),
        conformance::a_slot_outside_the_store_is_a_fault,
        conformance::threads_with_lanes_of_their_own_do_not_disturb_one_another,
        |store| conformance::any_interleaving_agrees_with_the_model(store, file!()),
    ] {
        let store = open(&url(&engines, "size=16MiB"));
        claim(&store);
        assert!(engines.iter().map(Engine::keys).sum::<i64>() > 0);
        drop(store);
        assert_eq!(engines.iter().map(Engine::keys).sum::<i64>(), 0, "keys are left behind");
    }
    // Changed, replayed and swapped values are errors here too.
    let store = open(&url(&engines, "size=64MiB"));
    let mut lane = store.lane(8).unwrap();
    assert_eq!(write(&mut *lane, 1, 1), Ok(()));
    let owner = engines.iter().find(|engine| engine.keys() > 0).unwrap();
    let key = store.key(Slot(1));
    let old = owner.bytes(&key);
    assert_eq!(write(&mut *lane, 1, 2), Ok(()));
    owner.put(&key, &old);
    assert_eq!(read(&mut *lane, 1), Err(Fault::Corrupt));
    assert_eq!(store.counts().forged, 1);
}

#[test]
fn two_copies_on_a_cluster_and_a_cluster_that_is_not_whole_are_refused() {
    let name = "two_copies_on_a_cluster_and_a_cluster_that_is_not_whole_are_refused";
    let Some(engines) = cluster(2, 2, name) else { return };
    let refused = |url: &str| match url.parse() {
        Ok(StoreUrl::Remote(url)) => RemoteStore::open(&url).map(drop).unwrap_err(),
        other => panic!("{other:?}"),
    };
    let error = refused(&url(&engines, "size=1MiB&copies=2"));
    assert!(error.kind == OpenErrorKind::Layout && error.to_string().contains("leave copies out"), "{error}");
    engines[0].call(&["CLUSTER", "DELSLOTSRANGE", "0", "10"]).unwrap();
    let error = refused(&url(&engines, "size=1MiB"));
    assert!(error.to_string().contains("hash slots without a node"), "{error}");
}

#[test]
fn pages_that_moved_while_nobody_used_them_are_deleted_at_the_end_too() {
    let name = "pages_that_moved_while_nobody_used_them_are_deleted_at_the_end_too";
    let Some(engines) = cluster(3, 2, name) else { return };
    let store = open(&url(&engines, "size=16MiB"));
    let mut lane = store.lane(32).unwrap();
    let slots: Vec<Slot> = (0..store.slots()).step_by(64).map(Slot).collect();
    let fill: Vec<_> = slots.iter().map(|slot| (*slot, Some(page(slot.0)))).collect();
    assert!(all(&mut *lane, &fill).iter().all(|(result, _)| result.is_ok()));
    let mut hashes: Vec<String> = slots.iter().map(|slot| hash_of(&engines[0], &store.key(*slot))).collect();
    hashes.dedup();
    for hash in &hashes {
        let from = usize::from(hash.parse::<u16>().unwrap() >= 8192);
        migrate(&engines, hash, from, 2, || {});
    }
    assert_eq!(engines[2].keys(), slots.len() as i64);
    drop(lane);
    drop(store);
    assert_eq!(engines.iter().map(Engine::keys).sum::<i64>(), 0, "keys are left behind");
}

#[test]
fn a_replica_that_lacks_the_last_writes_never_passes_off_older_pages() {
    let name = "a_replica_that_lacks_the_last_writes_never_passes_off_older_pages";
    let Some(mut engines) = cluster(4, 3, name) else { return };
    let master = engines[0].text(&["CLUSTER", "MYID"]);
    assert_eq!(engines[3].text(&["CLUSTER", "REPLICATE", &master]), "OK");
    let store = open(&url(&engines[..3], "size=64MiB"));
    let mut lane = store.lane(32).unwrap();
    let slots: Vec<Slot> = (0..store.slots()).step_by(64).map(Slot).collect();
    // Of every other page there is no older content.
    let write = |by: u32, step: usize| -> Vec<_> {
        slots.iter().step_by(step).map(|slot| (*slot, Some(page(slot.0.wrapping_add(by))))).collect()
    };
    assert!(all(&mut *lane, &write(0, 2)).iter().all(|(result, _)| result.is_ok()));
    let begun = Instant::now();
    while !is_followed(&engines[0], &engines[3]) {
        assert!(begun.elapsed() < PATIENCE, "the replica does not follow");
        std::thread::sleep(Duration::from_millis(50));
    }
    // From here on the replica gets nothing: the master wants a password that it does not have.
    engines[0].call(&["CONFIG", "SET", "requirepass", engine::PASSWORD]).unwrap();
    let kill = ["CLIENT", "KILL", "TYPE", "replica"];
    engines[0].call_with(engine::PASSWORD, &kill).unwrap();
    assert!(all(&mut *lane, &write(5, 1)).iter().all(|(result, _)| result.is_ok()));
    let hash = |slot: &Slot| hash_of(&engines[1], &store.key(*slot)).parse::<u16>().unwrap();
    let of_master: Vec<bool> = slots.iter().map(|slot| hash(slot) < 16_384 / 3).collect();
    assert!(of_master.contains(&true) && of_master.contains(&false));
    engines[0].kill();
    assert_eq!(engines[3].text(&["CLUSTER", "FAILOVER", "TAKEOVER"]), "OK");
    let reads: Vec<_> = slots.iter().map(|slot| (*slot, None)).collect();
    let begun = Instant::now();
    loop {
        let results = all(&mut *lane, &reads);
        for ((slot, of_master), (result, content)) in slots.iter().zip(&of_master).zip(&results) {
            match result {
                Ok(()) => assert!(!of_master && *content == page(slot.0 + 5), "{slot:?}"),
                Err(Fault::Timeout) => {}
                Err(fault) => {
                    assert!(*of_master && [Fault::Lost, Fault::Corrupt].contains(fault), "{slot:?}");
                }
            }
        }
        if results.iter().all(|(result, _)| *result != Err(Fault::Timeout)) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{:?}", store.report().unwrap().conditions());
    }
    let counts = store.counts();
    println!("figure: failover older_pages_found {} higher 1", counts.forged);
    println!("figure: failover missing_pages_found {} higher 1", counts.lost);
    println!("figure: failover older_pages_believed 0 lower 0");
    assert!(counts.forged > 0 && counts.lost > 0);
    // All of them can be written again.
    assert!(all(&mut *lane, &write(9, 1)).iter().all(|(result, _)| result.is_ok()));
    for (slot, (result, content)) in slots.iter().zip(all(&mut *lane, &reads)) {
        assert_eq!((result, content), (Ok(()), page(slot.0 + 9)), "{slot:?}");
    }
}

#[test]
fn a_node_that_throws_pages_away_and_joins_later_is_named_and_takes_no_page_until_it_is_fit() {
    let name = "a_node_that_throws_pages_away_and_joins_later_is_named_and_takes_no_page_until_it_is_fit";
    // The last two engines have nothing at first, and join after the store was opened.
    let Some(engines) = cluster(4, 2, name) else { return };
    let (fit, unfit) = (2, 3);
    for engine in &engines[2..] {
        assert_eq!(engine.text(&["CONFIG", "SET", "maxmemory", "1gb"]), "OK");
    }
    let policy = |policy| engines[unfit].text(&["CONFIG", "SET", "maxmemory-policy", policy]);
    assert_eq!(policy("allkeys-lru"), "OK");
    let store = open(&url(&engines[..1], "size=64MiB"));
    let mut lane = store.lane(32).unwrap();
    // In each extent one slot with a page, and beside it one without.
    let slots: Vec<u32> = (0..store.slots()).step_by(1024).collect();
    for &slot in &slots {
        assert_eq!(write(&mut *lane, slot, slot), Ok(()));
    }
    let hash = |slot: u32| hash_of(&engines[0], &store.key(Slot(slot)));
    let moves = |slot: u32, to: usize| {
        let from = usize::from(hash(slot).parse::<u16>().unwrap() >= 8192);
        migrate(&engines, &hash(slot), from, to, || {});
    };
    let other = slots.iter().copied().find(|slot| hash(*slot) != hash(slots[0])).unwrap();
    let (good, bad) = (slots[0], other);
    moves(good, fit);
    moves(bad, unfit);
    let condition = |at: usize| {
        let name = engines[at].name();
        store.report().unwrap().conditions().into_iter().find(|condition| condition.part == name)
    };
    assert_eq!(read(&mut *lane, good), Ok(page(good)));
    assert_eq!(write(&mut *lane, good + 1, 7), Ok(()));
    assert!(condition(fit).is_some_and(|condition| condition.state == State::Online));

    let keys = engines[unfit].keys();
    let old = engines[unfit].bytes(&store.key(Slot(bad)));
    for slot in [bad, bad + 1] {
        assert_eq!(write(&mut *lane, slot, 9), Err(Fault::Timeout), "{slot}");
    }
    let begun = Instant::now();
    let named = loop {
        match condition(unfit) {
            Some(named) if named.state == State::Unreachable => break named,
            other => assert!(begun.elapsed() < PATIENCE, "{other:?}"),
        }
    };
    let why = named.why.unwrap();
    assert!(why.contains("allkeys-lru): set it to noeviction"), "{why}");
    assert_eq!(store.state(0), State::Unreachable, "pages wait");
    assert_eq!(engines[unfit].keys(), keys, "a page was written there");
    assert_eq!(engines[unfit].bytes(&store.key(Slot(bad))), old, "a page was written there");

    // A write that ended with a timeout may land later, unless its lane is gone.
    drop(lane);
    let mut lane = store.lane(32).unwrap();
    assert_eq!(policy("noeviction"), "OK");
    let begun = Instant::now();
    while store.state(0) != State::Online {
        assert!(begun.elapsed() < PATIENCE, "{:?}", store.report().unwrap().conditions());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(read(&mut *lane, bad), Ok(page(bad)));
    assert_eq!(write(&mut *lane, bad + 1, 8), Ok(()));
    assert_eq!(engines[unfit].keys(), keys + 1);
    drop(lane);
    drop(store);
    assert_eq!(engines.iter().map(Engine::keys).sum::<i64>(), 0, "keys are left behind");
}
