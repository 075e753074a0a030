//! A daemon that compresses: it compacts half-empty packs by itself, and causes no wake-ups at
//! rest.

mod common;

use common::{Daemon, Ends, PATIENCE, has_lavapipe, kills};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use weir_export::nbd::client::Client;

const PAGE: usize = 4096;
/// Pages in one request: the daemon sees them together, as when a kernel swaps out.
const RUN: u64 = 32;
const PAGES: u64 = 6144;

/// A page of which about an eighth is noise, or all.
fn stamped(page: u64, round: u64, noisy: bool) -> Vec<u8> {
    let mut state = page << 20 | round;
    let words = (0..PAGE / 8).map(|at| {
        if noisy || at % 8 == 0 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state ^ state >> 29
        } else {
            round
        }
    });
    words.flat_map(u64::to_le_bytes).collect()
}

#[test]
fn what_others_have_left_comes_together_and_up_while_clients_use_it_and_then_nobody_wakes() {
    let flags = ["--store", "host:8MiB", "--store", "host:40MiB", "--size", "24MiB", "--compress", "lz4"];
    let scene = Daemon::spawn("gather", &flags, Daemon::with_nbd);
    let mut client = scene.connect();
    for first in (0..PAGES).step_by(RUN as usize) {
        let bytes: Vec<u8> = (first..first + RUN).flat_map(|page| stamped(page, 1, false)).collect();
        client.write(first * PAGE as u64, &bytes).unwrap();
    }
    let status = scene.status();
    let ratio = |status: &serde_json::Value| status["volume"]["compress"]["ratio"].as_f64().unwrap();
    assert!(ratio(&status) > 3.5, "{}", status["volume"]);
    // The device is three times as large as its first store, and all its pages lie there.
    assert_eq!(status["stores"][1]["slots_used"], 0, "{}", status["stores"]);

    // Write in random order, each page by itself, so that most packs keep one page or none.
    let changed = |page: u64| !page.is_multiple_of(3);
    for page in (0..PAGES).map(|at| at * 1237 % PAGES).filter(|page| changed(*page)) {
        client.write(page * PAGE as u64, &stamped(page, 2, true)).unwrap();
    }
    let begun = Instant::now();
    let together = |status: &serde_json::Value| status["background"]["compacted"].as_u64().unwrap();
    let gathered = loop {
        let status = scene.status();
        let (packed, packs) =
            (&status["volume"]["compress"]["packed"], &status["volume"]["compress"]["packs"]);
        let fill = packed.as_u64().unwrap() as f64 / packs.as_u64().unwrap() as f64;
        if together(&status) > 500 && fill > 2.5 {
            break status;
        }
        assert!(begun.elapsed() < PATIENCE, "{}: {}", status["volume"], status["background"]);
        thread::sleep(Duration::from_millis(20));
    };
    for page in 0..PAGES {
        let expected = if changed(page) { stamped(page, 2, true) } else { stamped(page, 1, false) };
        let found = client.read(page * PAGE as u64, PAGE as u32).unwrap();
        assert!(found == expected, "page {page}");
    }
    assert_eq!(gathered["protection"]["io_allocations"], 0);

    // The daemon does the work that is left, and then there is none.
    let begun = Instant::now();
    let worker = || {
        let status = scene.status();
        ["wakes", "items", "compacted", "moved_up"].map(|what| status["background"][what].as_u64().unwrap())
    };
    let mut before = worker();
    loop {
        thread::sleep(Duration::from_secs(1));
        let now = worker();
        if now == before {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "the worker does not come to rest: {before:?}, {now:?}");
        before = now;
    }
    assert_eq!(worker(), before, "at rest");
}

/// Writes until some daemon acknowledges it.
fn write(scene: &Daemon, client: &mut Client, page: u64, bytes: &[u8]) {
    while client.write(page * PAGE as u64, bytes).is_err() {
        *client = scene.connect();
    }
}

#[test]
fn what_is_being_brought_together_survives_kills() {
    let mut stores = vec!["host:8MiB"];
    if has_lavapipe() {
        stores.push("vram:lavapipe?size=8MiB&chunk=1MiB");
    } else {
        println!(
            "skipped: what_is_being_brought_together_survives_kills: lavapipe, Mesa's software renderer (package mesa-vulkan-drivers)"
        );
    }
    for store in stores {
        let flags =
            ["--keeper", "--store", store, "--store", "host:40MiB", "--size", "24MiB", "--compress", "zstd"];
        let scene = Daemon::spawn(&format!("torn-{}", &store[..4]), &flags, Daemon::with_nbd);
        drop(scene.connect());
        let (kills, stop) = (kills(), AtomicBool::new(false));
        let together = || scene.status()["background"]["compacted"].as_u64().unwrap();
        let (moved, rounds) = thread::scope(|scope| {
            let (scene, stop) = (&scene, &stop);
            let user = scope.spawn(move || {
                let mut client = scene.connect();
                let mut known = vec![0; PAGES as usize];
                let mut round = 0;
                while !stop.load(Ordering::Relaxed) {
                    round += 1;
                    for first in (0..PAGES).step_by(RUN as usize) {
                        let bytes: Vec<u8> =
                            (first..first + RUN).flat_map(|page| stamped(page, round, false)).collect();
                        write(scene, &mut client, first, &bytes);
                    }
                    known.fill(round);
                    // Each round uses another order, and another third stays.
                    let changed = |page: &u64| !(page + round).is_multiple_of(3);
                    for page in (0..PAGES).map(|at| at * 1237 % PAGES).filter(changed) {
                        write(scene, &mut client, page, &stamped(page, round << 10, true));
                        known[page as usize] = round << 10;
                    }
                    for page in 0..PAGES {
                        let round = known[page as usize];
                        let expected = stamped(page, round, round >= 1 << 10);
                        let found = loop {
                            match client.read(page * PAGE as u64, PAGE as u32) {
                                Ok(found) => break found,
                                Err(_) => client = scene.connect(),
                            }
                        };
                        assert!(found == expected, "page {page} of round {round}");
                    }
                }
                round
            });
            let ends = Ends(stop);
            let mut moved = 0;
            for kill in 0..kills as u64 {
                // Kill it soon after it has begun to move pages, or at any time. A busy machine may
                // take long until it moves the first.
                let patience = if moved == 0 { 60 } else { 2 };
                let begun = Instant::now();
                let before = together();
                while !kill.is_multiple_of(3) && together() == before && begun.elapsed().as_secs() < patience
                {
                    thread::sleep(Duration::from_millis(1));
                }
                thread::sleep(Duration::from_millis(kill * 7 % 20));
                moved += together() - before.min(together());
                scene.kill_daemon();
            }
            drop(ends);
            (moved, user.join().unwrap())
        });
        println!(
            "{kills} kills on {store}, {rounds} rounds, {moved} pages seen brought together, 0 mismatches"
        );
        let name = &store[..4];
        println!("figure: {name} kills {kills} higher {kills}");
        println!("figure: {name} brought_together {moved} higher 1");
        println!("figure: {name} mismatches 0 lower 0");
        assert!(moved > 0, "no daemon brought anything together");
        assert_eq!(scene.status()["protection"]["io_allocations"], 0);
    }
}
