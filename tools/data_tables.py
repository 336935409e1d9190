"""What bench_data.py has found, in tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_contestants import CONSUMED_PER_S
from rich.console import Console
from rich.table import Table

MB = 1e6


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the tables and the goals."""
    rows, machine = report["contestants"], report["machine"]
    lengths = report["lengths"]
    console.print(
        f"\n{machine['processor']}, {machine['cores']} cores, load {machine['load_average']:.1f};"
        f" {report['rows']:,} conversations of {lengths['mean']:,.0f} tokens (median {lengths['median']:,.0f},"
        f" longest {lengths['longest']:,}), rows of {report['sequence_length']:,}; the tokenizer alone makes"
        f" {report['encoded_per_s']:,.0f} tokens/s on one core"
    )
    base = next(row for row in rows if not row["is_ours"])
    table = Table(
        title="seconds to the first batch after the imports, and after the start of the process; MB of memory, on disk",
        title_justify="left",
    )
    headings = (
        "",
        "rows/s",
        "x",
        "tokens/s",
        "expected",
        "CPU s",
        "pack",
        "cold",
        "- process",
        "MB",
        "private",
        "disk",
    )
    for heading in (*headings, "warm", "- process", "MB", "private"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        cold, warm = row["cold"], row["warm"]
        table.add_row(
            row["contestant"],
            f"{row['rows_per_s']:,.0f}",
            f"{row['rows_per_s'] / base['rows_per_s']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['expected_tokens_per_s']:,.0f}",
            f"{cold['cpu_s']:.1f}",
            f"{cold['pack_s']:.2f}",
            *(f"{cold[key]:.1f}" for key in ("first_batch_s", "process_s")),
            *(f"{cold[key] / MB:,.0f}" for key in ("total_bytes", "private_bytes", "disk_bytes")),
            *(f"{warm[key]:.1f}" for key in ("first_batch_s", "process_s")),
            *(f"{warm[key] / MB:,.0f}" for key in ("total_bytes", "private_bytes")),
        )
    console.print(table)
    table = Table(title=f"batches; a loop that takes {CONSUMED_PER_S:,} tokens/s", title_justify="left")
    for heading in ("", "rows", "padding", "laid out tokens/s", "x", "waits", "- nothing ahead"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(
            row["contestant"],
            f"{row['rows']:,}",
            f"{1 - row['fill']:.2%}",
            f"{row['laid_out_per_s']:,.0f}",
            f"{row['laid_out_per_s'] / base['laid_out_per_s']:.1f}",
            *(f"{row['waiting'][ahead]:.2%}" for ahead in (2, 0)),
        )
    console.print(table)
    table = Table(title="packing alone, samples cut to a row's length", title_justify="left")
    for heading in ("tokens", "samples", "ckptrain: rows", "padding", "seconds", "TRL: rows", "padding", "seconds"):
        table.add_column(heading, justify="right")
    for case in report["packing"]:
        numbers = [(own["rows"], 1 - own["fill"], own["seconds"]) for own in (case["ours"], case["theirs"])]
        cells = [cell for count, padding, took in numbers for cell in (f"{count:,}", f"{padding:.2%}", f"{took:.2f}")]
        table.add_row(f"{case['sequence_length']:,}", f"{case['samples']:,}", *cells)
    console.print(table)
    if (million := report["million"]) is not None:
        _show_million(million, console)
    for goal in report["goals"]:
        console.print(f"[bold]{'met' if goal['met'] else 'NOT met'}[/]: {goal['goal']} ({goal['found']})")


def _show_million(million: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"ckptrain on rows of {million['tokens_per_record']} tokens; seconds, MB", title_justify="left")
    for heading in ("", "conversations", "tokenise", "hash", "pack", "first batch", "- process", "MB", "private"):
        table.add_column(heading, justify="right" if heading else "left")
    runs = (("first run", "first_run_tenth"), ("first run", "first_run_million"), ("second run", "second_run"))
    for label, key in runs:
        run = million[key]
        memory = run["memory"] or {"total_bytes": 0, "private_bytes": 0}
        seconds = (run["tokenise_s"], run["parts_s"]["hash"], run["pack_s"], run["first_batch_s"], run["process_s"])
        table.add_row(
            label,
            f"{run['records']:,}",
            *(f"{value:,.1f}" for value in seconds),
            *(f"{memory[name] / MB:,.0f}" for name in ("total_bytes", "private_bytes")),
        )
    console.print(table)
