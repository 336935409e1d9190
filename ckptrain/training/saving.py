"""Save a run: copy its state to host memory, say what it is, and hand both to the checkpoint writer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs

from ckptrain.checkpoint.dcp_metadata import ADAPTER_DIRECTORY, OPTIMIZER_DIRECTORY
from ckptrain.checkpoint.manifest import FileDigest, Manifest, TensorEntry
from ckptrain.checkpoint.ranks import gather_to_all
from ckptrain.checkpoint.remote_store import store_of
from ckptrain.checkpoint.retention import Retention
from ckptrain.checkpoint.sharded import StoredTensor
from ckptrain.checkpoint.writer import CheckpointWriter, Content, Outcome
from ckptrain.config.load import flatten
from ckptrain.lifecycle.facts import LoraSpec
from ckptrain.megatron.optimizer import step_count
from ckptrain.megatron.state import HostCopy, rng_row, rng_state
from ckptrain.training.setup import DataSetup, ModelSetup
from ckptrain.training.start import Survey, versions

_NOTICED_WAIT_S = 0.05


@attrs.frozen(kw_only=True)
class Position:
    """How far a run has come."""

    step: int
    """Optimizer steps done."""
    consumed_samples: int
    """Rows of global batches seen."""
    consumed_tokens: int


@attrs.frozen(kw_only=True)
class Begun:
    """What the beginning of a save cost the training."""

    before: Outcome | None
    """How the save before this one ended, where that had not been told yet."""
    waited_s: float
    """For the save before this one, because the disk is slower than the interval between saves; 0 as a rule."""
    stall_s: float
    """For the copy to host memory, and where saves are synchronous for all of it."""


class Saver:
    """Saves one run; entered once the model is restored, and left when the last save has ended."""

    def __init__(
        self,
        survey: Survey,
        data: DataSetup,
        setup: ModelSetup,
        run_dir: Path,
        run_id: str,
        may_commit: Callable[[], object] = lambda: None,
        callback_states: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Allocate the host memory of a save, so that the first costs what the others do; collective."""
        self._callback_states = callback_states
        options = survey.config.checkpoint
        self._survey = survey
        self._setup = setup
        self._run_id = run_id
        self._data = data.identity
        self._adapters = HostCopy(setup.store.adapters())
        self._optimizer = HostCopy(setup.store.optimizer(setup.optimizer))
        self._writer = CheckpointWriter(
            store_of(run_dir),
            Retention.of(options),
            asynchronous=options.asynchronous,
            may_commit=may_commit,
        )

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)

    def begin(self, position: Position, metrics: Mapping[str, float]) -> Begun:
        """Begin to save the state of this moment; collective.

        The host copies are those of the save before, so that one is waited for: a slow disk slows the training down
        rather than filling the memory.

        Raises:
            ConfigError: a callback has a state that cannot be saved.
        """
        callbacks = self._callback_states()
        started = time.monotonic()
        before = self._writer.wait()
        waited = time.monotonic() - started
        adapters, moments = self._adapters.take(), self._optimizer.take()
        self._writer.begin(
            Content(
                step=position.step,
                parts={
                    ADAPTER_DIRECTORY: self._adapters.state,
                    OPTIMIZER_DIRECTORY: {**self._optimizer.state, **rng_row(rng_state())},
                },
                describe=self._describe(position, metrics, self._steps_of_adam(), callbacks),
                ready=lambda: (adapters(), moments()),
            )
        )
        return Begun(
            before=before,
            waited_s=waited if waited > _NOTICED_WAIT_S else 0.0,
            stall_s=time.monotonic() - started - waited,
        )

    def _steps_of_adam(self) -> int:
        """Ask all ranks: a pipeline stage may have no adapters, and that of rank 0 may be one."""
        return next(count for count in gather_to_all(step_count(self._setup.optimizer)) if count is not None)

    def ended(self) -> Outcome | None:
        """Return how the last save ended, once; None while it is under way."""
        return self._writer.ended()

    def wait(self) -> Outcome | None:
        """Wait for the save that is under way, and return how it ended, once."""
        return self._writer.wait()

    def _describe(
        self, position: Position, metrics: Mapping[str, float], step_of_adam: int, callbacks: Mapping[str, Any]
    ) -> Callable[[Mapping[str, Mapping[str, StoredTensor]], Mapping[str, FileDigest]], Manifest]:
        survey = self._survey

        def describe(tensors: Mapping[str, Mapping[str, StoredTensor]], files: Mapping[str, FileDigest]) -> Manifest:
            return Manifest(
                run_id=self._run_id,
                step=position.step,
                consumed_samples=position.consumed_samples,
                consumed_tokens=position.consumed_tokens,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                base=survey.identity,
                shape=survey.shape,
                tokenizer_fingerprint=survey.tokenizer_fingerprint,
                data=self._data,
                lora=LoraSpec(settings=survey.config.lora, modules=survey.targets.modules),
                layout=survey.layout,
                metrics=metrics,
                optimizer={"step": step_of_adam},
                versions=versions(),
                config=flatten(survey.config),
                files=files,
                tensors={
                    name: _entry(name, tensor, part) for part in tensors for name, tensor in tensors[part].items()
                },
                program=survey.program.parts,
                callbacks=callbacks,
            )

        return describe


def _entry(name: str, tensor: StoredTensor, directory: str) -> TensorEntry:
    group: Any = "adapter" if directory == ADAPTER_DIRECTORY else "rng" if name.startswith("rng.") else "optimizer"
    return TensorEntry(shape=tensor.shape, dtype=tensor.dtype, group=group)
