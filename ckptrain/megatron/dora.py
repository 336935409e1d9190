"""DoRA as Hugging Face PEFT has it: rows of W + s B A, each scaled to a length that is learnt.

    y = W x + (m / n - 1) W x + (m / n) s B A x + bias

with s = alpha / dim, m the magnitudes and n the norms of the rows of W + s B A. No gradient goes through n (Liu et al.
2024, arXiv:2402.09353, section 4.3). Every part of a fused layer has A, B and magnitudes of its own.

W + s B A is never formed. The square of its i-th row's norm is

    |w_i|^2 + 2 s (W A^T)_i . b_i + s^2 b_i (A A^T) . b_i

and where tensor parallelism cuts the rows each process has its own, where it cuts the columns they are sums over the
processes. Megatron-Bridge's DoRA has one A and one norm for q, k and v together, so nothing of it is used.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.canonical_lora import ModuleDict
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.utils import ParallelLinearAdapter
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from ckptrain.config.linear import MAGNITUDE
from ckptrain.config.modules import SPLIT
from ckptrain.megatron.sequence import adapter_attributes, gather_slices, learn_from_slices, take_over_gathering
from ckptrain.megatron.split_lora import Parts, adapter_settings, fused_parts

# What the adapter of a layer that is not fused is called among the layer's adapters: nothing comes after `.adapter`.
_WHOLE = ""
# Values of a weight that are converted at a time.
_CHUNK = 2**24


class DoRAAdapter(ParallelLinearAdapter):
    """A, B and the magnitudes of one Hugging Face layer."""

    def __init__(self, in_features: int, out_features: int, *, rows: int, **settings: Any) -> None:
        """Make them with whatever values; `rows` are the output features of this process, the rest is Bridge's."""
        super().__init__(in_features, out_features, **settings)
        device = self.linear_out.weight.device
        self.magnitude = nn.Parameter(torch.ones(rows, dtype=torch.float32, device=device))
        if self.input_is_parallel:
            learn_from_slices(self.magnitude)
        else:
            set_tensor_model_parallel_attributes(self.magnitude, is_parallel=True, dim=0, stride=1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DoRAAdapter:
        """Do as modules do, but keep magnitudes float32 where the model becomes bfloat16."""
        magnitude = self._parameters.get(MAGNITUDE)
        before = None if magnitude is None else magnitude.data
        super()._apply(fn, recurse)
        if before is not None:
            self.magnitude.data = before.to(self.magnitude.device)
        return self

    @torch.no_grad()
    def norms(self, weight: Tensor, squares: Tensor) -> Tensor:
        """Return the norms of the rows of W + s B A, float32 [rows of this process].

        Args:
            weight: the piece of W that this process has, [rows, columns].
            squares: the squared norms of W's rows, whole.
        """
        lora_a, lora_b = self.linear_in.weight.float(), self.linear_out.weight.float()
        scale = self.alpha / self.dim
        if self.input_is_parallel:
            added = added_squares(weight, lora_a, _gathered(lora_b, self.tp_group), scale)
            dist.all_reduce(added, group=self.tp_group)
        else:
            added = added_squares(weight, _gathered(lora_a, self.tp_group), lora_b, scale)
        # Where the two cancel, what is left is rounding, and may be less than nothing.
        return (squares + added).maximum(squares * torch.finfo(torch.float32).eps).sqrt()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None, **how: Any
    ) -> dict[str, Any]:
        """Say where A, B and the magnitudes lie in the whole: those of a layer that splits its output are cut as it."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata, **how)
        state |= make_sharded_tensors_for_checkpoint(
            {MAGNITUDE: self.magnitude},
            prefix,
            {} if self.input_is_parallel else {MAGNITUDE: 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return state


class DoRALinear(AdapterWrapper):
    """A layer and the adapters of its parts, or its own."""

    def __init__(self, to_wrap: nn.Module, adapters: Mapping[str, DoRAAdapter], parts: Parts) -> None:
        """Wrap a layer that has its weights already; collective where these are cut by columns."""
        super().__init__(to_wrap, adapters[_WHOLE] if _WHOLE in adapters else ModuleDict(adapters))
        self.parts = parts
        self._gathers_over = take_over_gathering(adapters.values())
        self._squares = self._squares_of_base()  # no buffer: those become bfloat16 with the model, and are saved
        self._keeps = False
        self._kept: dict[str, Tensor] = {}

    @property
    def adapters(self) -> dict[str, DoRAAdapter]:
        """The adapters, by the names that `parts` has."""
        return {_WHOLE: self.adapter} if isinstance(self.adapter, DoRAAdapter) else dict(self.adapter.items())

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output with the adapters', [..., output features of this process], and its bias."""
        output, bias, inputs = self.base_linear_forward(x, *args, **kwargs)
        if not self._adapter_enabled:
            return output, bias
        added = self._added_bias(bias)
        alone = self.parts.split(output if added is None else output - added)
        norms, changes = self.norms(), {}
        whole = gather_slices(inputs, self._gathers_over)
        for name, adapter in self.adapters.items():
            ratio = adapter.magnitude / norms[name]
            # Taken from 1 before it is rounded to the layer's type: what is left of it after may be nothing.
            change = (ratio - 1).to(output.dtype) * alone[name]
            low_rank = self.adapter_forward(adapter, whole.contiguous(), *args, **kwargs)
            changes[name] = change + ratio.to(output.dtype) * low_rank
        return output + self.parts.join(changes, output), bias

    @torch.no_grad()
    def norms(self) -> dict[str, Tensor]:
        """Return the norms of the rows of W + s B A of each part that is adapted, float32 [rows of this process]."""
        if self._kept:
            return self._kept
        rows = self.parts.rows_of(self.to_wrap.weight)
        norms = {name: adapter.norms(rows[name], self._squares[name]) for name, adapter in self.adapters.items()}
        self._kept = norms if self._keeps else {}
        return norms

    def keep_norms(self, keep: bool) -> None:
        """Compute norms once, at the next forward pass, until told otherwise; A and B may not change in between."""
        self._keeps, self._kept = keep, {}

    @torch.no_grad()
    def start(self) -> None:
        """Set the magnitudes to the norms that there are, so that the layer is W + s B A."""
        for name, norms in self.norms().items():
            self.adapters[name].magnitude.copy_(norms)

    def empty_rows(self) -> dict[str, int]:
        """Return how many rows of W have no length, by the adapter's name; only where there are such."""
        counts = {name: int((squares == 0).sum()) for name, squares in self._squares.items()}
        return {name: count for name, count in counts.items() if count}

    @torch.no_grad()
    def _squares_of_base(self) -> dict[str, Tensor]:
        """Return the squared norms of W's rows, whole; summed in float64, so that every layout has the same bits."""
        rows, found = self.parts.rows_of(self.to_wrap.weight), {}
        for name, adapter in self.adapters.items():
            squares = torch.cat([chunk.double().square().sum(1) for chunk in _chunks(rows[name])])
            if adapter.input_is_parallel:
                dist.all_reduce(squares, group=adapter.tp_group)
            found[name] = squares.float()
        return found

    def _added_bias(self, returned: Tensor | None) -> Tensor | None:
        """Return the bias that is in the layer's output; None where it has none, or hands it on."""
        bias: Tensor | None = getattr(self.to_wrap, "bias", None)
        return bias if returned is None and bias is not None and bias.numel() else None


