"""A run directory before a start: held by one run at a time, damage set aside, leftovers removed, run.yaml written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.config.load import dump_config
from ckptrain.errors import CkptrainError, StartRefused
from ckptrain.lifecycle.journal import Journal, read_journal
from ckptrain.lifecycle.start_plan import AlreadyDone
from ckptrain.training.start import Start, Survey

JOURNAL = "journal.jsonl"
RUN_CONFIG = "run.yaml"
_LOCK = ".lock"


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Hold a run directory for this process; the kernel lets go of it when the process dies, however it dies.

    Raises:
        StartRefused: another process holds it.
        CkptrainError: the directory cannot be made or written.
    """
    with _usable(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(run_dir / _LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise StartRefused(f"cannot start in {run_dir}: another run is at work in it", [_holder(run_dir)]) from None
    try:
        yield
    finally:
        lock.release()


def prepare(survey: Survey, start: Start, run_dir: Path) -> None:
    """Make a claimed run directory ready: damage to quarantine, what was cut short removed, run.yaml as asked now.

    Raises:
        CkptrainError: the directory cannot be written.
    """
    store, journal = CheckpointStore(run_dir), Journal(run_dir / JOURNAL)
    with _usable(run_dir):
        for damage in start.damaged:
            moved = store.quarantine(damage.path, damage.problems)
            journal.record("quarantined", checkpoint=damage.path.name, moved_to=str(moved), problems=damage.problems)
        if left := store.clean_staging():
            journal.record("cleaned", removed=[path.name for path in left])
        text, target = dump_config(survey.config), run_dir / RUN_CONFIG
        if not isinstance(start.plan, AlreadyDone) and (not target.exists() or target.read_text() != text):
            replacement = run_dir / f".{RUN_CONFIG}.new"
            replacement.write_text(text)
            replacement.replace(target)


@contextmanager
def _usable(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CkptrainError(
            f"cannot use the run directory {run_dir}: {error.strerror} ({error.filename}); make it writable or choose"
            " another --run-dir"
        ) from error


def _holder(run_dir: Path) -> str:
    """Say who holds the directory, as far as the journal knows."""
    plans = [entry for entry in read_journal(run_dir / JOURNAL) if entry["event"] == "plan"]
    if not plans:
        return "wait for it, or stop it"
    last = plans[-1]
    return (
        f"process {last.get('pid')} on {last.get('host')}, started {last['time']}; wait for it, stop it (it saves on"
        " SIGTERM), or use another --run-dir"
    )
