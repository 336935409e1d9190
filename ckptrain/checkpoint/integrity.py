"""Whether a checkpoint is what its manifest says, and how bytes get to the disk for good."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from ckptrain.checkpoint.dcp_metadata import metadata_problems
from ckptrain.checkpoint.manifest import MANIFEST_NAME, FileDigest, Manifest, parse_manifest, printable
from ckptrain.errors import CheckpointDamaged, CkptrainError
from ckptrain.lifecycle.facts import CheckpointFacts

_LARGEST_MANIFEST = 256 * 1024 * 1024
"""Ours have some 200 bytes for each tensor and file; a larger one is not read into memory to be refused."""
_PIECE_BYTES = 4 * 1024 * 1024
"""Read and hashed at a time. Each time the interpreter's lock is wanted back from a thread that trains; with the pieces
of `hashlib.file_digest`, a sixteenth of that, both lose by it."""


@attrs.frozen(kw_only=True)
class CommittedCheckpoint:
    """A checkpoint directory whose manifest parses and whose files are there with the stated sizes.

    The contents of the files have not been read: that is `verify_files`, which takes as long as reading them does.
    """

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step

    def facts(self) -> CheckpointFacts:
        """Return what a start is decided from."""
        manifest = self.manifest
        groups = {tensor.group for tensor in manifest.tensors.values()}
        return CheckpointFacts(
            path=self.path,
            run_id=manifest.run_id,
            step=manifest.step,
            consumed_samples=manifest.consumed_samples,
            consumed_tokens=manifest.consumed_tokens,
            base=manifest.base,
            tokenizer_fingerprint=manifest.tokenizer_fingerprint,
            data=manifest.data,
            lora=manifest.lora,
            layout=manifest.layout,
            has_optimizer="optimizer" in groups,
            has_rng="rng" in groups,
            config=manifest.config,
            versions=manifest.versions,
            program=manifest.program,
        )


def open_checkpoint(path: Path) -> CommittedCheckpoint:
    """Return the checkpoint in directory `path`, after the checks that cost no reading of tensors.

    Raises:
        CheckpointDamaged: it is not complete; the problems are listed.
        WrittenByNewer: its manifest is of a later format.
        CkptrainError: the disk does not let it be read, which says nothing about the checkpoint.
    """
    if problem := _directory_problem(path):
        raise CheckpointDamaged(f"{path} is damaged", [f"it {problem}"])
    if problem := _file_problem(path / MANIFEST_NAME):
        raise CheckpointDamaged(f"{path} is damaged", [f"{MANIFEST_NAME} {problem}"])
    manifest = _read_manifest(path)
    if problems := _presence_problems(path, manifest):
        raise CheckpointDamaged(f"{path} is damaged", [f"{name} {problem}" for name, problem in problems.items()])
    return CommittedCheckpoint(path=path, manifest=manifest)


def hash_file(path: Path) -> FileDigest:
    """Return the size and SHA-256 of a file, read in one pass.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        piece = memoryview(bytearray(max(1, min(_PIECE_BYTES, os.fstat(file.fileno()).st_size))))
        while num_bytes := file.readinto(piece):
            digest.update(piece[:num_bytes])
        return FileDigest(num_bytes=file.tell(), sha256=digest.hexdigest())


def verify_files(checkpoint: CommittedCheckpoint, parallel: int = 4, within: str | None = None) -> list[str]:
    """Read every file of the checkpoint and return what differs from its manifest; an empty list means intact.

    With `within` only the files of that directory are read: of the others presence and size are looked at.

    Told apart: a file that is missing, is shorter or longer than stated, has other contents, has those of another file
    of this checkpoint or of one beside it, is a symbolic link, or is there without being listed. Where all bytes are
    as stated, the tensors are compared with the manifest, so that nothing is read from files that are not by ckptrain,
    whoever wrote the manifest. `parallel` files are read at a time (hashing releases the interpreter's lock).
    """
    root, files = checkpoint.path, checkpoint.manifest.files
    problems = _presence_problems(root, checkpoint.manifest)
    absent = {path for path in files if not _is_readable(root / path) or problems.keys() & _parents(path)}
    problems |= _unlisted(root, {*files, *problems, MANIFEST_NAME})
    present = [path for path in files if path not in absent and (within is None or path.startswith(f"{within}/"))]
    with ThreadPoolExecutor(max_workers=parallel) as pool:
        found = dict(zip(present, pool.map(lambda path: _digest_or_problem(root / path), present), strict=True))
    changed = {path: digest for path, digest in found.items() if digest != files[path]}
    origins = _origins(checkpoint) if changed else {}
    for path, digest in changed.items():
        if isinstance(digest, str):
            problems[path] = digest
        elif digest in origins:
            problems[path] = f"has the contents of {origins[digest]}"
        elif path not in problems:
            problems[path] = (
                f"has other contents: SHA-256 {digest.sha256[:12]}..., expected {files[path].sha256[:12]}..."
            )
    if not problems:
        return metadata_problems(root, checkpoint.manifest)
    return [printable(f"{path} {problem}") for path, problem in sorted(problems.items())]


