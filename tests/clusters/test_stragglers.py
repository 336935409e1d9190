"""A process that is slow is told apart from those that wait for it."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.launch import launch, run_training
from support.records import journal

from ckptrain.config.schema import RunConfig
from ckptrain.data.prefetch import Prefetcher
from ckptrain.lifecycle.journal import NullJournal
from ckptrain.megatron import step as step_module
from ckptrain.training.observers import Observer
from ckptrain.training.stragglers import FACTOR, STEPS, Stragglers

Make = Callable[..., RunConfig]


class Warned(Observer):
    """Keeps warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def on_warning(self, text: str) -> None:
        """Keep it."""
        self.warnings.append(text)


@pytest.fixture
def told() -> Warned:
    """Return what is told of."""
    return Warned()


def looking(told: Warned, processes: int = 4) -> Callable[[list[float]], None]:
    """Return what looks at the seconds of one step after the other."""
    stragglers = Stragglers([f"rank {number}" for number in range(processes)], NullJournal(), told)
    steps = itertools.count(1)
    return lambda seconds: stragglers.look(next(steps), seconds)


def test_one_that_is_slow_in_each_of_several_steps_is_told_once(told: Warned) -> None:
    """And again when it was not for as many."""
    look = looking(told)
    slow, even = [1.0, 1.0, FACTOR + 0.1, 0.9], [1.0, 1.1, 1.0, 0.9]
    for _ in range(STEPS - 1):
        look(slow)
    assert told.warnings == []
    for _ in range(3 * STEPS):
        look(slow)
    [warning] = told.warnings
    assert warning.startswith("rank 2 keeps the others waiting")
    assert f"1.35 s of step {STEPS} and they 1 s" in warning
    for _ in range(STEPS):
        look(even)
    for _ in range(STEPS):
        look(slow)
    assert len(told.warnings) == 2


def test_of_two_the_slower_is_told(told: Warned) -> None:
    """There is no median but the other."""
    look = looking(told, 2)
    for _ in range(STEPS):
        look([0.1, 0.3])
    assert [warning[:6] for warning in told.warnings] == ["rank 1"]


def test_steps_that_differ_by_their_samples_are_nobody_s_fault(told: Warned) -> None:
    """Each of four is slower than the others by half in every other step."""
    look, generator = looking(told), random.Random(1)
    for _ in range(500):
        look([generator.choice((1.0, 1.5)) for _ in range(4)])
    assert told.warnings == []


def slow_data() -> None:
    """Let batches come late."""
    take = Prefetcher.take

    def late(self: Prefetcher) -> Any:
        time.sleep(0.3)
        return take(self)

    Prefetcher.take = late  # type: ignore[method-assign]


def slow_layers() -> None:
    """Let every micro-batch compute for longer."""
    run_model = step_module._run_model

    def slow(*given: Any) -> Any:
        time.sleep(0.3)
        return run_model(*given)

    step_module._run_model = slow


@pytest.mark.parametrize("slow", [slow_data, slow_layers])
def test_a_slow_process_is_named_in_the_journal(slow: Callable[[], None], tiny_config: Make, tmp_path: Path) -> None:
    """By data, or by its computing; all steps last as long on either process."""
    config = tiny_config(f"train.steps={STEPS + 2}", "train.eval_every_steps=null", "log.sample_tokens=0")

    def on_rank() -> None:
        if os.environ["RANK"] == "1":
            slow()
        run_training(config, tmp_path)

    launch(2, on_rank)
    [found] = journal(tmp_path, "straggler")
    assert found["process"].startswith("rank 1 on ")
    assert found["seconds"] > found["others_s"] + 0.2
    assert found["step"] in (STEPS, STEPS + 1)


def test_stages_are_paced_by_their_last(tiny_config: Make, tmp_path: Path) -> None:
    """Two pipelines of two stages: the slow one is named by the process of its last stage."""
    steps = f"train.steps={STEPS + 2}"
    config = tiny_config(steps, "parallel.pipeline=2", "train.eval_every_steps=null", "log.sample_tokens=0")

    def on_rank() -> None:
        # Ranks 0 and 1 are the first stages, 2 and 3 the last ones of the same two pipelines.
        if os.environ["RANK"] == "3":
            slow_layers()
        run_training(config, tmp_path)

    launch(4, on_rank)
    [found] = journal(tmp_path, "straggler")
    assert found["process"].startswith("rank 3 on ")
    assert found["process"].endswith("(or one that shares its layers)")
