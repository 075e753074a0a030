"""A run's figures: rows with goals, as `weir bench` writes them."""

import datetime
import os
import platform
import subprocess
import time

from . import uml

HEARTBEAT = "heartbeat"


def rows(share, heartbeat_goal, open_gap=False):
    """The rows that the scenario left, and the heartbeat's longest gap; with `open_gap`, also the one from its last beat to now."""
    found = []
    for line in _lines(f"{share}/figures"):
        name, metric, value, better, goal = (line.split("\t") + [""])[:5]
        found.append(row(name, metric, float(value), better or None, float(goal) if goal else None))
    gaps = [float(line.split()[0]) for line in _lines(f"{share}/heartbeat")]
    if open_gap and os.path.exists(f"{share}/heartbeat"):
        # What the last beat wrote may never have left the guest; when it began to is known.
        gaps = [max([*gaps, round(time.time() - os.stat(f"{share}/heartbeat").st_mtime, 3)])]
    found += [row(HEARTBEAT, "max_gap_s", gap, "lower", heartbeat_goal) for gap in gaps]
    return found


def row(name, metric, value, better, goal):
    """One figure, and whether it reaches its goal."""
    figure = {"id": name, "metric": metric, "value": value}
    if better:
        figure["better"] = better
    if goal is not None:
        figure["goal"] = goal
        figure["met"] = value <= goal if better == "lower" else value >= goal
    return figure


def of(bench, tree, passed, seconds, figures):
    """One JSON object for what a script of the tests found."""
    return {
        "schema": 1,
        "bench": bench,
        "passed": passed,
        "seconds": round(seconds, 2),
        "commit": commit(tree),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {"cpu": cpu(), "cores": os.cpu_count(), "kernel": platform.release(), "gpu": None, "driver": None},
        "runs": 1,
        "rows": figures,
    }


def document(tree, scenario, kernel, scale, passed, seconds, figures):
    """One JSON object for one run of a scenario."""
    guest = {
        "kernel": kernel.release,
        "boot": kernel.boot,
        "memory_mib": scenario.memory_mib,
        "cpus": 1 if kernel.boot == "uml" and not uml.has_smp(kernel) else scenario.cpus,
    }
    more = {"scenario": scenario.name, "scale": scale, "guest": guest}
    return of("lab", tree, passed, seconds, figures) | more


def _lines(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def commit(tree):
    """The commit under test; None outside a repository."""
    command = ["git", "-C", tree, "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def cpu():
    """The processor's name."""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
