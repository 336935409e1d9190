"""What becomes of another trainer's config here: our keys with where each is from, and what is to be known of that.

Written as YAML with comments, which `load_config` reads. What has no counterpart is listed, never dropped silently.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import yaml

from ckptrain.config.foreign import Foreign
from ckptrain.config.load import key_types, load_config, unflatten
from ckptrain.errors import ConfigError

_WIDTH = 110
_SHOWN = 60
_REQUIRED = ("model.pretrained", "data.train")


@attrs.define(kw_only=True)
class Imported:
    """A config under way, and at its end."""

    form: str
    """Whose file it is, in words."""
    settings: dict[str, Any] = attrs.field(factory=dict)
    """By our dotted key."""
    origins: dict[str, str] = attrs.field(factory=dict)
    """Their key, by ours."""
    changed: dict[str, list[str]] = attrs.field(factory=dict)
    """What means something else here than there, by our key."""
    dropped: dict[str, Any] = attrs.field(factory=dict)
    """What has no counterpart, by their key."""
    ignored: list[str] = attrs.field(factory=list)
    """Whole sections without one, each with the reason."""
    processes: int = 1
    run_dir: str | None = None
    template: str | None = None
    """The text of a chat template, which is to lie in a file of its own."""

    def set(self, key: str, value: Any, origin: str) -> None:
        """Set a key, where there is a value."""
        if value is not None:
            self.settings[key] = value
            self.origins[key] = origin

    def note(self, key: str, text: str) -> None:
        """Say what to know about a key."""
        self.changed.setdefault(key, []).append(text)

    def leave(self, foreign: Foreign, section: str, reason: str) -> None:
        """Take the rest of a section, and say why none of it is here."""
        prefix = f"{section}."
        if any(key.startswith(prefix) for key in foreign.rest()):
            self.ignored.append(f"{section}: {reason}")
        foreign.take(section)

    @property
    def missing(self) -> tuple[str, ...]:
        """The keys that must be given and are not."""
        return tuple(key for key in _REQUIRED if key not in self.settings)

    def problems(self) -> list[str]:
        """Return what a start would say against it, but for what is missing; files need not be there."""
        stand_in = {"model.pretrained": "org/name", "data.train": "train.jsonl"}
        missing = {key: stand_in[key] for key in self.missing}
        try:
            load_config(unflatten({**missing, **self.settings}), check_inputs=False)
        except ConfigError as error:
            return list(error.problems)
        return []

    def to_yaml(self, source: str) -> str:
        """Write it, with comments: where each key is from, what changed, what is missing, what has no counterpart."""
        lines = [f"# Made by `ckptrain import-config` from {source}, a config of {self.form}."]
        lines += _comment("Start it with: ckptrain run THIS_FILE" + self._options())
        lines += [line for key in self.missing for line in _comment(f"GIVE {key}: the file does not say it.")]
        lines += [line for problem in self.problems() for line in _comment(f"MEND: {problem}")]
        sections: dict[str, list[str]] = {}
        for section, names in key_types().items():
            for name in names:
                sections.setdefault(section, []).extend(self._lines(f"{section}.{name}", name))
        for section, body in sections.items():
            if body:
                lines += ["", f"{section}:", *body]
        if self.dropped or self.ignored:
            lines += ["", *_comment("No counterpart here:")]
            lines += [line for text in self.ignored for line in _comment(f"  {text}")]
            lines += [line for text in shown_values(self.dropped) for line in _comment(f"  {text}")]
        return "\n".join(lines) + "\n"

    def _options(self) -> str:
        options = f" --run-dir {self.run_dir}" if self.run_dir else ""
        return options + (f" --nproc-per-node {self.processes}" if self.processes > 1 else "")

    def _lines(self, key: str, name: str) -> list[str]:
        notes = [f"  {line}" for text in self.changed.get(key, ()) for line in _comment(text)]
        if key not in self.settings:
            return notes
        return [*notes, f"  {name}: {_plain(self.settings[key])}  # {self.origins[key]}"]


def shown_values(values: Mapping[str, Any]) -> list[str]:
    """Write values by key, those of one section on a line of their own."""
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        shown = textwrap.shorten(_plain(value), _SHOWN, placeholder=" ...")
        sections.setdefault(section, []).append(f"{name}={shown}")
    return [f"{section}: {', '.join(found)}" if section else ", ".join(found) for section, found in sections.items()]


def _plain(value: Any) -> str:
    """Write a value as YAML, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(text: str) -> Sequence[str]:
    indent = len(text) - len(text.lstrip())
    return [
        f"# {line}"
        for line in textwrap.wrap(
            text, _WIDTH, subsequent_indent=" " * (indent + 2), break_on_hyphens=False, break_long_words=False
        )
    ]
