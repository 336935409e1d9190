"""uv run python tools/bench_convert.py --json OUT

What an export to Hugging Face PEFT costs in time and memory, for adapters in the shape of models from 1B to 235B,
beside Megatron-Bridge's, where this machine can hold the model that Bridge builds for it.

Each checkpoint is written by the project's own writer, bfloat16, every linear layer adapted, and dropped from the page
cache. Each export runs in a fresh process; its memory is ru_maxrss, with interpreter and libraries. This process stays
small, because Linux counts to a child what its parent had when it was started. Where both export, every name and bit
is compared.

What to expect, before measuring, for a checkpoint of C bytes and an export of E (float32, and an A for each part of a
fused layer: about 2.4 C), on a disk that reads r and writes w bytes a second and with SHA-256 at h: C / r + C / h for
the check of every file, then E / w for the export, synced; what is read a second time is in the page cache. Memory
above the imports: some copies of one layer, stored, as float32 and, of a module, as float64; and some hundred bytes for
each tensor, for safetensors' header. `expected_s` in the JSON is made of speeds measured in the same run.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import attrs
import convert_contestants as contestants
from convert_contestants import Measured
from convert_shapes import CASES, Case, Made, write_checkpoint_of
from rich.console import Console
from rich.table import Table

from ckptrain.cli.quiet import quiet_libraries

GB, MB = 1e9, 1e6
MOST_SECONDS, MOST_BYTES = 20.0, 3e9
"""For the 70B shapes, from the start of the process to its end."""
MOST_GROWTH = 0.5
"""Of memory above the imports, where 1 is in proportion to the number of layers; their names are what grows."""
_BASE_BYTES = 4
"""Of a parameter of the base in Bridge's model, which is float32."""
_SAMPLE_BYTES = 64 << 20


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in an interpreter of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        return pool.submit(function, *arguments).result()


def _quiet() -> None:
    quiet_libraries()
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)


def speeds(directory: Path, num_bytes: int) -> dict[str, float]:
    """Return bytes a second of the disk, writing with a sync and reading, and of SHA-256."""
    sample, path = os.urandom(_SAMPLE_BYTES), directory / "sample"
    repeats = max(1, num_bytes // _SAMPLE_BYTES)
    started = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(repeats):
            file.write(sample)
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter()
    forget(path)
    buffer = bytearray(_SAMPLE_BYTES)
    begun = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    read = time.perf_counter()
    path.unlink()
    digest = hashlib.sha256()
    for _ in range(repeats):
        digest.update(sample)
    hashed = time.perf_counter()
    total = repeats * _SAMPLE_BYTES
    return {"write": total / (written - started), "read": total / (read - begun), "hash": total / (hashed - read)}


def forget(path: Path) -> None:
    """Make a file, or every file of a directory, be read from the disk next."""
    for file in [path] if path.is_file() else filter(Path.is_file, path.rglob("*")):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())  # what is not on the disk yet cannot be forgotten
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(case: Case, directory: Path, speed: Mapping[str, float]) -> dict[str, Any]:
    """Write the checkpoint of a case and let both export it; returns the numbers for JSON."""
    directory.mkdir(parents=True)
    made: Made = in_fresh_process(write_checkpoint_of, case, directory)
    forget(made.checkpoint)
    started = time.perf_counter()
    ours: Measured = in_fresh_process(contestants.export_ours, made.checkpoint, directory)
    process_s = time.perf_counter() - started
    expected_s = {
        "check": made.stored_bytes / speed["read"] + made.stored_bytes / speed["hash"],
        "write": ours.num_bytes / speed["write"],
    }
    above = ours.peak_bytes - ours.imported_bytes
    num_layers = case.shape.num_layers
    return {
        "case": case.label,
        "num_layers": num_layers,
        "rank": case.rank,
        **{name: value for name, value in attrs.asdict(made).items() if name != "checkpoint"},
        "expected_s": expected_s,
        "ours": {
            **attrs.asdict(ours),
            "process_s": process_s,
            "above_imports_bytes": above,
            "above_imports_layers": above / made.layer_bytes,
            "above_imports_written_layers": above * num_layers / ours.num_bytes,
        },
        "bridge": measure_bridge(case, made, directory),
    }


