//! `weir bench restart`: a daemon under load is killed again and again, and the keeper's next
//! daemon takes its pages over.
//!
//! All pages are written once. Then threads read and write pages of their own at random, over NBD,
//! while the daemon gets a SIGKILL. The measured time lasts from the SIGKILL to the first page that
//! a new connection reads. After each kill every page of the device is read and compared. A page
//! must have the content of its last acknowledged write, or of the write that was under way.

use crate::report::{Goal, Report, Row, Runs};
use crate::steps::Steps;
use crate::store::content::{Random, is_stamped, stamp};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, Page, PageBytes};
use weir_export::nbd::client::{Client, ClientError, Wish};

/// Number of connections that use the device.
const USERS: u32 = 4;
/// Number of pages in one request, when all pages are written or compared.
const RUN: u32 = 256;
/// Time that a daemon may take before the run is given up.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time of load before each kill.
const LOAD: Duration = Duration::from_secs(1);

/// The plan of the restart benchmark.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The program under test.
    pub weir: PathBuf,
    /// The daemon's store.
    pub store: String,
    /// Bytes of pages that are written, and compared after each kill.
    pub bytes: u64,
    /// Number of kills.
    pub kills: u32,
}

/// The reason why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum RestartError {
    /// The program could not be started, or one of its files could not be read.
    #[error("cannot run the daemon")]
    Program(#[from] std::io::Error),
    /// No daemon served in time.
    #[error("no daemon serves after {} s", PATIENCE.as_secs())]
    Absent,
    /// A request failed while the daemon lived.
    #[error("a request failed")]
    Request(#[from] ClientError),
    /// A page has neither the acknowledged content nor that of the write under way.
    #[error("page {page} is not its generation {generation}, nor the one under way")]
    Mismatch {
        /// The number of the wrong page.
        page: u32,
        /// The generation of the page's last acknowledged write.
        generation: u32,
    },
}

/// A keeper with its daemon.
struct Scene {
    directory: PathBuf,
    keeper: Child,
    stages: Arc<Mutex<Stages>>,
}

/// The times of the daemons' stages, from their own log lines: milliseconds by name.
type Stages = BTreeMap<String, Runs>;

/// The times of one restart of the daemon.
struct Pause {
    /// Time from the kill until the daemon was gone.
    gone: Duration,
    /// Time from the daemon's kill until a client has read its first page from the next daemon.
    served: Duration,
}

/// The pages of one user, which are neighbours. Only this user writes them, so it knows the
/// possible content of each.
struct Part {
    first: u32,
    acknowledged: Vec<u32>,
    /// The last generation that was sent for each page. After a daemon's death it may be later than
    /// the acknowledged generation, until the page is read again.
    sent: Vec<u32>,
    /// The generation that the next write stamps into its page. No generation is used twice.
    next: u32,
    random: Random,
}

/// Runs the benchmark by `plan`.
///
/// # Errors
/// Fails when no daemon comes back, or a page is wrong, which must never happen.
pub fn run(plan: &Plan) -> Result<Report, RestartError> {
    // The bar has one step for the first writing of all pages, and one for each kill.
    let steps = Arc::new(Steps::new(1 + plan.kills as usize));
    steps.part("writing");
    let scene = Scene::start(plan, &steps)?;
    let pages = (plan.bytes / PAGE_SIZE as u64) as u32 / (USERS * RUN) * (USERS * RUN);
    let each = pages / USERS;
    let mut parts: Vec<Part> = (0..USERS).map(|user| Part::new(user * each, each)).collect();
    together(&mut parts, |part| part.fill(&scene))?;
    steps.end();
    let (mut pauses, mut gone) = (Runs::default(), Runs::default());
    let (mut operations, mut compared) = (0, 0u64);
    for _ in 0..plan.kills {
        steps.part("kills");
        let stop = AtomicBool::new(false);
        let done = AtomicU64::new(0);
        let pause = std::thread::scope(|scope| {
            let users: Vec<_> = parts
                .iter_mut()
                .map(|part| {
                    let (scene, stop, done) = (&scene, &stop, &done);
                    scope.spawn(move || part.load(scene, stop, done))
                })
                .collect();
            std::thread::sleep(LOAD);
            let pause = scene.kill_and_wait();
            std::thread::sleep(LOAD / 2);
            stop.store(true, Ordering::Relaxed);
            for user in users {
                user.join().unwrap_or(Err(RestartError::Absent))?;
            }
            pause
        })?;
        pauses.push(milliseconds(pause.served));
        gone.push(milliseconds(pause.gone));
        operations += done.into_inner();
        together(&mut parts, |part| part.compare(&scene))?;
        compared += u64::from(pages) * PAGE_SIZE as u64;
        steps.say(format_args!(
            "served again after {:.1} ms, {:.1} of them until the daemon was gone; {operations} operations so far, 0 mismatches",
            milliseconds(pause.served),
            milliseconds(pause.gone)
        ));
        steps.end();
    }
    let mut report = Report::new("restart", plan.kills as usize);
    let gib = compared as f64 / f64::from(1 << 30);
    report.rows = vec![
        Row::lower("keeper_restart", "median_ms", pauses.median()),
        Row::lower("keeper_restart", "longest_ms", pauses.max()).goal(Goal::Value(1000.0)),
        // A mismatch ends the run with an error, so this row is always 0.
        Row::lower("keeper_restart", "mismatches", 0.0).goal(Goal::Value(0.0)),
        Row::higher("keeper_restart", "gib_compared", gib),
        Row::higher("keeper_restart", "operations", operations as f64),
        Row::lower("keeper_restart", "gone_ms", gone.median()),
    ];
    let stages = scene.stages.lock().unwrap_or_else(PoisonError::into_inner);
    report.rows.extend(
        stages.iter().map(|(name, took)| Row::lower("keeper_restart", format!("{name}_ms"), took.median())),
    );
    Ok(report)
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Takes each `name 1.5 ms` out of a daemon's log line about its start.
fn note_stages(line: &str, stages: &mut Stages) {
    let Some((head, text)) = line.rsplit_once(": ") else { return };
    let behind = match (head.contains("taken over in"), head.contains("all of it open")) {
        (true, _) => "",
        (_, true) => "behind_",
        _ => return,
    };
    for stage in text.split(", ") {
        if let [name, took, "ms"] = stage.split(' ').collect::<Vec<_>>()[..]
            && let Ok(took) = took.parse()
        {
            stages.entry(format!("{behind}{name}")).or_default().push(took);
        }
    }
}

/// Runs a thread for each part; returns the first error.
fn together(
    parts: &mut [Part],
    work: impl Fn(&mut Part) -> Result<(), RestartError> + Sync,
) -> Result<(), RestartError> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = parts.iter_mut().map(|part| scope.spawn(move || work(part))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or(Err(RestartError::Absent)))
    })
}

