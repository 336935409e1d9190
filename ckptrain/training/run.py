"""A run is opened in its directory and closed again, however it ends; `run_training` goes from one end to the other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from ckptrain.checkpoint.ranks import on_rank0, rank, together, world_size
from ckptrain.checkpoint.remote_store import store_of
from ckptrain.checkpoint.store import JOURNAL
from ckptrain.errors import ConfigError
from ckptrain.lifecycle.journal import Journal, NullJournal
from ckptrain.megatron.world import open_process_group
from ckptrain.training.agreement import check_agreement
from ckptrain.training.callbacks import Callbacks
from ckptrain.training.directory import check_shared, claimed, make_known, prepare
from ckptrain.training.observers import Observer, Observers
from ckptrain.training.result import RunResult, refusals_told
from ckptrain.training.session import Session
from ckptrain.training.start import Start, Survey, decide_start
from ckptrain.training.startup import StartClock
from ckptrain.training.watchdog import Watchdog

__all__ = ["RunResult", "open_session", "run_training"]


def run_training(
    survey: Survey, run_dir: Path, observers: Iterable[Observer] = (), clock: StartClock | None = None
) -> RunResult:
    """Start or go on with a run in `run_dir`, and train to `train.steps`; collective over the processes of this launch.

    `clock` has counted what came before; without it the start is told from here.

    Raises:
        CkptrainError: one of its kinds for whatever is refused or fails; what was committed before is untouched.
    """
    with open_session(survey, run_dir, observers, clock) as session:
        return session.run_until()


@contextlib.contextmanager
def open_session(
    survey: Survey,
    run_dir: Path,
    observers: Iterable[Observer] = (),
    clock: StartClock | None = None,
    callbacks: Callbacks | None = None,
) -> Iterator[Session]:
    """Open a run in `run_dir`, ready for its next step, and close it at the end of the block.

    A block that ends well before the run has ended saves it as a stop does; one that ends by an error saves nothing.

    Raises:
        CkptrainError: one of its kinds for whatever is refused or fails; what was committed before is untouched.
    """
    if survey.layout.world_size != world_size():
        raise ConfigError(
            "cannot start", [f"there are {world_size()} processes, and WORLD_SIZE said {survey.layout.world_size}"]
        )
    clock = clock or StartClock()
    with open_process_group(), contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(60 * survey.config.train.timeout_minutes))
        clock.mark("process groups")
        told = Observers(observers if rank() == 0 else ())
        check_agreement(survey, rank(), told.on_warning)
        claim = on_rank0(lambda: stack.enter_context(claimed(run_dir, tell=told.on_progress)))
        together(lambda: check_shared(claim))
        with refusals_told(run_dir, is_ours=True):
            start = on_rank0(lambda: decide_start(survey, run_dir, read_contents=True))
            on_rank0(lambda: prepare(survey, start, run_dir))
            start = together(lambda: on_this_host(start, run_dir))
        clock.mark("plan")
        journal = Journal(run_dir / JOURNAL) if rank() == 0 else NullJournal()
        session = Session(survey, start, run_dir, journal, told, callbacks or Callbacks(), clock, watchdog)
        try:
            with watchdog.explaining(), contextlib.ExitStack() as opened:
                session.open(opened, claim.check)
                if rank() == 0:
                    make_known(run_dir, claim, told.on_warning)
                yield session
                session.close()
        except BaseException as error:
            session.failed(error)
            raise
        finally:
            told.on_end()
            if rank() == 0:
                make_known(run_dir, claim, told.on_warning)


def on_this_host(start: Start, run_dir: Path) -> Start:
    """Return a start whose checkpoint this host can read; one process of each host fetches what lies in a store.

    Raises:
        CkptrainError: it is damaged, or the store cannot be read.
    """
    if start.checkpoint is None:
        return start
    store = store_of(run_dir)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        store.forget_copies_but(start.checkpoint.path.name)
        return attrs.evolve(start, checkpoint=store.here(start.checkpoint))
    return attrs.evolve(start, checkpoint=store.placed(start.checkpoint))
