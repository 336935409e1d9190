"""`ckptrain run` as the launcher of several processes: what they are called with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptrain.cli import train
from ckptrain.cli.launch import Launched


@pytest.mark.parametrize(("flags", "passed"), [(("--quiet",), ["--quiet"]), ((), [])])
def test_what_is_printed_is_passed_on_to_the_processes(
    flags: Sequence[str], passed: list[str], config_file: Path, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is what prints."""
    commands: list[list[str]] = []

    def launch(command: list[str], num_processes: int, **_: Any) -> Launched:
        commands.append([*command, str(num_processes)])
        return Launched(exit_status=75, stdout=b"")

    monkeypatch.setattr(train, "launch", launch)
    asked = ask("run", config_file, "--run-dir", "R", "--nproc-per-node", "2", *flags, "train.steps=7")
    assert asked.exit_code == 75
    [command] = commands
    words = command[command.index("run") :]
    assert words == ["run", *passed, "--run-dir=R", "--", str(config_file), "train.steps=7", "2"]
