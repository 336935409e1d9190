"""A run that is killed and started again is the run that was never killed, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.files import data_files
from support.launch import Ranks, launch, run_training

from ckptrain.api import config_of_run
from ckptrain.checkpoint.integrity import open_checkpoint
from ckptrain.config.schema import RunConfig
from ckptrain.lifecycle.journal import read_journal
from ckptrain.training import saving as saving_module
from ckptrain.training.observers import Observer
from ckptrain.training.run import RunResult

DROPOUT = "lora.dropout=0.1"


def losses(run_dir: Path) -> dict[int, float]:
    """Return the training loss of every step that metrics.jsonl has."""
    lines = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert len(steps) == len(set(steps)), "a step is recorded twice"
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


class KillAfterSave(Observer):
    """Kills its own process, rank 0, with SIGKILL as soon as the checkpoint of a step is committed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_saved(self, step: int, path: Path, num_bytes: int, seconds: float) -> None:
        """Die."""
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(world_size: int, config: RunConfig, run_dir: Path, step: int) -> None:
    """Run until rank 0 is killed after the save of `step`; the other ranks, left alone, are killed too."""
    ranks = Ranks(world_size, lambda: run_training(config, run_dir, [KillAfterSave(step)]))
    ranks.processes[0].join(120)
    assert ranks.processes[0].exitcode == -signal.SIGKILL
    ranks.kill()


