"""A small model directory, a config for it, and real checkpoints of small files, for the tests of the command line."""

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner, Result

from ckptrain import api
from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.manifest import FileDigest, Manifest, TensorEntry
from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.cli.main import cli
from ckptrain.config.load import dump_config, flatten, load_config
from ckptrain.lifecycle.facts import LoraSpec
from ckptrain.lifecycle.journal import Journal
from ckptrain.training.start import versions

_MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_CONTENTS = {"adapter/__0_0.distcp": bytes(range(256)) * 8, "optimizer/__0_0.distcp": b"moments" * 300}

Ask = Callable[..., Result]
Save = Callable[..., CommittedCheckpoint]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return a function that runs a command in this process, as rank 0 of no launch."""
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(cli, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def ask_json(ask: Ask) -> Callable[..., dict[str, Any]]:
    """Return a function that runs a command with --json and returns the one object that stdout must hold."""

    def run(*arguments: object) -> dict[str, Any]:
        result = ask(*arguments, "--json")
        values: dict[str, Any] = orjson.loads(result.stdout)
        assert values["exit_status"] == result.exit_code
        return values

    return run


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Write a Hugging Face directory with a few bytes of weights and a tokenizer."""
    path = tmp_path / "model"
    path.mkdir()
    content = bytes(range(256)) * 16
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}).encode()
    (path / "config.json").write_text(json.dumps(_MODEL))
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + content)
    (path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    return path


@pytest.fixture
def config_file(tmp_path: Path, model_dir: Path) -> Path:
    """Write a config for that model, of 100 steps."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    path = tmp_path / "tickets.yaml"
    path.write_text(f"model: {{pretrained: {model_dir}}}\ndata: {{train: train.jsonl}}\n")
    return path


@pytest.fixture
def run_dir(tmp_path: Path, config_file: Path) -> Path:
    """Write the run directory of a run that has been started and has saved nothing."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "run.yaml").write_text(dump_config(load_config(config_file)))
    journal = Journal(path / "journal.jsonl")
    journal.record("plan", plan="FreshStart", world_size=1)
    journal.record("phase", **{"from": "NEW", "to": "PLANNED"})
    return path


@pytest.fixture
def save(run_dir: Path) -> Save:
    """Return a function that commits a checkpoint of a step of that run, as training does."""
    config = load_config(run_dir / "run.yaml")
    survey, _ = api.plan(config, run_dir=run_dir)
    module = survey.targets.modules[0]

    def save_step(step: int, metrics: Mapping[str, float] | None = None) -> CommittedCheckpoint:
        store = CheckpointStore(run_dir)
        staging = store.stage(step)
        for path, content in _CONTENTS.items():
            (staging / path).parent.mkdir()
            (staging / path).write_bytes(content)
        manifest = Manifest(
            run_id="abcd",
            step=step,
            consumed_samples=step * config.train.global_batch_size,
            consumed_tokens=step * 1000,
            created="2026-01-02T03:04:05+00:00",
            base=survey.identity,
            shape=survey.shape,
            tokenizer_fingerprint=survey.tokenizer_fingerprint,
            data=survey.data,
            lora=LoraSpec(settings=config.lora, modules=survey.targets.modules),
            layout=survey.layout,
            metrics=metrics or {},
            optimizer={"step": step},
            versions=versions(),
            config=flatten(config),
            files={
                path: FileDigest(num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
                for path, content in _CONTENTS.items()
            },
            tensors={
                f"{module}.adapter.linear_in.weight": TensorEntry(shape=(8, 64), dtype="bfloat16", group="adapter"),
                "optimizer.moment": TensorEntry(shape=(8, 64), dtype="float32", group="optimizer"),
                "rng.rank0": TensorEntry(shape=(16,), dtype="uint8", group="rng"),
            },
        )
        return store.commit(staging, manifest)

    return save_step
