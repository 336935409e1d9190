"""What bench_gpu.py has found, in tables, and what was to be reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from gpu_shapes import SHAPES
from rich.console import Console
from rich.table import Table

GIB = float(1 << 30)
Report = Mapping[str, Any]
Row = Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Goal:
    """How much faster one contestant is to be than another, each with the micro-batch that suits it best."""

    model: str
    contestant: str
    rival: str
    ratio: float


GOALS = (
    Goal(model="1b", contestant="ckptrain", rival="unsloth", ratio=1.2),
    Goal(model="8b", contestant="ckptrain", rival="unsloth", ratio=1.08),
    Goal(model="8b", contestant="ckptrain-fp8", rival="unsloth", ratio=1.4),
    Goal(model="1b", contestant="ckptrain", rival="megatron", ratio=1.0),
    Goal(model="8b", contestant="ckptrain", rival="megatron", ratio=1.0),
    Goal(model="1b", contestant="ckptrain", rival="bridge", ratio=1.0),
)
BASELINE = "unsloth"
_LAST_LINES = 12
"""Of what a process said before it failed; the file has more."""


def newest(report: Report) -> list[Row]:
    """Return the last row of each contestant, model and micro-batch, in the order in which they first came.

    An error is left out where the same was measured in any visit, and where its contestant came again in a later one.
    """
    latest: dict[tuple[Any, ...], int] = {}
    kept: dict[tuple[Any, ...], Row] = {}
    for row in report["rows"]:
        who = (row["model"], row["contestant"])
        latest[who] = max(latest.get(who, 0), row["visit"])
        key = (*who, row.get("micro_batch"), "save_every" in row)
        if key not in kept or "error" not in row or "error" in kept[key]:
            kept[key] = row
    return [row for (*who, _, _), row in kept.items() if "error" not in row or row["visit"] == latest[(who[0], who[1])]]


def measured(rows: Sequence[Row], model: str, visit: int | None = None) -> dict[str, dict[int, Row]]:
    """Return the rows with a throughput, by contestant and micro-batch; of all visits, or of one."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["model"] == model and "tokens_per_s" in row and visit in (None, row["visit"]):
            found.setdefault(row["contestant"], {})[row["micro_batch"]] = row
    return found


def best(found: Mapping[int, Row]) -> Row:
    """Return the row with the highest throughput."""
    return max(found.values(), key=lambda row: row["tokens_per_s"])


def tflops(row: Row) -> float | None:
    """Return TFLOP/s of a row; None where sequences are packed, so that a token's attention is not known."""
    shape = SHAPES[row["model"]]
    return None if shape.trains_on_chats else row["tokens_per_s"] * shape.flops_per_token() / 1e12


def beside(rows: Sequence[Row], model: str, contestants: Sequence[str]) -> dict[str, dict[int, Row]]:
    """Return what was measured in the last visit that has all of these contestants, as machines differ by some percent.

    Where none has, what was measured at all.
    """
    visits = sorted({row["visit"] for row in rows}, reverse=True)
    of_each = (measured(rows, model, visit) for visit in visits)
    both = next((found for found in of_each if all(name in found for name in contestants)), None)
    return measured(rows, model) if both is None else both


