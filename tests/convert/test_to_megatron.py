"""What is exported for Megatron-Bridge is loaded by megatron-core into Bridge's own adapters, bit for bit."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import attrs
import pytest
import torch
import yaml
from support.bridge_changes import layout, matrices
from support.bridge_checkpoint import Run, canonical, lora, whole_matrices
from support.launch import launch
from torch import Tensor

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.convert.sources import open_source
from ckptrain.convert.to_megatron import export_megatron
from ckptrain.convert.to_peft import export_adapter
from ckptrain.errors import CheckpointNotFound, CkptrainError, ProblemsError

BaseOf = Callable[[str], Any]
Save = Callable[..., CommittedCheckpoint]

CANONICAL = ("lora.kind=canonical", "lora.target_modules=[all-linear]")
SOME_LAYERS = ("lora.target_modules=['*.layers.1.*.linear_qkv','*.layers.2.*.linear_fc2']",)


def read(path: Path) -> dict[str, Tensor]:
    """Read all matrices of what a path leads to."""
    return matrices(open_source(path))


def one_by_one(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name experts as the modules that Megatron has of them."""
    return {
        name.replace(".experts.", f".experts.local_experts.{expert}.") if ".experts." in name else name: matrix
        for name, stacked in found.items()
        for expert, matrix in enumerate(stacked if ".experts." in name else [stacked])
    }


@pytest.mark.parametrize(
    ("family", "overrides", "run"),
    [
        ("llama", (), {}),
        ("llama", (), {"layout": layout(tensor=2)}),
        ("llama", (), {"layout": layout(pipeline=2), "dtype": "bfloat16"}),
        ("qwen3_moe", (), {"layout": layout(expert=2)}),
        ("llama", SOME_LAYERS, {}),
    ],
)
def test_megatron_loads_what_is_exported(
    base_of: BaseOf, save: Save, tmp_path: Path, family: str, overrides: tuple[str, ...], run: dict[str, Any]
) -> None:
    """Into Megatron-Bridge's LoRA of the settings that run_config.yaml says, in every layout: the same bits."""
    base = base_of(family)
    dtype = getattr(torch, run.get("dtype", "float32"))
    to_dtype = {"change": lambda adapter: {name: tensor.to(dtype) for name, tensor in adapter.items()}}
    checkpoint = save(base, *overrides, **to_dtype)
    export = export_megatron(checkpoint.path, tmp_path / "out")
    peft = yaml.safe_load((export.iteration / "run_config.yaml").read_text())["peft"]
    chosen = {key: peft[key] for key in ("target_modules", "exclude_modules", "dim", "alpha", "dropout")}
    training = Run(base=base, peft=lambda: lora(**chosen), **run)
    found = whole_matrices(launch(training.ranks, lambda: training.load(export.iteration)))
    expected = one_by_one(read(checkpoint.path))
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert (export.rank, export.alpha, export.step, export.dtype) == (4, 12, 100, str(dtype).removeprefix("torch."))


