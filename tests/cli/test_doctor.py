"""What `ckptrain doctor` finds, what it makes of what is missing or broken, and that nothing private is in it."""

from __future__ import annotations

import getpass
import importlib.metadata
import importlib.util
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import Result

from ckptrain.cli import doctor, machine, self_test
from ckptrain.cli.disk import measure_disk
from ckptrain.cli.doctor import without_names
from ckptrain.cli.machine import Finding
from ckptrain.errors import PackageMissing

Ask = Callable[..., Result]
AskJson = Callable[..., dict[str, Any]]


def found(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the findings by what they are about."""
    return {check["name"]: check for check in report["checks"]}


def test_it_trains_kills_and_resumes_and_names_nobody(
    ask_json: AskJson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything works in this environment; the report has versions, the disk and the self-test, and no secrets."""
    home, run_dir = tmp_path / "secretuser", tmp_path / "secretplace"
    for directory in (home, run_dir):
        directory.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghij")
    monkeypatch.delenv("CKPTRAIN_CACHE")
    report = ask_json("doctor", "--run-dir", run_dir)
    assert (report["works"], report["exit_status"]) == (True, 0), report["checks"]
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["untested"] == {}
    assert report["disk"]["free_bytes"] > 0
    test = report["self_test"]
    assert (test["differing"], len(test["losses"])) == ([], 4)
    assert test["tensors"] > 20
    assert list(run_dir.iterdir()) == []
    text = orjson.dumps(report).decode()
    for private in ("secretuser", "secretplace", "hf_abcdefghij", str(tmp_path), socket.gethostname()):
        assert private not in text
    assert f"/{getpass.getuser()}" not in text


def test_it_is_one_screen_in_plain_words(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns by 24 lines; what is missing comes with what that means."""
    monkeypatch.setenv("COLUMNS", "80")
    result = ask("doctor", "--no-self-test")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    text = " ".join(result.stdout.split())
    if importlib.util.find_spec("transformer_engine") is None:
        assert "Transformer Engine not installed: megatron-core's own layers compute instead" in text
    assert "Everything that a run needs works here." in text


def test_a_run_that_resumes_to_other_bits_is_told_and_ends_with_status_1(
    ask_json: AskJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is able to fail: here the resumed run learns at another rate."""
    resume = self_test._train_when_told

    def at_another_rate(config: dict[str, Any], *others: Any) -> None:
        resume({**config, "optimizer": {"lr": 3e-3}}, *others)

    monkeypatch.setattr(self_test, "_train_when_told", at_another_rate)
    report = ask_json("doctor")
    assert (report["works"], report["exit_status"]) == (False, 1)
    assert "wrote other bits" in found(report)["self-test"]["text"]
    assert any(name.startswith("adapter/") for name in report["self_test"]["differing"])


def test_a_process_that_fails_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it printed is not on the screen, so the end of it is in the report."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(self_test, "_train_until_killed", fail)
    with pytest.raises(self_test.SelfTestFailedError, match="fail: its last words: RuntimeError: no such kernel"):
        self_test.run_self_test(has_gpu=False)


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("torch", "pip install torch=="),
        ("megatron-core", "pip install megatron-core=="),
        ("megatron-bridge", "pip install --no-deps megatron-bridge=="),
    ],
)
def test_what_is_missing_is_told_with_the_command_that_installs_it(
    missing: str, command: str, ask_json: AskJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is looked at all the same, and no run is tried."""
    real = machine.require

    def lacking(packages: tuple[str, ...], purpose: str) -> None:
        monkeypatch.setattr("ckptrain.installed.is_installed", lambda package: package != missing)
        real(packages, purpose)

    monkeypatch.setattr(machine, "require", lacking)
    report = ask_json("doctor")
    assert (report["works"], report["exit_status"]) == (False, 1)
    check = found(report)["torch" if missing == "torch" else "Megatron"]
    assert (check["state"], check["required"]) == ("broken", True)
    assert command in check["text"]
    assert "left out" in found(report)["self-test"]["text"]


def test_versions_that_were_not_tested_are_told(ask_json: AskJson, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not refused: the status is still 0."""
    monkeypatch.setattr(doctor, "untested", lambda: {"torch": "2.12.0"})
    report = ask_json("doctor", "--no-self-test")
    assert report["untested"]["torch"]["is"] == "2.12.0"
    assert report["exit_status"] == 0


def test_an_error_of_a_library_loses_what_is_private_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths below the home directory, the working directory, names, and values of variables with secrets."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    text = f"cannot open /home/alice/lib/x.so for alice on node17 with hf_12345678 in {Path.cwd()}/run"
    environment = {"HOME": "/home/alice", "HF_TOKEN": "hf_12345678"}
    assert without_names(text, environment) == (
        "cannot open ~/lib/x.so for (user) on (host) with (value of HF_TOKEN) in ./run"
    )


def test_a_look_that_raises_is_a_finding() -> None:
    """An import that fails in any way is what there is to report; a package that is missing comes with its cure."""

    def fail() -> Finding:
        raise OSError("libcudart.so.13: cannot open shared object file")

    check = doctor._look("torch", fail, required=True)
    assert (check.state, check.text) == ("broken", "OSError: libcudart.so.13: cannot open shared object file")
    missing = machine.broken("x", PackageMissing("x", ["x is not installed: pip install x==1", "or"]), required=False)
    assert (missing.state, missing.text) == ("missing", "x is not installed: pip install x==1")


def test_a_disk_is_measured_above_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    """As a run directory is before its first start; nothing is made and nothing is left."""
    disk = measure_disk(tmp_path / "runs/new")
    assert disk.free_bytes > 1_000_000
    assert disk.write_bytes_per_s > 1_000
    assert 0 < disk.commit_s < 60
    assert list(tmp_path.iterdir()) == []