LAYOUTS = [
    pytest.param(1, [], id="TP=1"),
    pytest.param(2, ["parallel.tensor=2"], id="TP=2"),
    pytest.param(2, [], id="DP=2"),
]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_a_killed_run_goes_on_to_the_same_bits(
    world_size: int, layout: list[str], tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Kill -9 after the save of step 3 and a second start give the losses and the bytes of 6 steps straight."""
    config = tiny_config("train.steps=6", "checkpoint.every_steps=3", DROPOUT, *layout)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    launch(world_size, lambda: run_training(config, straight))

    run_and_die(world_size, config, killed, step=3)
    results: list[RunResult] = launch(world_size, lambda: run_training(config, killed))

    assert results[0].plan.kind == "Resume"
    assert results[0].plan.first_step == 4
    assert losses(killed) == losses(straight)
    assert len(losses(straight)) == 6
    expected = data_files(straight / "checkpoints/step-00000006")
    found = data_files(killed / "checkpoints/step-00000006")
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


def test_dropout_is_on_in_the_exact_resume(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Without dropout the losses are others: the exactness above is not that of a run that draws no random numbers."""
    with_dropout, without = tmp_path / "with", tmp_path / "without"
    launch(1, lambda: run_training(tiny_config("train.steps=2", DROPOUT), with_dropout))
    launch(1, lambda: run_training(tiny_config("train.steps=2"), without))
    assert losses(with_dropout)[2] != losses(without)[2]


def test_the_journal_shows_the_resume_and_its_receipt(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """The second start's plan is a Resume with finetune false, and its receipt counts every tensor and the LR."""
    config = tiny_config("train.steps=2", "optimizer.schedule=constant")
    launch(1, lambda: run_training(config, tmp_path))
    longer = tiny_config("train.steps=4", "optimizer.schedule=constant")
    [result] = launch(1, lambda: run_training(longer, tmp_path))
    assert result.status == "finished"
    events = read_journal(tmp_path / "journal.jsonl")
    plans = [event for event in events if event["event"] == "plan"]
    assert [(plan["plan"], plan["finetune"]) for plan in plans] == [("FreshStart", True), ("Resume", False)]
    assert [event["values"]["train.steps"] for event in events if event["event"] == "config"] == [2, 4]
    [receipt] = [event for event in events if event["event"] == "receipt"]
    # A and B of 4 modules, stacked over layers, each with its two moments
    assert receipt["tensors_per_rank"] == [[24, 24]]
    assert receipt["optimizer_step"] == 2
    assert receipt["next_learning_rate"] == 1.0e-2
    assert receipt["rng"] == "restored on every rank"
    assert receipt["next_row"] == receipt["consumed_samples"] == 8
    assert receipt["adapter_norm"] > 0


def test_a_run_that_is_done_is_not_run_again(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """A third start of a finished run touches nothing."""
    config = tiny_config("train.steps=2")
    launch(1, lambda: run_training(config, tmp_path))
    before = data_files(tmp_path / "checkpoints/step-00000002"), losses(tmp_path)
    [result] = launch(1, lambda: run_training(config, tmp_path))
    assert result.status == "already_done"
    assert (data_files(tmp_path / "checkpoints/step-00000002"), losses(tmp_path)) == before


def test_what_a_resume_leaves_out_is_said(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """restore.optimizer=false starts the moments anew, keeps the adapter, and is in the plan and the receipt."""
    launch(1, lambda: run_training(tiny_config("train.steps=2", "optimizer.schedule=constant"), tmp_path))
    changed = tiny_config("train.steps=3", "restore.optimizer=false", "optimizer.schedule=constant")
    launch(1, lambda: run_training(changed, tmp_path))
    events: list[dict[str, Any]] = read_journal(tmp_path / "journal.jsonl")
    [receipt] = [event for event in events if event["event"] == "receipt"]
    assert receipt["optimizer"] == "new: restore.optimizer is false"
    assert receipt["tensors_per_rank"] == [[8, 8]]
    plan = [event for event in events if event["event"] == "plan"][-1]
    assert any("optimizer" in note for note in plan["notes"])
    assert config_of_run(tmp_path).restore.optimizer, "the next start takes everything again"


def test_generators_that_were_saved_one_by_one_are_restored(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of version 2 and before have a tensor for each; dropout goes on as in a run without a stop."""
    config = tiny_config("train.steps=2", "optimizer.schedule=constant", DROPOUT, "data.validation=null")
    with monkeypatch.context() as patch:
        patch.setattr(saving_module, "rng_row", lambda state: state)
        launch(2, lambda: run_training(config, tmp_path / "old"))
    names = open_checkpoint(tmp_path / "old/checkpoints/step-00000002").manifest.tensors
    assert {"rng.rank00000.default", "rng.rank00001.default"} <= names.keys()
    longer = tiny_config("train.steps=3", "optimizer.schedule=constant", DROPOUT, "data.validation=null")
    for name in ("old", "straight"):
        launch(2, lambda name=name: run_training(longer, tmp_path / name))
    [receipt] = [event for event in read_journal(tmp_path / "old/journal.jsonl") if event["event"] == "receipt"]
    assert receipt["rng"] == "restored on every rank"
    last = "checkpoints/step-00000003"
    assert data_files(tmp_path / "old" / last) == data_files(tmp_path / "straight" / last)


@pytest.mark.parametrize("world_size", [1, 2])
def test_generators_of_another_platform_are_seeded_and_that_is_said(
    world_size: int, tiny_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's states have the names of a CPU's and another size: adapters, moments and step move, random states do not."""
    config = tiny_config("train.steps=2", "optimizer.schedule=constant", DROPOUT)
    with monkeypatch.context() as patch:
        own = saving_module.rng_state
        patch.setattr(saving_module, "rng_state", lambda: {name: state[:16].clone() for name, state in own().items()})
        launch(world_size, lambda: run_training(config, tmp_path))
    longer = tiny_config("train.steps=3", "optimizer.schedule=constant", DROPOUT)
    [result, *_] = launch(world_size, lambda: run_training(longer, tmp_path))
    assert (result.plan.kind, result.status) == ("Resume", "finished")
    [receipt] = [event for event in read_journal(tmp_path / "journal.jsonl") if event["event"] == "receipt"]
    assert receipt["rng"] == "seeded from (seed, step, rank): the checkpoint's generators are another platform's"
    assert receipt["tensors_per_rank"][0] == [24, 24]
