"""The directory in which the documents' commands run, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.documents import Command
from support.sandbox import QUICKSTART, Sandbox


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """Return a checkout in small in which the quickstart has run and was exported; to be copied, not used."""
    import ckptrain.megatron.entered
    import ckptrain.training.run  # noqa: F401  # imported here, before the forks, and so once

    sandbox = Sandbox.make(tmp_path_factory.mktemp("checkout") / "ckptrain")
    for words in (QUICKSTART, ("ckptrain", "export", "runs/quickstart", "adapter", "--no-verify")):
        ended = sandbox.run(Command(where="", text="", environment=(), words=words, directive=None))
        assert ended.status == 0, ended.output
    return sandbox


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return where a copy of the checkout goes."""
    return tmp_path / "ckptrain"
