"""uv run python tools/bench_checkpoint.py --json OUT

What a checkpoint costs: ckptrain beside megatron-core's `dist_checkpointing`, Hugging Face's PEFT + AdamW, and a plain
write and SHA-256 of the same bytes, which is the yardstick.

The state is that of a LoRA run (float32 weights and Adam's two moments), 1 MB, 130 MB and 1.5 GB, over 1, 2 and 4 ranks
that share it by tensor parallelism. All contestants live in the same ranks and take turns; each save has a directory of
its own, is restored from a cold page cache, and is removed. The slowest rank counts, medians are shown, and the first
save is told apart. What the first restore of each brings back is compared with what was saved.

What to expect, before measuring, for B bytes in all on ranks with a core each, memory that copies m bytes a second, a
disk that writes w and reads r, and SHA-256 at h:

- stall in the background: B / m. One copy in host memory is all that the training has to wait for.
- commit: B / w + B / r + 2 B / h, since all is hashed as it is written, read back and hashed again; torch.save's CRC-32
  and some ten milliseconds for syncs and collectives come on top. The yardstick is B / w + B / h, so twice that is kept
  where the disk reads as fast as it writes, and is not where B is so small that the syncs are what counts.
- megatron-core: B / w and its planning, which all is stall. The first save also starts a process that imports torch.
- Hugging Face: a copy into the page cache. Nothing is synced, so nothing of it is there after a power failure.
- growth: in proportion to bytes; falling with ranks while each has a core and the disk keeps up; with tensors some
  tenths of a millisecond for each stored one, of which ckptrain has a constant number: layers are stacked.

`predicted_s` in the JSON has these bounds, from the parts of the yardstick that were measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoint_rounds import BYTES_PER_PARAMETER, FEATURES, TENSORS_PER_LAYER, Case, measure
from rich.console import Console
from rich.table import Table

from ckptrain.cli.quiet import quiet_libraries
from ckptrain.training.start import versions

OURS, OURS_WAITED_FOR = "ckptrain, in the background", "ckptrain, synchronous"
OURS_UNSTACKED = "ckptrain, each tensor by itself"
MEGATRON, RAW = "megatron-core", "plain write + SHA-256"
MB = 1e6
LARGE_MB, LARGE_REPEATS = 1000, 2
MOST_STALL, MOST_COMMIT = 0.1, 2.0
"""Shares of megatron-core's save, and of the yardstick."""


def case_of(size_mb: float, ranks: int, repeats: int) -> Case:
    """Return a run whose state has about so many bytes: a wider LoRA on one of two models."""
    num_layers, hidden_size = (36, 1024) if size_mb > 8 else (4, 128)
    one_dim = BYTES_PER_PARAMETER * num_layers * FEATURES * hidden_size
    return Case(
        num_layers=num_layers,
        hidden_size=hidden_size,
        dim=max(1, round(size_mb * MB / one_dim / 4)) * 4,  # each of four ranks has a part
        ranks=ranks,
        repeats=_repeats(size_mb, repeats),
    )


def case_of_tensors(num_tensors: int, size_mb: float, repeats: int) -> Case:
    """Return a run on one rank with so many tensors, of about so many bytes in all: the deeper, the narrower."""
    num_layers = max(1, round(num_tensors / TENSORS_PER_LAYER))
    hidden_size = max(1, round(64 / num_layers**0.5)) * 64
    one_dim = BYTES_PER_PARAMETER * num_layers * FEATURES * hidden_size
    return Case(
        num_layers=num_layers,
        hidden_size=hidden_size,
        dim=max(1, round(size_mb * MB / one_dim)),
        ranks=1,
        repeats=_repeats(size_mb, repeats),
        with_unstacked=True,
    )


def _repeats(size_mb: float, asked: int) -> int:
    return min(asked, LARGE_REPEATS) if size_mb >= LARGE_MB else asked


