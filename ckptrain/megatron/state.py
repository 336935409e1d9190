"""The state of a run under Megatron as flat, named tensors: adapters, Adam's moments and masters, random generators.

A weight that every layer has is stored as one tensor stacked over the layers, under the name that megatron-core gives
it: DCP spends two kilobytes on each tensor, which for small adapters is more than they are. Every part knows its place
in the whole, so a state saved by one layout fills any other; random generators belong to a rank, and go back to it only
where the layout is the same.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from ckptrain.checkpoint.ranks import gather_to_all, rank, world_size
from ckptrain.checkpoint.sharded import Shard, ShardedState
from ckptrain.megatron.adapters import AdapterParameter, Piece
from ckptrain.megatron.optimizer import adam_states, optimizer_tensors
from ckptrain.megatron.platform import enter_platform

_OPTIMIZER_PREFIX = "optimizer.state"
_DEFAULT_GENERATOR = "default"
_RNG_ROWS = "rng.states"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@attrs.frozen(kw_only=True)
class _Stack:
    """The pieces of one shard of a stored tensor: one for each layer, in their order, or a single one."""

    offset: tuple[int, ...]
    pieces: tuple[Piece, ...]
    has_layer_axis: bool

    def gathered(self) -> Tensor:
        """Return the pieces as one tensor, a copy where there are several."""
        return torch.stack([piece.data for piece in self.pieces]) if self.has_layer_axis else self.pieces[0].data

    def scatter(self, stored: Tensor) -> None:
        """Copy from a tensor like `gathered`'s into the pieces."""
        for piece, part in zip(self.pieces, stored if self.has_layer_axis else [stored], strict=True):
            piece.data.copy_(part)


class AdapterStore:
    """Adapters, and what is laid out like them, as the tensors that a checkpoint stores."""

    def __init__(self, adapters: Sequence[AdapterParameter], num_layers: int) -> None:
        """Plan the names for the adapters of this process, in a model of `num_layers` layers; collective."""
        self._adapters = adapters
        self._num_layers = num_layers
        # Other stages have the other layers: only together do they know whether all layers have a weight.
        everywhere = {name for names in gather_to_all([adapter.name for adapter in adapters]) for name in names}
        adapted = Counter(_LAYER.sub("decoder.layers.", name) for name in everywhere)
        self._stacked = {name for name, count in adapted.items() if count == num_layers}

    def adapters(self) -> StateView:
        """Return the adapter weights."""
        return self._view([(adapter.name, adapter.cut(adapter.parameter.data)) for adapter in self._adapters])

    def optimizer(self, optimizer: object) -> StateView:
        """Return moments and float32 masters, as `optimizer.state.exp_avg.<adapter weight>` and the like."""
        states = adam_states(optimizer)
        return self._view(
            [
                (f"{_OPTIMIZER_PREFIX}.{kind}.{adapter.name}", adapter.cut(tensor))
                for adapter in self._adapters
                for kind, tensor in optimizer_tensors(states, adapter).items()
            ]
        )

    def _stored_name(self, name: str) -> str:
        without_layer = _LAYER.sub("decoder.layers.", name)
        return without_layer if without_layer.removeprefix(_kind_prefix(name)) in self._stacked else name

    def _view(self, cut: Iterable[tuple[str, list[Piece]]]) -> StateView:
        # (stored name, offset without a layer axis) -> layer -> piece
        places: dict[tuple[str, tuple[int, ...]], dict[int, Piece]] = defaultdict(dict)
        for name, pieces in cut:
            match = _LAYER.search(name)
            assert match is not None
            for piece in pieces:
                places[self._stored_name(name), piece.offset][int(match[1])] = piece
        stacks: dict[str, list[_Stack]] = defaultdict(list)
        shapes: dict[str, tuple[int, ...]] = {}
        for (name, offset), by_layer in places.items():
            layers = sorted(by_layer)
            parts = tuple(by_layer[layer] for layer in layers)
            stacked = _LAYER.search(name) is None
            stacks[name].append(
                _Stack(offset=(layers[0], *offset) if stacked else offset, pieces=parts, has_layer_axis=stacked)
            )
            shapes[name] = (self._num_layers, *parts[0].shape) if stacked else parts[0].shape
        return StateView(stacks=stacks, shapes=shapes)


def _kind_prefix(name: str) -> str:
    """Return what comes before an adapter's own name: `optimizer.state.exp_avg.`, or nothing."""
    return name[: name.index("decoder.")]


