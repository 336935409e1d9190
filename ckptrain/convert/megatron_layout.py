"""Which tensors of a checkpoint of Megatron hold which matrix: names, axes, and what cannot be mapped exactly.

megatron-core stores a weight that every layer has as one tensor over all layers, or one for each, and experts likewise;
B of linear_fc1, whose gate and up are cut apart, is one tensor or two. Whatever a name does not mean is refused by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import attrs

from ckptrain.checkpoint.dcp_metadata import DcpTensor
from ckptrain.checkpoint.manifest import printable
from ckptrain.config.linear import LORA_A, LORA_B, is_expert, weight_shapes
from ckptrain.config.modules import FUSED, PARTS, SPLIT, fused_name
from ckptrain.config.shape import ModelShape
from ckptrain.convert.megatron_files import MegatronSettings

_KEY = re.compile(
    r"(?:model\d*\.)?(?:module\.)*decoder\.layers(?:\.(?P<layer>\d{1,6}))?"
    r"\.(?P<place>self_attention|mlp|mlp\.experts)(?:(?<=experts)\.experts(?:\.(?P<expert>\d{1,6}))?)?"
    r"\.(?P<fused>linear_\w+?)\.adapter(?:\.(?P<split>adapter_\w+?))?"
    r"\.(?P<half>linear_in|linear_out)\.weight(?P<rows>_[wv])?",
    re.ASCII,
)
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.", re.ASCII)
_SHORT = {(split.layer, split.adapter): short for short, split in SPLIT.items()}
# Megatron-Bridge's layers of these have the norm that follows them within (models/common/te_layers.py).
_NORM_WITHIN = ("Gemma2ForCausalLM", "Gemma3ForCausalLM"), ("linear_proj", "linear_fc2")
_GATE_OR_UP = ("linear_fc1_gate", "linear_fc1_up")
# What all experts of a layer have in common under experts_shared_outer_loras.
_OUTER = {("linear_fc1", LORA_A), ("linear_fc2", LORA_B)}
_ROWS = {None: None, "_w": 0, "_v": 1}
_DTYPES = ("float32", "bfloat16", "float16")


@attrs.frozen(kw_only=True)
class StoredPart:
    """A tensor that holds a matrix of an adapted module, of all layers or of one, or rows or an expert of it."""

    tensor: str
    layer: int | None
    """None where the tensor has an axis for all layers, which is the first."""
    expert: int | None
    """None where it holds all experts, or there are none."""
    rows: int | None
    """0 for the upper half of B's rows, 1 for the lower, None for all."""


@attrs.frozen(kw_only=True)
class MegatronLayout:
    """The modules that a checkpoint holds adapters of, and the tensors that each matrix is in."""

    modules: tuple[str, ...]
    """Global names, layer by layer."""
    parts: Mapping[tuple[str, str], tuple[StoredPart, ...]]
    """By module, and linear_in or linear_out."""


def is_adapter_tensor(name: str) -> bool:
    """Tell whether a tensor belongs to an adapter, rather than to the base or the optimizer."""
    return ".adapter." in name and _OPTIMIZER.match(name) is None


def is_base_tensor(name: str) -> bool:
    """Tell whether a tensor belongs to the base."""
    return ".adapter." not in name and _OPTIMIZER.match(name) is None