def test_parts_of_their_own_are_loaded_by_canonical_lora(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """On one tensor parallel process, and a warning says so."""
    base = base_of("qwen2")
    checkpoint = save(base, *CANONICAL)
    export = export_megatron(checkpoint.path, tmp_path / "out")
    training = Run(base=base, peft=canonical)
    found = whole_matrices(launch(1, lambda: training.load(export.iteration)))
    expected = read(checkpoint.path)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert export.kind == "canonical"
    assert "tensor_model_parallel_size=1" in export.warnings[0]


def test_megatron_bridge_finds_what_it_looks_for(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """Through the functions by which its loader finds an iteration, a configuration, a train state, a base."""
    base = base_of("llama")
    export = export_megatron(save(base, step=70).path, tmp_path / "out")
    [found] = launch(1, lambda: look_as_bridge(export.path, export.iteration))
    assert found == {
        "exists": True,
        "is iteration": True,
        "base": str(base.path),
        "step": 70,
        "layout": (1, 1),
        "saved": (False, False),
        "common": 70,
        "format": True,
    }


def look_as_bridge(path: Path, iteration: Path) -> dict[str, Any]:
    """Read what is beside the tensors with Megatron-Bridge's and megatron-core's own functions."""
    for name in ("config", "nvrx_straggler", "tokenizers.tokenizer"):  # they need packages that these functions do not
        sys.modules[f"megatron.bridge.training.{name}"] = MagicMock()
    from megatron.bridge.training.utils import checkpoint_utils as bridge
    from megatron.core import dist_checkpointing

    config = bridge.read_run_config(str(iteration / "run_config.yaml"))
    model, checkpoint = config["model"], config["checkpoint"]
    return {
        "exists": bridge.checkpoint_exists(str(path)),
        "is iteration": bridge.is_checkpoint_iteration_directory(str(iteration)),
        "base": bridge.get_hf_model_id_from_checkpoint(path),
        "step": bridge.read_train_state(str(path / "latest_train_state.pt")).step,
        "layout": (model["tensor_model_parallel_size"], model["pipeline_model_parallel_size"]),
        "saved": (checkpoint["save_optim"], checkpoint["save_rng"]),
        "common": dist_checkpointing.load_common_state_dict(str(iteration))["iteration"],
        "format": dist_checkpointing.check_is_distributed_checkpoint(str(iteration)),
    }


@pytest.mark.parametrize(
    ("family", "overrides"), [("llama", ()), ("qwen3_moe", ()), ("qwen3_moe", SOME_LAYERS), ("llama", SOME_LAYERS)]
)
def test_what_is_exported_is_read_again(
    base_of: BaseOf, save: Save, tmp_path: Path, family: str, overrides: tuple[str, ...]
) -> None:
    """The way there and back changes neither a bit of the matrices nor what they are an adapter of."""
    checkpoint = save(base_of(family), "lora.dropout=0.125", "lora.kind=lora", *overrides)
    export = export_megatron(checkpoint.path, tmp_path / "out")
    there, back = open_source(checkpoint.path), open_source(export.path)
    assert back.problems() == []
    assert back.facts.lora.modules == there.facts.lora.modules
    for key in ("kind", "dim", "alpha", "dropout", "dropout_position"):
        assert getattr(back.facts.lora.settings, key) == getattr(there.facts.lora.settings, key)
    assert (back.shape, back.base.name, back.step) == (there.shape, there.base.name, there.step)
    expected, found = read(checkpoint.path), read(export.path)
    assert [name for name in expected if not torch.equal(found.pop(name), expected[name])] == []
    assert not found
    assert len(export.warnings) == (family == "qwen3_moe") + bool(overrides)


def test_an_adapter_of_peft_becomes_one_of_megatron(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """Its iteration is 0, which Megatron-Bridge takes from the train state."""
    checkpoint = save(base_of("llama"))
    export_adapter(checkpoint.path, tmp_path / "peft")
    export = export_megatron(tmp_path / "peft", tmp_path / "out")
    assert (export.iteration.name, export.step) == ("iter_0000000", 0)
    export_adapter(tmp_path / "out", tmp_path / "again")
    name = "adapter_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "peft" / name).read_bytes()


def test_the_export_says_where_it_comes_from(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """And is replaced where that is asked for, and nothing else is."""
    base, out = base_of("llama"), tmp_path / "out"
    first, second = save(base, step=1), save(base, step=2)
    export_megatron(first.path, out)
    told = json.loads((out / "ckptrain_megatron.json").read_text())
    assert (told["run_id"], told["step"], told["iteration"]) == (first.manifest.run_id, 1, 1)
    with pytest.raises(CkptrainError, match="it exists"):
        export_megatron(second.path, out)
    export_megatron(second.path, out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == [
        "ckptrain_megatron.json",
        "iter_0000002",
        "latest_checkpointed_iteration.txt",
        "latest_train_state.pt",
    ]
    shutil.rmtree(out / "iter_0000002")
    (out / "iter_0000009").mkdir()
    with pytest.raises(CkptrainError, match="iter_0000009 in it would be lost"):
        export_megatron(second.path, out, overwrite=True)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".writing-")]


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    """An empty directory; nothing is written."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFound):
        export_megatron(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_megatron_bridge_would_compute_otherwise_is_refused(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """Its DoRA has one A for a fused layer; its layers of Gemma hold the norm that comes after the adapter."""
    base = base_of("llama")
    dora = save(base, "lora.kind=dora", "lora.target_modules=[all-linear]").path
    with pytest.raises(ProblemsError, match="it is DoRA with an A for each part of a layer"):
        export_megatron(dora, tmp_path / "out")
    gemma = attrs.evolve(base, shape=attrs.evolve(base.shape, architecture="Gemma3ForCausalLM"))
    with pytest.raises(
        ProblemsError, match="adapters of linear_fc2, linear_proj of a Gemma3ForCausalLM after the norm"
    ):
        export_megatron(save(gemma, step=7).path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
