"""What a run on a GPU tells of its speed.

python3 -m pytest tests/gpu -q
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from tiny import write_chats, write_llama

from ckptrain.config.flops import peak_flops_per_s
from ckptrain.lifecycle.journal import read_journal
from ckptrain.training.trace import ATTENTION, IDLE, MATRIX, OTHER

pytestmark = pytest.mark.gpu


def test_a_run_tells_its_memory_its_share_of_the_peak_and_where_its_steps_went(tmp_path: Path) -> None:
    """Numbers that must lie between others; the profile adds up, and names the kind of nearly every kernel."""
    import torch

    write_llama(tmp_path / "llama", hidden_size=512, intermediate_size=1024, num_attention_heads=8)
    write_chats(tmp_path / "train.jsonl", 400)
    (tmp_path / "run.yaml").write_text(
        f"""
model: {{pretrained: {tmp_path / "llama"}}}
data: {{train: train.jsonl, sequence_length: 512}}
train: {{steps: 8, global_batch_size: 8, profile: 3}}
log: {{tensorboard: false}}
"""
    )
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "ckptrain.cli", "run", str(tmp_path / "run.yaml"), "--run-dir", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "TFLOP/s" in done.stdout

    steps = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    weights = sum(path.stat().st_size for path in (tmp_path / "llama").glob("*.safetensors")) / 2  # bfloat16 of float32
    total = torch.cuda.get_device_properties(0).total_memory
    peak = peak_flops_per_s(torch.cuda.get_device_name(0))
    for step in steps:
        assert weights < step["peak_memory_bytes"] < total
        if peak is None:
            assert step["mfu"] is None
        else:
            assert step["mfu"] == pytest.approx(step["tflops_per_s"] * 1e12 / peak)
            assert 0 < step["mfu"] < 1

    found = orjson.loads((run_dir / "profile/step-00000003.json").read_bytes())
    assert (found["device"], found["num_steps"]) == ("cuda", 3)
    kinds = found["kinds"]
    assert sum(kinds.values()) == pytest.approx(found["step_s"])
    assert all(seconds >= 0 for seconds in kinds.values())
    assert kinds[MATRIX] > 0
    assert kinds[ATTENTION] > 0
    assert kinds[OTHER] < 0.05 * (found["step_s"] - kinds[IDLE])
    assert 0 < found["host_busy_s"] <= found["step_s"]
    [start] = [entry for entry in read_journal(run_dir / "journal.jsonl") if entry["event"] == "startup"]
    assert {"imports", "base", "first step"} <= start["seconds"].keys()
