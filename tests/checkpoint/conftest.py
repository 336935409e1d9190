"""Real checkpoints of small files, for the tests of this room."""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import pytest
import torch
from support.launch import launch, run_training

from ckptrain.checkpoint.dcp_metadata import DIRECTORIES
from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.manifest import FileDigest, Manifest, TensorEntry
from ckptrain.checkpoint.sharded import save_tensors
from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.config.identity import BaseIdentity
from ckptrain.config.layout import Layout
from ckptrain.config.load import flatten, load_config
from ckptrain.config.schema import LoraConfig, RunConfig
from ckptrain.config.shape import ModelShape
from ckptrain.lifecycle.facts import DataIdentity, LoraSpec, ProgramParts
from ckptrain.training.start import Survey, survey_run

_MODULE = "decoder.layers.0.self_attention.linear_qkv"
_TENSORS = {
    f"{_MODULE}.adapter.linear_in.weight": TensorEntry(shape=(8, 64), dtype="bfloat16", group="adapter"),
    f"optimizer.exp_avg.{_MODULE}.adapter.linear_in.weight": TensorEntry(
        shape=(8, 64), dtype="float32", group="optimizer"
    ),
    "rng.rank0": TensorEntry(shape=(5056,), dtype="uint8", group="rng"),
}


@pytest.fixture(scope="session")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a checkpoint by path: tensors as torch writes them, and one that is none of its own."""
    files = {"state.json": b"{}\n"}
    for directory, groups in DIRECTORIES.items():
        state = {
            name: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
            for name, entry in _TENSORS.items()
            if entry.group in groups
        }
        saved = tmp_path_factory.mktemp(directory)
        save_tensors(state, saved)
        files |= {f"{directory}/{path.name}": path.read_bytes() for path in saved.iterdir()}
    return files


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory, contents: Mapping[str, bytes]) -> Manifest:
    """Return a manifest with something in every field, for these files."""
    data = tmp_path_factory.mktemp("data") / "train.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    config = load_config({"model": {"pretrained": "org/base"}, "data": {"train": str(data)}})
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
        lora=LoraSpec(settings=LoraConfig(), modules=(_MODULE,)),
        layout=Layout(tensor=2, pipeline=1, context=1, expert=1, data=4),
        metrics={"val_loss": 1.25},
        optimizer={"step": 100, "param_groups": [{"lr": 1e-4, "betas": [0.9, 0.95]}]},
        versions={"ckptrain": "0.1.0", "torch": "2.11.0"},
        config=flatten(config),
        files={
            path: FileDigest(num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            for path, content in contents.items()
        },
        tensors=_TENSORS,
        program=ProgramParts(loss="focal-v1"),
        callbacks={"EarlyStopping": {"best": 1.25, "num_flat": 1}},
    )


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Return the store of a run that has saved nothing."""
    return CheckpointStore(tmp_path / "run")


Save = Callable[..., CommittedCheckpoint]


@pytest.fixture
def save(store: CheckpointStore, manifest: Manifest, contents: Mapping[str, bytes]) -> Save:
    """Return a function that saves a checkpoint of a step as a run does."""

    def save_step(step: int, metrics: Mapping[str, float] | None = None) -> CommittedCheckpoint:
        staging = store.stage(step)
        for path, content in contents.items():
            (staging / path).parent.mkdir(exist_ok=True)
            (staging / path).write_bytes(content)
        return store.commit(staging, attrs.evolve(manifest, step=step, metrics=metrics or {}))

    return save_step


@attrs.frozen(kw_only=True)
class TrainedRun:
    """A run that two processes made, tensor parallel, with checkpoints of steps 2 and 4; not to be changed."""

    config: RunConfig
    path: Path
    survey: Survey
    """What a start of it would find."""


@pytest.fixture(scope="session")
def trained(tiny_llama: Path, chats: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Train a tiny model for four steps, once."""
    config = load_config(
        {
            "model": {"pretrained": str(tiny_llama), "dtype": "bfloat16", "verify": "never"},
            "lora": {"dim": 4, "alpha": 8},
            "data": {"train": str(chats[0]), "sequence_length": 128},
            "parallel": {"tensor": 2},
            "train": {"steps": 4, "micro_batch_size": 1, "global_batch_size": 2},
            "checkpoint": {"every_steps": 2, "on_damaged": "refuse"},
            "log": {"tensorboard": False},
        }
    )
    path = tmp_path_factory.mktemp("trained")
    launch(2, lambda: run_training(config, path))
    return TrainedRun(config=config, path=path, survey=survey_run(config, world_size=2))


@pytest.fixture
def run(trained: TrainedRun, tmp_path: Path) -> TrainedRun:
    """Return a copy of the trained run, to be damaged."""
    return attrs.evolve(trained, path=shutil.copytree(trained.path, tmp_path / "run"))
