"""All that is known of a start before anything heavy is done: the base, its shape, the layout, the disk, the plan.

Nothing here imports torch, so `ckptrain plan` tells in well under a second what `ckptrain run` will do, and a mistake
in the configuration costs no GPU time.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Any

import attrs

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.remote_store import store_of
from ckptrain.checkpoint.store import CheckpointStore, DamagedCheckpoint
from ckptrain.checkpoint.working_copy import local_path
from ckptrain.config.base import Base, locate_base
from ckptrain.config.checks import config_problems, unproven
from ckptrain.config.estimate import checkpoint_bytes
from ckptrain.config.fusion import fused_or_plain, fusion_obstacle, with_graphs
from ckptrain.config.identity import BaseIdentity, base_identity, tokenizer_fingerprint
from ckptrain.config.layout import BatchArithmetic, Layout, batch_arithmetic, layout_of
from ckptrain.config.schema import LoraConfig, RunConfig
from ckptrain.config.shape import ModelShape, read_shape
from ckptrain.config.targets import Targets, resolve_targets
from ckptrain.convert.pretrained import fetch
from ckptrain.convert.sources import open_source
from ckptrain.errors import CheckpointDamaged, ConfigError, StartRefused, first_problems
from ckptrain.installed import untested, untested_text, version_of
from ckptrain.lifecycle.facts import DataIdentity, LoraSpec, RunFacts
from ckptrain.lifecycle.start_plan import AlreadyDone, StartPlan, WarmStart, plan_start
from ckptrain.training.program import Program
from ckptrain.training.revisions import identify_data

_PACKAGES = ("ckptrain", "torch", "megatron-core", "megatron-bridge", "transformers", "transformer-engine")


@attrs.frozen(kw_only=True)
class Survey:
    """What a configuration leads to on this machine, whatever lies in the run directory; the same on every rank."""

    config: RunConfig
    base: Base
    identity: BaseIdentity
    tokenizer_fingerprint: str
    shape: ModelShape
    targets: Targets
    layout: Layout
    batches: BatchArithmetic
    data: DataIdentity
    notes: tuple[str, ...] = ()
    """What was chosen where the configuration leaves a choice."""
    program: Program = attrs.field(factory=Program)


@attrs.frozen(kw_only=True)
class Start:
    """The decision, and the damage that it found; made on rank 0 and sent to the others."""

    plan: StartPlan
    checkpoint: CommittedCheckpoint | None
    """What a Resume goes on from."""
    run_id: str | None
    """That of the run that is resumed; a new one is given otherwise."""
    damaged: tuple[DamagedCheckpoint, ...]


def survey_run(
    config: RunConfig, world_size: int, run_dir: Path | None = None, program: Program | None = None
) -> Survey:
    """Look at everything that a configuration names: base, data, and how the model is laid over `world_size` processes.

    Args:
        config: what the user asked for.
        world_size: number of processes.
        run_dir: where the run is or will be: a run that goes on keeps the kind of its adapters where that is left open.
        program: what is not in a configuration.

    Raises:
        ConfigError: the base, the targets, the layout or the layers that are asked for cannot be used.
        CkptrainError: `model.adapter` is nothing that can be read.
        DataError: a data file cannot be read.
    """
    if problems := unproven(config):
        raise ConfigError("cannot run this configuration yet", problems)
    base = fetch(locate_base(config.model))
    shape = read_shape(base)
    config, notes = _with_kind(config, shape, run_dir)
    if problems := config_problems(config, check_inputs=False):  # what `auto` turned out to be may not go with the rest
        raise ConfigError("the configuration contradicts what it starts from", problems)
    targets = resolve_targets(config.lora, shape)
    layout = layout_of(config, shape, world_size)
    # Where fused layers are asked for and cannot be, that is said before a GPU is used; what `auto` means, when it is.
    choice = fused_or_plain(config, fusion_obstacle(config, shape, layout), without_gpu=None)
    with_graphs(choice, config, layout, transformer_engine=config.model.backend != "local")
    data, identity = identify_data(config.data, run_dir)
    return Survey(
        config=attrs.evolve(config, data=data),
        base=base,
        identity=base_identity(base),
        tokenizer_fingerprint=tokenizer_fingerprint(base, config.data.chat_template),
        shape=shape,
        targets=targets,
        layout=layout,
        batches=batch_arithmetic(config, layout),
        data=identity,
        notes=notes,
        program=program or Program(),
    )


def lora_at_start(config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Return what the adapters are that a run goes on with or starts from, by key of the section `lora`.

    Raises:
        CkptrainError: `model.adapter` is nothing that can be read.
    """
    newest = store_of(run_dir).newest()
    if newest is not None:
        settings = newest.manifest.lora.settings
    elif config.model.adapter is not None:
        shape = read_shape(fetch(locate_base(config.model)))
        settings = open_source(local_path(config.model.adapter), shape=shape, kind=config.lora.kind).facts.lora.settings
    else:
        return {}
    keys = ("dim", "alpha", "target_modules", "exclude_modules")
    return {key: list(value) if isinstance(value := getattr(settings, key), tuple) else value for key in keys}


