"""What a LoRA checkpoint of Megatron-Bridge or NeMo-RL says about itself, read without torch and running none of it.

`run_config.yaml` is Megatron-Bridge's whole configuration, as plain YAML in which `_target_` names the class of each
section. Here a `_target_` is text that is compared, and nothing that it names is imported. `common.pt`,
`train_state.pt` and the objects that lie beside the tensors are pickles, and are never opened.
"""

from __future__ import annotations

import io
import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import yaml

from ckptrain.checkpoint.dcp_metadata import METADATA_NAME, DcpTensor
from ckptrain.checkpoint.manifest import printable
from ckptrain.checkpoint.strict_json import shown
from ckptrain.config.base import read_json
from ckptrain.config.shape import ModelShape
from ckptrain.errors import CheckpointDamaged, ConfigError

RUN_CONFIG, BACKEND_FILE, TRACKER = "run_config.yaml", "metadata.json", "latest_checkpointed_iteration.txt"
LORA_TARGET = "megatron.bridge.peft.lora.LoRA"
CANONICAL_TARGET = "megatron.bridge.peft.canonical_lora.CanonicalLoRA"

_BESIDE_METADATA = (RUN_CONFIG, BACKEND_FILE, "train_state.pt", "common.pt")
_NEMO_RL = Path("policy", "weights")
_ITERATION = re.compile(r"iter_(\d{7,})", re.ASCII)
_NEMO_RL_STEP = re.compile(r"step_(\d+)", re.ASCII)
_LONGEST_TRACKER = 64
_LARGEST_CONFIG = 16 * 1024 * 1024
_KINDS: Mapping[str, Literal["lora", "canonical"]] = {
    LORA_TARGET: "lora",
    "megatron.bridge.peft.lora.VLMLoRA": "lora",
    CANONICAL_TARGET: "canonical",
}
_DORA = "megatron.bridge.peft.dora.DoRA"
# What Megatron-Bridge calls dimensions of the base, as far as both sides have them under one meaning.
_DIMENSIONS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "num_query_groups": "num_kv_heads",
    "kv_channels": "head_dim",
}
_DENSE_DIMENSIONS = {"ffn_hidden_size": "ffn_hidden_size"}
_EXPERT_DIMENSIONS = {"num_moe_experts": "num_experts", "moe_ffn_hidden_size": "moe_ffn_hidden_size"}


@attrs.frozen(kw_only=True)
class MegatronSettings:
    """What run_config.yaml says, as far as it makes the adapter."""

    kind: Literal["lora", "canonical"]
    rank: int
    alpha: int
    dropout: float
    dropout_position: Literal["pre", "post"]
    base: str | None
    revision: str | None
    model: Mapping[str, Any]
    """The section `model`, in which dimensions and layout are."""
    tensor: int
    """Tensor parallel size of the run that saved it; so are the two that follow."""
    expert: int
    expert_tensor: int
    reduces_expert_rank: bool
    """Whether experts have a smaller rank (`normalize_moe_lora`)."""
    shares_outer: bool
    """Whether all experts of a layer share A of linear_fc1 and B of linear_fc2 (`experts_shared_outer_loras`)."""
    notes: tuple[str, ...]


def find_iteration(path: Path) -> Path | None:
    """Return the directory of the iteration that a path means, which need not be there; None where it means none.

    That is the directory itself, the one above it, which names its latest, or what NeMo-RL keeps that in.
    """
    for place in (path, path / _NEMO_RL):
        if _is_iteration(place):
            return place
        if (latest := _latest(place)) is not None:
            return latest
    return None


def _is_iteration(place: Path) -> bool:
    described = (place / METADATA_NAME).is_file() or _ITERATION.fullmatch(place.name) is not None
    return described and any((place / name).is_file() for name in _BESIDE_METADATA)


def _latest(place: Path) -> Path | None:
    tracker = place / TRACKER
    if tracker.is_file():
        with tracker.open("rb") as file:
            said = file.read(_LONGEST_TRACKER).decode("utf-8", errors="replace").strip()
        return place / (f"iter_{int(said):07d}" if re.fullmatch(r"\d{1,18}", said, re.ASCII) else "release")
    there = [entry for entry in place.glob("iter_*") if _ITERATION.fullmatch(entry.name) and _is_iteration(entry)]
    return max(there, key=lambda entry: int(entry.name.removeprefix("iter_")), default=None)


