"""docs/reference/config.md: every key of a config, and what a resume makes of another value."""

from __future__ import annotations

from typing import Any

import attrs
from reference_fields import cell, code, either_text, table

from ckptrain.config.explain import explain
from ckptrain.config.schema import RunConfig, SourceConfig
from ckptrain.config.values import type_text
from ckptrain.lifecycle.drift import RULES, Kind

RESUME = {
    Kind.IDENTITY: "refused",
    Kind.ORDER: "refused",
    Kind.NOTED: "noted",
    Kind.FREE: "free",
}
HEAD = """# Configuration

A config is YAML or JSON. Any key can be given on the command line as `section.key=value`, and wins there. An unknown
key, a value of another type or out of its bounds is an error; all of them are told at once. `ckptrain explain` prints
the same list, and `ckptrain explain lora` one section of it. Relative paths are relative to the config file; on the
command line they are relative to the working directory.

The last column says what a start makes of a value that differs from the checkpoint's: **refused** (another run would
come out), **noted** (allowed and told, since the numbers differ from those of the uninterrupted run) or **free**
(nothing that is learnt depends on the key itself). What a path leads to is compared by its content: another base model,
other data, another template or other modules are refused wherever the key says free. Why:
[what a start means](../explanation/start.md#what-may-change).

Only `model.pretrained` and `data.train` are required.
"""


def config_page() -> str:
    """Return the page."""
    defaults = {key: (kind, default, meaning) for key, kind, default, meaning in explain()}
    parts = [HEAD]
    for section in attrs.fields(RunConfig):
        rows = []
        for field in attrs.fields(section.metadata["section"]):
            key = f"{section.name}.{field.name}"
            kind, default, meaning = defaults[key]
            rule = RULES[key]
            because = "" if rule.kind is Kind.FREE else f": it {rule.effect}"
            what = f"{cell(meaning)}<br>{_values(kind)}; {_default(default)}"
            rows.append((code(field.name), what, f"**{RESUME[rule.kind]}**{cell(because)}"))
        parts.append(f"\n## {section.name}\n\n{_docstring(section.metadata['section'])}\n\n")
        parts.append(table(("key", "meaning", "another value on a resume"), rows))
    parts.append(_sources())
    return "".join(parts)


def _sources() -> str:
    """Return the part on what an item of data.train may say."""
    rows = [
        (code(field.name), f"{cell(field.metadata['doc'])}<br>{_values(_plain_type(field))}")
        for field in attrs.fields(SourceConfig)
    ]
    text = "\n## A source of data\n\nAn item of `data.train` or `data.validation`. {}\n\n"
    return text.format(_docstring(SourceConfig)) + table(("key", "meaning"), rows)


def _values(kind: str) -> str:
    """Return what a key may be, in italics: `bfloat16` or `float32`, say."""
    choices = kind.removesuffix(", or null").split(" | ")
    either = either_text([code(choice) for choice in choices]) if len(choices) > 1 else choices[0]
    return f"*{either}{', or null' if kind.endswith(', or null') else ''}*"


def _default(default: str) -> str:
    return "required" if default == "required" else f"default {code(default)}"


def _plain_type(field: attrs.Attribute[Any]) -> str:
    import typing

    return type_text(typing.get_type_hints(SourceConfig)[field.name], field.metadata["bounds"])


def _docstring(cls: type[Any]) -> str:
    return "\n".join(line.strip() for line in (cls.__doc__ or "").strip().splitlines())
