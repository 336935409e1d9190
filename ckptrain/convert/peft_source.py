"""A Hugging Face PEFT adapter as an adapter that can be read: every key accounted for, or refused.

PEFT gives q, k and v an A each, and gate and up; Megatron's fused layers share one. Where those of an adapter are the
same it can be held either way, otherwise only as canonical LoRA. Which it is, is read from the bytes. What has
magnitudes (`use_dora`) is DoRA, and can be nothing else.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from ckptrain.checkpoint.integrity import hash_file
from ckptrain.config.linear import features, magnitude_name, magnitude_shape, short_names, weight_names
from ckptrain.config.modules import FUSED, split_names
from ckptrain.config.schema import LoraConfig
from ckptrain.config.shape import ModelShape
from ckptrain.config.values import suggestion
from ckptrain.convert.peft_files import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    PeftSettings,
    StoredMatrix,
    read_matrices,
    read_settings,
)
from ckptrain.convert.source import BaseReference, ReadLayer
from ckptrain.errors import ConfigError, first_problems
from ckptrain.lifecycle.facts import AdapterFacts, LoraSpec

if TYPE_CHECKING:
    from torch import Tensor

_KEY = re.compile(
    r"base_model\.model\.model\.layers\.(?P<layer>\d+)\.(?P<place>self_attn|mlp|mlp\.experts\.(?P<expert>\d+))"
    r"\.(?P<part>\w+)\.(?:lora_(?P<half>[AB])(?:\.default)?\.weight|lora_magnitude_vector(?:\.default)?(?:\.weight)?)",
    re.ASCII,
)
_STACKED_EXPERTS = re.compile(r"\.mlp\.experts\.(?:base_layer\.)?lora_[AB]\.")
_MAGNITUDES = "magnitudes"
_KEY_ENDS = {"A": "A.weight", "B": "B.weight", _MAGNITUDES: "magnitude_vector"}
_PLACES = {"self_attn": "self_attention", "mlp": "mlp"}
_FUSED_OF = {part: fused for fused, parts in FUSED.items() for part in parts}
_OF_ATTENTION = ("linear_qkv", "linear_proj")


@attrs.frozen
class _Place:
    """What a key of the file is a matrix of."""

    layer: int
    place: str
    """Of the layer it belongs to, in Megatron's notation."""
    part: str
    expert: int | None

    @property
    def group(self) -> tuple[int, str, str]:
        """The Megatron layer that it is a part of: layer number, place, short name."""
        return self.layer, self.place, _FUSED_OF[self.part]

    @property
    def split(self) -> str:
        """The global name of the module that holds it alone."""
        return f"decoder.layers.{self.layer}.{self.place}.{split_names(_FUSED_OF[self.part])[self.part]}"

    @property
    def huggingface(self) -> str:
        """The full Hugging Face name."""
        place = "self_attn" if self.place == "self_attention" else self.place
        expert = "" if self.expert is None else f".{self.expert}"
        return f"model.layers.{self.layer}.{place}{expert}.{self.part}"


type _Halves = Mapping[_Place, Mapping[str, StoredMatrix]]
"""By place: the matrices A and B, and the magnitudes where there are such."""


@attrs.frozen(kw_only=True)
class PeftSource:
    """An adapter that PEFT has saved, of one rank and one scale."""

    path: Path
    shape: ModelShape
    base: BaseReference
    settings: PeftSettings
    kind: Literal["lora", "canonical", "dora"]
    modules: tuple[str, ...]
    halves: _Halves
    notes: tuple[str, ...]

    run_id: str = ""
    step: int = 0

    @property
    def facts(self) -> AdapterFacts:
        """What a start is decided from."""
        dtypes = sorted({halves[half].dtype for halves in self.halves.values() for half in "AB"})
        settings = LoraConfig(
            kind=self.kind,
            target_modules=short_names(self.modules, self.shape),
            dim=self.settings.rank,
            alpha=self.settings.alpha,
            dropout=self.settings.dropout,
            dropout_position="pre",
        )
        return AdapterFacts(
            path=self.path,
            form="Hugging Face PEFT adapter",
            base_name=self.settings.base,
            base_fingerprint=None,
            tokenizer_fingerprint=None,
            lora=LoraSpec(settings=settings, modules=self.modules),
            dtype=" and ".join(dtypes),
            notes=(*self.settings.notes, *self.notes),
        )

    def held(self) -> AbstractContextManager[None]:
        """Nobody removes it but its owner."""
        return nullcontext()

    def problems(self) -> list[str]:
        """Read every matrix, and name those that hold NaN or infinity."""
        from safetensors import safe_open

        keys = [matrix.key for halves in self.halves.values() for matrix in halves.values()]
        with safe_open(self.path / PEFT_WEIGHTS, framework="pt") as file:
            return [f"{key} holds NaN or infinity" for key in keys if not file.get_tensor(key).isfinite().all()]

    @contextmanager
    def layers(self) -> Iterator[ReadLayer]:
        """Open the file, and give what reads the matrices of a layer."""
        from safetensors import safe_open

        from ckptrain.convert.unfuse import fuse, parse_module

        with safe_open(self.path / PEFT_WEIGHTS, framework="pt") as file:

            def read(layer: int) -> dict[str, Tensor]:
                halves = {
                    place.huggingface: (file.get_tensor(found["A"].key), file.get_tensor(found["B"].key))
                    for place, found in self.halves.items()
                    if place.layer == layer
                }
                matrices: dict[str, Tensor] = {}
                for name in self.modules:
                    module = parse_module(name)
                    if module is not None and module.layer == layer:
                        matrices |= dict(zip(weight_names(name), fuse(module, halves, self.shape), strict=True))
                for place, found in self.halves.items():
                    if place.layer == layer and _MAGNITUDES in found:
                        matrices[magnitude_name(place.split)] = file.get_tensor(found[_MAGNITUDES].key)
                return matrices

            yield read

    def provenance(self) -> dict[str, Any]:
        """Return where it comes from."""
        return {
            "form": self.facts.form,
            "files": {name: hash_file(self.path / name).sha256 for name in (PEFT_CONFIG, PEFT_WEIGHTS)},
            "peft_version": self.settings.peft_version,
            "base": attrs.asdict(self.base),
            "lora": attrs.asdict(self.facts.lora),
        }


