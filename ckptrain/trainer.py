"""A run as an object, for programs that do something between its steps."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ckptrain.api import Source, default_run_dir, read_config
from ckptrain.checkpoint.working_copy import local_path
from ckptrain.data.program_rows import keep_rows
from ckptrain.errors import CkptrainError, ConfigError
from ckptrain.installed import MEGATRON, require
from ckptrain.training.program import Program

if TYPE_CHECKING:
    from ckptrain.convert.to_peft import Export
    from ckptrain.training.callbacks import Callback, State, StepFunction
    from ckptrain.training.observers import Observer
    from ckptrain.training.program import Loss, Samples
    from ckptrain.training.result import RunResult
    from ckptrain.training.session import Session
    from ckptrain.training.start import Start, Survey

_open_trainers: list[Trainer] = []
"""That which holds Megatron's global state in this process; it has room for one."""


class Trainer:
    """One run, opened when it first has something to do and closed at the end of its `with` block.

    In a launch of several processes each makes the same trainer and calls the same methods. Closing saves what is not
    saved yet, as a stop does; after an error nothing is saved. While it is open, the first SIGINT or SIGTERM asks for a
    stop after the step and the second ends the process, as in any run.
    """

    def __init__(
        self,
        config: Source,
        overrides: Sequence[str] = (),
        *,
        run_dir: str | os.PathLike[str] | None = None,
        callbacks: Iterable[Callback | StepFunction] = (),
        observers: Iterable[Observer] = (),
        loss: Loss | None = None,
        train: Iterable[Mapping[str, Any]] | None = None,
        validation: Iterable[Mapping[str, Any]] | None = None,
        samples: Samples | None = None,
    ) -> None:
        """Read the configuration, and keep the rows that are given; nothing else is touched, and no torch loaded.

        `train` and `validation` are rows in the place of `data.train` and `data.validation`, in any format that files
        may have; `data.format` says in which. `samples` makes the rows of each step, in the place of `data.train`.

        Raises:
            CkptrainError: the configuration or a row cannot be used.
            ValueError: it is not a file, and no `run_dir` is given.
        """
        self.run_dir = (local_path(run_dir) if run_dir is not None else default_run_dir(config)).absolute()
        if samples is not None:
            if train is not None:
                raise ConfigError("cannot train on both", ["`train` and `samples` are given: leave out one"])
            train = [{"samples of a program": samples.name}]  # stands for them where a configuration is asked for
        of_rows = _as_overrides({"train": train, "validation": validation})
        self.config = read_config(config, [*overrides, *of_rows], self.run_dir)
        if samples is not None and self.config.data.split_validation_size is not None:
            raise ConfigError(
                "cannot validate on a part of what is not there yet",
                ["data.split_validation_size is set beside `samples`: give `validation` or data.validation"],
            )
        self._callbacks, self._observers = tuple(callbacks), tuple(observers)
        self._program = Program(loss=loss, samples=samples)
        self._stack = contextlib.ExitStack()
        self._session: Session | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        try:
            self._stack.__exit__(kind, error, trace)
        finally:
            if self in _open_trainers:
                _open_trainers.remove(self)
            if self._session is not None:
                self._session.let_go()

    def close(self) -> None:
        """Save what is not saved, and give back the model's memory, the process groups and the run directory."""
        self.__exit__(None, None, None)

    @property
    def state(self) -> State:
        """How the run stands; of a run that is not open yet, that it is NEW."""
        from ckptrain.training.callbacks import State

        if self._session is not None:
            return self._session.state
        return State(phase="NEW", step=0, steps=self.config.train.steps)

    def plan(self) -> Start:
        """Return what the next start would be, changing nothing; once the run is open, what it was.

        Raises:
            CkptrainError: what `run` would refuse.
        """
        if self._session is not None:
            return self._session.start
        from ckptrain.training.start import decide_start

        return decide_start(self._survey(), self.run_dir, read_contents=False)

    def run(self) -> RunResult:
        """Train to `train.steps`, or until a stop is asked for.

        Raises:
            CkptrainError: one of its kinds for whatever is refused or fails.
        """
        return self._opened().run_until()

    def run_until(self, step: int) -> RunResult:
        """Train until `step` steps are done, and come back with the model in memory; call it again to go on.

        Its result is `paused` before the last step. A run that has ended, also by a stop, gives its result again.

        Raises:
            CkptrainError: one of its kinds for whatever is refused or fails.
        """
        return self._opened().run_until(step)

    def save(self) -> Path | None:
        """Save now, and return the committed checkpoint; None before the first step.

        Raises:
            SaveFailed: it could not be written; the one before is untouched.
        """
        return self._opened().save()

    def export(
        self,
        out: str | os.PathLike[str],
        *,
        dtype: str = "float32",
        overwrite: bool = False,
        layout: str = "peft",
    ) -> Export | None:
        """Write the adapter as it is now as a Hugging Face PEFT directory, without a checkpoint; None on other ranks.

        Its logits are not compared with Hugging Face's, which would take a second model: `ckptrain.export` does.

        Raises:
            CkptrainError: `out` exists and `overwrite` is false, or it cannot be written.
        """
        return self._opened().export(Path(out), dtype=dtype, overwrite=overwrite, layout=layout)

    def _opened(self) -> Session:
        if self._session is not None and not self._closed:
            return self._session
        if self._closed:
            raise CkptrainError("this trainer is closed; make another one, which goes on from its checkpoint")
        if _open_trainers:
            raise CkptrainError(
                f"the trainer of {_open_trainers[0].run_dir} is open in this process, and Megatron has room for one:"
                " close it first, or use it in a `with` block"
            )
        require(MEGATRON, "training")
        from ckptrain.training.callbacks import Callbacks
        from ckptrain.training.result import refusals_told
        from ckptrain.training.run import open_session

        callbacks = Callbacks(self._callbacks)
        with refusals_told(self.run_dir):
            survey = self._survey()
        session = self._stack.enter_context(open_session(survey, self.run_dir, self._observers, callbacks=callbacks))
        _open_trainers.append(self)
        self._session = session
        return session

    def _survey(self) -> Survey:
        from ckptrain.training.start import survey_run

        return survey_run(self.config, int(os.environ.get("WORLD_SIZE", "1")), self.run_dir, self._program)


def _as_overrides(given: Mapping[str, Iterable[Mapping[str, Any]] | None]) -> list[str]:
    """Keep rows as files, and return what names them in a configuration."""
    kept = {role: str(keep_rows(rows, role)) for role, rows in given.items() if rows is not None}
    # As JSON, which is YAML: a path may have spaces and colons.
    return [f"data.{role}={json.dumps(path, ensure_ascii=False)}" for role, path in kept.items()]
