"""Where does this process compute? CUDA if there is one, otherwise the CPU; with or without Transformer Engine."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Literal

import attrs
import torch

from ckptrain.errors import ConfigError
from ckptrain.megatron.cpu import enter_cpu
from ckptrain.megatron.cuda import enter_cuda

_TE_MAY_VARY = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"

Backend = Literal["transformer_engine", "local"]

_SIXTEEN_BITS = "model.dtype is float32, and Transformer Engine's attention over packed sequences computes in 16 bits"


@attrs.frozen(kw_only=True)
class Platform:
    """The device of this process and how processes talk to each other."""

    name: Literal["cuda", "cpu"]
    device: torch.device
    process_group_backend: str

    @property
    def is_cuda(self) -> bool:
        """Tell whether there is a GPU."""
        return self.name == "cuda"


@functools.cache
def enter_platform() -> Platform:
    """Choose the platform and prepare it, once in a process and before anything of Megatron is imported."""
    if torch.cuda.is_available():
        enter_cuda()
        return Platform(
            name="cuda",
            device=torch.device("cuda", torch.cuda.current_device()),
            process_group_backend="cpu:gloo,cuda:nccl",
        )
    enter_cpu()
    return Platform(name="cpu", device=torch.device("cpu"), process_group_backend="gloo")


@contextlib.contextmanager
def reproducible(asked: bool) -> Iterator[None]:
    """Let torch and Transformer Engine use only what gives the same bits every time, where that is asked for.

    Transformer Engine reads its variable when a layer is made, and megatron-core insists that it is set.
    """
    before = os.environ.get(_TE_MAY_VARY)
    torch.use_deterministic_algorithms(asked)
    if asked:
        os.environ[_TE_MAY_VARY] = "0"
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)
        if before is None:
            os.environ.pop(_TE_MAY_VARY, None)
        else:
            os.environ[_TE_MAY_VARY] = before


@functools.cache
def has_transformer_engine() -> bool:
    """Tell whether Transformer Engine is installed and has a GPU to run on (without importing it)."""
    return enter_platform().is_cuda and importlib.util.find_spec("transformer_engine") is not None


def choose_backend(asked: str, platform: Platform, dtype: str, *, is_local_only: bool = False) -> tuple[Backend, str]:
    """Return whose layers the model is made of, and why in words.

    Args:
        asked: `model.backend`.
        platform: where it runs.
        dtype: the model's, by name.
        is_local_only: whether only the local layers run its family.

    Raises:
        ConfigError: Transformer Engine was asked for where it cannot run.
    """
    installed = has_transformer_engine()
    if asked == "local":
        return "local", "model.backend is local"
    if asked == "transformer_engine":
        missing = [] if platform.is_cuda else ["there is no GPU"]
        missing += [] if installed or missing else ["Transformer Engine is not installed (extra `te`)"]
        missing += [_SIXTEEN_BITS] if dtype == "float32" else []
        if missing:
            raise ConfigError(
                "model.backend is transformer_engine, which cannot run here",
                [*missing, "set model.backend=auto or local"],
            )
        return "transformer_engine", "model.backend is transformer_engine"
    if not platform.is_cuda:
        return "local", "there is no GPU"
    if not installed:
        return "local", "Transformer Engine is not installed"
    if dtype == "float32":
        return "local", _SIXTEEN_BITS
    if is_local_only:
        return "local", "this family was not compared with Hugging Face under Transformer Engine"
    return "transformer_engine", "there is a GPU and Transformer Engine is installed"
