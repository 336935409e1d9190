"""A page of text: labels on the left, facts on the right, on a terminal and in a pipe alike."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_COLUMNS = 120

Row = tuple[str, str | Text]


def open_console() -> Console:
    """Return a console on what stdout is now; in a pipe lines are as wide as COLUMNS says, else 120.

    Highlighting is off: colours are to mean something.
    """
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_COLUMNS
    return Console(highlight=False, width=width)


def facts(rows: Iterable[Row], style: str = "bold") -> Table:
    """Lay out (label, text) rows; a row without a label goes on with the one above.

    Text is never read as markup: a path may hold brackets.
    """
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(Text(label, style=style), text if isinstance(text, Text) else Text(text))
    return grid


def start_rows(start: Mapping[str, Any]) -> list[Row]:
    """Return the rows that tell a start plan (as its `to_dict` has it): what it is, why, and what to know about it."""
    text = Text.assemble((str(start["plan"]), "bold cyan"), f": {start['reason']}")
    return [("start", text), *(("note" if not number else "", note) for number, note in enumerate(start["notes"]))]


def problem_rows(summary: str, problems: Iterable[str]) -> list[Row]:
    """Return the rows that tell why something is refused."""
    return [("refused", Text(summary, style="yellow")), *(("", f"- {problem}") for problem in problems)]
