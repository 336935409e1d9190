"""A run on GPUs, started as users start it: through torch's launcher, in processes of its own.

python3 -m pytest tests/gpu -q
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.gpu_runs import command, run, write_run
from support.records import column, journal, phase

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the configuration file of a small run."""
    return write_run(tmp_path_factory.mktemp("gpu"))


def test_transformer_engine_trains_in_bfloat16_and_agrees_with_hugging_face(config: Path, tmp_path: Path) -> None:
    """The backend is chosen by itself, the base's logits are compared, the loss falls."""
    run(1, "run", str(config), "--run-dir", str(tmp_path))
    loaded = phase(tmp_path, "BASE_LOADED")
    assert loaded["backend"] == "transformer_engine"
    assert loaded["parity"]["checked"]
    assert column(tmp_path, "loss")[-1] < 0.9 * column(tmp_path, "loss")[0]


@pytest.mark.parametrize("kind", ["lora", "canonical", "dora"])
def test_transformer_engine_trains_what_the_local_layers_train(kind: str, config: Path, tmp_path: Path) -> None:
    """Adapters of every kind on layers that fuse a norm, and on layers that do not; the gate lets the export through."""
    asked = [f"lora.kind={kind}", "lora.target_modules=[q_proj, v_proj, o_proj, up_proj, down_proj]"]
    curves = {}
    for backend in ("transformer_engine", "local"):
        where = tmp_path / backend
        run(1, "run", str(config), "--run-dir", str(where), f"model.backend={backend}", *asked)
        curves[backend] = column(where, "loss")
    assert max(abs(a - b) for a, b in zip(*curves.values(), strict=True)) < 2e-2
    out = tmp_path / "peft"
    export = ["export", str(tmp_path / "transformer_engine"), str(out), "--verify"]
    subprocess.run([sys.executable, "-m", "ckptrain.cli", *export], check=True)
    gate = json.loads((out / "ckptrain_export.json").read_text())["gate"]
    assert gate["difference"] < gate["allowed"] < gate["effect"]


@pytest.mark.parametrize("kind", ["lora", "canonical", "dora"])
def test_the_gpu_and_the_cpu_agree_in_float32(kind: str, config: Path, tmp_path: Path) -> None:
    """The local layers, which auto takes for float32, give one loss curve on both."""
    curves = {}
    asked = ["model.dtype=float32", f"lora.kind={kind}"]
    for name, environment in (("gpu", {}), ("cpu", {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "8"})):
        run(1, "run", str(config), "--run-dir", str(tmp_path / name), *asked, **environment)
        curves[name] = column(tmp_path / name, "loss")
    assert phase(tmp_path / "gpu", "BASE_LOADED")["backend"] == "local"
    assert max(abs(a - b) for a, b in zip(curves["gpu"], curves["cpu"], strict=True)) < 1e-3


def test_a_killed_run_goes_on(config: Path, tmp_path: Path) -> None:
    """Kill -9 after a save; the second start resumes and its losses are those of a run that was not killed."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    run(1, "run", str(config), "--run-dir", str(straight))
    process = subprocess.Popen(command(1, "run", str(config), "--run-dir", str(killed)))
    deadline = time.monotonic() + 240
    while not (killed / "journal.jsonl").exists() or not journal(killed, "saved"):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(journal(killed, "plan")[0]["pid"], signal.SIGKILL)
    assert process.wait() != 0
    run(1, "resume", str(killed))
    [receipt] = journal(killed, "receipt")
    assert receipt["optimizer_step"] == 5
    assert receipt["rng"] == "restored on every rank"
    assert max(abs(a - b) for a, b in zip(column(killed, "loss"), column(straight, "loss"), strict=True)) < 2e-2


def test_a_gpu_checkpoint_goes_on_on_the_cpu_and_exports(config: Path, tmp_path: Path) -> None:
    """Saved with Transformer Engine in bfloat16, resumed with the local layers on the CPU; PEFT loads the export."""
    common = ["--run-dir", str(tmp_path), "optimizer.schedule=constant"]
    run(1, "run", str(config), *common, "train.steps=5")
    run(1, "run", str(config), *common, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="8")
    assert [entry["backend"] for entry in journal(tmp_path, "phase") if "backend" in entry] == [
        "transformer_engine",
        "local",
    ]
    assert "another platform" in journal(tmp_path, "receipt")[0]["rng"]
    out = tmp_path / "peft"
    subprocess.run([sys.executable, "-m", "ckptrain.cli", "export", str(tmp_path), str(out)], check=True)
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(config.parent / "llama", dtype=torch.float32).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, str(out)).eval()(ids).logits
    assert (adapted - plain).abs().max() > 0.05


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kind", ["lora", "canonical", "dora"])
@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.tensor=2"],
        ["parallel.pipeline=2"],
        [],
    ],
    ids=["TP=2", "PP=2", "DP=2"],
)
def test_two_gpus_train_the_run_of_one(layout: list[str], kind: str, config: Path, tmp_path: Path) -> None:
    """Every layout over two GPUs has the losses of one GPU within bfloat16's rounding, whatever the adapters are."""
    one, asked = config.parent / f"one-gpu-{kind}", f"lora.kind={kind}"
    if not one.exists():
        run(1, "run", str(config), "--run-dir", str(one), asked)
    run(2, "run", str(config), "--run-dir", str(tmp_path), asked, *layout)
    assert max(abs(a - b) for a, b in zip(column(tmp_path, "loss"), column(one, "loss"), strict=True)) < 3e-2
