"""A checkpoint of ckptrain as an adapter that can be read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ckptrain.checkpoint.dcp_metadata import ADAPTER_DIRECTORY
from ckptrain.checkpoint.integrity import CommittedCheckpoint, hash_file, verify_files
from ckptrain.checkpoint.manifest import MANIFEST_NAME
from ckptrain.checkpoint.reading import reading
from ckptrain.config.linear import (
    is_expert,
    is_magnitude,
    magnitude_name,
    magnitude_shape,
    weight_names,
    weight_shapes,
)
from ckptrain.config.modules import PARTS, fused_name
from ckptrain.config.shape import ModelShape
from ckptrain.convert.source import AdapterSource, BaseReference, ReadLayer
from ckptrain.lifecycle.facts import AdapterFacts, LoraSpec

if TYPE_CHECKING:
    from torch import Tensor

# megatron-core stacks a layer's experts in one tensor, [experts, ...], and names the module within the module.
_EXPERTS = re.compile(r"(?<=\.mlp)\.experts(?=\.)")
_LAYER = re.compile(r"(?<=^decoder\.layers)\.\d+(?=\.)", re.ASCII)
_MODULE = re.compile(r"decoder\.layers\.(\d+)\.([\w.]+)\.(\w+)", re.ASCII)


@attrs.frozen(kw_only=True)
class CheckpointSource:
    """The adapter of a committed checkpoint; the tensors of a layer are read, and no others."""

    checkpoint: CommittedCheckpoint

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""
        return self.checkpoint.path

    @property
    def shape(self) -> ModelShape:
        """The dimensions of its base."""
        return self.checkpoint.manifest.shape

    @property
    def base(self) -> BaseReference:
        """Its base, by fingerprint."""
        base = self.checkpoint.manifest.base
        return BaseReference(
            pretrained=str(self.checkpoint.manifest.config.get("model.pretrained", base.name)),
            name=base.name,
            revision=base.revision,
            fingerprint=base.fingerprint,
        )

    @property
    def facts(self) -> AdapterFacts:
        """What a start is decided from."""
        manifest = self.checkpoint.manifest
        dtypes = {
            tensor.dtype
            for name, tensor in manifest.tensors.items()
            if tensor.group == "adapter" and not is_magnitude(name)
        }
        return AdapterFacts(
            path=self.path,
            form="checkpoint of ckptrain",
            base_name=manifest.base.name,
            base_fingerprint=manifest.base.fingerprint,
            tokenizer_fingerprint=manifest.tokenizer_fingerprint,
            lora=manifest.lora,
            dtype=" and ".join(sorted(dtypes)),
        )

    @property
    def run_id(self) -> str:
        """The run that saved it."""
        return self.checkpoint.manifest.run_id

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.checkpoint.step

    def held(self) -> AbstractContextManager[None]:
        """Keep it from being removed by its run."""
        return reading(self.checkpoint)

    def problems(self) -> list[str]:
        """Compare the adapter's files with their digests, and its tensors with the modules that the manifest lists."""
        return verify_files(self.checkpoint, within=ADAPTER_DIRECTORY) or stored_problems(self.checkpoint)

    @contextmanager
    def layers(self) -> Iterator[ReadLayer]:
        """Open the files of the adapter, and give what reads the matrices of a layer."""
        from ckptrain.checkpoint.slices import SliceReader

        weights = stored_weights(self.facts.lora, self.shape)
        with SliceReader(self.path / ADAPTER_DIRECTORY) as reader:
            yield lambda layer: {
                name: reader.read(stored.name, layer if stored.has_layer_axis else None)
                for name, stored in weights.items()
                if layer_of(name) == layer
            }

    def provenance(self) -> dict[str, Any]:
        """Return where it comes from."""
        manifest = self.checkpoint.manifest
        return {
            "run_id": manifest.run_id,
            "step": manifest.step,
            "created": manifest.created,
            "manifest_sha256": hash_file(self.path / MANIFEST_NAME).sha256,
            "base": attrs.asdict(manifest.base),
            "lora": attrs.asdict(manifest.lora),
            "trained_with": dict(manifest.versions),
        }


def layer_of(module: str) -> int:
    """Return the number of the layer in a module's global name."""
    return int(module.split(".")[2])


@attrs.frozen(kw_only=True)
class StoredWeight:
    """How a weight of one layer lies in a checkpoint."""

    name: str
    """Of the tensor."""
    has_layer_axis: bool
    """Whether that is one over all layers, [layers, ...]."""
    shape: tuple[int, ...]
    """Of the tensor."""


