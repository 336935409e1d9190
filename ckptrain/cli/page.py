"""A page of text: labels on the left, facts on the right, on a terminal and in a pipe alike."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_COLUMNS = 120
LABEL_COLUMNS = 11
_DECODER = "decoder."
"""How the names of adapter weights begin."""

Row = tuple[str, str | Text]


def open_console() -> Console:
    """Return a console on what stdout is now; in a pipe lines are as wide as COLUMNS says, else 120.

    Highlighting is off: colours are to mean something.
    """
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_COLUMNS
    return Console(highlight=False, width=width)


def facts(rows: Iterable[Row], style: str = "bold", label_columns: int | None = None) -> Table:
    """Lay out (label, text) rows; a row without a label goes on with the one above.

    Text is never read as markup: a path may hold brackets.
    """
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=label_columns)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(Text(label, style=style), text if isinstance(text, Text) else Text(text))
    return grid


def table(titles: Sequence[str], lines: Iterable[Sequence[str | Text]], right: Collection[str] = ()) -> Table:
    """Lay out lines of cells under their titles; the first column never folds, nor do those flush right, of numbers."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for title in titles:
        justify: Literal["left", "right"] = "right" if title in right else "left"
        grid.add_column(title, justify=justify, no_wrap=title in (titles[0], *right), overflow="fold")
    for line in lines:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in line))
    return grid


def shape_text(shape: Sequence[int]) -> str:
    """Write the shape of a tensor: 4 x 32 x 8."""
    return " x ".join(map(str, shape))


def by_kind(tensors: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[str, Mapping[str, Any]]]]:
    """Sort tensors, each with its name and group, by kind, and give each a shorter name within it.

    What is kept for every adapter weight, such as optimizer.state.exp_avg, stands before the weight's own name, and is
    a kind; other tensors are of the kind of their group.
    """
    kinds: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for tensor in tensors:
        before, found, rest = tensor["name"].partition(_DECODER)
        kind = before.rstrip(".") if found else ""
        kinds.setdefault(kind or tensor["group"], []).append((found + rest if found else tensor["name"], tensor))
    return kinds


def start_rows(start: Mapping[str, Any]) -> list[Row]:
    """Return the rows that tell a start plan, as its `to_dict` has it.

    What it is and why, what it takes from where, and what to know about it, such as what differs from the last start.
    """
    text = Text.assemble((str(start["plan"]), "bold cyan"), f": {start['reason']}")
    rows: list[Row] = [("start", text), ("takes", _takes(start))]
    notes, label = start["notes"], "note"
    if start["plan"] == "Resume":
        notes, label = notes or ["nothing that the numbers depend on"], "differs"
    return rows + [(label if not number else "", note) for number, note in enumerate(notes)]


def _takes(start: Mapping[str, Any]) -> str:
    """Say what a start takes, and from where."""
    match start["plan"]:
        case "Resume":
            parts = {"optimizer": start["restore_optimizer"], "random states": start["restore_rng"]}
            taken = ["adapters", *(name for name, is_taken in parts.items() if is_taken), "data position", "step"]
            anew = [name for name, is_taken in parts.items() if not is_taken]
            left = f"; {' and '.join(anew)} anew" if anew else ""
            return f"{', '.join(taken)} from {Path(start['checkpoint']).name}{left}"
        case "WarmStart":
            return f"the adapter from {start['adapter']}; optimizer and data position anew, from step 1"
        case "AlreadyDone":
            return "nothing: no step is left"
        case _:
            return "the base model alone; new adapters, new optimizer, from step 1"


def problem_rows(summary: str, problems: Iterable[str]) -> list[Row]:
    """Return the rows that tell why something is refused."""
    return [("refused", Text(summary, style="yellow")), *(("", f"- {problem}") for problem in problems)]


def is_screen(console: Console) -> bool:
    """Tell whether lines on a console can be drawn again: not in a file or a pipe, in CI, or on a dumb terminal.

    FORCE_COLOR and the like colour a pipe, and do not make it a screen.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        return False
    # A stream in memory is what whoever made it says.
    return isinstance(console.file, io.StringIO) or (console.file.isatty() and not os.environ.get("CI"))


def tell(console: Console, *rows: Row) -> None:
    """Print rows: wrapped under their labels on a screen, a line each elsewhere, where lines are searched."""
    if is_screen(console):
        console.print(facts(rows, label_columns=LABEL_COLUMNS))
        return
    for label, text in rows:
        one_line = Text(" ").join((text if isinstance(text, Text) else Text(text)).split("\n"))
        console.print(Text.assemble((f"{label:<{LABEL_COLUMNS}}  ", "bold"), one_line), soft_wrap=True)
