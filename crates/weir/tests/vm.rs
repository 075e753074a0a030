//! `weir vm` with QEMU as it is, and a guest of Debian's kernel that verifies every page of three
//! times its limit. With `WEIR_SCALE=full` the guest is larger, and all is done five times.

mod common;

use common::bounded::{Scratch, can_run, children, directory_in, directory_of, kill};
use common::{PATIENCE, WEIR};
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

const QEMU: &str = "qemu-system-x86_64";

fn is_full() -> bool {
    std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full")
}

fn has_qemu(name: &str) -> bool {
    let found = Command::new(QEMU).arg("--version").output().is_ok();
    if !found {
        println!("skipped: {name}: {QEMU} is not installed");
    }
    found
}

/// A kernel of the lab that boots in QEMU: its image, and the directory of its modules.
fn kernel(name: &str) -> Option<(PathBuf, PathBuf)> {
    let cache = std::env::var_os("WEIR_LAB_CACHE").map(PathBuf::from).or_else(|| {
        let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        Some(base.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cache")))?.join("weir-lab"))
    });
    let list = |directory: PathBuf| {
        fs::read_dir(directory).into_iter().flatten().flatten().map(|file| file.path()).collect::<Vec<_>>()
    };
    let starts = |path: &Path, with: &str| {
        path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(with))
    };
    for root in cache.map(|cache| list(cache.join("kernels"))).unwrap_or_default() {
        let images = [list(root.join("boot")), list(root.join("lib/modules"))].concat();
        let images = images.into_iter().map(|path| if path.is_dir() { path.join("vmlinuz") } else { path });
        let image = images.into_iter().find(|path| starts(path, "vmlinuz") && path.exists());
        let modules = list(root.join("lib/modules")).pop();
        if starts(&root, "debian-") && image.is_some() && modules.is_some() {
            return image.zip(modules);
        }
    }
    println!("skipped: {name}: no kernel of the lab (lab/run boot --kernel debian-7-cloud fetches one)");
    None
}

/// The module of the balloon, and all that it needs, in the order in which the guest loads them.
fn modules(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let lists = fs::read_to_string(directory.join("modules.dep")).unwrap();
    let mut order: Vec<&str> = Vec::new();
    for module in ["virtio_pci.ko", "virtio_balloon.ko"] {
        let of = |line: &&str| line.split(':').next().is_some_and(|file| file.contains(module));
        let Some((file, needs)) = lists.lines().find(of).and_then(|line| line.split_once(':')) else {
            continue;
        };
        for file in needs.split_whitespace().rev().chain([file]) {
            if !order.contains(&file) {
                order.push(file);
            }
        }
    }
    let content = |file: &str| match file.strip_suffix(".xz") {
        None => fs::read(directory.join(file)).unwrap(),
        Some(_) => Command::new("xz").arg("-dc").arg(directory.join(file)).output().unwrap().stdout,
    };
    let name = |file: &str| Path::new(file).file_name().unwrap().to_str().unwrap().replace(".xz", "");
    order.into_iter().map(|file| (name(file), content(file))).collect()
}

/// The guest's first file system: an archive of the kind `newc`.
fn archive(init: &Path, modules: Vec<(String, Vec<u8>)>) -> Vec<u8> {
    const DIRECTORY: u32 = 0o040_755;
    const FILE: u32 = 0o100_755;
    const CONSOLE: (&str, u32) = ("dev/console", 0o020_600);
    let order: String = modules.iter().map(|(name, _)| format!("{name}\n")).collect();
    let mut files =
        vec![("dev".to_owned(), DIRECTORY, Vec::new()), ("modules".into(), DIRECTORY, Vec::new())];
    files.push((CONSOLE.0.into(), CONSOLE.1, Vec::new()));
    files.push(("init".into(), FILE, fs::read(init).unwrap()));
    files.push(("modules/order".into(), FILE, order.into()));
    files.extend(modules.into_iter().map(|(name, content)| (format!("modules/{name}"), FILE, content)));
    files.push(("TRAILER!!!".into(), 0, Vec::new()));
    let mut out = Vec::new();
    for (number, (name, mode, content)) in files.into_iter().enumerate() {
        let (major, minor) = if name == CONSOLE.0 { (5, 1) } else { (0, 0) };
        let fields = [number as u32 + 1, mode, 0, 0, 1, 0, content.len() as u32, 0, 0, major, minor];
        out.extend(b"070701");
        fields.iter().for_each(|field| out.extend(format!("{field:08X}").bytes()));
        out.extend(format!("{:08X}{:08X}{name}\0", name.len() + 1, 0).bytes());
        out.resize(out.len().next_multiple_of(4), 0);
        out.extend(content);
        out.resize(out.len().next_multiple_of(4), 0);
    }
    out
}

