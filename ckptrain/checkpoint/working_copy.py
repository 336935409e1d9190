"""Where on this machine is a run that lives in an object store? A directory that knows its URL, used as the run's.

What a run appends to (journal, metrics) cannot be appended to in an object store: it is written in the working copy,
below CKPTRAIN_CACHE, and put into the store with each commit and at the end. Who only looks at a run gets a copy of his
own, which goes with the process, so that nobody disturbs a run at work on the same machine.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from ckptrain.checkpoint.object_files import CREDENTIALS, ObjectPath, Stored
from ckptrain.config.base import is_url
from ckptrain.config.cache import cache_directory
from ckptrain.errors import CkptrainError, ConfigError

MARK = ".remote.json"
"""Says of which URL a directory is the working copy."""

_CHECKPOINTS = "checkpoints"
_APPENDED = ("journal.jsonl", "metrics.jsonl")
_KEPT = (".lock-", "tensorboard/")
"""What is copied besides files without a dot that lie in the run directory itself."""
_OF_THIS_MACHINE = ("stop",)
"""What is not copied: a request to stop is for one start, and would end every later one that finds it."""
_LARGEST = 1 << 30
"""A larger file, such as a profile, is not copied."""

_opened: dict[Path, str] = {}
"""The copies that this process has opened, with their URLs."""


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return where on this machine a path or a URL is worked on: of a URL, in the working copy of its run.

    Nothing is read from the store.

    Raises:
        CkptrainError: the URL cannot be used, or the working copy not be written.
    """
    text = os.fspath(path)
    if not is_url(text):
        if isinstance(path, Path) and re.match(r"[a-z][a-z0-9+.-]+:/[^/]", text):
            raise ConfigError(f"cannot use {text}", ["a Path cannot hold a URL: give it as a string"])
        return Path(text)
    place = ObjectPath.parse(text)
    run, _, rest = place.url.partition(f"/{_CHECKPOINTS}/")
    if not rest and run.endswith(f"/{_CHECKPOINTS}"):
        run, rest = run.removesuffix(f"/{_CHECKPOINTS}"), ""
        return _copy(run) / _CHECKPOINTS
    return _copy(run) / _CHECKPOINTS / rest if rest else _copy(run)


def _copy(url: str) -> Path:
    key = hashlib.sha256(url.encode()).hexdigest()[:16]
    return _open(cache_directory().absolute() / "remote" / key / url.rpartition("/")[2], url)


def _open(directory: Path, url: str) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        mark = directory / MARK
        if not mark.is_file():
            replacement = directory / f"{MARK}.{os.getpid()}"
            replacement.write_bytes(orjson.dumps({"url": url}))
            replacement.replace(mark)
    except OSError as error:
        raise CkptrainError(
            f"cannot make the working copy of {url} in {directory}: {error.strerror}; set CKPTRAIN_CACHE to keep it"
            " elsewhere"
        ) from error
    _opened[directory] = url
    return directory


