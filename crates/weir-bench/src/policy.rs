//! `weir bench policy`: hit rates of the cache's policy on traces of pages, beside LRU and OPT of
//! the same size.
//!
//! A trace is a text file with one page number in each line. Without one, the benchmark makes
//! traces from a seed: Zipf, uniform, and a scan through a hot set. The figure of Weir's cache
//! comes from its real directory, the code that chooses a frame for each page, with its sets of 64
//! frames. LRU and OPT (Belady, *A study of replacement algorithms for a virtual-storage computer*,
//! 1966) have no sets.

use crate::report::{Report, Row};
use crate::splitmix;
use crate::steps::Steps;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use weir_cache::Directory;
use weir_core::PageNo;

/// Number of pages in a made trace, and number of its requests.
const PAGES: u32 = if cfg!(test) { 1 << 13 } else { 1 << 16 };
const REQUESTS: usize = 16 * PAGES as usize;
/// Number of pages that one scan of a made trace reads.
const SCAN: u32 = PAGES / 3;

/// The reason why hit rates cannot be counted.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The trace cannot be read.
    #[error("cannot read the trace {path}")]
    Read {
        /// The path of the trace file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The file is not a trace: a line of it is no page number.
    #[error(
        "{path}: line {line} is {text:?}; a trace has a page number below 2^32 a line, and one line at least"
    )]
    Trace {
        /// The path of the file.
        path: PathBuf,
        /// The line's number, counted from 1.
        line: usize,
        /// The text of the line that is no page number.
        text: String,
    },
    /// There is no memory for the directory, which is the cache's table of frames.
    #[error("cannot take memory for the directory")]
    Memory(#[from] std::io::Error),
}

/// Counts the hits of `trace`, or of made traces, in caches that hold `shares` per cent of the
/// trace's pages.
///
/// # Errors
/// Fails with a [`PolicyError`].
pub fn run(trace: Option<&Path>, shares: &[u8]) -> Result<Report, PolicyError> {
    let traces = match trace {
        Some(path) => vec![("trace", read(path)?)],
        None => vec![
            ("zipf_0.99", zipf(0.99)),
            ("zipf_0.7", zipf(0.7)),
            ("uniform", zipf(0.0)),
            ("scans", scans()),
        ],
    };
    let mut report = Report::new("policy", 1);
    let steps = Steps::new(traces.len() * shares.len());
    for (name, trace) in traces {
        steps.part(name);
        let pages = trace.iter().collect::<BTreeSet<_>>().len() as u32;
        for share in shares {
            let directory = Directory::new((u64::from(pages) * u64::from(*share) / 100) as u32)?;
            let frames = directory.frames() as usize;
            let hits = trace.iter().filter(|page| directory.replay(PageNo(**page))).count();
            let per_cent = |hits: usize| 100.0 * hits as f64 / trace.len() as f64;
            let id = format!("{name}_{share}");
            let row = || Row::higher(id.clone(), "hits_per_cent", per_cent(hits));
            report.rows.push(row().beside("lru", per_cent(lru(&trace, frames))));
            report.rows.push(row().beside("opt", per_cent(opt(&trace, frames))));
            steps.end();
        }
    }
    Ok(report)
}

fn read(path: &Path) -> Result<Vec<u32>, PolicyError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| PolicyError::Read { path: path.to_owned(), source })?;
    let wrong =
        |line: usize, text: &str| PolicyError::Trace { path: path.to_owned(), line, text: text.to_owned() };
    let numbers = text.lines().enumerate();
    let pages: Result<Vec<u32>, _> =
        numbers.map(|(at, line)| line.trim().parse().map_err(|_| wrong(at + 1, line))).collect();
    pages.and_then(|pages| if pages.is_empty() { Err(wrong(1, "")) } else { Ok(pages) })
}

/// Number of hits that a least-recently-used cache of `frames` frames has in the trace.
fn lru(trace: &[u32], frames: usize) -> usize {
    let (mut used, mut order) = (HashMap::new(), BTreeMap::new());
    let mut hits = 0;
    for (now, page) in trace.iter().enumerate() {
        if let Some(before) = used.insert(page, now) {
            hits += 1;
            order.remove(&before);
        } else if order.len() == frames {
            let (_, oldest) = order.pop_first().expect("frames are full");
            used.remove(oldest);
        }
        order.insert(now, page);
    }
    hits
}

