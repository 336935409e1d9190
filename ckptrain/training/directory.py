"""A run directory before a start: held by one run at a time, damage set aside, leftovers removed, run.yaml written."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

from ckptrain.checkpoint.lock import Claim, Pace, hold
from ckptrain.checkpoint.remote_store import store_of
from ckptrain.checkpoint.store import JOURNAL
from ckptrain.checkpoint.working_copy import as_given, bring, publish, store_url
from ckptrain.config.load import dump_config
from ckptrain.config.schema import RestoreConfig
from ckptrain.errors import CkptrainError, ConfigError
from ckptrain.lifecycle.journal import Journal
from ckptrain.lifecycle.start_plan import AlreadyDone
from ckptrain.training.start import Start, Survey

RUN_CONFIG = "run.yaml"
_LATE_S = 10.0
"""Longer than network file systems remember that a file was not there (3 s to 5 s on NFS)."""


@contextmanager
def claimed(
    run_dir: Path, *, pace: Pace | None = None, tell: Callable[[str], object] = lambda _: None
) -> Iterator[Claim]:
    """Hold a run directory for this process; it is free again when the process dies, however it dies.

    Args:
        run_dir: the run directory, which need not exist.
        pace: of the signs of life that this run gives, where it is not the usual one.
        tell: is told what is waited for, where a start cannot know at once whether the directory is free.

    Raises:
        StartRefused: another run holds it; it is named by process, host and age.
        CkptrainError: the directory cannot be made or written.
    """
    with ExitStack() as stack:
        with _usable(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            claim = stack.enter_context(hold(run_dir, pace=pace, tell=tell))
        bring(run_dir)
        yield claim


def check_shared(claim: Claim) -> None:
    """Make sure that this process sees the directory which rank 0 holds, and not one of the same name on its own disk.

    Without that, every host would write its part of a checkpoint where no other finds it. A network file system may
    show a new file late, so it is looked for during some seconds.

    Raises:
        ConfigError: it does not.
    """
    deadline = time.monotonic() + _LATE_S
    while True:
        try:
            claim.check()
        except CkptrainError:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"cannot start in {claim.run_dir}",
                    [
                        f"{socket.gethostname()} does not see {claim.path.name}, which rank 0 has just written there:"
                        " the run directory must be on a disk that all hosts share; choose another --run-dir"
                    ],
                ) from None
            time.sleep(_LATE_S / 20)
        else:
            return


def prepare(survey: Survey, start: Start, run_dir: Path) -> None:
    """Make a claimed run directory ready: damage to quarantine, what was cut short removed, run.yaml as asked now.

    Raises:
        CkptrainError: the directory cannot be written.
    """
    store, journal = store_of(run_dir), Journal(run_dir / JOURNAL)
    with _usable(run_dir):
        for damage in start.damaged:
            moved = store.quarantine(damage.path, damage.problems)
            journal.record(
                "quarantined", checkpoint=damage.path.name, moved_to=as_given(moved), problems=damage.problems
            )
        if left := store.clean_staging():
            journal.record("cleaned", removed=[path.name for path in left])
        # What one start leaves out of a checkpoint is about that start alone: the next takes everything again.
        asked = attrs.evolve(survey.config, restore=RestoreConfig())
        text, target = dump_config(asked), run_dir / RUN_CONFIG
        if not isinstance(start.plan, AlreadyDone) and (not target.exists() or target.read_text() != text):
            replacement = run_dir / f".{RUN_CONFIG}.new"
            replacement.write_text(text)
            replacement.replace(target)


def make_known(run_dir: Path, claim: Claim, tell: Callable[[str], object]) -> None:
    """Put what a run has written down into its object store, where it lives in one and is still its own."""
    if store_url(run_dir) is None:
        return
    try:
        claim.check()
        publish(run_dir)
    except (OSError, CkptrainError) as error:
        tell(f"the journal and the metrics were not put into the store; they are in {run_dir}: {error}")


@contextmanager
def _usable(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CkptrainError(
            f"cannot use the run directory {run_dir}: {error.strerror} ({error.filename}); make it writable or choose"
            " another --run-dir"
        ) from error
