"""Context parallelism over two GPUs is the run of one, with the local layers and with Transformer Engine's.

The latter are refused until this has been seen to pass, so the refusal is taken out of the way here.

python3 -m pytest tests/gpu -q
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gpu_runs import assert_alike, run_unproven
from support.records import phase
from tiny import write_chats, write_llama

pytestmark = pytest.mark.gpu(2)


@pytest.mark.parametrize("kind", ["lora", "canonical", "dora"])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("local", "float32"), ("local", "bfloat16"), ("transformer_engine", "bfloat16")]
)
def test_two_gpus_that_share_every_sequence_train_the_run_of_one(
    backend: str, dtype: str, kind: str, tmp_path: Path
) -> None:
    """Losses, gradient norms and the base's logits; samples of many lengths, which are padded and packed."""
    write_llama(tmp_path / "llama", hidden_size=512, intermediate_size=1024, num_attention_heads=8)
    write_chats(tmp_path / "train.jsonl", 200)
    write_chats(tmp_path / "val.jsonl", 16, seed=1)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"""
model: {{pretrained: {tmp_path / "llama"}, verify: always, backend: {backend}, dtype: {dtype}}}
lora: {{kind: {kind}, dim: 16, alpha: 32}}
data: {{train: train.jsonl, validation: val.jsonl, sequence_length: 256}}
optimizer: {{lr: 1.0e-3}}
train: {{steps: 10, micro_batch_size: 2, global_batch_size: 8}}
checkpoint: {{every_steps: 5, keep_last: 9}}
log: {{tensorboard: false, sample_tokens: 4}}
"""
    )
    one = run_unproven(1, config, tmp_path / "one")
    two = run_unproven(2, config, tmp_path / "two", "parallel.context=2")
    loaded = phase(tmp_path / "two", "BASE_LOADED")
    assert loaded["backend"] == backend
    assert loaded["parity"]["checked"]
    assert len(one) == len(two) == 10
    assert_alike(two, one, dtype)
