"""What every script here writes: rows as tables and as JSON, in the form of `weir bench --json`."""

import datetime
import json
import os
import platform
import subprocess
import sys

sys.dont_write_bytecode = True
TREE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(TREE, "lab"))

from boot import report  # noqa: E402


def row(name, metric, value, better="lower", control=None, control_value=None, goal=None, goal_of="value"):
    """One figure. `goal_of`: whether the goal is for the value or for its ratio to the control's."""
    ratio = round(value / control_value, 4) if control_value else None
    return {
        "id": name,
        "metric": metric,
        "value": round(value, 4),
        "control": control,
        "control_value": None if control_value is None else round(control_value, 4),
        "ratio": ratio,
        "goal": goal,
        "goal_of": goal_of if goal is not None else None,
        "better": better,
    }


def met(figure):
    """Whether a row is as good as its goal; True where it has none."""
    if figure["goal"] is None:
        return True
    value = figure["ratio"] if figure["goal_of"] == "ratio" else figure["value"]
    if value is None:
        return False
    return value <= figure["goal"] if figure["better"] == "lower" else value >= figure["goal"]


def write(bench, runs, rows, path=None):
    """Prints the rows, and writes them to `path`. True when every goal was met."""
    for figure in rows:
        beside = ""
        if figure["control"]:
            beside = f"  {figure['control']} {figure['control_value']:.4g}"
            if figure["ratio"] is not None:
                beside += f", {figure['ratio']:.3g}x"
        goal = ""
        if figure["goal"] is not None:
            sign = "<=" if figure["better"] == "lower" else ">="
            times = "x" if figure["goal_of"] == "ratio" else ""
            goal = f"  goal {sign} {figure['goal']:g}{times}: {'yes' if met(figure) else 'NO'}"
        print(f"{figure['id']:14} {figure['metric']:24} {figure['value']:12.4g}{beside}{goal}", flush=True)
    gpu, driver = card()
    document = {
        "schema": 1,
        "bench": bench,
        "commit": os.environ.get("WEIR_COMMIT") or report.commit(TREE),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {
            "cpu": report.cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "gpu": gpu,
            "driver": driver,
        },
        "runs": runs,
        "rows": rows,
    }
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
    return all(map(met, rows))


def card():
    """The first GPU's name and its driver's version; "none" without one."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"]
        line = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
        name, driver = line.split(", ")
        return name, driver
    except (OSError, subprocess.CalledProcessError, ValueError):
        return "none", "none"
