"""Save a run: every rank writes its pieces, rank 0 writes the manifest and commits, old checkpoints are pruned."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs

from ckptrain.checkpoint.integrity import CommittedCheckpoint, hash_file
from ckptrain.checkpoint.manifest import FileDigest, Manifest, TensorEntry
from ckptrain.checkpoint.ranks import gather_to_all, on_rank0, together
from ckptrain.checkpoint.sharded import StoredTensor, files_of_this_rank, save_tensors
from ckptrain.checkpoint.store import CheckpointStore, save_failures
from ckptrain.config.load import flatten
from ckptrain.errors import SaveFailed
from ckptrain.lifecycle.facts import LoraSpec
from ckptrain.megatron.optimizer import step_count
from ckptrain.megatron.state import rng_state
from ckptrain.training.setup import DataSetup, ModelSetup
from ckptrain.training.start import Survey, versions

ADAPTER_DIRECTORY = "adapter"
OPTIMIZER_DIRECTORY = "optimizer"


@attrs.frozen(kw_only=True)
class Position:
    """How far a run has come."""

    step: int
    """Optimizer steps done."""
    consumed_samples: int
    """Rows of global batches seen."""
    consumed_tokens: int


@attrs.frozen(kw_only=True)
class Saved:
    """A checkpoint that is committed."""

    checkpoint: CommittedCheckpoint
    num_bytes: int
    seconds: float


class Saver:
    """Writes the checkpoints of one run."""

    def __init__(self, survey: Survey, data: DataSetup, setup: ModelSetup, run_dir: Path, run_id: str) -> None:
        self._survey = survey
        self._setup = setup
        self._store = CheckpointStore(run_dir)
        self._run_id = run_id
        self._data = attrs.evolve(survey.data, num_samples=len(data.train.samples), num_rows=len(data.train.rows))

    def save(self, position: Position, metrics: Mapping[str, float]) -> Saved:
        """Write, commit, and prune; collective.

        Raises:
            SaveFailed: on every rank where it failed on any; what was committed before is untouched.
        """
        started = time.monotonic()
        staging = on_rank0(lambda: self._store.stage(position.step))
        try:
            tensors = self._write_tensors(staging)
            # Barrier by the gather: rank 0 may commit only what every rank has written, synced and hashed.
            digests: dict[str, FileDigest] = {}
            for part in gather_to_all(together(lambda: _digest_own_files(staging))):
                digests |= part
            step_of_adam = step_count(self._setup.optimizer)
            checkpoint = on_rank0(
                lambda: self._store.commit(staging, self._manifest(position, metrics, tensors, digests, step_of_adam))
            )
        except SaveFailed:
            on_rank0(lambda: self._store.discard(staging))
            raise
        options = self._survey.config.checkpoint
        on_rank0(lambda: self._store.prune(options.keep_last, options.keep_best, options.metric, [checkpoint.path]))
        return Saved(
            checkpoint=checkpoint,
            num_bytes=sum(digest.num_bytes for digest in digests.values()),
            seconds=time.monotonic() - started,
        )

    def _write_tensors(self, staging: Path) -> dict[str, TensorEntry]:
        store = self._setup.store
        adapter = save_tensors(store.adapters().to_save(), staging / ADAPTER_DIRECTORY)
        moments = store.optimizer(self._setup.optimizer).to_save()
        rest = save_tensors({**moments, **rng_state()}, staging / OPTIMIZER_DIRECTORY)
        return {
            **{name: _entry(tensor, "adapter") for name, tensor in adapter.items()},
            **{
                name: _entry(tensor, "rng" if name.startswith("rng.") else "optimizer") for name, tensor in rest.items()
            },
        }

    def _manifest(
        self,
        position: Position,
        metrics: Mapping[str, float],
        tensors: Mapping[str, TensorEntry],
        files: Mapping[str, FileDigest],
        step_of_adam: int,
    ) -> Manifest:
        survey = self._survey
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
            tensors=tensors,
        )


def _entry(tensor: StoredTensor, group: Any) -> TensorEntry:
    return TensorEntry(shape=tensor.shape, dtype=tensor.dtype, group=group)


def _digest_own_files(staging: Path) -> dict[str, FileDigest]:
    with save_failures(staging):
        return {path.relative_to(staging).as_posix(): hash_file(path) for path in files_of_this_rank(staging)}
