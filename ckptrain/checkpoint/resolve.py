"""Which checkpoint does a path mean? A run's newest, the one it names, or none, with what it looks like instead."""

from __future__ import annotations

import re
from pathlib import Path

from ckptrain.checkpoint.integrity import CommittedCheckpoint, open_checkpoint
from ckptrain.checkpoint.manifest import MANIFEST_NAME
from ckptrain.checkpoint.remote_store import store_of
from ckptrain.checkpoint.store import (
    CHECKPOINTS,
    REMOVING_PREFIX,
    STAGING_PREFIX,
    DamagedCheckpoint,
    step_of,
)
from ckptrain.checkpoint.working_copy import as_given, look_directory, run_of, store_url
from ckptrain.errors import CheckpointDamaged, CheckpointNotFound

_EXPECTED = "give a run directory, or a checkpoint such as RUN/checkpoints/step-00000100"


def resolve_checkpoint(path: Path) -> CommittedCheckpoint:
    """Return the checkpoint that `path` means: a run directory, RUN/checkpoints, a checkpoint, or its manifest.json.

    Of a run it is the newest. Where the newest is damaged nothing is chosen in its place: whoever exports or compares a
    run is to know which step that is of.

    Raises:
        CheckpointNotFound: it is none of these; the message says what it looks like.
        CheckpointDamaged: it is one, and not whole.
    """
    path = path.resolve()  # a link or `.` given by hand is a way to say where; links inside a checkpoint are damage
    if (run_dir := run_of(path)) is not None:
        return _fetched(path, run_dir)
    if path.name == MANIFEST_NAME and path.is_file():
        return resolve_checkpoint(path.parent)
    if path.name.startswith((STAGING_PREFIX, REMOVING_PREFIX)):
        raise CheckpointNotFound(
            f"{path} is what an unfinished save or removal has left, not a checkpoint; {_EXPECTED}"
        )
    if (path / MANIFEST_NAME).exists():
        return _named(path)
    if (path / CHECKPOINTS).is_dir():
        return _newest(path)
    if path.name == CHECKPOINTS and path.is_dir():
        return _newest(path.parent)
    raise CheckpointNotFound(f"{path} {_appearance(path)}; {_EXPECTED}")


def _fetched(path: Path, run_dir: Path) -> CommittedCheckpoint:
    """Return what a path in a working copy means in its store, fetched to this process's own copy."""
    url = store_url(run_dir)
    assert url is not None
    store = store_of(look_directory(url.url))
    name = next((part for part in path.relative_to(run_dir).parts if step_of(part) is not None), None)
    if name is None:
        return store.here(_newest(store.run_dir))
    found = next((checkpoint for checkpoint in store.scan() if checkpoint.path.name == name), None)
    if found is None:
        raise CheckpointNotFound(f"{as_given(path)} is not there, or was never completed; {_EXPECTED}")
    if isinstance(found, DamagedCheckpoint):
        raise CheckpointDamaged(f"{as_given(path)} is damaged", found.problems)
    return store.here(found)


def _named(path: Path) -> CommittedCheckpoint:
    checkpoint = open_checkpoint(path)
    if step_of(path.name) not in (None, checkpoint.step):
        problem = f"its manifest is that of step {checkpoint.step}: it was renamed"
        raise CheckpointDamaged(f"{path} is damaged", [problem])
    return checkpoint


def _newest(run_dir: Path) -> CommittedCheckpoint:
    found = store_of(run_dir).scan()
    if not found:
        raise CheckpointNotFound(
            f"the run {as_given(run_dir)} has no checkpoint yet; it saves its first at checkpoint.every_steps"
        )
    newest = found[-1]
    if isinstance(newest, CommittedCheckpoint):
        return newest
    raise CheckpointDamaged(_damage_summary(run_dir, newest, found), newest.problems)


def _damage_summary(
    run_dir: Path, newest: DamagedCheckpoint, found: list[CommittedCheckpoint | DamagedCheckpoint]
) -> str:
    whole = [checkpoint.path for checkpoint in found if isinstance(checkpoint, CommittedCheckpoint)]
    named = f"to use the newest whole one, name it: {as_given(whole[-1])}" if whole else ""
    instead = named or "the run has no whole checkpoint"
    return f"the newest checkpoint of {as_given(run_dir)}, {newest.path.name}, is damaged; {instead}"


def _appearance(path: Path) -> str:
    """Say what `path` looks like, and which command takes that."""
    if not path.exists():
        return "does not exist"
    if not path.is_dir():
        return "is a file"
    names = {entry.name for entry in path.iterdir()}
    return _foreign(path, names) or ("is neither a run nor a checkpoint" if names else "is an empty directory")


def _foreign(path: Path, names: set[str]) -> str | None:
    """Recognise what others write, and our own unfinished things; the first that applies is the most telling."""
    iteration = re.compile(r"iter_\d{7}")
    signs = [
        ("adapter_config.json" in names, "is a PEFT adapter; `ckptrain import-adapter` makes a checkpoint of it"),
        (
            "latest_checkpointed_iteration.txt" in names or any(map(iteration.fullmatch, (path.name, *names))),
            "is a checkpoint of Megatron; where it is of a LoRA training, `ckptrain export`, `merge`, `inspect` and"
            " model.adapter take it",
        ),
        ((path.parent / MANIFEST_NAME).is_file(), f"is a part of the checkpoint {path.parent}"),
        (".metadata" in names, "is a bare distributed checkpoint of torch, without a manifest"),
        ("config.json" in names, "is a Hugging Face model, which model.pretrained takes"),
        (bool(names & {"run.yaml", "journal.jsonl"}), f"is a run without {CHECKPOINTS}/: it has not saved yet"),
        (
            step_of(path.name) is not None,
            f"is named like a checkpoint and has no {MANIFEST_NAME}: it was never completed",
        ),
    ]
    return next((appearance for applies, appearance in signs if applies), None)