/// Number of hits that the optimal policy has in the trace with `frames` frames. This policy knows
/// the future: it drops the page whose next use is latest.
fn opt(trace: &[u32], frames: usize) -> usize {
    let mut next = vec![usize::MAX; trace.len()];
    let mut seen = HashMap::new();
    for (now, page) in trace.iter().enumerate().rev() {
        // A page that is not used again gets a time after the trace's end as its next use. These
        // times differ from each other, in the order of the pages' last uses.
        next[now] = seen.insert(page, now).unwrap_or(trace.len() + now);
    }
    let (mut coming, mut kept) = (BTreeSet::new(), HashMap::new());
    let mut hits = 0;
    for (now, page) in trace.iter().enumerate() {
        if kept.remove(page).is_some_and(|when| coming.remove(&(when, page))) {
            hits += 1;
        } else if coming.len() == frames {
            let last: (usize, &u32) = *coming.last().expect("frames are full");
            if last.0 < next[now] {
                // The new page is used again later than every cached page. So the optimal policy
                // does not cache it.
                continue;
            }
            coming.remove(&last);
            kept.remove(last.1);
        }
        coming.insert((next[now], page));
        kept.insert(page, next[now]);
    }
    hits
}

/// Independent draws by Zipf's law.
pub(crate) struct Zipf {
    /// For each rank, the sum of the weights from the first rank up to it.
    sums: Vec<f64>,
}

impl Zipf {
    /// Prepares draws by Zipf's law: the page of rank `n` has a probability in proportion to `n` to
    /// the power of `-theta`. With 0, all pages are equally likely.
    pub(crate) fn new(pages: u32, theta: f64) -> Self {
        let mut sum = 0.0;
        let weigh = |rank| {
            sum += f64::from(rank).powf(-theta);
            sum
        };
        Zipf { sums: (1..=pages).map(weigh).collect() }
    }

    pub(crate) fn draw(&self, state: &mut u64) -> u32 {
        let sum = self.sums.last().copied().unwrap_or(0.0);
        let at = (splitmix(state) >> 11) as f64 / (1u64 << 53) as f64 * sum;
        let rank = self.sums.partition_point(|sum| *sum < at) as u32;
        // Multiply, so that pages of neighbouring ranks are not neighbours in the volume.
        rank.wrapping_mul(0x9e37_79b1) % self.sums.len() as u32
    }
}

fn zipf(theta: f64) -> Vec<u32> {
    let (zipf, mut state) = (Zipf::new(PAGES, theta), 1);
    (0..REQUESTS).map(|_| zipf.draw(&mut state)).collect()
}

/// A made trace: a hot set that is used at random, and now and then a scan of pages that are used
/// once.
fn scans() -> Vec<u32> {
    let (mut state, mut fresh) = (2, PAGES);
    let mut trace = Vec::with_capacity(REQUESTS);
    while trace.len() < REQUESTS {
        trace.extend((0..SCAN).map(|_| (splitmix(&mut state) % u64::from(PAGES / 8)) as u32));
        trace.extend(fresh..fresh + SCAN);
        fresh += SCAN;
    }
    trace
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lru_and_opt_count_what_they_do_by_hand() {
        // The trace is Belady's own example. With 3 frames, 7 of its 12 requests are misses under
        // OPT, and 10 under LRU.
        let trace = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5];
        assert_eq!((lru(&trace, 3), opt(&trace, 3)), (2, 5));
        assert_eq!((lru(&trace, 5), opt(&trace, 5)), (7, 7));
    }

    #[test]
    fn the_policy_is_no_worse_than_lru_and_no_better_than_opt_on_each_made_trace() {
        let report = run(None, &[10, 25]).unwrap();
        assert_eq!(report.rows.len(), 16);
        for row in &report.rows {
            let (hits, control) = (row.value, row.control_value.unwrap());
            match row.control.as_deref() {
                // When all pages are equally likely, no policy is better than another. Weir's cache
                // can lose a little, because it chooses only within a set of 64 frames.
                Some("lru") => assert!(hits >= control - 0.2, "{}: {hits} and LRU {control}", row.id),
                _ => assert!(hits <= control, "{}: {hits} and OPT {control}", row.id),
            }
        }
    }

    #[test]
    fn a_trace_that_is_none_is_refused_with_its_line() {
        let path = std::env::temp_dir().join(format!("weir-trace-{}", std::process::id()));
        std::fs::write(&path, "1\n2\nthree\n").unwrap();
        let error = run(Some(&path), &[50]).unwrap_err().to_string();
        assert!(error.contains("line 3") && error.contains("three"), "{error}");
        std::fs::write(&path, "1\n2\n1\n").unwrap();
        assert_eq!(run(Some(&path), &[50]).unwrap().rows.len(), 2);
        std::fs::remove_file(&path).unwrap();
    }
}
