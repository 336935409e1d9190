"""What rows does a file have? Read one after the other, whatever its kind, in little memory.

The kind is told by the suffix, before that of a compression; a file without a known suffix has a JSON object a line. A
row is told by its place: `file:line` in JSON lines, `file:row N` elsewhere, counted from 1 and without a header. Arrow
is imported for the files that need it, so that a plan reads JSON at once.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import attrs

from ckptrain.data.records import DamagedFile, Malformed, Problem, unreadable
from ckptrain.data.text_files import Rows, json_array, json_lines, separated_values
from ckptrain.errors import DataError

_ARROW = (".parquet", ".arrow")
_TEXT: dict[str, Callable[[IO[bytes], int, int | None], Rows]] = {
    ".jsonl": json_lines,
    ".json": json_array,
    ".csv": partial(separated_values, separator=","),
    ".tsv": partial(separated_values, separator="\t"),
}
_COMPRESSIONS = {".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ", ".zst": b"\x28\xb5\x2f\xfd"}
_NOT_TEXT = {**_COMPRESSIONS, ".parquet": b"PAR1", ".arrow": b"ARROW1", ".zip": b"PK\x03\x04"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# White space that may precede the first bracket of a JSON file.
_BEGINNING = 4096


@attrs.frozen(kw_only=True)
class Row:
    """One row as plain Python values, and where it stands."""

    where: str
    data: dict[str, Any]


def read_rows(path: Path, start: int = 0, stop: int | None = None) -> Iterator[Row | Problem]:
    """Yield the rows from number `start` (the first is 0) up to `stop`; one that is no object is a Problem.

    Raises:
        DataError: the file cannot be read, or is damaged so that its other rows are lost.
    """
    with _told(path):
        for place, found in _rows(path, start, stop):
            where = f"{path}:{place}"
            if isinstance(found, Malformed):
                yield Problem(where=where, text=str(found))
            else:
                yield Row(where=where, data=found)


def count_rows(path: Path) -> int:
    """Return how many rows a file has; text is read to its end for it.

    Raises:
        DataError: as in `read_rows`.
    """
    if (known := known_rows(path)) is not None:
        return known
    with _told(path):
        kind, compression = _kind(path)
        if kind != ".jsonl":
            return sum(1 for _ in _rows(path, 0, None))
        with _open(path, compression) as file:
            return sum(1 for line in file if line.strip())


def known_rows(path: Path) -> int | None:
    """Return how many rows a Parquet or Arrow file says it has; None for text, which would have to be read.

    Raises:
        DataError: the file cannot be read or is damaged.
    """
    with _told(path):
        kind, _ = _kind(path)
        if kind not in _ARROW:
            return None
        from ckptrain.data import arrow_files

        return arrow_files.count_parquet(path) if kind == ".parquet" else arrow_files.count_arrow(path)


def _rows(path: Path, start: int, stop: int | None) -> Rows:
    kind, compression = _kind(path)
    if kind in _ARROW:
        from ckptrain.data import arrow_files

        read = arrow_files.parquet_rows if kind == ".parquet" else arrow_files.arrow_rows
        yield from read(path, start, stop)
    else:
        with _open(path, compression) as file:
            yield from _TEXT[kind](file, start, stop)


def _kind(path: Path) -> tuple[str, str]:
    """Return the suffix that says how a file is read, and that of its compression or nothing.

    Raises:
        DataError: the bytes of the file are not what its name says.
    """
    name = path.name.lower()
    compression = next((suffix for suffix in _COMPRESSIONS if name.endswith(suffix)), "")
    suffix = Path(name.removesuffix(compression)).suffix
    with path.open("rb") as file:
        begin = file.read(8)
    if suffix in _ARROW:
        if compression:
            raise _unusable(path, f"a {suffix} file is compressed inside: unpack it, and name it {suffix}")
        return suffix, ""
    found = next((kind for kind, magic in _NOT_TEXT.items() if begin.startswith(magic)), compression)
    if found != compression:
        raise _unusable(path, f"its name is that of text, but it begins as a {found} file does: name it so")
    if suffix == ".json":
        with _open(path, compression) as opened:
            first = opened.read(_BEGINNING).removeprefix(_BYTE_ORDER_MARK).lstrip()[:1]
        return (".json" if first == b"[" else ".jsonl"), compression
    return (suffix if suffix in _TEXT else ".jsonl"), compression


def _open(path: Path, compression: str) -> IO[bytes]:
    """Open a file to read what was packed into it."""
    if compression == ".zst":
        import pyarrow as pa

        return cast("IO[bytes]", io.BufferedReader(pa.input_stream(str(path), compression="zstd")))
    unpackers: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast("IO[bytes]", unpackers[compression](path)) if compression else path.open("rb")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn what is raised over a file into a DataError that names it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise unreadable(path, error) from error
        raise _unusable(path, f"it is damaged or cut short: {error}") from error
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise _unusable(path, f"it is damaged or cut short: {error}") from error
    except UnicodeDecodeError as error:
        raise _unusable(path, f"it is not UTF-8: {error.reason}") from error
    except DamagedFile as error:
        raise _unusable(path, str(error)) from error


def _unusable(path: Path, reason: str) -> DataError:
    return DataError(f"cannot read the data file {path}", [reason])