def open_peft(
    path: Path, base_of: Callable[[str | None, str | None], tuple[BaseReference, ModelShape]], kind: str
) -> PeftSource:
    """Return the PEFT adapter in a directory, after the checks that cost no reading of all its numbers.

    Args:
        path: the directory.
        base_of: gives the base and its dimensions of the name and the revision that the adapter says.
        kind: what it is to be read as: lora, canonical, dora, or auto, which is dora where it has magnitudes, and
            otherwise lora wherever that can hold it.

    Raises:
        ConfigError: it cannot be used with this base or as this kind, every reason is listed; what `base_of` raises.
        CheckpointDamaged: the weights are cut short.
    """
    settings = read_settings(path)
    matrices = read_matrices(path)
    base, shape = base_of(settings.base, settings.revision)
    halves, problems = _sort(matrices)
    problems += _fit_problems(halves, settings, shape)
    if not problems and not halves:
        problems = ["it holds no matrices"]
    if problems:
        raise ConfigError(f"cannot use the adapter {path} with the base {base.name}", first_problems(problems))
    chosen, why = _kind(path, settings, halves, kind)
    notes = (f"lora.kind is auto: {chosen}, because {why}",) if kind == "auto" else ()
    return PeftSource(
        path=path,
        shape=shape,
        base=base,
        settings=settings,
        kind=chosen,
        modules=_modules(halves, chosen),
        halves=halves,
        notes=notes,
    )


def _kind(
    path: Path, settings: PeftSettings, halves: _Halves, asked: str
) -> tuple[Literal["lora", "canonical", "dora"], str]:
    """Decide what an adapter is held as, and say why.

    Raises:
        ConfigError: it cannot be what is asked for.
    """
    apart = None if settings.has_magnitudes else _why_apart(path / PEFT_WEIGHTS, halves)
    problem = None
    if settings.has_magnitudes and asked in ("lora", "canonical"):
        problem = "use_dora is true: it has magnitudes, which only DoRA holds; set lora.kind=dora"
    elif asked == "dora" and not settings.has_magnitudes:
        problem = f"use_dora is not true: it has no magnitudes; set lora.kind={'canonical' if apart else 'lora'}"
    elif asked == "lora" and apart is not None:
        problem = f"{apart}; set lora.kind=canonical"
    if problem is not None:
        raise ConfigError(
            f"cannot use the adapter {path} as lora.kind={asked}", [f"{problem}, or auto, which chooses it"]
        )
    if settings.has_magnitudes:
        return "dora", "it has magnitudes (use_dora)"
    if asked == "canonical" or apart is not None:
        return "canonical", apart or "it was asked for"
    return "lora", "the parts of its fused layers share an A"


def _sort(matrices: Mapping[str, StoredMatrix]) -> tuple[_Halves, list[str]]:
    """Find what each key is a matrix of; returns them, and the keys that are of nothing that can be adapted."""
    halves: dict[_Place, dict[str, StoredMatrix]] = {}
    problems = []
    for key, matrix in sorted(matrices.items()):
        found = _KEY.fullmatch(key)
        if found is None or found["part"] not in _FUSED_OF:
            problems.append(f"{key} {_what_it_is(key, None if found is None else found['part'])}")
            continue
        expert = None if found["expert"] is None else int(found["expert"])
        place = "mlp.experts" if expert is not None else _PLACES[found["place"]]
        half = found["half"] or _MAGNITUDES
        there = halves.setdefault(_Place(int(found["layer"]), place, found["part"], expert), {})
        if half in there:
            problems.append(f"{key} is there a second time, as {there[half].key}")
        there[half] = matrix
    return dict(sorted(halves.items(), key=lambda item: _order(item[0]))), problems


def _order(place: _Place) -> tuple[int, int, int, int]:
    fused = _FUSED_OF[place.part]
    return place.layer, list(FUSED).index(fused), FUSED[fused].index(place.part), place.expert or 0