def measure_bridge(case: Case, made: Made, directory: Path) -> dict[str, Any]:
    """Let Megatron-Bridge export the same adapter, if this machine can hold the model that it builds."""
    needed, held = _BASE_BYTES * case.shape.num_parameters, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > held:
        reason = f"builds the base in float32: {needed / GB:,.0f} GB, and this machine has {held / GB:,.0f} GB"
        return {"not_run": reason}
    in_fresh_process(contestants.prepare_bridge, case, made.checkpoint, directory)
    forget(directory)
    started = time.perf_counter()
    theirs: Measured = in_fresh_process(contestants.export_by_bridge, case, made.checkpoint, directory)
    process_s = time.perf_counter() - started
    differences = in_fresh_process(contestants.differences, directory)
    return {**attrs.asdict(theirs), "process_s": process_s, "differences": differences}


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the table, and what it leaves out."""
    speed = report["speed"]
    console.print(
        f"\n{report['machine']['processor']}, {report['machine']['cores']} cores; {report['machine']['disk']}: written"
        f" {speed['write'] / MB:,.0f} MB/s, read {speed['read'] / MB:,.0f} MB/s; SHA-256 {speed['hash'] / MB:,.0f} MB/s"
    )
    table = Table(title="export to PEFT, float32; s from start to end of the process", title_justify="left")
    for heading in ("", "stored MB", "pieces", "written MB", "expected", "export", "process", "peak MB", "- imports"):
        table.add_column(heading, justify="right" if heading else "left")
    for heading in ("layer MB", "in layers", "Bridge", "peak MB"):
        table.add_column(heading, justify="right")
    for case in report["cases"]:
        ours, bridge = case["ours"], case["bridge"]
        table.add_row(
            case["case"],
            f"{case['stored_bytes'] / MB:,.0f}",
            f"{case['pieces']}",
            f"{ours['num_bytes'] / MB:,.0f}",
            f"{sum(case['expected_s'].values()):.1f} s",
            f"{ours['export_s']:.1f} s",
            f"{ours['process_s']:.1f} s",
            f"{ours['peak_bytes'] / MB:,.0f}",
            f"{ours['above_imports_bytes'] / MB:,.0f}",
            f"{case['layer_bytes'] / MB:,.1f}",
            f"{ours['above_imports_layers']:,.1f}",
            "" if "not_run" in bridge else f"{bridge['process_s']:.1f} s",
            "" if "not_run" in bridge else f"{bridge['peak_bytes'] / MB:,.0f}",
        )
    console.print(table)
    if missing := report["machine"]["export_adapter_ckpt"]:
        console.print(
            f"Bridge's export_adapter_ckpt cannot be called here ({missing}): its steps were taken one by one"
        )
    for case in report["cases"]:
        console.print(f"[bold]{case['case']}[/]: Bridge {_bridge_in_words(case['bridge'])}")
    for goal in report["goals"]:
        console.print(f"[bold]{'met' if goal['met'] else 'NOT met'}[/]: {goal['goal']} ({goal['found']})")


def _bridge_in_words(bridge: Mapping[str, Any]) -> str:
    if "not_run" in bridge:
        return str(bridge["not_run"])
    parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in bridge["parts_s"].items())
    same = "every name and bit is ours" if not bridge["differences"] else "; ".join(bridge["differences"][:5])
    return f"{same}; {parts}"


def goals(cases: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what was to be reached, whether it was, and the numbers."""
    for case in cases:
        if "70B" in case["case"]:
            seconds, peak = case["ours"]["process_s"], case["ours"]["peak_bytes"]
            yield {
                "goal": f"{case['case']}: less than {MOST_SECONDS:g} s and {MOST_BYTES / GB:g} GB",
                "met": seconds < MOST_SECONDS and peak < MOST_BYTES,
                "found": f"{seconds:.1f} s, {peak / GB:.2f} GB",
            }
    for fewer, more in itertools.combinations(sorted(cases, key=lambda case: case["num_layers"]), 2):
        if fewer["layer_bytes"] == more["layer_bytes"] and fewer["num_layers"] < more["num_layers"]:
            layers = more["num_layers"] / fewer["num_layers"]
            memory = more["ours"]["above_imports_bytes"] / fewer["ours"]["above_imports_bytes"]
            yield {
                "goal": f"{more['case']}: memory that hardly grows with the number of layers",
                "met": memory - 1 < MOST_GROWTH * (layers - 1),
                "found": f"{memory:.2f} times that of {fewer['num_layers']} layers for {layers:.2f} times the layers",
            }


def facts(directory: Path) -> dict[str, Any]:
    """Return what the numbers depend on besides the programs."""
    from bench_checkpoint import machine

    return {**machine(directory), "export_adapter_ckpt": contestants.missing_for_bridge()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print everything, and return the exit status: 1 where two exports of one adapter differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = [name for name in CASES if name != "tiny"]
    parser.add_argument("--shapes", default=",".join(everything), help=f"of {', '.join(CASES)}")
    parser.add_argument("--directory", type=Path, help="on the disk to be measured; that for temporary files otherwise")
    parser.add_argument("--keep", type=Path, help="that directory, and leave checkpoints and exports there")
    parser.add_argument("--sample-mb", type=int, default=1024, help="what the disk's speed is measured with")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    asked = parser.parse_args(arguments)
    names = asked.shapes.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no such shape: {', '.join(unknown)}; there are {', '.join(CASES)}")
    console = Console(width=160, highlight=False)
    if asked.keep:
        asked.keep.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="ckptrain-bench-", dir=asked.keep or asked.directory))
    try:
        speed = speeds(work, asked.sample_mb << 20)
        measured = []
        for number, case in enumerate(case for name in names for case in CASES[name]):
            measured.append(measure(case, work / str(number), speed))
            console.print(f"measured {case.label}")
            if not asked.keep:
                shutil.rmtree(work / str(number))
        report = {
            "machine": in_fresh_process(facts, work),
            "speed": speed,
            "cases": measured,
            "goals": list(goals(measured)),
        }
    finally:
        if asked.keep:
            console.print(f"kept in {work}")
        else:
            shutil.rmtree(work)
    show(report, console)
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if any(case["bridge"].get("differences") for case in measured) else 0


if __name__ == "__main__":
    sys.exit(main())
