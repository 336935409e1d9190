"""How do rows that a program holds become data like any other? As a file of JSON lines, named by what is in it.

From there on nothing knows where they came from: format, tokens, identity and the refusal of other rows on a resume are
those of files. It lies in the cache, so a run whose rows came from a program can be gone on with by the command line
too, as long as it is there; the program makes it anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ckptrain.config.cache import cache_directory
from ckptrain.data.records import shorten
from ckptrain.errors import DataError

_DIRECTORY = "rows-v1"
_MOST_PROBLEMS = 1000


def keep_rows(rows: Iterable[Mapping[str, Any]], role: str) -> Path:
    """Write rows into the cache, one at a time, and return the file; `role` is what they are called in messages.

    A row is written as `json.dumps(row, ensure_ascii=False)` has it, and ends with a newline: a file that was written
    so is the same data.

    Raises:
        DataError: a row is no object of JSON, all such rows are told at once; or the file cannot be written.
    """
    directory = cache_directory() / _DIRECTORY
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _temporary(directory) as (file, temporary):
            digest = _write(file, rows, role)
            file.close()
            path = directory / f"{digest}.jsonl"
            if not path.is_file() or path.stat().st_size != temporary.stat().st_size:
                temporary.replace(path)
    except OSError as error:
        raise DataError(
            f"cannot keep the rows of `{role}`",
            [f"{directory}: {error.strerror or error}; set CKPTRAIN_CACHE to keep them elsewhere"],
        ) from error
    return path


@contextlib.contextmanager
def _temporary(directory: Path) -> Iterator[tuple[IO[bytes], Path]]:
    descriptor, name = tempfile.mkstemp(prefix=".writing-", dir=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file, Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _write(file: IO[bytes], rows: Iterable[Mapping[str, Any]], role: str) -> str:
    """Write the rows, and return the SHA-256 of what was written."""
    sha256 = hashlib.sha256()
    problems: list[str] = []
    number = 0
    for number, row in enumerate(rows, start=1):
        try:
            line = _line(row)
        except (TypeError, ValueError, RecursionError) as error:
            problems.append(f"row {number}: {error}")
            if len(problems) > _MOST_PROBLEMS:
                break
            continue
        sha256.update(line)
        file.write(line)
    if not number:
        problems.append("expected at least one row, found none")
    if problems:
        raise DataError(f"the rows of `{role}` cannot be used", shorten(problems))
    return sha256.hexdigest()


def _line(row: object) -> bytes:
    """Return a row as a line.

    Raises:
        TypeError, ValueError, RecursionError: it is none, and why.
    """
    if not isinstance(row, Mapping):
        raise TypeError(f"expected a mapping, found {type(row).__name__}")
    return f"{json.dumps(dict(row), ensure_ascii=False, allow_nan=False)}\n".encode()
