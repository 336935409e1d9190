"""What is there before the first step: data told and compared, and the state taken from where the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from ckptrain.checkpoint.ranks import gather_to_all, on_rank0, together
from ckptrain.checkpoint.reading import reading
from ckptrain.checkpoint.working_copy import as_given, local_path
from ckptrain.convert.sources import open_source
from ckptrain.errors import DataError, StartRefused
from ckptrain.lifecycle.fit import data_problems
from ckptrain.lifecycle.journal import Journal
from ckptrain.lifecycle.phases import Lifecycle, Phase
from ckptrain.lifecycle.start_plan import Resume, WarmStart
from ckptrain.training.observers import Observers
from ckptrain.training.restore import restore_run, warm_start
from ckptrain.training.setup import DataSetup, ModelSetup
from ckptrain.training.start import Start, Survey


def start_facts(survey: Survey, run_dir: Path) -> dict[str, Any]:
    """Return what a person wants to know of a start besides its plan."""
    lora = survey.config.lora
    return {
        "run_dir": str(run_dir),
        "steps": survey.config.train.steps,
        "base": survey.base.name,
        "adapters": f"{lora.kind} of rank {lora.dim}, alpha {lora.alpha:g}",
        "processes": survey.layout.world_size,
    }


def tell_data(data: DataSetup, journal: Journal, told: Observers) -> None:
    """Journal and tell what became of the rows."""
    if data.train is not None:
        journal.record("data", train=attrs.asdict(data.train.summary))
        told.on_progress(f"training data: {data.train.summary.describe()}")
    if data.validation is not None:
        journal.record("data", validation=attrs.asdict(data.validation.summary))
        told.on_progress(f"validation data: {data.validation.summary.describe()}")


def check_data(data: DataSetup, start: Start, run_dir: Path) -> None:
    """Refuse samples that are not the same on all ranks, or not as many as they were; collective.

    Raises:
        DataError: a rank has other samples, of which each would learn its share.
        StartRefused: another version of ckptrain or of a library makes other samples of the same files, whose order
            would be another.
    """
    found = gather_to_all(data.identity)
    if others := [rank for rank, identity in enumerate(found) if identity != found[0]]:
        raise DataError(
            "the processes of this launch have different data",
            [
                f"rank {rank} has {found[rank].fingerprint[:12]}, rank 0 {found[0].fingerprint[:12]}: give all the same"
                for rank in others
            ],
        )
    saved = start.checkpoint.manifest.data if start.checkpoint is not None else None
    if saved is not None and (problems := data_problems(data.identity, saved)):
        raise StartRefused(f"cannot go on with the run in {run_dir}", problems)


def take_state(
    start: Start, survey: Survey, setup: ModelSetup, lifecycle: Lifecycle, journal: Journal, told: Observers
) -> None:
    """Fill the model from the checkpoint or the adapter that the plan names, if it names one; collective.

    Raises:
        RestoreMismatch: it does not hold what the model has, or memory does not hold what the plan says.
        CheckpointDamaged: it cannot be read.
    """
    plan = start.plan
    if isinstance(plan, WarmStart):
        _take_adapter(plan, survey, setup, journal, told)
    if not isinstance(plan, Resume):
        return
    assert start.checkpoint is not None
    with reading(start.checkpoint):
        receipt = restore_run(plan, start.checkpoint, setup, survey.config)
    journal.record("receipt", **receipt.to_dict())
    lifecycle.advance(Phase.RESTORED, step=plan.step)
    told.on_progress(
        f"restored {receipt.checkpoint}: {receipt.tensors_per_rank[0][0]} of {receipt.tensors_per_rank[0][1]}"
        f" tensors, optimizer step {receipt.optimizer_step}, learning rate {receipt.next_learning_rate:.3g} next,"
        f" random generators {receipt.rng}, next row {receipt.next_row}"
    )


def _take_adapter(plan: WarmStart, survey: Survey, setup: ModelSetup, journal: Journal, told: Observers) -> None:
    # Of a run in an object store every process fetches the checkpoint that rank 0 has decided on.
    where = on_rank0(lambda: as_given(plan.adapter))
    source = together(lambda: open_source(local_path(where), shape=survey.shape, kind=survey.config.lora.kind))
    with source.held():  # another run may prune it
        tensors = warm_start(source, setup)
    form = source.facts.form
    journal.record("warm_start", adapter=where, form=form, tensors=tensors)
    told.on_progress(f"adapter from {where}, a {form} ({tensors} tensors)")
