"""The checkpoints of one run: found by a scan, committed by a rename, never half there.

A save goes: `stage` a hidden directory; write and sync every file in it; `commit`, which writes the manifest, syncs it
and every directory, renames the whole to its final name, and syncs the parent. A crash before the rename leaves a
hidden directory, which `clean_staging` removes; a crash after it leaves a complete checkpoint. There is no tracker file
that could say otherwise: the latest checkpoint is the highest step that the scan finds whole.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import attrs
import orjson

from ckptrain.checkpoint.integrity import (
    CommittedCheckpoint,
    fsync_directory,
    fsync_file,
    open_checkpoint,
    verify_files,
)
from ckptrain.checkpoint.manifest import MANIFEST_NAME, Manifest, WrittenByNewer
from ckptrain.checkpoint.object_files import CREDENTIALS, STORE_FAILED, ObjectPath
from ckptrain.checkpoint.reading import reading, unread
from ckptrain.checkpoint.retention import Retention, judge
from ckptrain.errors import CheckpointDamaged, CkptrainError, SaveFailed
from ckptrain.lifecycle.facts import DamageFacts
from ckptrain.lifecycle.journal import read_journal

CHECKPOINTS = "checkpoints"
QUARANTINE = "quarantine"
JOURNAL = "journal.jsonl"
STAGING_PREFIX = ".staging-"
REMOVING_PREFIX = ".removing-"

type Staging = Path | ObjectPath
"""Where a save is written before it is committed."""

_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,17})", re.ASCII)
_HINTS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EACCES: "make the run directory writable",
    errno.EPERM: "make the run directory writable",
    errno.EROFS: "mount the file system writable, or use a --run-dir on another",
    STORE_FAILED: f"see that the store can be reached, and who it takes you for ({CREDENTIALS})",
}


@attrs.frozen(kw_only=True)
class DamagedCheckpoint:
    """Something under a checkpoint's final name that is not a whole checkpoint."""

    path: Path
    step: int
    problems: tuple[str, ...]

    def facts(self) -> DamageFacts:
        """Return what a start is decided from."""
        return DamageFacts(name=self.path.name, step=self.step, problems=self.problems)


def checkpoint_name(step: int) -> str:
    """Return the directory name of a step: eight digits, more where they are needed."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a directory name stands for, or None where it is not a checkpoint's."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


@contextmanager
def save_failures(path: Staging, doing: str = "writing") -> Iterator[None]:
    """Turn an OSError raised while a checkpoint is written at or below `path` into a SaveFailed that explains it.

    Raises:
        SaveFailed: says what failed, where, what is untouched, and what to do.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        where = error.filename if isinstance(error.filename, str) else path
        hint = _HINTS.get(error.errno or 0, "see that the run directory is there and can be written to")
        raise SaveFailed(f"{reason} while {doing} {where}; {_untouched(path)}; {hint}, and run it again") from error


