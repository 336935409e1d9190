"""A frozen weight and its adapter in one matrix, so that one product computes both.

The matrix is

    [ W   s B ]      [out_features, in_features]    [out_features, rank]
    [ A    .  ]      [rank, in_features]

With h = A x beside x, and dh = (s B)^T dy beside dy, the layer and its gradient are each one product over a slightly
longer inner dimension, and not a product and a second pass over its output:

    y  = [W  s B] [x; h]            dx = [W; A]^T [dy; dh]

The rank is that of all adapters of the layer together: where q, k and v have one each, B is block diagonal. It is
padded with zeros to a multiple of eight, as 16-byte loads want it.

Under tensor parallelism a process has some rows of W or some of its columns. What it lacks of A or B it gets from the
others, once a step, and its matrix is that of its own slice:

    rows of W (column parallel): A whole, its rows of B.     dx, and dh where A's gradient needs it, are sums
    columns of W (row parallel): its columns of A, B whole.  y, and h where B's gradient needs it, are sums

so a layer exchanges no more than it does without adapters, and twice rank values a token.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
from collections.abc import Sequence
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.core import parallel_state
from torch import Tensor, nn

from ckptrain.megatron.fused.kernels import copy_rows
from ckptrain.megatron.split_lora import Parts, SplitLoRALinear

# Values that 16 bytes hold of a 2-byte type.
_RANK_MULTIPLE = 8

Cut = Literal["column", "row"]
"""How tensor parallelism cuts a weight: column parallel layers share its output features, row parallel its inputs."""


@attrs.frozen(kw_only=True, eq=False)
class Side:
    """What goes into a layer or, backwards, comes to its output, beside its image under the adapters."""

    whole: Tensor
    """[tokens, features + rank]"""
    values: Tensor
    """x or dy, [tokens, features]; a view of `whole`, to be written."""
    image: Tensor
    """h or dh, [tokens, rank]; a view of `whole`."""

    @classmethod
    def empty(cls, tokens: int, features: int, rank: int, like: Tensor) -> Side:
        """Allocate one of `like`'s type."""
        whole = torch.empty(tokens, features + rank, dtype=like.dtype, device=like.device)
        return cls(whole=whole, values=whole[:, :features], image=whole[:, features:])

    @classmethod
    def around(cls, values: Tensor, rank: int) -> Side:
        """Return one with these values, [tokens, features], in place where they are the left of a matrix with room.

        `norm_backward` and `AdaptedWeight.forward` leave such room; others are copied.
        """
        tokens, features = values.shape
        row, column = values.stride()
        is_left = column == 1 and not values.storage_offset() and row >= features + rank
        if is_left and values.untyped_storage().nbytes() == tokens * row * values.element_size():
            whole = values.as_strided((tokens, features + rank), (row, 1))
            return cls(whole=whole, values=values, image=whole[:, features:])
        side = cls.empty(tokens, features, rank, values)
        copy_rows(values, side.values)
        return side


@attrs.frozen(kw_only=True, eq=False)
class _Adapter:
    """One adapter of the layer, and its places in the matrix."""

    lora_a: nn.Parameter
    """[rank, in_features]; under tensor parallelism a process has some of the rows, or of the columns."""
    lora_b: nn.Parameter
    """[rows, rank]; under tensor parallelism a process has some of the rows."""
    scale: float
    columns: slice
    """Of the joint rank."""
    part: str | None
    """Which of the layer's parts it adapts; None is the whole."""


