"""tools/bench_convert.py measures what it says: the same adapter, stored as ranks store it, exported by both."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_convert
import pytest
import torch
from bench_convert import GB, goals, in_fresh_process, main
from checkpoint_rounds import Case as SavedCase
from checkpoint_rounds import open_state, write_base
from convert_contestants import CONFIG, OURS, THEIRS, WEIGHTS, differences
from convert_shapes import Case, in_pieces
from forked import launch
from safetensors.torch import save_file

Pieces = dict[str, tuple[tuple[int, ...], set[tuple[tuple[int, ...], tuple[int, ...]]]]]
"""Shape, and (offset, shape) of every piece, by stored name."""


def test_both_export_the_same_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model, stored in the pieces of TP=2 x PP=2; all of it is in the JSON, and no file is left."""
    import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

    # isort: split
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Fresh processes import torch anew: a benchmark has to tell that, a test need not wait for it.
    monkeypatch.setattr(
        filesystem_async, "get_write_results_queue", functools.partial(filesystem_async.get_write_results_queue, "fork")
    )
    monkeypatch.setattr(bench_convert, "in_fresh_process", in_fork)
    out, work = tmp_path / "out.json", tmp_path / "work"
    work.mkdir()
    assert main(["--shapes", "tiny", "--sample-mb", "64", "--directory", str(work), "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    (case,) = report["cases"]
    assert case["pieces"] == 7 * 4 + 8
    assert case["adapter_bytes"] == 4 * case["layer_bytes"] == 2 * 4 * 4 * (64 + 128 + 64 + 64 + 64 + 320 + 160 + 64)
    assert case["stored_bytes"] > case["adapter_bytes"]
    for name in (OURS, "bridge"):
        assert case[name]["num_bytes"] > 2 * case["adapter_bytes"]
        assert 0 < case[name]["export_s"] < case[name]["process_s"]
    assert case["bridge"]["differences"] == []
    assert all(speed > 0 for speed in report["speed"].values())
    assert "every name and bit is ours" in capsys.readouterr().out
    assert list(work.iterdir()) == []


def in_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a fork of this process, which may have children of its own."""

    def run() -> Any:
        multiprocessing.current_process()._config["daemon"] = False
        return function(*arguments)

    return launch(1, run)[0]


def test_a_process_of_its_own_is_another_one() -> None:
    """What is measured there has no memory of this one's."""
    assert in_fresh_process(os.getpid) != os.getpid()


def test_pieces_are_those_that_ranks_store(tmp_path: Path) -> None:
    """Two tensor parallel ranks of Megatron have the same names, shapes and places."""
    saved = SavedCase(num_layers=2, hidden_size=64, dim=4, ranks=2, repeats=0)
    write_base(tmp_path / "base", saved)

    def pieces_of_rank() -> Pieces:
        with open_state(saved, tmp_path / "base") as state:
            view = state.setup.store.adapters()
            return {
                name: (
                    view.shapes[name],
                    {(stack.offset, tuple(stack.gathered().shape)) for stack in stacks if stack.pieces[0].is_main},
                )
                for name, stacks in view.stacks.items()
            }

    first, second = launch(2, pieces_of_rank)
    case = Case(model="the same", config={}, rank=4, tensor=2)
    assert len(first) == 8
    for name, (shape, pieces) in first.items():
        shards = in_pieces(name, torch.zeros(shape), case).shards
        assert {(shard.offset, tuple(shard.data.shape)) for shard in shards} == pieces | second[name][1]


def test_differences_are_found(tmp_path: Path) -> None:
    """A name, a bit, a type and a key of the configuration; equal exports have none."""
    weights = {"a": torch.tensor([0.0, 1.0]), "b": torch.ones(2), "c": torch.ones(2)}
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj"]}

    def write(name: str, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        save_file(weights, tmp_path / name / WEIGHTS)
        (tmp_path / name / CONFIG).write_text(json.dumps(config))

    write(OURS, weights, config)
    write(THEIRS, weights, {**config, "target_modules": ["k_proj", "q_proj"]})
    assert differences(tmp_path) == []
    write(THEIRS, {"a": torch.tensor([-0.0, 1.0]), "b": torch.ones(2).half(), "d": torch.ones(2)}, {**config, "r": 8})
    assert differences(tmp_path) == [
        "c is in one of them",
        "d is in one of them",
        "a differs",
        "b differs",
        f"{CONFIG}: r is 4 and 8",
    ]


def judged(model: str, seconds: float, gigabytes: float, num_layers: int = 80, layer_bytes: int = 1) -> dict[str, Any]:
    """Return what the benchmark knows of a case that took so long and so much, half of it above the imports."""
    num_bytes = gigabytes * GB
    ours = {"process_s": seconds, "peak_bytes": num_bytes, "above_imports_bytes": num_bytes / 2}
    return {"case": model, "num_layers": num_layers, "layer_bytes": layer_bytes, "ours": ours}


@pytest.mark.parametrize(("seconds", "gigabytes", "met"), [(19.0, 2.9, True), (21.0, 1.0, False), (1.0, 3.1, False)])
def test_time_and_memory_of_the_70b_shapes_are_judged(seconds: float, gigabytes: float, met: bool) -> None:
    """Of the whole process, and of no other shapes."""
    cases = [judged("Llama-3-70B", seconds, gigabytes, 80, 2), judged("Llama-3-8B", seconds, gigabytes, 32, 1)]
    assert [goal["met"] for goal in goals(cases)] == [met]


@pytest.mark.parametrize(("gigabytes", "met"), [(1.0, True), (1.4, True), (1.6, False), (2.0, False)])
def test_memory_that_grows_with_the_layers_is_told(gigabytes: float, met: bool) -> None:
    """Twice as many of the same layers; in proportion to them is what it must not be."""
    cases = [judged("all", 1.0, gigabytes, 94), judged("half", 1.0, 1.0, 47)]
    assert [goal["met"] for goal in goals(cases)] == [met]
