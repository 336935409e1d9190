"""The state of a run under Megatron as flat, named tensors: adapters, Adam's moments and masters, random generators.

Names are megatron-core's own. Every piece knows its place in the whole tensor, so a state saved by one layout fills
any other; random generators belong to a rank and go back to it only where the layout is the same.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # isort: split

import math
from collections.abc import Iterable, Mapping

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from ckptrain.checkpoint.ranks import rank
from ckptrain.megatron.adapters import AdapterParameter
from ckptrain.megatron.optimizer import optimizer_tensors
from ckptrain.megatron.platform import enter_platform

_OPTIMIZER_PREFIX = "optimizer.state"
_DEFAULT_GENERATOR = "default"


def adapter_state(adapters: Iterable[AdapterParameter], *, to_save: bool) -> dict[str, Tensor]:
    """Return the adapter weights by global name; for a save, each piece on one of the ranks that hold it."""
    state: dict[str, Tensor] = {}
    for adapter in adapters:
        state |= _pieces(adapter.name, adapter.cut(adapter.parameter.data), to_save=to_save)
    return state


def optimizer_state(adapters: Iterable[AdapterParameter], optimizer: object, *, to_save: bool) -> dict[str, Tensor]:
    """Return moments and float32 masters, as `optimizer.state.exp_avg.<adapter weight>` and the like."""
    state: dict[str, Tensor] = {}
    for adapter in adapters:
        for kind, tensor in optimizer_tensors(optimizer, adapter).items():
            name = f"{_OPTIMIZER_PREFIX}.{kind}.{adapter.name}"
            state |= _pieces(name, adapter.cut(tensor), to_save=to_save)
    return state


def _pieces(name: str, pieces: list[ShardedTensor], *, to_save: bool) -> dict[str, Tensor]:
    if to_save:
        pieces = [piece for piece in pieces if is_main_replica(piece.replica_id)]
    shards: list[Tensor] = [CheckpointableShardedTensor.from_sh_ten(piece) for piece in pieces]
    if not shards:
        return {}
    return {name: shards[0] if len(shards) == 1 else LocalShardsContainer(shards)}


def blank(state: Mapping[str, Tensor]) -> None:
    """Overwrite this process's pieces with NaN, so that what a read then leaves out is seen."""
    for tensor in state.values():
        for piece in _local_data(tensor):
            piece.fill_(math.nan)


def count_filled(state: Mapping[str, Tensor]) -> int:
    """Return how many tensors of a state have no NaN in this process's pieces."""
    return sum(all(not piece.isnan().any() for piece in _local_data(tensor)) for tensor in state.values())


def _local_data(tensor: Tensor) -> list[Tensor]:
    shards = tensor._local_shards if isinstance(tensor, LocalShardsContainer) else [tensor]
    return [shard._sh_ten.data for shard in shards]


def rng_state() -> dict[str, Tensor]:
    """Return the states of this process's random generators: torch's default one and megatron-core's tracked ones."""
    states = {_DEFAULT_GENERATOR: torch.cuda.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    if enter_platform().is_cuda:
        states["cpu"] = torch.get_rng_state()
    return {_rng_name(generator): state.clone() for generator, state in states.items()}


def set_rng_state(state: dict[str, Tensor]) -> None:
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
