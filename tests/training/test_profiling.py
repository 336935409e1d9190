"""train.profile: files of a real run, beside what the run itself measured."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from support.launch import launch, run_training

from ckptrain.config.schema import RunConfig
from ckptrain.lifecycle.journal import read_journal
from ckptrain.training.observers import Observer
from ckptrain.training.trace import HOST, MATRIX, OPTIMIZER


class Lines(Observer):
    """Keeps what a person is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_progress(self, text: str) -> None:
        """Keep it."""
        self.lines.append(text)


def run(config: RunConfig, run_dir: Path, world_size: int = 1) -> list[str]:
    """Run and return the lines that rank 0 told."""

    def on_rank() -> list[str]:
        told = Lines()
        run_training(config, run_dir, [told])
        return told.lines

    return launch(world_size, on_rank)[0]


def test_two_steps_are_recorded_on_rank_0_of_two(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """The third and the fourth; kinds add up to the step, which is as long as the run says; products are those of torch."""
    lines = run(tiny_config("train.steps=5", "train.profile=2"), tmp_path, world_size=2)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "step-00000003.json",
        "step-00000003.trace.json.gz",
        "step-00000003.txt",
    ]
    found = orjson.loads((tmp_path / "profile/step-00000003.json").read_bytes())
    assert (found["device"], found["first_step"], found["num_steps"]) == ("cpu", 3, 2)
    assert sum(found["kinds"].values()) == pytest.approx(found["step_s"])
    steps = [orjson.loads(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    measured = [step["seconds"] for step in steps if step["step"] in (3, 4) and "loss" in step]
    assert found["step_s"] == pytest.approx(sum(measured) / 2, rel=0.2)
    trace = orjson.loads(gzip.decompress((tmp_path / "profile/step-00000003.trace.json.gz").read_bytes()))
    products = [event["dur"] for event in trace["traceEvents"] if event.get("name") in ("aten::mm", "aten::addmm")]
    assert products
    assert found["kinds"][MATRIX] * 2e6 == pytest.approx(sum(products), rel=0.25)
    assert found["kinds"][OPTIMIZER] > 0
    assert found["kinds"][HOST] > 0
    assert any("step-00000003.txt" in line for line in lines)
    [entry] = [entry for entry in read_journal(tmp_path / "journal.jsonl") if entry["event"] == "profile"]
    assert (entry["files"], entry["kinds"]) == ("profile/step-00000003", found["kinds"])


def test_a_run_that_ends_before_has_what_was_recorded_and_a_resume_counts_anew(
    tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Three steps, of which the last is recorded; a resume records after its own second step."""
    run(tiny_config("train.steps=3", "train.profile=9"), tmp_path)
    run(tiny_config("train.steps=6", "train.profile=1", "optimizer.schedule=constant"), tmp_path)
    names = sorted(path.name for path in (tmp_path / "profile").glob("*.json"))
    assert names == ["step-00000003.json", "step-00000006.json"]
    assert orjson.loads((tmp_path / "profile" / names[0]).read_bytes())["num_steps"] == 1


def test_a_profile_that_cannot_be_written_does_not_end_the_run(
    tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """A file lies where its directory would be."""
    (tmp_path / "profile").write_text("in the way")
    run(tiny_config("train.steps=4", "train.profile=1"), tmp_path)
    assert (tmp_path / "checkpoints/step-00000004").is_dir()


def test_what_a_run_learns_does_not_depend_on_being_watched(
    tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Losses are the same, bit for bit."""
    losses = []
    for name, extra in (("watched", ["train.profile=2"]), ("alone", [])):
        run(tiny_config("train.steps=4", *extra), tmp_path / name)
        lines = [orjson.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_bytes().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[0] == losses[1]
    assert not (tmp_path / "alone/profile").exists()