def _what_it_is(key: str, part: str | None) -> str:
    if _STACKED_EXPERTS.search(key):
        return (
            "is of experts that PEFT has stacked in one tensor, which ckptrain does not read: train the experts under"
            " ckptrain, or leave them out of target_parameters"
        )
    if part is not None:
        return f"is of a layer that ckptrain does not adapt{suggestion(part, _FUSED_OF)}"
    if "lora_embedding" in key or "embed_tokens" in key or "lm_head" in key:
        return "is of the embedding or the output layer, which ckptrain does not adapt"
    return "is not a key that ckptrain knows: expected base_model.model.model.layers.N.PLACE.PART.lora_A.weight"


def _fit_problems(halves: _Halves, settings: PeftSettings, shape: ModelShape) -> list[str]:
    """Return what does not fit a base of this shape, or is missing."""
    problems = []
    for place, found in halves.items():
        name = place.huggingface
        if place.layer >= shape.num_layers:
            problems.append(f"{name} is adapted, and the base has {shape.num_layers} layers")
            continue
        if (place.place == "self_attention") != (_FUSED_OF[place.part] in _OF_ATTENTION):
            problems.append(f"{name} is adapted, and the base has no such layer")
            continue
        if place.place != "self_attention" and (place.expert is None) != (not shape.num_experts):
            problems.append(f"{name} is adapted, and the base has {shape.num_experts} experts in a layer")
            continue
        if place.expert is not None and place.expert >= shape.num_experts:
            problems.append(f"{name} is adapted, and the base has {shape.num_experts} experts in a layer")
            continue
        if settings.has_magnitudes and place.expert is not None:
            problems.append(f"{name} is adapted, and use_dora is true: ckptrain has no DoRA of experts")
            continue
        if not settings.has_magnitudes and _MAGNITUDES in found:
            problems.append(f"{found[_MAGNITUDES].key} is a magnitude of DoRA, and use_dora is not true")
        for half, size in _expected(place, settings, shape).items():
            matrix = found.get(half)
            if matrix is None:
                problems.append(f"{name}.lora_{_KEY_ENDS[half]} is missing")
            elif matrix.shape != size:
                problems.append(f"{matrix.key} is {list(matrix.shape)}, expected {list(size)}")
            elif matrix.dtype not in ("float32", "bfloat16", "float16"):
                problems.append(f"{matrix.key} is {matrix.dtype}, expected float32, bfloat16 or float16")
    return problems + _missing_experts(halves, shape)


def _expected(place: _Place, settings: PeftSettings, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a place has."""
    in_features, out_features = features(shape, place.split)
    matrices: dict[str, tuple[int, ...]] = {"A": (settings.rank, in_features), "B": (out_features, settings.rank)}
    return matrices | ({_MAGNITUDES: magnitude_shape(place.split, shape)} if settings.has_magnitudes else {})


def _missing_experts(halves: _Halves, shape: ModelShape) -> list[str]:
    """All experts of a layer are adapted or none; name those that are left out."""
    experts: dict[tuple[int, str], set[int]] = {}
    for place in halves:
        if place.expert is not None:
            experts.setdefault((place.layer, place.part), set()).add(place.expert)
    return [
        f"model.layers.{layer}.mlp.experts: {part} of {len(found)} of {shape.num_experts} experts is adapted; ckptrain"
        " adapts all experts of a layer or none"
        for (layer, part), found in experts.items()
        if len(found) < shape.num_experts
    ]


def _why_apart(path: Path, halves: _Halves) -> str | None:
    """Say why an adapter of fused layers cannot hold this one; None where it can."""
    groups: dict[tuple[tuple[int, str, str], int | None], dict[str, StoredMatrix]] = {}
    for key, matrices in halves.items():
        groups.setdefault((key.group, key.expert), {})[key.part] = matrices["A"]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for (group, _), found in groups.items():
            layer, place, fused = group
            parts = FUSED[fused]
            if missing := [part for part in parts if part not in found]:
                there = ", ".join(found)
                return f"in layer {layer} {there} is adapted and {', '.join(missing)} is not, and Megatron fuses them"
            first, *others = (found[part] for part in parts)
            if not all(_same_bytes(data, first, other) for other in others):
                return f"{', '.join(parts)} of layer {layer} ({place}) have an A of their own"
    return None


def _same_bytes(data: mmap.mmap, one: StoredMatrix, other: StoredMatrix) -> bool:
    return (
        one.dtype == other.dtype
        and data[one.start : one.start + one.num_bytes] == data[other.start : other.start + other.num_bytes]
    )


def _modules(halves: _Halves, kind: str) -> tuple[str, ...]:
    """Return the global names of the modules that hold the matrices, layer by layer."""
    if kind in ("canonical", "dora"):
        return tuple(dict.fromkeys(place.split for place in halves))
    return tuple(
        dict.fromkeys(f"decoder.layers.{layer}.{at}.{fused}" for layer, at, fused in (place.group for place in halves))
    )
