"""What a person does, as a person does it: commands in processes of their own, with a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckptrain.lifecycle.journal import read_journal


@pytest.fixture(scope="module")
def config(tiny_llama: Path, chats: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a configuration file whose data lies beside it."""
    directory = tmp_path_factory.mktemp("recipe")
    for name, source in zip(("train", "val"), chats, strict=True):
        (directory / f"{name}.jsonl").write_bytes(source.read_bytes())
    path = directory / "recipe.yaml"
    path.write_text(
        f"""
model: {{pretrained: {tiny_llama}, dtype: float32}}
lora: {{target_modules: all-linear, dim: 8, alpha: 16}}
data: {{train: train.jsonl, validation: val.jsonl, sequence_length: 128}}
optimizer: {{lr: 1e-2}}
train: {{steps: 12, global_batch_size: 4}}
checkpoint: {{every_steps: 4}}
log: {{sample_tokens: 4}}
"""
    )
    return path


def command(*arguments: str) -> list[str]:
    """Return a ckptrain command line for this interpreter."""
    return [sys.executable, "-m", "ckptrain.cli", *arguments]


def answer(*arguments: str, status: int = 0) -> Any:
    """Run a command with --json and return its object."""
    done = subprocess.run(command(*arguments, "--json"), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == status, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_run_kill_resume_status_export(config: Path, tmp_path: Path) -> None:
    """The story of the README: killed after its first save, resumed to the end, exported, loaded by PEFT."""
    run_dir, out = tmp_path / "run", tmp_path / "adapter"
    planned = answer("plan", str(config), "--run-dir", str(run_dir))
    assert planned["plan"]["plan"] == "FreshStart"
    assert not run_dir.exists()

    process = subprocess.Popen(command("run", str(config), "--run-dir", str(run_dir)), stderr=subprocess.DEVNULL)
    journal = run_dir / "journal.jsonl"
    deadline = time.monotonic() + 120
    while not (journal.exists() and any(entry["event"] == "saved" for entry in read_journal(journal))):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL

    resumed = answer("resume", str(run_dir))
    assert (resumed["status"], resumed["step"], resumed["plan"]["plan"]) == ("finished", 12, "Resume")
    assert [entry["checkpoint"] for entry in read_journal(journal) if entry["event"] == "receipt"] == [
        Path(resumed["plan"]["checkpoint"]).name
    ]
    state = answer("status", str(run_dir))
    assert (state["step"], state["phase"], state["seems_dead"]) == (12, "FINISHED", False)
    assert state["next"]["plan"]["plan"] == "AlreadyDone"
    assert answer("verify", str(run_dir))["exit_status"] == 0
    assert list((run_dir / "tensorboard").iterdir())

    subprocess.run([sys.executable, "tools/export_adapter.py", str(run_dir), str(out)], check=True, timeout=120)
    adapter_config = json.loads((out / "adapter_config.json").read_text())
    assert (adapter_config["r"], adapter_config["lora_alpha"]) == (8, 16)
    assert (out / "adapter_model.safetensors").stat().st_size > 10_000


def test_two_processes_of_one_command(config: Path, tmp_path: Path) -> None:
    """--nproc-per-node starts torch's launcher; SIGTERM to it saves and gives 75, the next start finishes on one."""
    long_run = ["run", str(config), "--run-dir", str(tmp_path), "train.steps=5000", "checkpoint.every_steps=5000"]
    process = subprocess.Popen(command(*long_run, "--nproc-per-node", "2", "parallel.tensor=2"))
    deadline = time.monotonic() + 150
    metrics = tmp_path / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b'"loss"') > 3):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(120) == 75
    [saved] = [entry for entry in read_journal(tmp_path / "journal.jsonl") if entry["event"] == "saved"]
    steps = saved["step"] + 1
    finished = answer("resume", str(tmp_path), f"train.steps={steps}", "parallel.tensor=1")
    assert (finished["status"], finished["step"]) == ("finished", steps)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["run", "nothing.yaml"], 78, "nothing.yaml"),
        (["run", "CONFIG", "lora.rnak=4"], 78, "lora.rnak"),
        (["run", "CONFIG", "model.pretrained=/nowhere"], 78, "/nowhere"),
        (["run", "CONFIG", "parallel.tensor=3", "--nproc-per-node", "3"], 78, "parallel.tensor=3"),
        (["resume", "nowhere"], 2, "nowhere"),
        (["export", "nowhere", "out"], 2, "nowhere"),
        (["run"], 2, "CONFIG"),
    ],
)
def test_mistakes_have_a_status_and_no_traceback(
    arguments: list[str], status: int, said: str, config: Path, tmp_path: Path
) -> None:
    """Told before torch is loaded: in well under a second each."""
    given = [str(config) if argument == "CONFIG" else argument for argument in arguments]
    done = subprocess.run(command(*given), capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr
