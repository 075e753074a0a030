"""A process within a limit of its memory cgroup, and a swap device for it. Both are undone when they are closed."""

import os
import subprocess
import time

# Swap of the contenders that swap, in MiB.
SWAP_MIB = 2048


class Unfit(Exception):
    """A contender cannot run here."""


def write(path, value):
    """Writes one value into a file of the kernel's."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(str(value))


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
    """A swap device of this kind, and no other device beside it."""

    def __init__(self, kind, weir, store, directory):
        for _ in range(120):
            with open("/proc/swaps", encoding="utf-8") as file:
                if len(file.readlines()) == 1:
                    break
            time.sleep(0.5)
        else:
            raise Unfit("another swap device is on")
        self.kind, self.weir, self.runtime, self.number, self.path = kind, weir, f"{directory}/on", None, None
        try:
            self.on(store, directory)
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, subprocess.CalledProcessError)):
                raise Unfit(f"{kind}: {error}") from error
            raise

    def on(self, store, directory):
        if self.kind == "weir":
            flags = ["--front", "fuse", "--store", store, "--size", f"{SWAP_MIB}MiB", "--unsafe-no-flusher", "--allow-hibernation", "--runtime", self.runtime]
            subprocess.run([self.weir, "on", *flags], check=True, stdout=subprocess.DEVNULL)
            return
        if self.kind == "zram":
            with open("/sys/class/zram-control/hot_add", encoding="utf-8") as file:
                self.number = int(file.read())
            self.path = f"/dev/zram{self.number}"
            write(f"/sys/block/zram{self.number}/disksize", f"{SWAP_MIB}M")
        else:
            self.path = f"{directory}/swap"
            with open(self.path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, SWAP_MIB << 20)
            os.chmod(self.path, 0o600)
        subprocess.run(["mkswap", "-q", self.path], check=True)
        subprocess.run(["swapon", self.path], check=True)

    def close(self):
        """Undoes as much as was done."""
        if self.kind == "weir":
            if os.path.exists(self.runtime):
                subprocess.run([self.weir, "off", "--runtime", self.runtime], check=True, stdout=subprocess.DEVNULL)
            return
        with open("/proc/swaps", encoding="utf-8") as file:
            is_on = self.path is not None and any(line.split()[0] == self.path for line in file)
        if is_on:
            subprocess.run(["swapoff", self.path], check=True)
        if self.number is not None:
            write("/sys/class/zram-control/hot_remove", self.number)
        elif self.path is not None:
            os.unlink(self.path)
