"""What can a config say? Every key with its type, default and meaning, from the classes themselves."""

from __future__ import annotations

import json
from typing import Any

import attrs

from ckptrain.config.load import key_types
from ckptrain.config.schema import RunConfig
from ckptrain.config.values import type_text


def explain() -> list[tuple[str, str, str, str]]:
    """Return (dotted key, type, default, meaning) for every key in the order declared; a required key says so."""
    rows = []
    for section in attrs.fields(RunConfig):
        for field in attrs.fields(section.metadata["section"]):
            expected = key_types()[section.name][field.name]
            rows.append(
                (
                    f"{section.name}.{field.name}",
                    type_text(expected, field.metadata["bounds"]),
                    _default_text(field.default),
                    field.metadata["doc"],
                )
            )
    return rows


def _default_text(default: Any) -> str:
    """Write a default as YAML has it."""
    if default is attrs.NOTHING:
        return "required"
    if isinstance(default, tuple):
        return f"[{', '.join(_default_text(item) for item in default)}]"
    return default if isinstance(default, str) else json.dumps(default)
