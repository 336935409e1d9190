"""Where are the base's files? A Hub model is downloaded, a GGUF file becomes a Hugging Face directory, once."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs

from ckptrain.config.base import Base
from ckptrain.config.cache import cache_directory
from ckptrain.config.identity import base_identity
from ckptrain.errors import ConfigError

# Raised whenever what a conversion writes changes, so that an old result in the cache is not taken for a new one.
CONVERSION = "gguf-v1"


def fetch(base: Base) -> Base:
    """Return the base with its files on this machine: a Hub model that is not there yet is downloaded.

    Raises:
        ConfigError: it cannot be downloaded.
    """
    if base.path is not None:
        return base
    path = _download(base)
    return attrs.evolve(base, path=path, revision=path.name)


def local_directory(base: Base) -> Path:
    """Return a Hugging Face directory (config, safetensors, tokenizer) of a base that has been fetched.

    Every process calls it; on each machine one does the work and the others wait for it.

    Raises:
        ConfigError: the GGUF file cannot be read.
    """
    if base.path is None:
        raise ValueError(f"{base.name} has not been fetched")
    return _convert_gguf(base, base.path) if base.kind == "gguf" else base.path


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a Hugging Face directory; a tokenizer that needs code from the directory is refused."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot load a tokenizer from {directory}", [f"{type(error).__name__}: {error}"]) from error


def _download(base: Base) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                base.name,
                revision=base.revision,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"],
            )
        )
    except Exception as error:  # offline, unknown name, no access: huggingface_hub has many classes for it
        raise ConfigError(
            f"cannot download {base.name} (model.pretrained)",
            [
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}",
                "give a local directory, or download it where there is a network and set HF_HOME to that cache",
            ],
        ) from error


def _convert_gguf(base: Base, path: Path) -> Path:
    """De-quantise a GGUF file to a float32 Hugging Face directory in the cache, keyed by the file's content."""
    target = cache_directory() / CONVERSION / base_identity(base).fingerprint[:32]
    if target.is_dir():
        return target
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if target.is_dir():
            return target
        staging = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
        try:
            _write_directory(path, staging)
            staging.rename(target)
        except Exception as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise ConfigError(
                f"cannot convert {path} (model.pretrained)",
                [
                    f"{type(error).__name__}: {error}",
                    f"the converted model is kept in {target.parent}; set CKPTRAIN_CACHE to keep it elsewhere",
                ],
            ) from error
    return target


def _write_directory(path: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        # transformers takes the end of a text from its class, not from the file: for SmolLM2 that is the wrong token.
        if (end := model.config.eos_token_id) is not None:
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
        with contextlib.redirect_stdout(None):
            tokenizer.save_pretrained(directory)
            model.save_pretrained(directory)
    finally:
        logging.enable_progress_bar()
