"""Fixtures of this room: an S3 server, and a bucket of its own for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from support.object_store import KEY, SECRET, ObjectStore




@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """Return the server."""
    server = ObjectStore(tmp_path_factory.mktemp("store") / "log")
    yield server
    server.stop()


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """Return the server without faults, with the environment set for it."""
    for name, value in {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "3",
    }.items():
        monkeypatch.setenv(name, value)
    server.faults()
    yield server
    server.faults()


@pytest.fixture
def bucket(store: ObjectStore) -> str:
    """Return the URL of a new bucket."""
    import urllib.request

    name = f"bucket-{uuid.uuid4().hex[:8]}"
    urllib.request.urlopen(urllib.request.Request(f"{store.endpoint}/{name}", method="PUT")).close()
    return f"s3://{name}"
