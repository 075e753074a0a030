//! `weir cache trace`: records which pages requests use.

use super::control;
use super::options::TraceOptions;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use weir_cache::Cache;
use weir_cli::failure::Failure;

/// Largest number of pages in a line that the cache sends.
const LINE: u64 = 16 << 10;
/// Time between two looks at the recorded pages. The recorder has room for 65,536 meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Longest time between two lines, so that a client that has gone is noticed.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Records a trace into a new file.
pub fn run(options: &TraceOptions) -> Result<(), Failure> {
    let shown = options.file.display();
    let failed = |error: std::io::Error| {
        Failure::Failed(format!("cannot write the trace {shown}: {error}; name a new file"))
    };
    let mut file = BufWriter::new(File::create_new(&options.file).map_err(failed)?);
    let mut count = 0_u64;
    let lost = control::trace(&options.control.path(), (options.requests, options.seconds), &mut |pages| {
        count += pages.len() as u64;
        pages.iter().try_for_each(|page| writeln!(file, "{page}")).map_err(failed)?;
        // Ctrl-C ends this process at any time. So the file has whole lines only.
        file.flush().map_err(failed)
    });
    if count == 0 && lost.is_err() {
        let _ = std::fs::remove_file(&options.file);
    }
    let lacks = match lost? {
        None => "; then the cache ended, or could send no more".to_owned(),
        Some(0) => String::new(),
        Some(lost) => format!("; {lost} more came too fast and are not in it"),
    };
    println!("{shown} has {count} requests{lacks}; weir bench policy --trace {shown} replays them");
    Ok(())
}

/// Hands the pages that requests use to `tell`, until it returns false, `requests` pages were told,
/// so many seconds are over, or `ends` returns true. Returns the number of requests that came too
/// fast to be recorded.
///
/// # Errors
/// Fails when another trace is being recorded.
pub fn record(
    cache: &Arc<Cache>,
    requests: u64,
    seconds: Option<u32>,
    ends: impl Fn() -> bool,
    tell: &mut dyn FnMut(Vec<u32>) -> bool,
) -> Result<u64, String> {
    let Some(mut trace) = cache.trace() else {
        return Err("another trace of this cache is being recorded; end that one first".into());
    };
    let begun = Instant::now();
    let until = seconds.map(|seconds| begun + Duration::from_secs(seconds.into()));
    let (mut left, mut told) = (requests, begun);
    while left > 0 {
        if until.is_some_and(|until| Instant::now() >= until) || ends() {
            trace.end();
        }
        let pages: Vec<u32> = trace.take(left.min(LINE) as usize).map(|page| page.0).collect();
        let has_all = pages.len() < LINE as usize;
        left -= pages.len() as u64;
        if !pages.is_empty() || told.elapsed() >= TELL_EVERY {
            told = Instant::now();
            if !tell(pages) {
                break;
            }
        }
        if trace.is_over() {
            break;
        }
        if has_all {
            thread::sleep(LOOK_EVERY);
        }
    }
    Ok(trace.lost())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};
    use weir_cache::Config;
    use weir_core::{ByteSize, PAGE_SIZE, PageNo};
    use weir_device::{PageDevice as _, PageLane as _};
    use weir_store::{Host, Sim, SimUrl};

    #[test]
    fn what_was_used_before_the_end_is_in_the_trace_however_much_it_is() {
        let home = Sim::open(SimUrl { size: ByteSize(4 << 20), ..SimUrl::default() }).unwrap();
        let cache =
            Cache::create(Arc::new(Host::new(4096).unwrap()), Arc::new(home), Config::default()).unwrap();
        let mut lane = cache.open().unwrap();
        let _ = lane.write(0, PageNo(1), &[1; PAGE_SIZE]);
        let lane = RefCell::new(lane);
        let (count, many) = (Cell::new(0), LINE as usize * 2 + 5);
        // All reads happen between two calls of `take`, and the trace ends right after them.
        let ends = || {
            let mut page = [0; PAGE_SIZE];
            while count.get() < many {
                count.set(count.get() + 1);
                let _ = lane.borrow_mut().read(0, PageNo(1), &mut page);
            }
            true
        };
        let mut told = 0;
        let lost = record(&cache, u64::MAX, None, ends, &mut |pages| {
            told += pages.len();
            true
        });
        assert_eq!((told, lost), (many, Ok(0)));
    }
}
