"""Fixtures of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.object_store import ObjectStore


@pytest.fixture
def object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """Return an S3 server with the bucket that the pages name, as the environment has it."""
    server = ObjectStore(tmp_path / "store.log")
    server.make_bucket("bucket")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()