def store_url(run_dir: Path) -> ObjectPath | None:
    """Return the URL of the run whose working copy a directory is; None for a run that lives in its directory."""
    try:
        url: str = orjson.loads((run_dir / MARK).read_bytes())["url"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    _opened.setdefault(run_dir, url)
    return ObjectPath(url)


def run_of(path: Path) -> Path | None:
    """Return the working copy that a path is in, or None."""
    return next((parent for parent in (path, *path.parents[:3]) if store_url(parent) is not None), None)


def as_given(text: str | Path) -> str:
    """Return a text with URLs in place of the working copies in it, as people know them."""
    told = str(text)
    for directory, url in _opened.items():
        told = told.replace(str(directory), url)
    return told


def all_as_given[T](value: T) -> T:
    """Return a value in JSON's types with URLs in place of working copies in all its texts."""
    told: Any = value
    if isinstance(value, str | Path):
        told = as_given(value) if _opened else value
    elif isinstance(value, Mapping):
        told = {key: all_as_given(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        told = [all_as_given(item) for item in value]
    given: T = told
    return given


def to_look_at(run_dir: Path) -> Path:
    """Return a directory to read a run from, changing nothing of it: itself, or a copy of what the store has now.

    The copy holds the small files; it goes when this process ends.

    Raises:
        CkptrainError: the store cannot be read.
    """
    url = store_url(run_dir)
    if url is None:
        return run_dir
    directory = look_directory(url.url)
    bring(directory)
    return directory


@functools.cache
def look_directory(url: str) -> Path:
    """Return this process's own copy of a run to look at, empty at first."""
    home = cache_directory().absolute() / "remote"
    home.mkdir(parents=True, exist_ok=True)
    holder, owner = Path(tempfile.mkdtemp(prefix="look-", dir=home)), os.getpid()

    def forget() -> None:
        if os.getpid() == owner:
            shutil.rmtree(holder, ignore_errors=True)

    atexit.register(forget)
    return _open(holder / url.rpartition("/")[2], url)


def bring(run_dir: Path) -> None:
    """Make the small files of a working copy those of the store; nothing for a run that lives in its directory.

    What has been appended here since the store had it, before a kill, stays.

    Raises:
        CkptrainError: the store cannot be read.
    """
    url = store_url(run_dir)
    if url is None:
        return
    try:
        there = {name: stored for name, stored in url.list_below().items() if _is_small(name, stored.num_bytes)}
        for path in _small_files(run_dir):
            _published.pop(run_dir / path, None)
            if path not in there:
                (run_dir / path).unlink()
        for name in there:
            _bring_file(url / name, run_dir / name)
        _show_life(run_dir, there)
    except OSError as error:
        raise unreachable(error, url.url) from error


def _bring_file(source: ObjectPath, target: Path) -> None:
    data = source.read() or b""
    if target.name in _APPENDED and target.is_file() and target.read_bytes().startswith(data):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    replacement = target.with_name(f".{target.name}.new")
    replacement.write_bytes(data)
    replacement.replace(target)


def _show_life(run_dir: Path, there: dict[str, Stored]) -> None:
    """Date the journal by the newest sign of life in the store: between commits only the heartbeat is written there."""
    signs = [stored.changed for name, stored in there.items() if name in _APPENDED or name.startswith(".lock-")]
    newest = max((sign.timestamp() for sign in signs if sign is not None), default=None)
    journal = run_dir / _APPENDED[0]
    if newest is not None and journal.is_file():
        os.utime(journal, (newest, newest))


def publish(run_dir: Path) -> None:
    """Put the small files of a working copy into the store; nothing for a run that lives in its directory.

    Raises:
        OSError: the store does not take one, or one cannot be read.
    """
    url = store_url(run_dir)
    if url is None:
        return
    for name in _small_files(run_dir):
        path = run_dir / name
        status = path.stat()
        state = (status.st_mtime_ns, status.st_size)
        if _published.get(path) != state:
            (url / name).write(path.read_bytes())
            _published[path] = state


_published: dict[Path, tuple[int, int]] = {}
"""Modification time and size of what this process has put into a store."""


def _small_files(run_dir: Path) -> list[str]:
    paths = [*run_dir.glob("*"), *run_dir.glob("tensorboard/**/*")]
    found = [(path.relative_to(run_dir).as_posix(), path) for path in paths if path.is_file()]
    return sorted(name for name, path in found if _is_small(name, path.stat().st_size) and not name.startswith("."))


def _is_small(name: str, num_bytes: int) -> bool:
    at_the_top = "/" not in name and not name.startswith(".") and name not in _OF_THIS_MACHINE
    return num_bytes <= _LARGEST and (at_the_top or name.startswith(_KEPT))


def unreachable(error: OSError, url: str) -> CkptrainError:
    """Return the error for a store that cannot be read, which says nothing about what is in it."""
    where = error.filename if isinstance(error.filename, str) else url
    return CkptrainError(
        f"cannot use {where}: {error.strerror or error}; this says nothing about what is in it;"
        f" see that the store can be reached, and who it takes you for ({CREDENTIALS}), and run it again"
    )