def iteration_number(directory: Path) -> int:
    """Return which iteration a directory is of; NeMo-RL calls every one 0 and has the step in the name further up."""
    found = _ITERATION.fullmatch(directory.name)
    number = int(found[1]) if found else 0
    step = _NEMO_RL_STEP.fullmatch(directory.parents[2].name) if len(directory.parents) > 2 else None
    if number == 0 and step is not None and directory.parent.match(str(_NEMO_RL)):
        return int(step[1])
    return number


def check_format(directory: Path) -> None:
    """Refuse what is not megatron-core's format torch_dist, or was not saved to the end.

    Raises:
        CheckpointDamaged: what is written last is missing.
        ConfigError: it is of another format.
    """
    if not (directory / METADATA_NAME).is_file():
        raise CheckpointDamaged(f"{directory} is damaged", [f"it has no {METADATA_NAME}: the save was cut short"])
    if not (directory / BACKEND_FILE).is_file():
        raise CheckpointDamaged(
            f"{directory} is damaged",
            [
                f"it has no {BACKEND_FILE}, which megatron-core writes last: the save was cut short, or it is of the"
                " format fsdp_dtensor, which ckptrain does not read"
            ],
        )
    backend = read_json(directory / BACKEND_FILE).get("sharded_backend")
    if backend != "torch_dist":
        raise ConfigError(
            f"cannot use {directory}", [f"its format is {shown(backend)}; ckptrain reads megatron-core's torch_dist"]
        )


def read_settings(directory: Path) -> MegatronSettings:
    """Read run_config.yaml.

    Raises:
        ConfigError: it is not there, or is no YAML of plain values.
        ConfigError: it is not of a LoRA adapter that ckptrain can hold; every reason is listed.
    """
    path = directory / RUN_CONFIG
    config = _read_yaml(path)
    peft = config.get("peft")
    if not isinstance(peft, dict):
        reason = "peft is empty: it was saved by a training of the whole model, which leaves no adapter"
        raise ConfigError(f"cannot use {directory}", [reason])
    target, rank, alpha = (peft.get(key) for key in ("_target_", "dim", "alpha"))
    problems = [] if target in _KINDS else [_unknown_kind(target)]
    if type(rank) is not int or rank < 1:
        problems.append(f"peft.dim is {_found(rank)}, expected a whole number from 1: the rank")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 1 <= alpha < math.inf or alpha % 1:
        problems.append(f"peft.alpha is {_found(alpha)}, expected a whole number from 1: without it the scale is lost")
    dropout = peft.get("dropout") or 0.0
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        problems.append(f"peft.dropout is {_found(dropout)}, expected a number from 0 and below 1")
    model = config.get("model")
    sizes = _parallel_sizes(model, problems) if isinstance(model, dict) else None
    if not isinstance(model, dict):
        problems.append("model is missing, which says in which layout the adapter was saved")
    if problems:
        raise ConfigError(f"cannot use {path}", problems)
    assert isinstance(model, dict)
    assert sizes is not None
    assert isinstance(rank, int)
    assert isinstance(alpha, int | float)
    base, revision, notes = _base(config, model)
    return MegatronSettings(
        kind=_KINDS[str(target)],
        rank=rank,
        alpha=int(alpha),
        dropout=float(dropout),
        dropout_position="post" if peft.get("dropout_position") == "post" else "pre",
        base=base,
        revision=revision,
        model=model,
        tensor=sizes[0],
        expert=sizes[1],
        expert_tensor=sizes[2],
        reduces_expert_rank=bool(peft.get("normalize_moe_lora")),
        shares_outer=bool(peft.get("experts_shared_outer_loras")),
        notes=notes,
    )


