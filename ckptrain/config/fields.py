"""How a config class declares a field: its default, what it means, and its bounds, as attrs metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs


def option(doc: str, *, default: Any = attrs.NOTHING, factory: Callable[[], Any] | None = None, **bounds: float) -> Any:
    """Declare one key; `bounds` are any of at_least, above, at_most, below (each item of a tuple is held to them)."""
    unknown = bounds.keys() - {"at_least", "above", "at_most", "below"}
    if unknown:
        raise TypeError(f"not bounds: {sorted(unknown)}")
    if factory is not None:
        default = attrs.Factory(factory)
    return attrs.field(default=default, metadata={"doc": doc, "bounds": bounds})


def section(cls: type[Any]) -> Any:
    """Declare a section: its own class with all its defaults, or required where the class has a field without one."""
    required = any(f.default is attrs.NOTHING for f in attrs.fields(cls))
    if required:
        return attrs.field(metadata={"doc": cls.__doc__, "section": cls})
    return attrs.field(factory=cls, metadata={"doc": cls.__doc__, "section": cls})
