"""Is it the same base model as then? A fingerprint of content, the same wherever the files lie.

Weights are sampled, not read in full, so that a plan for a model of hundreds of gigabytes is told at once: of each file
its size, its first and last MiB, and 16 KiB at 256 places. The places follow the golden ratio rather than even steps:
layers repeat evenly in a file, and even steps could meet the same matrix in all of them.

Another model, dtype, quantisation or full fine-tune always differs. A change that keeps every file's size and touches a
share p of the bytes escapes with a chance of about (1 - p)^256: one in a billion for adapters merged into a twelfth of
the weights, a half for a single matrix among four hundred.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ckptrain.config.base import Base, read_json, weight_files
from ckptrain.config.gguf_header import read_gguf_header
from ckptrain.errors import ConfigError

_END_BYTES = 1 << 20
_PLACE_BYTES = 16 << 10
_NUM_PLACES = 256
_GOLDEN = 0.6180339887498949

# What changes with the library that wrote the file or the place it was loaded from, not with the model.
_VOLATILE_CONFIG = ("_name_or_path", "transformers_version")
_VOLATILE_TOKENIZER = ("_name_or_path", "name_or_path", "transformers_version", "is_local", "_commit_hash")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "chat_template.json",
    "chat_template.jinja",
)


@attrs.frozen(kw_only=True)
class BaseIdentity:
    """What a manifest keeps of the base: `fingerprint` decides, the rest is for people; `revision` is a Hub commit."""

    fingerprint: str
    name: str
    revision: str | None
    num_bytes: int


def base_identity(base: Base) -> BaseIdentity:
    """Fingerprint a base model: its config.json without volatile keys, and samples of its weights.

    Raises:
        ConfigError: it is not downloaded or cannot be read.
    """
    path = _path(base)
    digest = hashlib.sha256()
    if base.kind == "gguf":
        files = [path]
    else:
        files = weight_files(path)
        digest.update(_canonical(read_json(path / "config.json"), _VOLATILE_CONFIG))
    try:
        num_bytes = sum(_sample(file, digest) for file in files)
    except OSError as error:
        raise ConfigError(f"cannot read the base model {base.name}", [f"{error.filename}: {error.strerror}"]) from error
    return BaseIdentity(
        fingerprint=digest.hexdigest(),
        name=base.name,
        revision=base.revision if base.kind == "hub" else None,
        num_bytes=num_bytes,
    )


def tokenizer_fingerprint(base: Base, chat_template: str | None = None) -> str:
    """Hash what decides how text becomes tokens: the tokenizer with its chat template, or with that of a file.

    Raises:
        ConfigError: the base is not downloaded, or has no tokenizer files, or the template cannot be read.
    """
    own = _own_tokenizer(base)
    if chat_template is None:
        return own
    try:
        return hashlib.sha256(own.encode() + Path(chat_template).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError("cannot read data.chat_template", [f"{chat_template}: {error.strerror}"]) from error


def _own_tokenizer(base: Base) -> str:
    path = _path(base)
    if base.kind == "gguf":
        return read_gguf_header(path).tokenizer_sha256
    digest = hashlib.sha256()
    found = [path / name for name in _TOKENIZER_FILES if (path / name).is_file()]
    if not any(file.name.startswith(("tokenizer.", "vocab.")) for file in found):
        raise ConfigError(
            f"cannot use the base model {base.name}", [f"{path} holds no tokenizer.json or tokenizer.model"]
        )
    for file in found:
        json_object = file.name in ("tokenizer_config.json", "special_tokens_map.json")
        content = _canonical(read_json(file), _VOLATILE_TOKENIZER) if json_object else file.read_bytes()
        digest.update(f"{file.name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def sampled_places(num_bytes: int) -> list[tuple[int, int]]:
    """Return the (offset, length) of what is hashed of a file of `num_bytes`, in order of offset."""
    if num_bytes <= 2 * _END_BYTES + _NUM_PLACES * _PLACE_BYTES:
        return [(0, num_bytes)]
    inner = num_bytes - 2 * _END_BYTES - _PLACE_BYTES
    offsets = (_END_BYTES + int(((k + 1) * _GOLDEN % 1.0) * inner) for k in range(_NUM_PLACES))
    places = [(offset, _PLACE_BYTES) for offset in offsets]
    return sorted([(0, _END_BYTES), (num_bytes - _END_BYTES, _END_BYTES), *places])


def _sample(file: Path, digest: Any) -> int:
    """Add one weight file's size and samples to `digest`; returns its size in bytes."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        num_bytes = os.fstat(descriptor).st_size
        digest.update(f"weights:{num_bytes}:".encode())
        for offset, length in sampled_places(num_bytes):
            digest.update(os.pread(descriptor, length, offset))
    finally:
        os.close(descriptor)
    return num_bytes


def _canonical(values: Mapping[str, Any], volatile: tuple[str, ...]) -> bytes:
    kept = {key: value for key, value in values.items() if key not in volatile}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()


def _path(base: Base) -> Path:
    if base.path is None:
        raise ConfigError(f"cannot fingerprint {base.name}", [f"it is not downloaded: hf download {base.name}"])
    return base.path
