"""Real checkpoints of small files, for the tests of this room."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import pytest

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.manifest import FileDigest, Manifest, TensorEntry
from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.config.identity import BaseIdentity
from ckptrain.config.layout import Layout
from ckptrain.config.load import flatten, load_config
from ckptrain.config.schema import LoraConfig
from ckptrain.config.shape import ModelShape
from ckptrain.lifecycle.facts import DataIdentity, LoraSpec

CONTENTS = {
    "adapter/.metadata": b"metadata of the adapter",
    "adapter/__0_0.distcp": bytes(range(256)) * 8,
    "optimizer/__0_0.distcp": b"moments" * 300,
    "state.json": b"{}\n",
}


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Return a manifest with something in every field, for files of CONTENTS."""
    data = tmp_path_factory.mktemp("data") / "train.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    config = load_config({"model": {"pretrained": "org/base"}, "data": {"train": str(data)}})
    module = "decoder.layers.0.self_attention.linear_qkv"
    return Manifest(
        run_id="20261130-120000-abcd",
        step=100,
        consumed_samples=800,
        consumed_tokens=12_345,
        created="2026-11-30T12:00:00.000Z",
        base=BaseIdentity(fingerprint="b" * 64, name="org/base", revision=None, num_bytes=1000),
        shape=ModelShape(
            architecture="LlamaForCausalLM",
            num_layers=4,
            hidden_size=64,
            ffn_hidden_size=160,
            num_heads=8,
            num_kv_heads=4,
            head_dim=8,
            vocab_size=256,
            max_positions=256,
            tied_embeddings=False,
        ),
        tokenizer_fingerprint="t" * 64,
        data=DataIdentity(fingerprint="d" * 64, num_samples=400, num_rows=50),
        lora=LoraSpec(settings=LoraConfig(), modules=(module,)),
        layout=Layout(tensor=2, pipeline=1, context=1, expert=1, data=4),
        metrics={"val_loss": 1.25},
        optimizer={"step": 100, "param_groups": [{"lr": 1e-4, "betas": [0.9, 0.95]}]},
        versions={"ckptrain": "0.1.0", "torch": "2.11.0"},
        config=flatten(config),
        files={
            path: FileDigest(num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            for path, content in CONTENTS.items()
        },
        tensors={
            f"{module}.adapter.linear_in.weight": TensorEntry(shape=(8, 64), dtype="bfloat16", group="adapter"),
            f"optimizer.exp_avg.{module}.adapter.linear_in.weight": TensorEntry(
                shape=(8, 64), dtype="float32", group="optimizer"
            ),
            "rng.rank0": TensorEntry(shape=(5056,), dtype="uint8", group="rng"),
        },
    )


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Return the store of a run that has saved nothing."""
    return CheckpointStore(tmp_path / "run")


Save = Callable[..., CommittedCheckpoint]


@pytest.fixture
def save(store: CheckpointStore, manifest: Manifest) -> Save:
    """Return a function that saves a checkpoint of a step as a run does."""

    def save_step(step: int, metrics: Mapping[str, float] | None = None) -> CommittedCheckpoint:
        staging = store.stage(step)
        for path, content in CONTENTS.items():
            (staging / path).parent.mkdir(exist_ok=True)
            (staging / path).write_bytes(content)
        return store.commit(staging, attrs.evolve(manifest, step=step, metrics=metrics or {}))

    return save_step