impl Scene {
    fn start(plan: &Plan, steps: &Arc<Steps>) -> Result<Self, RestartError> {
        let directory = std::env::temp_dir().join(format!("weir-bench-restart-{}", std::process::id()));
        std::fs::create_dir(&directory)?;
        let connections = (2 * USERS).to_string();
        let keeper = Command::new(&plan.weir)
            .args(["serve", "--keeper", "--log", "info", "--connections", &connections])
            .args(["--store", &plan.store, "--nbd"])
            .arg(format!("unix:{}", directory.join("nbd").display()))
            .arg("--control")
            .arg(directory.join("control"))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let stages = Arc::<Mutex<Stages>>::default();
        let mut scene = Scene { directory, keeper, stages: Arc::clone(&stages) };
        // The thread below reads the keeper's standard error, and ends when the keeper does.
        let lines = BufReader::new(scene.keeper.stderr.take().expect("it is a pipe")).lines();
        let steps = Arc::clone(steps);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok).filter(|line| !line.contains("nbd: connection")) {
                note_stages(&line, &mut stages.lock().unwrap_or_else(PoisonError::into_inner));
                steps.say(line);
            }
        });
        Ok(scene)
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("nbd")
    }

    /// The process of the living daemon: the keeper's only child.
    fn daemon(&self) -> Option<rustix::process::Pid> {
        let pid = self.keeper.id();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
        rustix::process::Pid::from_raw(children.trim().parse().ok()?)
    }

    /// Kills the daemon, and waits until the next one returns a page. Returns the times.
    fn kill_and_wait(&self) -> Result<Pause, RestartError> {
        let daemon = self.daemon().ok_or(RestartError::Absent)?;
        let since = Instant::now();
        rustix::process::kill_process(daemon, rustix::process::Signal::KILL).map_err(std::io::Error::from)?;
        let mut gone = None;
        loop {
            // After the kill the old daemon's socket may still accept a connection that nobody
            // serves.
            if gone.is_none() && self.daemon() != Some(daemon) {
                gone = Some(since.elapsed());
            }
            if let Some(gone) = gone
                && connect(&self.socket()).and_then(|mut it| it.read(0, PAGE_SIZE as u32)).is_ok()
            {
                return Ok(Pause { gone, served: since.elapsed() });
            }
            if since.elapsed() > PATIENCE {
                return Err(RestartError::Absent);
            }
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    /// Connects, as soon as a daemon accepts connections.
    fn connect(&self) -> Result<Client, RestartError> {
        let since = Instant::now();
        loop {
            match connect(&self.socket()) {
                Ok(client) => return Ok(client),
                Err(_) if since.elapsed() > PATIENCE => return Err(RestartError::Absent),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

fn connect(socket: &Path) -> Result<Client, ClientError> {
    Client::unix(socket, &Wish::default())
}

impl Drop for Scene {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.keeper.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let since = Instant::now();
        while since.elapsed() < PATIENCE && matches!(self.keeper.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let daemon = self.daemon();
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
        if let Some(daemon) = daemon {
            let _ = rustix::process::kill_process(daemon, rustix::process::Signal::KILL);
        }
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

impl Part {
    fn new(first: u32, pages: u32) -> Self {
        let none = vec![0; pages as usize];
        Part {
            first,
            acknowledged: none.clone(),
            sent: none,
            next: 1,
            random: Random::new(u64::from(first) + 1),
        }
    }

    fn offset(&self, index: usize) -> u64 {
        (u64::from(self.first) + index as u64) * PAGE_SIZE as u64
    }

    /// Writes each of this client's pages once.
    fn fill(&mut self, scene: &Scene) -> Result<(), RestartError> {
        let mut client = scene.connect()?;
        let mut bytes = vec![0x6b; RUN as usize * PAGE_SIZE];
        for start in (0..self.sent.len()).step_by(RUN as usize) {
            for (at, page) in bytes.chunks_exact_mut(PAGE_SIZE).enumerate() {
                let index = start + at;
                self.sent[index] = self.next;
                stamp(page.try_into().expect("a page"), self.first + index as u32, self.sent[index]);
            }
            client.write(self.offset(start), &bytes)?;
            self.next += 1;
            let run = start..start + RUN as usize;
            self.acknowledged[run.clone()].copy_from_slice(&self.sent[run]);
        }
        Ok(())
    }

    /// Reads and checks every page of the part.
    fn compare(&mut self, scene: &Scene) -> Result<(), RestartError> {
        let mut client = scene.connect()?;
        for start in (0..self.sent.len()).step_by(RUN as usize) {
            let bytes = client.read(self.offset(start), RUN * PAGE_SIZE as u32)?;
            for (at, page) in bytes.chunks_exact(PAGE_SIZE).enumerate() {
                self.check(start + at, page.try_into().expect("a page"))?;
            }
        }
        Ok(())
    }

    /// Checks a page. It may have the content of its last acknowledged write, or of the last write
    /// that was sent. From here on it must keep the content that this check has found.
    fn check(&mut self, index: usize, page: &PageBytes) -> Result<(), RestartError> {
        let number = self.first + index as u32;
        for generation in [self.acknowledged[index], self.sent[index]] {
            if is_stamped(page, number, generation) {
                (self.acknowledged[index], self.sent[index]) = (generation, generation);
                return Ok(());
            }
        }
        Err(RestartError::Mismatch { page: number, generation: self.acknowledged[index] })
    }

    /// Reads and writes at random until it is told to stop. It goes on after a daemon's death.
    fn load(&mut self, scene: &Scene, stop: &AtomicBool, done: &AtomicU64) -> Result<(), RestartError> {
        let mut client = scene.connect()?;
        let mut page = Page([0x6b; PAGE_SIZE]);
        while !stop.load(Ordering::Relaxed) {
            let index = self.random.below(self.sent.len() as u32) as usize;
            let offset = self.offset(index);
            let outcome = if self.random.below(2) == 0 {
                self.sent[index] = self.next;
                self.next += 1;
                stamp(&mut page, self.first + index as u32, self.sent[index]);
                client.write(offset, &page[..]).map(|()| self.acknowledged[index] = self.sent[index])
            } else {
                match client.read(offset, PAGE_SIZE as u32) {
                    Ok(bytes) => {
                        self.check(index, bytes.as_slice().try_into().expect("a page"))?;
                        Ok(())
                    }
                    Err(error) => Err(error),
                }
            };
            match outcome {
                Ok(()) => _ = done.fetch_add(1, Ordering::Relaxed),
                Err(_) => client = scene.connect()?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_daemons_say_of_their_stages_is_found_and_nothing_else() {
        let mut stages = Stages::new();
        for line in [
            "weir: taken over in 268.0 ms: dying 3.0 ms, start 20.0 ms, driver 165.5 ms",
            "weir: vram:0?size=9GiB: all of it open after 500.0 ms: cuda 210.0 ms, import 40.0 ms",
            "weir: took over 5 pages from the daemon before, 0 of one value each; 0 lost",
        ] {
            note_stages(line, &mut stages);
        }
        let all: Vec<_> = stages.iter().map(|(name, took)| (name.as_str(), took.median())).collect();
        let expected = [
            ("behind_cuda", 210.0),
            ("behind_import", 40.0),
            ("driver", 165.5),
            ("dying", 3.0),
            ("start", 20.0),
        ];
        assert_eq!(all, expected);
    }
}
