"""uv run python tools/bench_scale.py --json docs/benchmarks/scale.json

What planning, manifest and commit of a checkpoint cost with up to 4,096 ranks, and what a resume onto another layout
does: fake ranks in one process, over the planner of torch's distributed checkpoint and the code of a real save and
start. Tensors have shapes and no numbers, data files have sizes and no contents.

A message is counted as the bytes that torch pickles for it. Not there: the network, the file system of a cluster, and
the writing, reading and hashing of the data itself (tools/bench_checkpoint.py measures those).
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed.checkpoint as dcp
from scale_ranks import Fleet, fleet
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ckptrain.checkpoint.dcp_metadata import ADAPTER_DIRECTORY, DIRECTORIES, METADATA_NAME, read_dcp_metadata
from ckptrain.checkpoint.integrity import open_checkpoint
from ckptrain.checkpoint.manifest import FileDigest, Manifest, TensorEntry, parse_manifest
from ckptrain.checkpoint.retention import Retention
from ckptrain.checkpoint.sharded import StoredTensor, _Writer, read_metadata, stored_tensors
from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.config.identity import BaseIdentity
from ckptrain.config.load import flatten
from ckptrain.lifecycle.facts import DataIdentity
from ckptrain.training.start import versions

_RECORD_BYTES = 1200
"""What torch.save puts around the numbers of one piece."""
_SHA256 = hashlib.sha256(b"").hexdigest()
_KEPT = 3
"""Checkpoints in the run directory when it is scanned."""
SHAPES = ("8b", "70b")
RANKS = (8, 64, 512, 4096)


class Measured:
    """Seconds and counts of one fleet, by what they are of."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def timed[T](self, name: str, act: Callable[[], T], per: int = 1) -> T:
        """Run something, and add what it took to `name`; of `per` ranks the mean."""
        started = time.perf_counter()
        result = act()
        self.seconds[name] = self.seconds.get(name, 0.0) + (time.perf_counter() - started) / per
        return result

    def count(self, name: str, number: int) -> None:
        """Add to a count."""
        self.counts[name] = self.counts.get(name, 0) + number


@attrs.frozen(kw_only=True)
class Saved:
    """One directory of a checkpoint, planned, and described as it would be on disk."""

    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, int]
    """Bytes of the files that hold numbers, by name."""


def plan_save(states: Sequence[Mapping[str, Tensor]], directory: Path, measured: Measured) -> Saved:
    """Go through a save of one directory as `dcp.save` does, without the numbers."""
    planner, writer = dcp.DefaultSavePlanner(), _Writer(directory)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = measured.timed("plan of a rank", lambda: [_plan_of(state, writer) for state in states], per=len(states))
    measured.count("plans to rank 0, bytes", _bytes_of(plans))
    planner.set_up_planner(dict(states[0]), writer.storage_meta(), is_coordinator=True)
    plans, metadata = measured.timed("global plan", lambda: planner.create_global_plan(plans))
    plans = measured.timed("global plan", lambda: writer.prepare_global_plan(plans))
    measured.count("plans from rank 0, bytes", _bytes_of(plans))
    files: dict[str, int] = {}
    results = [_written(plan, f"__{rank}_0.distcp", files) for rank, plan in enumerate(plans)]
    measured.count("results to rank 0, bytes", _bytes_of(results))
    measured.timed(".metadata", lambda: writer.finish(metadata, results))
    measured.count(".metadata, bytes", (directory / METADATA_NAME).stat().st_size)
    measured.count("pieces", sum(len(result) for result in results))
    for name, size in files.items():
        with (directory / name).open("wb") as file:
            file.truncate(size)
    return Saved(tensors=stored_tensors(metadata), files=files)


def _plan_of(state: Mapping[str, Tensor], writer: _Writer) -> SavePlan:
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(dict(state), writer.storage_meta(), is_coordinator=False)
    return writer.prepare_local_plan(planner.create_local_plan())


def _written(plan: SavePlan, file: str, files: dict[str, int]) -> list[WriteResult]:
    """Return what a rank reports of its pieces, one after the other in its file."""
    results = []
    for item in plan.items:
        size = item.tensor_storage_size()
        assert size is not None
        start, length = files.get(file, 0), size + _RECORD_BYTES
        storage = _StorageInfo(relative_path=file, offset=start, length=length)
        results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=storage))
        files[file] = start + length
    return results


def _bytes_of(messages: Sequence[object]) -> int:
    return sum(len(pickle.dumps(message)) for message in messages)


def commit(store: CheckpointStore, ranks: Fleet, step: int, measured: Measured) -> Path:
    """Plan a save, and commit it: manifest, check, rename."""
    staging = store.stage(step)
    states = [ranks.saves(rank) for rank in range(ranks.layout.world_size)]
    saved = {name: plan_save([state[name] for state in states], staging / name, measured) for name in DIRECTORIES}
    files = {
        f"{name}/{file}": FileDigest(num_bytes=size, sha256=_SHA256)
        for name, part in saved.items()
        for file, size in part.files.items()
    }
    # Every rank tells all others what it wrote (`writer.write_checkpoint`), and gets what they wrote.
    measured.count("digests to every rank, bytes", _bytes_of([{name: digest} for name, digest in files.items()]))
    for name in saved:
        size = (staging / name / METADATA_NAME).stat().st_size
        files[f"{name}/{METADATA_NAME}"] = FileDigest(num_bytes=size, sha256=_SHA256)
    manifest = _manifest(ranks, step, saved, files)
    data = measured.timed("manifest to JSON", manifest.to_json)
    measured.timed("manifest from JSON", lambda: parse_manifest(data, "manifest.json"))
    measured.count("manifest, bytes", len(data))
    measured.count("tensors", len(manifest.tensors))
    measured.count("files", len(files) + 1)
    return measured.timed("commit", lambda: store.commit(staging, manifest)).path


