"""From a checkpoint to a Hugging Face PEFT adapter, without the base's weights and without Megatron.

A checkpoint holds whole matrices under global names, whatever layout wrote them, so the export is renaming and cutting
rows. It goes layer by layer, from file to file: time goes with the size of the adapter, and memory with that of one of
its layers. Of the base only the dimensions are needed, and the manifest has them.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

import ckptrain
from ckptrain.config.linear import magnitude_name, weight_names
from ckptrain.convert.directory import (
    CONFIG_NAME,
    EXPORT,
    WEIGHTS_NAME,
    check_destination,
    published,
    write_json,
    write_provenance,
)
from ckptrain.convert.gate import Gate, gate_record, pass_gate
from ckptrain.convert.source import AdapterSource
from ckptrain.convert.sources import open_source
from ckptrain.convert.stream import Declared, SafetensorsStream
from ckptrain.convert.unfuse import Module, huggingface_layers, missing_beside, parse_module, target_modules, unfuse
from ckptrain.errors import CheckpointDamaged, ConfigError, ProblemsError, first_problems

DTYPES = ("float32", "bfloat16", "float16")

_PEFT_PREFIX = "base_model.model."
_VLLM_LARGEST_RANK = 512
_PACKAGES = ("peft", "safetensors", "torch", "transformers")


@attrs.frozen(kw_only=True)
class Export:
    """A PEFT directory that was written, and what is in it."""

    path: Path
    source: str
    """What it was made of."""
    tensors: int
    """How many: an A and a B for each adapted Hugging Face layer, and its magnitudes where it is DoRA."""
    num_bytes: int
    """Size of the weights file."""
    dtype: str
    base: str
    """The base model as the run named it; PEFT loads it from there where it is not given."""
    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    run_id: str
    """Empty where it is not known, as the step is 0."""
    step: int
    effect: float
    """The sum over adapted modules of the Frobenius norm of (alpha / rank) B A; 0 for LoRA that does nothing."""
    gate: Gate | None
    """What it was let through by; None where that was not looked at."""
    gate_reason: str
    warning: str | None


@attrs.define(kw_only=True)
class Effect:
    """What an adapter does, added up module by module, and which of its weights cannot be written as asked."""

    scale: float
    """alpha / rank."""
    dtype: torch.dtype
    norm: float = 0.0
    """The sum over modules of the Frobenius norm of scale B A."""
    is_rounded: bool = False
    """Whether a weight is not in `dtype` what it was."""
    problems: list[str] = attrs.field(factory=list)

    def add(self, module: Module, lora_a: Tensor, lora_b: Tensor, magnitudes: Tensor | None = None) -> None:
        """Count one module's matrices in; magnitudes are looked at, but what they do depends on the base."""
        self.norm += self.scale * _product_norm(lora_a, lora_b)
        held = dict(zip(weight_names(module.name), (lora_a, lora_b), strict=True))
        if magnitudes is not None:
            held[magnitude_name(module.name)] = magnitudes
        for name, tensor in held.items():
            largest = max(abs(extreme.item()) for extreme in tensor.aminmax())
            if not math.isfinite(largest):
                self.problems.append(f"{name} holds NaN or infinity: export an earlier checkpoint")
            elif not torch.tensor(largest, dtype=self.dtype).isfinite():
                self.problems.append(f"{name} is too large for {self.dtype}: export as float32")
            self.is_rounded |= not torch.equal(tensor.to(self.dtype).to(tensor.dtype), tensor)


def export_adapter(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str = "float32",
    overwrite: bool = False,
    verify: bool | None = False,
    base: str | None = None,
    layout: str = "peft",
) -> Export:
    """Write the adapter of a checkpoint as a directory that `peft.PeftModel.from_pretrained` loads.

    Args:
        checkpoint: a checkpoint, a run, of which the newest is taken, or what else `open_source` knows.
        out: the directory to make; it is there complete or not at all.
        dtype: of the matrices: float32 holds what was trained exactly, whichever type it was trained in.
        overwrite: replace an earlier export at `out`.
        verify: compare logits under Hugging Face and Megatron first; None does where the base is at hand and small.
        base: the base model, for an adapter that does not say it.
        layout: peft, or vllm, which refuses what vLLM would not load.

    Raises:
        AdapterMismatch: they differ; nothing is written.
        CheckpointNotFound: `checkpoint` is none.
        CheckpointDamaged: it is not what its manifest says, or holds adapters that Hugging Face has no layers for.
        ConfigError: the dtype is unknown.
        ProblemsError: a weight is not finite, or too large for the dtype.
        CkptrainError: `out` is in the way, or cannot be written.
    """
    _check_dtype(dtype)
    source = open_source(checkpoint, base=base)
    return export_source(source, out, dtype=dtype, overwrite=overwrite, verify=verify, layout=layout)


