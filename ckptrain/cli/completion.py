"""What can follow on a command line? Keys of a config and their values, sections and run directories, for a shell."""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

from ckptrain.cli.outcome import Answer
from ckptrain.config.explain import explain
from ckptrain.config.load import key_types

SHELLS = ("bash", "zsh", "fish")
_PROGRAM = "ckptrain"
_BASH_WORD = "COMPREPLY+=($value)"


def completion_answer(shell: str, group: click.Command) -> Answer:
    """Return the script that teaches a shell to complete the commands of a group."""
    kind = get_completion_class(shell)
    assert kind is not None
    complete: ShellComplete = kind(group, {}, _PROGRAM, f"_{_PROGRAM.upper()}_COMPLETE")
    script = complete.source_template % complete.source_vars()
    # After a key comes its value, without a space before it; the other shells see to that where a word ends in "=".
    script = script.replace(_BASH_WORD, f"{_BASH_WORD}\n            [[ $value == *= ]] && compopt -o nospace")
    return Answer(report={"script": script}, show=lambda _: click.echo(script))


def complete_overrides(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete key=value: the keys of a config, and the values of those that have few."""
    given = context.params.get("overrides") or ()
    key, has_value, value = _split(given, incomplete)
    if has_value:
        before = f"{key}=" if incomplete.startswith(f"{key}=") else ""  # bash takes the key for a word of its own
        return [CompletionItem(before + choice) for choice in _choices(key) if choice.startswith(value)]
    return [
        CompletionItem(f"{name}=", help=meaning) for name, _, _, meaning in explain() if name.startswith(incomplete)
    ]


def complete_sections(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a section of a config."""
    return [CompletionItem(name) for name in key_types() if name.startswith(incomplete)]


def _split(given: Sequence[str], incomplete: str) -> tuple[str, bool, str]:
    """Return key, whether a value is being written, and its beginning.

    Bash ends words at "=": of `model.dtype=fl` it gives three.
    """
    if len(given) > 1 and given[-1] == "=":
        return given[-2], True, incomplete
    if not incomplete and given and _choices(given[-1]):  # click leaves out an "=" that stands at the end
        return given[-1], True, ""
    key, separator, value = incomplete.partition("=")
    return key, bool(separator), value


@functools.cache
def _choices(key: str) -> tuple[str, ...]:
    section, _, name = key.partition(".")
    types: Mapping[str, Any] = key_types().get(section, {})
    return _values_of(types.get(name))


def _values_of(expected: Any) -> tuple[str, ...]:
    """Return the values of a type that has few: one of some words, true or false, or nothing besides."""
    if expected is bool:
        return ("true", "false")
    if expected is type(None):
        return ("null",)
    parts = typing.get_args(expected)
    if typing.get_origin(expected) is typing.Literal:
        return tuple(map(str, parts))
    if typing.get_origin(expected) in (tuple, list, dict):
        return ()
    return tuple(value for part in parts for value in _values_of(part))
