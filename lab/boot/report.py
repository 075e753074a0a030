"""A run's figures: rows with goals, as `weir bench` writes them."""

import datetime
import os
import platform
import statistics
import subprocess
import time

HEARTBEAT = "heartbeat"


def rows(share, heartbeat_goal, open_gap=False):
    """The rows that the scenario left, and the heartbeat's longest gap; with `open_gap`, also the one from its last beat to now."""
    found = []
    for line in _lines(f"{share}/figures"):
        name, metric, value, better, goal = (line.split("\t") + [""])[:5]
        found.append(row(name, metric, float(value), better or None, float(goal) if goal else None))
    gaps = [float(line.split()[0]) for line in _lines(f"{share}/heartbeat")]
    if open_gap and os.path.exists(f"{share}/heartbeat"):
        # The last beat's line may never have left the guest. The time at which the guest began to
        # write it is known.
        gaps = [max([*gaps, round(time.time() - os.stat(f"{share}/heartbeat").st_mtime, 3)])]
    found += [row(HEARTBEAT, "max_gap_s", gap, "lower", heartbeat_goal) for gap in gaps]
    return found


def row(name, metric, value, better="lower", goal=None, control=None, control_value=None, goal_of="value", ratio=None):
    """One figure, and whether it is as good as its goal. `goal_of`: whether the goal is for the value or for its ratio to the
    control's, which may be given where it is not that of the two values (a median of pairs)."""
    if ratio is None and control_value:
        ratio = value / control_value
    judged = value if goal_of == "value" else ratio
    reached = None
    if goal is not None:
        reached = judged is not None and (judged <= goal if better == "lower" else judged >= goal)
    return {
        "id": name,
        "metric": metric,
        "value": round(value, 4),
        "control": control,
        "control_value": None if control_value is None else round(control_value, 4),
        "ratio": None if ratio is None else round(ratio, 4),
        "goal": goal,
        "goal_of": None if goal is None else goal_of,
        "better": better,
        "met": reached,
    }


def of(bench, commit, card, runs, figures):
    """One JSON object for what a script found. `card`: a GPU's name and its driver's version, where one was used."""
    gpu, driver = card or ("none", "none")
    return {
        "schema": 1,
        "bench": bench,
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {
            "cpu": cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "gpu": gpu,
            "driver": driver,
        },
        "runs": runs,
        "rows": figures,
    }


def verdict(bench, tree, passed, seconds, figures):
    """The row of a test: whether it passed, and the seconds that it took."""
    return of(bench, commit(tree), None, 1, figures) | {"passed": passed, "seconds": round(seconds, 2)}


def document(tree, scenario, kernel, scale, passed, seconds, figures):
    """One JSON object for one run of a scenario."""
    guest = {
        "kernel": kernel.release,
        "boot": kernel.boot,
        "memory_mib": scenario.memory_mib,
        "cpus": scenario.cpus,
    }
    return verdict("lab", tree, passed, seconds, figures) | {"scenario": scenario.name, "scale": scale, "guest": guest}


def of_boots(documents, boots):
    """One object for several runs of a scenario: each row with its median, and `each` of its values; met if it was each time."""
    rows_of = {}
    for document in documents:
        for figures in document["rows"]:
            rows_of.setdefault((figures["id"], figures["metric"]), []).append(figures)
    merged = []
    for same in rows_of.values():
        values = [figures["value"] for figures in same]
        met = None if same[0]["met"] is None else all(figures["met"] for figures in same)
        merged.append(same[0] | {"value": statistics.median(values), "met": met, "each": values})
    return documents[0] | {
        "runs": len(documents),
        "rows": merged,
        # A boot that left no report has failed.
        "passed": len(documents) == boots and all(document["passed"] for document in documents),
        "seconds": round(sum(document["seconds"] for document in documents), 2),
    }


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
