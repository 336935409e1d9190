"""What do the fields of a class mean? Names, types, defaults and the docstrings below them, from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Field:
    """A field of an attrs class."""

    name: str
    type: str
    meaning: str
    """The string below it in the source; empty where there is none."""


def fields_of(cls: type[Any]) -> list[Field]:
    """Return the fields of a class in their order."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    meanings = dict(_docstrings(definition))
    return [
        Field(name=field.name, type=_type_text(field.type), meaning=meanings.get(field.name, ""))
        for field in attrs.fields(cls)
    ]


def _docstrings(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            yield statement.target.id, " ".join(str(following.value.value).split())


def _type_text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def cell(text: str) -> str:
    """Return text as a cell of a Markdown table holds it: on one line, its stars and bars as they are."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(part if number % 2 else part.replace("*", "\\*") for number, part in enumerate(parts))


def code(text: str) -> str:
    """Return text as code in a cell of a Markdown table."""
    return f"`{' '.join(text.split())}`" if text else ""


def either_text(words: list[str]) -> str:
    """Return words as a choice: a, b or c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [" | ".join(head), "|".join(["---"] * len(head)), *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" if number != 1 else f"|{line}|\n" for number, line in enumerate(lines))
