"""What does a program bring to a run that no configuration can say? Its functions, each under a name of its own.

A checkpoint cannot hold a function. It holds the name, and a resume under another name, or without the function, is
refused. No fingerprint of its code is kept beside it: the same code computes other things with other values around it,
and a comment or another Python makes other code of the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ckptrain.errors import ConfigError, DataError
from ckptrain.lifecycle.facts import ProgramParts

if TYPE_CHECKING:
    from torch import Tensor

type LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(logits float32 [tokens, vocabulary], labels int64 [tokens]) to the loss of each token, [tokens]."""

type SampleFunction = Callable[[int], Sequence[Mapping[str, Any]]]
"""(step, from 1) to the rows of its global batch."""

_LONGEST_NAME = 100


def _check_name(instance: object, _: Any, name: Any) -> None:
    kind = type(instance).__name__
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"{kind} cannot be made",
            [f"name is {name!r}, expected 1 to {_LONGEST_NAME} characters that say what the function computes"],
        )


def _check_function(instance: object, _: Any, function: Any) -> None:
    if not callable(function):
        raise ConfigError(f"{type(instance).__name__} cannot be made", [f"{function!r} is no function"])


@attrs.frozen
class Loss:
    """A loss function in the place of cross-entropy, for training; validation goes on telling cross-entropy.

    The function is given the logits of some learnt tokens, float32 [tokens, vocabulary], whole in every layout, and
    their labels, int64 [tokens]; it returns the loss of each, [tokens], with a gradient. How many come together, and
    which, is a matter of the layout: the loss of a token may depend on its own row alone. The mean over all learnt
    tokens of the global batch is what a step minimises.

    `name` stands for the function in checkpoints. Another function, or other values in it, need another name.
    """

    function: LossFunction = attrs.field(validator=_check_function)
    name: str = attrs.field(kw_only=True, validator=_check_name)


@attrs.frozen
class Samples:
    """A function that makes the samples of each step, in the place of `data.train`: for on-policy training.

    It is called on rank 0 when a step begins, with its number, from 1 and over all starts, and returns as many rows as
    `train.global_batch_size` says, in any format that files may have. Each is a sequence of its own.

    `name` stands for it in checkpoints. What it gave is nowhere: a resume goes on with the next step, and whether that
    gives what an uninterrupted run would have seen is the function's affair.
    """

    function: SampleFunction = attrs.field(validator=_check_function)
    name: str = attrs.field(kw_only=True, validator=_check_name)


@attrs.frozen(kw_only=True)
class Program:
    """All that a program brings to a run."""

    loss: Loss | None = None
    samples: Samples | None = None

    @property
    def parts(self) -> ProgramParts:
        """Return the names, as checkpoints have them."""
        return ProgramParts(
            loss=None if self.loss is None else self.loss.name,
            samples=None if self.samples is None else self.samples.name,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Say what is otherwise than the configuration lets one think."""
        notes = []
        if self.samples is not None:
            notes.append(
                f"samples are made by {self.samples.name!r}, a function of this program: what it gives cannot be"
                " compared with what it gave"
            )
        if self.loss is None:
            return tuple(notes)
        return (
            *notes,
            f"the loss is {self.loss.name!r}, a function of this program: only a program that has it can resume the"
            " run, and the logits of a micro-batch are held whole",
        )


def rows_of(samples: Samples, step: int, count: int) -> list[Mapping[str, Any]]:
    """Return the rows of a step.

    Raises:
        DataError: they are not as many as a global batch has, or not rows.
    """
    rows = list(samples.function(step))
    if len(rows) != count:
        raise DataError(
            f"samples {samples.name!r} gave {len(rows)} rows for step {step}",
            [f"expected {count}, which is train.global_batch_size"],
        )
    problems = [
        f"row {number}: expected a mapping, found {type(row).__name__}"
        for number, row in enumerate(rows, start=1)
        if not isinstance(row, Mapping)
    ]
    if problems:
        raise DataError(f"samples {samples.name!r} gave what is no row for step {step}", problems[:20])
    return rows
