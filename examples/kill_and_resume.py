"""python examples/kill_and_resume.py [CONFIG] [key=value ...].

Kill a run with SIGKILL after its first checkpoint, start it again, and compare it with a run that nobody killed: every
file of the last checkpoint, and the loss of every step, must be the same.

With the quickstart, which is the CONFIG that is taken if none is given, it needs a CPU and six minutes. The runs are in
runs/killed and runs/straight, which must not be there yet.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import ckptrain
from ckptrain.lifecycle.journal import read_journal as read_lines

KILLED, STRAIGHT = Path("runs/killed"), Path("runs/straight")


def start(config: str, overrides: list[str], run_dir: Path) -> multiprocessing.Process:
    """Start a run in a process of its own, which can be killed."""
    process = multiprocessing.Process(target=ckptrain.run, args=(config, overrides), kwargs={"run_dir": run_dir})
    process.start()
    return process


def finish(process: multiprocessing.Process) -> None:
    """Wait for the end of a run that is to end well."""
    process.join()
    if process.exitcode != 0:
        sys.exit(f"a run ended with {process.exitcode}")


def last_checkpoint(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """Return the name of the newest checkpoint, and the size and SHA-256 of every file in it."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return newest.name, json.loads((newest / "manifest.json").read_text())["files"]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Return step and loss of every step."""
    return [(line["step"], line["loss"]) for line in read_lines(run_dir / "metrics.jsonl") if "loss" in line]


def main(config: str, overrides: list[str]) -> None:
    """Kill, resume, compare."""
    for run_dir in (KILLED, STRAIGHT):
        if run_dir.exists():
            sys.exit(f"{run_dir} is there already: move it away")
    process = start(config, overrides, KILLED)
    while not any(entry["event"] == "saved" for entry in read_lines(KILLED / "journal.jsonl")):
        if not process.is_alive():
            sys.exit("the run ended before its first checkpoint")
        time.sleep(0.005)
    process.kill()
    process.join()
    print(f"killed after step {losses(KILLED)[-1][0]}, with {last_checkpoint(KILLED)[0]} on disk")

    finish(start(config, overrides, KILLED))
    plan = [entry for entry in read_lines(KILLED / "journal.jsonl") if entry["event"] == "plan"][-1]
    print(f"started again: {plan['plan']}, step {plan['first_step']} first")

    finish(start(config, overrides, STRAIGHT))
    if last_checkpoint(KILLED) != last_checkpoint(STRAIGHT) or losses(KILLED) != losses(STRAIGHT):
        sys.exit("the resumed run is not the straight one")
    print(f"the same as the run that nobody killed: {len(losses(STRAIGHT))} losses, {last_checkpoint(STRAIGHT)[0]}")


if __name__ == "__main__":
    given = sys.argv[1:]
    named = given[:1] if given and "=" not in given[0] else []
    main(*(named or ["examples/quickstart.yaml"]), given[len(named) :])
