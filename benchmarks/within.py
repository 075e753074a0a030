"""A process within a limit of its memory cgroup, and a swap device for it. Both are undone when they are closed."""

import contextlib
import os
import signal
import subprocess
import sys
import time

from cached import Cache, NoStart, sized

# Swap of the contenders that swap, in MiB.
SWAP_MIB = 2048


class Unfit(Exception):
    """A contender cannot run here."""


def write(path, value):
    """Writes one value into a file of the kernel's."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(str(value))


# The exit code after SIGTERM or SIGHUP.
ENDED = 143


def _ended(*_):
    sys.exit(ENDED)


def undo_at_signals():
    """Has SIGTERM and SIGHUP undo everything, as SIGINT does."""
    signal.signal(signal.SIGTERM, _ended)
    signal.signal(signal.SIGHUP, _ended)


class Cgroup:
    """A memory cgroup of either version, which the child enters."""

    def __init__(self, mib):
        v2 = os.path.exists("/sys/fs/cgroup/cgroup.controllers")
        self.path = f"/sys/fs/cgroup/{'' if v2 else 'memory/'}weir-bench-{os.getpid()}"
        try:
            if v2:
                write("/sys/fs/cgroup/cgroup.subtree_control", "+memory")
            os.mkdir(self.path)
            write(f"{self.path}/{'memory.max' if v2 else 'memory.limit_in_bytes'}", mib << 20)
        except OSError as error:
            raise Unfit(f"no memory cgroup: {error}") from error

    def enter(self):
        write(f"{self.path}/cgroup.procs", os.getpid())

    def close(self):
        for _ in range(100):
            try:
                return os.rmdir(self.path)
            except OSError:
                time.sleep(0.05)
        return None


class Swap:
    """A swap device of this kind, and no other device beside it.

    zram: compressed memory. disk: a file in `directory`, or a stripe (md raid0) over `disks`. weir: `weir on` over `store`.
    cached: `weir cache create` with `cache` of `store` before a log of `disks`, or of a file in `directory`. stack: `weir stack`,
    with `cache` of `store` before `disks`. `front` says how the devices of the last three come to the kernel: fuse or nbd.
    """

    def __init__(self, kind, weir, store, directory, *, mib=SWAP_MIB, cache=None, disks=(), front="fuse"):
        for _ in range(120):
            with open("/proc/swaps", encoding="utf-8") as file:
                if len(file.readlines()) == 1:
                    break
            time.sleep(0.5)
        else:
            raise Unfit("another swap device is on")
        self.weir, self.store, self.directory, self.mib = weir, store, directory, mib
        self.cache, self.disks, self.front = cache, list(disks), front
        with contextlib.ExitStack() as held:
            try:
                getattr(self, f"_{kind}")(held)
            except (OSError, subprocess.CalledProcessError, NoStart) as error:
                raise Unfit(f"{kind}: {error}") from error
            self.close = held.pop_all().close

    def _swapon(self, held, path):
        run("mkswap", "-q", path)
        run("swapon", path)
        held.callback(swapoff, path)

    def _zram(self, held):
        with open("/sys/class/zram-control/hot_add", encoding="utf-8") as file:
            number = int(file.read())
        held.callback(write, "/sys/class/zram-control/hot_remove", number)
        write(f"/sys/block/zram{number}/disksize", f"{self.mib}M")
        self._swapon(held, f"/dev/zram{number}")

    def _disk(self, held):
        if not self.disks:
            path = f"{self.directory}/swap"
            with open(path, "wb") as file:
                held.callback(os.unlink, path)
                os.posix_fallocate(file.fileno(), 0, self.mib << 20)
            os.chmod(path, 0o600)
            return self._swapon(held, path)
        # Marks of an earlier way.
        run("wipefs", "--quiet", "--all", *self.disks)
        run("mdadm", "--quiet", "--create", "/dev/md0", "--run", "--level=0", f"--raid-devices={len(self.disks)}", "--chunk=512", *self.disks)
        held.callback(run, "mdadm", "--quiet", "--zero-superblock", *self.disks)
        held.callback(run, "mdadm", "--quiet", "--stop", "/dev/md0")
        return self._swapon(held, "/dev/md0")

    def _weir(self, held):
        runtime = f"{self.directory}/on"
        flags = ["--front", self.front, "--store", self.store, "--size", f"{self.mib}MiB", "--allow-hibernation", "--runtime", runtime]
        # A weir on that fails or is interrupted may have done a part.
        held.callback(lambda: os.path.exists(runtime) and run(self.weir, "off", "--runtime", runtime))
        run(self.weir, "on", *flags, *(["--unsafe-no-flusher"] if self.front == "fuse" else []))

    def _cached(self, held):
        if self.disks:
            home = ",".join(self.disks)
            run("wipefs", "--quiet", "--all", *self.disks)
        else:
            # A log takes a fifth for its cleaner.
            path = f"{self.directory}/home"
            home = f"{path}?size={self.mib * 5 // 4}MiB"
            held.callback(lambda: os.path.exists(path) and os.unlink(path))
        cache = Cache(self.weir, self.directory, f"log:{home}", self.store, self.cache, ["--connections", "2"], self.front)
        held.enter_context(cache)
        held.callback(cache.detach)
        if self.front == "nbd":
            # A long time limit: what the disks have not taken by then is late, not lost.
            device = run(self.weir, "attach", f"unix:{cache.nbd}", "--request-timeout", "300").strip()
            held.callback(run, self.weir, "detach", device)
        else:
            device = run("losetup", "--direct-io=on", "--sector-size", "4096", "--find", "--show", cache.file).strip()
            held.callback(run, "losetup", "-d", device)
        self._swapon(held, device)

    def _stack(self, held):
        control, socket = f"{self.directory}/serve", f"{self.directory}/pages"
        server = subprocess.Popen([self.weir, "serve", "--log", "warn", "--store", sized(self.store, self.cache), "--nbd", f"unix:{socket}", "--control", control])
        held.callback(server.wait)
        held.callback(server.terminate)
        while subprocess.run([self.weir, "status", "--control", control], capture_output=True, check=False).returncode:
            if server.poll() is not None:
                raise Unfit(f"weir serve has ended with {server.returncode}")
            time.sleep(0.05)
        device = run(self.weir, "attach", f"unix:{socket}", "--control", control).strip()
        held.callback(run, self.weir, "detach", device)
        run("wipefs", "--quiet", "--all", *self.disks)
        held.callback(run, "wipefs", "--quiet", "--all", *self.disks)
        path = run(self.weir, "stack", "create", "--mode", "write-back", "--stream", "0", "--cache", device, *self.disks).strip()
        held.callback(run, self.weir, "stack", "destroy", "--wipe")
        self._swapon(held, path)


def swapoff(path):
    """Ends a swap device. If that fails, nothing below it may go: its pages are in use."""
    done = subprocess.run(["swapoff", path], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{path} is still on as swap, and all below it runs on: {done.stderr.strip()}; swapoff {path}", flush=True)
        os._exit(1)


def run(*command):
    """Runs a command, and returns what it printed."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
