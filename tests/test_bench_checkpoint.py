"""tools/bench_checkpoint.py measures what it says: every contestant restores what it saved, and goals are judged."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from bench_checkpoint import MEGATRON, OURS, OURS_UNSTACKED, OURS_WAITED_FOR, RAW, case_of, goals, main
from checkpoint_rounds import open_state, write_base
from forked import launch

RESTORE = {RAW, OURS, OURS_UNSTACKED, MEGATRON, "Hugging Face"}
BACKGROUND = {OURS, "megatron-core, in the background"}


def case(num_bytes: int, ranks: int, num_tensors: int = 24, **seconds: tuple[float, float]) -> dict[str, Any]:
    """Return what the benchmark knows of a case whose contestants took (stall, commit) seconds."""
    names = {"ours": OURS, "unstacked": OURS_UNSTACKED, "megatron": MEGATRON, "raw": RAW}
    return {
        "num_bytes": num_bytes,
        "ranks": ranks,
        "num_tensors": num_tensors,
        "contestants": [
            {"name": names[key], "median": {"stall_s": stall, "commit_s": commit}}
            for key, (stall, commit) in seconds.items()
        ],
    }


def test_every_contestant_restores_what_it_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny state on two ranks, and one on one rank; all of each is in the JSON, and no file is left."""
    import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

    # isort: split
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # It spawns a process, which imports torch anew: a benchmark has to tell that, a test need not wait for it.
    forked = functools.partial(filesystem_async.get_write_results_queue, "fork")
    monkeypatch.setattr(filesystem_async, "get_write_results_queue", forked)
    out, disk = tmp_path / "out.json", tmp_path / "disk"
    disk.mkdir()
    sizes = ["--sizes", "0.4", "--ranks", "2", "--tensors", "24", "--repeats", "1"]
    assert main([*sizes, "--directory", str(disk), "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [(measured["ranks"], measured["num_tensors"]) for measured in report["cases"]] == [(2, 96)]
    assert [(measured["ranks"], measured["num_tensors"]) for measured in report["by_tensors"]] == [(1, 24)]
    for measured, own in ((report["cases"][0], set()), (report["by_tensors"][0], {OURS_UNSTACKED})):
        parts = {part["name"]: part for part in measured["contestants"]}
        assert parts.keys() == {RAW, OURS_WAITED_FOR, MEGATRON, "Hugging Face"} | BACKGROUND | own
        for name, part in parts.items():
            on_ranks = 1 if name == "Hugging Face" else measured["ranks"]
            assert part["num_tensors"] == measured["num_tensors"] * on_ranks
            assert part["num_equal"] == (part["num_tensors"] if name in RESTORE else None)
            assert part["num_bytes"] >= measured["num_bytes"]
            assert (part["median"]["restore_s"] is not None) == (name in RESTORE)
            assert 0 < part["median"]["stall_s"] <= part["median"]["commit_s"]
            assert len(part["samples"]) == 1
        assert {part["name"] for part in measured["interference"]} == BACKGROUND | own
        assert measured["predicted_s"].keys() == {"stall_s", "commit_s", "restore_s"}
    assert {"cores", "disk", "versions"} <= report["machine"].keys()
    assert len(report["goals"]) == 6
    assert list(disk.iterdir()) == []
    assert "stall below 0.1 of megatron-core's save" in capsys.readouterr().out


def test_all_contestants_save_the_same_numbers(tmp_path: Path) -> None:
    """Hugging Face's model, built by itself, has every weight and moment that Megatron's has, to the bit."""
    asked = case_of(0.1, 1, 1)
    write_base(tmp_path / "base", asked)

    def on_rank() -> tuple[dict[str, str], dict[str, str]]:
        from checkpoint_contestants import HuggingFace
        from checkpoint_state import digests

        with open_state(asked, tmp_path / "base") as state:
            return digests(state.tensors), digests(HuggingFace(tmp_path, state).tensors)

    ours, theirs = launch(1, on_rank)[0]
    assert theirs == ours
    assert len(set(ours.values())) == asked.num_tensors


def test_a_contestant_that_restores_something_else_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads nothing back leaves the zeros that were there before; the exit status says so."""
    import checkpoint_contestants
    from checkpoint_contestants import Raw

    monkeypatch.setattr(Raw, "restore", lambda self, step: self.parts.update(read_s=0.0))
    monkeypatch.setattr(checkpoint_contestants, "CONTESTANTS", (Raw,))
    monkeypatch.setattr("bench_checkpoint.goals", lambda *_: [])
    out = tmp_path / "out.json"
    asked = ["--sizes", "0.1", "--ranks", "1", "--tensors", "", "--repeats", "1", "--json", str(out)]
    assert main([*asked, "--directory", str(tmp_path)]) == 1
    found = json.loads(out.read_text())["cases"][0]["contestants"][0]
    assert (found["num_equal"], found["num_tensors"]) == (0, 96)


def test_goals_are_judged_by_the_worst_case() -> None:
    """Ratios that were worked out by hand: one case of each kind that is not good enough is enough."""
    cases = [
        case(100_000_000, 1, ours=(0.01, 3.0), megatron=(0.5, 0.5), raw=(2.0, 2.0)),
        case(100_000_000, 2, ours=(0.01, 6.6), megatron=(0.05, 0.05), raw=(2.0, 2.0)),
        case(1_000_000_000, 1, ours=(0.01, 30.0), megatron=(0.5, 0.5), raw=(20.0, 20.0)),
        case(1_000_000_000, 2, ours=(0.01, 33.0), megatron=(0.5, 0.5), raw=(20.0, 20.0)),
    ]
    by_tensors = [
        case(100_000_000, 1, 24, ours=(0.0, 1.0), unstacked=(0.0, 1.0)),
        case(100_000_000, 1, 240, ours=(0.0, 1.5), unstacked=(0.0, 11.0)),
    ]
    found = {goal["goal"]: goal for goal in goals(cases, by_tensors)}
    verdicts = [(goal["met"], [round(value, 3) for value in goal["found"].values()]) for goal in found.values()]
    assert verdicts == [
        (False, [0.02, 0.2, 0.02, 0.02]),
        (False, [1.5, 3.3, 1.5, 1.65]),
        (False, [1.1, 0.55]),
        (True, [1.0, 0.5]),
        (True, [0.15]),
        (False, [1.1]),
    ]


def test_a_goal_that_nothing_was_measured_for_is_neither_met_nor_missed() -> None:
    """With one size, one number of ranks and no numbers of tensors there is no growth to tell."""
    only = case(100_000_000, 1, ours=(0.01, 3.0), megatron=(0.5, 0.5), raw=(2.0, 2.0))
    assert [goal["met"] for goal in goals([only], [])] == [True, True, None, None, None, None]


@pytest.mark.parametrize("size_mb", [1, 130, 1500])
def test_a_state_has_about_the_size_that_was_asked_for(size_mb: int) -> None:
    """Within a tenth, and its LoRA can be cut for four ranks."""
    asked = case_of(size_mb, 4, 5)
    assert asked.num_bytes == pytest.approx(size_mb * 1e6, rel=0.1)
    assert asked.dim % 4 == 0
