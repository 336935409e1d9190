"""The commands on URLs: what they tell of a run in an S3 store, and what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner
from support.object_store import KEY, SECRET, data_object, flip, objects

from ckptrain.cli.main import cli
from ckptrain.config.cache import cache_directory


def ask(*words: str) -> tuple[int, str]:
    """Return the exit status of a command and all that it printed."""
    result = CliRunner().invoke(cli, words)
    return result.exit_code, result.output


def ask_json(*words: str) -> dict[str, object]:
    """Return what a command answers to a program."""
    status, text = ask(*words, "--json")
    assert status == 0, text
    found: dict[str, object] = orjson.loads(text.splitlines()[-1])
    return found


def test_looking_commands_tell_what_they_tell_of_a_directory(run_url: str, tmp_path: Path) -> None:
    """They name the run by its URL, and change nothing in the store."""
    before = objects(run_url)
    status = ask_json("status", run_url)
    assert (status["run_dir"], status["phase"], status["step"]) == (run_url, "FINISHED", 4)
    assert [checkpoint["name"] for checkpoint in status["checkpoints"]] == ["step-00000002", "step-00000004"]  # type: ignore[attr-defined]
    assert status["next"]["plan"]["checkpoint"] == f"{run_url}/checkpoints/step-00000004"  # type: ignore[index]
    verified = ask_json("verify", run_url)
    assert verified["intact"]
    assert verified["checkpoints"][0]["path"] == f"{run_url}/checkpoints/step-00000002"  # type: ignore[index]
    assert ask_json("inspect", f"{run_url}/checkpoints/step-00000002")["step"] == 2
    compared = ask_json("diff", f"{run_url}/checkpoints/step-00000002", run_url)
    assert (compared["a"]["step"], compared["b"]["step"]) == (2, 4)  # type: ignore[index]
    assert ask_json("plan", run_url)["run_dir"] == run_url
    page = tmp_path / "page.html"
    ask_json("report", run_url, "--out", str(page))
    assert run_url in page.read_text()
    assert objects(run_url) == before


def test_an_export_and_a_prune(run_url: str, tmp_path: Path) -> None:
    """An adapter comes out of the store; of two checkpoints the newest stays, and no object of the other."""
    ask_json("export", run_url, str(tmp_path / "adapter"), "--no-verify")
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
    ask_json("prune", run_url, "--keep-last", "1", "--dry-run")
    assert any("step-00000002" in name for name in objects(run_url))
    pruned = ask_json("prune", run_url, "--keep-last", "1")
    assert [checkpoint["fate"] for checkpoint in pruned["checkpoints"]] == ["removed", "kept"]  # type: ignore[attr-defined]
    assert not any("step-00000002" in name for name in objects(run_url))


def test_damage_is_exit_status_65(run_url: str) -> None:
    """`verify` reads the store and not a copy that was fetched before."""
    assert ask("verify", run_url)[0] == 0
    flip(data_object(run_url, 2))
    status, told = ask("verify", run_url)
    assert status == 65
    assert "adapter/__0_0.distcp has other contents" in told


def test_a_status_loads_no_torch(run_url: str) -> None:
    """Nor does it leave the copy that it looked at."""
    code = (
        "import sys; from ckptrain.cli.status import status_answer; from ckptrain.checkpoint.working_copy import"
        f" local_path; status_answer(local_path({run_url!r})); print('torch' in sys.modules)"
    )
    looks = set((cache_directory() / "remote").glob("look-*"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "False"
    assert set((cache_directory() / "remote").glob("look-*")) == looks


@pytest.mark.parametrize("place", ["s3://{KEY}:{SECRET}@bucket/run", "s3://bucket/run?key={KEY}"])
def test_credentials_in_a_url_are_refused_and_not_repeated(place: str) -> None:
    """They are for the environment, whose variables are named."""
    status, told = ask("status", place.format(KEY=KEY, SECRET=SECRET))
    assert status == 78
    assert KEY not in told
    assert SECRET not in told


def test_a_store_whose_package_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    import importlib.util

    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "s3fs" else there(name))
    status, told = ask("status", "s3://bucket/run")
    assert status == 1
    assert "pip install 'ckptrain[s3]'" in told