def map_tensors(
    tensors: Mapping[str, DcpTensor], settings: MegatronSettings, shape: ModelShape
) -> tuple[MegatronLayout, list[str]]:
    """Find what each tensor holds; returns that, and why it is not an adapter that can be held."""
    parts: dict[tuple[str, str], list[StoredPart]] = {}
    problems = []
    for name in sorted(tensors):
        found = _KEY.fullmatch(name)
        short = None if found is None else _short_name(found["fused"], found["split"])
        if found is None or short is None:
            problems.append(printable(f"{name} {_what_it_is(name)}"))
            continue
        place = "mlp.experts" if found["expert"] is not None else found["place"]
        part = StoredPart(
            tensor=name,
            layer=None if found["layer"] is None else int(found["layer"]),
            expert=None if found["expert"] is None else int(found["expert"]),
            rows=_ROWS[found["rows"]],
        )
        if part.layer is not None and part.layer >= shape.num_layers:
            problems.append(f"{name} is of layer {part.layer}, and the base has {shape.num_layers} layers")
            continue
        if place != "self_attention" and (place == "mlp.experts") != (shape.num_experts > 0):
            problems.append(f"{name} is adapted, and the base has {shape.num_experts} experts in a layer")
            continue
        for layer in range(shape.num_layers) if part.layer is None else (part.layer,):
            parts.setdefault((f"decoder.layers.{layer}.{place}.{short}", found["half"]), []).append(part)
    modules = tuple(sorted({module for module, _ in parts}, key=_order))
    layout = MegatronLayout(
        modules=modules, parts={key: tuple(sorted(found, key=_rank)) for key, found in parts.items()}
    )
    problems += _training_problems(layout, settings, shape)
    return layout, problems or list(_shape_problems(layout, tensors, settings, shape))


def placement_problems(modules: Sequence[str], shape: ModelShape) -> list[str]:
    """Return which adapters Megatron-Bridge adds at another place than PEFT and ckptrain do."""
    problems = []
    architectures, shorts = _NORM_WITHIN
    found = {module.rpartition(".")[2] for module in modules}
    if shape.architecture in architectures and (moved := sorted(found & set(shorts))):
        problems.append(
            f"Megatron-Bridge adds the adapters of {', '.join(moved)} of a {shape.architecture} after the norm that"
            " follows, and PEFT and ckptrain before it"
        )
    if not shape.adapts_experts and any(map(is_expert, modules)):
        problems.append(f"the experts of a {shape.architecture} are adapted, which PEFT passes over")
    return problems


def permuted_by(module: str, settings: MegatronSettings) -> int:
    """Return over how many processes the rows of a module's B were dealt out when it was saved; 1: they are in order.

    Megatron-Bridge takes every layer that has linear_fc1 in its name for gate and up in one, and so saves the upper
    halves of all processes before the lower ones, which for either of the two alone is out of order.
    """
    if module.rpartition(".")[2] not in _GATE_OR_UP:
        return 1
    return settings.expert_tensor if is_expert(module) else settings.tensor


def _short_name(fused: str, split: str | None) -> str | None:
    """Return the short name of what is adapted; None where there is no such layer."""
    if split is None:
        return fused if fused in FUSED else None
    return _SHORT.get((fused, split))


def _order(module: str) -> tuple[int, int, int]:
    short = module.rpartition(".")[2]
    fused = fused_name(short)
    return int(module.split(".")[2]), list(FUSED).index(fused), list(PARTS).index(short)


def _rank(part: StoredPart) -> tuple[int, int]:
    return part.expert or 0, part.rows or 0


def _what_it_is(name: str) -> str:
    places = [
        ("weight_magnitude", "is a magnitude of DoRA; ckptrain reads Megatron-Bridge's LoRA"),
        ("shared_experts", "is of an expert that all tokens share, which ckptrain does not adapt"),
        ("router", "is of a router, which ckptrain does not adapt"),
        ("vision", "is of a part of the model that reads images, which ckptrain does not adapt"),
        ("language_model.", "is of the language model within a larger one, which ckptrain does not train"),
        ("embedding", "is of the embedding, which ckptrain does not adapt"),
        ("output_layer", "is of the output layer, which ckptrain does not adapt"),
        ("linear_", "is of a layer that ckptrain does not adapt, or a bias"),
    ]
    words = [words for place, words in places if place in name]
    return words[0] if words else "is not a tensor that ckptrain knows"


