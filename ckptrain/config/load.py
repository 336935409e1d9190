"""How does what the user wrote become a RunConfig? File, then overrides, then every problem at once.

Relative paths are made absolute here, against the directory of the file that wrote them (a mapping's and an
override's against the working directory), so that a run resumed from elsewhere finds the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import yaml

from ckptrain.config.base import is_path, is_url
from ckptrain.config.checks import contradictions
from ckptrain.config.document import kind, parse_value, read_document
from ckptrain.config.schema import RunConfig, SourceConfig
from ckptrain.config.sources import absolute_sources, plain_sources
from ckptrain.config.synonyms import SYNONYMS
from ckptrain.config.values import BadValueError, convert, suggestion, type_text
from ckptrain.errors import ConfigError

_PATH_KEYS = (("model", "adapter"), ("data", "chat_template"))
_SOURCE_KEYS = (("data", "train"), ("data", "validation"))


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str] = (),
    *,
    check_inputs: bool = True,
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunConfig:
    """Read a config file, a nested mapping or a RunConfig, apply overrides such as `train.steps=100`, and check it all.

    `check_inputs=False` leaves out whether the data files and the adapter exist: a run is shown or exported on machines
    that do not have them. `defaults` has values by section for keys that neither says, in the place of the schema's.

    Raises:
        ConfigError: with every problem found: types, bounds, unknown and missing keys, contradictions, absent files.
    """
    summary = "cannot use the configuration"
    if isinstance(source, RunConfig):
        reading = _Reading(_nested(source), {})
    elif isinstance(source, Mapping):
        reading = _Reading(_absolute(_copy(source), Path.cwd()), {})
    else:
        path = Path(source)
        summary = f"cannot use the configuration {path}"
        document = read_document(path)
        reading = _Reading(_absolute(_copy(document.values), path.absolute().parent), document.lines)
        reading.problems.extend(document.problems)
    for override in overrides:
        reading.override(override)
    reading.fill_in(defaults or {})
    config = reading.structure()
    reading.problems.extend(
        reading.located(found.keys, found.text)
        for found in contradictions(config, check_inputs=check_inputs)
        if not reading.bad_keys.intersection(found.keys)
    )
    if reading.problems:
        raise ConfigError(summary, reading.problems)
    return config


def dump_config(config: RunConfig) -> str:
    """Write a config as YAML that `load_config` reads back to an equal object."""
    # Everything but ASCII escaped: PyYAML writes a few of Unicode's line breaks as they are and reads others back.
    return yaml.safe_dump(_nested(config), sort_keys=False, width=120)


def flatten(config: RunConfig) -> dict[str, Any]:
    """Return every dotted key with its plain value, in the order declared; tuples become lists."""
    return {f"{section}.{name}": value for section, values in _nested(config).items() for name, value in values.items()}


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested mapping that `flatten` made dotted keys of."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    return nested


def config_digest(config: RunConfig) -> str:
    """Return the SHA-256 of the config as canonical JSON: sorted keys, no spaces, ASCII."""
    text = json.dumps(flatten(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def key_types() -> dict[str, dict[str, Any]]:
    """Return the resolved type of every key: section -> key -> type, as declared."""
    found = {}
    for section in attrs.fields(RunConfig):
        hints = typing.get_type_hints(section.metadata["section"])
        found[section.name] = {field.name: hints[field.name] for field in attrs.fields(section.metadata["section"])}
    return found


class _Reading:
    """A config on its way from plain values to classes, with its problems so far."""

    def __init__(self, values: dict[str, Any], lines: Mapping[str, int]) -> None:
        self.values = values
        self.problems: list[str] = []
        self.bad_keys: set[str] = set()
        self._places = {key: f"line {line}: " for key, line in lines.items()}

    def located(self, keys: Sequence[str], text: str) -> str:
        """Put the line of the first of `keys` that the user wrote before a problem."""
        return next((self._places[key] for key in keys if key in self._places), "") + text

    def override(self, text: str) -> None:
        """Set one key from `section.key=value`; the value is YAML."""
        key, equals, raw = text.partition("=")
        key = key.strip()
        if not equals or not key or not raw.strip():
            fix = f"write {key}=null for none" if equals and key else "expected section.key=value"
            self.problems.append(
                f"override {text!r}: {'it has no value' if equals and key else 'not a setting'}; {fix}"
            )
            return
        section, _, name = key.partition(".")
        if section in key_types() and not name:
            self.problems.append(
                f"override {text!r}: {section} is a section; set its keys, such as {_example(section)}"
            )
            return
        try:
            value = parse_value(raw)
        except ValueError as error:
            self.problems.append(f"override {text!r}: {error}")
            return
        *parents, last = key.split(".")
        place = self.values
        for depth, parent in enumerate(parents, start=1):
            self._places.setdefault(".".join(parents[:depth]), f"override {text!r}: ")
            if place.get(parent) is None:
                place[parent] = {}
            place = place[parent]
            if not isinstance(place, dict):
                self.problems.append(f"override {text!r}: {parent} is {kind(place)}, not a mapping")
                return
        place[last] = value
        self._places[key] = f"override {text!r}: "
        _absolute(self.values, Path.cwd(), only=key)

    def fill_in(self, defaults: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the keys that nobody has set."""
        for section, values in defaults.items():
            if isinstance(held := self.values.get(section) or {}, Mapping):
                self.values[section] = {**values, **held}

    def structure(self) -> RunConfig:
        """Build the config; a key with a problem stands at its default, and is named in `bad_keys`."""
        for key in self.values:
            if key not in key_types():
                self._refuse([str(key)], _unknown_section(str(key)))
        sections = {}
        for field in attrs.fields(RunConfig):
            values = self.values.get(field.name)
            if values is None:  # a section whose every line is commented out
                values = {}
            if not isinstance(values, Mapping):
                keys = [field.name, *(f"{field.name}.{name}" for name in key_types()[field.name])]
                self._refuse(keys, f"{field.name}: expected a section with keys, found {kind(values)}")
                values = None
            sections[field.name] = self._section(field.name, field.metadata["section"], values)
        return RunConfig(**sections)

    def _section(self, section: str, cls: type[Any], values: Mapping[str, Any] | None) -> Any:
        known = key_types()[section]
        for key in values or ():
            if key not in known:
                self._refuse([f"{section}.{key}"], _unknown_key(section, str(key)))
        arguments = {}
        for field in attrs.fields(cls):
            key, expected = f"{section}.{field.name}", known[field.name]
            if field.default is attrs.NOTHING:
                arguments[field.name] = ""  # stands in while the other problems are looked for
            if values is not None and field.name in values:
                try:
                    arguments[field.name] = convert(values[field.name], expected, field.metadata["bounds"])
                except BadValueError as error:
                    self._refuse([key], f"{key}{error.place}: {error}")
            elif values is not None and field.default is attrs.NOTHING:
                self._refuse([key], f"{key} is required ({type_text(expected)}): {field.metadata['doc']}")
        return cls(**arguments)

    def _refuse(self, keys: Sequence[str], problem: str) -> None:
        self.bad_keys.update(keys)
        self.problems.append(self.located(keys, problem))


