"""An adapter on disk, whoever wrote it: what it is of, whether it is whole, its matrices one layer at a time.

What converts, compares or starts from an adapter asks for no more than this, so every form that can be read can be used
for everything. Opening one loads no torch; reading its matrices does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from ckptrain.config.shape import ModelShape
from ckptrain.lifecycle.facts import AdapterFacts

if TYPE_CHECKING:
    from torch import Tensor

type ReadLayer = Callable[[int], dict[str, Tensor]]
"""Gives A and B of every adapted module of a layer, by the names of `ckptrain.config.linear.weight_names`, whole.

A is [rank, in_features] and B [out_features, rank], those of experts [experts, ...]. Where `lora.kind` is dora there
are the magnitudes of every module too, [out_features], by `magnitude_name`. What they hold may not be changed.
"""


@attrs.frozen(kw_only=True)
class BaseReference:
    """The base model that an adapter was made for, as far as the adapter knows it."""

    pretrained: str
    """What `model.pretrained` takes: a Hub id or a path."""
    name: str
    revision: str | None = None
    fingerprint: str | None = None
    """None where only the name is known."""


class AdapterSource(Protocol):
    """An adapter that can be read."""

    @property
    def path(self) -> Path:
        """The directory that it is."""

    @property
    def shape(self) -> ModelShape:
        """The dimensions of its base."""

    @property
    def base(self) -> BaseReference:
        """Its base."""

    @property
    def facts(self) -> AdapterFacts:
        """What a start is decided from."""

    @property
    def run_id(self) -> str:
        """The run that made it; empty where that is not known."""

    @property
    def step(self) -> int:
        """Optimizer steps done; 0 where that is not known."""

    def held(self) -> AbstractContextManager[None]:
        """Keep it from being removed by a run that needs its place.

        Raises:
            CheckpointNotFound: it was removed after it had been opened.
        """

    def problems(self) -> list[str]:
        """Read every file of it, and return what is not as it should be; empty for an adapter that is whole."""

    def layers(self) -> AbstractContextManager[ReadLayer]:
        """Open its files, and give what reads the matrices of a layer.

        Raises:
            CheckpointDamaged: they cannot be read.
        """

    def provenance(self) -> dict[str, Any]:
        """Return where it comes from: enough to find it again, and to tell it from another."""