def goals(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield what was to be reached, whether it was (None: not measured side by side), and the numbers."""
    for goal in GOALS:
        found = beside(rows, goal.model, (goal.contestant, goal.rival))
        text = f"{goal.model}: {goal.contestant} at least {goal.ratio:g} times {goal.rival}"
        missing = [name for name in (goal.contestant, goal.rival) if name not in found]
        if missing:
            yield {"goal": text, "met": None, "found": f"not measured: {', '.join(missing)}"}
            continue
        fastest = [best(found[name]) for name in (goal.contestant, goal.rival)]
        own, other = (row["tokens_per_s"] for row in fastest)
        numbers = f"{own / other:.3f}: {own:,.0f} and {other:,.0f} tokens/s"
        if len({row["visit"] for row in fastest}) > 1:
            numbers += ", not in one visit"
        yield {"goal": text, "met": own >= goal.ratio * other, "found": numbers}


def show(report: Report, console: Console) -> None:
    """Print everything."""
    rows = newest(report)
    for number, visit in enumerate(report["visits"]):
        rate = f"a bfloat16 matrix product at {visit['matrix_tflops']:,.0f} TFLOP/s" if "matrix_tflops" in visit else ""
        console.print(f"visit {number}: {visit['started']}, {visit.get('device', 'unknown')}; {rate}")
    for model in dict.fromkeys(row["model"] for row in rows):
        if found := measured(rows, model):
            _show_model(report, model, found, console)
            _show_memory(model, found, console)
    for row in rows:
        if "error" in row:
            where = f" at micro-batch {row['micro_batch']}" if row.get("micro_batch") else ""
            message = "\n".join(str(row.get("message", "")).strip().splitlines()[-_LAST_LINES:])
            console.print(f"[bold]{row['model']} {row['contestant']}[/]{where}: {row['error']}", highlight=False)
            if message and row["error"] != "out of memory":
                console.print(message, markup=False, highlight=False)
        elif "save_every" in row:
            with_, without = row["tokens_per_s_with"], row["tokens_per_s_without"]
            console.print(
                f"[bold]{row['model']} {row['contestant']}[/]: {with_:,.0f} tokens/s with a save every"
                f" {row['save_every']} steps, {without:,.0f} without ({with_ / without:.3f})"
            )
    for goal in goals(report["rows"]):
        word = {True: "met", False: "MISSED", None: "open"}[goal["met"]]
        console.print(f"[bold]{word}[/]: {goal['goal']} ({goal['found']})", highlight=False)


def _show_model(report: Report, model: str, found: Mapping[str, Mapping[int, Row]], console: Console) -> None:
    """Print tokens/s of each contestant and micro-batch, and what the best of them is of the matrix rate."""
    micro_batches = sorted({number for of_one in found.values() for number in of_one})
    shape = SHAPES[model]
    table = Table(
        title=f"{shape.label} shape, sequences of {shape.sequence_length}: tokens/s (peak GiB) at micro-batch",
        title_justify="left",
    )
    table.add_column("")
    headings = ("best", "visit", "TFLOP/s", "of matrix rate", "reserved GiB", f"x {BASELINE}")
    for heading in (*map(str, micro_batches), *headings):
        table.add_column(heading, justify="right")
    for contestant, of_one in found.items():
        top = best(of_one)
        rate, achieved = report["visits"][top["visit"]].get("matrix_tflops"), tflops(top)
        table.add_row(
            contestant,
            *(_cell(of_one.get(number)) for number in micro_batches),
            f"[bold]{top['tokens_per_s']:,.0f}[/]",
            str(top["visit"]),
            f"{achieved:,.0f}" if achieved is not None else "",
            f"{achieved / rate:.1%}" if achieved is not None and rate else "",
            _gib(top.get("reserved_bytes")),
            _against_baseline(report["rows"], model, contestant),
        )
    console.print(table)


def _against_baseline(rows: Sequence[Row], model: str, contestant: str) -> str:
    """Return how many times the baseline's throughput a contestant has, each at its best, where one visit has both."""
    found = beside(rows, model, (contestant, BASELINE))
    if not (contestant in found and BASELINE in found):
        return ""
    own, other = best(found[contestant]), best(found[BASELINE])
    return f"{own['tokens_per_s'] / other['tokens_per_s']:.3f}" if own["visit"] == other["visit"] else ""


def _show_memory(model: str, found: Mapping[str, Mapping[int, Row]], console: Console) -> None:
    """Print the memory of ckptrain's contestants as a share of the others', at equal micro-batch."""
    for own in (name for name in found if name.startswith("ckptrain")):
        for rival in (name for name in found if not name.startswith("ckptrain")):
            shares = [
                f"{number}: {found[own][number]['peak_bytes'] / found[rival][number]['peak_bytes']:.2f}"
                for number in sorted(found[own].keys() & found[rival].keys())
                if found[own][number].get("peak_bytes") and found[rival][number].get("peak_bytes")
            ]
            if shares:
                console.print(f"{model}: peak memory of {own} / {rival} at micro-batch {', '.join(shares)}")


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    peak = _gib(row.get("peak_bytes"))
    return f"{row['tokens_per_s']:,.0f}" + (f" ({peak})" if peak else "")


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:.1f}"
