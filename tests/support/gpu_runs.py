"""Runs on GPUs, started as users start them: through torch's launcher, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny import write_chats, write_llama

from support.records import column


def write_run(directory: Path) -> Path:
    """Write a small Llama whose heads are wide enough for fused attention, chats, and a configuration file of both."""
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


def run_each(config: Path, runs: dict[str, list[str]], directory: Path) -> None:
    """Run one after another in one process, each with its overrides, into a directory of its name."""
    script = "import json, sys, ckptrain\nfor name, overrides in json.loads(sys.argv[1]).items():\n"
    script += "    ckptrain.run(sys.argv[2], overrides, run_dir=f'{sys.argv[3]}/{name}')\n"
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(runs), str(config), str(directory)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def run_unproven(ranks: int, config: Path, run_dir: Path, *overrides: str) -> list[tuple[float, float]]:
    """Run to the end what is refused until it has been seen; return the loss and the gradient norm of each step."""
    script = run_dir.parent / "without_refusal.py"
    script.write_text(_WITHOUT_REFUSAL)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script)]
    done = subprocess.run(
        [sys.executable, *launcher, "run", str(config), "--run-dir", str(run_dir), *overrides],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return list(zip(column(run_dir, "loss"), column(run_dir, "grad_norm"), strict=True))


_WITHOUT_REFUSAL = """
import ckptrain.training.start
from ckptrain.cli.main import main

ckptrain.training.start.unproven = lambda config: []
main()
"""


def assert_alike(found: list[tuple[float, float]], expected: list[tuple[float, float]], dtype: str) -> None:
    """Compare two runs' losses, and their gradient norms as a share, within what rounding may make of them."""
    loss_apart, norm_apart = {"float32": (1e-3, 1e-3), "bfloat16": (3e-2, 5e-2)}[dtype]
    for (loss, norm), (expected_loss, expected_norm) in zip(found, expected, strict=True):
        assert abs(loss - expected_loss) < loss_apart
        assert abs(norm - expected_norm) < norm_apart * expected_norm
