"""Programs that hold trainers of their own, on a GPU: their loss beside fused layers, and what they leave behind.

python3 -m pytest tests/gpu -q
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.gpu_runs import run_each, write_run
from support.records import apart, column, phase

pytestmark = pytest.mark.gpu

_OWN_LOSS = """
import sys

import ckptrain
from torch.nn.functional import cross_entropy


def written_out(logits, labels):
    return cross_entropy(logits, labels, reduction="none")


for graphs in ("never", "always"):
    with ckptrain.Trainer(
        sys.argv[1],
        [f"train.cuda_graphs={graphs}"],
        run_dir=f"{sys.argv[2]}/{graphs}",
        loss=ckptrain.Loss(written_out, name="written-out"),
    ) as trainer:
        trainer.run()
"""

_ONE_AFTER_ANOTHER = """
import gc
import json
import sys

import torch

import ckptrain

allocated = []
for number in range(4):
    graphs = "always" if number % 2 else "never"
    ckptrain.run(sys.argv[1], [f"train.cuda_graphs={graphs}"], run_dir=f"{sys.argv[2]}/{number}")
    gc.collect()
    allocated.append(torch.cuda.memory_allocated())
print(json.dumps(allocated))
"""


def _program(text: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text, *words], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def test_a_loss_of_the_program_is_the_built_in_one_where_it_computes_the_same(tmp_path: Path) -> None:
    """Behind fused layers, whose own loss comes in portions, and behind recorded ones."""
    config = write_run(tmp_path)
    run_each(config, {"built-in": ["train.cuda_graphs=never"]}, tmp_path)
    _program(_OWN_LOSS, str(config), str(tmp_path))
    for graphs in ("never", "always"):
        attached = phase(tmp_path / graphs, "ADAPTER_ATTACHED")
        assert attached["fused"]
        assert attached["cuda_graphs"] == (graphs == "always")
        assert apart(column(tmp_path / graphs, "loss"), column(tmp_path / "built-in", "loss")) < 2e-2


def test_runs_one_after_another_leave_no_memory_behind(tmp_path: Path) -> None:
    """With recorded layers or without; the workspaces that cuBLAS has for the stream of a recording stay."""
    config = write_run(tmp_path)
    allocated = json.loads(_program(_ONE_AFTER_ANOTHER, str(config), str(tmp_path)).splitlines()[-1])
    weights = (tmp_path / "llama/model.safetensors").stat().st_size / 2  # bfloat16 of float32
    assert max(allocated[2:]) - allocated[1] < weights / 4, allocated
