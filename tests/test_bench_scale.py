"""tools/bench_scale.py runs, and its counts grow with ranks as docs/scale.md says: times are the machine's affair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_scale import main
from forked import launch
from scale_ranks import fleet

DOCUMENT = Path(__file__).parents[1] / "docs/benchmarks/scale.json"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, int]]:
    """Return the counts of 8 and 64 ranks, by shape and ranks."""
    directory = tmp_path_factory.mktemp("scale")
    out, work = directory / "out.json", directory / "work"
    work.mkdir()
    assert launch(1, lambda: main(["--ranks", "8", "64", "--directory", str(work), "--json", str(out)])) == [0]
    assert list(work.iterdir()) == [], "nothing is left of the checkpoints"
    report = json.loads(out.read_text())
    assert all(seconds >= 0 for case in report["cases"] for seconds in case["seconds"].values())
    return {(case["shape"], case["ranks"]): case["counts"] for case in report["cases"]}


@pytest.mark.parametrize("shape", ["8b", "70b"])
def test_counts_grow_as_documented(shape: str, cases: dict[tuple[str, int], dict[str, int]]) -> None:
    """Tensors not at all, pieces with shards and ranks, files with ranks; bytes of a rank no more than a few kilobytes."""
    for ranks in (8, 64):
        counts, layout = cases[shape, ranks], fleet(shape, ranks).layout
        shards = layout.tensor * layout.pipeline
        assert counts["tensors"] == 33
        assert counts["pieces"] == 36 * shards + ranks
        assert counts["files"] == ranks + shards + 3
    few, many = cases[shape, 8], cases[shape, 64]
    assert few["pieces that a rank reads"] <= many["pieces that a rank reads"] <= 288
    # 56 ranks more; of 70B also 24 shards more, of 36 pieces each.
    more_pieces = many["pieces"] - few["pieces"]
    for name, bytes_of_a_piece in (
        (".metadata, bytes", 300),
        ("results to rank 0, bytes", 500),
        ("manifest, bytes", 250),
    ):
        assert many[name] - few[name] < bytes_of_a_piece * more_pieces, name
    assert many["plans to rank 0, bytes"] - few["plans to rank 0, bytes"] < 1000 * more_pieces


def test_the_document_has_the_counts_of_the_code(cases: dict[tuple[str, int], dict[str, int]]) -> None:
    """docs/benchmarks/scale.json is of this code: pieces, tensors and files are the same, bytes nearly."""
    written = {(case["shape"], case["ranks"]): case["counts"] for case in json.loads(DOCUMENT.read_text())["cases"]}
    for key, counts in cases.items():
        for name, count in counts.items():
            assert written[key][name] == pytest.approx(count, rel=0.05 if "bytes" in name else 0), (key, name)
