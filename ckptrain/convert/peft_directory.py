"""A Hugging Face PEFT directory on disk: its files, and how it takes its name only when it is complete."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ckptrain.checkpoint.integrity import fsync_directory, fsync_file
from ckptrain.checkpoint.store import CHECKPOINTS
from ckptrain.errors import CkptrainError

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
PROVENANCE_NAME = "ckptrain_export.json"
PROVENANCE_FORMAT = "ckptrain-export-1"

_OURS = {WEIGHTS_NAME, CONFIG_NAME, PROVENANCE_NAME}


def check_destination(out: Path, checkpoint: Path, *, overwrite: bool) -> None:
    """Refuse a place where an export would overwrite what is not one, or would damage a run.

    Args:
        out: where the export is to be, absolute, with links followed.
        checkpoint: what is exported.
        overwrite: replace an earlier export.

    Raises:
        CkptrainError: the reason, and what to do.
    """
    parent = checkpoint.parent
    kept = parent if parent.name == CHECKPOINTS else checkpoint
    if out == kept or kept in out.parents:
        raise CkptrainError(
            f"cannot export to {out}: it is inside {kept}, where only checkpoints may be; name another OUT"
        )
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise CkptrainError(f"cannot export to {out}: it exists; name another OUT, or replace it with --overwrite")
    if not out.is_dir():
        raise CkptrainError(f"cannot export to {out}: it is not a directory; name another OUT")
    names = {entry.name for entry in out.iterdir()}
    if names and not _is_export(out):
        raise CkptrainError(
            f"cannot export to {out}: it is not empty and not an earlier export (which has {PROVENANCE_NAME}), so"
            " --overwrite does not replace it; name another OUT, or remove it yourself"
        )
    if foreign := sorted(names - _OURS):
        raise CkptrainError(
            f"cannot export to {out}: it is an earlier export, but {', '.join(foreign[:5])} in it would be lost; move"
            " that elsewhere, or name another OUT"
        )


def write_peft_directory(
    staging: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], provenance: Mapping[str, Any]
) -> None:
    """Write the files of an adapter into an empty directory.

    Args:
        staging: the directory.
        tensors: by PEFT's name in a state dict, contiguous, none sharing memory with another.
        config: adapter_config.json.
        provenance: ckptrain_export.json.
    """
    save_file(dict(tensors), staging / WEIGHTS_NAME, metadata={"format": "pt"})
    for name, content in ((CONFIG_NAME, config), (PROVENANCE_NAME, provenance)):
        text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False)
        (staging / name).write_text(f"{text}\n", encoding="utf-8")


@contextmanager
def published(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give an empty directory to write into, which becomes `out` if the block ends well and is gone otherwise.

    The directory lies beside `out`, so that one rename puts it there, complete and synced. Replacing takes two renames,
    since no file system renames onto a directory that is not empty: a crash between them leaves the earlier export
    whole under the hidden name `.exporting-OUT-*.previous`.

    Raises:
        CkptrainError: it could not be written; what was at `out` before is there still.
    """
    staging = out.with_name(f".exporting-{out.name}-{uuid.uuid4().hex[:8]}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
        for file in staging.iterdir():
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


def _is_export(out: Path) -> bool:
    try:
        provenance = json.loads((out / PROVENANCE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(provenance, dict) and provenance.get("format") == PROVENANCE_FORMAT


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
        f"cannot write {out}: {reason}; nothing of this export is left there; free some space, or see that"
        f" {out.parent} is a directory that can be written to, and export again"
    )