# Of a model that is complete: to look through all of its modules at every step takes milliseconds.
_DORA_LAYERS: weakref.WeakKeyDictionary[nn.Module, list[DoRALinear]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def norms_kept(model: nn.Module) -> Iterator[None]:
    """Compute the norms of a model's layers once for all micro-batches: A and B may not change in between."""
    if (layers := _DORA_LAYERS.get(model)) is None:
        layers = _DORA_LAYERS[model] = [module for module in model.modules() if isinstance(module, DoRALinear)]
    for layer in layers:
        layer.keep_norms(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.keep_norms(False)


def added_squares(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Return what s B A adds to the squared norms of W's rows, float32 [rows].

    Args:
        weight: W, [rows, columns], of any floating point type.
        lora_a: A, float32 [rank, columns].
        lora_b: B, float32 [rows, rank].
        scale: s.
    """
    product = torch.cat([chunk.float() @ lora_a.mT for chunk in _chunks(weight)])
    return ((2 * scale * product + scale**2 * (lora_b @ (lora_a @ lora_a.mT))) * lora_b).sum(1)


def _chunks(weight: Tensor) -> Iterator[Tensor]:
    """Yield a weight's rows in pieces, so that a copy in a wider type is small beside it."""
    yield from weight.split(max(_CHUNK // weight.shape[1], 1))


def _gathered(piece: Tensor, group: Any) -> Tensor:
    """Return the rows that all processes of a group have, in their order."""
    if dist.get_world_size(group) == 1:
        return piece
    pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, piece.contiguous(), group=group)
    return torch.cat(pieces)


def dora(module: Any, full_name: str, parts: Sequence[str], lora: LoRA) -> DoRALinear:
    """Give a layer, or parts of it, DoRA with whatever values.

    Args:
        module: megatron-core's or Transformer Engine's layer, with its weights; not one of an expert.
        full_name: its name in this process's model.
        parts: what is adapted, by short name: the layer itself, or parts of it such as linear_q.
        lora: rank and alpha.
    """
    place, _, short = full_name.rpartition(".")
    found = adapter_attributes(module, is_expert=False)
    size = 1 if found.input_is_parallel else module.config.tensor_model_parallel_size
    if short in parts:
        layout, names = Parts(widths={_WHOLE: found.out_features // size}, groups=1), {_WHOLE: full_name}
    else:
        layout = fused_parts(module, short, found.out_features, size)
        # Bridge saves what has linear_fc1 in its name as gate and up in one; these are parts of it.
        names = {SPLIT[part].adapter: f"{place}.{SPLIT[part].part}" for part in parts}
    adapters = {}
    for adapter, name in names.items():
        rows = layout.widths[adapter] * layout.groups
        adapters[adapter] = DoRAAdapter(
            found.in_features,
            rows * size,
            rows=rows,
            base_linear_name=name,
            **adapter_settings(module, found, lora),
        )
    return DoRALinear(module, adapters, layout)