def _manifest(ranks: Fleet, step: int, saved: Mapping[str, Saved], files: Mapping[str, FileDigest]) -> Manifest:
    def group(directory: str, name: str) -> Any:
        return "adapter" if directory == ADAPTER_DIRECTORY else "rng" if name.startswith("rng.") else "optimizer"

    return Manifest(
        run_id="scale",
        step=step,
        consumed_samples=step,
        consumed_tokens=step,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        base=BaseIdentity(fingerprint="0" * 64, name="org/model", revision=None, num_bytes=0),
        shape=ranks.case.shape,
        tokenizer_fingerprint="0" * 64,
        data=DataIdentity(fingerprint="0" * 64),
        lora=ranks.lora,
        layout=ranks.layout,
        metrics={"loss": 1.0},
        optimizer={"step": step},
        versions=versions(),
        config=flatten(ranks.config),
        files=files,
        tensors={
            name: TensorEntry(shape=tensor.shape, dtype=tensor.dtype, group=group(directory, name))
            for directory, part in saved.items()
            for name, tensor in part.tensors.items()
        },
    )


def plan_resume(checkpoint: Path, ranks: Fleet, measured: Measured) -> None:
    """Go through a load onto another layout as `dcp.load` does, without the numbers; generators are not restored."""
    for directory in DIRECTORIES:
        path = checkpoint / directory
        metadata = measured.timed("description read by a rank", lambda path=path: read_metadata(path))
        parts = {ranks.part_of(rank) for rank in range(ranks.layout.world_size)}
        states = {part: ranks.holds(part)[directory] for part in parts}
        plans = {
            part: measured.timed("load plan of a rank", lambda s=state, m=metadata: _load_plan(s, m), per=len(parts))
            for part, state in states.items()
        }
        # Each rank plans by itself, and sends nothing.
        measured.count("pieces that a rank reads", max(len(plan.items) for plan in plans.values()))


def _load_plan(state: Mapping[str, Tensor], metadata: Metadata) -> Any:
    planner = dcp.DefaultLoadPlanner(allow_partial_load=False)
    planner.set_up_planner(dict(state), metadata, is_coordinator=False)
    return planner.create_local_plan()


def measure(shape: str, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Save, commit, scan, prune and plan a resume with so many ranks; returns counts and seconds."""
    ranks, other = fleet(shape, num_ranks), fleet(shape, num_ranks, turned=True)
    measured, ignored = Measured(), Measured()
    store = CheckpointStore(directory)
    path = commit(store, ranks, 1, measured)
    for step in range(2, _KEPT + 1):
        commit(store, ranks, step, ignored)
    measured.timed("checkpoint opened", lambda: open_checkpoint(path))
    for name in DIRECTORIES:
        measured.timed("description read by a rank", lambda name=name: read_dcp_metadata(path / name))
    del measured.seconds["description read by a rank"]  # the first read warms the page cache
    measured.timed(f"scan of {_KEPT} checkpoints", store.scan)
    plan_resume(path, other, measured)
    removed = measured.timed("two pruned", lambda: store.prune(Retention(keep_last=1, keep_every=None, keep_best=0)))
    assert len(removed) == _KEPT - 1
    return {
        "shape": shape,
        "model": ranks.case.model,
        "ranks": num_ranks,
        "layout": attrs.asdict(ranks.layout),
        "resumed_on": attrs.asdict(other.layout),
        "counts": measured.counts,
        "seconds": {name: round(seconds, 6) for name, seconds in measured.seconds.items()},
    }


def table(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return a model's figures, a column for each number of ranks."""
    first = cases[0]
    lines = [f"{first['model']:34}" + "".join(f"{case['ranks']:>12,}" for case in cases)]
    lines += [f"{name:34}" + "".join(f"{case['counts'][name]:>12,}" for case in cases) for name in first["counts"]]
    lines += [
        f"{name + ', s':34}" + "".join(f"{case['seconds'][name]:>12.4f}" for case in cases) for name in first["seconds"]
    ]
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, "tiny"], default=list(SHAPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument(
        "--directory", type=Path, help="where the checkpoints lie meanwhile; their files have no blocks"
    )
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    cases = []
    for shape in asked.shapes:
        for num_ranks in asked.ranks:
            with tempfile.TemporaryDirectory(dir=asked.directory) as name:
                cases.append(measure(shape, num_ranks, Path(name)))
        print(f"{table([case for case in cases if case['shape'] == shape])}\n")
    if asked.json:
        asked.json.write_text(json.dumps({"torch": str(torch.__version__), "cases": cases}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
