"""A disk that fails at a chosen call: the calls of Python by which a directory is changed, counted and broken."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest


class FaultyDisk:
    """Counts the calls that change what is below `root`, and makes the one numbered `fail_at` fail with `error`.

    A file is opened, written, closed (where buffers meet a full disk) and synced; a directory is made, renamed and
    synced. With `lasting`, every later call fails too. Syncs are counted and not made: no test pulls the plug of the
    machine, and thousands of them take minutes.
    """

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self.error = errno.EIO
        self.lasting = False
        for module, name, path_of in (
            (os, "mkdir", os.fspath),
            (os, "rename", os.fspath),
            (os, "replace", os.fspath),
        ):
            patch.setattr(module, name, self._watched(name, getattr(module, name), path_of))
        patch.setattr(os, "fsync", self._watched("fsync", lambda _: None, _path_of_descriptor))
        opened = io.open

        def watched_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not isinstance(file, str | os.PathLike) or not self._is_below(os.fspath(file)) or mode in ("r", "rb"):
                return opened(file, mode, *args, **kwargs)
            self._call("open", os.fspath(file))
            return _WatchedFile(opened(file, mode, *args, **kwargs), os.fspath(file), self._call)

        patch.setattr(io, "open", watched_open)

    def fail(self, at: int | None, error: int, *, lasting: bool = False) -> None:
        """Count from here, and make a call fail; None makes none."""
        self.calls, self.fail_at, self.error, self.lasting = [], at, error, lasting

    def _is_below(self, path: Any) -> bool:
        return str(path).startswith(str(self.root))

    def _call(self, name: str, path: Any) -> None:
        self.calls.append(f"{name} {path}")
        number = len(self.calls) - 1
        if self.fail_at is not None and (number >= self.fail_at if self.lasting else number == self.fail_at):
            raise OSError(self.error, os.strerror(self.error), str(path))

    def _watched(self, name: str, call: Callable[..., Any], path_of: Callable[[Any], Any]) -> Callable[..., Any]:
        def watched(first: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_below(path := path_of(first)):
                self._call(name, path)
            return call(first, *args, **kwargs)

        return watched


class _WatchedFile:
    def __init__(self, file: Any, path: str, call: Callable[[str, Any], None]) -> None:
        self._file, self._path, self._call = file, path, call

    def write(self, data: Any) -> Any:
        self._call("write", self._path)
        return self._file.write(data)

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()
            self._call("close", self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _path_of_descriptor(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())
