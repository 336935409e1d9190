"""How does a state become a checkpoint? Written, read back and committed, one at a time, behind the training or not.

Both ways run the same code on the same host copies, so they write the same bytes; asynchronous only means that nobody
waits. Whatever a save needs of its processes goes over a process group of its own, because the training's collectives
go on meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import attrs
import torch.distributed as dist
from torch import Tensor

from ckptrain.checkpoint.integrity import CommittedCheckpoint, hash_file
from ckptrain.checkpoint.manifest import FileDigest, Manifest
from ckptrain.checkpoint.ranks import Group, gather_to_all, on_rank0, rank, together, world_size
from ckptrain.checkpoint.retention import Retention
from ckptrain.checkpoint.sharded import StoredTensor, save_tensors
from ckptrain.checkpoint.store import CheckpointStore, Staging, save_failures
from ckptrain.errors import CkptrainError, ClaimLost, SaveFailed

Describe = Callable[[Mapping[str, Mapping[str, StoredTensor]], Mapping[str, FileDigest]], Manifest]
"""Makes the manifest of (tensors by directory, files); called on rank 0, once everything is written."""


@attrs.frozen(kw_only=True)
class Content:
    """What this process gives to one checkpoint."""

    step: int
    parts: Mapping[str, Mapping[str, Tensor]]
    """By directory of the checkpoint: tensors in host memory, which nobody changes until the save has ended."""
    describe: Describe
    ready: Callable[[], object] = lambda: None
    """Waits until the tensors are filled, where a device still copies into them."""


@attrs.frozen(kw_only=True)
class Saved:
    """A checkpoint that is committed."""

    checkpoint: CommittedCheckpoint
    num_bytes: int
    seconds: float
    """From the beginning of the save, the copy to host memory excluded, until it was committed."""
    removed: tuple[Path, ...]
    """Older checkpoints that went after it."""
    prune_problem: str | None
    """Why an older one could not be removed, which does no harm to this one."""


@attrs.frozen(kw_only=True)
class NotSaved:
    """A save that failed; what was committed before is untouched."""

    step: int
    error: SaveFailed


type Outcome = Saved | NotSaved


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time; every process has one and they begin the same saves."""

    def __init__(
        self,
        store: CheckpointStore,
        retention: Retention,
        *,
        asynchronous: bool,
        may_commit: Callable[[], object] = lambda: None,
    ) -> None:
        """Open the connection between the processes; collective.

        Args:
            store: the run's checkpoints.
            retention: what is kept of them.
            asynchronous: return from `begin` at once; otherwise when the save has ended.
            may_commit: raises where this run has lost its directory; called on rank 0 just before a commit.
        """
        self._store = store
        self._retention = retention
        self._asynchronous = asynchronous
        self._may_commit = may_commit
        self._group: Group = dist.new_group(backend="gloo") if world_size() > 1 else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ckptrain-save")
        self._saving: Future[Outcome] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let a save that is under way come to its end, whatever ends the run."""
        self._thread.shutdown()
        if self._group is not None:
            with contextlib.suppress(Exception):  # a peer that died has broken it already
                dist.destroy_process_group(self._group)

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this process."""
        return self._saving is not None and not self._saving.done()

    def begin(self, content: Content) -> None:
        """Start a save; the one before must have been waited for.

        Raises:
            RuntimeError: a save is under way, whose host copies this one would share.
        """
        if self._saving is not None:
            raise RuntimeError(f"the save of step {content.step} was begun before the outcome of the one before it")
        self._saving = self._thread.submit(self._save, content)
        if not self._asynchronous:
            # What goes wrong is told by `ended`, as it is where nobody waits.
            self._saving.exception()

    def ended(self) -> Outcome | None:
        """Return how the last save ended, once; None while it is under way, or where there is nothing new.

        Raises:
            CkptrainError: it ended by something that the run cannot go on from, such as the loss of its directory.
        """
        return None if self._saving is None or self.is_busy else self.wait()

    def wait(self) -> Outcome | None:
        """Wait for the save that is under way, and return how it ended, once; all processes get the same kind.

        Raises:
            CkptrainError: as `ended`.
        """
        if self._saving is None:
            return None
        saving, self._saving = self._saving, None
        return saving.result()

    def _save(self, content: Content) -> Outcome:
        started = time.monotonic()
        content.ready()
        try:
            checkpoint = write_checkpoint(self._store, content, self._group, self._may_commit)
        except SaveFailed as error:
            return NotSaved(step=content.step, error=error)
        removed, problem = on_rank0(lambda: self._prune(checkpoint), self._group)
        return Saved(
            checkpoint=checkpoint,
            num_bytes=sum(digest.num_bytes for digest in checkpoint.manifest.files.values()),
            seconds=time.monotonic() - started,
            removed=removed,
            prune_problem=problem,
        )

    def _prune(self, newest: CommittedCheckpoint) -> tuple[tuple[Path, ...], str | None]:
        try:
            return tuple(self._store.prune(self._retention, in_use=[newest.path])), None
        except CkptrainError as error:
            return (), str(error)


def write_checkpoint(
    store: CheckpointStore, content: Content, group: Group = None, may_commit: Callable[[], object] = lambda: None
) -> CommittedCheckpoint:
    """Write, read back and commit one checkpoint; collective.

    Raises:
        SaveFailed: on every rank where it failed on any; what was committed before is untouched.
    """
    staging = on_rank0(lambda: store.stage(content.step), group)
    try:
        tensors: dict[str, Mapping[str, StoredTensor]] = {}
        own_files: dict[str, FileDigest] = {}
        for directory, state in content.parts.items():
            written = save_tensors(state, staging / directory, group)
            tensors[directory] = written.tensors
            own_files |= {f"{directory}/{name}": digest for name, digest in written.files.items()}
        together(lambda: _read_back(staging, own_files), group)
        # Barrier by the gather: rank 0 may commit only what every rank has written, synced and read back.
        files = {name: digest for part in gather_to_all(own_files, group) for name, digest in part.items()}
        return on_rank0(lambda: _commit(store, staging, content.describe(tensors, files), may_commit), group)
    except (SaveFailed, ClaimLost):
        on_rank0(lambda: store.discard(staging), group)
        raise


def _commit(
    store: CheckpointStore, staging: Staging, manifest: Manifest, may_commit: Callable[[], object]
) -> CommittedCheckpoint:
    may_commit()
    return store.commit(staging, manifest)


def _read_back(staging: Staging, files: Mapping[str, FileDigest]) -> None:
    """See that the file system or the store returns what it was given; a file system forgets its copies first."""
    with save_failures(staging, "reading back"):
        for name, expected in files.items():
            path = staging / name
            if isinstance(path, Path):
                _forget_cached(path)
                found = hash_file(path)
            else:
                found = path.digest()
            if found != expected:
                raise SaveFailed(
                    f"{path} reads back as other bytes on rank {rank()} ({found.num_bytes} of {expected.num_bytes},"
                    f" SHA-256 {found.sha256[:12]}... instead of {expected.sha256[:12]}...): the disk is not to be"
                    " trusted; nothing was committed"
                )


def _forget_cached(path: Path) -> None:
    if not hasattr(os, "posix_fadvise"):  # macOS has no such call
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
