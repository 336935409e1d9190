"""Fixtures of all rooms."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from tiny import write_chats, write_llama

from ckptrain.config.cache import cache_directory
from ckptrain.config.load import load_config
from ckptrain.config.schema import RunConfig
from ckptrain.convert.pretrained import CONVERSION

os.environ.pop("COLUMNS", None)  # pages are as wide as they are in a pipe, whoever started the tests

if TYPE_CHECKING:
    from support.sandbox import Sandbox

# Machines differ and are shared: how long an example takes says nothing about the code.
settings.register_profile("ckptrain", deadline=None)
settings.load_profile("ckptrain")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep tokens apart, or some would be found that an earlier version made; converted models are this machine's."""
    kept = cache_directory() / CONVERSION
    kept.mkdir(parents=True, exist_ok=True)
    directory = tmp_path_factory.mktemp("cache")
    (directory / CONVERSION).symlink_to(kept.resolve(), target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPTRAIN_CACHE", str(directory))
        yield directory


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face directory of a random 4-layer Llama."""
    return write_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a training and a validation file of short chats."""
    directory = tmp_path_factory.mktemp("chats")
    return write_chats(directory / "train.jsonl", 60), write_chats(directory / "val.jsonl", 6, seed=1)


@pytest.fixture
def tiny_config(tiny_llama: Path, chats: tuple[Path, Path]) -> Callable[..., RunConfig]:
    """Return a maker of configurations of a small float32 run; overrides are given as `train.steps=3`."""

    def make(*overrides: str, **model: Any) -> RunConfig:
        return load_config(
            {
                "model": {"pretrained": str(tiny_llama), "dtype": "float32", "verify": "never", **model},
                "lora": {"dim": 8, "alpha": 16},
                "data": {"train": str(chats[0]), "validation": str(chats[1]), "sequence_length": 128},
                "optimizer": {"lr": 1.0e-2},
                "train": {"steps": 4, "micro_batch_size": 1, "global_batch_size": 4},
                "checkpoint": {"every_steps": 2},
                "log": {"tensorboard": False},
            },
            overrides,
        )

    return make


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """Return a checkout in small in which the quickstart has run and was exported; to be copied, not used."""
    from support.documents import words_of
    from support.sandbox import QUICKSTART, Sandbox

    import ckptrain.megatron.entered
    import ckptrain.training.run  # noqa: F401  # imported here, before the forks, and so once

    sandbox = Sandbox.make(tmp_path_factory.mktemp("checkout") / "ckptrain")
    for words in (QUICKSTART, ("ckptrain", "export", "runs/quickstart", "adapter", "--no-verify")):
        ended = sandbox.run(words_of(*words))
        assert ended.status == 0, ended.output
    return sandbox
