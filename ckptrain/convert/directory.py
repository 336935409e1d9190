"""What others read, on disk: its files, and how a directory takes its name only when it is complete."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError

from ckptrain.checkpoint.integrity import fsync_directory, fsync_file
from ckptrain.checkpoint.store import CHECKPOINTS
from ckptrain.errors import CkptrainError

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"


@attrs.frozen(kw_only=True)
class Kind:
    """A kind of directory that is written whole, and may take the place of an earlier one of its kind."""

    verb: str
    noun: str
    provenance_name: str
    """The file that says where it comes from, and which files are its own."""
    format: str


EXPORT = Kind(verb="export", noun="export", provenance_name="ckptrain_export.json", format="ckptrain-export-1")
IMPORTED = Kind(verb="import", noun="imported adapter", provenance_name="manifest.json", format="none")
MERGED = Kind(verb="merge", noun="merged model", provenance_name="ckptrain_merge.json", format="ckptrain-merge-1")

_FILES_OF_EXPORTS = (WEIGHTS_NAME, CONFIG_NAME)


def check_destination(kind: Kind, out: Path, checkpoint: Path, *, overwrite: bool) -> None:
    """Refuse a place where a directory of a kind would overwrite what is not one, or would damage a run.

    Args:
        kind: what is to be written.
        out: where it is to be, absolute, with links followed.
        checkpoint: what it is made of.
        overwrite: replace an earlier one.

    Raises:
        CkptrainError: the reason, and what to do.
    """
    parent = checkpoint.parent
    kept = parent if parent.name == CHECKPOINTS else checkpoint
    cannot = f"cannot {kind.verb} to {out}"
    if out == kept or kept in out.parents:
        raise CkptrainError(f"{cannot}: it is inside {kept}, where only checkpoints may be; name another OUT")
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise CkptrainError(f"{cannot}: it exists; name another OUT, or replace it with --overwrite")
    if not out.is_dir():
        raise CkptrainError(f"{cannot}: it is not a directory; name another OUT")
    names = {entry.name for entry in out.iterdir()}
    own = _own_files(kind, out)
    if names and own is None:
        raise CkptrainError(
            f"{cannot}: it is not empty and not an earlier {kind.noun} (which has {kind.provenance_name}), so"
            " --overwrite does not replace it; name another OUT, or remove it yourself"
        )
    if foreign := sorted(names - (own or set())):
        raise CkptrainError(
            f"{cannot}: it is an earlier {kind.noun}, but {', '.join(foreign[:5])} in it would be lost; move"
            " that elsewhere, or name another OUT"
        )


def write_provenance(kind: Kind, staging: Path, facts: Mapping[str, Any]) -> None:
    """Write the last file of a directory, which says where it comes from and which files are its own."""
    files = sorted(path.name for path in staging.iterdir())
    write_json(staging / kind.provenance_name, {"format": kind.format, "files": files, **facts})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file for people and machines."""
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False)
    path.write_text(f"{text}\n", encoding="utf-8")


@contextmanager
def published(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give an empty directory to write into, which becomes `out` if the block ends well and is gone otherwise.

    The directory lies beside `out`, so that one rename puts it there, complete and synced. Replacing takes two renames,
    since no file system renames onto a directory that is not empty: a crash between them leaves the earlier export
    whole under the hidden name `.writing-OUT-*.previous`.

    Raises:
        CkptrainError: it could not be written; what was at `out` before is there still.
    """
    staging = out.with_name(f".writing-{out.name}-{uuid.uuid4().hex[:8]}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
        for file in staging.iterdir():
            if file.is_file():
                fsync_file(file)
        fsync_directory(staging)
        _move(staging, out, overwrite=overwrite)
        fsync_directory(out.parent)
    except OSError as error:
        raise _unwritten(out, error.strerror or str(error)) from error
    except SafetensorError as error:  # what safetensors makes of an OSError
        raise _unwritten(out, str(error)) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _own_files(kind: Kind, out: Path) -> set[str] | None:
    """Return the names that belong to a directory of a kind; None where `out` is none."""
    try:
        provenance = json.loads((out / kind.provenance_name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(provenance, dict) or provenance.get("format") != kind.format:
        return None
    return {kind.provenance_name, *map(str, provenance.get("files", _FILES_OF_EXPORTS))}


def _move(staging: Path, out: Path, *, overwrite: bool) -> None:
    if not (overwrite and out.exists()):
        staging.rename(out)  # fails where something has come there in the meantime
        return
    previous = staging.with_name(f"{staging.name}.previous")
    out.rename(previous)
    try:
        staging.rename(out)
    except BaseException:
        previous.rename(out)
        raise
    shutil.rmtree(previous, ignore_errors=True)


def _unwritten(out: Path, reason: str) -> CkptrainError:
    return CkptrainError(
        f"cannot write {out}: {reason}; nothing of it is left there; free some space, or see that {out.parent} is a"
        " directory that can be written to, and do it again"
    )
