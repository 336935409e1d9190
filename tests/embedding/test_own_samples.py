"""Samples that a program makes for each step: learnt as those of a file, asked for in time, and known by a name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.files import data_files
from support.launch import launch, run_training
from support.restored import losses

from ckptrain import Samples, Trainer, api
from ckptrain.checkpoint.integrity import open_checkpoint
from ckptrain.config.schema import RunConfig
from ckptrain.data.order import RowOrder
from ckptrain.errors import ConfigError, DataError, StartRefused

Make = Callable[..., RunConfig]
Row = dict[str, Any]
ROWS: list[Row] = [
    {"messages": [{"role": "user", "content": "say " * (n % 5)}, {"role": "assistant", "content": f"ok {n}"}]}
    for n in range(12)
]
G = 4


def in_order(step: int) -> list[Row]:
    """Return the rows that a run on a file of them would see in a step, with the seed of the configuration."""
    order = RowOrder(sizes=(len(ROWS),), seed=42)
    return [ROWS[row] for row in order.rows_in((step - 1) * G, step * G)]


@pytest.mark.parametrize(
    ("world", "overrides"), [(1, []), (2, []), (2, ["parallel.pipeline=2"])], ids=["alone", "data", "pipeline"]
)
def test_samples_of_a_program_are_learnt_as_those_of_a_file(
    world: int, overrides: list[str], tiny_config: Make, tmp_path: Path
) -> None:
    """The same rows in the same order, one to a row of the batch: the same losses and the same bytes."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    settings = ["train.steps=2", "train.seed=42", "data.validation=null", "data.packing=false", *overrides]

    def stream() -> None:
        with Trainer(tiny_config(*settings), run_dir=tmp_path / "stream", samples=Samples(in_order, name="s")) as run:
            run.run()

    launch(world, stream)
    launch(world, lambda: run_training(tiny_config(*settings, f"data.train={file}"), tmp_path / "file"))
    assert losses(tmp_path / "stream") == losses(tmp_path / "file")
    found, expected = (data_files(tmp_path / name / "checkpoints/step-00000002") for name in ("stream", "file"))
    assert found == expected
    measured = [
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]) for name in ("stream", "file")
    ]
    assert [line["tokens"] for line in measured] == [measured[0]["tokens"]] * 2


def test_samples_are_asked_for_when_their_step_begins_and_a_resume_goes_on(tiny_config: Make, tmp_path: Path) -> None:
    """On rank 0 alone, never ahead, and after a resume from the next step on; the name is in the manifest."""
    config = tiny_config("train.seed=42", "data.validation=null")

    def asked() -> list[Any]:
        steps: list[int] = []

        def make(step: int) -> list[Row]:
            steps.append(step)
            return in_order(step)

        with Trainer(config, run_dir=tmp_path / "run", samples=Samples(make, name="policy")) as first:
            first.run_until(2)
            early = [*steps]
        with Trainer(config, run_dir=tmp_path / "run", samples=Samples(make, name="policy")) as second:
            kind = second.plan().plan.kind
            second.run()
        with Trainer(config, run_dir=tmp_path / "straight", samples=Samples(in_order, name="policy")) as third:
            third.run()
        return [early, steps, kind]

    [[early, steps, kind], elsewhere] = launch(2, asked)
    assert (early, steps, kind) == ([1, 2], [1, 2, 3, 4], "Resume")
    assert elsewhere[:2] == [[], []]
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    manifest = open_checkpoint(tmp_path / "run/checkpoints/step-00000004").manifest
    assert manifest.program.samples == "policy"
    assert manifest.data is not None
    assert manifest.data.num_samples is None


def test_a_resume_needs_the_samples_of_the_same_name(tiny_config: Make, tmp_path: Path) -> None:
    """Without the function, as the command line is, with another, or where there was a file: refused, with what to do."""
    config = tiny_config("data.validation=null")

    def stop() -> None:
        with Trainer(config, run_dir=tmp_path / "run", samples=Samples(in_order, name="policy")) as trainer:
            trainer.run_until(1)
        with Trainer(config, run_dir=tmp_path / "file") as trainer:
            trainer.run_until(1)

    launch(1, stop)
    with pytest.raises(StartRefused, match=r"samples=ckptrain.Samples\(function, name='policy'\)") as refused:
        api.plan(api.config_of_run(tmp_path / "run"), run_dir=tmp_path / "run")
    assert len(refused.value.problems) == 1
    with pytest.raises(StartRefused, match=r"made by 'policy' there, .* and 'other' now"):
        Trainer(config, run_dir=tmp_path / "run", samples=Samples(in_order, name="other")).plan()
    with pytest.raises(StartRefused, match="leave out `samples`"):
        Trainer(config, run_dir=tmp_path / "file", samples=Samples(in_order, name="policy")).plan()
    start = Trainer(config, run_dir=tmp_path / "run", samples=Samples(in_order, name="policy")).plan()
    assert start.plan.kind == "Resume"
    assert any("made by 'policy'" in note for note in start.plan.notes)


@pytest.mark.parametrize(
    ("rows", "overrides", "said"),
    [
        (ROWS[:3], [], "gave 3 rows for step 1"),
        ([*ROWS[:3], "text"], [], "row 4: expected a mapping, found str"),
        ([*ROWS[:3], {"messages": []}], [], "row 4: "),
        (ROWS[:4], ["data.sequence_length=8"], "rows longer than data.sequence_length"),
    ],
)
def test_rows_that_cannot_be_used_end_the_run_on_all_ranks(
    rows: list[Any], overrides: list[str], said: str, tiny_config: Make, tmp_path: Path
) -> None:
    """No rank is left waiting, and the row is named."""

    def run() -> str:
        config = tiny_config("data.validation=null", *overrides)
        try:
            with Trainer(config, run_dir=tmp_path, samples=Samples(lambda _: rows, name="s")) as trainer:
                trainer.run()
        except DataError as error:
            return str(error)
        return ""

    first, second = launch(2, run)
    assert said in first
    assert first == second


def test_rows_that_are_too_long_can_be_left_out(tiny_config: Make, tmp_path: Path) -> None:
    """The others are learnt, whichever rank would have had it."""
    long = {"messages": [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y"}]}

    def run() -> float | None:
        config = tiny_config("data.validation=null", "data.on_too_long=drop", "train.steps=1")
        with Trainer(config, run_dir=tmp_path, samples=Samples(lambda _: [*ROWS[:3], long], name="s")) as trainer:
            return trainer.run().loss

    first, second = launch(2, run)
    assert first == second
    assert first is not None
    assert first > 0


def test_contradictions_are_named(tiny_config: Make, tmp_path: Path) -> None:
    """Two sources, and a part of what is not there."""
    samples = Samples(in_order, name="s")
    with pytest.raises(ConfigError, match="`train` and `samples` are given"):
        Trainer(tiny_config(), run_dir=tmp_path, train=ROWS, samples=samples)
    with pytest.raises(ConfigError, match="split_validation_size is set beside"):
        split = ["data.validation=null", "data.split_validation_size=2"]
        Trainer(tiny_config(*split), run_dir=tmp_path, samples=samples)
