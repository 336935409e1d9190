"""What a run promises of its checkpoints, checked on what lies in its directory: chaos.py asks after every kill.

The checks go by the store's own scan and by the journal, and read every byte of every checkpoint. They start no process
and change nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson

from ckptrain.checkpoint.integrity import verify_files
from ckptrain.checkpoint.manifest import Manifest
from ckptrain.checkpoint.store import (
    JOURNAL,
    QUARANTINE,
    REMOVING_PREFIX,
    STAGING_PREFIX,
    CheckpointStore,
    DamagedCheckpoint,
    checkpoint_name,
)
from ckptrain.lifecycle.journal import read_journal


class BrokenPromiseError(Exception):
    """A run did not do what it promises; the message says what, and where."""


class CheckpointLostError(BrokenPromiseError):
    """A checkpoint that was committed, and that retention keeps, is not there."""


class CheckpointHarmedError(BrokenPromiseError):
    """Something under a checkpoint's final name is not a whole checkpoint, or one was taken for damaged."""


@attrs.frozen(kw_only=True)
class End:
    """What a run leaves, without what tells when it was made."""

    manifest: Manifest
    files: Mapping[str, bytes]
    """By path in the last checkpoint: all but the manifest."""
    metrics: Sequence[tuple[Any, ...]]
    """Step, loss, learning rate, gradient norm and tokens of every line of metrics.jsonl, in its order."""


def look(run_dir: Path, known: Collection[int], keep_last: int) -> frozenset[int]:
    """Return the steps of all checkpoints that are known to have been committed, after a look at what is there.

    Args:
        run_dir: the run directory, in which no process is at work.
        known: what the look before returned.
        keep_last: how many of the newest the run keeps.

    Raises:
        CheckpointHarmedError: a checkpoint that can be found is not what its manifest says.
        CheckpointLostError: of the newest `keep_last` that the journal reports as saved, or that were seen whole
            before, one is gone.
    """
    reported = {entry["step"] for entry in read_journal(run_dir / JOURNAL) if entry["event"] == "saved"}
    whole = set()
    for checkpoint in CheckpointStore(run_dir).scan():
        damaged = isinstance(checkpoint, DamagedCheckpoint)
        if problems := checkpoint.problems if damaged else verify_files(checkpoint):
            raise CheckpointHarmedError(
                f"{checkpoint.path} is under its final name and is not whole: {'; '.join(problems)}"
            )
        whole.add(checkpoint.step)
    if (run_dir / QUARANTINE).exists():
        raise CheckpointHarmedError(f"a start took a checkpoint for damaged: see {run_dir / QUARANTINE}")
    committed = frozenset({*known, *reported, *whole})
    if lost := set(sorted(committed)[-keep_last:]) - whole:
        names = ", ".join(checkpoint_name(step) for step in sorted(lost))
        raise CheckpointLostError(
            f"{run_dir} has lost {names}: reported as saved up to step {max(reported, default=None)}, seen before up to"
            f" {max(known, default=None)}, whole now: {sorted(whole) or 'none'}"
        )
    return committed


def check_plan(plan: Mapping[str, Any], newest: int, steps: int) -> None:
    """See that a start goes on from `newest`, the step of the newest checkpoint (0: none), of a run of `steps`.

    Raises:
        BrokenPromiseError: it does something else.
    """
    expected = ("FreshStart", None) if newest == 0 else ("Resume" if newest < steps else "AlreadyDone", newest)
    found = (plan["plan"], plan.get("step"))
    if found != expected:
        raise BrokenPromiseError(f"a start's plan is {found}, expected {expected}; it says: {plan['reason']}")


def leftovers(run_dir: Path) -> list[str]:
    """Return the names of saves and removals that were cut short, or are under way."""
    hidden = (STAGING_PREFIX, REMOVING_PREFIX)
    return sorted(path.name for path in CheckpointStore(run_dir).directory.glob(".*") if path.name.startswith(hidden))


def read_end(run_dir: Path, steps: int) -> End:
    """Return what a run of `steps` has left.

    Raises:
        CheckpointLostError: it has no checkpoint of its last step.
    """
    last = CheckpointStore(run_dir).find(steps)
    if last is None:
        raise CheckpointLostError(f"{run_dir} has ended and has no {checkpoint_name(steps)}")
    lines = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    return End(
        manifest=attrs.evolve(last.manifest, run_id="", created=""),
        files={name: (last.path / name).read_bytes() for name in last.manifest.files},
        metrics=[tuple(line[key] for key in ("step", "loss", "lr", "grad_norm", "tokens")) for line in lines],
    )


def check_end(run_dir: Path, steps: int, expected: End) -> None:
    """See that a run has ended as `expected`, to the bit, with nothing left over.

    Raises:
        BrokenPromiseError: it has not; everything that differs is named.
    """
    found = read_end(run_dir, steps)
    problems = [f"{name} is left over" for name in leftovers(run_dir)]
    names = sorted(expected.files.keys() | found.files.keys())
    problems += [f"{name} differs" for name in names if found.files.get(name) != expected.files.get(name)]
    problems += [
        f"{field.name} in its manifest differs"
        for field in attrs.fields(Manifest)
        if getattr(found.manifest, field.name) != getattr(expected.manifest, field.name)
    ]
    for line, (said, wanted) in enumerate(itertools.zip_longest(found.metrics, expected.metrics), start=1):
        if said != wanted:
            problems.append(f"metrics.jsonl:{line} says {said}, expected {wanted}")
            break
    if problems:
        raise BrokenPromiseError(f"{run_dir} did not end as the run that nobody killed: {'; '.join(problems)}")
