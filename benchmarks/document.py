"""What every script here writes: rows as tables and as JSON, in the form of `weir bench --json`."""

import json
import os
import subprocess
import sys

sys.dont_write_bytecode = True
TREE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(TREE, "lab"))

from boot import report  # noqa: E402
from boot.report import row  # noqa: E402, F401


def write(bench, runs, rows, path=None):
    """Prints the rows (of `row`), and writes them to `path`. True when every goal was met."""
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
            goal = f"  goal {sign} {figure['goal']:g}{times}: {'yes' if figure['met'] else 'NO'}"
        print(f"{figure['id']:14} {figure['metric']:24} {figure['value']:12.4g}{beside}{goal}", flush=True)
    if path:
        commit = os.environ.get("WEIR_COMMIT") or report.commit(TREE)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report.of(bench, commit, card(), runs, rows), file, indent=2)
            file.write("\n")
    return all(figure["met"] is not False for figure in rows)


def of_fio(text):
    """The JSON that fio has printed. Its engine for NBD writes lines before."""
    return json.loads(text[text.index("{"):])


def card():
    """The first GPU's name and its driver's version; None without one."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"]
        line = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
        name, driver = line.split(", ")
        return name, driver
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
