"""The adapter of a model that is being trained as an adapter that can be read: no checkpoint is written for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from ckptrain.checkpoint.ranks import gather_to_all
from ckptrain.config.identity import BaseIdentity
from ckptrain.config.shape import ModelShape
from ckptrain.convert.checkpoint_source import layer_of, stored_weights
from ckptrain.convert.source import BaseReference, ReadLayer
from ckptrain.lifecycle.facts import AdapterFacts, LoraSpec
from ckptrain.megatron.state import AdapterStore, HostCopy


@attrs.frozen(kw_only=True)
class LiveSource:
    """An adapter in memory, whole, at one step."""

    path: Path
    """What messages call it; nothing is there."""
    run_id: str
    step: int
    shape: ModelShape
    identity: BaseIdentity
    pretrained: str
    lora: LoraSpec
    tensors: Mapping[str, Tensor]

    @property
    def base(self) -> BaseReference:
        """Its base, by fingerprint."""
        base = self.identity
        return BaseReference(
            pretrained=self.pretrained, name=base.name, revision=base.revision, fingerprint=base.fingerprint
        )

    @property
    def facts(self) -> AdapterFacts:
        """What it is."""
        return AdapterFacts(
            path=self.path,
            form="adapter in memory",
            base_name=self.identity.name,
            base_fingerprint=self.identity.fingerprint,
            tokenizer_fingerprint=None,
            lora=self.lora,
            dtype=" and ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors.values()})),
        )

    def held(self) -> AbstractContextManager[None]:
        """Hold nothing: it is a copy, which no step changes."""
        return nullcontext()

    def problems(self) -> list[str]:
        """Compare the tensors with the modules that are adapted."""
        expected = {stored.name for stored in stored_weights(self.lora, self.shape).values()}
        return [f"{name} is missing" for name in sorted(expected - self.tensors.keys())]

    @contextmanager
    def layers(self) -> Iterator[ReadLayer]:
        """Give what reads the matrices of a layer."""
        weights = stored_weights(self.lora, self.shape)
        yield lambda layer: {
            name: self.tensors[stored.name][layer] if stored.has_layer_axis else self.tensors[stored.name]
            for name, stored in weights.items()
            if layer_of(name) == layer
        }

    def provenance(self) -> dict[str, Any]:
        """Return where it comes from."""
        return {
            "run_id": self.run_id,
            "step": self.step,
            "base": attrs.asdict(self.identity),
            "lora": attrs.asdict(self.lora),
        }


def whole_tensors(store: AdapterStore) -> dict[str, Tensor]:
    """Return the adapter as it is now, under the names of a checkpoint, put together of all ranks' pieces; collective.

    An adapter is small enough to be on every rank for a moment; the base is never moved.
    """
    copy = HostCopy(store.adapters())
    copy.take()()
    pieces = {
        name: (tuple(state.shape), [(shard.offset, shard.data) for shard in state.shards])
        for name, state in copy.state.items()
    }
    whole: dict[str, Tensor] = {}
    for of_rank in gather_to_all(pieces):
        for name, (shape, shards) in of_rank.items():
            for offset, data in shards:
                target = whole.setdefault(name, torch.zeros(shape, dtype=data.dtype))
                target[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))] = data
    return whole
