"""Traps of saving that runs of other trainers fell into; docs/traps.md lists them all, with the tests of other rooms."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import FaultyDisk
from support.launch import launch, run_training

from ckptrain.checkpoint.integrity import open_checkpoint, verify_files
from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.checkpoint.tensors import read_each
from ckptrain.checkpoint.writer import CheckpointWriter, Content
from ckptrain.config.schema import RunConfig
from ckptrain.errors import SaveFailed, TrainingDiverged
from ckptrain.lifecycle.journal import read_journal
from ckptrain.megatron.step import StepResult
from ckptrain.training import steps as steps_module
from ckptrain.training.observers import Observer
from ckptrain.training.run import RunResult

MakeConfig = Callable[..., RunConfig]


def whole_steps(run_dir: Path) -> list[int]:
    """Return the steps whose checkpoints are whole, every file of which has been read."""
    return [found.step for found in CheckpointStore(run_dir).committed() if verify_files(found) == []]


def names(directory: Path) -> list[str]:
    """Return what lies in a directory."""
    return sorted(path.name for path in directory.iterdir())


class WatchedDisk(FaultyDisk):
    """A disk that notes, at every call that changes it, the newest checkpoint a crash would leave at that moment."""

    def __init__(self, patch: pytest.MonkeyPatch, run_dir: Path) -> None:
        super().__init__(patch, run_dir / "checkpoints")
        self.newest: list[int] = []
        self._seen: list[str] = []

    def _call(self, name: str, path: Any) -> None:
        listed = names(self.root) if self.root.exists() else []
        # Nothing is read again while writes go to a hidden directory and no name changes.
        if not self.newest or listed != self._seen or ".staging-" not in str(path):
            self.newest.append(max(whole_steps(self.root.parent), default=0))
        self._seen = listed
        super()._call(name, path)


class FillAfter(Observer):
    """Lets a disk be full once a step is saved; where it is to be freed, when a save has failed."""

    def __init__(self, disk: FaultyDisk, step: int, *, is_freed: bool) -> None:
        self.disk, self.step, self.is_freed = disk, step, is_freed

    def on_saved(self, step: int, path: Path, num_bytes: int, seconds: float) -> None:
        """Fill the disk."""
        if step == self.step:
            self.disk.fail(0, errno.ENOSPC, lasting=True)

    def on_save_failed(self, step: int, message: str) -> None:
        """Free it again."""
        if self.is_freed:
            self.disk.fail(None, errno.ENOSPC)


@pytest.mark.parametrize("is_full", [False, True], ids=["a disk with room", "a disk that is full for one save"])
def test_there_is_a_whole_checkpoint_at_every_moment(is_full: bool, tiny_config: MakeConfig, tmp_path: Path) -> None:
    """With keep_last=1, from the first commit on: the old one goes when the new one is there, and not before."""

    def on_rank() -> list[int]:
        with pytest.MonkeyPatch.context() as patch:
            disk = WatchedDisk(patch, tmp_path)
            observers = [FillAfter(disk, step=1, is_freed=True)] if is_full else []
            config = tiny_config("train.steps=4", "checkpoint.every_steps=1", "checkpoint.keep_last=1")
            run_training(config, tmp_path, observers)
            return disk.newest

    [newest] = launch(1, on_rank)
    assert newest == sorted(newest)
    failed = {entry["step"] for entry in read_journal(tmp_path / "journal.jsonl") if entry["event"] == "save_failed"}
    assert set(newest) == {0, 1, 2, 3, 4} - failed
    assert bool(failed) == is_full
    assert names(tmp_path / "checkpoints") == ["step-00000004"]


@pytest.mark.parametrize("failure", ["a loss that is not finite", "a save that fails for good"])
def test_a_run_after_a_failed_one_in_the_same_processes_goes_on_as_if_in_new_ones(
    failure: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """Two ranks: nothing of the first run's saves, groups or threads is left that could end or commit the second's."""
    config = tiny_config("train.steps=6", "lora.dropout=0.1", "parallel.tensor=2")
    failed, straight = tmp_path / "failed", tmp_path / "straight"

    def fail() -> None:
        with pytest.MonkeyPatch.context() as patch:
            disk = FaultyDisk(patch, failed / "checkpoints")
            if failure == "a save that fails for good":
                with pytest.raises(SaveFailed):
                    run_training(config, failed, [FillAfter(disk, step=2, is_freed=False)])
                return
            train_step, calls = steps_module.train_step, []

            def poisoned(model: Any, optimizer: Any, batches: Any, *loss: Any) -> StepResult:
                calls.append(train_step(model, optimizer, batches, *loss))
                return calls[-1] if len(calls) < 3 else StepResult(loss=float("nan"), learnt_tokens=1, grad_norm=1.0)

            patch.setattr(steps_module, "train_step", poisoned)
            fsync = os.fsync
            patch.setattr(os, "fsync", lambda descriptor: (time.sleep(0.05), fsync(descriptor)))
            with pytest.raises(TrainingDiverged):
                run_training(config, failed)

    def on_rank() -> RunResult:
        fail()
        result = run_training(config, failed)
        run_training(config, straight)
        return result

    results = launch(2, on_rank)
    assert [(result.plan.kind, result.status) for result in results] == [("Resume", "finished")] * 2
    ends = []
    for run_dir in (failed, straight):
        checkpoint = open_checkpoint(run_dir / "checkpoints/step-00000006")
        ends.append(dict(read_each(checkpoint, checkpoint.manifest.tensors)))
    assert ends[0].keys() == ends[1].keys()
    assert [name for name, tensor in ends[0].items() if not torch.equal(tensor, ends[1][name])] == []


def test_the_newest_checkpoint_is_the_highest_step_whatever_else_says_otherwise(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """A run writes no file that names the latest, so that none can be wrong; others' are not read, nor are times."""
    launch(1, lambda: run_training(tiny_config("train.steps=4", "optimizer.schedule=constant"), tmp_path))
    checkpoints = tmp_path / "checkpoints"
    assert names(checkpoints) == ["step-00000002", "step-00000004"]
    for directory in (tmp_path, checkpoints):
        (directory / "latest_checkpointed_iteration.txt").write_text("2")
        (directory / "latest.json").write_text('{"step": 2}')
        (directory / "latest").symlink_to(checkpoints / "step-00000002")
    os.utime(checkpoints / "step-00000004", (0, 0))
    longer = tiny_config("train.steps=5", "optimizer.schedule=constant")
    [result] = launch(1, lambda: run_training(longer, tmp_path))
    assert (result.plan.kind, result.plan.step, result.status) == ("Resume", 4, "finished")


