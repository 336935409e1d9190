"""What lies in a directory, for comparing one with another."""

from __future__ import annotations

from pathlib import Path


def data_files(checkpoint: Path) -> dict[str, bytes]:
    """Return the bytes of everything in a checkpoint but its manifest, which has a time in it."""
    return {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
