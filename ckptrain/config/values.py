"""Is this value what the key takes? Strict about types, generous only where nothing can be mistaken.

Accepted: an int for a float, and a number that YAML reads as a string (`1e-4`, which YAML 1.1 takes for text) for a
float. Refused: true for 1, 3.0 for 3, a string for a list, nan and infinity.
"""

from __future__ import annotations

import difflib
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import attrs

from ckptrain.config.document import kind

_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "at_least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
_MAX_DEPTH = 32


ALL_LINEAR = "all-linear"


class BadValueError(Exception):
    """A value that its key does not take; the text follows the key's name, `place` in it, and a colon."""

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(text)
        self.place = place


def convert(value: Any, expected: Any, bounds: Mapping[str, float]) -> Any:
    """Return `value` as the type `expected`, held to `bounds`.

    Raises:
        BadValueError: it is of another type or out of bounds.
    """
    origin = typing.get_origin(expected)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [arg for arg in typing.get_args(expected) if arg is not type(None)]
        return None if value is None else convert(value, inner, bounds)
    if value is None:
        raise BadValueError(f"expected {type_text(expected)}, found null; leave the key out to have its default")
    if origin is Literal:
        return _choice(value, typing.get_args(expected))
    if origin is tuple and attrs.has(typing.get_args(expected)[0]):
        return _entries(value, typing.get_args(expected)[0])
    if origin is tuple:
        return _items(value, expected, bounds)
    if origin is dict:
        return _plain_mapping(value)
    converted = _SCALARS[expected](value)
    for name, bound in bounds.items():
        words, holds = _BOUNDS[name]
        if not holds(converted, bound):
            raise BadValueError(f"must be {words} {bound}, found {kind(value)}")
    return converted


def type_text(expected: Any, bounds: Mapping[str, float] = types.MappingProxyType({})) -> str:
    """Say in words what a key takes, for messages and for the documentation."""
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if origin in (types.UnionType, typing.Union):
        inner = [arg for arg in args if arg is not type(None)]
        return f"{type_text(inner[0], bounds)}, or null"
    if origin is Literal:
        return " | ".join(args)
    if origin is tuple and attrs.has(args[0]):
        return _entries_text(args[0])
    if origin is tuple:
        words = _words(args[0], plural=True)
        text = f"a list of {words}" if args[-1] is Ellipsis else f"a list of {len(args)} {words}"
    elif origin is dict:
        return "a mapping"
    else:
        text = _words(expected, plural=False)
    limits = " and ".join(f"{_BOUNDS[name][0]} {bound}" for name, bound in bounds.items())
    return f"{text}, {limits}" if limits else text


def _entries_text(cls: type[Any]) -> str:
    return f"a path, a mapping of {', '.join(field.name for field in attrs.fields(cls))}, or a list of those"


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean X?)`, or nothing where no known word is near."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def _words(scalar: Any, *, plural: bool) -> str:
    one, many = {
        str: ("a string", "strings"),
        int: ("a whole number", "whole numbers"),
        float: ("a number", "numbers"),
        bool: ("true or false", "true or false"),
    }[scalar]
    return many if plural else one


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise BadValueError(f'expected a string, found {kind(value)}; put it in quotes: "{value}"')
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        number = _as_number(value)
        whole = number is not None and math.isfinite(number) and number.is_integer()
        fix = f"; write {int(number)}" if number is not None and whole else ""
        raise BadValueError(f"expected a whole number, found {kind(value)}{fix}")
    return value


def _number(value: Any) -> float:
    number = _as_number(value)
    if number is None:
        raise BadValueError(f"expected a number, found {kind(value)}")
    if not math.isfinite(number):
        raise BadValueError(f"expected a finite number, found {kind(value)}")
    return number


def _as_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        word = str(value).lower()
        fix = f"; write {word} without quotes" if word in ("true", "false") else ""
        raise BadValueError(f"expected true or false, found {kind(value)}{fix}")
    return value


_SCALARS: dict[Any, Any] = {str: _string, int: _whole, float: _number, bool: _truth}


def _choice(value: Any, choices: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in choices:
        return value
    near = suggestion(value, choices) if isinstance(value, str) else ""
    raise BadValueError(f"expected one of {', '.join(choices)}; found {kind(value)}{near}")


def _items(value: Any, expected: Any, bounds: Mapping[str, float]) -> tuple[Any, ...]:
    args = typing.get_args(expected)
    if value == ALL_LINEAR:  # Hugging Face PEFT writes this one without brackets
        value = [value]
    if not isinstance(value, list | tuple):
        fix = f"; write [{value}]" if isinstance(value, str | int | float) and args[-1] is Ellipsis else ""
        raise BadValueError(f"expected {type_text(expected)}, found {kind(value)}{fix}")
    if args[-1] is not Ellipsis and len(value) != len(args):
        raise BadValueError(f"expected {type_text(expected)}, found {len(value)}")
    converted = []
    for index, item in enumerate(value):
        try:
            converted.append(convert(item, args[0], bounds))
        except BadValueError as error:
            raise BadValueError(f"item {index + 1}: {error}") from None
    return tuple(converted)


def _entries(value: Any, cls: type[Any]) -> tuple[Any, ...]:
    """Build the classes of a list of mappings; one of them may stand alone, and text is what its first field takes."""
    listed = isinstance(value, list | tuple)
    if listed and not value:
        raise BadValueError("the list is empty")
    return tuple(
        _entry(item, cls, f"[{index}]" if listed else "") for index, item in enumerate(value if listed else [value])
    )


def _entry(value: Any, cls: type[Any], place: str) -> Any:
    fields = {field.name: field for field in attrs.fields(cls)}
    if isinstance(value, cls):
        return value
    if isinstance(value, str):
        value = {next(iter(fields)): value}
    if not isinstance(value, Mapping):
        raise BadValueError(f"expected {_entries_text(cls)}, found {kind(value)}", place)
    types_of = typing.get_type_hints(cls)
    arguments = {}
    for name, held in value.items():
        if name not in fields:
            raise BadValueError(
                f"unknown key{suggestion(str(name), fields)}; there are {', '.join(fields)}", f"{place}.{name}"
            )
        try:
            arguments[name] = convert(held, types_of[name], fields[name].metadata["bounds"])
        except BadValueError as error:
            raise BadValueError(str(error), f"{place}.{name}{error.place}") from None
    return cls(**arguments)


def _plain_mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadValueError(f"expected a mapping, found {kind(value)}")
    plain: dict[str, Any] = _plain(value, depth=0)
    return plain


def _plain(value: Any, *, depth: int) -> Any:
    """Copy a free-form value, which must survive JSON: it is written to run.yaml and hashed."""
    if depth > _MAX_DEPTH:
        raise BadValueError(f"nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, list | tuple):
        return [_plain(item, depth=depth + 1) for item in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise BadValueError(f"its keys must be strings, found {kind(key)}; put it in quotes")
        return {key: _plain(item, depth=depth + 1) for key, item in value.items()}
    raise BadValueError(f'holds {kind(value)}, which is neither text nor a number; put it in quotes: "{value}"')