def test_other_ranks_write_their_tensors_and_nothing_else(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Manifest, metadata, metrics, run.yaml and removals are rank 0's, so no two processes wait for one file."""

    def on_rank() -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            disk = FaultyDisk(patch, tmp_path)
            config = tiny_config(
                "train.steps=2", "checkpoint.every_steps=1", "checkpoint.keep_last=1", "parallel.tensor=2"
            )
            run_training(config, tmp_path)
            return disk.calls

    first, second = launch(2, on_rank)
    written = {(call.split()[0], Path(call.split()[1]).name) for call in second if not call.startswith("mkdir")}
    assert written == {(call, "__1_0.distcp") for call in ("open", "write", "fsync", "close")}
    assert {Path(call.split()[1]).name for call in second if call.startswith("mkdir")} <= {"adapter", "optimizer"}
    assert {"manifest.json", ".metadata.tmp", "metrics.jsonl", ".run.yaml.new"} <= {
        Path(call.split()[1]).name for call in first
    }


def test_all_saves_of_a_run_use_one_place_in_host_memory(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No save allocates for adapters and moments, so none can keep what it had; the device's memory is not used."""
    places: list[dict[str, list[int]]] = []
    begin = CheckpointWriter.begin

    def watched(self: CheckpointWriter, content: Content) -> None:
        tensors = {name: tensor for part in content.parts.values() for name, tensor in part.items()}
        shards = {name: tensor.shards for name, tensor in tensors.items() if not name.startswith("rng.")}
        assert all(shard.data.device.type == "cpu" for part in shards.values() for shard in part)
        places.append({name: [shard.data.data_ptr() for shard in part] for name, part in shards.items()})
        begin(self, content)

    monkeypatch.setattr(CheckpointWriter, "begin", watched)
    config = tiny_config("train.steps=3", "checkpoint.every_steps=1")
    [found] = launch(1, lambda: (run_training(config, tmp_path), places)[1])
    assert len(found) == 3
    assert len(found[0]) == 24
    assert found[1] == found[2] == found[0]
