//! Pages on real engines that the tests start, on the loopback interface.

mod engine;

use engine::{Engine, PASSWORD, PATIENCE, all, engines, open, page, read, url, write};
use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, Slot};
use weir_store::{Fault, OpenErrorKind, Progress, RemoteStore, State, Store, StoreUrl, conformance};

#[test]
fn one_node_and_three_with_two_copies_keep_the_contract_of_a_store() {
    let name = "one_node_and_three_with_two_copies_keep_the_contract_of_a_store";
    let claims: [fn(&dyn Store); 9] = [
        conformance::a_lane_has_room_for_its_depth,
        conformance::a_lane_may_be_dropped_with_operations_in_flight,
        conformance::a_lane_may_move_to_another_thread,
        conformance::a_run_is_one_operation_and_comes_back_in_order,
        conformance::a_slot_outside_the_store_is_a_fault,
        conformance::pages_written_past_the_caches_are_there_once_settled,
        conformance::threads_with_lanes_of_their_own_do_not_disturb_one_another,
        conformance::waiting_on_the_wake_fd_finds_every_completion,
        |store| conformance::any_interleaving_agrees_with_the_model(store, file!()),
    ];
    for (count, options) in [(1, "size=1MiB"), (3, "size=16MiB&copies=2")] {
        let Some(engines) = engines(count, name) else { return };
        for claim in claims {
            let store = open(&url(&engines, options));
            claim(&store);
            let kept: i64 = engines.iter().map(Engine::keys).sum();
            assert!(kept > 0);
            drop(store);
            let left: i64 = engines.iter().map(Engine::keys).sum();
            assert_eq!(left, 0, "keys are left behind");
        }
    }
}

#[test]
fn what_a_node_changes_replays_swaps_or_loses_is_an_error_and_counted() {
    let name = "what_a_node_changes_replays_swaps_or_loses_is_an_error_and_counted";
    let Some(engines) = engines(1, name) else { return };
    let engine = &engines[0];
    let store = open(&url(&engines, "size=1MiB"));
    let error = store.lane(2000).err().unwrap().to_string();
    assert!(error.contains("a lane of 2000 operations; at most 1024 fit"), "{error}");
    let mut lane = store.lane(8).unwrap();
    let key = |slot: u32| store.key(Slot(slot));
    for slot in 0..8 {
        assert_eq!(write(&mut *lane, slot, slot), Ok(()));
    }
    // Changed.
    let mut changed = engine.bytes(&key(0));
    changed[100] ^= 1;
    engine.put(&key(0), &changed);
    assert_eq!(read(&mut *lane, 0), Err(Fault::Corrupt));
    // Replayed.
    let old = engine.bytes(&key(1));
    assert_eq!(write(&mut *lane, 1, 100), Ok(()));
    let new = engine.bytes(&key(1));
    engine.put(&key(1), &old);
    assert_eq!(read(&mut *lane, 1), Err(Fault::Corrupt));
    engine.put(&key(1), &new);
    assert_eq!(read(&mut *lane, 1), Ok(page(100)), "it is back");
    // Swapped.
    let (two, three) = (engine.bytes(&key(2)), engine.bytes(&key(3)));
    engine.put(&key(2), &three);
    engine.put(&key(3), &two);
    assert_eq!(read(&mut *lane, 2), Err(Fault::Corrupt));
    assert_eq!(read(&mut *lane, 3), Err(Fault::Corrupt));
    // Lost, and of another kind.
    engine.call(&["DEL", &key(4)]);
    assert_eq!(read(&mut *lane, 4), Err(Fault::Lost));
    engine.call(&["DEL", &key(5)]);
    engine.call(&["LPUSH", &key(5), "x"]);
    assert!(read(&mut *lane, 5).is_err());
    assert_eq!(read(&mut *lane, 6), Ok(page(6)), "no other page");
    let counts = store.counts();
    assert_eq!((counts.forged, counts.lost), (4, 1));
    // Nothing is in the clear.
    let sealed = engine.bytes(&key(6));
    assert!(!sealed.windows(8).any(|window| window == &page(6)[..8]));
}

