"""metrics.jsonl: each step once, and what lost stretches wrote kept beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.told_runs import write_steps

from ckptrain.lifecycle.journal import read_lines
from ckptrain.training import metrics
from ckptrain.training.metrics import MetricsFile, lost_path


def told(path: Path) -> list[tuple[int, float]]:
    """Return the steps and losses of a metrics file."""
    return [(line["step"], round(line["loss"], 6)) for line in read_lines(path)]


def stretches(path: Path) -> list[tuple[int, int, int]]:
    """Return (stretch, resumed from, step) of what was lost."""
    return [(line["stretch"], line["resumed_from"], line["step"]) for line in read_lines(lost_path(path))]


def test_steps_that_are_made_again_are_kept_aside(tmp_path: Path) -> None:
    """Of each stretch, in order, with what it measured; what counts has each step once, as it was made last."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, done=0, to=6)
    first = told(path)
    write_steps(path, done=4, to=7, shift=1.0)
    second = told(path)
    write_steps(path, done=6, to=8, shift=2.0)
    assert told(path) == [*first[:4], *second[4:6], (7, second[6][1] + 1), (8, told(path)[-1][1])]
    assert stretches(path) == [(1, 4, 5), (1, 4, 6), (2, 6, 7)]
    assert told(lost_path(path)) == [*first[4:], second[6]]


def test_a_resume_that_loses_nothing_leaves_nothing_aside(tmp_path: Path) -> None:
    """As after a stop that saved: there is no second file."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, done=0, to=4)
    write_steps(path, done=4, to=6)
    assert [step for step, _ in told(path)] == [1, 2, 3, 4, 5, 6]
    assert not lost_path(path).exists()


def test_a_start_that_dies_between_both_files_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stretch is aside before it leaves its file, so the next start finds it in both, and adds it once."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, done=0, to=6)
    replace = metrics._replace

    def die_before_the_second(target: Path, content: bytes) -> None:
        if target == path:
            raise KeyboardInterrupt
        replace(target, content)

    with monkeypatch.context() as patched:
        patched.setattr(metrics, "_replace", die_before_the_second)
        with pytest.raises(KeyboardInterrupt):
            MetricsFile(path, last_step=4, every_steps=1)
    assert len(told(path)) == 6
    write_steps(path, done=4, to=5)
    assert [step for step, _ in told(path)] == [1, 2, 3, 4, 5]
    assert stretches(path) == [(1, 4, 5), (1, 4, 6)]


@pytest.mark.parametrize("content", [b"", b'{"stretch"', b"[1]\n\xff\n", b'{"stretch": 1}'])
def test_what_is_no_line_does_not_keep_a_run_from_starting(content: bytes, tmp_path: Path) -> None:
    """Torn lines, and lines of something else, in both files."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, done=0, to=3)
    with path.open("ab") as file:
        file.write(b'[5]\n"text"\n{"step": 4, "lo')
    lost_path(path).write_bytes(content)
    write_steps(path, done=2, to=3)
    lines: list[dict[str, Any]] = read_lines(path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["step"] for line in read_lines(lost_path(path)) if "step" in line] == [3]
