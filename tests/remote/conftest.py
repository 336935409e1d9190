"""Fixtures of this room: an S3 server, a bucket of its own for each test, and a run that has ended in one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.launch import launch
from support.object_store import ObjectStore, objects

from ckptrain import api
from ckptrain.checkpoint.object_files import ObjectPath
from ckptrain.config.load import load_config


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """Return the server, which the environment names from now on."""
    server = ObjectStore(tmp_path_factory.mktemp("store") / "log")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    server.stop()


@pytest.fixture
def store(server: ObjectStore) -> Iterator[ObjectStore]:
    """Return the server without faults."""
    server.faults()
    yield server
    server.faults()


@pytest.fixture
def bucket(store: ObjectStore) -> str:
    """Return the URL of a new bucket."""
    return new_bucket(store)


def new_bucket(server: ObjectStore) -> str:
    """Make a bucket."""
    name = f"bucket-{uuid.uuid4().hex[:8]}"
    server.make_bucket(name)
    return f"s3://{name}"


@pytest.fixture(scope="session")
def ended(server: ObjectStore, tiny_llama: Path, chats: tuple[Path, Path]) -> Mapping[str, bytes]:
    """Return all objects of a run of four steps that has saved steps 2 and 4."""
    config = load_config(
        {
            "model": {"pretrained": str(tiny_llama), "dtype": "float32", "verify": "never"},
            "lora": {"dim": 8, "alpha": 16},
            "data": {"train": str(chats[0]), "sequence_length": 128},
            "train": {"steps": 4, "micro_batch_size": 1, "global_batch_size": 4},
            "checkpoint": {"every_steps": 2},
            "log": {"tensorboard": False},
        }
    )
    url = f"{new_bucket(server)}/runs/a"
    launch(1, lambda: api.run(config, run_dir=url))
    return objects(url)


@pytest.fixture
def run_url(bucket: str, ended: Mapping[str, bytes]) -> str:
    """Return the URL of a copy of that run, to be damaged."""
    run = ObjectPath.parse(f"{bucket}/runs/a")
    for name, data in ended.items():
        (run / name).write(data)
    return run.url
