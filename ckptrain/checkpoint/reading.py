"""Who reads a checkpoint holds it, so that it is not removed from under them.

A reader holds a shared lock on the checkpoint's manifest, and whoever removes one takes an exclusive lock first, or
leaves it. The kernel lets go of a lock when its process dies, however it dies. On a file system without such locks
nothing is held, and a reader whose files go finds that out as it reads.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.manifest import MANIFEST_NAME
from ckptrain.errors import CheckpointNotFound


@contextmanager
def reading(checkpoint: CommittedCheckpoint) -> Iterator[None]:
    """Keep a checkpoint from being removed while it is read; any number of processes may.

    Raises:
        CheckpointNotFound: it was removed after it had been opened.
    """
    with _opened(checkpoint.path, os.O_RDONLY) as manifest:
        _lock(manifest, fcntl.LOCK_SH)
        if not _is_at(checkpoint.path, manifest):
            raise CheckpointNotFound(
                f"{checkpoint.path} was removed while it was being opened, because newer ones are kept in its place;"
                " name one of those, or keep more with checkpoint.keep_last"
            )
        yield


@contextmanager
def unread(path: Path) -> Iterator[bool]:
    """Give whether a checkpoint is there and nobody reads it; if so, nobody begins to until this ends."""
    # NFS gives an exclusive lock only to those who may write to the file.
    with _opened(path, os.O_RDWR, os.O_RDONLY) as manifest:
        yield _lock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB) and _is_at(path, manifest)


@contextmanager
def _opened(path: Path, *modes: int) -> Iterator[int | None]:
    """Open a checkpoint's manifest in the first mode that is allowed; None where none is."""
    descriptor = None
    for mode in modes:
        with suppress(OSError):
            descriptor = os.open(path / MANIFEST_NAME, mode | os.O_CLOEXEC)
            break
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing does not, where a child was forked meanwhile
            os.close(descriptor)


def _lock(manifest: int | None, operation: int) -> bool:
    """Lock a manifest; false where another's lock is in the way. Where there are no locks, nothing is."""
    if manifest is None:
        return True
    try:
        fcntl.flock(manifest, operation)
    except BlockingIOError:
        return False
    except OSError:  # the file system has none
        return True
    return True


def _is_at(path: Path, manifest: int | None) -> bool:
    """Tell whether the manifest that was opened is still that of the checkpoint under this name."""
    try:
        there = (path / MANIFEST_NAME).stat()
    except OSError:
        return False
    return manifest is None or os.path.samestat(there, os.fstat(manifest))
