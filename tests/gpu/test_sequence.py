"""Sequence parallelism over two processes is the run of one, with the local layers and with Transformer Engine's.

The latter are refused until this has been seen to pass, so the refusal is taken out of the way here.

python3 -m pytest tests/gpu/test_sequence.py -q
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_chats, write_llama

pytestmark = pytest.mark.gpu(2)

WITHOUT_REFUSAL = """
import ckptrain.training.start
from ckptrain.cli.main import main

ckptrain.training.start.unproven = lambda config: []
main()
"""
# What two runs may differ by in loss, and in the gradient norm as a share of it.
ROUNDING = {"float32": (1e-3, 1e-3), "bfloat16": (3e-2, 5e-2)}


def train(num_processes: int, config: Path, run_dir: Path, *overrides: str) -> list[tuple[float, float]]:
    """Run to the end under torch's launcher; return the loss and the gradient norm of each step."""
    script = run_dir.parent / "without_refusal.py"
    script.write_text(WITHOUT_REFUSAL)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes), str(script)]
    done = subprocess.run(
        [sys.executable, *launcher, "run", str(config), "--run-dir", str(run_dir), *overrides],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.mark.parametrize("kind", ["lora", "canonical", "dora"])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("transformer_engine", "bfloat16"), ("local", "float32"), ("local", "bfloat16")]
)
def test_two_processes_with_slices_train_the_run_of_one(backend: str, dtype: str, kind: str, tmp_path: Path) -> None:
    """Losses and gradient norms; B is random, so that a gradient that is lost on its way through B shows at once."""
    write_llama(tmp_path / "llama", hidden_size=512, intermediate_size=1024, num_attention_heads=8)
    write_chats(tmp_path / "train.jsonl", 200)
    write_chats(tmp_path / "val.jsonl", 16, seed=1)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"""
model: {{pretrained: {tmp_path / "llama"}, verify: always, backend: {backend}, dtype: {dtype}}}
lora: {{kind: {kind}, dim: 16, alpha: 32, lora_B_init_method: xavier}}
data: {{train: train.jsonl, validation: val.jsonl, sequence_length: 256}}
optimizer: {{lr: 2.0e-4}}
train: {{steps: 6, micro_batch_size: 2, global_batch_size: 8}}
checkpoint: {{every_steps: 6}}
log: {{tensorboard: false, sample_tokens: 4}}
"""
    )
    one = train(1, config, tmp_path / "one")
    two = train(2, config, tmp_path / "two", "parallel.tensor=2", "parallel.sequence=true")
    journal = [json.loads(line) for line in (tmp_path / "two/journal.jsonl").read_text().splitlines()]
    [loaded] = [entry for entry in journal if "parity" in entry]
    assert loaded["backend"] == backend
    assert loaded["parity"]["checked"]
    assert len(one) == len(two) == 6
    loss_apart, norm_apart = ROUNDING[dtype]
    for (loss, norm), (expected_loss, expected_norm) in zip(two, one, strict=True):
        assert abs(loss - expected_loss) < loss_apart
        assert abs(norm - expected_norm) < norm_apart * expected_norm
