"""The manifest: what a checkpoint says it is, written last, so that its presence says that the rest is there.

manifest.json is JSON with one line for each tensor, file and config key, so that two manifests can be compared by diff
and one read by eye. It ends with a digest of everything before: a flipped digit in it is damage like any other.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import PurePosixPath
from typing import Any, Literal, cast

import attrs

from ckptrain.checkpoint.strict_json import decode, encode, read, shown
from ckptrain.config.identity import BaseIdentity
from ckptrain.config.layout import Layout
from ckptrain.config.shape import ModelShape
from ckptrain.errors import CheckpointDamaged
from ckptrain.lifecycle.facts import DataIdentity, LoraSpec, ProgramParts

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 3
"""1 knew one kind of adapter; 2 has `lora.settings.kind`; 3 has `program` and `callbacks`."""

ITEM_SIZES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one number of every type that a tensor of a checkpoint can have."""
MOST_DIMENSIONS = 5

_MOST_PROBLEMS = 20
_LONGEST_PROBLEM = 500
_DEEPEST = 12
"""Levels of nesting; ours has six."""
_LONGEST_NAME, _LONGEST_PATH = 255, 1000
"""Of one name and of a whole path: what file systems have room for."""
_BY_LINE = ("config", "files", "tensors")
"""Members of the manifest that get a line for each of their own members."""


class WrittenByNewer(CheckpointDamaged):
    """The manifest is of a later format: not damage, but nothing that this version may judge or move away."""


@attrs.frozen(kw_only=True)
class TensorEntry:
    """One tensor of the checkpoint, whole: the shape is that of all shards together."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it without its prefix: bfloat16, float32, uint8."""
    group: Literal["adapter", "optimizer", "rng"]


@attrs.frozen(kw_only=True)
class FileDigest:
    """The size and SHA-256 of one file."""

    num_bytes: int
    sha256: str


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Leave out what is not a finite number: nothing can be ranked by it, and JSON cannot hold it."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


