"""Fixtures of the tests that read a checkpoint of Megatron-Bridge: one that all of them may look at, and copies of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptrain.config.shape import ModelShape

BaseOf = Callable[[str], Any]


@pytest.fixture(scope="session")
def saved(base_of: BaseOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of one LoRA training of a Llama, saved by one process; not to be changed."""
    from support.bridge_checkpoint import Run  # enters Megatron
    from support.launch import launch

    root = tmp_path_factory.mktemp("bridge") / "run"
    launch(1, lambda: Run(base=base_of("llama")).save(root))
    return root


@pytest.fixture
def iteration(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of its iteration, to be changed."""
    return shutil.copytree(saved, tmp_path / "run") / "iter_0000010"


@pytest.fixture
def shape(base_of: BaseOf) -> ModelShape:
    """Return the dimensions of its base."""
    found: ModelShape = base_of("llama").shape
    return found
