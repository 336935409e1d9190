"""`ckptrain explain`: every key that a config may have."""

from __future__ import annotations

import functools

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckptrain.cli.outcome import Answer
from ckptrain.config.explain import explain
from ckptrain.config.values import suggestion

_ROW_FIELDS = ("key", "type", "default", "meaning")


def explain_answer(wanted: str | None) -> Answer:
    """Return the rows of one section or key, or of all.

    Raises:
        click.BadParameter: there is no such section.
    """
    rows = [dict(zip(_ROW_FIELDS, row, strict=True)) for row in explain()]
    if wanted is not None:
        sections = list(dict.fromkeys(row["key"].partition(".")[0] for row in rows))
        rows = [row for row in rows if row["key"] == wanted or row["key"].startswith(f"{wanted}.")]
        if not rows:
            raise click.BadParameter(
                f"there is no section {wanted!r}{suggestion(wanted, sections)}; there are {', '.join(sections)}",
                param_hint="SECTION",
            )
    return Answer(report={"keys": rows}, show=functools.partial(_show, rows))


def _show(rows: list[dict[str, str]], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name, style in zip(_ROW_FIELDS, ("cyan", "", "", ""), strict=True):
        table.add_column(name, style=style, overflow="fold", no_wrap=name == "key")
    for row in rows:
        table.add_row(*(Text(row[name]) for name in _ROW_FIELDS))
    console.print(table)