@attrs.frozen(kw_only=True)
class Manifest:
    """Everything about a checkpoint but the numbers themselves.

    An imported adapter has no tokenizer, data, optimizer or random states; its step and counts are 0.
    """

    run_id: str
    step: int
    """Optimizer steps done."""
    consumed_samples: int
    """Rows of global batches seen: the data position."""
    consumed_tokens: int
    created: str
    """UTC, ISO 8601."""
    base: BaseIdentity
    shape: ModelShape
    """The base's dimensions: with them the adapter is converted without the base."""
    tokenizer_fingerprint: str | None
    data: DataIdentity | None
    lora: LoraSpec
    layout: Layout
    """The parallel layout it was saved under; it can be loaded under any."""
    metrics: Mapping[str, float] = attrs.field(converter=_finite)
    optimizer: Mapping[str, Any]
    """What the optimizer's state holds besides tensors, such as its step count and parameter groups."""
    versions: Mapping[str, str]
    config: Mapping[str, Any]
    """The run's configuration, flattened."""
    files: Mapping[str, FileDigest]
    """By path relative to the checkpoint, with forward slashes; all files but the manifest itself."""
    tensors: Mapping[str, TensorEntry]
    """By global name."""
    program: ProgramParts = attrs.field(factory=ProgramParts)
    callbacks: Mapping[str, Any] = attrs.field(factory=dict)
    """What callbacks of the program want to know again after a resume, by their names."""

    @property
    def config_digest(self) -> str:
        """SHA-256 of the configuration in canonical JSON, as `ckptrain.config.load.config_digest` has it."""
        return _digest(self.config)

    def to_json(self) -> bytes:
        """Return the bytes of manifest.json; equal manifests give equal bytes.

        Raises:
            ValueError: a number in `config` or `optimizer` is not finite, or a value is not one of JSON's.
        """
        document: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **attrs.asdict(self)}
        document["layout"]["world_size"] = self.layout.world_size
        document["config_digest"] = self.config_digest
        document["digest"] = _digest(document)
        lines = [
            f"{encode(key)}:{_by_line(value) if key in _BY_LINE else encode(value)}" for key, value in document.items()
        ]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Return the manifest in `data`, read strictly; `where` names it in messages.

    Raises:
        WrittenByNewer: its schema version is above `SCHEMA_VERSION`.
        CheckpointDamaged: anything in it is not as this version writes it; the problems are listed.
    """
    try:
        document = decode(data)
    except ValueError as error:
        raise _damaged(where, [f"it is not a manifest: {error}"]) from None
    if not isinstance(document, dict):
        raise _damaged(where, [f"it is {shown(document)}, expected an object"])
    _check_version(document, where)
    if (problem := value_problem(document)) is not None:
        raise _damaged(where, [problem])
    problems: list[str] = []
    claimed_digest, actual_digest = document.pop("digest", None), _digest(document)
    version = document.pop("schema_version")
    if version == 1:
        _add_kind(document)
    if version != SCHEMA_VERSION:  # nothing of a program's own was there then
        document.setdefault("program", attrs.asdict(ProgramParts()))
        document.setdefault("callbacks", {})
    derived = _take_derived(document)
    manifest = read(Manifest, document, "", problems)
    if not problems:
        problems += _contradictions(manifest, derived)
    if not problems and claimed_digest != actual_digest:
        problems.append(
            f"its digest is {actual_digest[:12]}, {shown(claimed_digest)} is written in it: it was changed after it was"
            " written"
        )
    if problems:
        raise _damaged(where, problems)
    return cast(Manifest, manifest)


def path_problem(path: str) -> str | None:
    """Return why `path` cannot name a file inside a checkpoint, or None where it can.

    Nothing a manifest says may lead out of its own directory.
    """
    if not path or "\0" in path or "\\" in path:
        return "is not a file name"
    if path.startswith("/"):
        return "is an absolute path"
    parts = path.split("/")
    if ".." in parts:
        return "leads out of the checkpoint"
    if PurePosixPath(path).as_posix() != path or path == ".":
        return "is not in its shortest form"
    if path == MANIFEST_NAME:
        return "is the manifest itself"
    if not path.isprintable():
        return "has characters that cannot be shown"
    if len(path) > _LONGEST_PATH or max(map(len, parts)) > _LONGEST_NAME:
        return "is longer than a path can be"
    return None


def printable(problem: str) -> str:
    """Keep what a stranger has put into names from steering the terminal that they are shown on, or filling it."""
    shortened = problem if len(problem) <= _LONGEST_PROBLEM else f"{problem[:_LONGEST_PROBLEM]}..."
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in shortened)


def _by_line(members: Mapping[str, Any]) -> str:
    lines = [f"{encode(key)}:{encode(members[key])}" for key in sorted(members)]
    return "{\n" + ",\n".join(lines) + "\n}" if lines else "{}"


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(encode(document).encode("ascii")).hexdigest()


def _check_version(document: Mapping[str, Any], where: str) -> None:
    version = document.get("schema_version")
    if type(version) is not int or version < 1:
        raise _damaged(where, [f"schema_version is {shown(version)}, expected a whole number from 1"])
    if version > SCHEMA_VERSION:
        problem = (
            f"it was written by a newer ckptrain (schema_version {version}, this one reads up to {SCHEMA_VERSION});"
            " upgrade ckptrain"
        )
        raise WrittenByNewer(f"cannot read {where}", [problem])


def _add_kind(document: Mapping[str, Any]) -> None:
    """Say in a manifest of version 1 what all adapters were then: of fused layers, whole."""
    lora = document.get("lora")
    settings = lora.get("settings") if isinstance(lora, dict) else None
    if isinstance(settings, dict):
        settings.setdefault("kind", "lora")


def _take_derived(document: dict[str, Any]) -> dict[str, Any]:
    """Take out what is written for people and other tools only: it follows from what stands beside it."""
    layout = document.get("layout")
    return {
        "layout.world_size": layout.pop("world_size", None) if isinstance(layout, dict) else None,
        "config_digest": document.pop("config_digest", None),
    }


def _contradictions(manifest: Manifest, derived: Mapping[str, Any]) -> list[str]:
    """Return what each key allows by itself and the whole does not."""
    problems = [
        f"files: {shown(path)} {problem}" for path in manifest.files if (problem := path_problem(path)) is not None
    ]
    problems += [
        f"files[{path}].sha256 is {shown(digest.sha256)}, expected 64 hexadecimal digits"
        for path, digest in manifest.files.items()
        if not re.fullmatch(r"[0-9a-f]{64}", digest.sha256)
    ]
    expected = {"layout.world_size": manifest.layout.world_size, "config_digest": manifest.config_digest}
    problems += [
        f"{key} is {shown(derived[key])}, and {shown(value)} follows from the rest"
        for key, value in expected.items()
        if derived[key] != value or type(derived[key]) is not type(value)
    ]
    for key in ("dim", "alpha"):
        if getattr(manifest.lora.settings, key) < 1:
            problems.append(f"lora.settings.{key} is 0, which makes an adapter without effect")
    if not _is_utc(manifest.created):
        problems.append(f"created is {shown(manifest.created)}, expected a UTC time in ISO 8601")
    return problems + _tensor_contradictions(manifest)


def _tensor_contradictions(manifest: Manifest) -> list[str]:
    """Return what cannot be so of the tensors: whoever makes room for one believes its shape and type."""
    problems: list[str] = []
    claimed = 0
    for name, tensor in manifest.tensors.items():
        if not name.isprintable() or len(name) > _LONGEST_PATH:
            problems.append(f"tensors: {shown(name)} is not the name of a tensor")
        if tensor.dtype not in ITEM_SIZES:
            problems.append(
                f"tensors[{name}].dtype is {shown(tensor.dtype)}, expected one of {', '.join(sorted(ITEM_SIZES))}"
            )
        if len(tensor.shape) > MOST_DIMENSIONS:
            problems.append(f"tensors[{name}] has {len(tensor.shape)} dimensions, expected up to {MOST_DIMENSIONS}")
        claimed += math.prod(tensor.shape[:MOST_DIMENSIONS]) * ITEM_SIZES.get(tensor.dtype, 1)
    held = sum(file.num_bytes for file in manifest.files.values())
    if claimed > held:
        problems.append(f"its tensors have {claimed} bytes, and its files have no more than {held}")
    step = manifest.optimizer.get("step")
    if any(tensor.group == "optimizer" for tensor in manifest.tensors.values()) and type(step) is not int:
        problems.append(f"optimizer.step is {shown(step)}, expected a whole number beside an optimizer's tensors")
    return problems


def value_problem(value: object, levels: int = _DEEPEST) -> str | None:
    """Say what a JSON value has that no manifest has and not every reader of JSON can take."""
    if isinstance(value, int | float):
        return None if abs(value) <= 2**63 else f"it has the number {shown(value)}, which is too large"
    if not isinstance(value, dict | list):
        return None
    if levels == 0:
        return f"it is nested more than {_DEEPEST} levels deep"
    items = value.values() if isinstance(value, dict) else value
    return next((problem for item in items if (problem := value_problem(item, levels - 1)) is not None), None)


def _is_utc(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).utcoffset() == timedelta(0)
    except ValueError:
        return False


def _damaged(where: str, problems: list[str]) -> CheckpointDamaged:
    left_out = len(problems) - _MOST_PROBLEMS
    listed = [printable(problem) for problem in problems[:_MOST_PROBLEMS]]
    if left_out > 0:
        listed.append(f"and {left_out} more problems")
    return CheckpointDamaged(f"{where} is damaged", listed)