def of(case: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the numbers of one contestant."""
    found: dict[str, Any] = next(part for part in case["contestants"] if part["name"] == name)
    return found


def predicted(case: Mapping[str, Any], copied_per_s: float) -> dict[str, float]:
    """Return the bounds of ckptrain's times that follow from the yardstick's parts and the speed of memory."""
    parts = of(case, RAW)["median_parts"]
    return {
        "stall_s": case["num_bytes"] / case["ranks"] / copied_per_s,
        "commit_s": parts["write_s"] + parts["read_s"] + 2 * parts["hash_s"],
        "restore_s": 2 * parts["read_s"] + parts["hash_s"],
    }


def goals(cases: Sequence[Mapping[str, Any]], by_tensors: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what was to be reached, in words, whether it was, and the numbers."""
    medians = [(case, {part["name"]: part["median"] for part in case["contestants"]}) for case in cases]
    stalls = {_label(case): times[OURS]["stall_s"] / times[MEGATRON]["stall_s"] for case, times in medians}
    yield _goal(f"stall below {MOST_STALL:g} of megatron-core's save", stalls, MOST_STALL)
    commits = {_label(case): times[OURS]["commit_s"] / times[RAW]["commit_s"] for case, times in medians}
    yield _goal(f"commit within {MOST_COMMIT:g} times a plain write + SHA-256", commits, MOST_COMMIT)
    commit_of = {(case["num_bytes"], case["ranks"]): times[OURS]["commit_s"] for case, times in medians}
    sizes, ranks = sorted({size for size, _ in commit_of}), sorted({count for _, count in commit_of})
    for words, ends in (
        ("ranks", [(size, count) for size in sizes for count in (ranks[0], ranks[-1])]),
        ("bytes", [(size, count) for count in ranks for size in sizes]),
    ):
        yield from _growth(words, ends, commit_of)
    for name in (OURS, OURS_UNSTACKED):
        times = {case["num_tensors"]: of(case, name)["median"]["commit_s"] for case in by_tensors}
        growth = {
            f"{more:,} tensors against {fewer:,}": (times[more] / times[fewer]) / (more / fewer)
            for fewer, more in itertools.pairwise(sorted(times))
        }
        yield _goal(f"commit in proportion to tensors or better ({name})", growth, 1.0)


def _growth(
    words: str, ends: Sequence[tuple[int, int]], commit_of: Mapping[tuple[int, int], float]
) -> Iterator[dict[str, Any]]:
    """Yield how commits grow along one axis, the other being held, relative to a growth in proportion."""
    axis = 1 if words == "ranks" else 0
    growth = {}
    for fewer, more in itertools.pairwise(ends):
        if fewer[1 - axis] == more[1 - axis] and fewer[axis] < more[axis]:
            shown = f"{more[0] / MB:,.0f} MB on {more[1]} against {fewer[0] / MB:,.0f} MB on {fewer[1]}"
            growth[shown] = (commit_of[more] / commit_of[fewer]) / (more[axis] / fewer[axis])
    yield _goal(f"commit in proportion to {words} or better", growth, 1.0)


def _goal(words: str, found: Mapping[str, float], most: float) -> dict[str, Any]:
    met = all(value <= most for value in found.values()) if found else None
    return {"goal": words, "met": met, "most": most, "found": dict(found)}


def _label(case: Mapping[str, Any]) -> str:
    return f"{case['num_bytes'] / MB:,.0f} MB on {case['ranks']}"


def machine(directory: Path) -> dict[str, Any]:
    """Return what the numbers depend on besides the programs."""
    import torch

    source, target = torch.ones(64 << 20, dtype=torch.uint8), torch.zeros(64 << 20, dtype=torch.uint8)
    copies = []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - started)
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "copied_bytes_per_s": len(source) / min(copies),
        "disk": _disk(directory),
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
        "versions": versions(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _disk(directory: Path) -> str:
    """Return the device and the file system that a directory is on, as Linux tells it."""
    number = directory.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return "unknown"
    for fields in mounts:
        if fields[2] == device:  # proc(5): after the dash come file system and source
            kind, source = fields[fields.index("-") + 1 : fields.index("-") + 3]
            return f"{source} ({kind})"
    return "unknown"


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the tables and a line on each goal."""
    facts = report["machine"]
    console.print(
        f"\n{facts['processor']}, {facts['cores']} cores, load {facts['load_average']:.1f}; {facts['disk']};"
        f" torch {facts['versions']['torch']}, megatron-core {facts['versions']['megatron-core']}"
    )
    for case in (*report["cases"], *report["by_tensors"]):
        _show_case(case, console)
    console.print()
    for goal in report["goals"]:
        numbers = "; ".join(f"{where}: {value:.3g}" for where, value in goal["found"].items())
        word = {True: "met", False: "NOT met", None: "not measured"}[goal["met"]]
        console.print(f"[bold]{word}[/]: {goal['goal']}{' (' + numbers + ')' if numbers else ''}")


def _show_case(case: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"{_heading(case)}; medians of {case['repeats']}", title_justify="left")
    for heading in ("", "stall, first", "stall", "commit", "x yardstick", "restore", "MB", "restored"):
        table.add_column(heading, justify="right" if heading else "left")
    yardstick = of(case, RAW)["median"]["commit_s"]
    for part in case["contestants"]:
        median = part["median"]
        table.add_row(
            part["name"],
            _seconds(part["first"]["stall_s"]),
            _seconds(median["stall_s"]),
            _seconds(median["commit_s"]),
            f"{median['commit_s'] / yardstick:.2f}",
            _seconds(median["restore_s"]),
            f"{part['num_bytes'] / MB:,.1f}",
            "" if part["num_equal"] is None else f"{part['num_equal']} of {part['num_tensors']}",
        )
    console.print(table)
    bounds = ", ".join(f"{name.removesuffix('_s')} {_seconds(value)}" for name, value in case["predicted_s"].items())
    console.print(f"expected of {OURS}, from the parts of the yardstick: {bounds}")
    for part in case["interference"]:
        console.print(
            f"a step while {part['name']} saves: {_seconds(part['step_while_saving_s'])} instead of"
            f" {_seconds(part['step_s'])}; one save costs the training {_seconds(part['lost_per_save_s'])} in all"
        )


def _heading(case: Mapping[str, Any]) -> str:
    ranks = f"{case['ranks']} ranks" if case["ranks"] > 1 else "1 rank"
    return f"{case['num_bytes'] / MB:,.1f} MB in {case['num_tensors']:,} tensors on {ranks}"


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print everything, and return the exit status: 1 where something did not come back as it was saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=_list_of(float), default=[1, 130, 1500], help="MB of state, as 1,130,1500")
    parser.add_argument("--ranks", type=_list_of(int), default=[1, 2, 4], help="as 1,2,4; divisors of 4")
    parser.add_argument(
        "--tensors", type=_list_of(int), default=[24, 240, 2400], help="at equal bytes, those of the middle size"
    )
    parser.add_argument("--repeats", type=int, default=3, help=f"after the first; at most {LARGE_REPEATS} from 1 GB on")
    parser.add_argument("--directory", type=Path, help="on the disk to be measured; that for temporary files otherwise")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    asked = parser.parse_args(arguments)
    quiet_libraries()
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    begun = time.monotonic()
    sizes = sorted(asked.sizes)
    cases = [case_of(size, ranks, asked.repeats) for size in sizes for ranks in sorted(asked.ranks)]
    by_tensors = [case_of_tensors(number, sizes[len(sizes) // 2], asked.repeats) for number in sorted(asked.tensors)]
    with tempfile.TemporaryDirectory(prefix="ckptrain-bench-", dir=asked.directory) as made:
        facts = machine(Path(made))
        console = Console(width=130, highlight=False)
        measured = []
        for number, case in enumerate([*cases, *by_tensors]):
            result = measure(case, Path(made) / str(number))
            measured.append({**result, "predicted_s": predicted(result, facts["copied_bytes_per_s"])})
            console.print(f"measured {_heading(result)}")
    report = {
        "machine": facts,
        "seconds": time.monotonic() - begun,
        "cases": measured[: len(cases)],
        "by_tensors": measured[len(cases) :],
        "goals": list(goals(measured[: len(cases)], measured[len(cases) :])),
    }
    show(report, console)
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(_came_back(part) for case in measured for part in case["contestants"]) else 1


def _came_back(part: Mapping[str, Any]) -> bool:
    return part["num_equal"] in (None, part["num_tensors"])


def _list_of(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(main())
