"""What happened, one JSON object a line, readable after any crash."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from ckptrain.errors import CkptrainError

_LARGEST_JSON_INTEGER = 2**63 - 1


class Journal:
    """Append-only JSONL: `time` (UTC, milliseconds), `event`, then the facts of the event in the order given.

    A line is one write to a file opened with O_APPEND, synced before `record` returns (until `stop_waiting`), so what
    the journal says has happened is on disk before the run goes on. A crash can tear the last line only; the next line
    then starts on a line of its own, and `read_journal` passes over the torn one.
    """

    def __init__(self, path: Path | None) -> None:
        """Take the file's path, or None for a journal that writes nothing: every rank but 0 has one of those."""
        self.path = path
        self._on_failure: Callable[[CkptrainError], object] | None = None

    def stop_waiting(self, on_failure: Callable[[CkptrainError], object]) -> None:
        """From now on write lines without waiting for the disk, and tell of a failure instead of raising it.

        For a run that trains: a disk that is busy with a checkpoint must not stop it, nor one that is full. A line
        outlives the process as before; those of the last seconds may not outlive a power failure.
        """
        self._on_failure = on_failure

    def record(self, event: str, **facts: object) -> None:
        """Append one line and wait until it is on disk.

        Facts may be anything: what JSON does not have is written as text, and NaN and the infinities as "nan", "inf"
        and "-inf", because orjson would write null for them and lose the difference.

        Raises:
            CkptrainError: the line could not be written, and nobody else is told of that.
        """
        if clash := facts.keys() & {"time"}:
            raise TypeError(f"the journal sets {', '.join(clash)} itself")
        if self.path is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = orjson.dumps(_plain({"time": now, "event": event, **facts})) + b"\n"
        try:
            _append(self.path, line, wait=self._on_failure is None)
        except OSError as error:
            failure = CkptrainError(
                f"cannot write the journal {self.path}: {error.strerror}; make the run directory writable, with space"
                " left, and start again"
            )
            if self._on_failure is None:
                raise failure from error
            self._on_failure(failure)


class NullJournal(Journal):
    """The journal of a rank that keeps none."""

    def __init__(self) -> None:
        super().__init__(None)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the journal's entries, oldest first; a run that has not written any has none."""
    return read_lines(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file that has one a line; where there is no file, there are none.

    A line that is not a JSON object was torn by a crash in the middle of its write: what it was to say had not been
    confirmed to anyone, so it is passed over.
    """
    try:
        return parse_lines(path.read_bytes())
    except FileNotFoundError:
        return []


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """Return the objects of lines of JSON; one that is torn is passed over."""
    entries = []
    for line in data.split(b"\n"):
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def _append(path: Path, line: bytes, *, wait: bool) -> None:
    created = not path.exists()
    if created:
        path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # end the line that a crash, or a full disk, left torn
        # A short write is a torn line as well: the rest goes after it, or the disk is full and this raises.
        while line:
            line = line[os.write(descriptor, line) :]
        if wait:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if created:
        _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Make the journal's name survive a power failure as its lines do."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _plain(value: object) -> object:
    """Return `value` in JSON's own types, as text where JSON has none for it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) <= _LARGEST_JSON_INTEGER else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {_text(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _text(value)


def _text(value: object) -> str:
    """Return `value` as text that UTF-8 can hold: a file name may carry bytes that are not."""
    return str(value).encode("utf-8", "backslashreplace").decode()
