"""Stopping before the last step: time limits, Slurm's end, and a second signal; signals themselves are in refusals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from support.launch import Ranks, launch, run_training

from ckptrain.checkpoint.integrity import verify_files
from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.config.schema import RunConfig
from ckptrain.training.stopping import SLURM_END_TIME, StopRequests

MakeConfig = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("left_s", "needed_s", "stops"),
    [
        pytest.param(3600, 100, False, id="an hour is enough for a step and a save"),
        pytest.param(100, 100, True, id="the margin is gone"),
        pytest.param(-50, 10, True, id="the end is past"),
        pytest.param(30, 0, False, id="nothing has been done yet"),
    ],
)
def test_a_job_ends_while_there_is_time_for_a_save(
    left_s: float, needed_s: float, stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step and a save have taken so far, and a minute, must be left before Slurm's end."""
    monkeypatch.setenv(SLURM_END_TIME, str(int(time.time() + left_s)))
    reason = StopRequests(tmp_path, None).reason(needed_s)
    assert (reason is not None) == stops
    assert reason is None or SLURM_END_TIME in reason


@pytest.mark.parametrize("value", ["", "0", "UNLIMITED", "-1"])
def test_an_end_that_is_none_stops_nothing(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition without a limit, or a Slurm that does not tell."""
    monkeypatch.setenv(SLURM_END_TIME, value)
    assert StopRequests(tmp_path, None).reason(1000.0) is None


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_under_slurm_stops_before_the_end_and_goes_on_in_the_next_job(
    world_size: int, tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job with half a minute left makes one step, so that it comes on however often it is requeued."""
    config = tiny_config("train.steps=3", "checkpoint.every_steps=9")
    for step in (1, 2):
        monkeypatch.setenv(SLURM_END_TIME, str(int(time.time() + 30)))
        results = launch(world_size, lambda: run_training(config, tmp_path))
        assert [(result.status, result.step, result.exit_status) for result in results] == [
            ("stopped", step, 75)
        ] * world_size
    monkeypatch.delenv(SLURM_END_TIME)
    assert launch(world_size, lambda: run_training(config, tmp_path))[0].status == "finished"


def test_a_time_limit_ends_the_run_with_a_checkpoint(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Two seconds of four hundred steps: exit status 75, and the step it stopped after is saved."""
    config = tiny_config("train.steps=400", "checkpoint.every_steps=400", "train.max_minutes=0.04")
    [result] = launch(1, lambda: run_training(config, tmp_path))
    assert (result.status, result.exit_status, result.stop_reason) == ("stopped", 75, "train.max_minutes is over")
    newest = CheckpointStore(tmp_path).newest()
    assert (newest.step if newest else 0) == result.step > 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_signal_ends_the_run_at_once_and_harms_nothing(
    world_size: int, tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that takes minutes for a save, the first signal waits for it and the second does not."""
    config = tiny_config("train.steps=400", "checkpoint.every_steps=1", "optimizer.schedule=constant")
    launch(world_size, lambda: run_training(attrs.evolve(config, train=attrs.evolve(config.train, steps=2)), tmp_path))

    def on_rank() -> None:
        # The journal of the start is synced too; only what a save does takes long.
        fsync = os.fsync
        slow = lambda descriptor: (_is_staged(descriptor) and time.sleep(100), fsync(descriptor))  # noqa: E731
        monkeypatch.setattr(os, "fsync", slow)
        run_training(config, tmp_path)

    ranks = Ranks(world_size, on_rank)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("checkpoints/.staging-*/adapter/*.distcp")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    _signal(ranks)
    time.sleep(1.5)
    assert [process.exitcode for process in ranks.processes] == [None] * world_size, "the first waits for the save"
    _signal(ranks)
    for process in ranks.processes:
        process.join(10)
    assert [process.exitcode for process in ranks.processes] == [-signal.SIGTERM] * world_size
    store = CheckpointStore(tmp_path)
    assert [checkpoint.step for checkpoint in store.scan()] == [1, 2]
    assert [verify_files(checkpoint) for checkpoint in store.committed()] == [[], []]


def _is_staged(descriptor: int) -> bool:
    return ".staging-" in os.fspath(Path(f"/proc/self/fd/{descriptor}").readlink())


def _signal(ranks: Ranks) -> None:
    for process in ranks.processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