/// A guest under `weir vm`. It is killed when this is dropped.
struct Guest {
    weir: Child,
    serial: ChildStdin,
    lines: Receiver<String>,
    limit: u64,
    monitor: PathBuf,
    scratch: Scratch,
}

impl Guest {
    /// Boots a guest with so many MiB, of which `limit` MiB may be resident.
    fn boot(name: &str, ram: u64, limit: u64) -> Option<Self> {
        if !has_qemu(name) || !can_run(name) {
            return None;
        }
        let (image, directory) = kernel(name)?;
        let scratch = Scratch::new(name);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vm/guest.c");
        let init = scratch.0.join("init");
        let compiled = Command::new("cc").args(["-O2", "-static", "-o"]).args([&init, &source]).output();
        let Ok(compiled) = compiled else {
            println!("skipped: {name}: no C compiler");
            return None;
        };
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        let first = scratch.0.join("first");
        fs::write(&first, archive(&init, modules(&directory))).unwrap();
        let monitor = scratch.0.join("monitor");
        let mut command = Command::new(WEIR);
        command.args(["vm", "--resident", &format!("{limit}MiB"), "--", QEMU]);
        // One processor: with two, QEMU may run code that the other one is changing ("Oops: int3").
        command.args(["-accel", "tcg,thread=multi", "-cpu", "qemu64,-cx16", "-M", "q35", "-smp", "1"]);
        command.args(["-m", &format!("{ram}M"), "-nodefaults", "-no-user-config", "-display", "none"]);
        command.args(["-no-reboot", "-chardev", "stdio,id=line,signal=off", "-serial", "chardev:line"]);
        command.args(["-device", "virtio-balloon-pci", "-sandbox", "on,spawn=deny,resourcecontrol=deny"]);
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", monitor.display()));
        command.arg("-kernel").arg(image).arg("-initrd").arg(first).arg("-append");
        command.arg(
            "console=ttyS0 panic=-1 loglevel=3 mitigations=off tsc=reliable no_timer_check rdinit=/init",
        );
        command.env("TMPDIR", &scratch.0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut weir = command.spawn().unwrap();
        let (say, lines) = channel();
        let output = BufReader::new(weir.stdout.take().expect("piped"));
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = say.send(line);
            }
        });
        let serial = weir.stdin.take().expect("piped");
        let mut guest = Guest { weir, serial, lines, limit, monitor, scratch };
        guest.hear("up");
        Some(guest)
    }

    /// Waits until the guest has done a command. Returns the number that it says.
    fn hear(&mut self, command: &str) -> u64 {
        let (begun, mut all) = (Instant::now(), String::new());
        let longest = if is_full() { 100 * PATIENCE } else { 10 * PATIENCE };
        while begun.elapsed() < longest {
            let Ok(line) = self.lines.recv_timeout(Duration::from_secs(1)) else {
                assert!(self.weir.try_wait().unwrap().is_none(), "it ended: {all}");
                continue;
            };
            if let Some(number) = line.trim().strip_prefix(&format!("done {command} ")) {
                println!("vm: {command} after {:.1} s", begun.elapsed().as_secs_f32());
                return number.parse().unwrap();
            }
            all += &format!("{line}\n");
        }
        panic!("the guest does not answer: {all}");
    }

    fn ask(&mut self, command: &str) {
        writeln!(self.serial, "{command}").unwrap();
    }

    fn does(&mut self, command: &str) -> u64 {
        self.ask(command);
        self.hear(command.split(' ').next().expect("a word"))
    }

    fn process(&self) -> u32 {
        let weir = self.weir.id();
        let children = fs::read_to_string(format!("/proc/{weir}/task/{weir}/children")).unwrap();
        let is_qemu = |process: &&str| {
            fs::read_to_string(format!("/proc/{process}/comm")).is_ok_and(|name| name.starts_with("qemu"))
        };
        children.split_whitespace().find(is_qemu).expect("QEMU runs").parse().unwrap()
    }

    /// Kills the daemon that has the guest's pages. Its keeper starts another one.
    fn kill_daemon(&self) {
        let qemu = self.process();
        let others = children(self.weir.id()).into_iter().filter(|process| *process != qemu);
        let daemons: Vec<u32> = others.flat_map(children).collect();
        assert_eq!(daemons.len(), 1, "a keeper has its daemon");
        kill(daemons[0]);
    }

    /// Memory of QEMU that is managed and resident, in KiB.
    fn resident(&self) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/smaps", self.process())).unwrap();
        let (mut rss, mut sum) = (0, 0);
        for line in text.lines() {
            if let Some(size) = line.strip_prefix("Rss:") {
                rss = size.trim().trim_end_matches(" kB").parse().unwrap();
            } else if line.starts_with("VmFlags:") && line.contains(" um") {
                sum += rss;
            }
        }
        sum
    }

    /// Changes the limit, in MiB. Its exit code is not looked at: a busy machine may take longer
    /// than the command waits.
    fn limit(&mut self, mib: u64) {
        self.order(&["limit", &self.process().to_string(), &format!("{mib}MiB")]);
        self.limit = mib;
    }

    fn order(&self, arguments: &[&str]) {
        let output = Command::new(WEIR).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() || said.contains("after 10 s"), "{arguments:?}: {said}");
    }

    /// Waits until no more is resident than this many KiB.
    fn shrinks_to(&self, most: u64, what: &str) -> u64 {
        let begun = Instant::now();
        loop {
            let resident = self.resident();
            if resident <= most {
                return resident;
            }
            assert!(begun.elapsed() < 3 * PATIENCE, "{resident} KiB are resident, not {most}: {what}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until the limit is kept. The parts of a mapping that are no whole blocks do not count,
    /// and QEMU has some mappings besides the guest's memory.
    fn keeps_its_limit(&self) {
        self.shrinks_to(self.limit * 1024 * 105 / 100 + 8 * 1024, "the limit is not kept");
    }

    fn tell_monitor(&self, commands: &[serde_json::Value]) -> serde_json::Value {
        let stream = UnixStream::connect(&self.monitor).unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let mut answer = serde_json::Value::Null;
        let first = serde_json::json!({"execute": "qmp_capabilities"});
        lines.next();
        for command in [&first].into_iter().chain(commands) {
            writeln!(&stream, "{command}").unwrap();
            answer = loop {
                let line = lines.next().expect("an answer").unwrap();
                let said: serde_json::Value = serde_json::from_str(&line).unwrap();
                if said.get("event").is_none() {
                    break said;
                }
            };
        }
        answer
    }

    /// Has the balloon leave the guest so many MiB, and waits until it does.
    fn balloon(&self, mib: u64) {
        let command = serde_json::json!({"execute": "balloon", "arguments": {"value": mib << 20}});
        self.tell_monitor(&[command]);
        let begun = Instant::now();
        loop {
            let said = self.tell_monitor(&[serde_json::json!({"execute": "query-balloon"})]);
            if said["return"]["actual"].as_u64() == Some(mib << 20) {
                return;
            }
            assert!(begun.elapsed() < 10 * PATIENCE, "the balloon does not come to {mib} MiB: {said}");
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Ends QEMU as a user would. All that the run had is gone then.
    fn ends(mut self) {
        let _ = rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.weir),
            rustix::process::Signal::TERM,
        );
        assert_eq!(self.weir.wait().unwrap().code(), Some(0));
        assert!(!directory_in(&self.scratch.0, self.weir.id()).exists());
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // The end of `weir vm` without warning would leave QEMU.
        if self.weir.try_wait().is_ok_and(|ended| ended.is_none()) {
            let _ = rustix::process::kill_process(
                rustix::process::Pid::from_raw(self.process().cast_signed()).expect("a number"),
                rustix::process::Signal::KILL,
            );
            let _ = self.weir.wait();
        }
    }
}

#[test]
fn a_guest_has_every_page_in_a_third_of_its_memory_whatever_its_limit_does() {
    let (ram, limit, area, rounds, churn) =
        if is_full() { (1152, 256, 768, 5, 20_000) } else { (320, 64, 192, 1, 8_000) };
    let name = "a_guest_has_every_page";
    let Some(mut guest) = Guest::boot(name, ram, limit) else { return };
    guest.does(&format!("have {area}"));
    assert_eq!(guest.does("check"), 0);
    guest.keeps_its_limit();
    let symbols = guest.does("kernel");
    let mut least = u64::MAX;
    for _ in 0..rounds {
        // The limit is halved and doubled while the guest works.
        guest.ask(&format!("churn {churn}"));
        guest.limit(limit / 2);
        guest.limit(limit);
        guest.limit(limit / 2);
        assert_eq!(guest.hear("churn"), 0);
        guest.keeps_its_limit();
        assert_eq!(guest.does("check"), 0);
        guest.limit(limit);
        // The daemon dies while the guest needs it.
        guest.ask(&format!("churn {churn}"));
        guest.kill_daemon();
        assert_eq!(guest.hear("churn"), 0);
        // The balloon takes memory while it moves out, and gives it back.
        guest.ask(&format!("churn {churn}"));
        guest.balloon(ram - ram / 12);
        guest.order(&["evict", &guest.process().to_string()]);
        guest.balloon(ram);
        assert_eq!(guest.hear("churn"), 0);
        assert_eq!(guest.does("check"), 0);
        // An idle guest is shrunk to a tenth, with its kernel.
        guest.order(&["evict", &guest.process().to_string()]);
        least = least.min(guest.shrinks_to(ram * 1024 / 10, "the guest idles"));
        assert_eq!(guest.does("kernel"), symbols, "the kernel's own pages");
        assert_eq!(guest.does("check"), 0);
        guest.keeps_its_limit();
    }
    println!("figure: vm memory_mib {ram}");
    println!("figure: vm limit_mib {limit}");
    println!("figure: vm verified_area_mib {area}");
    println!("figure: vm rounds {rounds}");
    println!("figure: vm daemons_killed {rounds}");
    println!("figure: vm idle_after_evict_mib {} lower", least / 1024);
    println!("figure: vm wrong_words 0 lower 0");
    guest.ends();
}

fn weir_vm(arguments: &[&str]) -> Output {
    let mut run = Command::new(WEIR)
        .args(["vm", "--resident"])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while run.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < 3 * PATIENCE, "{arguments:?} goes on");
        thread::sleep(Duration::from_millis(10));
    }
    run.wait_with_output().unwrap()
}