class CheckpointStore:
    """What lies in RUN/checkpoints and RUN/quarantine; the constructor touches no disk."""

    on_disk = True
    """Whether they take room on the disk of the run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.directory = run_dir / CHECKPOINTS
        self.quarantine_directory = run_dir / QUARANTINE

    @functools.cached_property
    def _run_id(self) -> str | None:
        """Whose checkpoints these should be, as the journal's last start has it; None where it does not say."""
        plans = [entry for entry in read_journal(self.run_dir / JOURNAL) if entry.get("event") == "plan"]
        return plans[-1].get("run_id") if plans else None

    def scan(self) -> list[CommittedCheckpoint | DamagedCheckpoint]:
        """Return everything under a checkpoint's final name, by step; nothing else in the directory counts.

        Raises:
            WrittenByNewer: a newer ckptrain wrote here: going on from an older step would throw its work away.
            CkptrainError: the disk does not let it be read.
        """
        found: list[CommittedCheckpoint | DamagedCheckpoint] = []
        for path in _entries(self.directory):
            step = step_of(path.name)
            if step is None:
                continue
            seen = _look_at(path, step, self._run_id)
            if seen is not None:
                found.append(seen)
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def committed(self) -> list[CommittedCheckpoint]:
        """Return the whole checkpoints, by step."""
        return [checkpoint for checkpoint in self.scan() if isinstance(checkpoint, CommittedCheckpoint)]

    def damaged(self) -> list[DamagedCheckpoint]:
        """Return the damaged ones, by step."""
        return [checkpoint for checkpoint in self.scan() if isinstance(checkpoint, DamagedCheckpoint)]

    def newest(self) -> CommittedCheckpoint | None:
        """Return the whole checkpoint of the highest step."""
        return max(self.committed(), key=lambda checkpoint: checkpoint.step, default=None)

    def find(self, step: int) -> CommittedCheckpoint | None:
        """Return the whole checkpoint of `step`."""
        return next((checkpoint for checkpoint in self.committed() if checkpoint.step == step), None)

    def stage(self, step: int) -> Staging:
        """Make an empty hidden directory to write the checkpoint of `step` into.

        Raises:
            SaveFailed: it cannot be made.
        """
        staging = self.directory / f"{STAGING_PREFIX}{checkpoint_name(step)}-{uuid.uuid4().hex[:8]}"
        with save_failures(staging):
            staging.mkdir(parents=True)
        return staging

    def commit(self, staging: Staging, manifest: Manifest) -> CommittedCheckpoint:
        """Make what was staged a checkpoint; every file but the manifest must be written and synced already.

        Raises:
            SaveFailed: it could not be completed, or there is one of that step. The staging directory is left.
        """
        assert isinstance(staging, Path)
        final = self.directory / checkpoint_name(manifest.step)
        with save_failures(staging):
            if os.path.lexists(final):
                raise SaveFailed(f"{final} is there already; a checkpoint is never overwritten")
            _write_new(staging / MANIFEST_NAME, manifest.to_json())
            try:
                open_checkpoint(staging)
            except CheckpointDamaged as error:
                raise SaveFailed(
                    f"what was written in {staging} is not complete: {'; '.join(error.problems)};"
                    f" {_untouched(staging)}; if several hosts write, the run directory must be on a disk they share"
                ) from error
            for directory, _, _ in os.walk(staging, topdown=False):
                fsync_directory(Path(directory))
            staging.rename(final)
            fsync_directory(self.directory)
        return CommittedCheckpoint(path=final, manifest=manifest)

    def discard(self, staging: Staging) -> None:
        """Remove a staging directory whose save was given up; what cannot be removed is left to `clean_staging`."""
        if not isinstance(staging, Path) or not staging.name.startswith(STAGING_PREFIX):
            raise ValueError(f"{staging} is not a staging directory")
        shutil.rmtree(staging, ignore_errors=True)

    def clean_staging(self) -> list[Path]:
        """Remove what saves and removals that were cut short have left; return what was there.

        To be called at a start only, when no save of this run can be under way.
        """
        left = [path for path in _entries(self.directory) if path.name.startswith((STAGING_PREFIX, REMOVING_PREFIX))]
        for path in left:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return left

    def quarantine(self, path: Path, problems: Sequence[str]) -> Path:
        """Move a damaged checkpoint out of the way, with a problems.json beside its files; nothing is deleted.

        Raises:
            SaveFailed: it cannot be moved.
        """
        with save_failures(path, "quarantining"):
            self.quarantine_directory.mkdir(parents=True, exist_ok=True)
            target = _unused(self.quarantine_directory, path.name)
            if path.is_dir() and not path.is_symlink():
                path.rename(target)
            else:  # a file or a link cannot hold the problems.json, so it gets a directory around it
                target.mkdir()
                path.rename(target / path.name)
            record = {"moved_from": str(path), "problems": list(problems)}
            _write_new(_unused(target, "problems.json"), orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n")
            fsync_directory(target)
            fsync_directory(self.quarantine_directory)
            fsync_directory(path.parent)
        return target

    def quarantined(self) -> list[str]:
        """Return the names of what was set aside."""
        return [path.name for path in _entries(self.quarantine_directory)]

    def is_read(self, checkpoint: CommittedCheckpoint) -> bool:
        """Tell whether a process reads a checkpoint, so that it stays."""
        with unread(checkpoint.path) as is_free:
            return not is_free

    def reading(self, checkpoint: CommittedCheckpoint) -> AbstractContextManager[None]:
        """Keep a checkpoint from being removed while it is read.

        Raises:
            CheckpointNotFound: it was removed after it had been opened.
        """
        return reading(checkpoint)

    def problems(self, checkpoint: CommittedCheckpoint) -> list[str]:
        """Read a checkpoint in full, and return what differs from its manifest."""
        return verify_files(checkpoint)

    def here(self, checkpoint: CommittedCheckpoint) -> CommittedCheckpoint:
        """Return a checkpoint with its files where this machine can read them."""
        return checkpoint

    def placed(self, checkpoint: CommittedCheckpoint) -> CommittedCheckpoint:
        """Return a checkpoint with the path that `here` gives it, without seeing to it that it is there."""
        return checkpoint

    def forget_copies_but(self, name: str) -> None:
        """Remove what was fetched of other checkpoints; where they lie on this disk, nothing was."""

    def prune(self, retention: Retention, in_use: Collection[Path] = ()) -> list[Path]:
        """Remove the whole checkpoints that nothing keeps, but those that someone reads; return what is gone.

        Each is renamed to a hidden name before its files go, so that a crash in between leaves no half of a checkpoint
        under a final name. Damaged ones are not touched. Several processes may prune at once.

        Raises:
            SaveFailed: one cannot be removed.
        """
        verdicts = judge(self.committed(), retention, in_use)
        gone = [verdict.checkpoint.path for verdict in verdicts if not verdict.kept]
        return [path for path in gone if self._remove(path)]

    def _remove(self, path: Path) -> bool:
        """Remove a checkpoint, unless someone reads it or removes it already."""
        hidden = self.directory / f"{REMOVING_PREFIX}{path.name}-{uuid.uuid4().hex[:8]}"
        with unread(path) as is_free, save_failures(path, "removing"):
            if not is_free:
                return False
            try:
                path.rename(hidden)
            except FileNotFoundError:  # another process was faster
                return False
            fsync_directory(self.directory)
        shutil.rmtree(hidden, ignore_errors=True)  # a file still open on NFS stays; the next start cleans it up
        return True


def _look_at(path: Path, step: int, run_id: str | None) -> CommittedCheckpoint | DamagedCheckpoint | None:
    """Return what is under a checkpoint's final name; None where another process has pruned it since it was listed."""
    try:
        checkpoint = open_checkpoint(path)
    except WrittenByNewer:
        raise
    except CkptrainError as error:
        if not os.path.lexists(path):
            return None
        if isinstance(error, CheckpointDamaged):
            return DamagedCheckpoint(path=path, step=step, problems=error.problems)
        raise
    problem = identity_problem(checkpoint, step, run_id)
    return checkpoint if problem is None else DamagedCheckpoint(path=path, step=step, problems=(problem,))


def identity_problem(checkpoint: CommittedCheckpoint, step: int, run_id: str | None) -> str | None:
    """Say why a whole checkpoint is not the one that belongs under the name of `step` in the run `run_id`."""
    found = checkpoint.manifest.run_id
    if checkpoint.step != step:
        return f"its manifest is that of step {checkpoint.step}: it was renamed"
    if run_id is not None and found != run_id:
        return f"it is of another run: its run_id is {found}, that of the run here is {run_id}"
    return None


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CkptrainError(f"cannot read {directory}: {error.strerror}; make it readable") from error


def _write_new(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
    fsync_file(path)


def _unused(directory: Path, name: str) -> Path:
    """Return a path in `directory` that nothing has: NAME, NAME-2, NAME-3, ..."""
    path, number = directory / name, 1
    while os.path.lexists(path):
        number += 1
        path = directory / f"{name}-{number}"
    return path


def _untouched(path: Staging) -> str:
    """Say what a failure at `path`, somewhere below RUN/checkpoints, has left as it was."""
    if not isinstance(path, Path):  # a store that has just failed is not asked
        return "what was saved before is untouched"
    run_dir = next((parent.parent for parent in path.parents if parent.name == CHECKPOINTS), None)
    try:
        committed = [] if run_dir is None else CheckpointStore(run_dir).committed()
    except CkptrainError:
        return "what was saved before is untouched"
    # A save that fails after its rename is complete already: it is not the one before.
    before = [checkpoint.path.name for checkpoint in committed if checkpoint.path.name not in str(path)]
    return f"the previous checkpoint {before[-1]} is untouched" if before else "there is no other checkpoint"