def stored_weights(lora: LoraSpec, shape: ModelShape) -> dict[str, StoredWeight]:
    """Return where the matrices of an adapter, and its magnitudes, are stored, by their global name.

    A weight that every layer has is one tensor over all of them; see `ckptrain.megatron.state`.
    """
    count = Counter(_LAYER.sub("", module) for module in lora.modules)
    found = {}
    for module in lora.modules:
        stacked = count[_LAYER.sub("", module)] == shape.num_layers
        names, sizes = weight_names(module), weight_shapes(module, lora.settings.dim, shape)
        weights: dict[str, tuple[int, ...]] = dict(zip(names, sizes, strict=True))
        if lora.settings.has_magnitudes:
            weights[magnitude_name(module)] = magnitude_shape(module, shape)
        for weight, size in weights.items():
            name = _EXPERTS.sub(".experts.experts", weight)
            found[weight] = StoredWeight(
                name=_LAYER.sub("", name) if stacked else name,
                has_layer_axis=stacked,
                shape=(shape.num_layers, *size) if stacked else size,
            )
    return found


def stored_state(source: AdapterSource, *, stacked: bool) -> dict[str, Tensor]:
    """Return an adapter's tensors under the names and in the form that megatron-core stores them, all in memory.

    Args:
        source: the adapter.
        stacked: a weight that every layer has is one tensor over all of them; otherwise each layer's is one.
    """
    import torch

    lora = source.facts.lora
    weights = stored_weights(lora, source.shape)
    state: dict[str, Tensor] = {}
    with source.layers() as read:
        for layer in sorted({layer_of(module) for module in lora.modules}):
            for name, matrix in read(layer).items():
                stored = weights[name]
                if stacked and stored.has_layer_axis:
                    state.setdefault(stored.name, torch.empty(stored.shape, dtype=matrix.dtype))[layer].copy_(matrix)
                else:
                    of_layer = stored.name.replace("decoder.layers.", f"decoder.layers.{layer}.", 1)
                    state[of_layer if stored.has_layer_axis else stored.name] = matrix.contiguous()
    return state


def stored_problems(checkpoint: CommittedCheckpoint) -> list[str]:
    """Return why the tensors, by their names and shapes, are not LoRA on exactly the modules that are listed."""
    shape, lora = checkpoint.manifest.shape, checkpoint.manifest.lora
    if shape.num_kv_heads < 1 or shape.num_heads % shape.num_kv_heads:
        return [f"the base has {shape.num_heads} heads, which {shape.num_kv_heads} key-value heads cannot share evenly"]
    problems = [problem for name in lora.modules if (problem := module_problem(name, shape)) is not None]
    if lora.settings.has_magnitudes:
        problems += [problem for name in lora.modules if (problem := _dora_problem(name)) is not None]
    if problems:
        return problems
    held = {name: tensor.shape for name, tensor in checkpoint.manifest.tensors.items() if tensor.group == "adapter"}
    expected = {stored.name: stored.shape for stored in stored_weights(lora, shape).values()}
    problems = [f"{name} is missing" for name in expected if name not in held]
    problems += [
        f"{name} is {list(held[name])}, expected {list(size)}"
        for name, size in expected.items()
        if name in held and held[name] != size
    ]
    return problems + [f"{name} is not part of an adapter of the modules listed" for name in held.keys() - expected]


def _dora_problem(name: str) -> str | None:
    """Say why a module that can be adapted cannot be so by DoRA; None where it can."""
    if is_expert(name):
        return f"{name} is adapted by DoRA, which there is none of for experts"
    if len(PARTS.get(name.rpartition(".")[2], ())) > 1:
        return f"{name} is adapted by DoRA as a whole, and its parts have magnitudes of their own"
    return None


def module_problem(name: str, shape: ModelShape) -> str | None:
    """Say why a global name is none of a module that can be adapted in a model of this shape; None where it is one."""
    found = _MODULE.fullmatch(name)
    if found is None or found[3] not in PARTS:
        return f"{name} is adapted, and Hugging Face has no layer that corresponds to it"
    if int(found[1]) >= shape.num_layers:
        return f"{name} is adapted, and the base has {shape.num_layers} layers"
    mlp = "mlp.experts" if shape.num_experts else "mlp"
    place = mlp if fused_name(found[3]).startswith("linear_fc") else "self_attention"
    if found[2] == place:
        return None
    return f"{name} is adapted, and the base has {shape.num_experts} experts in a layer: expected it in {place}"
