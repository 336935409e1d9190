"""The decoder's kernels recorded once and launched together: a CUDA graph for each shape of a micro-batch.

A layer of a small model is done before Python has asked for its next kernel: of a 135M model's step the GPU worked an
eighth. A graph of all layers forward, and one backward with the sums into the gradient buffers, leave the host nothing
to do but copy what goes in. The kernels and their order are those of the layers run one by one, so are the numbers.

The first micro-batch of a shape is computed as ever: kernels are compiled and chosen by that. At the second it is seen
whether the GPU waits for the host. Where it does, the next one is recorded; where products are large there is nothing
to be had. All graphs share one pool of memory: no two are at work at once.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
import logging
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

_LOGGER = logging.getLogger(__name__)
# Of the memory that a micro-batch was seen to take: what the graph takes for itself, and the loss beside it.
_ROOM = 1.25

type Key = tuple[int, int, int, bool]


def record(work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Record the kernels that `work` launches, without running them."""
    graph = torch.cuda.CUDAGraph()
    # Other threads (a save, batches laid out ahead) may talk to the device meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return graph


def is_idle() -> bool:
    """Tell whether the GPU has done all that was launched, so that it waits for the host."""
    return bool(torch.cuda.current_stream().query())


def is_room() -> bool:
    """Tell whether a micro-batch may take once more what it has taken, and hold it."""
    taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free, _ = torch.cuda.mem_get_info()
    return bool(free + cached >= _ROOM * taken)


class _Recorded:
    """The graphs of one shape, with the tensors that they read and write."""

    def __init__(self, decoder: Any, call: Callable[..., Tensor], given: dict[str, Any], pool: Any) -> None:
        self._call = call
        self._weights = [weight for layer in decoder.layers for weight in layer.forward.weights]
        packed = given["packed_seq_params"]
        self._inputs = {
            "hidden_states": given["hidden_states"].detach().clone(),
            "rotary_pos_emb": given["rotary_pos_emb"].clone(),
            "cu_seqlens": packed.cu_seqlens_q.clone(),
            "position_ids": packed.position_ids.clone(),
        }
        fixed = {name: self._inputs[name] for name in ("hidden_states", "rotary_pos_emb")}
        self._given = {**given, **fixed, "packed_seq_params": None}
        self._max_seqlen, self._layout, self._is_even = packed.max_seqlen_q, packed.qkv_format, packed.is_even
        self._out: Tensor
        self._leaves: list[list[Tensor]]
        self._forward = record(self._compute, pool)
        self._grad = torch.zeros_like(self._out)
        self._backward = record(self._differentiate, pool)
        self._out, self._leaves = self._out.detach(), []

    def _compute(self) -> None:
        boundaries = self._inputs["cu_seqlens"]
        packed = PackedSeqParams(
            qkv_format=self._layout,
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=self._max_seqlen,
            max_seqlen_kv=self._max_seqlen,
        )
        packed.position_ids, packed.is_even = self._inputs["position_ids"], self._is_even
        # The parameters' own places for gradients are tied to another stream, by megatron-core's hooks.
        self._leaves = [[parameter.detach().requires_grad_() for parameter in of.parameters] for of in self._weights]
        for weight, leaves in zip(self._weights, self._leaves, strict=True):
            weight.leaves = leaves
        try:
            self._out = self._call(**{**self._given, "packed_seq_params": packed})
        finally:
            for weight in self._weights:
                weight.leaves = weight.parameters

    def _differentiate(self) -> None:
        """Add to the buffers what megatron-core's hooks would add to them after an ordinary backward pass."""
        gradients = torch.autograd.grad(self._out, list(chain.from_iterable(self._leaves)), self._grad)
        parameters = chain.from_iterable(weight.parameters for weight in self._weights)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.main_grad.add_(gradient)

    def forward(self, given: dict[str, Any]) -> Tensor:
        """Compute the output for these inputs; it is there until the next call."""
        packed = given["packed_seq_params"]
        self._inputs["hidden_states"].copy_(given["hidden_states"])
        self._inputs["rotary_pos_emb"].copy_(given["rotary_pos_emb"])
        self._inputs["cu_seqlens"].copy_(packed.cu_seqlens_q)
        self._inputs["position_ids"].copy_(packed.position_ids)
        self._forward.replay()
        return self._out.detach()

    def backward(self, grad: Tensor) -> None:
        """Add the gradients of the parameters, of what `forward` has computed last, to their buffers."""
        self._grad.copy_(grad)
        self._backward.replay()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, recorded: _Recorded, given: dict[str, Any]) -> Tensor:
        ctx.recorded = recorded
        return recorded.forward(given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.recorded.backward(grad)
        return None, None, None


class GraphedDecoder:
    """In the place of a megatron-core TransformerBlock's `forward`, where its layers are fused ones.

    It is for the whole decoder of one process, whose input is that of a frozen embedding, and for one forward pass at a
    time, each followed by its backward pass: megatron-core's schedule without pipeline stages.
    """

    def __init__(self, decoder: Any, adapters_changed: Callable[[], None], *, always: bool) -> None:
        """Take the decoder, what tells its layers that adapters have changed, and whether to record in any case."""
        self._decoder, self._plain = decoder, decoder.forward
        self._adapters_changed = adapters_changed
        self._always = always
        self._seen: Counter[Key] = Counter()
        self._not_worth_it: set[Key] = set()
        self._is_off = False
        self._recorded: dict[Key, _Recorded] = {}
        self._pool: Any = None
        # For autograd: something that needs a gradient goes in.
        self._anchor: Tensor | None = None

    def __call__(self, **given: Any) -> Tensor:
        """Return the decoder's output, [tokens, 1, hidden_size]."""
        hidden, packed = given["hidden_states"], given["packed_seq_params"]
        if self._is_off or not torch.is_grad_enabled():
            return self._plain(**given)
        key = (len(hidden), len(packed.cu_seqlens_q), packed.max_seqlen_q, packed.is_even)
        if key not in self._recorded and (self._is_to_wait(key) or not self._record(key, given)):
            out: Tensor = self._plain(**given)
            if self._seen[key] == 2 and not self._always and not is_idle():
                self._not_worth_it.add(key)
            return out
        if self._anchor is None:
            self._anchor = torch.zeros((), device=hidden.device, requires_grad=True)
        replayed: Tensor = _Replay.apply(self._anchor, self._recorded[key], given)
        return replayed

    def release(self) -> None:
        """Give up the graphs and their memory, and leave the decoder's own forward pass in its place."""
        self._recorded.clear()
        self._pool, self._is_off = None, True
        self._decoder.__dict__.pop("forward", None)

    def _is_to_wait(self, key: Key) -> bool:
        """Tell whether a shape is not to be recorded, or not yet."""
        self._seen[key] += 1
        return key in self._not_worth_it or self._seen[key] <= (1 if self._always else 2)

    def _record(self, key: Key, given: dict[str, Any]) -> bool:
        """Record a shape; tell whether there was room for it."""
        if self._pool is None:
            if not is_room():
                _LOGGER.warning("there is too little GPU memory for CUDA graphs; training goes on without them")
                self._is_off = True
                return False
            self._pool = torch.cuda.graph_pool_handle()
        self._adapters_changed()  # so that taking them is recorded: each replay has them as they are then
        self._recorded[key] = _Recorded(self._decoder, self._plain, given, self._pool)
        self._adapters_changed()
        return True
