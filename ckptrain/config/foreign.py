"""What does another trainer's config file say? Plain values, with what it inherits and refers to filled in.

Nothing in it is run or built: `_target_` is text here. What is taken is remembered, so that the rest can be told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ckptrain.errors import ConfigError

_LARGEST_BYTES = 4_000_000
_DEEPEST = 8
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
# YAML 1.1, and so PyYAML, takes 1e-5 for text; those who wrote it, and their readers of YAML, do not.
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_DEFAULTS = "defaults"
_ABSENT: tuple[Any, ...] = (None, "", [], {})


class Foreign:
    """A config of others, by dotted key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._taken: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """Return a value, and count it as taken; what is not there, null, or the word None is `default`."""
        self._taken.add(key)
        value = self.look(key)
        return default if value is None else value

    def look(self, key: str) -> Any:
        """Return a value without taking it; None where there is none."""
        value: Any = self._values
        for name in key.split("."):
            if not isinstance(value, Mapping) or name not in value:
                return None
            value = value[name]
        return None if value == "None" else value

    def rest(self) -> dict[str, Any]:
        """Return what says something and has not been taken, by dotted key."""
        return {
            key: value
            for key, value in _leaves(self._values, "")
            if value not in _ABSENT and not any(key == taken or key.startswith(f"{taken}.") for taken in self._taken)
        }


def read_foreign(path: Path) -> Foreign:
    """Read a file, the files that it names under `defaults`, and what it refers to by ${...}.

    Raises:
        ConfigError: it cannot be read, or is no mapping of plain values.
    """
    values = _inherited(path, depth=0)
    return Foreign(_resolved(values, values))


def _inherited(path: Path, depth: int) -> dict[str, Any]:
    """Return the values of a file over those of the files that it builds on, as NeMo-RL merges them."""
    values = _parsed(path)
    parents = values.pop(_DEFAULTS, None)
    if parents is None:
        return values
    if depth == _DEEPEST:
        raise _unreadable(path, f"its `{_DEFAULTS}` go deeper than {_DEEPEST} files")
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        if not isinstance(parent, str) or not (path.parent / parent).is_file():
            raise _unreadable(
                path,
                f"it builds on {parent} (`{_DEFAULTS}`), which is not there: give the file where that lies beside it as"
                " in the repository that it is from",
            )
        merged = _merged(merged, _inherited(path.parent / parent, depth + 1))
    return _merged(merged, values)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise _unreadable(path, f"it has more than {_LARGEST_BYTES} bytes")
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, f"{error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise _unreadable(path, f"it is not YAML of plain values: {first}") from None
    if not isinstance(values, dict):
        raise _unreadable(path, f"expected a mapping, found a {type(values).__name__}")
    return values


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        held = merged.get(key)
        both = isinstance(held, dict) and isinstance(value, Mapping)
        merged[key] = _merged(held, value) if both and isinstance(held, dict) else value
    return merged


def _resolved(value: Any, root: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {str(key): _resolved(held, root) for key, held in value.items()}
    if isinstance(value, list):
        return [_resolved(held, root) for held in value]
    return _referred(value, root) if isinstance(value, str) else value


def _referred(text: str, root: Mapping[str, Any]) -> Any:
    """Fill in ${key} and ${mul:a,b}, innermost first; what refers to nothing stays as it is."""
    if _EXPONENT.fullmatch(text):
        return float(text)
    for _ in range(_DEEPEST):
        found = _REFERENCE.search(text)
        if found is None:
            return text
        value = _value_of(found[1], root)
        if value is None or isinstance(value, dict | list):
            return text
        if found[0] == text:
            if not isinstance(value, str):
                return value
            text = value
        else:
            text = text.replace(found[0], str(value))
    return text


def _value_of(reference: str, root: Mapping[str, Any]) -> Any:
    name, colon, arguments = reference.partition(":")
    if colon:
        try:
            numbers = [float(argument) for argument in arguments.split(",")]
        except ValueError:
            return None
        if name.strip() not in ("mul", "max") or not numbers:
            return None
        product = 1.0
        for number in numbers:
            product *= number
        number = product if name.strip() == "mul" else max(numbers)
        return int(number) if number.is_integer() else number
    value: Any = root
    for part in reference.strip().split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, held in value.items():
            yield from _leaves(held, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def _unreadable(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"cannot import {path}", [problem])
