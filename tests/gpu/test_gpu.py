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
from tiny import write_chats, write_llama

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a configuration file of a small Llama whose heads are wide enough for fused attention."""
    directory = tmp_path_factory.mktemp("gpu")
    write_llama(directory / "llama", hidden_size=512, intermediate_size=1024, num_attention_heads=8)
    write_chats(directory / "train.jsonl", 200)
    write_chats(directory / "val.jsonl", 16, seed=1)
    path = directory / "run.yaml"
    path.write_text(
        f"""
model: {{pretrained: {directory / "llama"}, verify: always}}
lora: {{dim: 16, alpha: 32}}
data: {{train: train.jsonl, validation: val.jsonl, sequence_length: 256}}
optimizer: {{lr: 2.0e-3}}
train: {{steps: 10, micro_batch_size: 2, global_batch_size: 8}}
checkpoint: {{every_steps: 5, keep_last: 9}}
log: {{tensorboard: false, sample_tokens: 4}}
"""
    )
    return path


def command(ranks: int, *arguments: str) -> list[str]:
    """Return the command line of a run under torch's launcher."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *launcher, "-m", "ckptrain.cli", *arguments]


def run(ranks: int, *arguments: str, **environment: str) -> str:
    """Run to the end and return what was printed."""
    done = subprocess.run(
        command(ranks, *arguments),
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def journal(run_dir: Path, event: str) -> list[dict]:
    """Return the entries of one kind."""
    entries = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    return [entry for entry in entries if entry["event"] == event]


def losses(run_dir: Path) -> list[float]:
    """Return the training losses in the order of steps."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def base_loaded(run_dir: Path) -> dict:
    """Return what the journal says of the base that was loaded."""
    return next(entry for entry in journal(run_dir, "phase") if entry["to"] == "BASE_LOADED")


def test_transformer_engine_trains_in_bfloat16_and_agrees_with_hugging_face(config: Path, tmp_path: Path) -> None:
    """The backend is chosen by itself, the base's logits are compared, the loss falls."""
    run(1, "run", str(config), "--run-dir", str(tmp_path))
    loaded = base_loaded(tmp_path)
    assert loaded["backend"] == "transformer_engine"
    assert loaded["parity"]["checked"]
    assert losses(tmp_path)[-1] < 0.9 * losses(tmp_path)[0]


@pytest.mark.parametrize("kind", ["lora", "canonical", "dora"])
def test_transformer_engine_trains_what_the_local_layers_train(kind: str, config: Path, tmp_path: Path) -> None:
    """Adapters of every kind on layers that fuse a norm, and on layers that do not; the gate lets the export through."""
    asked = [f"lora.kind={kind}", "lora.target_modules=[q_proj, v_proj, o_proj, up_proj, down_proj]"]
    curves = {}
    for backend in ("transformer_engine", "local"):
        where = tmp_path / backend
        run(1, "run", str(config), "--run-dir", str(where), f"model.backend={backend}", *asked)
        curves[backend] = losses(where)
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
        curves[name] = losses(tmp_path / name)
    assert base_loaded(tmp_path / "gpu")["backend"] == "local"
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
    assert max(abs(a - b) for a, b in zip(losses(killed), losses(straight), strict=True)) < 2e-2


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
    assert max(abs(a - b) for a, b in zip(losses(tmp_path), losses(one), strict=True)) < 3e-2