@attrs.frozen(kw_only=True)
class StateView:
    """Tensors of this process under the names and in the form that a checkpoint stores them."""

    stacks: Mapping[str, Sequence[_Stack]]
    shapes: Mapping[str, tuple[int, ...]]

    def to_load(self) -> dict[str, ShardedState]:
        """Return buffers to read into, full of NaN, so that what a read leaves out is seen."""
        return {
            name: ShardedState(
                self.shapes[name],
                [
                    Shard(offset=stack.offset, data=torch.full_like(stack.gathered(), math.nan, device="cpu"))
                    for stack in stacks
                ],
            )
            for name, stacks in self.stacks.items()
        }

    def take(self, loaded: Mapping[str, ShardedState]) -> int:
        """Copy buffers that were read whole into place; returns how many tensors that were, which should be all."""
        filled = 0
        for name, stacks in self.stacks.items():
            shards = loaded[name].shards
            if any(shard.data.isnan().any() for shard in shards):
                continue
            for stack, shard in zip(stacks, shards, strict=True):
                stack.scatter(shard.data)
            filled += 1
        return filled


class HostCopy:
    """A place in host memory for what this process saves of a view, allocated once and filled at every save.

    Of the ranks that hold a piece, one saves it.
    """

    def __init__(self, view: StateView) -> None:
        """Allocate; page-locked where there is a GPU, which can then copy while the host goes on."""
        self.state: dict[str, ShardedState] = {}
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []
        for name, stacks in view.stacks.items():
            mine = [stack for stack in stacks if stack.pieces[0].is_main]
            if mine:
                shards = [Shard(offset=stack.offset, data=self._allocate(stack)) for stack in mine]
                self.state[name] = ShardedState(view.shapes[name], shards)

    def _allocate(self, stack: _Stack) -> Tensor:
        first = stack.pieces[0].data
        shape = (len(stack.pieces), *first.shape) if stack.has_layer_axis else first.shape
        target = torch.zeros(shape, dtype=first.dtype, pin_memory=enter_platform().is_cuda)
        self._sources += [piece.data for piece in stack.pieces]
        self._targets += target.unbind() if stack.has_layer_axis else [target]
        return target

    def take(self) -> Callable[[], object]:
        """Copy the state of this moment; `state` holds it when the function returned has returned.

        The copies stand in the stream that trains, before whatever changes the state next, so nothing waits here.
        """
        if self._targets:  # other data parallel replicas may save all that this process holds
            torch._foreach_copy_(self._targets, self._sources, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        wait: Callable[[], object] = copied.synchronize
        return wait


def rng_state() -> dict[str, Tensor]:
    """Return the states of this process's random generators: torch's default one and megatron-core's tracked ones."""
    states = {_DEFAULT_GENERATOR: torch.cuda.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    if enter_platform().is_cuda:
        states["cpu"] = torch.get_rng_state()
    return {_rng_name(generator): state.clone() for generator, state in states.items()}


def rng_row(state: Mapping[str, Tensor]) -> dict[str, ShardedState]:
    """Return what `rng_state` gave as this process's part of one tensor, uint8 [processes * bytes of each].

    A tensor for each generator of each process would be most of what a checkpoint of thousands of processes describes.
    It has one axis, since DCP looks for overlaps along the longest, and compares all that share a place on it.
    """
    row = torch.cat([state[name] for name in sorted(state)])
    shard = Shard(offset=(rank() * len(row),), data=row)
    return {_RNG_ROWS: ShardedState((world_size() * len(row),), [shard])}


def rng_of_row(row: Mapping[str, ShardedState], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the states in a row, by name; `like` has others of the same names and sizes."""
    names = sorted(like)
    [shard] = row[_RNG_ROWS].shards
    parts = shard.data.split([len(like[name]) for name in names])
    # Copies: torch's generator of the CPU crashes on a state that is a view with something before it.
    return {name: part.clone() for name, part in zip(names, parts, strict=True)}


def set_rng_state(state: Mapping[str, Tensor]) -> None:
    """Put this process's random generators into the states that `rng_state` gave."""
    states = {generator: state[_rng_name(generator)] for generator in _generators()}
    torch.cuda.set_rng_state(states.pop(_DEFAULT_GENERATOR))
    if "cpu" in states:
        torch.set_rng_state(states.pop("cpu"))
    get_cuda_rng_tracker().set_states(states)


def _generators() -> list[str]:
    extra = ["cpu"] if enter_platform().is_cuda else []
    return [_DEFAULT_GENERATOR, *get_cuda_rng_tracker().get_states(), *extra]


def _rng_name(generator: str) -> str:
    return f"rng.rank{rank():05d}.{generator}"
