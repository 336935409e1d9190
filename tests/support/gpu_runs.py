"""Runs on GPUs, started as users start them: through torch's launcher, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tiny import write_chats, write_llama


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


def journal(run_dir: Path, event: str) -> list[dict[str, Any]]:
    """Return the entries of one kind."""
    entries = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    return [entry for entry in entries if entry["event"] == event]


def phase(run_dir: Path, name: str) -> dict[str, Any]:
    """Return what the journal says of a phase."""
    return next(entry for entry in journal(run_dir, "phase") if entry["to"] == name)


def column(run_dir: Path, key: str) -> list[float]:
    """Return what the metrics have under a key, in the order of steps."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def apart(found: list[float], expected: list[float]) -> float:
    """Return the largest difference."""
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))
