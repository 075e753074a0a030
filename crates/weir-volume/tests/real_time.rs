//! A real-time thread that waits for a thread of lower priority lets it run.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use weir_core::swap_safety::{Children, reach_reserves};
use weir_core::{PageNo, Rest};
use weir_store::{Host, Progress};
use weir_volume::{Config, Volume};

/// Processor time that the reader needs while it holds slots back.
const WORK: Duration = Duration::from_millis(3);
const ROUNDS: u32 = 4;
/// The kernel runs ordinary threads only after 950 ms of each second (`sched_rt_runtime_us`). So
/// [`ROUNDS`] waits that starve the reader take twice as long as this limit. Waits that do not
/// starve it take some milliseconds, and a little more on a busy machine.
const LIMIT: Duration = Duration::from_millis(1900);

fn cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

#[test]
fn a_real_time_thread_that_waits_for_a_slot_lets_the_ordinary_thread_run_that_holds_it_back() {
    const NAME: &str =
        "a_real_time_thread_that_waits_for_a_slot_lets_the_ordinary_thread_run_that_holds_it_back";
    let config = Config { pages: 64, lanes: 2, depth: 8 };
    let volume = Volume::create(config, vec![Arc::new(Host::new(config.slots()).unwrap())]).unwrap();
    let (mut reader, mut writer) = (volume.lane().unwrap(), volume.lane().unwrap());
    let allowed = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|at| allowed.is_set(*at)).unwrap());
    let ((ask, asked), (say, said)) = (channel::<()>(), channel::<()>());
    let waited = std::thread::scope(|scope| {
        scope.spawn(move || {
            sched_setaffinity(None, &one).unwrap();
            while asked.recv().is_ok() {
                let guard = reader.pin();
                say.send(()).unwrap();
                let begun = cpu_time();
                while cpu_time() - begun < WORK {}
                drop(guard);
            }
        });
        let write = scope.spawn(move || -> Option<Duration> {
            sched_setaffinity(None, &one).unwrap();
            if let Err(error) = reach_reserves(Children::Ordinary) {
                eprintln!("skipped: {NAME}: no real-time thread may be had here: {error}");
                return None;
            }
            let mut waited = Duration::ZERO;
            for round in 0..ROUNDS {
                ask.send(()).unwrap();
                said.recv().unwrap();
                let begun = Instant::now();
                // Write twice the slack of the volume: the second half must wait for slots that the
                // reader holds back.
                for number in 0..2 * config.slack() {
                    let page = PageNo(number % config.pages);
                    let bytes: Vec<u8> = (0..4096u32).map(|at| (at + number + round) as u8).collect();
                    let mut rest = Rest::default();
                    let written = loop {
                        let written = writer.write(0, page, bytes[..].try_into().unwrap());
                        if written != Progress::Full {
                            break written;
                        }
                        writer.submit();
                        writer.poll(Instant::now(), &mut |_| {});
                        rest.until_next();
                    };
                    assert_eq!(written, Progress::Done(Ok(())), "round {round}, write {number}");
                    writer.submit();
                }
                waited += begun.elapsed();
            }
            Some(waited)
        });
        write.join().unwrap()
    });
    let Some(waited) = waited else { return };
    println!("{ROUNDS} rounds took {waited:?}");
    assert!(volume.status().waits >= ROUNDS.into(), "nobody waited");
    assert!(waited < LIMIT, "{ROUNDS} waits for {WORK:?} of work took {waited:?}");
}