def fsync_file(path: Path) -> None:
    """Wait until the contents of a file are on disk."""
    _fsync(path, os.O_RDONLY)


def fsync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk: a file is found after a power failure only if its name is."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _presence_problems(root: Path, manifest: Manifest) -> dict[str, str]:
    """Return, by path, what is not there or not of the stated size."""
    found: dict[str, str | None] = {}
    for directory in sorted({parent for path in manifest.files for parent in _parents(path)}):
        if not found.keys() & _parents(directory):
            found[directory] = _directory_problem(root / directory)
    broken = {directory for directory, problem in found.items() if problem is not None}
    for path, digest in sorted(manifest.files.items()):
        if not broken & _parents(path):
            found[path] = _file_problem(root / path, digest.num_bytes)
    return {path: problem for path, problem in found.items() if problem is not None}


def _parents(path: str) -> set[str]:
    parts = path.split("/")[:-1]
    return {"/".join(parts[: index + 1]) for index in range(len(parts))}


def _directory_problem(path: Path) -> str | None:
    """Say why `path` is no directory of its own: a link could lead anywhere, and change without being seen."""
    status = _status(path)
    if status is None:
        return "is missing"
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    return None if stat.S_ISDIR(status.st_mode) else "is not a directory"


def _file_problem(path: Path, num_bytes: int | None = None) -> str | None:
    """Say why `path` is no file of its own, of `num_bytes` where that is given."""
    status = _status(path)
    if status is None:
        return "is missing"
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if num_bytes is None or status.st_size == num_bytes:
        return None
    word = "truncated" if status.st_size < num_bytes else "too long"
    return f"is {word}: {status.st_size} bytes, expected {num_bytes}"


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _is_readable(path: Path) -> bool:
    status = _status(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def _digest_or_problem(path: Path) -> FileDigest | str:
    try:
        return hash_file(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _origins(checkpoint: CommittedCheckpoint) -> dict[FileDigest, str]:
    """Return what contents belong to: the files of this checkpoint, and of those beside it."""
    origins: dict[FileDigest, str] = {}
    for path in sorted(checkpoint.path.parent.glob(f"step-*/{MANIFEST_NAME}")):
        beside = path.parent
        with contextlib.suppress(CkptrainError):
            if beside != checkpoint.path and _file_problem(path) is None:
                origins |= {digest: f"{beside.name}'s {name}" for name, digest in _read_manifest(beside).files.items()}
    origins |= {digest: f"its own {name}" for name, digest in checkpoint.manifest.files.items()}
    return {digest: origin for digest, origin in origins.items() if digest.num_bytes}


def _unlisted(root: Path, known: set[str]) -> dict[str, str]:
    """Return what is below `root` and not known: files, links, and directories with nothing in them."""
    found: dict[str, str] = {}
    for directory, subdirectories, files in os.walk(root):
        at = Path(directory)
        if not subdirectories and not files and at != root:
            found[at.relative_to(root).as_posix()] = "is an empty directory, which the manifest has not"
        links = [name for name in subdirectories if (at / name).is_symlink()]
        for path in sorted(at / name for name in files + links):
            problem = "is a symbolic link" if path.is_symlink() else "is not listed in the manifest"
            found[path.relative_to(root).as_posix()] = problem
    return {path: problem for path, problem in found.items() if path not in known}


def _read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST_NAME
    try:
        if (num_bytes := path.stat().st_size) > _LARGEST_MANIFEST:
            raise CheckpointDamaged(
                f"{directory} is damaged", [f"{MANIFEST_NAME} has {num_bytes} bytes, which none has"]
            )
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    return parse_manifest(data, str(path))


def _unreadable(path: Path, error: OSError) -> CkptrainError:
    return CkptrainError(f"cannot read {path}: {error.strerror}; this says nothing about what is in it")