def _training_problems(layout: MegatronLayout, settings: MegatronSettings, shape: ModelShape) -> list[str]:
    """Return why what was trained is not what the matrices say, or not one LoRA adapter."""
    experts = [module for module in layout.modules if is_expert(module)]
    shorts = {module.rpartition(".")[2] for module in layout.modules}
    problems = placement_problems(layout.modules, shape)
    if experts and settings.reduces_expert_rank:
        problems.append(
            "peft.normalize_moe_lora is true: experts have a rank of their own, and ckptrain holds one rank"
        )
    if experts and settings.expert_tensor > 1:
        problems.append(
            f"its experts were trained at expert_tensor_parallel_size={settings.expert_tensor}, where Megatron-Bridge's"
            " adapters of experts compute something else than B A"
        )
    if any(fused_name(module.rpartition(".")[2]) == "linear_fc1" for module in experts):
        size = settings.model.get("moe_mlp_glu_interleave_size")
        if size is not None:
            problems.append(f"model.moe_mlp_glu_interleave_size is {size}: gate and up of its experts are interleaved")
    if settings.tensor > 1 and (split := sorted(shorts & {"linear_q", "linear_k", "linear_v"})):
        problems.append(
            f"{', '.join(split)} were trained at tensor_model_parallel_size={settings.tensor}, where Megatron-Bridge's"
            " CanonicalLoRA adds them to other heads than theirs: what was trained is not B A"
        )
    return problems


def _shape_problems(
    layout: MegatronLayout, tensors: Mapping[str, DcpTensor], settings: MegatronSettings, shape: ModelShape
) -> Iterator[str]:
    """Yield what is missing, there twice, or of another shape than the base's."""
    seen: set[str] = set()
    for module in layout.modules:
        for half, size in zip((LORA_A, LORA_B), weight_shapes(module, settings.rank, shape), strict=True):
            parts = layout.parts.get((module, half), ())
            if not parts:
                yield f"{module} has no {half}"
                continue
            if (problem := _gap(parts, shape)) is not None:
                yield f"{module}: {half} {problem}"
                continue
            for part in parts:
                if part.tensor not in seen:  # one over all layers is met in each
                    seen.add(part.tensor)
                    yield from _tensor_problems(part, tensors[part.tensor], module, half, size, settings, shape)


def _gap(parts: tuple[StoredPart, ...], shape: ModelShape) -> str | None:
    """Say what is missing of a matrix, or is there twice."""
    by_expert: dict[int | None, list[int | None]] = {}
    for part in parts:
        by_expert.setdefault(part.expert, []).append(part.rows)
    if set(by_expert) not in ({None}, set(range(shape.num_experts))):
        known = sorted(str(expert) for expert in by_expert)
        return f"is of the experts {', '.join(known[:10])}; ckptrain adapts all experts of a layer or none"
    if any(rows not in ([None], [0, 1]) for rows in by_expert.values()):
        return f"is stored twice, or in part: {', '.join(part.tensor for part in parts[:4])}"
    return None


def _tensor_problems(
    part: StoredPart,
    tensor: DcpTensor,
    module: str,
    half: str,
    size: tuple[int, ...],
    settings: MegatronSettings,
    shape: ModelShape,
) -> Iterator[str]:
    layers = (shape.num_layers,) if part.layer is None else ()
    *experts, rows, columns = size
    matrix = (rows if part.rows is None else rows // 2, columns)
    expected = (*layers, *(experts if part.expert is None else ()), *matrix)
    if tensor.dtype not in _DTYPES:
        yield f"{part.tensor} is {tensor.dtype}, expected {', '.join(_DTYPES)}"
    if is_expert(module) and part.expert is None and tensor.shape == (*layers, *matrix):
        outer = settings.shares_outer and (fused_name(module.rpartition(".")[2]), half) in _OUTER
        if settings.expert > 1 and not outer:
            yield (
                f"{part.tensor} has no axis for the experts: those of a process shared it, and of"
                f" {settings.expert} expert parallel processes it is only one's"
            )
    elif tensor.shape != expected:
        yield f"{part.tensor} is {list(tensor.shape)}, expected {list(expected)}"
