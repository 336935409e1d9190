"""What a start means: one of four plans, decided from the configuration and the facts, with the reason in words.

Megatron decides this by a flag, `finetune`, that is rewritten while it runs. Here a pure function decides once, rank 0
sends the plan to the others, and nothing changes it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs

from ckptrain.config.load import flatten
from ckptrain.config.schema import RunConfig
from ckptrain.errors import CheckpointDamaged, StartRefused
from ckptrain.lifecycle.drift import differences
from ckptrain.lifecycle.facts import CheckpointFacts, DamageFacts, RunFacts
from ckptrain.lifecycle.fit import identity_problems, resume_notes, warm_start_notes, warm_start_problems


@attrs.frozen(kw_only=True)
class _Plan:
    """What every plan has: why it was chosen, and what is worth knowing about it."""

    kind: ClassVar[str]
    finetune: ClassVar[bool | None]
    """What Megatron calls this: true starts from weights alone, false goes on with a training, None does neither."""

    reason: str
    notes: tuple[str, ...] = ()

    @property
    def first_step(self) -> int | None:
        """The first step (from 1) that this start trains; None where there is none left."""
        return 1

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in JSON's types, for the journal, for --json and for `plan_from_dict`."""
        fields = attrs.asdict(self, value_serializer=lambda _plan, _field, value: _jsonable(value))
        return {"plan": self.kind, "finetune": self.finetune, "first_step": self.first_step, **fields}


@attrs.frozen(kw_only=True)
class FreshStart(_Plan):
    """Load the base, initialise the adapter, start at step 1."""

    kind: ClassVar[str] = "FreshStart"
    finetune: ClassVar[bool | None] = True


@attrs.frozen(kw_only=True)
class WarmStart(_Plan):
    """Load the base, take the adapter from another checkpoint, and all else anew: start at step 1."""

    kind: ClassVar[str] = "WarmStart"
    finetune: ClassVar[bool | None] = True

    adapter: Path
    """The checkpoint directory that the adapter comes from."""


@attrs.frozen(kw_only=True)
class Resume(_Plan):
    """Load the base, take everything else from this run's checkpoint, go on after its step."""

    kind: ClassVar[str] = "Resume"
    finetune: ClassVar[bool | None] = False

    checkpoint: Path
    step: int
    """Optimizer steps done by the checkpoint."""
    consumed_samples: int
    consumed_tokens: int
    restore_optimizer: bool
    restore_rng: bool
    layout_changed: bool

    @property
    def first_step(self) -> int:
        """The step after the checkpoint's."""
        return self.step + 1


@attrs.frozen(kw_only=True)
class AlreadyDone(_Plan):
    """Do nothing: the checkpoint is at the target step."""

    kind: ClassVar[str] = "AlreadyDone"
    finetune: ClassVar[bool | None] = None

    checkpoint: Path
    step: int

    @property
    def first_step(self) -> None:
        """No step is left."""
        return


StartPlan = FreshStart | WarmStart | Resume | AlreadyDone

_KINDS: Mapping[str, Callable[..., StartPlan]] = {
    kind.kind: kind for kind in (FreshStart, WarmStart, Resume, AlreadyDone)
}


def plan_from_dict(values: Mapping[str, Any]) -> StartPlan:
    """Return the plan that `to_dict` was called on."""
    derived = {"plan", "finetune", "first_step"}
    fields = {key: value for key, value in values.items() if key not in derived}
    for key in {"checkpoint", "adapter"} & fields.keys():
        fields[key] = Path(fields[key])
    return _KINDS[values["plan"]](**{**fields, "notes": tuple(fields["notes"])})


def plan_start(config: RunConfig, run: RunFacts) -> StartPlan:
    """Decide what this start means.

    A checkpoint of this run beats an adapter from elsewhere, so that a relaunched job goes on instead of starting over.

    Raises:
        CheckpointDamaged: a checkpoint of this run is damaged and `checkpoint.on_damaged` is refuse.
        StartRefused: the configuration contradicts what is on disk; every contradiction is listed.
    """
    if run.damaged and config.checkpoint.on_damaged == "refuse":
        raise CheckpointDamaged(
            f"cannot start in {run.run_dir}: it holds damaged checkpoints, and checkpoint.on_damaged is refuse; set it"
            " to fallback to have them moved to quarantine/ and use the newest whole one, or move them away yourself",
            [f"{damage.name}: {problem}" for damage in run.damaged for problem in damage.problems],
        )
    if run.checkpoint is not None:
        return _go_on(config, run, run.checkpoint)
    return _start(config, run)


