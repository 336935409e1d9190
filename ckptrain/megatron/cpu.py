"""Let megatron-core run on a CPU: `torch.cuda` answers for the CPU, and "cuda" as a device means the CPU.

megatron-core calls CUDA's streams, events, random states and current device without asking whether there is one. Its
schedules, its data parallel wrapper, its optimizers and its parallel layers need nothing from a GPU beyond those calls,
so they run over gloo once the calls are answered. Entered once, before megatron is imported, and only where there is no
GPU; the rest of the project does not know of it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _InertStream:
    """A stream or an event on a device that has neither: everything is already done when it is asked."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = CPU

    def __enter__(self) -> _InertStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def query(self) -> bool:
        """Report that all work is done."""
        return True

    def elapsed_time(self, other: object) -> float:
        """Report no time between two events, in milliseconds."""
        return 0.0

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.split(":")[0] == "cuda") or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _CudaMeansCpu(TorchFunctionMode):
    """Redirect `device="cuda"`, `.cuda()` and `.to("cuda")` to the CPU, in every torch function."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")) or isinstance(kwargs.get("device"), int):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.to and any(_is_cuda(arg) for arg in args):
            args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        # DistributedOptimizer tells parameters apart by this string and knows CUDA's only.
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _set_rng_state(state: torch.Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


def _set_megatron_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _get_megatron_rng_state(device: str = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def enter_cpu() -> None:
    """Answer CUDA's calls for the CPU, in this process, from now on.

    The function mode costs about a microsecond for each torch call, which is below 1 % of a step of the smallest model.
    """
    answers: dict[str, Any] = {
        "current_device": lambda: CPU,
        "set_device": _nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "Stream": _InertStream,
        "Event": _InertStream,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: _InertStream(),
        "default_stream": lambda device=None: _InertStream(),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": _nothing,  # torch.manual_seed calls it, after seeding the CPU itself
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": _set_rng_state,
        "initial_seed": torch.initial_seed,
        "get_device_capability": lambda device=None: (0, 0),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    _CudaMeansCpu().__enter__()
    # Where Transformer Engine is installed, megatron-core would build layers of it, which cannot compute here.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # makes an import fail

    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = _get_megatron_rng_state
    megatron_random._set_cuda_rng_state = _set_megatron_rng_state
