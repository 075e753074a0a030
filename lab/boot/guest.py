"""One boot: a directory shared with the guest, its processes, and an end that leaves neither behind."""

import ctypes
import dataclasses
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from . import qemu, uml
from .outcome import Died, Failed, Missing

BOOTS = {"uml": uml, "qemu": qemu}
# Escape sequences and control characters, all but tab and newline.
CONTROL = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b.|[\x00-\x08\x0b-\x1f\x7f]")
PR_SET_CHILD_SUBREAPER = 36
MEMORY = "/dev/shm"
# Words that a kernel prints when it runs into code that it has half changed. Only an emulated
# processor shows the kernel such code (lab/README.md).
EMULATOR = b"Oops: int3"
# Seconds without its files after which a guest that is alive has lost them.
LOST_S = 20
# Kernel functions in which a program waits for the contents of a file. A program that waits for
# memory or swap waits in other functions.
FOR_FILES = re.compile(rb"request_wait_answer|virtio_fs|filemap_fault|filemap_get_pages|filemap_update_page")
FOR_MEMORY = re.compile(rb"swap|alloc_pages|try_to_free|shrink_|mem_cgroup|folio_alloc")
# Seconds without a beat after which the emulator does not run the guest. The heartbeat needs
# nothing but a processor.
STOPPED_S = 60
# Seconds that a guest has to begin its scenario. Half of its time limit counts where that is less.
BOOT_S = 240
# Seconds between two looks at a silent guest.
LOOK_S = 0.2
# The guest has no terminal to log in at. The output of systemd goes to the guest's journal, where
# the scenario reads it.
SYSTEMD_ARGUMENTS = ["systemd.getty_auto=no", "systemd.show_status=no", "systemd.log_target=kmsg"]
# Waits for a line. If the input closes without a line, this process was killed. The guest must then
# not go on alone.
WATCH = 'read -r _ || { kill -KILL "-$1"; rm -rf -- "$2"; }'


@dataclasses.dataclass
class Guest:
    """A scenario's machine: what it must have, and the directory that host and guest share."""

    memory_mib: int
    cpus: int
    limit_s: int
    share: str
    mounts: list = dataclasses.field(default_factory=list)  # (host path, guest path, "ro" or "rw")
    boot: str = ""
    emulator_erred: bool = False
    counts: bool = False  # its clock counts instructions: one is a nanosecond
    image: str | None = None  # the file system of a root of its own; else the host's / is its root, read-only

    def kernel_arguments(self):
        """What the guest's init reads from its kernel's command line."""
        mounts = []
        for host, guest, mode in self.mounts:
            if re.search(r"[\s,:\"]", host):
                raise Missing(f"a path without spaces, commas and colons, instead of {host!r}")
            mounts.append(f"lab_mount={host}:{guest}:{mode}")
        own = [f"lab_root={BOOTS[self.boot].DISK}", *SYSTEMD_ARGUMENTS] if self.image else []
        # A kernel that went wrong ends its scenario at once, instead of standing still until the
        # time limit.
        return ["oops=panic", f"lab_boot={self.boot}", f"lab_limit={self.limit_s}", *own, *mounts]


def new_share():
    """A directory for one run, on a file system that takes unix sockets.

    In memory unless TMPDIR says where: a User-Mode Linux stands still for as long as the host keeps a write waiting, and a disk that
    others write to has kept the heartbeat's waiting for seconds.
    """
    here = "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK)
    return tempfile.mkdtemp(prefix="weir-lab-", dir=MEMORY if here else None)


def run(kernel, guest, out):
    """Boots, copies the console to `out` without control codes, and returns the scenario's exit code.

    A guest with a root of its own boots again as often as its scenario asks for it, all within one time limit.

    # Errors
    `Failed` when the time limit passes or when the guest ends without a word: a panic, or a host that killed it; `Died` where the
    scenario had no part in that.
    """
    guest.boot = kernel.boot
    guest.mounts += [
        (guest.share, "/run/lab", "rw"),
        (kernel.modules, f"/run/kernel/lib/modules/{kernel.release}", "ro"),
    ]
    # UML forks a process for each process of the guest. Orphans become children of this process, so
    # that it can end them all.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    deadline = time.monotonic() + guest.limit_s
    _boot(kernel, guest, deadline, out)
    while os.path.exists(f"{guest.share}/again"):
        os.unlink(f"{guest.share}/again")
        _boot(kernel, guest, deadline, out)
    try:
        with open(f"{guest.share}/exit", encoding="ascii") as file:
            return int(file.read())
    except (FileNotFoundError, ValueError):
        pass
    if not os.path.exists(f"{guest.share}/begun"):
        raise Died("the guest ended before its scenario began (its console is above)")
    if kernel.boot == "qemu" and guest.emulator_erred:
        raise Died("the guest's kernel died of its emulator (its console is above)")
    raise Failed("the guest ended before its scenario did (its console is above)")