def _nested(config: RunConfig) -> dict[str, Any]:
    return attrs.asdict(config, value_serializer=lambda _, __, value: _plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], SourceConfig):
        return plain_sources(value)
    return list(value) if isinstance(value, tuple) else value


def _copy(value: Any) -> Any:
    """Copy mappings and lists, so that overrides do not reach into the caller's."""
    if isinstance(value, Mapping):
        return {key: _copy(held) for key, held in value.items()}
    return [_copy(held) for held in value] if isinstance(value, list) else value


def _absolute(values: dict[str, Any], directory: Path, only: str | None = None) -> dict[str, Any]:
    """Make the paths among `values` absolute, in place: all of them, or the one under the dotted key `only`."""
    for section, name in (*_PATH_KEYS, ("model", "pretrained")):
        holder = values.get(section)
        if only not in (None, f"{section}.{name}") or not isinstance(holder, dict):
            continue
        value = holder.get(name)
        if isinstance(value, str) and is_url(value):
            continue  # of an adapter in an object store; a template or a base is none, and not found
        if isinstance(value, str) and value and (name != "pretrained" or is_path(value, directory)):
            holder[name] = os.path.normpath(directory / Path(value).expanduser())
    for section, name in _SOURCE_KEYS:
        holder = values.get(section)
        if isinstance(holder, dict) and only in (None, f"{section}.{name}", f"{section}.{name}.path"):
            holder[name] = absolute_sources(holder.get(name), directory)
    return values


def _example(section: str) -> str:
    return f"{section}.{next(iter(key_types()[section]))}=..."


def _dotted_keys() -> Iterator[str]:
    for section, names in key_types().items():
        for name in names:
            yield f"{section}.{name}"


def _unknown_section(name: str) -> str:
    if name == "_target_":
        return "_target_: a config names no code to run here; take it out"
    hint = _elsewhere(name) or suggestion(name, key_types())
    return f"{name}: unknown section{hint}; there are {', '.join(key_types())}"


def _unknown_key(section: str, name: str) -> str:
    here = key_types()[section]
    hint = _elsewhere(name, section) or suggestion(name, here)
    return f"{section}.{name}: unknown key{hint}; {section} has {', '.join(here)}"


def _elsewhere(name: str, section: str = "") -> str:
    """Say where the key lives that other trainers call so, or that stands in the wrong section; else nothing."""
    if name in SYNONYMS:
        return f" (here it is {SYNONYMS[name]})"
    homes = [key for key in _dotted_keys() if key.partition(".")[2] == name.rpartition(".")[2]]
    if name.count(".") == 1 and name in homes:
        return f" (write {name.partition('.')[0]} as a section with the key {name.partition('.')[2]})"
    return f" (it is {' or '.join(homes)})" + suggestion(name, key_types().get(section, ())) if homes else ""
