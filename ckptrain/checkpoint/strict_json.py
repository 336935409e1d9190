"""JSON read strictly into attrs classes: what is not exactly as declared is a named problem, never a guess.

The parsers at hand are lenient where a file format must not be: they keep the last of duplicate keys, accept NaN, take
True for 1 and ignore unknown keys. All problems are collected, so that one reading tells everything.
"""

from __future__ import annotations

import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import attrs

LARGEST_INTEGER = 2**63 - 1
"""Integers are kept to what every JSON reader and torch can hold; all integers of our files are sizes or counts."""


def decode(data: bytes) -> Any:
    """Return the JSON value in `data`.

    Raises:
        ValueError: it is not UTF-8, not JSON, nested too deeply, has a duplicate key, or holds what JSON cannot carry.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
        _check_values(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def encode(value: object) -> str:
    """Return `value` as compact JSON with sorted keys: the same value always gives the same text.

    Raises:
        ValueError: a number in it is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read(expected: Any, value: object, at: str, problems: list[str]) -> Any:
    """Return `value` as the declared type, or note in `problems` what is wrong at `at`; then the result is of no use.

    Knows attrs classes (exactly their fields, defaults do not fill in), str, int (not negative), float, bool, None,
    Literal, unions of those with None, tuple[X, ...], Mapping[str, X] and Any.
    """
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (types.UnionType, typing.Union):
        [inner] = [argument for argument in arguments if argument is not type(None)]
        return None if value is None else read(inner, value, at, problems)
    if attrs.has(expected):
        return _read_object(expected, value, at, problems)
    if origin is tuple and isinstance(value, list):
        return tuple(read(arguments[0], item, f"{at}[{index}]", problems) for index, item in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {key: read(arguments[1], item, f"{at}[{key}]", problems) for key, item in value.items()}
    if not _is_plain(expected, value):
        problems.append(f"{at} is {shown(value)}, expected {_described(expected)}")
    return value


def shown(value: object) -> str:
    """Return a value for a message: short, on one line."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _check_values(value: object) -> None:
    """Refuse what the parser lets through: 1e999 becomes infinity, and half a surrogate pair is no character."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_values(key)
            _check_values(item)
    elif isinstance(value, list):
        for item in value:
            _check_values(item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is too large")
    elif isinstance(value, str):
        value.encode("utf-8")


def _read_object(cls: type[attrs.AttrsInstance], value: object, at: str, problems: list[str]) -> object:
    if not isinstance(value, dict):
        problems.append(f"{at} is {shown(value)}, expected an object")
        return None
    hints = _hints(cls)
    prefix = f"{at}." if at else ""
    problems += [f"{prefix}{key} is missing" for key in hints if key not in value]
    problems += [f"{prefix}{key} is not a key of this format" for key in value if key not in hints]
    before = len(problems)
    fields = {key: read(hints[key], value[key], f"{prefix}{key}", problems) for key in hints if key in value}
    if len(problems) > before or len(fields) < len(hints):
        return None
    return cls(**fields)


@functools.cache
def _hints(cls: type[attrs.AttrsInstance]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in attrs.fields(cls)}


def _is_plain(expected: object, value: object) -> bool:
    if expected is Any:
        return True
    if typing.get_origin(expected) is Literal:
        return isinstance(value, str) and value in typing.get_args(expected)
    if expected is int:
        return type(value) is int and 0 <= value <= LARGEST_INTEGER
    if expected is float:
        return type(value) in (int, float)
    return type(value) is expected


def _described(expected: object) -> str:
    origin = typing.get_origin(expected)
    if origin is Literal:
        return f"one of {', '.join(typing.get_args(expected))}"
    if origin is tuple:
        return "a list"
    if origin is Mapping:
        return "an object"
    words: dict[object, str] = {str: "text", int: "a whole number from 0", float: "a number", bool: "true or false"}
    return words[expected]