#[test]
fn a_node_that_dies_costs_nothing_with_two_copies_and_its_own_pages_with_one() {
    let name = "a_node_that_dies_costs_nothing_with_two_copies_and_its_own_pages_with_one";
    for copies in [2, 1] {
        let Some(mut engines) = engines(3, name) else { return };
        let store = open(&url(&engines, &format!("size=64MiB&copies={copies}")));
        let mut lane = store.lane(32).unwrap();
        // Every extent of slots, and so every node.
        let slots: Vec<Slot> = (0..store.slots()).step_by(64).map(Slot).collect();
        let writes = |by: u32| -> Vec<_> {
            slots.iter().map(|slot| (*slot, Some(page(slot.0.wrapping_add(by))))).collect()
        };
        let reads: Vec<_> = slots.iter().map(|slot| (*slot, None)).collect();
        assert!(all(&mut *lane, &writes(0)).iter().all(|(result, _)| result.is_ok()));
        engines[1].kill();
        // With two copies its pages are served, and new ones go where both can be kept.
        let away = if copies == 2 { State::Draining } else { State::Unreachable };
        let begun = Instant::now();
        // On a busy machine the other node may serve all these reads before the thread of the dead
        // node has noticed anything.
        loop {
            for (slot, (result, content)) in slots.iter().zip(all(&mut *lane, &reads)) {
                if copies == 2 || store.member(*slot) != 1 {
                    assert_eq!((result, content), (Ok(()), page(slot.0)), "{slot:?}");
                } else {
                    assert_eq!(result, Err(Fault::Timeout), "{slot:?}");
                }
            }
            if store.state(1) == away {
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "nobody notices: {:?}", store.report().unwrap().conditions());
        }
        assert_eq!(store.report().unwrap().conditions()[1].state, State::Unreachable);
        let report = store.report().unwrap().conditions();
        assert!(report[1].why.is_some() && report[0].why.is_none(), "{report:?}");
        if copies == 1 {
            continue;
        }
        // Written meanwhile, on the node that is left; the other comes back empty.
        assert!(all(&mut *lane, &writes(7)).iter().all(|(result, _)| result.is_ok()));
        assert!(store.counts().degraded > 0);
        engines[1].restart();
        let begun = Instant::now();
        while store.state(1) != State::Online {
            assert!(
                begun.elapsed() < PATIENCE,
                "nobody looks for a node that is away: {:?}",
                store.report().unwrap().conditions()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        for (slot, (result, content)) in slots.iter().zip(all(&mut *lane, &reads)) {
            assert_eq!((result, content), (Ok(()), page(slot.0.wrapping_add(7))), "{slot:?}");
        }
    }
}

#[test]
fn a_node_that_stands_still_has_its_pages_wait_and_loses_none() {
    let name = "a_node_that_stands_still_has_its_pages_wait_and_loses_none";
    let Some(engines) = engines(1, name) else { return };
    let store = open(&url(&engines, "size=1MiB"));
    let mut lane = store.lane(8).unwrap();
    for slot in 0..4 {
        assert_eq!(write(&mut *lane, slot, slot), Ok(()));
    }
    engines[0].signal(Signal::STOP);
    let begun = Instant::now();
    assert_eq!(read(&mut *lane, 0), Err(Fault::Timeout));
    assert_eq!(write(&mut *lane, 1, 50), Err(Fault::Timeout));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    lane.settled(&mut |slot| panic!("{slot:?} may still be written"));
    engines[0].signal(Signal::CONT);
    let begun = Instant::now();
    let mut settled = Vec::new();
    while settled.is_empty() {
        lane.poll(Instant::now(), &mut |done| panic!("{done:?} was answered"));
        lane.settled(&mut |slot| settled.push(slot));
        assert!(begun.elapsed() < PATIENCE, "the write never settles");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(settled, [Slot(1)]);
    assert_eq!(read(&mut *lane, 0), Ok(page(0)));
    assert_eq!(write(&mut *lane, 1, 51), Ok(()));
    assert_eq!(read(&mut *lane, 1), Ok(page(51)));
}

/// A proxy in front of an engine. While it `holds`, what clients send on connections that are open
/// is kept, and passed on when it lets go. With `holds_answers` the answers are kept instead.
struct Proxy {
    port: u16,
    /// The port of the engine that connections which come lead to.
    engine: Arc<AtomicU16>,
    holds: Arc<AtomicBool>,
    holds_answers: Arc<AtomicBool>,
}

impl Proxy {
    fn start(engine: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let engine = Arc::new(AtomicU16::new(engine));
        let [holds, holds_answers] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let proxy = Proxy { port, engine, holds, holds_answers };
        let Proxy { engine, holds, holds_answers, .. } = &proxy;
        let (engine, shared) = (Arc::clone(engine), [holds, holds_answers].map(Arc::clone));
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let engine = engine.load(Ordering::SeqCst);
                let (Ok(client), Ok(server)) = (client, TcpStream::connect((Ipv4Addr::LOCALHOST, engine)))
                else {
                    return;
                };
                // Connections that come while it holds pass.
                let is_held = !shared.iter().any(|holds| holds.load(Ordering::SeqCst));
                let [holds, holds_answers] = shared.clone();
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || pump(from, to, is_held.then_some(&*holds)));
                std::thread::spawn(move || pump(server, client, is_held.then_some(&*holds_answers)));
            }
        });
        proxy
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, holds: Option<&AtomicBool>) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        while holds.is_some_and(|holds| holds.load(Ordering::SeqCst)) {
            std::thread::sleep(Duration::from_millis(5));
        }
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

