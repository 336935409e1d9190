"""tools/bench_start.py measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_start import OURS, PLAIN, THEIRS, copy_plainly, load_as_bridge_does, main, write_base
from forked import launch


def test_every_contestant_and_every_part_is_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny model, one round, one start; nothing is left of the model."""
    out, work = tmp_path / "out.json", tmp_path / "work"
    work.mkdir()
    words = ["--shape", "tiny", "--rounds", "1", "--starts", "1", "--directory", str(work), "--json", str(out)]
    assert launch(1, lambda: main(words)) == [0]
    report = json.loads(out.read_text())
    assert report["loading_process_s"].keys() == {PLAIN, OURS, THEIRS}
    assert all(seconds > 0 for [seconds] in report["loading_process_s"].values())
    norms = 4 * 9 * 64  # float32
    assert report["num_bytes"] == 2 * (2 * 264 * 64 + 4 * (64 * 128 + 64 * 64 + 3 * 64 * 160)) + norms
    [start] = report["starts"]
    assert {"imports", "base", "first step"} <= start["seconds"].keys()
    assert sum(start["seconds"].values()) == pytest.approx(start["total_s"], abs=0.02)
    assert list(work.iterdir()) == []


def test_a_plain_copy_is_of_every_weight_and_theirs_is_refused_where_one_is_missing(tmp_path: Path) -> None:
    """So that no contestant is fast for doing less."""
    import torch
    from safetensors.torch import load_file

    base = write_base(tmp_path / "base", "tiny", "bfloat16")
    copied, stored = copy_plainly(base, torch.bfloat16, torch.device("cpu")), load_file(base / "model.safetensors")
    assert copied.keys() == stored.keys()
    assert all(torch.equal(copied[name], weight) for name, weight in stored.items())

    class Lazy:
        def load_hf_weights(self, models: list[torch.nn.Module]) -> None:
            """Fill one of the two."""
            with torch.no_grad():
                models[0].weight.fill_(1.0)

    with pytest.raises(AssertionError):
        load_as_bridge_does(Lazy(), torch.nn.Linear(2, 2))
