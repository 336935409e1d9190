"""Saves beside the training: nothing waits, a failure costs a checkpoint and not the run, nothing begun is lost."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.faults import FaultyDisk
from support.files import data_files
from support.launch import launch, run_training

from ckptrain.checkpoint.integrity import verify_files
from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.config.schema import RunConfig
from ckptrain.errors import SaveFailed, StartRefused, TrainingDiverged
from ckptrain.lifecycle.journal import read_journal
from ckptrain.megatron.step import StepResult
from ckptrain.training import steps as steps_module
from ckptrain.training.observers import Observer, StepRecord

MakeConfig = Callable[..., RunConfig]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the journal's entries of a kind."""
    return [entry for entry in read_journal(run_dir / "journal.jsonl") if entry["event"] == kind]


def committed_steps(run_dir: Path) -> list[int]:
    """Return the steps of the whole checkpoints, every file of which has been read."""
    found = CheckpointStore(run_dir).committed()
    assert [verify_files(checkpoint) for checkpoint in found] == [[]] * len(found)
    return [checkpoint.step for checkpoint in found]


class SlowDisk:
    """Makes every sync take a while, as a busy disk does."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: float) -> None:
        fsync = os.fsync
        patch.setattr(os, "fsync", lambda descriptor: (time.sleep(seconds), fsync(descriptor)))


@pytest.mark.parametrize(("world_size", "layout"), [(1, []), (2, ["parallel.tensor=2"]), (2, ["parallel.pipeline=2"])])
def test_both_ways_of_saving_give_the_same_bytes(
    world_size: int, layout: list[str], tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """Every checkpoint of a run with dropout: what is saved in the background is the state of its step, not a later one."""
    for name, asynchronous in (("sync", "false"), ("async", "true")):
        config = tiny_config(
            "train.steps=4",
            "checkpoint.every_steps=1",
            "checkpoint.keep_last=9",
            "lora.dropout=0.1",
            f"checkpoint.asynchronous={asynchronous}",
            *layout,
        )
        launch(world_size, lambda config=config, name=name: run_training(config, tmp_path / name))
    assert committed_steps(tmp_path / "sync") == committed_steps(tmp_path / "async") == [1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        name = f"checkpoints/step-0000000{step}"
        assert data_files(tmp_path / "sync" / name) == data_files(tmp_path / "async" / name)


def test_training_goes_on_while_a_checkpoint_is_written(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a disk that takes a second for a save, steps are made before it is reported; a synchronous run waits."""
    order: dict[str, list[str]] = {}

    class Watch(Observer):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_step(self, record: StepRecord) -> None:
            self.seen.append(f"step {record.step}")

        def on_saved(self, step: int, path: Path, num_bytes: int, seconds: float) -> None:
            self.seen.append(f"saved {step}")

    def on_rank(asynchronous: str) -> list[str]:
        SlowDisk(monkeypatch, 0.15)
        watch = Watch()
        config = tiny_config("train.steps=3", "checkpoint.every_steps=1", f"checkpoint.asynchronous={asynchronous}")
        run_training(config, tmp_path / asynchronous, [watch])
        return watch.seen

    for asynchronous in ("false", "true"):
        [order[asynchronous]] = launch(1, lambda asynchronous=asynchronous: on_rank(asynchronous))
    assert order["true"].index("step 2") < order["true"].index("saved 1")
    assert sorted(order["true"]) == sorted(order["false"])
    waited = events(tmp_path / "true", "save_waited")
    assert [entry["step"] for entry in waited] == [2, 3], "a disk slower than the interval is waited for, and said"
    stalls = [
        entry["stall_s"]
        for name in ("true", "false")
        for entry in events(tmp_path / name, "phase")
        if "stall_s" in entry
    ]
    assert stalls[0] < 0.3, "the first save of the asynchronous run stops it for a copy"
    assert stalls[3] > 0.6, "that of the synchronous run for all its syncs"


