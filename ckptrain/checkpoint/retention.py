"""Which checkpoints are kept, and why: a rule over steps and metrics that reads no disk and removes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Self

import attrs

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.config.schema import CheckpointConfig


@attrs.frozen(kw_only=True)
class Retention:
    """What a run keeps of its checkpoints; one that any of these keeps is kept."""

    keep_last: int = attrs.field(validator=attrs.validators.ge(1))
    """So many of the newest."""
    keep_every: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))
    """Those of steps that are multiples of this."""
    keep_best: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """So many of the best by `metric`."""
    metric: str = "val_loss"
    """Lower is better; a checkpoint without it is not among the best."""

    @classmethod
    def of(cls, options: CheckpointConfig) -> Self:
        """Return what a configuration asks for."""
        return cls(
            keep_last=options.keep_last,
            keep_every=options.keep_every,
            keep_best=options.keep_best,
            metric=options.metric,
        )


@attrs.frozen(kw_only=True)
class Verdict:
    """What is to become of one checkpoint."""

    checkpoint: CommittedCheckpoint
    reasons: tuple[str, ...]
    """Why it is kept, in words; none where it goes."""

    @property
    def kept(self) -> bool:
        """Whether it stays."""
        return bool(self.reasons)


def judge(
    checkpoints: Sequence[CommittedCheckpoint], retention: Retention, in_use: Collection[Path] = ()
) -> list[Verdict]:
    """Say of every whole checkpoint of a run, by step, why it is kept or that it goes.

    The newest is kept whatever the rule says, so the last good one never goes. Damaged ones are not to be among
    `checkpoints`: they are neither kept by a rule nor removed by one.
    """
    by_step = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    last = {checkpoint.step for checkpoint in by_step[-retention.keep_last :]}
    best = _best_steps(by_step, retention)
    names = {path.name for path in in_use}

    def reasons(checkpoint: CommittedCheckpoint) -> Iterator[str]:
        step = checkpoint.step
        if step == by_step[-1].step:
            yield "newest"
        elif step in last:
            yield f"one of the last {retention.keep_last}"
        if retention.keep_every is not None and step % retention.keep_every == 0:
            yield "every step" if retention.keep_every == 1 else f"every {_ordinal(retention.keep_every)} step"
        if step in best[:1]:
            yield f"best {retention.metric}"
        elif step in best:
            yield f"one of the best {retention.keep_best} by {retention.metric}"
        if checkpoint.path.name in names:
            yield "in use"

    return [Verdict(checkpoint=checkpoint, reasons=tuple(reasons(checkpoint))) for checkpoint in by_step]


def _best_steps(by_step: Sequence[CommittedCheckpoint], retention: Retention) -> list[int]:
    """Return the steps of the best, best first; of two equally good ones the newer, which has seen more."""
    metric = retention.metric
    measured = [checkpoint for checkpoint in reversed(by_step) if metric in checkpoint.manifest.metrics]
    ranked = sorted(measured, key=lambda checkpoint: checkpoint.manifest.metrics[metric])
    return [checkpoint.step for checkpoint in ranked[: retention.keep_best]]


def _ordinal(number: int) -> str:
    """Write 2nd, 3rd, 4th, 11th, 21st."""
    teens = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
