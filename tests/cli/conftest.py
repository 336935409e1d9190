"""A small model directory, a config for it, and real checkpoints of small tensors, for the tests of the command line."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
import torch
from click.testing import CliRunner, Result

from ckptrain import api
from ckptrain.checkpoint.integrity import CommittedCheckpoint, hash_file
from ckptrain.checkpoint.manifest import Manifest, TensorEntry
from ckptrain.checkpoint.sharded import save_tensors
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

Ask = Callable[..., Result]
Save = Callable[..., CommittedCheckpoint]
State = Mapping[str, Mapping[str, torch.Tensor]]


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
    """Return a function that commits a checkpoint of a step of that run, as training does.

    It takes the tensors, by directory, and fields of the manifest, where they are to be others.
    """
    config = load_config(run_dir / "run.yaml")
    survey, _ = api.plan(config, run_dir=run_dir)
    module = survey.targets.modules[0]

    def save_step(
        step: int, metrics: Mapping[str, float] | None = None, state: State | None = None, **fields: Any
    ) -> CommittedCheckpoint:
        store = CheckpointStore(run_dir)
        staging = store.stage(step)
        stored = {
            directory: save_tensors(tensors, staging / directory).tensors
            for directory, tensors in (state or tensors_of(module)).items()
        }
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
                path.relative_to(staging).as_posix(): hash_file(path) for path in staging.rglob("*") if path.is_file()
            },
            tensors={
                name: TensorEntry(shape=tensor.shape, dtype=tensor.dtype, group=group_of(name, directory))
                for directory, tensors in stored.items()
                for name, tensor in tensors.items()
            },
        )
        return store.commit(staging, attrs.evolve(manifest, **fields))

    return save_step


def tensors_of(module: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return the state of an adapter of one module after its first step, by directory."""
    a, b = torch.linspace(-1, 1, 512).view(8, 64), torch.linspace(0, 3, 1024).view(128, 8)
    names = (f"{module}.adapter.linear_in.weight", f"{module}.adapter.linear_out.weight")
    moments = {f"optimizer.state.exp_avg.{name}": tensor / 10 for name, tensor in zip(names, (a, b), strict=True)}
    return {
        "adapter": dict(zip(names, (a.bfloat16(), b.bfloat16()), strict=True)),
        "optimizer": {**moments, "rng.rank00000.default": torch.arange(16, dtype=torch.uint8)},
    }


def group_of(name: str, directory: str) -> Any:
    """Return the group of a tensor."""
    return "rng" if name.startswith("rng.") else directory