@pytest.mark.parametrize("asynchronous", ["false", "true"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_failed_save_is_told_and_tried_again_at_the_next_interval(
    world_size: int, asynchronous: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """The disk is full when step 2 is saved, and free again at step 3."""
    told: list[str] = []

    class Hear(Observer):
        def on_save_failed(self, step: int, message: str) -> None:
            told.append(message)

    def on_rank() -> tuple[Any, list[str]]:
        with pytest.MonkeyPatch.context() as patch:
            disk = FaultyDisk(patch, tmp_path / "checkpoints")

            class FillDisk(Observer):
                def on_step(self, record: StepRecord) -> None:
                    if record.step == 2:
                        disk.fail(2, errno.ENOSPC, lasting=True)

                def on_save_failed(self, step: int, message: str) -> None:
                    disk.fail(None, errno.ENOSPC)

            config = tiny_config(
                "train.steps=4",
                "checkpoint.every_steps=1",
                "checkpoint.keep_last=9",
                f"checkpoint.asynchronous={asynchronous}",
            )
            return run_training(config, tmp_path, [FillDisk(), Hear()]), told

    result, messages = launch(world_size, on_rank)[0]
    assert (result.status, result.exit_status) == ("finished", 0)
    [failure] = events(tmp_path, "save_failed")
    assert failure["step"] == 2
    assert "No space left on device" in failure["message"]
    assert "the previous checkpoint step-00000001 is untouched" in failure["message"]
    assert messages == [failure["message"]]
    assert committed_steps(tmp_path) in ([1, 3, 4], [1, 4])
    assert list((tmp_path / "checkpoints").glob(".*")) == []


def test_the_last_save_gets_a_second_try(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """One call of the last save fails; there is no next interval, and the work is not lost for it."""

    def on_rank() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            disk = FaultyDisk(patch, tmp_path / "checkpoints")
            disk.fail(3, errno.EIO)
            return run_training(tiny_config("train.steps=2"), tmp_path)

    [result] = launch(1, on_rank)
    assert result.status == "finished"
    assert len(events(tmp_path, "save_failed")) == 1
    assert committed_steps(tmp_path) == [2]


def test_a_last_save_that_fails_for_good_ends_the_run_with_the_reason(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """The checkpoint before is whole, and the next start goes on from it."""

    def on_rank() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            disk = FaultyDisk(patch, tmp_path / "checkpoints")

            class FillDisk(Observer):
                def on_saved(self, step: int, path: Path, num_bytes: int, seconds: float) -> None:
                    disk.fail(0, errno.ENOSPC, lasting=True)

            return run_training(tiny_config("train.steps=4"), tmp_path, [FillDisk()])

    with pytest.raises(SaveFailed, match="No space left on device"):
        launch(1, on_rank)
    assert committed_steps(tmp_path) == [2]
    [result] = launch(1, lambda: run_training(tiny_config("train.steps=4"), tmp_path))
    assert (result.plan.kind, result.plan.step, result.status) == ("Resume", 2, "finished")


def test_a_full_disk_costs_lines_and_checkpoints_but_not_the_run(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """The whole run directory refuses writes during two steps: journal, metrics and checkpoint alike."""

    def on_rank() -> tuple[Any, list[str]]:
        warnings: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            disk = FaultyDisk(patch, tmp_path)
            write = os.write

            def full(descriptor: int, data: bytes) -> int:  # the journal's
                if disk.fail_at is not None:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return write(descriptor, data)

            patch.setattr(os, "write", full)

            class FillDisk(Observer):
                def on_step(self, record: StepRecord) -> None:
                    if record.step in (2, 4):
                        disk.fail(0 if record.step == 2 else None, errno.ENOSPC, lasting=True)

                def on_warning(self, text: str) -> None:
                    warnings.append(text)

            config = tiny_config("train.steps=6", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
            return run_training(config, tmp_path, [FillDisk()]), warnings

    [(result, warnings)] = launch(1, on_rank)
    assert result.status == "finished"
    assert any("cannot write the journal" in text for text in warnings)
    assert any("MetricsFile cannot record" in text for text in warnings)
    assert {1, 5, 6} <= set(committed_steps(tmp_path))


def test_a_run_that_fails_commits_what_it_had_begun(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 gives NaN while the save of step 2 is still under way."""
    train_step = steps_module.train_step
    calls: list[StepResult] = []

    def poisoned(model: Any, optimizer: Any, batches: Any, *loss: Any) -> StepResult:
        calls.append(train_step(model, optimizer, batches, *loss))
        return calls[-1] if len(calls) < 3 else StepResult(loss=float("nan"), learnt_tokens=1, grad_norm=1.0)

    monkeypatch.setattr(steps_module, "train_step", poisoned)
    SlowDisk(monkeypatch, 0.1)
    with pytest.raises(TrainingDiverged):
        launch(1, lambda: run_training(tiny_config("train.steps=4"), tmp_path))
    assert committed_steps(tmp_path) == [2]
    assert [event["step"] for event in events(tmp_path, "saved")] == [2]
    assert events(tmp_path, "phase")[-1]["to"] == "FAILED"


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_anything_is_loaded(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is free and what a checkpoint takes are told; room for a few gives a note in the plan."""

    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000))
    with pytest.raises(StartRefused, match=r"has 0.0 MB free, and a checkpoint takes \d"):
        run_training(tiny_config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1_000_000))
    [result] = launch(1, lambda: run_training(tiny_config("train.steps=1"), tmp_path / "run"))
    assert any("checkpoint.keep_last=3 needs" in note for note in result.plan.notes)