#[test]
fn a_write_of_a_connection_that_was_given_up_never_lands_on_a_newer_one() {
    let name = "a_write_of_a_connection_that_was_given_up_never_lands_on_a_newer_one";
    let Some(engines) = engines(1, name) else { return };
    let proxy = Proxy::start(engines[0].port);
    let store = open(&format!("redis://127.0.0.1:{}?size=1MiB", proxy.port));
    let begun = Instant::now();
    let mut lane = loop {
        let mut lane = store.lane(8).unwrap();
        assert_eq!(write(&mut *lane, 3, 1), Ok(()));
        proxy.holds.store(true, Ordering::SeqCst);
        match write(&mut *lane, 3, 2) {
            Err(Fault::Timeout) => break lane,
            // This machine stalled, so the lane made another connection, which the proxy lets pass.
            result => assert!(result == Ok(()) && begun.elapsed() < PATIENCE, "{result:?}"),
        }
        proxy.holds.store(false, Ordering::SeqCst);
    };
    // The connection is given up, and the write is done by the next one.
    let begun = Instant::now();
    let mut settled = false;
    while !settled {
        lane.poll(Instant::now(), &mut |done| panic!("{done:?} was answered"));
        lane.settled(&mut |_| settled = true);
        assert!(begun.elapsed() < PATIENCE, "the write never settles");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(write(&mut *lane, 3, 4), Ok(()));
    proxy.holds.store(false, Ordering::SeqCst);
    // As long as an engine takes for a command, many times over.
    for _ in 0..100 {
        assert!(read(&mut *lane, 3) == Ok(page(4)), "an older write has landed");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_answer_of_a_process_whose_place_another_has_taken_does_not_count() {
    let name = "an_answer_of_a_process_whose_place_another_has_taken_does_not_count";
    let Some(engines) = engines(2, name) else { return };
    let proxy = Proxy::start(engines[0].port);
    let store = open(&format!("redis://127.0.0.1:{}?size=1MiB", proxy.port));
    let told = Arc::new(Mutex::new(Vec::new()));
    let list = Arc::clone(&told);
    store.report().unwrap().when_changed(Arc::new(move |condition| {
        list.lock().unwrap().extend(condition.why.clone());
    }));
    let eventually = |what: &str, done: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !done() {
            assert!(begun.elapsed() < PATIENCE, "{what}: {:?}", told.lock().unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let mut lane = store.lane(8).unwrap();
    assert_eq!(write(&mut *lane, 3, 1), Ok(()));
    assert_eq!(read(&mut *lane, 3), Ok(page(1)));
    proxy.holds_answers.store(true, Ordering::SeqCst);
    assert_eq!(lane.write(0, Slot(4), &page(2)), Progress::Queued);
    lane.submit();
    eventually("the write", &|| engines[0].keys() == 2);
    // The thread that reads finds another process. The other thread's answer is under way still.
    proxy.engine.store(engines[1].port, Ordering::SeqCst);
    let clients = engines[0].text(&["CLIENT", "LIST"]);
    let reads = |line: &&str| line.contains(" cmd=get ") || line.contains(" cmd=ping ");
    let reader = clients.lines().find(reads).unwrap_or_else(|| panic!("{clients}"));
    let id = reader.split(' ').next().unwrap().strip_prefix("id=").unwrap();
    engines[0].call(&["CLIENT", "KILL", "ID", id]).unwrap();
    assert_eq!(lane.read(1, Slot(3), &mut [0; PAGE_SIZE]), Progress::Queued);
    lane.submit();
    let has = |words: &str| told.lock().unwrap().iter().any(|why| why.starts_with(words));
    eventually("the other process", &|| has("it is another process, without the "));
    proxy.holds_answers.store(false, Ordering::SeqCst);
    // On a machine that stalls, the thread has given the connection up before the answer came.
    let is_late = || has("it is another process by now") || has("it does not answer in time");
    eventually("the late answer", &is_late);
    drop(lane);
    let mut lane = store.lane(8).unwrap();
    eventually("its return", &|| store.state(0) == State::Online);
    assert_eq!(write(&mut *lane, 5, 3), Ok(()));
    assert_eq!(read(&mut *lane, 5), Ok(page(3)));
    // The page that only the former process has kept is lost.
    assert_eq!(read(&mut *lane, 3), Err(Fault::Lost));
}

#[test]
fn an_engine_that_throws_pages_away_or_has_no_room_or_is_not_there_is_refused() {
    let name = "an_engine_that_throws_pages_away_or_has_no_room_or_is_not_there_is_refused";
    let refused = |url: &str| match url.parse() {
        Ok(StoreUrl::Remote(url)) => RemoteStore::open(&url).map(drop).unwrap_err(),
        other => panic!("{other:?}"),
    };
    let Some(evicts) = Engine::start(&["--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]) else {
        return println!("\nskipped: {name}: redis-tools is not installed");
    };
    let error = refused(&url(std::slice::from_ref(&evicts), "size=1MiB"));
    assert!(error.to_string().contains("allkeys-lru): set it to noeviction"), "{error}");
    let small = Engine::start(&["--maxmemory", "64mb", "--maxmemory-policy", "noeviction"]).unwrap();
    let error = refused(&url(std::slice::from_ref(&small), "size=256MiB"));
    assert!(matches!(error.kind, OpenErrorKind::NoMemory { had: 0x400_0000, .. }), "{error}");
    open(&url(std::slice::from_ref(&small), "size=16MiB"));
    let secret = Engine::start(&["--requirepass", PASSWORD]).unwrap();
    let error = refused(&url(std::slice::from_ref(&secret), "size=1MiB"));
    let said = error.to_string();
    assert!(said.contains("NOAUTH") && said.ends_with("give password-file=PATH"), "{said}");
    let twice = format!("redis://127.0.0.1:{0},localhost:{0}?size=1MiB&copies=2", small.port);
    let said = refused(&twice).to_string();
    assert!(said.contains("are one process: name each node once"), "{said}");
    let file = secret.directory.join("password");
    std::fs::write(&file, "a-wrong-one\n").unwrap();
    let with_password = format!("size=1MiB&password-file={}", file.display());
    let error = refused(&url(std::slice::from_ref(&secret), &with_password)).to_string();
    assert!(error.contains("refuses the login") && error.ends_with("mend user or password-file"), "{error}");
    assert!(!error.contains("a-wrong-one"), "{error}");
    std::fs::write(&file, format!("{PASSWORD}\n")).unwrap();
    open(&url(std::slice::from_ref(&secret), &with_password));
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let error = refused(&format!("redis://127.0.0.1:{port}?size=1MiB"));
    assert_eq!(error.kind, OpenErrorKind::NoDevice);
    let (node, next) = (format!("node 127.0.0.1:{port} cannot be reached: "), "; start its engine");
    assert!(error.to_string().contains(&node) && error.to_string().ends_with(next), "{error}");
    // A server of another kind.
    let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = server.local_addr().unwrap().port();
    let answers =
        std::thread::spawn(move || server.accept().unwrap().0.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"));
    let error = refused(&format!("redis://127.0.0.1:{port}?size=1MiB")).to_string();
    assert!(error.contains("does not answer as Redis does: "), "{error}");
    answers.join().unwrap().unwrap();
    // One that closes at once.
    let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = server.local_addr().unwrap().port();
    std::thread::spawn(move || server.incoming().for_each(drop));
    let error = refused(&format!("redis://127.0.0.1:{port}?size=1MiB")).to_string();
    assert!(error.ends_with("look at its engine, and at the network"), "{error}");
}

#[test]
fn a_full_engine_fails_the_writes_that_it_refuses_and_keeps_the_others() {
    let name = "a_full_engine_fails_the_writes_that_it_refuses_and_keeps_the_others";
    let flags = ["--maxmemory", "6mb", "--maxmemory-policy", "noeviction"];
    let Some(engine) = Engine::start(&flags) else {
        return println!("\nskipped: {name}: redis-tools is not installed");
    };
    let store = open(&url(std::slice::from_ref(&engine), "size=16MiB&check=off"));
    let mut lane = store.lane(16).unwrap();
    let writes: Vec<_> = (0..store.slots()).map(|slot| (Slot(slot), Some(page(slot)))).collect();
    let written: Vec<bool> = all(&mut *lane, &writes)
        .iter()
        .map(|(result, _)| {
            assert!([Ok(()), Err(Fault::Io(libc::ENOSPC))].contains(result), "{result:?}");
            result.is_ok()
        })
        .collect();
    assert!(written.contains(&true) && written.contains(&false));
    for (slot, _) in written.iter().enumerate().filter(|(_, written)| **written) {
        assert_eq!(read(&mut *lane, slot as u32), Ok(page(slot as u32)));
    }
}

#[test]
fn a_node_that_is_made_a_replica_is_away_until_it_is_a_master_again() {
    let name = "a_node_that_is_made_a_replica_is_away_until_it_is_a_master_again";
    let Some(engines) = engines(1, name) else { return };
    let store = open(&url(&engines, "size=1MiB"));
    let mut lane = store.lane(4).unwrap();
    assert_eq!(write(&mut *lane, 0, 1), Ok(()));
    engines[0].call(&["REPLICAOF", "127.0.0.1", "1"]).unwrap();
    assert_eq!(write(&mut *lane, 0, 2), Err(Fault::Timeout));
    let condition = &store.report().unwrap().conditions()[0];
    assert_eq!(condition.state, State::Unreachable);
    assert!(condition.why.as_ref().is_some_and(|why| why.contains("a read only replica")), "{condition:?}");
    assert_eq!(read(&mut *lane, 0), Ok(page(1)), "reads go on");
    engines[0].call(&["REPLICAOF", "NO", "ONE"]).unwrap();
    let begun = Instant::now();
    let mut settled = false;
    while !settled || store.state(0) != State::Online {
        lane.poll(Instant::now(), &mut |done| panic!("{done:?} was answered"));
        lane.settled(&mut |_| settled = true);
        assert!(begun.elapsed() < PATIENCE, "{:?}", store.report().unwrap().conditions());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(read(&mut *lane, 0), Ok(page(2)));
    assert_eq!(write(&mut *lane, 0, 3), Ok(()));
}

#[test]
fn changes_of_a_node_are_told_once_each() {
    let name = "changes_of_a_node_are_told_once_each";
    let Some(mut engines) = engines(1, name) else { return };
    let store = open(&url(&engines, "size=1MiB"));
    let told = Arc::new(Mutex::new(Vec::new()));
    let list = Arc::clone(&told);
    store
        .report()
        .unwrap()
        .when_changed(Arc::new(move |condition| list.lock().unwrap().push(condition.state)));
    let mut lane = store.lane(4).unwrap();
    assert_eq!(write(&mut *lane, 0, 1), Ok(()));
    engines[0].kill();
    for _ in 0..3 {
        assert_eq!(write(&mut *lane, 1, 1), Err(Fault::Timeout));
    }
    assert_eq!(*told.lock().unwrap(), [State::Unreachable]);
}

#[test]
fn the_command_that_a_closing_store_names_deletes_the_values_that_it_has_left() {
    let name = "the_command_that_a_closing_store_names_deletes_the_values_that_it_has_left";
    let Some(engines) = engines(2, name) else { return };
    let store = open(&url(&engines, "size=16MiB&copies=2"));
    let mut lane = store.lane(64).unwrap();
    let writes: Vec<_> = (0..700).map(|slot| (Slot(slot), Some(page(slot)))).collect();
    assert!(all(&mut *lane, &writes).iter().all(|(result, _)| result.is_ok()));
    let told = Arc::new(Mutex::new(Vec::new()));
    let list = Arc::clone(&told);
    store.report().unwrap().when_changed(Arc::new(move |condition| {
        list.lock().unwrap().extend(condition.why.clone());
    }));
    drop(lane);
    engines[1].put("another", b"value");
    engines[1].signal(Signal::STOP);
    drop(store);
    engines[1].signal(Signal::CONT);
    assert_eq!(engines[0].keys(), 0);
    let told = told.lock().unwrap();
    let line = told.last().unwrap();
    let (left, command) = line.split_once("to delete them: ").unwrap_or_else(|| panic!("{told:?}"));
    assert!(left.starts_with("700 values are left there"), "{left}");
    // Both commands of the closing may lie in the socket of an engine that stood still.
    let output = std::process::Command::new("sh").args(["-c", command]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(engines[1].keys(), 1, "{output:?}");
}
