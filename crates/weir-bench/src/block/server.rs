//! The servers under test, each a process of its own.

use super::{BlockError, Plan};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time that a server may take until it listens. Before that, a server touches its host memory page
/// by page.
const START: Duration = Duration::from_secs(30);

/// A directory that is removed with everything in it.
pub(super) struct Directory(PathBuf);

impl Directory {
    pub fn new() -> io::Result<Directory> {
        let path = std::env::temp_dir().join(format!("weir-bench-block-{}", std::process::id()));
        std::fs::create_dir(&path)?;
        Ok(Directory(path))
    }

    /// The path of the socket of the server of this name.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.0.join(format!("{name}.sock"))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // The directory contains only sockets. If it cannot be removed now, it stays until the
        // system cleans its temporary directory.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A running server.
pub(super) struct Server {
    child: Child,
    pub socket: PathBuf,
}

impl Server {
    /// Starts Weir; `name` is unique among the servers of a run.
    pub fn weir(plan: &Plan, spin_us: u32, name: &str, directory: &Directory) -> Result<Server, BlockError> {
        let socket = directory.socket(name);
        let mut command = Command::new(&plan.weir);
        let store = plan.store.clone().unwrap_or_else(|| format!("host:{}", plan.size.0));
        command.arg("serve").args(["--size", &plan.size.0.to_string(), "--connections", "32"]);
        command.args(["--store", &store, "--spin-us", &spin_us.to_string()]);
        command.args(["--log", "warn", "--nbd", &format!("unix:{}", socket.display())]);
        command.arg("--control").arg(directory.0.join(format!("{name}.control")));
        Server::start(command, socket, "weir", "weir")
    }

    pub fn nbdkit(plan: &Plan, directory: &Directory) -> Result<Server, BlockError> {
        let socket = directory.socket("nbdkit");
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--threads", "16", "--unix"]);
        command.arg(&socket).args(["memory", &plan.size.0.to_string()]);
        Server::start(command, socket, "nbdkit", "nbdkit")
    }

    /// Starts nbd-vram with its defaults: a thread for each connection.
    pub fn nbd_vram(plan: &Plan, program: &Path, directory: &Directory) -> Result<Server, BlockError> {
        let socket = directory.socket("nbd-vram");
        let mut command = Command::new(program);
        command.env("VRAM_SOCK_PATH", &socket).env("VRAM_NBD_THREADS", "16");
        command.env("VRAM_SETUP_SIZE_MB", (plan.size.0 >> 20).to_string());
        Server::start(command, socket, "nbd-vram", "nbd-vram, from its own repository")
    }

    fn start(
        mut command: Command,
        socket: PathBuf,
        program: &str,
        package: &'static str,
    ) -> Result<Server, BlockError> {
        let failed = |what: String| BlockError::Program { program: program.to_owned(), what, package };
        let mut child = command.stdin(Stdio::null()).spawn().map_err(|error| failed(error.to_string()))?;
        let deadline = Instant::now() + START;
        while !socket.exists() {
            if let Ok(Some(status)) = child.try_wait() {
                return Err(failed(format!("it ended at its start: {status}")));
            }
            if Instant::now() > deadline {
                let _ = child.kill();
                return Err(failed(format!("it does not listen after {} s", START.as_secs())));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Server { child, socket })
    }

    /// The processor time that the server has used in user and in kernel mode.
    pub fn cpu_time(&self) -> [Duration; 2] {
        let ticks = weir_system::ProcessStat::of(self.child.id()).map(|stat| stat.ticks);
        let per_second = rustix::param::clock_ticks_per_second();
        ticks.unwrap_or_default().map(|ticks| Duration::from_secs_f64(ticks as f64 / per_second as f64))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
