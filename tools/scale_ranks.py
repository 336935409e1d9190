"""What does each of thousands of ranks save and load? Shards as megatron-core cuts them, with shapes and no numbers.

For bench_scale.py: ranks in Megatron's order (tensor, then data, then pipeline), of which the first data parallel
replica saves adapters, moments and masters, and every rank its random generators.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cached_property

import attrs
import torch
from convert_shapes import CASES, Case
from torch import Tensor

from ckptrain.checkpoint.dcp_metadata import ADAPTER_DIRECTORY, OPTIMIZER_DIRECTORY
from ckptrain.checkpoint.sharded import Shard, ShardedState
from ckptrain.config.layout import Layout
from ckptrain.config.load import load_config
from ckptrain.config.modules import COLUMN_PARALLEL
from ckptrain.config.schema import RunConfig
from ckptrain.config.targets import resolve_targets
from ckptrain.convert.checkpoint_source import stored_weights
from ckptrain.lifecycle.facts import LoraSpec

_GENERATOR_BYTES = 4 * 16 + 5056
"""States of the random generators of a process with a GPU: four of the GPU, one of the host."""
_STATES = ("exp_avg", "exp_avg_sq", "main_param")
"""What Adam keeps of an adapter weight in bfloat16, all float32."""


@attrs.frozen(kw_only=True)
class Part:
    """The ranks that hold one shard of everything."""

    tensor: int
    pipeline: int


@attrs.frozen(kw_only=True)
class Fleet:
    """So many ranks that train an adapter of one model."""

    case: Case
    layout: Layout

    @property
    def config(self) -> RunConfig:
        """What the run is asked to be."""
        asked = {"model": {"pretrained": "org/model"}, "lora": {"dim": self.case.rank}, "data": {"train": "x.jsonl"}}
        return load_config(asked, check_inputs=False)

    @cached_property
    def lora(self) -> LoraSpec:
        """What the adapters are."""
        settings = self.config.lora
        return LoraSpec(settings=settings, modules=resolve_targets(settings, self.case.shape).modules)

    @cached_property
    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shapes of the stored adapter weights, by name."""
        return {each.name: each.shape for each in stored_weights(self.lora, self.case.shape).values()}

    def part_of(self, rank: int) -> Part:
        """Return which shard a rank holds."""
        return Part(tensor=rank % self.layout.tensor, pipeline=rank // (self.layout.tensor * self.layout.data))

    def is_main(self, rank: int) -> bool:
        """Tell whether a rank is of the data parallel replica that saves."""
        return rank // self.layout.tensor % self.layout.data == 0

    def saves(self, rank: int) -> dict[str, dict[str, Tensor]]:
        """Return what a rank saves, by directory of the checkpoint."""
        generators = generator_states(rank, self.layout.world_size)
        if not self.is_main(rank):
            return {ADAPTER_DIRECTORY: {}, OPTIMIZER_DIRECTORY: generators}
        held = self.holds(self.part_of(rank))
        return {**held, OPTIMIZER_DIRECTORY: {**held[OPTIMIZER_DIRECTORY], **generators}}

    def holds(self, part: Part) -> dict[str, dict[str, Tensor]]:
        """Return what the ranks of a part have of adapters and optimizer, by directory."""
        adapter = {name: self._cut(name, shape, part, torch.bfloat16) for name, shape in self.weights.items()}
        optimizer = {
            f"optimizer.state.{kind}.{name}": self._cut(name, shape, part, torch.float32)
            for kind, (name, shape) in itertools.product(_STATES, self.weights.items())
        }
        return {ADAPTER_DIRECTORY: adapter, OPTIMIZER_DIRECTORY: optimizer}

    def _cut(self, name: str, shape: tuple[int, ...], part: Part, dtype: torch.dtype) -> Tensor:
        """Return a part's shards: layers by pipeline stage, and the axis that `convert_shapes.in_pieces` cuts."""
        *_, module, _, half, _ = name.split(".")
        axis = len(shape) - (1 if half == "linear_in" and module not in COLUMN_PARALLEL else 2)
        halves = 2 if (module, half) == ("linear_fc1", "linear_out") else 1
        layers, rows = shape[0] // self.layout.pipeline, shape[axis] // (halves * self.layout.tensor)
        size = [*shape]
        size[0], size[axis] = layers, rows
        shards = []
        for number in range(halves):
            offset = [0] * len(shape)
            offset[0] = part.pipeline * layers
            offset[axis] = (number * self.layout.tensor + part.tensor) * rows
            shards.append(Shard(offset=tuple(offset), data=torch.empty(size, dtype=dtype, device="meta")))
        return ShardedState(shape, shards)


def generator_states(rank: int, ranks: int) -> dict[str, Tensor]:
    """Return a rank's row of the states of random generators, as `ckptrain.megatron.state.rng_row` has it."""
    row = torch.zeros(_GENERATOR_BYTES, dtype=torch.uint8)
    shard = Shard(offset=(rank * _GENERATOR_BYTES,), data=row)
    return {"rng.states": ShardedState((ranks * _GENERATOR_BYTES,), [shard])}


def fleet(shape: str, ranks: int, *, turned: bool = False) -> Fleet:
    """Return so many ranks of a model; `turned` is the other layout that a resume goes to.

    8B: data parallel alone, and tensor 2; 70B: tensor 8 x pipeline 4 where there are ranks for it, and tensor 4.
    """
    case = CASES[shape][0]
    sizes = {"8b": ((1, 1), (2, 1)), "70b": ((8, 4 if ranks >= 32 else 1), (4, 1)), "tiny": ((2, 2), (1, 1))}
    tensor, pipeline = sizes[shape][turned]
    data = ranks // (tensor * pipeline)
    return Fleet(case=case, layout=Layout(tensor=tensor, pipeline=pipeline, context=1, expert=1, data=data))
