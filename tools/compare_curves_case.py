"""What do both sides of tools/compare_curves.py train? One description, in the words of neither."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal

import attrs
from forked import launch

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHARED_A: Mapping[str, str] = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Of which projection Megatron's fused layer has the A of another."""
Kind = Literal["canonical", "lora"]


@attrs.frozen(kw_only=True)
class Case:
    """A training, which each side translates for itself."""

    base: Path
    """A Hugging Face directory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    train: Path
    """JSON lines of `messages`, of which the last is learnt."""
    validation: Path
    longest_tokens: int = 512
    """No sample is longer."""
    kind: Kind = "canonical"
    """canonical: an A for each projection, as PEFT has it; lora: one for each of Megatron's fused layers."""
    rank: int = 8
    alpha: int = 16
    dropout: float = 0.0
    dropout_position: Literal["pre", "post"] = "pre"
    targets: tuple[str, ...] = EVERY
    steps: int = 20
    samples_per_step: int = 4
    lr: float = 1.0e-2
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 2
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1.0e-8
    clip_grad: float = 0.5
    eval_every_steps: int = 5
    seed: int = 1234
    """Of the order of the samples."""
    forks: bool = True
    """Whether each side may be a fork, which has its imports already; on a GPU it must be a new process."""


@attrs.frozen(kw_only=True)
class Curve:
    """What one side saw."""

    losses: list[float]
    """Mean cross-entropy over the learnt tokens of a step's samples, in nats."""
    grad_norms: list[float]
    """Before clipping."""
    learning_rates: list[float]
    learnt_tokens: list[int]
    validation: dict[int, float]
    """The same mean over the validation file, by the steps before it."""


@attrs.frozen(kw_only=True)
class Difference:
    """How far two curves are apart, at the worst step and in the mean."""

    loss_max: float
    loss_mean: float
    validation_max: float
    grad_norm_max: float
    """Relative to the other's."""
    learning_rate_max: float
    """Relative to the largest rate."""
    same_tokens: bool

    @property
    def largest(self) -> float:
        """The largest of the losses, of both kinds."""
        return max(self.loss_max, self.validation_max)


def difference(ours: Curve, theirs: Curve) -> Difference:
    """Compare two curves of as many steps.

    Raises:
        ValueError: they are not of as many steps, or did not validate after the same ones.
    """
    if ours.validation.keys() != theirs.validation.keys():
        raise ValueError(f"validated after {sorted(ours.validation)} and after {sorted(theirs.validation)}")
    losses = _apart(ours.losses, theirs.losses)
    norms = _apart(ours.grad_norms, theirs.grad_norms)
    rates = _apart(ours.learning_rates, theirs.learning_rates)
    return Difference(
        loss_max=max(losses),
        loss_mean=sum(losses) / len(losses),
        validation_max=max(abs(loss - theirs.validation[step]) for step, loss in ours.validation.items()),
        grad_norm_max=max(apart / norm for apart, norm in zip(norms, theirs.grad_norms, strict=True)),
        learning_rate_max=max(rates) / max(theirs.learning_rates),
        same_tokens=ours.learnt_tokens == theirs.learnt_tokens,
    )


def _apart(ours: list[float], theirs: list[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(ours, theirs, strict=True)]


def apart[T](case: Case, act: Callable[[], T]) -> T:
    """Do something of a case in a process of its own; what is not forked must be picklable."""
    [result] = all_apart(case, [act])
    return result


def all_apart[T](case: Case, acts: Sequence[Callable[[], T]]) -> list[T]:
    """Do several things, each in a process of its own: forks one after the other, others at the same time.

    A small model keeps a GPU busy for a fraction of the time, so several get on as well as one.
    """
    if case.forks:
        return [launch(1, act, timeout_s=3600)[0] for act in acts]
    with ProcessPoolExecutor(len(acts), mp_context=multiprocessing.get_context("spawn")) as pool:
        return [doing.result() for doing in [pool.submit(act) for act in acts]]


def settings_of(case: Case) -> dict[str, Any]:
    """Return a case in JSON's types, without where things lie."""
    return attrs.asdict(case, filter=lambda field, _: field.name not in ("base", "train", "validation", "forks"))