def base_problems(settings: MegatronSettings, shape: ModelShape) -> list[str]:
    """Return which dimensions of the model that was trained are not those of the base."""
    dimensions = {**_DIMENSIONS, **(_EXPERT_DIMENSIONS if shape.num_experts else _DENSE_DIMENSIONS)}
    problems = []
    for key, name in dimensions.items():
        trained, here = _model_value(settings.model, key), getattr(shape, name)
        if type(trained) is int and trained != here:
            problems.append(f"model.{key} is {trained} in {RUN_CONFIG}, and {here} in the base: it is of another base")
    return problems


def checksum_problems(directory: Path, tensors: Mapping[str, DcpTensor]) -> Iterator[str]:
    """Yield which pieces of tensors are not what their archives' CRC-32 says, one piece in memory at a time."""
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            with (directory / chunk.file).open("rb") as file:
                file.seek(chunk.start)
                record = file.read(chunk.num_bytes)
            try:
                with zipfile.ZipFile(io.BytesIO(record)) as archive:
                    bad = archive.testzip()
            except (zipfile.BadZipFile, OSError, ValueError, EOFError, RuntimeError) as error:
                bad = str(error)
            if bad is not None:
                yield printable(f"{name}, stored in {chunk.file} at byte {chunk.start}, has other contents: {bad}")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_CONFIG:
            raise ConfigError(f"cannot read {path}", [f"it has more than {_LARGEST_CONFIG} bytes"])
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        missing = f"it is not there; it says the rank, the scale and the base of the adapter in {path.parent}"
        raise ConfigError(f"cannot read {path}", [missing]) from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}", [str(error.strerror)]) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"cannot read {path}", [f"it is not YAML of plain values: {reason}"]) from None
    if not isinstance(config, dict):
        raise ConfigError(f"cannot read {path}", [f"expected a mapping, found a {type(config).__name__}"])
    return config


def _unknown_kind(target: object) -> str:
    if target == _DORA:
        return "peft is DoRA, of which PEFT computes something else than Megatron-Bridge; ckptrain reads Bridge's LoRA"
    known = " or ".join(_KINDS)
    return f"peft._target_ is {_found(target)}, expected {known}"


def _parallel_sizes(model: Mapping[str, Any], problems: list[str]) -> tuple[int, int, int]:
    """Return the tensor, expert and expert tensor parallel sizes."""
    sizes: list[int] = []
    for key in ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"):
        size = _model_value(model, key)
        if size is None:  # what megatron-core makes of None: experts are cut as the rest is
            size = sizes[0] if key == "expert_tensor_parallel_size" else 1 if sizes else None
        if type(size) is not int or size < 1:
            problems.append(f"model.{key} is {_found(size)}, expected a whole number from 1")
            size = 1
        sizes.append(size)
    tensor, expert, expert_tensor = sizes
    return tensor, expert, expert_tensor


def _model_value(model: Mapping[str, Any], key: str) -> Any:
    """Return a value of the section `model`, which in some versions has most of its own in a section `transformer`."""
    inner = model.get("transformer")
    return model.get(key, inner.get(key) if isinstance(inner, dict) else None)


def _base(config: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[str | None, str | None, tuple[str, ...]]:
    """Return name and revision of the base as far as they are said, and what is to be known of that.

    The places are those that Megatron-Bridge looks at itself, in its order (training/checkpointing.py,
    _resolve_hf_source).
    """
    checkpoint, tokenizer = config.get("checkpoint"), config.get("tokenizer")
    source = checkpoint.get("hf_source_path") if isinstance(checkpoint, dict) else None
    if isinstance(source, str) and source:
        return source, None, ()
    if isinstance(name := model.get("hf_model_id"), str) and name:
        revision = model.get("hf_model_revision")
        return name, revision if isinstance(revision, str) else None, ()
    if isinstance(tokenizer, dict) and tokenizer.get("tokenizer_type") == "HuggingFaceTokenizer":
        name = tokenizer.get("tokenizer_model")
        if isinstance(name, str) and name:
            return name, None, (f"its base is not named: {name}, of which it has the tokenizer, is taken for it",)
    return None, None, ()


def _found(value: object) -> str:
    if value is None:
        return "missing"
    return shown(value) if isinstance(value, str | int | float | bool) else f"a {type(value).__name__}"