def _start(config: RunConfig, run: RunFacts) -> StartPlan:
    """Plan the first start of a run."""
    where = run.run_dir / "checkpoints"
    found = "only damaged checkpoints" if run.damaged else "no checkpoint"
    problems = []
    if config.train.start == "resume":
        problems.append(
            f"train.start is resume and {where} holds {found}; set train.start=auto to start, or give the --run-dir of"
            " the run to go on with"
        )
    if config.model.adapter is not None:
        problems += _warm_start_problems(config, run)
    if problems:
        raise StartRefused(f"cannot start in {run.run_dir}", problems)
    notes = _damage_notes(run.damaged, "nothing is left to go on from, so the run starts over at step 1")
    if run.warm_start is not None and config.model.adapter is not None:
        source = run.warm_start
        return WarmStart(
            reason=f"{where} holds {found}, and model.adapter is {source.path}, whose adapter fits",
            notes=(*notes, *warm_start_notes(run, source)),
            adapter=source.path,
        )
    return FreshStart(reason=f"{where} holds {found}, and model.adapter is not set", notes=notes)


def _warm_start_problems(config: RunConfig, run: RunFacts) -> list[str]:
    if run.warm_start is None:
        return [f"model.adapter is {config.model.adapter}, where no checkpoint was read; give a run or a checkpoint"]
    return warm_start_problems(run, run.warm_start)


def _go_on(config: RunConfig, run: RunFacts, checkpoint: CheckpointFacts) -> StartPlan:
    """Plan a start in a directory that holds a committed checkpoint."""
    changes = differences(checkpoint.config, flatten(config))
    problems = []
    if config.train.start == "fresh":
        problems.append(
            f"train.start is fresh and {run.run_dir} holds {checkpoint.path.name}; use a new --run-dir, or"
            " train.start=resume to go on from it"
        )
    problems += identity_problems(run, checkpoint)
    problems += [f"{change}, and it {change.rule.effect}; {change.remedy}" for change in changes if change.refused]
    problems += _missing_state(config, checkpoint)
    if problems:
        raise StartRefused(f"cannot resume from {checkpoint.path}", problems)

    damage = _damage_notes(run.damaged, f"going on from {checkpoint.path.name}")
    if checkpoint.step >= config.train.steps:
        return AlreadyDone(
            reason=f"{checkpoint.path.name} is at step {checkpoint.step}, and train.steps is {config.train.steps};"
            " set train.steps higher to train on",
            notes=damage,
            checkpoint=checkpoint.path,
            step=checkpoint.step,
        )
    return Resume(
        reason=f"{run.run_dir} holds {checkpoint.path.name}: going on with step {checkpoint.step + 1} of"
        f" {config.train.steps}",
        notes=(*damage, *resume_notes(config, run, checkpoint, changes)),
        checkpoint=checkpoint.path,
        step=checkpoint.step,
        consumed_samples=checkpoint.consumed_samples,
        consumed_tokens=checkpoint.consumed_tokens,
        restore_optimizer=config.restore.optimizer,
        restore_rng=config.restore.rng,
        layout_changed=checkpoint.layout != run.layout,
    )


def _missing_state(config: RunConfig, checkpoint: CheckpointFacts) -> list[str]:
    """Say what a resume would have to make up: state that is missing is never started anew without being asked for."""
    problems = []
    if config.restore.optimizer and not checkpoint.has_optimizer:
        problems.append(
            "the checkpoint holds no optimizer state; set restore.optimizer=false to start the moments anew, or use it"
            " as model.adapter in a new --run-dir"
        )
    if config.restore.rng and not checkpoint.has_rng:
        problems.append("the checkpoint holds no random number states; set restore.rng=false to seed them anew")
    return problems


def _damage_notes(damaged: tuple[DamageFacts, ...], outcome: str) -> tuple[str, ...]:
    return tuple(
        f"{damage.name} is damaged ({'; '.join(damage.problems)}): it is moved to quarantine/, and {outcome}"
        for damage in damaged
    )


def _jsonable(value: object) -> object:
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