def _boot(kernel, guest, deadline, out):
    """One boot, to the end of all its processes."""
    boot = BOOTS[kernel.boot]
    processes, watch = boot.prepare(kernel, guest), None
    try:
        line, environment = boot.command(kernel, guest)
        console = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        processes.append(console)
        watch = subprocess.Popen(
            ["/bin/sh", "-c", WATCH, "weir-lab-watch", str(console.pid), guest.share],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        in_time = _copy(console, deadline, out, Alarm(console.pid, f"{guest.share}/wake"), guest)
    finally:
        _end(processes, watch)
    if not in_time:
        raise Failed(f"the time limit of {guest.limit_s} s passed")


class Alarm:
    """Wakes a User-Mode Linux that sleeps, which takes a signal from outside: as many seconds after it wrote `path` as that says."""

    def __init__(self, pid, path):
        self.pid, self.path = pid, path

    def look(self):
        """Call this a few times a second."""
        try:
            with open(self.path, encoding="ascii") as file:
                said = file.read()
            if said.endswith("\n") and time.time() >= os.stat(self.path).st_mtime + float(said):
                os.unlink(self.path)
                os.kill(self.pid, signal.SIGUSR1)
        except FileNotFoundError:
            pass


def _copy(console, deadline, out, alarm, guest):
    """Copies until the console closes (true) or the deadline passes (false), and notes what the emulator does wrong."""
    pending = b""
    stream = console.stdout
    pulse = Pulse(guest)
    while True:
        if time.monotonic() >= deadline:
            return False
        alarm.look()
        why = pulse.look()
        if why:
            out.writelines(f"{line}\n" for line in BOOTS[guest.boot].where(guest))
            raise Died(why)
        if not select.select([stream], [], [], LOOK_S)[0]:
            continue
        data = os.read(stream.fileno(), 1 << 16)
        lines = (pending + data).split(b"\n")
        pending = lines.pop() if data else b""
        for text in lines:
            guest.emulator_erred |= EMULATOR in text
            out.write(CONTROL.sub(b"", text).decode(errors="replace") + "\n")
        out.flush()
        if not data:
            return True


class Pulse:
    """Tells a guest that its emulator or its file server has left alone from one that hangs by what it does (lab/README.md).

    Times are those in which this process ran: a host that stood still itself is no evidence.
    """

    def __init__(self, guest):
        self.share, self.emulated = guest.share, guest.boot == "qemu"
        self.boot_s = min(BOOT_S, guest.limit_s / 2)
        # The lab's own tests set a smaller factor.
        self.patience = float(os.environ.get("WEIR_LAB_PATIENCE", "1"))
        self.looked = time.monotonic()
        self.begun = False
        self.silent_s = {"heartbeat": 0.0, "alive": 0.0, "begun": 0.0}
        self.seen = dict.fromkeys(self.silent_s)

    def look(self):
        """Call this a few times a second. Why the guest is to be given up; None where it is well, or hangs by itself."""
        now = time.monotonic()
        passed, self.looked = min(now - self.looked, 1.0), now
        for name in self.silent_s:
            try:
                seen = os.stat(f"{self.share}/{name}")
                # The emulator makes the serial line's file before the guest writes there.
                seen = seen.st_mtime_ns if seen.st_size or name == "begun" else None
            except FileNotFoundError:
                seen = None
            new = seen != self.seen[name]
            self.seen[name] = seen
            self.silent_s[name] = 0.0 if new else self.silent_s[name] + passed
        if self.seen["begun"] is None:
            return f"it has not begun its scenario after {self.boot_s:.0f} s" if self.silent_s["begun"] > self.boot_s else None
        if not self.begun:
            self.begun = True
            self.silent_s = dict.fromkeys(self.silent_s, 0.0)
        if not self.emulated or self.seen["alive"] is None:
            return None
        if self.silent_s["alive"] > STOPPED_S * self.patience:
            return f"its processors stand still: nothing ran on them for {self.silent_s['alive']:.0f} s"
        if self.silent_s["heartbeat"] - self.silent_s["alive"] > LOST_S * self.patience and self._waits_for_files():
            return "it is alive, and no file of the host's has reached it any more"
        return None

    def _waits_for_files(self):
        with open(f"{self.share}/alive", "rb") as file:
            last = file.read().rstrip().rsplit(b"\n", 1)[-1]
        return bool(FOR_FILES.search(last)) and not FOR_MEMORY.search(last)


def _end(processes, watch):
    """Kills the processes that still run, also those that were left to this one, and waits for their end."""
    for process in processes:
        if process.poll() is None:
            with_group = os.getpgid(process.pid) == process.pid
            (os.killpg if with_group else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
    if watch:
        watch.communicate(b"\n")
    while True:
        orphans = _children()
        if not orphans:
            return
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def _children():
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


def remove_share(share, keep):
    """Removes the run's directory, or prints its path if it is to stay."""
    if keep:
        print(f"lab: kept {share}", file=sys.stderr)
    else:
        shutil.rmtree(share, ignore_errors=True)
