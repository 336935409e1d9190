"""The checkpoints of a run in an object store: committed by their manifest, which is written last and only once.

There is no rename there. A save writes below checkpoints/step-N/data-1f2e3d4c, a name that no other has, so nobody
can change what another has committed; the manifest beside it, which names that part, makes it a checkpoint. It is
created only where there is none. What no manifest names is what an unfinished save has left. To remove one, the
manifest goes first.

A checkpoint is read by fetching it, compared with its digests on the way, into the working copy, where it is a
checkpoint like any other.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import attrs
import orjson

from ckptrain.checkpoint.dcp_metadata import metadata_problems
from ckptrain.checkpoint.integrity import CommittedCheckpoint, verify_files
from ckptrain.checkpoint.manifest import MANIFEST_NAME, FileDigest, Manifest, WrittenByNewer, parse_manifest
from ckptrain.checkpoint.object_files import ObjectPath, Stored, download
from ckptrain.checkpoint.store import (
    CHECKPOINTS,
    JOURNAL,
    QUARANTINE,
    CheckpointStore,
    DamagedCheckpoint,
    Staging,
    checkpoint_name,
    identity_problem,
    save_failures,
    step_of,
)
from ckptrain.checkpoint.working_copy import publish, store_url, unreachable
from ckptrain.errors import CheckpointDamaged, CheckpointNotFound, SaveFailed
from ckptrain.lifecycle.journal import parse_lines

_PART = re.compile(r"data-[0-9a-f]{8}", re.ASCII)
_FETCHING_PREFIX = ".fetching-"


def store_of(run_dir: Path) -> CheckpointStore:
    """Return where the checkpoints of a run lie: in its directory, or in the object store that this is a copy of."""
    url = store_url(run_dir)
    return CheckpointStore(run_dir) if url is None else RemoteStore(run_dir, url)


class RemoteStore(CheckpointStore):
    """What lies below RUN/checkpoints and RUN/quarantine of a URL; the constructor asks nobody."""

    on_disk = False

    def __init__(self, run_dir: Path, url: ObjectPath) -> None:
        super().__init__(run_dir)
        self._url = url
        self._checkpoints = url / CHECKPOINTS

    @functools.cached_property
    def _run_id(self) -> str | None:
        lines = parse_lines((self._url / JOURNAL).read() or b"")
        plans = [entry for entry in lines if entry.get("event") == "plan"]
        return plans[-1].get("run_id") if plans else None

    def scan(self) -> list[CommittedCheckpoint | DamagedCheckpoint]:
        """Return every checkpoint that has a manifest, by step; of the others nothing was ever committed."""
        try:
            steps = self._listed()
            found = [self._look_at(name, objects) for name, objects in steps.items() if MANIFEST_NAME in objects]
        except OSError as error:
            raise unreachable(error, str(self._url)) from error
        whole = [checkpoint for checkpoint in found if checkpoint is not None]
        return sorted(whole, key=lambda checkpoint: checkpoint.step)

    def stage(self, step: int) -> ObjectPath:
        """Return a name that no other save has; nothing is made there."""
        return self._checkpoints / checkpoint_name(step) / f"data-{uuid.uuid4().hex[:8]}"

    def commit(self, staging: Staging, manifest: Manifest) -> CommittedCheckpoint:
        """Make what was written a checkpoint, after what the run has written down so far is in the store as well."""
        assert isinstance(staging, ObjectPath)
        name = checkpoint_name(manifest.step)
        place = self._checkpoints / name / MANIFEST_NAME
        with save_failures(staging):
            publish(self.run_dir)
            if problems := _size_problems(manifest.files, staging.list_below()):
                raise SaveFailed(
                    f"what was written in {staging} is not complete: {'; '.join(problems)}; what was saved before is"
                    " untouched; if several hosts write, they must use the same store"
                )
            files = {f"{staging.name}/{path}": digest for path, digest in manifest.files.items()}
            # A store that does not know conditional requests would write over it, so it is looked for as well.
            if place.read() is not None or not place.create(attrs.evolve(manifest, files=files).to_json()):
                raise SaveFailed(f"{place} is there already; a checkpoint is never overwritten")
        return CommittedCheckpoint(path=self.directory / name, manifest=manifest)

    def discard(self, staging: Staging) -> None:
        """Remove what a save that was given up has written, as far as the store can be reached."""
        assert isinstance(staging, ObjectPath)
        try:
            staging.remove_below()
        except OSError:
            return  # left to `clean_staging`

    def clean_staging(self) -> list[Path]:
        """Remove what no manifest names, parts of uploads that were never completed, and copies of old checkpoints."""
        try:
            steps = self._listed()
            left: list[Path] = []
            for name, objects in steps.items():
                for part in sorted({path.partition("/")[0] for path in objects} - self._named_parts(name, objects)):
                    (self._checkpoints / name / part).remove_below()
                    left.append(self.directory / name / part)
            self._checkpoints.abort_uploads()
        except OSError as error:
            raise unreachable(error, str(self._url)) from error
        committed = {name for name, objects in steps.items() if MANIFEST_NAME in objects}
        self.forget_copies_but(max(committed, key=lambda name: step_of(name) or 0, default=""))
        return left

    def quarantine(self, path: Path, problems: Sequence[str]) -> Path:
        """Copy a damaged checkpoint aside within the store, with a problems.json, then remove it from its place."""
        source, number = self._checkpoints / path.name, 1
        with save_failures(source, "quarantining"):
            taken = set(self.quarantined())
            name = path.name
            while name in taken:
                number += 1
                name = f"{path.name}-{number}"
            target = self._url / QUARANTINE / name
            for item in source.list_below():
                (source / item).copy_to(target / item)
            record = {"moved_from": str(source), "problems": list(problems)}
            (target / "problems.json").write(orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n")
            (source / MANIFEST_NAME).remove()
            source.remove_below()
        return self.quarantine_directory / name

    def quarantined(self) -> list[str]:
        """Return the names of what was set aside."""
        return sorted({path.partition("/")[0] for path in (self._url / QUARANTINE).list_below()})

    def is_read(self, checkpoint: CommittedCheckpoint) -> bool:  # noqa: ARG002  # who reads one works on a copy of it
        """Return false: nobody holds anything in a store."""
        return False

    def reading(self, checkpoint: CommittedCheckpoint) -> AbstractContextManager[None]:  # noqa: ARG002
        """Hold nothing: `problems` works on a copy, and says where the checkpoint goes while it is made."""
        return contextlib.nullcontext()

    def problems(self, checkpoint: CommittedCheckpoint) -> list[str]:
        """Fetch a checkpoint, and return what differs from its manifest; where nothing does, it is at its path now.

        Raises:
            CheckpointNotFound: it has been removed.
            CkptrainError: the store cannot be read.
        """
        fetched = checkpoint.path.with_name(f"{_FETCHING_PREFIX}{checkpoint.path.name}-{uuid.uuid4().hex[:8]}")
        try:
            problems = self._fetch(checkpoint, fetched)
            if not problems:
                _put_in_place(fetched, checkpoint)
        except OSError as error:
            raise unreachable(error, str(self._url)) from error
        finally:
            shutil.rmtree(fetched, ignore_errors=True)
        return problems

    def here(self, checkpoint: CommittedCheckpoint) -> CommittedCheckpoint:
        """Return a checkpoint with its files on this machine.

        Raises:
            CheckpointDamaged: it is not what its manifest says.
        """
        copy = self.placed(checkpoint)
        if _is_intact(copy):
            return copy
        if problems := self.problems(copy):
            raise CheckpointDamaged(f"{self._checkpoints / copy.path.name} is damaged", problems)
        return copy

    def placed(self, checkpoint: CommittedCheckpoint) -> CommittedCheckpoint:
        """Return a checkpoint with its path in this working copy."""
        return attrs.evolve(checkpoint, path=self.directory / checkpoint.path.name)

    def _listed(self) -> dict[str, dict[str, Stored]]:
        """Return the objects below every name of a checkpoint, by what follows it."""
        steps: dict[str, dict[str, Stored]] = {}
        for path, stored in self._checkpoints.list_below().items():
            name, _, rest = path.partition("/")
            if step_of(name) is not None and rest:
                steps.setdefault(name, {})[rest] = stored
        return steps

    def _look_at(self, name: str, objects: Mapping[str, Stored]) -> CommittedCheckpoint | DamagedCheckpoint | None:
        """Judge a checkpoint by its manifest and the sizes of its objects; None where it has just been removed."""
        path, step = self.directory / name, step_of(name)
        assert step is not None
        data = (self._checkpoints / name / MANIFEST_NAME).read()
        if data is None:
            return None
        try:
            manifest, part = _parse(data, str(self._checkpoints / name / MANIFEST_NAME))
        except WrittenByNewer:
            raise
        except CheckpointDamaged as error:
            return DamagedCheckpoint(path=path, step=step, problems=error.problems)
        there = {item.removeprefix(f"{part}/"): found for item, found in objects.items() if item.startswith(f"{part}/")}
        checkpoint = CommittedCheckpoint(path=path, manifest=manifest)
        problems = _size_problems(manifest.files, there)
        problems += [f"{item} is not listed in the manifest" for item in there if item not in manifest.files]
        if not problems and (problem := identity_problem(checkpoint, step, self._run_id)):
            problems = [problem]
        return DamagedCheckpoint(path=path, step=step, problems=tuple(problems)) if problems else checkpoint

    def _named_parts(self, name: str, objects: Iterable[str]) -> set[str]:
        """Return what of a checkpoint stays: the manifest and the part that it names; all where it cannot be read."""
        if MANIFEST_NAME not in objects:
            return set()
        data = (self._checkpoints / name / MANIFEST_NAME).read()
        try:
            _, part = _parse(data or b"", name)
        except CheckpointDamaged:
            return {path.partition("/")[0] for path in objects}
        return {MANIFEST_NAME, part}

    def _fetch(self, checkpoint: CommittedCheckpoint, target: Path) -> list[str]:
        source = self._checkpoints / checkpoint.path.name
        data = (source / MANIFEST_NAME).read()
        if data is None:
            raise CheckpointNotFound(
                f"{source} was removed while it was being opened, because newer ones are kept in its place; name one of"
                " those, or keep more with checkpoint.keep_last"
            )
        manifest, part = _parse(data, str(source / MANIFEST_NAME))
        target.mkdir(parents=True)
        came = {name: _download(source / part / name, target / name) for name in manifest.files}
        (target / MANIFEST_NAME).write_bytes(manifest.to_json())
        if came == manifest.files:
            return metadata_problems(target, manifest)
        return verify_files(CommittedCheckpoint(path=target, manifest=manifest))

    def _remove(self, path: Path) -> bool:
        place = self._checkpoints / path.name
        with save_failures(place, "removing"):
            (place / MANIFEST_NAME).remove()
            place.remove_below()
        return True

    def forget_copies_but(self, name: str) -> None:
        """Remove the fetched checkpoints from this machine, but one."""
        for path in self.directory.glob("*"):
            if path.name != name and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)


def _parse(data: bytes, where: str) -> tuple[Manifest, str]:
    """Return a manifest as it is on a disk, and the part of the store that its files lie below."""
    manifest = parse_manifest(data, where)
    parts = {path.partition("/")[0] for path in manifest.files}
    part = min(parts, default="")
    if len(parts) != 1 or not _PART.fullmatch(part):
        raise CheckpointDamaged(f"{where} is damaged", ["its files are not those of one save"])
    files = {path.removeprefix(f"{part}/"): digest for path, digest in manifest.files.items()}
    return attrs.evolve(manifest, files=files), part


def _size_problems(files: Mapping[str, FileDigest], there: Mapping[str, Stored]) -> list[str]:
    problems = []
    for path, digest in sorted(files.items()):
        if path not in there:
            problems.append(f"{path} is missing")
        elif (found := there[path].num_bytes) != digest.num_bytes:
            word = "truncated" if found < digest.num_bytes else "too long"
            problems.append(f"{path} is {word}: {found} bytes, expected {digest.num_bytes}")
    return problems


def _download(source: ObjectPath, target: Path) -> FileDigest | None:
    try:
        return download(source, target)
    except FileNotFoundError:
        target.unlink(missing_ok=True)
        return None


def _put_in_place(fetched: Path, checkpoint: CommittedCheckpoint) -> None:
    """Give a fetched checkpoint its name; one that is there and whole is left, as somebody may be reading it."""
    if _is_intact(checkpoint):
        return
    shutil.rmtree(checkpoint.path, ignore_errors=True)
    try:
        fetched.rename(checkpoint.path)
    except OSError:
        if not _is_intact(checkpoint):  # else another process of this host was faster
            raise


def _is_intact(copy: CommittedCheckpoint) -> bool:
    try:
        same = (copy.path / MANIFEST_NAME).read_bytes() == copy.manifest.to_json()
    except OSError:
        return False
    return same and not verify_files(copy)
