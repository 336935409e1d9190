"""Whose layers a model is made of, where there is a GPU and where there is none."""

from __future__ import annotations

import os

import pytest
import torch

from ckptrain.errors import ConfigError
from ckptrain.megatron import platform as platform_module
from ckptrain.megatron.platform import Platform, choose_backend

GPU = Platform(name="cuda", device=torch.device("cuda", 0), process_group_backend="cpu:gloo,cuda:nccl")
CPU = Platform(name="cpu", device=torch.device("cpu"), process_group_backend="gloo")


@pytest.mark.parametrize(
    ("where", "installed", "dtype", "is_local_only", "expected"),
    [
        (GPU, True, "bfloat16", False, "transformer_engine"),
        (GPU, True, "bfloat16", True, "local"),
        (GPU, True, "float32", False, "local"),
        (GPU, False, "bfloat16", False, "local"),
        (CPU, False, "bfloat16", False, "local"),
    ],
)
def test_auto_takes_transformer_engine_where_it_was_shown_to_be_right(
    where: Platform,
    installed: bool,
    dtype: str,
    is_local_only: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for families that were never compared under it, and not for float32; the reason is told."""
    monkeypatch.setattr(platform_module, "has_transformer_engine", lambda: installed)
    backend, why = choose_backend("auto", where, dtype, is_local_only=is_local_only)
    assert (backend, bool(why)) == (expected, True)


def test_asking_for_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything that is missing, and what to set."""
    monkeypatch.setattr(platform_module, "has_transformer_engine", lambda: False)
    with pytest.raises(ConfigError, match="there is no GPU"):
        choose_backend("transformer_engine", CPU, "bfloat16")
    with pytest.raises(ConfigError, match="not installed"):
        choose_backend("transformer_engine", GPU, "bfloat16")


def test_reproducible_sets_what_it_needs_and_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core refuses Transformer Engine's attention without the variable."""
    from ckptrain.megatron.platform import reproducible

    name = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    for before in (None, "1"):
        monkeypatch.delenv(name, raising=False) if before is None else monkeypatch.setenv(name, before)
        with reproducible(asked=True):
            assert torch.are_deterministic_algorithms_enabled()
            assert os.environ[name] == "0"
        assert not torch.are_deterministic_algorithms_enabled()
        assert os.environ.get(name) == before
        with reproducible(asked=False):
            assert os.environ.get(name) == before