def _with_kind(config: RunConfig, shape: ModelShape, run_dir: Path | None) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the configuration with what `lora.kind: auto` means in it, and why; any other kind is what it says."""
    if config.lora.kind != "auto":
        return config, ()
    newest = None if run_dir is None else store_of(run_dir).newest()
    notes: tuple[str, ...] = ()
    origin = LoraConfig(kind="lora")
    if newest is not None:
        origin = newest.manifest.lora.settings
    elif config.model.adapter is not None:
        source = open_source(local_path(config.model.adapter), shape=shape).facts
        origin, notes = source.lora.settings, source.notes
    return attrs.evolve(config, lora=attrs.evolve(config.lora, kind=origin.kind)), notes


def decide_start(survey: Survey, run_dir: Path, *, read_contents: bool) -> Start:
    """Decide what a start in `run_dir` means; changes nothing on disk.

    Args:
        survey: what the configuration leads to.
        run_dir: the run directory, which need not exist.
        read_contents: compare the newest checkpoint's files with their digests, as a start does; without it a plan
            goes by names and sizes.

    Raises:
        StartRefused: the configuration contradicts what is on disk, or the disk has no room for a checkpoint.
        CheckpointDamaged: `checkpoint.on_damaged` is refuse and something is damaged, or the adapter's source is.
    """
    config = survey.config
    store = store_of(run_dir)
    newest, damaged = _newest_whole(store, read_contents=read_contents)
    source = None
    if newest is None and config.model.adapter is not None:
        source = open_source(local_path(config.model.adapter), shape=survey.shape, kind=config.lora.kind)
        if read_contents and (problems := source.problems()):
            raise CheckpointDamaged(
                f"cannot start from {source.path} (model.adapter): it is damaged", first_problems(problems)
            )
    plan = plan_start(
        config,
        RunFacts(
            run_dir=run_dir,
            base=survey.identity,
            tokenizer_fingerprint=survey.tokenizer_fingerprint,
            data=survey.data,
            lora=LoraSpec(settings=config.lora, modules=survey.targets.modules),
            layout=survey.layout,
            checkpoint=None if newest is None else newest.facts(),
            warm_start=None if source is None else source.facts,
            damaged=tuple(checkpoint.facts() for checkpoint in damaged),
            versions=versions(),
            adapter_dtype=config.lora.lora_dtype or config.model.dtype,
            program=survey.program.parts,
        ),
    )
    notes = [
        *survey.targets.notes,
        *survey.program.notes,
        *(survey.notes if isinstance(plan, WarmStart) else ()),
        *plan.notes,
    ]
    if not isinstance(plan, AlreadyDone):
        notes += _space_notes(survey, run_dir) if store.on_disk else []
        if others := untested():
            notes.append(untested_text(others))
    return Start(
        plan=attrs.evolve(plan, notes=tuple(notes)),
        checkpoint=newest,
        run_id=None if newest is None else newest.manifest.run_id,
        damaged=damaged,
    )


def _space_notes(survey: Survey, run_dir: Path) -> list[str]:
    """Say where the disk has room for few checkpoints; a full file system can fail long before it shows no space.

    Raises:
        StartRefused: there is none for a single one.
    """
    needed = checkpoint_bytes(survey.config, survey.shape, survey.targets).total
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    # Old checkpoints go after the new one is committed, so one more than are kept lie there for a while.
    wanted = (survey.config.checkpoint.keep_last + 1) * needed
    found = f"the disk of {run_dir} has {_mb(free)} free, and a checkpoint takes {_mb(needed)}"
    if free < needed:
        raise StartRefused("cannot save here", [f"{found}: free some space, or use a --run-dir on another disk"])
    if free < wanted:
        return [f"{found}; checkpoint.keep_last={survey.config.checkpoint.keep_last} needs {_mb(wanted)}"]
    return []


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _newest_whole(
    store: CheckpointStore, *, read_contents: bool
) -> tuple[CommittedCheckpoint | None, tuple[DamagedCheckpoint, ...]]:
    """Return the newest checkpoint that is what its manifest says, and everything found damaged on the way to it."""
    found = store.scan()
    damaged = [checkpoint for checkpoint in found if isinstance(checkpoint, DamagedCheckpoint)]
    whole = [checkpoint for checkpoint in found if isinstance(checkpoint, CommittedCheckpoint)]
    for checkpoint in reversed(whole):
        problems = store.problems(checkpoint) if read_contents else []
        if not problems:
            return checkpoint, tuple(damaged)
        damaged.append(DamagedCheckpoint(path=checkpoint.path, step=checkpoint.step, problems=tuple(problems)))
    return None, tuple(damaged)


def versions() -> dict[str, str]:
    """Return the versions that numbers may depend on, of what is installed."""
    found = {package: version_of(package) for package in _PACKAGES}
    return {"python": platform.python_version()} | {package: there for package, there in found.items() if there}
