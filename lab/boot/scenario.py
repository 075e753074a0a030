"""What a scenario says of itself: the `# key: value` lines at its head."""

import dataclasses
import os
import re

from . import kernels

CI, FULL = SCALES = ("ci", "full")
# Factor on the heartbeat's allowed delay at CI scale. Any machine runs that scale, with other work
# on it. A machine that freezes stands still for minutes.
CI_PATIENCE = 10
ABOUT = "about"
# Key -> default value, or None where the head must give one.
KEYS = {
    ABOUT: None,
    "kernel": "uml-6.1",
    "memory": "512M",
    "cpus": "2",
    "takes": "60",
    "limit": "120",
    "limit-full": "900",
    "heartbeat": "",
    "needs": "",
    "builds": "",
    "profile-full": "checked",
    "modules": "",
    "clients": "",
    "clock": "host",
    "boots-full": "1",
    "test-at": "ci",
    "root": "host",
}
# Owner of the guest's root file system: the host, or a Debian of its own.
ROOTS = ("host", "debian")
# Base of the guest's clock: the host's clock, or the number of instructions that the guest has run.
CLOCKS = ("host", "instructions")
# Cargo profile of the guest's programs: with every assertion, or as shipped, for comparisons with
# other programs.
PROFILES = ("checked", "release")


class BadScenario(Exception):
    """A head that cannot be read; says which key and what is accepted."""


@dataclasses.dataclass
class Scenario:
    """One file of lab/scenarios, as the host sees it."""

    name: str
    path: str
    about: str
    kernel: str  # a name of kernels.KNOWN
    memory_mib: int
    cpus: int  # of an emulated machine; boot/uml.py says what UML gets
    limit_s: dict  # scale -> seconds
    heartbeat_s: float | None  # longest gap allowed, where the scenario promises one
    needs: list  # programs on the host's PATH
    builds: list  # cargo packages whose programs the guest runs
    profile: dict  # scale -> cargo's, for them
    modules: list  # directories with a Kbuild Makefile
    clients: list  # directories of C programs, built against this kernel's own headers
    counts: bool  # its clock counts instructions
    boots: dict  # scale -> how many guests run it, one after the other
    own_root: bool  # Debian with systemd, on a disk of its own

    def heartbeat_goal(self, scale):
        """The longest gap, in seconds, that a run of this scale passes with; None where there is none."""
        if self.heartbeat_s is None:
            return None
        return self.heartbeat_s * (1 if scale == FULL else CI_PATIENCE)


def read(path):
    """The scenario in one file."""
    said = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            if not line.startswith("#"):
                break
            match = re.match(r"# ([a-z-]+): (.*)$", line)
            if match:
                said[match.group(1)] = match.group(2).strip()
    name = os.path.basename(path)
    for key in said:
        if key not in KEYS:
            raise BadScenario(f"{name}: unknown key {key!r}; keys are {', '.join(KEYS)}")
    if ABOUT not in said:
        raise BadScenario(f"{name}: no '# about:' line")
    said = {**KEYS, **said}
    if said["kernel"] not in kernels.KNOWN:
        raise BadScenario(f"{name}: kernel {said['kernel']!r}; known are {', '.join(kernels.KNOWN)}")
    if said["root"] not in ROOTS:
        raise BadScenario(f"{name}: root {said['root']!r}; known are {', '.join(ROOTS)}")
    if said["profile-full"] not in PROFILES:
        raise BadScenario(f"{name}: profile-full {said['profile-full']!r}; known are {', '.join(PROFILES)}")
    if said["clock"] not in CLOCKS:
        raise BadScenario(f"{name}: clock {said['clock']!r}; known are {', '.join(CLOCKS)}")
    if said["test-at"] not in SCALES:
        raise BadScenario(f"{name}: test-at {said['test-at']!r}; known are {', '.join(SCALES)}")
    memory = re.fullmatch(r"(\d+)([MG])", said["memory"])
    if not memory:
        raise BadScenario(f"{name}: memory {said['memory']!r}; accepted are 512M, 2G and the like")
    return Scenario(
        name=name,
        path=path,
        about=said[ABOUT],
        kernel=said["kernel"],
        memory_mib=int(memory.group(1)) * (1024 if memory.group(2) == "G" else 1),
        cpus=int(said["cpus"]),
        limit_s={"ci": int(said["limit"]), "full": int(said["limit-full"])},
        heartbeat_s=float(said["heartbeat"]) if said["heartbeat"] else None,
        needs=said["needs"].split(),
        builds=said["builds"].split(),
        profile={"ci": "checked", "full": said["profile-full"]},
        modules=said["modules"].split(),
        clients=said["clients"].split(),
        counts=said["clock"] == "instructions",
        boots={CI: 1, FULL: int(said["boots-full"])},
        own_root=said["root"] == "debian",
    )


def read_all(directory):
    """Every scenario of a directory, by name."""
    paths = [os.path.join(directory, name) for name in sorted(os.listdir(directory))]
    return {scenario.name: scenario for scenario in map(read, filter(os.path.isfile, paths))}
