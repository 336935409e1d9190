"""What do all processes of a run agree on? A few collectives over Python objects, which do nothing where there is one.

Decisions are made on rank 0 and told to the others; ranks never look at the disk or the clock separately, so they
cannot come to different conclusions. An error of one rank becomes the error of all: none is left waiting in a barrier.

Each takes a process group that spans all ranks, None being the default one. A thread that works behind the training
needs one of its own: the collectives of one group have one order, which two threads would mix up.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ckptrain.errors import CkptrainError, RankFailed

type Group = dist.ProcessGroup | None
"""All ranks, over a connection of their own or the default one."""


def rank() -> int:
    """Return this process's rank; 0 before any process group is open."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return how many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def broadcast_from_rank0[T](value: T, group: Group = None) -> T:
    """Give every rank what rank 0 has; what the others pass is ignored."""
    if world_size() == 1:
        return value
    box: list[Any] = [value if rank() == 0 else None]
    dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    agreed: T = box[0]
    return agreed


def gather_to_all[T](value: T, group: Group = None) -> list[T]:
    """Give every rank the values of all, in the order of ranks."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def on_rank0[T](decide: Callable[[], T], group: Group = None) -> T:
    """Run something on rank 0 and give every rank its result, or its error.

    Raises:
        CkptrainError: what rank 0 raised, on every rank.
    """
    if world_size() == 1:
        return decide()
    outcome: Any = None
    cause: Exception | None = None
    if rank() == 0:
        try:
            outcome = (decide(), None)
        except CkptrainError as error:
            outcome = (None, error)
        except Exception as error:  # told to all ranks first, then raised on all
            outcome, cause = (None, RankFailed(f"rank 0: {type(error).__name__}: {error}")), error
    result, failed = broadcast_from_rank0(outcome, group)
    if failed is not None:
        raise failed from cause
    agreed: T = result
    return agreed


def together[T](act: Callable[[], T], group: Group = None) -> T:
    """Run something on every rank; where it fails on any, raise that error on all.

    Raises:
        CkptrainError: the first rank's that failed.
    """
    result: Any = None
    failed: CkptrainError | None = None
    cause: Exception | None = None
    try:
        result = act()
    except CkptrainError as error:
        failed = error
    except Exception as error:
        if world_size() == 1:
            raise
        failed, cause = RankFailed(f"rank {rank()}: {type(error).__name__}: {error}"), error
    first = next((error for error in gather_to_all(failed, group) if error is not None), None)
    if first is not None:
        raise first from cause
    agreed: T = result
    return agreed
