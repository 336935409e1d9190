"""Is it the same data as then? By content, wherever it lies and whatever it is called."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from ckptrain.config.schema import SourceConfig
from ckptrain.data.sources import Located


def sources_fingerprint(sources: Sequence[SourceConfig], located: Sequence[Located]) -> str:
    """Return a fingerprint of rows, how they are read, and how sources are mixed.

    That of a single source that needs no words of its own is that of its rows: for one file, the SHA-256 of its bytes.

    Raises:
        DataError: a file cannot be read.
    """
    parts = [_part(source, found) for source, found in zip(sources, located, strict=True)]
    if len(parts) == 1 and parts[0].keys() == {"rows"}:
        return str(parts[0]["rows"])
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _part(source: SourceConfig, located: Located) -> dict[str, Any]:
    said = {"format": source.format, "columns": source.columns, "weight": source.weight}
    return {"rows": located.fingerprint(), **{key: value for key, value in said.items() if value}}
