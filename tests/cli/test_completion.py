"""What a shell offers, as click asks for it, and in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete

from ckptrain.cli.main import cli


def offered(*words: str) -> list[str]:
    """Return what the last word may become."""
    complete = ShellComplete(cli, {}, "ckptrain", "_CKPTRAIN_COMPLETE")
    return [item.value for item in complete.get_completions(list(words[:-1]), words[-1])]


def test_keys_values_sections_and_commands_are_offered() -> None:
    """From the schema: types that have few values offer them."""
    assert offered("run", "a.yaml", "train.st") == ["train.steps=", "train.start="]
    assert offered("resume", "RUN", "train.start=") == ["train.start=auto", "train.start=fresh", "train.start=resume"]
    assert offered("plan", "RUN", "train.deterministic=t") == ["train.deterministic=true"]
    assert offered("run", "a.yaml", "train.steps=") == []
    assert offered("explain", "lo") == ["lora", "log"]
    assert offered("comp") == ["completion"]


def test_a_value_is_offered_where_the_shell_ends_words_at_the_sign() -> None:
    """As bash does: of `model.dtype=fl` it makes three words."""
    assert offered("run", "a.yaml", "model.dtype", "=", "fl") == ["float32"]
    assert offered("run", "a.yaml", "model.dtype", "=") == ["bfloat16", "float32"]
    assert offered("run", "a.yaml", "model.dtype", "=", "float32", "model.ba") == ["model.backend="]


def test_a_run_is_completed_as_a_directory() -> None:
    """By the shell itself."""
    complete = ShellComplete(cli, {}, "ckptrain", "_CKPTRAIN_COMPLETE")
    assert [item.type for item in complete.get_completions(["status"], "ru")] == ["dir"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_printed_for_each_shell(shell: str, ask_json: Callable[..., dict[str, Any]], ask: Any) -> None:
    """And nothing else, so that it can be evaluated."""
    script = ask_json("completion", shell)["script"]
    assert ask("completion", shell).stdout == f"{script}\n"
    assert f"_CKPTRAIN_COMPLETE={shell}_complete" in script


def test_bash_completes_a_key_without_a_space_after_it(tmp_path: Path) -> None:
    """The script is evaluated, and its function is called as bash calls it."""
    command = tmp_path / "ckptrain"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckptrain.cli "$@"\n')
    command.chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    code = """
eval "$(ckptrain completion bash)"
compopt() { echo compopt "$@"; }
COMP_WORDS=(ckptrain run a.yaml checkpoint.ev) COMP_CWORD=3
_ckptrain_completion ckptrain
echo "${COMPREPLY[*]}"
"""
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([bash, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines() == ["compopt -o nospace", "checkpoint.every_steps="]
