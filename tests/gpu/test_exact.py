"""A run on a GPU that was killed is the run that was not, bit for bit where `train.deterministic` asks for it.

python3 -m pytest tests/gpu -q -s
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.gpu_runs import command, run, run_each, write_run
from support.records import apart, column, journal

from ckptrain.checkpoint.integrity import open_checkpoint

pytestmark = pytest.mark.gpu
LAYOUTS = [
    pytest.param(1, [], id="one GPU"),
    pytest.param(2, ["parallel.tensor=2"], id="TP=2", marks=pytest.mark.gpu(2)),
    pytest.param(2, [], id="DP=2", marks=pytest.mark.gpu(2)),
]


def kill_after_a_save(ranks: int, config: Path, run_dir: Path, *overrides: str) -> None:
    """Start a run, and kill its first process when the first checkpoint is on disk; the launcher ends the others."""
    process = subprocess.Popen(command(ranks, "run", str(config), "--run-dir", str(run_dir), *overrides))
    deadline = time.monotonic() + 240
    while not (run_dir / "journal.jsonl").exists() or not journal(run_dir, "saved"):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(journal(run_dir, "plan")[0]["pid"], signal.SIGKILL)
    assert process.wait() != 0


def tensors(run_dir: Path) -> dict[str, str]:
    """Return the digests of the files with tensors in the last checkpoint, optimizer and random generators included."""
    files = open_checkpoint(run_dir / "checkpoints/step-00000010").manifest.files
    return {name: file.sha256 for name, file in files.items() if name.endswith(".distcp")}


@pytest.mark.parametrize("kind", ["lora", "canonical"])
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_a_killed_run_has_the_bits_of_one_that_was_not(
    ranks: int, layout: list[str], kind: str, tmp_path: Path
) -> None:
    """Losses, gradient norms, and every byte of the last checkpoint's tensors."""
    config = write_run(tmp_path)
    asked = ["train.deterministic=true", f"lora.kind={kind}", *layout]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    run(ranks, "run", str(config), "--run-dir", str(straight), *asked)
    kill_after_a_save(ranks, config, killed, *asked)
    run(ranks, "resume", str(killed))
    assert journal(killed, "receipt")[0]["optimizer_step"] == 5
    for key in ("loss", "grad_norm"):
        assert column(killed, key) == column(straight, key), key
    assert tensors(killed) == tensors(straight)
    assert len(tensors(killed)) > 0


def test_without_determinism_a_resume_is_within_the_noise_of_two_equal_runs(tmp_path: Path) -> None:
    """The noise is measured, and printed."""
    config = write_run(tmp_path)
    run_each(config, {"one": [], "other": []}, tmp_path)
    run_each(config, {"resumed": ["train.steps=5", "optimizer.schedule=constant"]}, tmp_path)
    run_each(config, {"constant": ["optimizer.schedule=constant"]}, tmp_path)
    run_each(config, {"resumed": ["optimizer.schedule=constant"]}, tmp_path)
    noise = apart(column(tmp_path / "one", "loss"), column(tmp_path / "other", "loss"))
    moved = apart(column(tmp_path / "resumed", "loss"), column(tmp_path / "constant", "loss"))
    print(f"two equal runs differ by {noise:.2e}, a resumed one by {moved:.2e}")  # noqa: T201  # what this test is run for
    assert moved <= max(3 * noise, 1e-3)
