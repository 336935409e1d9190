"""What is measured of a step, as it is recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import orjson
import pytest
from support.launch import launch, run_training

from ckptrain.config.flops import training_flops
from ckptrain.config.schema import RunConfig
from ckptrain.training.loggers import TensorBoard
from ckptrain.training.observers import StepRecord
from ckptrain.training.start import survey_run


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_on_a_cpu_has_its_flops_and_no_share_of_a_peak(
    world_size: int, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Of each process, so that the processes' times their number is what the step did; null is what is not known."""
    config = tiny_config("train.steps=1", "data.packing=false", "train.global_batch_size=60")
    launch(world_size, lambda: run_training(config, tmp_path))
    [record] = [
        line for line in map(orjson.loads, (tmp_path / "metrics.jsonl").read_bytes().splitlines()) if "loss" in line
    ]
    survey = survey_run(config, 1)
    flops = training_flops(survey.shape, survey.config.lora, survey.targets)
    tokens = record["tokens"]
    floor = flops.of(tokens=tokens, learnt_tokens=record["learnt_tokens"], attended_pairs=tokens)
    ceiling = flops.of(tokens=tokens, learnt_tokens=record["learnt_tokens"], attended_pairs=tokens * 128)
    assert floor < record["tflops_per_s"] * 1e12 * record["seconds"] * world_size < ceiling
    assert (record["mfu"], record["peak_memory_bytes"]) == (None, None)


def test_tensorboard_has_no_point_where_nothing_was_measured(tmp_path: Path) -> None:
    """As on a CPU; and has one where something was."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = {field.name: 1 for field in attrs.fields(StepRecord)} | {"mfu": None, "peak_memory_bytes": None}
    board = TensorBoard(tmp_path, last_step=0, every_steps=1)
    board.on_step(StepRecord(**values))
    board.on_step(StepRecord(**values | {"step": 2, "mfu": 0.5}))
    board.on_end()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(point.step, point.value) for point in found.Scalars("train/mfu")] == [(2, 0.5)]
    assert "train/peak_memory_bytes" not in found.Tags()["scalars"]
    assert [point.step for point in found.Scalars("train/tflops_per_s")] == [1, 2]
