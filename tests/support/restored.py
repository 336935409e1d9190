"""What is there after a restore or another start, and what should be, compared bit for bit."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from ckptrain.checkpoint.integrity import open_checkpoint
from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.checkpoint.tensors import read_each
from ckptrain.config.schema import RunConfig
from ckptrain.lifecycle.phases import Lifecycle, Phase
from ckptrain.lifecycle.start_plan import Resume
from ckptrain.megatron.adapters import Piece
from ckptrain.megatron.optimizer import adam_states, optimizer_tensors
from ckptrain.megatron.world import open_process_group
from ckptrain.training.observers import Observer, StepRecord
from ckptrain.training.restore import restore_run
from ckptrain.training.setup import ModelSetup, model_parallel, set_up_model
from ckptrain.training.start import Survey, decide_start, survey_run
from support.launch import run_training


def whole_tensors(checkpoint: Path, *groups: str) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint whole, without Megatron."""
    opened = open_checkpoint(checkpoint)
    return dict(read_each(opened, [name for name, entry in opened.manifest.tensors.items() if entry.group in groups]))


def equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Compare two sets of tensors by name and bits."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def restored(config: RunConfig, run_dir: Path, look: Callable[[ModelSetup, Survey], Any]) -> Any:
    """Restore the newest checkpoint of a run on this rank, and return what `look` makes of it."""
    survey = survey_run(config, int(os.environ["WORLD_SIZE"]))
    with open_process_group(), model_parallel(survey):
        start = decide_start(survey, run_dir, read_contents=False)
        assert isinstance(start.plan, Resume)
        assert start.checkpoint is not None
        lifecycle = Lifecycle()
        lifecycle.advance(Phase.PLANNED)
        setup = set_up_model(survey, lifecycle, Observer())
        restore_run(start.plan, start.checkpoint, setup, config)
        return look(setup, survey)


def pieces(setup: ModelSetup, kind: str) -> Iterator[tuple[str, Piece]]:
    """Give what this rank holds of the adapters, or of one kind of their optimizer's tensors, by the adapter's name."""
    states = adam_states(setup.optimizer)
    for adapter in setup.adapters:
        tensor = adapter.parameter.data if kind == "adapter" else optimizer_tensors(states, adapter)[kind]
        for piece in adapter.cut(tensor):
            yield adapter.name, piece


def is_restored(setup: ModelSetup, tensors: Mapping[str, Tensor], kind: str) -> bool:
    """Tell whether this rank holds, bit for bit, its part of what a checkpoint says."""

    def there(name: str, piece: Piece) -> Tensor:
        prefix = "" if kind == "adapter" else f"optimizer.state.{kind}."
        layer = int(name.split(".")[2])
        whole = tensors[prefix + re.sub(r"layers\.\d+\.", "layers.", name)][layer]
        return whole[piece.place]

    held = list(pieces(setup, kind))
    return bool(held) and all(torch.equal(piece.data, there(name, piece)) for name, piece in held)


class StopAfter(Observer):
    """Asks the run to stop after a step."""

    def __init__(self, step: int, run_dir: Path) -> None:
        self.step, self.stop_file = step, run_dir / "stop"

    def on_step(self, record: StepRecord) -> None:
        """Leave the stop file."""
        if record.step == self.step:
            self.stop_file.touch()


def run_straight_and_in_two(config: RunConfig, directory: Path) -> None:
    """Run on this rank to the end, and again with a stop after step 1 and another start."""
    run_training(config, directory / "straight")
    halves = directory / "halves"
    assert run_training(config, halves, [StopAfter(1, halves)]).step == 1
    assert run_training(config, halves).plan.kind == "Resume"


def assert_same_end(directory: Path) -> None:
    """Compare the last checkpoints of a straight run and of one in two halves, random states and positions included."""
    groups = ("adapter", "optimizer", "rng")
    halves, straight = (CheckpointStore(directory / name).committed()[-1] for name in ("halves", "straight"))
    assert equal(whole_tensors(halves.path, *groups), whole_tensors(straight.path, *groups))
    facts = ("step", "consumed_samples", "consumed_tokens", "optimizer", "data", "config")
    found, expected = halves.manifest, straight.manifest
    assert [getattr(found, fact) for fact in facts] == [getattr(expected, fact) for fact in facts]


def losses(run_dir: Path) -> list[float]:
    """Return the training losses in the order of steps."""
    lines = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]
