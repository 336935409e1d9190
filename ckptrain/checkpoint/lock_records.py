"""Where do the records lie that say who holds a run? RUN/.lock-N, as files or as objects of a store."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Protocol

import attrs

from ckptrain.checkpoint.object_files import ObjectPath
from ckptrain.checkpoint.working_copy import store_url

LOCK = ".lock"

_NAME = re.compile(r"\.lock-([1-9]\d*)", re.ASCII)


class Records(Protocol):
    """The records of one run; all of them raise OSError where they cannot be read or written."""

    under_kernel: bool
    """Whether a lock of the kernel on RUN/.lock may speak for the run."""

    def numbers(self) -> list[int]:
        """Return the numbers that are taken."""

    def read(self, number: int) -> bytes:
        """Return a record; empty where it has been removed."""

    def create(self, number: int, data: bytes) -> bool:
        """Write a record under a number; false where another run has it."""

    def rewrite(self, number: int, token: str, data: bytes) -> None:
        """Write a record over the one before, if that is still there and of the same holder."""

    def remove(self, number: int) -> None:
        """Remove a record, if it is there."""


def records_of(run_dir: Path) -> Records:
    """Return the records of a run: in its directory, or in the store that this is a working copy of."""
    url = store_url(run_dir)
    return FileRecords(run_dir) if url is None else ObjectRecords(url)


@attrs.frozen
class FileRecords:
    """Records as files."""

    run_dir: Path
    under_kernel = True

    def numbers(self) -> list[int]:
        """Return the numbers that are taken."""
        try:
            return _numbers([path.name for path in self.run_dir.iterdir()])
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, number: int) -> bytes:
        """Return a record; empty where it was removed after it was listed."""
        try:
            return self._path(number).read_bytes()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            return b""

    def create(self, number: int, data: bytes) -> bool:
        """Write a record under a number; false where another run has it."""
        path = self._path(number)
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            return False
        try:
            path.write_bytes(data)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return True

    def rewrite(self, number: int, token: str, data: bytes) -> None:
        """Write a record over the one before, if that is still there and of the same holder.

        The file is opened and closed each time: on NFS that is what brings it to the server, and to those who open it
        next.
        """
        with self._path(number).open("r+b", buffering=0) as file:
            if token.encode() in file.read():
                file.seek(0)
                file.write(data)

    def remove(self, number: int) -> None:
        """Remove a record, if it is there."""
        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.run_dir / f"{LOCK}-{number}"


@attrs.frozen
class ObjectRecords:
    """Records as objects; that a number is taken once rests on the store's conditional requests."""

    url: ObjectPath
    under_kernel = False

    def numbers(self) -> list[int]:
        """Return the numbers that are taken."""
        return _numbers(list(self.url.list_below(LOCK)))

    def read(self, number: int) -> bytes:
        """Return a record; empty where it was removed after it was listed."""
        return self._object(number).read() or b""

    def create(self, number: int, data: bytes) -> bool:
        """Write a record under a number; false where another run has it."""
        place = self._object(number)
        # A store without conditional requests writes over it; then the last one has it, and the others find out here.
        return place.create(data) and place.read() == data

    def rewrite(self, number: int, token: str, data: bytes) -> None:
        """Write a record over the one before, if that is still there and of the same holder."""
        if token.encode() in self.read(number):
            self._object(number).write(data)

    def remove(self, number: int) -> None:
        """Remove a record, if it is there."""
        self._object(number).remove()

    def _object(self, number: int) -> ObjectPath:
        return self.url / f"{LOCK}-{number}"


def _numbers(names: list[str]) -> list[int]:
    return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]
