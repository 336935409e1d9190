"""The tensors of a checkpoint as a process reads them by itself: a few at a time, to be looked at and compared.

Nothing of Megatron is needed, and whichever layout saved a tensor, it is read whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import attrs
import torch
from torch import Tensor

from ckptrain.checkpoint.contents import directory_of, tensor_bytes
from ckptrain.checkpoint.integrity import CommittedCheckpoint, verify_files
from ckptrain.checkpoint.manifest import TensorEntry
from ckptrain.checkpoint.sharded import load_tensors
from ckptrain.errors import CheckpointDamaged, first_problems

_BYTES_AT_ONCE = 64 << 20
"""Small tensors are read together up to this, because every read costs some milliseconds; larger ones by themselves."""
_VALUES_AT_ONCE = 1 << 20
"""Of a tensor so many values at a time are computed with, as float64."""


@attrs.frozen(kw_only=True)
class Numbers:
    """What the values of a tensor are like."""

    norm: float
    """Euclidean, of the finite values."""
    largest: float
    """The largest absolute value among them."""
    num_not_finite: int
    """How many are NaN or infinite."""


@attrs.frozen(kw_only=True)
class Change:
    """How far a tensor is from another of the same shape."""

    norm: float
    """Euclidean norm of the difference, over the values that are finite on both sides."""
    norm_before: float
    """Euclidean norm of the first tensor, over the same values."""
    largest: float
    """The largest absolute difference among them."""
    num_not_finite: int
    """How many values are NaN or infinite on either side."""

    @property
    def relative(self) -> float | None:
        """The norm of the difference relative to the first tensor's; None where that is 0."""
        return self.norm / self.norm_before if self.norm_before else None


def read_each(checkpoint: CommittedCheckpoint, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Give tensors of a checkpoint by name, in an order that depends on nothing but the names and the manifest.

    The files are compared with their digests first. Memory is bounded by the largest tensor, or by 64 MiB where all are
    smaller: a tensor that was given should be let go of before the next is asked for.

    Raises:
        CheckpointDamaged: its files are not what the manifest says.
    """
    if problems := verify_files(checkpoint):
        raise CheckpointDamaged(f"cannot read {checkpoint.path}: it is damaged", first_problems(problems))
    entries = checkpoint.manifest.tensors
    by_directory: dict[str, list[str]] = {}
    for name in sorted(names):
        by_directory.setdefault(directory_of(entries[name]), []).append(name)
    for directory, wanted in sorted(by_directory.items()):
        for portion in _portions({name: entries[name] for name in wanted}):
            state = {
                name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for name, entry in portion.items()
            }
            load_tensors(state, checkpoint.path / directory, alone=True)
            while state:
                name = next(iter(state))
                yield name, state.pop(name)


def measure(tensor: Tensor) -> Numbers:
    """Return what the values are like, computed in float64."""
    squares, largest, num_not_finite = 0.0, 0.0, 0
    for part in tensor.reshape(-1).split(_VALUES_AT_ONCE):
        values = part.double()
        finite = values[values.isfinite()]
        num_not_finite += values.numel() - finite.numel()
        squares += finite.square().sum().item()
        largest = max(largest, _largest(finite))
    return Numbers(norm=math.sqrt(squares), largest=largest, num_not_finite=num_not_finite)


def compare(before: Tensor, after: Tensor) -> Change | None:
    """Return how far two tensors of one form are apart, computed in float64; None where all their bits are equal."""
    if torch.equal(before.reshape(-1).view(torch.uint8), after.reshape(-1).view(torch.uint8)):
        return None
    squares, squares_before, largest, num_not_finite = 0.0, 0.0, 0.0, 0
    parts = (tensor.reshape(-1).split(_VALUES_AT_ONCE) for tensor in (before, after))
    for part_before, part_after in zip(*parts, strict=True):
        old, new = part_before.double(), part_after.double()
        finite = old.isfinite() & new.isfinite()
        num_not_finite += int((~finite).sum())
        old, difference = old[finite], (new - old)[finite]
        squares += difference.square().sum().item()
        squares_before += old.square().sum().item()
        largest = max(largest, _largest(difference))
    return Change(
        norm=math.sqrt(squares),
        norm_before=math.sqrt(squares_before),
        largest=largest,
        num_not_finite=num_not_finite,
    )


def zero_layers(tensor: Tensor) -> list[int]:
    """Return where along its first axis, that of the layers, a tensor is all zero."""
    return [number for number, layer in enumerate(tensor) if not layer.any()]


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _portions(entries: Mapping[str, TensorEntry]) -> Iterator[dict[str, TensorEntry]]:
    """Cut tensors into runs that are read together."""
    portion: dict[str, TensorEntry] = {}
    num_bytes = 0
    for name, entry in entries.items():
        if portion and num_bytes + tensor_bytes(entry) > _BYTES_AT_ONCE:
            yield portion
            portion, num_bytes = {}, 0
        portion[name] = entry
        num_bytes += tensor_bytes(entry)
    if portion:
        yield portion
