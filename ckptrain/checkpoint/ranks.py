"""What do all processes of a run agree on? A few collectives over Python objects, which do nothing where there is one.

Decisions are made on rank 0 and told to the others; ranks never look at the disk or the clock separately, so they
cannot come to different conclusions. An error of one rank becomes the error of all: none is left waiting in a barrier.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ckptrain.errors import CkptrainError


def rank() -> int:
    """Return this process's rank; 0 before any process group is open."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return how many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def broadcast_from_rank0[T](value: T) -> T:
    """Give every rank what rank 0 has; what the others pass is ignored."""
    if world_size() == 1:
        return value
    box: list[Any] = [value if rank() == 0 else None]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    agreed: T = box[0]
    return agreed


def gather_to_all[T](value: T) -> list[T]:
    """Give every rank the values of all, in the order of ranks."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank0[T](decide: Callable[[], T]) -> T:
    """Run something on rank 0 and give every rank its result, or its error.

    Raises:
        CkptrainError: what rank 0 raised, on every rank.
    """
    if world_size() == 1:
        return decide()
    outcome: Any = None
    if rank() == 0:
        try:
            outcome = (decide(), None)
        except CkptrainError as error:
            outcome = (None, error)
        except Exception as error:  # told to all ranks first, then raised on all
            outcome = (None, CkptrainError(f"{type(error).__name__}: {error}"))
    result, failed = broadcast_from_rank0(outcome)
    if failed is not None:
        raise failed
    agreed: T = result
    return agreed


def together[T](act: Callable[[], T]) -> T:
    """Run something on every rank; where it fails on any, raise that error on all.

    Raises:
        CkptrainError: the first rank's that failed.
    """
    result: Any = None
    failed: CkptrainError | None = None
    try:
        result = act()
    except CkptrainError as error:
        failed = error
    except Exception as error:
        if world_size() == 1:
            raise
        failed = CkptrainError(f"rank {rank()}: {type(error).__name__}: {error}")
    first = next((error for error in gather_to_all(failed) if error is not None), None)
    if first is not None:
        raise first
    agreed: T = result
    return agreed
