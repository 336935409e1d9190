"""uv run python tools/record_report.py [--run RUN] [--out docs/pictures/report.png]

Run the quickstart, kill it, resume it, stop it, resume it again, and draw the top of its report: the picture in the
README. It takes three minutes and Chromium; `--run` draws a run that there is.

The report is made of a copy below a temporary directory, so that the picture tells nothing of the machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ckptrain.lifecycle.journal import read_lines

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples/quickstart.yaml"
SHOWN_RUN_DIR = Path("runs/quickstart")
KILLED_AT, STOPPED_AT = 7, 10
"""Steps: a checkpoint is made of every fourth, so some are lost to the kill, and none to the stop."""
WIDTH, HEIGHT = 1400, 1450
MOST_BYTES = 300_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def make_run(run_dir: Path) -> None:
    """Run the quickstart in `run_dir`, with a kill and a stop on the way."""
    start_and_end(run_dir, KILLED_AT, signal.SIGKILL)
    start_and_end(run_dir, STOPPED_AT, signal.SIGTERM)
    start_and_end(run_dir, None, None)


def start_and_end(run_dir: Path, step: int | None, how: signal.Signals | None) -> None:
    """Start the run, and send it a signal when it has made a step; without one it goes to its end."""
    command = [sys.executable, "-m", "ckptrain.cli", "run", str(CONFIG), "--run-dir", str(run_dir)]
    process = subprocess.Popen([*command, "train.eval_every_steps=4"])
    while step is not None and how is not None and process.poll() is None:
        if any(line["step"] == step and "loss" in line for line in read_lines(run_dir / "metrics.jsonl")):
            process.send_signal(how)
            break
        time.sleep(0.1)
    process.wait()


def draw(run_dir: Path, out: Path) -> None:
    """Write the report of a run, and a picture of its top."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"there is none of {', '.join(BROWSERS)} to draw with")
    with tempfile.TemporaryDirectory(prefix="ckptrain-") as directory:
        there = Path(directory)
        shutil.copytree(run_dir, there / SHOWN_RUN_DIR)
        command = [sys.executable, "-m", "ckptrain.cli", "report", str(SHOWN_RUN_DIR)]
        subprocess.run(command, cwd=there, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        page = (there / SHOWN_RUN_DIR / "report.html").as_uri()
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={there}/browser",
        ]
        picture = f"--screenshot={out}"
        subprocess.run([browser, *options, f"--window-size={WIDTH},{HEIGHT}", picture, page], check=True)
    if out.stat().st_size > MOST_BYTES:
        sys.exit(f"{out} has {out.stat().st_size} bytes, more than {MOST_BYTES}")
    print(f"{out}: {out.stat().st_size} bytes")


def main() -> None:
    """Make the run, or take the one that is given, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run directory; a new run is made if left out")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/pictures/report.png", help="the picture")
    asked = parser.parse_args()
    out = asked.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    if asked.run is not None:
        draw(asked.run, out)
        return
    with tempfile.TemporaryDirectory(prefix="ckptrain-") as directory:
        run_dir = Path(directory) / "quickstart"
        make_run(run_dir)
        draw(run_dir, out)


if __name__ == "__main__":
    main()
