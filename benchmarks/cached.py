"""A cache that a benchmark creates: `weir cache create`, until it is detached."""

import json
import subprocess
import time


class NoStart(SystemExit):
    """A cache that has not started, and why."""


class Cache:
    """A cache that runs, its seconds of creation, and its first status. `store` has no size, `size` is its own.

    It is served as `file`; with by="nbd", at the NBD address `uri`.
    """

    def __init__(self, weir, directory, home, store, size, more=(), by="fuse"):
        self.weir, self.control, self.file = weir, f"{directory}/control", f"{directory}/file"
        self.nbd = f"{directory}/nbd"
        self.uri = f"nbd+unix:///?socket={self.nbd}"
        served = ["--nbd", f"unix:{self.nbd}"] if by == "nbd" else ["--fuse", self.file]
        begun = time.monotonic()
        self.process = subprocess.Popen(
            [weir, "cache", "create", "--home", home, "--store", sized(store, size), *served, "--control", self.control, *more],
            stderr=subprocess.PIPE, text=True)
        while not (found := self.status()):
            if self.process.poll() is not None:
                raise NoStart(f"the cache does not start: {self.process.stderr.read().strip()}")
            time.sleep(0.02)
        self.seconds, self.first = time.monotonic() - begun, found

    def status(self):
        """The cache's status; None while it does not answer."""
        answer = subprocess.run([self.weir, "cache", "status", "--json", "--control", self.control], capture_output=True, check=False)
        return json.loads(answer.stdout) if answer.returncode == 0 else None

    def detach(self):
        """Brings all dirty pages home, and ends the cache. Returns the seconds that it took."""
        begun = time.monotonic()
        subprocess.run([self.weir, "cache", "detach", "--control", self.control], check=True, stdout=subprocess.DEVNULL)
        self.process.wait(60)
        return time.monotonic() - begun

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Without a detach something has failed.
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


def sized(store, size):
    """The URL of a store of this size: `host` becomes host:1GiB, `vram:0` becomes vram:0?size=1GiB."""
    if ":" not in store:
        return f"{store}:{size}"
    return f"{store}{'&' if '?' in store else '?'}size={size}"