def export_source(
    source: AdapterSource,
    out: Path,
    *,
    dtype: str = "float32",
    overwrite: bool = False,
    verify: bool | None = False,
    layout: str = "peft",
) -> Export:
    """Write an adapter that is open as `export_adapter` does; that of a model in memory is one too."""
    _check_dtype(dtype)
    out = out.resolve()
    with source.held():
        check_destination(EXPORT, out, source.path, overwrite=overwrite)
        check_whole(source, "export")
        modules = adapted_modules(source)
        if layout == "vllm" and (problems := vllm_problems(source)):
            raise ProblemsError(f"cannot export {source.path} for vLLM", first_problems(problems))
        config = _peft_config(source, modules)
        with published(out, overwrite=overwrite) as staging:
            tensors, found = _write_weights(staging / WEIGHTS_NAME, source, modules, dtype)
            effect = found.norm
            write_json(staging / CONFIG_NAME, config)
            num_bytes = (staging / WEIGHTS_NAME).stat().st_size
            gate, why = pass_gate(verify, source, lambda base: _compare(source, base, staging, found))
            facts = {
                "dtype": dtype,
                "tensors": tensors,
                "effect": effect,
                "layout": layout,
                "gate": gate_record(gate, why),
            }
            write_provenance(EXPORT, staging, {**provenance(source), **facts})
    return Export(
        path=out,
        source=str(source.path),
        tensors=tensors,
        num_bytes=num_bytes,
        dtype=dtype,
        base=source.base.name,
        rank=source.facts.lora.settings.dim,
        alpha=source.facts.lora.settings.alpha,
        target_modules=tuple(config["target_modules"]),
        run_id=source.run_id,
        step=source.step,
        effect=effect,
        gate=gate,
        gate_reason=why,
        warning=_warning(source, effect),
    )


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ConfigError("cannot export", [f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}"])


def _warning(source: AdapterSource, effect: float) -> str | None:
    if effect:
        return None
    nothing = "B A is 0 in every module that it adapts"
    if source.facts.lora.settings.has_magnitudes:
        return f"{nothing}: the adapter changes no more than the lengths of the base's rows, if those"
    return f"the adapter changes nothing: {nothing}"


def _compare(source: AdapterSource, base: Path, written: Path, effect: Effect) -> Gate:
    from ckptrain.convert.compare import check_adapter  # needs Megatron, which an export does not

    rounded_to = effect.dtype if effect.is_rounded else torch.float32
    return check_adapter(source, base, written, rounded_to=rounded_to, has_effect=effect.norm > 0)


def check_whole(source: AdapterSource, verb: str) -> None:
    """Read every file of an adapter.

    Raises:
        CheckpointDamaged: one is not as it should be, or the adapter is none for its base.
    """
    if problems := source.problems():
        raise CheckpointDamaged(f"cannot {verb} {source.path}: it is damaged", first_problems(problems))


def adapted_modules(source: AdapterSource) -> list[Module]:
    """Return what an adapter adapts, layer by layer, in the order of its own list within a layer."""
    found = [module for name in source.facts.lora.modules if (module := parse_module(name)) is not None]
    return sorted(found, key=lambda module: module.layer)


def read_modules(
    source: AdapterSource, modules: Sequence[Module]
) -> Iterator[tuple[Module, Tensor, Tensor, Tensor | None]]:
    """Yield (module, A, B, magnitudes), reading one layer at a time; the modules are in the order of their layers."""
    with source.layers() as read:
        for layer, of_layer in itertools.groupby(modules, key=lambda module: module.layer):
            matrices = read(layer)
            for module in of_layer:
                lora_a, lora_b = (matrices[name] for name in weight_names(module.name))
                yield module, lora_a, lora_b, matrices.get(magnitude_name(module.name))
            del matrices  # before the next layer's are read


def _write_weights(path: Path, source: AdapterSource, modules: Sequence[Module], dtype: str) -> tuple[int, Effect]:
    """Write matrices and magnitudes as they come; returns how many, and the adapter's effect.

    Raises:
        ProblemsError: a weight is NaN or infinite, or becomes so in `dtype`.
    """
    settings = source.facts.lora.settings
    sizes = {name: size for module in modules for name, size in huggingface_layers(module, source.shape).items()}
    beside = missing_beside(modules, source.shape)
    declared = {}
    for name, (in_features, out_features) in {**sizes, **beside}.items():
        declared[_key(name, "A")] = Declared(dtype=dtype, shape=(settings.dim, in_features))
        declared[_key(name, "B")] = Declared(dtype=dtype, shape=(out_features, settings.dim))
        if settings.has_magnitudes:
            declared[_magnitude_key(name)] = Declared(dtype=dtype, shape=(out_features,))
    target = getattr(torch, dtype)
    effect = Effect(scale=settings.alpha / settings.dim, dtype=target)
    with SafetensorsStream(path, declared) as stream:
        for module, lora_a, lora_b, magnitudes in read_modules(source, modules):
            effect.add(module, lora_a, lora_b, magnitudes)
            for name, a, b in unfuse(module, lora_a, lora_b, source.shape):
                stream.write(_key(name, "A"), a.to(target))
                stream.write(_key(name, "B"), b.to(target))
                if magnitudes is not None:  # of a module that is one Hugging Face layer
                    stream.write(_magnitude_key(name), magnitudes.to(target))
        for key in (_key(name, half) for name in beside for half in ("A", "B")):
            stream.write(key, torch.zeros(declared[key].shape, dtype=target))
    if effect.problems:
        raise ProblemsError(f"cannot export {source.path}", first_problems(effect.problems))
    return len(declared), effect


def _key(layer: str, half: str) -> str:
    return f"{_PEFT_PREFIX}{layer}.lora_{half}.weight"


def _magnitude_key(layer: str) -> str:
    return f"{_PEFT_PREFIX}{layer}.lora_magnitude_vector"


def _product_norm(lora_a: Tensor, lora_b: Tensor) -> float:
    """Return the Frobenius norm of B A without forming it: its square is the sum of (B^T B) * (A A^T), [rank, rank]."""
    a, b = lora_a.float(), lora_b.float()  # [rank, rank] each, of sums of squares: float32 is near enough for a report
    square = ((b.mT @ b).double() * (a @ a.mT).double()).sum().item()
    return math.sqrt(max(square, 0.0))


def vllm_problems(source: AdapterSource) -> list[str]:
    """Return why vLLM would not load an adapter that PEFT does.

    It takes A and B of each Hugging Face layer under PEFT's names, and those of experts one by one, as they are written
    here (vllm/lora/lora_model.py); a rank above its largest `max_lora_rank` it does not (vllm/config/lora.py), nor DoRA
    (vllm/lora/peft_helper.py).
    """
    if source.facts.lora.settings.has_magnitudes:
        return ["it is DoRA (lora.kind=dora), which vLLM does not load: merge it instead"]
    rank = source.facts.lora.settings.dim
    if rank > _VLLM_LARGEST_RANK:
        return [f"its rank is {rank}, and vLLM's max_lora_rank is {_VLLM_LARGEST_RANK} at most: merge it instead"]
    return []


# What PEFT writes into adapter_config.json for a plain LoRA, whose values are always these. Importing PEFT to ask it
# takes twice as long as all else that an export imports; a test compares with what this version of it writes.
_PEFT_DEFAULTS: Mapping[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "inference_mode": True,
    "bias": "none",
    "init_lora_weights": True,
    "fan_in_fan_out": False,
    "use_rslora": False,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "loftq_config": {},
    "megatron_core": "megatron.core",
    "use_qalora": False,
    "qalora_group_size": 16,
    "ensure_weight_tying": False,
    **dict.fromkeys(
        (
            "alora_invocation_tokens",
            "arrow_config",
            "auto_mapping",
            "corda_config",
            "eva_config",
            "exclude_modules",
            "kasa_config",
            "layer_replication",
            "layers_pattern",
            "layers_to_transform",
            "lora_ga_config",
            "megatron_config",
            "modules_to_save",
            "monteclora_config",
            "target_parameters",
            "trainable_token_indices",
            "use_bdlora",
            "velora_config",
        )
    ),
}


def _peft_config(source: AdapterSource, modules: Sequence[Module]) -> dict[str, Any]:
    """Return adapter_config.json as this version of PEFT would write it, with its sets in order."""
    settings = source.facts.lora.settings
    return {
        **_PEFT_DEFAULTS,
        "peft_version": importlib.metadata.version("peft"),
        "r": settings.dim,
        "lora_alpha": settings.alpha,
        # PEFT has no dropout on stacked experts and would refuse to load; it is of no use without training either.
        "lora_dropout": 0.0 if any(module.is_expert for module in modules) else settings.dropout,
        "use_dora": settings.has_magnitudes,
        "target_modules": list(target_modules(modules, source.shape)),
        "base_model_name_or_path": source.base.name,
        "revision": source.base.revision,
    }


def provenance(source: AdapterSource) -> dict[str, Any]:
    """Return where something comes from, and with what it was made."""
    made_with = {"ckptrain": ckptrain.__version__, **{name: importlib.metadata.version(name) for name in _PACKAGES}}
    return {**source.provenance(), "exported_with": made_with}
