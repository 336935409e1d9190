"""A run as a program that embeds ckptrain makes it, for ranks that tools/forked.py starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from forked import Ranks, launch

from ckptrain import api

if TYPE_CHECKING:
    from ckptrain.config.schema import RunConfig
    from ckptrain.training.observers import Observer
    from ckptrain.training.run import RunResult

__all__ = ["Ranks", "launch", "run_training"]


def run_training(config: RunConfig, run_dir: Path, observers: Iterable[Observer] = ()) -> RunResult:
    """Run as a program that embeds ckptrain does."""
    return api.run(config, run_dir=run_dir, observers=observers)