class AdaptedWeight:
    """The weight of one layer, or this process's slice of it, with what adapters it has."""

    def __init__(self, module: nn.Module, cut: Cut) -> None:
        """Move the weight of a layer, which an adapter may be wrapped around, into a matrix with room for both."""
        self._cut = cut
        self._size = parallel_state.get_tensor_model_parallel_world_size()
        self._number = parallel_state.get_tensor_model_parallel_rank()
        linear: Any = getattr(module, "to_wrap", module)
        self._parts: Parts | None = module.parts if isinstance(module, SplitLoRALinear) else None
        self._adapters = _adapters(module)
        self.out_features, self.in_features = linear.weight.shape
        used = self._adapters[-1].columns.stop if self._adapters else 0
        self.rank = -(-used // _RANK_MULTIPLE) * _RANK_MULTIPLE
        bias = getattr(linear, "bias", None)  # Transformer Engine has an empty one where there is none
        self.bias: Tensor | None = None if bias is None or not bias.numel() else bias.detach()
        self.leaves: Sequence[Tensor] = self.parameters
        """What autograd is told to give the gradients of `parameters` to."""
        self._hold(linear)

    def _hold(self, linear: Any) -> None:
        weight = linear.weight.data
        matrix = weight.new_zeros(self.out_features + self.rank, self.in_features + self.rank)
        matrix[: self.out_features, : self.in_features] = weight
        linear.weight.data = matrix[: self.out_features, : self.in_features]
        self._forwards, self._backwards = matrix[: self.out_features], matrix[:, : self.in_features]
        self.lora_a = matrix[self.out_features :, : self.in_features]
        """A of all adapters, [rank, in_features]."""
        self.lora_b = matrix[: self.out_features, self.in_features :]
        """B of all adapters times their scale, [out_features, rank]."""

    def input(self, tokens: int, like: Tensor) -> Side:
        """Return a place for x and h."""
        return Side.empty(tokens, self.in_features, self.rank, like)

    def around(self, values: Tensor) -> Side:
        """Return a side with x or dy in it, and a place for h or dh."""
        return Side.around(values, self.rank)

    def output(self, tokens: int, like: Tensor) -> Side:
        """Return a place for dy and dh."""
        return Side.empty(tokens, self.out_features, self.rank, like)

    def forward(self, side: Side, residual: Tensor | None = None, *, room: int = 0) -> Tensor:
        """Write h = A x and return [W  s B] [x; h] with the bias or a residual added, [tokens, out_features].

        Behind each row there is `room` for more values.
        """
        if self.rank:
            torch.mm(side.values, self.lora_a.t(), out=side.image)
        if self._size == 1 or self._cut == "column":
            return self._product(side, self.bias if residual is None else residual, room)
        out = self._summed(self._product(side, None, room))
        return out if residual is None else out.add_(residual)

    def kept_image(self, side: Side) -> Tensor:
        """Return a copy of the whole h, [tokens, rank]."""
        h = side.image.clone()
        return self._summed(h) if self._cut == "row" else h

    def _product(self, side: Side, added: Tensor | None, room: int) -> Tensor:
        out = side.whole.new_empty(len(side.whole), self.out_features + room)[:, : self.out_features]
        if added is None:
            return torch.mm(side.whole, self._forwards.t(), out=out)
        return torch.addmm(added, side.whole, self._forwards.t(), out=out)

    def backward_image(self, side: Side) -> None:
        """Write dh = (s B)^T dy."""
        if self.rank:
            torch.mm(side.values, self.lora_b, out=side.image)

    def backward(self, side: Side) -> Tensor:
        """Return [W; A]^T [dy; dh], [tokens, in_features]."""
        dx = self._backward_product(side)
        return self._summed(dx) if self._cut == "column" else dx

    def _backward_product(self, side: Side) -> Tensor:
        return side.whole @ self._backwards

    def whole_backward_image(self, side: Side) -> Tensor:
        """Return the whole dh, [tokens, rank], of which every process has its own output features' part."""
        return self._summed(side.image.clone()) if self._size > 1 and self._cut == "column" else side.image

    def _summed(self, values: Tensor) -> Tensor:
        """Sum over the tensor parallel processes, in place."""
        if self._size > 1 and values.numel():
            dist.all_reduce(values, group=parallel_state.get_tensor_model_parallel_group())
        return values

    def _joined(self, values: Tensor) -> Tensor:
        """Return the rows that all tensor parallel processes have."""
        if self._size == 1:
            return values
        whole = values.new_empty(self._size * len(values), values.shape[1])
        dist.all_gather_into_tensor(whole, values, group=parallel_state.get_tensor_model_parallel_group())
        return whole

    def _own(self, values: Tensor) -> Tensor:
        """Return this process's rows of what `_joined` joins."""
        return values.chunk(self._size)[self._number]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """A and B of each adapter in turn."""
        return [weight for adapter in self._adapters for weight in (adapter.lora_a, adapter.lora_b)]

    def take_adapters(self) -> None:
        """Copy the adapters as they are now into the matrix; collective over tensor parallel processes."""
        for adapter in self._adapters:
            lora_a, lora_b = adapter.lora_a.detach(), adapter.lora_b.detach()
            if self._cut == "column":
                lora_a = self._joined(lora_a)
            else:
                lora_b = self._joined(lora_b)
            self.lora_a[adapter.columns].copy_(lora_a)
            places = self._rows(self.lora_b[:, adapter.columns], adapter.part)
            torch.mul(lora_b.view(places.shape), adapter.scale, out=places)

    def gradients(self, lora_a: Tensor, lora_b: Tensor) -> list[Tensor]:
        """Return the gradients of `parameters`.

        Args:
            lora_a: that of A of all adapters, [rank, in_features].
            lora_b: dy^T h, [out_features, rank].
        """
        found = []
        for adapter in self._adapters:
            of_a = lora_a[adapter.columns]
            of_b = self._rows(lora_b[:, adapter.columns], adapter.part) * adapter.scale
            if self._cut == "column":
                of_a = self._own(of_a)
            else:
                of_b = self._own(of_b)
            found += [of_a, of_b.reshape(adapter.lora_b.shape)]
        return found

    def _rows(self, matrix: Tensor, part: str | None) -> Tensor:
        """Return the rows of a matrix [out_features, columns] that a part of the layer has, as a view of it."""
        if part is None or self._parts is None:
            return matrix
        blocks = matrix.unflatten(0, (self._parts.groups, -1))
        sizes = list(self._parts.widths.values())
        return blocks.split(sizes, dim=1)[list(self._parts.widths).index(part)]


def _adapters(module: nn.Module) -> list[_Adapter]:
    by_part: Sequence[tuple[str | None, Any]] = []
    if isinstance(module, SplitLoRALinear):
        by_part = list(module.adapter.items())
    elif isinstance(module, LoRALinear):
        by_part = [(None, module.adapter)]
    found: list[_Adapter] = []
    for part, adapter in by_part:
        start = found[-1].columns.stop if found else 0
        found.append(
            _Adapter(
                lora_a=adapter.linear_in.weight,
                lora_b=adapter.linear_out.weight,
                scale=adapter.alpha / adapter.dim,
                columns=slice(start, start + adapter.dim),
                part=part,
            )
        )
    return found
