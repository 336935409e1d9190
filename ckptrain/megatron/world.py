"""Which process am I, and whom do I talk to? torch's process groups and megatron-core's, opened and closed."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ckptrain.config.layout import Layout
from ckptrain.megatron.bridge import enter_megatron
from ckptrain.megatron.platform import enter_platform

_MEETING = dt.timedelta(minutes=30)
"""For all processes of a launch to be there."""
_COLLECTIVE = dt.timedelta(hours=24)
"""For one collective. One process may tokenise for hours while the others wait; that all are alive is seen to by
`ckptrain.training.watchdog`."""


_openings = itertools.count()


@functools.cache
def _shared_store(_process_id: int) -> tuple[Any, int, int]:
    """Return the store of this launch, this process's rank and the number of processes; it is opened once."""
    found: tuple[Any, int, int] = next(dist.rendezvous("env://", timeout=_MEETING))
    return found


def _rendezvous() -> tuple[Any, int, int]:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        # A store in memory: alone, there is no port to open and none to be taken.
        return dist.HashStore(), 0, 1
    store, number, count = _shared_store(os.getpid())
    # Each opening has names of its own: the store remembers those of an earlier run in this process.
    return dist.PrefixStore(f"ckptrain-{next(_openings)}", store), number, count


@contextlib.contextmanager
def open_process_group() -> Iterator[None]:
    """Join the other processes of this launch (torchrun's environment), or be alone; leave at the end.

    A process group that the embedding program opened already is used and left open.
    """
    if dist.is_initialized():
        yield
        return
    store, number, count = _rendezvous()
    backend = enter_platform().process_group_backend
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=_COLLECTIVE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def connect_to_store() -> Any:
    """Return a connection of its own to the store of the open process group."""
    return dist.distributed_c10d._get_default_store().clone()


def open_model_parallel(layout: Layout, seed: int) -> None:
    """Make megatron-core's groups for a layout, and seed every generator of this process.

    Tensor parallel ranks share the default stream (what they compute alike they drop out alike) and have their own in
    megatron-core's tracker; pipeline stages and data parallel ranks differ in both.
    """
    enter_megatron()
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        # Experts are not cut across tensor ranks: Megatron-Bridge's expert adapters are wrong where they are.
        expert_tensor_parallel_size=1,
    )
    seed_generators(seed)


def seed_generators(seed: int, step: int = 0) -> None:
    """Seed every random generator of this process from (seed, step, rank)."""
    from megatron.core import parallel_state, tensor_parallel

    stage = parallel_state.get_pipeline_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    process_seed = (seed + 100_003 * stage + 1_009 * replica + 7_368_787 * step) % 2**31
    torch.manual_seed(process_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(process_seed, force_reset_rng=True)


def data_parallel_rank() -> int:
    """Return which of the data parallel replicas this process belongs to."""
    from megatron.core import parallel_state

    number: int = parallel_state.get_data_parallel_rank()
    return number


def close_model_parallel() -> None:
    """Forget megatron-core's groups, so that another run can open its own in this process."""
    from megatron.core import parallel_state
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine

    parallel_state.destroy_global_memory_buffer()
    parallel_state.destroy_model_parallel()
    destroy_rerun_state_machine()
