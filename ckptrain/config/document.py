"""How does a file become a mapping? YAML and JSON, strictly, with the line of every key.

The YAML loader is PyYAML's safe one, so a config runs no code. Two things it lets pass are refused here: a key given
twice (it keeps the last, silently) and a mapping that contains itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import yaml

from ckptrain.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".json")


@attrs.frozen(kw_only=True)
class Document:
    """A parsed file: its values, the line (from 1) of each dotted key, and what is wrong with it so far."""

    values: dict[str, Any]
    lines: dict[str, int]
    problems: tuple[str, ...]


class _StrictLoader(yaml.SafeLoader):
    """Builds mappings depth first, so that PyYAML itself refuses one that contains itself."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ARG002 - PyYAML's
        return super().construct_object(node, deep=True)


def read_document(path: Path) -> Document:
    """Read a `.yaml`, `.yml` or `.json` file whose top level is a mapping.

    Raises:
        ConfigError: the file is missing, unreadable, empty, not a mapping or broken; the message has the line.
    """
    text = _read_text(path)
    try:
        values, node = _parse_json(text) if path.suffix == ".json" else _parse_yaml(text)
    except json.JSONDecodeError as error:
        raise _unusable(path, f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from error
    except yaml.YAMLError as error:
        raise _unusable(path, _yaml_problem(error)) from error
    except (RecursionError, ValueError) as error:
        raise _unusable(path, f"cannot be parsed: {error}") from error
    if values is None:
        raise _unusable(path, "the file is empty: expected sections such as `model:` and `data:`")
    if not isinstance(values, dict):
        raise _unusable(
            path, f"expected a mapping of sections (`model:`, `data:`, ...) at the top, found {kind(values)}"
        )
    lines, problems = _lines(node)
    return Document(values=values, lines=lines, problems=tuple(problems))


def parse_value(text: str) -> Any:
    """Read the right-hand side of `key=value` as YAML.

    Raises:
        ValueError: it is not YAML, or gives a key twice.
    """
    try:
        value, node = _parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from error
    if problems := _lines(node)[1]:
        raise ValueError("; ".join(problems))
    return value


def kind(value: Any) -> str:
    """Name a parsed value for a message: `a list`, `a mapping`, `null`, or the value itself."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _read_text(path: Path) -> str:
    if path.suffix not in SUFFIXES:
        raise _unusable(path, f"a config file ends in {', '.join(SUFFIXES)}; found {path.suffix or 'no suffix'!r}")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise _unusable(path, "there is no such file") from error
    except IsADirectoryError as error:
        raise _unusable(path, "it is a directory") from error
    except UnicodeDecodeError as error:
        raise _unusable(path, f"not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror}") from error


def _parse_json(text: str) -> tuple[Any, yaml.Node | None]:
    if not text.strip():
        return None, None
    values = json.loads(text, parse_constant=_refuse_constant)
    # The standard parser knows no lines. JSON is YAML once its tabs, legal between tokens only, are spaces.
    return values, yaml.compose(text.replace("\t", " "), Loader=_StrictLoader)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parse_yaml(text: str) -> tuple[Any, yaml.Node | None]:
    loader = _StrictLoader(text)
    try:
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    finally:
        loader.dispose()


def _lines(node: yaml.Node | None) -> tuple[dict[str, int], list[str]]:
    """Return the line of each dotted key, and a problem for each key given twice."""
    lines: dict[str, int] = {}
    problems = []
    for key, line in _keys(node, ""):
        if key in lines:
            problems.append(f"line {line}: {key} is given twice (first in line {lines[key]}): keep one of them")
        lines.setdefault(key, line)
    return lines, problems


def _keys(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    """Walk the keys of nested mappings as (dotted key, line); a merge (`<<`) may be written more than once."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _keys(item, f"{prefix}{index}.")
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":merge"):
            continue
        key = f"{prefix}{key_node.value}"
        yield key, key_node.start_mark.line + 1
        yield from _keys(value_node, f"{key}.")


def _yaml_problem(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"not YAML: {' '.join(str(error).split())}"
    mark = error.problem_mark
    context = f" ({error.context})" if error.context else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: not YAML: {error.problem}{context}"


def _unusable(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"cannot use the configuration {path}", [problem])
