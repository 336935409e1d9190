"""How long does this process compute in a step, until it waits for the others? Up to the reduction of the gradients.

The time of a step is the same on all processes, because they wait for each other: it tells nothing of who is slow.
Processes that share layers or a sequence wait for each other earlier, and count as one.
"""

from __future__ import annotations

import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron

# isort: split
import time
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from ckptrain.checkpoint.ranks import gather_to_all, rank
from ckptrain.megatron.platform import enter_platform


class _HostClock:
    """Times on a processor, whose work is done when Python goes on."""

    def __init__(self) -> None:
        self._began = self._ended = 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self) -> None:
        self._ended = time.perf_counter()

    def seconds(self) -> float:
        return self._ended - self._began


class _DeviceClock:
    """Times on a GPU, where the host has gone on long since; they are asked for once it has waited for the step."""

    def __init__(self) -> None:
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def begin(self) -> None:
        self._began.record()

    def end(self) -> None:
        self._ended.record()

    def seconds(self) -> float:
        return float(self._began.elapsed_time(self._ended)) / 1e3


class Pace:
    """Clocks the steps of this process."""

    def __init__(self, model: Any) -> None:
        """Take the model of `megatron.optimizer.wrap_for_training`, whose gradients are reduced at a step's end."""
        self._clock = _DeviceClock() if enter_platform().is_cuda else _HostClock()
        self._waited_s = 0.0
        self._steps = 0
        config = get_model_config(model)
        reduce_gradients = config.finalize_model_grads_func

        def finalize(*given: Any, **named: Any) -> Any:
            self._clock.end()
            return reduce_gradients(*given, **named)

        config.finalize_model_grads_func = finalize

    def begin(self, waited_s: float) -> float:
        """Begin a step, whose data came after `waited_s` seconds; returns the seconds of the one before, at first 0."""
        before = self._waited_s + self._clock.seconds() if self._steps else 0.0
        self._steps, self._waited_s = self._steps + 1, waited_s
        self._clock.begin()
        return before


def paced_processes() -> list[int]:
    """Return whose seconds `megatron.step.StepResult.own_s` has: ranks of this pipeline's last stage; collective."""
    groups: list[list[int]] = gather_to_all(dist.get_process_group_ranks(parallel_state.get_data_parallel_group(True)))
    has_stages = parallel_state.get_pipeline_model_parallel_world_size() > 1
    return groups[parallel_state.get_pipeline_model_parallel_last_rank() if has_stages else rank()]
