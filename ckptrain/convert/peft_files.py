"""The two files of a Hugging Face PEFT adapter, read without torch: what adapter_config.json asks for, what is stored.

Not everything that PEFT can do with LoRA has a place in ckptrain. What has none is refused by its name, because an
adapter that is read without it computes something else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ckptrain.checkpoint.strict_json import shown
from ckptrain.config.base import read_json
from ckptrain.errors import CheckpointDamaged, ConfigError

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"

_LARGEST_HEADER = 100_000_000  # what safetensors reads
_DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}
# Keys under which an adapter is more than B A beside a layer and magnitudes, and what each is.
_MORE_THAN_LORA = {
    "modules_to_save": "whole layers that were trained beside the adapter",
    "trainable_token_indices": "rows of the embedding that were trained",
    "layer_replication": "layers that are used several times",
    "rank_pattern": "a rank of its own for some layers; ckptrain trains one rank",
    "alpha_pattern": "a scale of its own for some layers; ckptrain trains one scale",
    "fan_in_fan_out": "transposed base weights",
    "lora_bias": "a bias beside B",
    "use_qalora": "QA-LoRA: pooled inputs",
    "use_bdlora": "block-diagonal matrices",
    "alora_invocation_tokens": "activated LoRA: an adapter that is off before its invocation tokens",
    "arrow_config": "a router over several adapters",
    "kasa_config": "KaSA: singular values beside A and B",
    "velora_config": "VeLoRA: compressed activations",
    "monteclora_config": "MonteCLoRA: random matrices beside A and B",
}
# How A and B begin; others change the base's weights too, so that the adapter fits no other base.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", None)


@attrs.frozen(kw_only=True)
class PeftSettings:
    """What adapter_config.json says, as far as it makes the adapter."""

    rank: int
    alpha: int
    """Such that alpha / rank is what B A is multiplied by, which under rsLoRA is not what `lora_alpha` says."""
    has_magnitudes: bool
    """Whether it is DoRA (`use_dora`)."""
    dropout: float
    base: str | None
    revision: str | None
    peft_version: str | None
    notes: tuple[str, ...]


@attrs.frozen(kw_only=True)
class StoredMatrix:
    """One tensor of a safetensors file: a matrix, or a vector of magnitudes."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    """As torch names it."""
    start: int
    """Of its bytes in the file."""
    num_bytes: int


def read_settings(directory: Path) -> PeftSettings:
    """Read adapter_config.json.

    Raises:
        ConfigError: it cannot be read.
        ConfigError: it is not of a LoRA adapter that ckptrain can hold; every reason is listed.
    """
    path = directory / PEFT_CONFIG
    config = read_json(path)
    problems = []
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type is {shown(config.get('peft_type'))}, expected 'LORA'")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        problems.append(f"r is {_found(rank)}, expected a whole number from 1: the rank")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        problems.append(f"lora_alpha is {_found(alpha)}, expected a number above 0: without it the scale is not known")
    if config.get("bias", "none") != "none":
        problems.append(f"bias is {shown(config['bias'])}, expected 'none': ckptrain trains no biases")
    problems += [
        f"{key} is {shown(config[key])}: {meaning}" for key, meaning in _MORE_THAN_LORA.items() if config.get(key)
    ]
    if (start := config.get("init_lora_weights", True)) not in _PLAIN_STARTS:
        problems.append(f"init_lora_weights is {shown(start)}: it changes the base's weights beside the adapter's")
    if problems:
        raise ConfigError(f"cannot use {path}", problems)
    assert isinstance(rank, int)
    assert isinstance(alpha, int | float)
    notes, scaled = [], float(alpha)
    if config.get("use_rslora"):
        scaled = alpha * math.sqrt(rank)
        notes.append(f"use_rslora is true: lora.alpha={scaled:g} gives the same scale, {alpha:g} / sqrt({rank})")
    if scaled != int(scaled):
        raise ConfigError(
            f"cannot use {path}", [f"its scale is {scaled / rank:g}, which is no whole alpha over the rank {rank}"]
        )
    base, revision, version = (config.get(key) for key in ("base_model_name_or_path", "revision", "peft_version"))
    return PeftSettings(
        rank=rank,
        alpha=int(scaled),
        has_magnitudes=bool(config.get("use_dora")),
        dropout=float(config.get("lora_dropout") or 0.0),
        base=str(base) if base else None,
        revision=str(revision) if revision else None,
        peft_version=str(version) if version else None,
        notes=tuple(notes),
    )


def read_matrices(directory: Path) -> dict[str, StoredMatrix]:
    """Read what tensors adapter_model.safetensors holds, by key; of the numbers none.

    Raises:
        ConfigError: there is no such file, or it holds something else than matrices of floating point numbers.
        CheckpointDamaged: it is cut short, or not a safetensors file.
    """
    path = directory / PEFT_WEIGHTS
    if not path.is_file():
        others = sorted(file.name for file in directory.glob("adapter_model*"))
        beside = f"; it holds {', '.join(others)}: load it with PEFT and save it with save_pretrained" if others else ""
        raise ConfigError(f"cannot use {directory}", [f"it has no {PEFT_WEIGHTS}{beside}"])
    try:
        header, start = _header(path)
        found = {key: _matrix(key, entry, start) for key, entry in header.items() if key != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{path} is damaged", [f"it is not a safetensors file: {error}"]) from error
    num_bytes, end = path.stat().st_size, max((matrix.start + matrix.num_bytes for matrix in found.values()), default=0)
    if num_bytes != end:
        raise CheckpointDamaged(f"{path} is damaged", [f"it has {num_bytes} bytes, and its header says {end}"])
    return found


def _header(path: Path) -> tuple[Mapping[str, Any], int]:
    """Return a safetensors file's header, and where its numbers begin; the format is safetensors' README.md."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= _LARGEST_HEADER:
            raise ValueError(f"its header is said to have {length} bytes")
        text = file.read(length)
    if len(text) < length:
        raise ValueError("it ends within its header")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise TypeError("its header is not an object")
    return header, 8 + length


def _matrix(key: str, entry: Mapping[str, Any], numbers: int) -> StoredMatrix:
    code, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    start, end = (int(offset) for offset in entry["data_offsets"])
    dtype, width = _DTYPES.get(code, (code, 0))
    if width and end - start != math.prod(shape) * width:
        raise ValueError(f"{key} has {end - start} bytes, expected {math.prod(shape) * width}")
    return StoredMatrix(key=key, shape=shape, dtype=dtype, start=numbers + start, num_bytes=end - start)


def _found(value: object) -> str:
    return "missing" if value is None else shown(value)
