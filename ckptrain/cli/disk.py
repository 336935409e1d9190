"""How much room does a directory have, and how fast is what is under it? Measured by writing as a save does."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

import attrs

_CHUNK_BYTES = 4_000_000
_MOST_BYTES = 64_000_000
_LONGEST_S = 2.0
_COMMITS = 5
_MOUNTS = Path("/proc/mounts")


@attrs.frozen(kw_only=True)
class Disk:
    """What was found."""

    file_system: str | None
    """Its type as the kernel names it; None where the kernel does not tell."""
    free_bytes: int
    write_bytes_per_s: float
    """Written and on the disk (fsync), as a checkpoint is before it counts."""
    commit_s: float
    """To make one small file durable under its name, the median of a few."""


def measure_disk(directory: Path) -> Disk:
    """Measure the disk of a directory, or of the nearest one above it that is there; nothing is left behind.

    Raises:
        OSError: it cannot be written.
    """
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    with tempfile.TemporaryDirectory(prefix=".ckptrain-doctor-", dir=there) as name:
        commits = sorted(_commit_s(Path(name), number) for number in range(_COMMITS))
        with (Path(name) / "data").open("wb") as file:
            speed = _write_speed(file, min(_MOST_BYTES, free // 2))
    return Disk(
        file_system=_file_system(there),
        free_bytes=free,
        write_bytes_per_s=speed,
        commit_s=commits[_COMMITS // 2],
    )


def _write_speed(file: BinaryIO, most_bytes: int) -> float:
    chunk = os.urandom(_CHUNK_BYTES)  # a file system that compresses gains nothing by it
    began_s = time.monotonic()
    written = 0
    while written == 0 or (written < most_bytes and time.monotonic() - began_s < _LONGEST_S):
        written += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return written / (time.monotonic() - began_s)


def _commit_s(directory: Path, number: int) -> float:
    began_s = time.monotonic()
    staged = directory / f".staged-{number}"
    with staged.open("wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    staged.rename(directory / str(number))
    parent = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
    return time.monotonic() - began_s


def _file_system(directory: Path) -> str | None:
    """Return the type of the file system that is mounted nearest above a directory."""
    try:
        lines = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return None
    resolved = directory.resolve()
    found = [(len(point), kind) for _, point, kind, *_ in lines if resolved.is_relative_to(point.replace("\\040", " "))]
    return max(found)[1] if found else None