#[test]
fn a_guest_that_cannot_be_bounded_is_refused_in_one_line() {
    let name = "a_guest_that_cannot_be_bounded";
    if !has_qemu(name) || !can_run(name) {
        return;
    }
    let scratch = Scratch::new(name);
    let options = "[object \"ram\"]\n qom-type = \"memory-backend-memfd\"\n size = \"256M\"\n[machine]\n memory-backend = \"ram\"\n";
    let options = scratch.file("options", options);
    let options = options.to_str().unwrap();
    let still = [QEMU, "-S", "-display", "none", "-nodefaults", "-M", "q35"];
    for (limit, more, line) in [
        ("64MiB", &["-daemonize"][..], "weir: -daemonize cannot be bounded: it forks"),
        ("64MiB", &["-mem-path", "/dev/shm"], "weir: -mem-path /dev/shm cannot be bounded: only private"),
        // The file of options shows nothing of it to `weir vm`. Its mapping does.
        (
            "64MiB",
            &["-m", "256M", "-readconfig", options],
            "weir: the virtual machine was ended: 256MiB of its memory cannot be bounded",
        ),
    ] {
        let said = weir_vm(&[&[limit, "--"], &still[..], more].concat());
        let text = String::from_utf8_lossy(&said.stderr);
        let told: Vec<&str> = text.lines().filter(|line| !line.starts_with("qemu-system")).collect();
        assert_eq!(said.status.code(), Some(1), "{text}");
        assert!(told.len() == 1 && told[0].starts_with(line), "{text}");
    }
    let small = ["64MiB", "--store", "host:64MiB", "--", QEMU, "-m", "1G"];
    for (arguments, line) in [
        (
            &["64MiB", "--", "/bin/true"][..],
            "weir: /bin/true is not QEMU; weir run bounds programs of every kind\n",
        ),
        (
            &small[..],
            "weir: the guest may have 1GiB of memory, and there is room for 64MiB beside the limit of 64MiB; make --store larger by 896MiB\n",
        ),
    ] {
        assert_eq!(String::from_utf8_lossy(&weir_vm(arguments).stderr), line);
    }
}

#[test]
fn a_killed_qemu_leaves_nothing_behind_and_its_signal_is_told() {
    let name = "a_killed_qemu";
    if !has_qemu(name) || !can_run(name) {
        return;
    }
    let mut run = Command::new(WEIR)
        .args(["vm", "--resident", "64MiB", "--", QEMU, "-display", "none", "-m", "256M"])
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    let listed = || {
        let said = Command::new(WEIR).arg("status").output().unwrap().stdout;
        let said = String::from_utf8_lossy(&said).into_owned();
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", run.id())).unwrap();
        let mut children = children.split_whitespace().map(str::to_owned);
        children.find(|child| said.contains(&format!("{child} qemu-system")))
    };
    let process = loop {
        if let Some(process) = listed() {
            break process;
        }
        assert!(begun.elapsed() < 3 * PATIENCE, "weir status does not list it");
        thread::sleep(Duration::from_millis(20));
    };
    let process = rustix::process::Pid::from_raw(process.parse().unwrap()).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(128 + 9));
    let mut said = String::new();
    run.stderr.take().expect("piped").read_to_string(&mut said).unwrap();
    assert_eq!(said, "");
    assert!(!directory_of(run.id()).exists());
}
