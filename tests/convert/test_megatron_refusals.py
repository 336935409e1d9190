"""What a checkpoint of Megatron-Bridge says that cannot be so, or cannot be held, is refused by name; none of it runs."""

from __future__ import annotations

import io
import json
import math
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.bridge_changes import Change, change_config, layout, open_with, rename, setting, without
from support.bridge_checkpoint import Run, canonical
from support.hostile import Payload
from support.launch import launch

from ckptrain.checkpoint.dcp_metadata import read_dcp_metadata, read_foreign_metadata
from ckptrain.config.shape import ModelShape
from ckptrain.errors import CheckpointDamaged, ConfigError, ProblemsError

pytest_plugins = ["support.bridge_fixtures"]

BaseOf = Callable[[str], Any]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("peft", "alpha"), "peft.alpha is missing, expected a whole number from 1: without it the scale is"),
        (setting("peft", "alpha", None), "peft.alpha is missing"),
        (setting("peft", "alpha", 0), "peft.alpha is 0"),
        (setting("peft", "alpha", math.inf), "peft.alpha is Infinity"),
        (setting("peft", "alpha", 2.5), "peft.alpha is 2.5"),
        (without("peft", "dim"), "peft.dim is missing, expected a whole number from 1: the rank"),
        (setting("peft", "dim", 8), r"linear_in.weight is \[4, 4, 64\], expected \[4, 8, 64\]"),
        (setting("peft", "dropout", "much"), 'peft.dropout is "much"'),
        (
            setting("peft", "_target_", "megatron.bridge.peft.dora.DoRA"),
            "peft is DoRA, of which PEFT computes something",
        ),
        (setting("peft", "_target_", "os.system"), r'peft._target_ is "os.system", expected megatron.bridge.peft'),
        (lambda config: config.update(peft=None), "peft is empty: it was saved by a training of the whole model"),
        (without("model", "tensor_model_parallel_size"), "model.tensor_model_parallel_size is missing"),
        (lambda config: config.pop("model"), "model is missing"),
        (setting("model", "num_layers", 28), "model.num_layers is 28 in run_config.yaml, and 4 in the base"),
        (setting("model", "num_query_groups", 2), "model.num_query_groups is 2 in run_config.yaml, and 4 in the base"),
    ],
)
def test_settings_that_are_missing_or_other_are_named(
    iteration: Path, shape: ModelShape, change: Change, words: str
) -> None:
    """No scale, rank or layout is made up."""
    change_config(iteration, change)
    with pytest.raises(ProblemsError, match=words):
        open_with(shape, iteration)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 32}, r"linear_in.weight is \[4, 4, 64\], expected \[4, 4, 32\]"),
        ({"num_layers": 5}, r"is \[4, 4, 64\], expected \[5, 4, 64\]"),
        ({"num_kv_heads": 2}, r"linear_out.weight is \[4, 128, 4\], expected \[4, 96, 4\]"),
        ({"num_experts": 4, "moe_ffn_hidden_size": 32}, "is adapted, and the base has 4 experts in a layer"),
    ],
)
def test_another_base_is_refused(saved: Path, shape: ModelShape, change: dict[str, int], words: str) -> None:
    """By the shape of every tensor."""
    with pytest.raises(ProblemsError, match=words):
        open_with(attrs.evolve(shape, **change), saved)


def test_what_was_trained_otherwise_than_its_matrices_say_is_refused(base_of: BaseOf, tmp_path: Path) -> None:
    """Canonical q, k and v on two tensor parallel processes; experts cut by rows, of another rank, or interleaved."""
    llama, moe = base_of("llama"), base_of("qwen3_moe")
    launch(2, lambda: Run(base=llama, peft=canonical, layout=layout(tensor=2)).save(tmp_path / "canonical"))
    with pytest.raises(
        ProblemsError, match="linear_k, linear_q, linear_v were trained at tensor_model_parallel_size=2"
    ):
        open_with(llama.shape, tmp_path / "canonical")
    launch(1, lambda: Run(base=moe).save(tmp_path / "moe"))
    changes = {
        "expert_tensor_parallel_size=2, where": setting("model", "expert_tensor_parallel_size", 2),
        "interleave_size is 32: gate and up": setting("model", "moe_mlp_glu_interleave_size", 32),
        "experts have a rank of their own": setting("peft", "normalize_moe_lora", True),
    }
    for words, change in changes.items():
        copy = shutil.copytree(tmp_path / "moe/iter_0000010", tmp_path / f"copy{len(words)}")
        change_config(copy, change)
        with pytest.raises(ProblemsError, match=words):
            open_with(moe.shape, copy)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("linear_proj.adapter.linear_in.weight", "linear_proj.adapter.weight_magnitude", "is a magnitude of DoRA"),
        ("mlp.linear_fc1.", "mlp.shared_experts.linear_fc1.", "is of an expert that all tokens share"),
        ("mlp.linear_fc1.", "mlp.router.", "is of a router"),
        ("linear_proj.adapter", "linear_q_down_proj.adapter", "is of a layer that ckptrain does not adapt"),
        ("linear_out.weight", "linear_out.bias", "is of a layer that ckptrain does not adapt, or a bias"),
        ("linear_qkv.adapter.linear_in", "linear_qkv.adapter.adapter_q.linear_in", "linear_qkv has no linear_in"),
        ("decoder.", "vision_model.decoder.", "is of a part of the model that reads images"),
        ("decoder.", "language_model.decoder.", "is of the language model within a larger one"),
        ("layers.mlp", "layers.7.mlp", "is of layer 7, and the base has 4 layers"),
        ("mlp.linear_fc2", "\x1b[31m.linear_fc2", "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_tensors_that_have_no_place_are_refused_by_name(
    iteration: Path, shape: ModelShape, old: str, new: str, words: str
) -> None:
    """None is left out in silence."""
    rename(iteration, lambda name: name.replace(old, new))
    with pytest.raises(ProblemsError, match=words):
        open_with(shape, iteration)


def data_file(iteration: Path) -> Path:
    """Return a file that holds tensors."""
    return iteration / "__0_1.distcp"


def flip_a_bit(iteration: Path) -> None:
    """In the numbers of a tensor."""
    path, metadata = data_file(iteration), pickle.loads((iteration / ".metadata").read_bytes())
    places = [
        place
        for index, place in metadata.storage_data.items()
        if "weight" in index.fqn and place.relative_path == path.name
    ]
    data = bytearray(path.read_bytes())
    record = data[places[0].offset : places[0].offset + places[0].length]
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        numbers = archive.read(next(name for name in archive.namelist() if name.endswith("data/0")))
    data[places[0].offset + record.index(numbers) + 5] ^= 1
    path.write_bytes(data)


def cut_short(iteration: Path) -> None:
    """Leave half of a file."""
    data = data_file(iteration).read_bytes()
    data_file(iteration).write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_a_bit, r"weight, stored in __0_1.distcp at byte \d+, has other contents"),
        (cut_short, r"ends at byte \d+ of __0_1.distcp, which has \d+"),
        (lambda iteration: data_file(iteration).unlink(), "cannot be read"),
        (lambda iteration: (iteration / ".metadata").unlink(), "has no .metadata: the save was cut short"),
        (lambda iteration: (iteration / "metadata.json").unlink(), "has no metadata.json, which megatron-core writes"),
        (lambda iteration: (iteration / ".metadata").write_bytes(b"\x80\x04N."), "not a description of tensors by"),
        (shutil.rmtree, "names iter_0000010, which is not there"),
    ],
)
def test_damage_is_named(iteration: Path, shape: ModelShape, damage: Callable[[Path], object], words: str) -> None:
    """When it is opened, or when it is read."""
    damage(iteration)
    with pytest.raises(CheckpointDamaged, match=words):
        if problems := open_with(shape, iteration.parent).problems():
            raise CheckpointDamaged("damaged", problems)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_numbers_that_are_not_finite_are_named(base_of: BaseOf, tmp_path: Path, bad: float) -> None:
    """By the global name of the matrix, so that a diverged adapter is not exported."""
    base = base_of("llama")
    launch(1, lambda: Run(base=base, spoilt=("layers.2.mlp.linear_fc2.adapter.linear_out", bad)).save(tmp_path / "run"))
    assert open_with(base.shape, tmp_path / "run").problems() == [
        "decoder.layers.2.mlp.linear_fc2.adapter.linear_out.weight holds NaN or infinity"
    ]


def test_another_format_is_refused(iteration: Path, shape: ModelShape) -> None:
    """It is named."""
    (iteration / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(ProblemsError, match='its format is "zarr"; ckptrain reads megatron-core\'s torch_dist'):
        open_with(shape, iteration)


def test_nothing_in_a_checkpoint_is_run(iteration: Path, shape: ModelShape, tmp_path: Path) -> None:
    """Pickles that are not needed are not opened, those that are needed are read as data, YAML makes no objects."""
    mark = tmp_path / "mark"
    payload = pickle.dumps(Payload(mark))
    metadata = pickle.loads((iteration / ".metadata").read_bytes())
    objects = [place for index, place in metadata.storage_data.items() if "common_state" in index.fqn]
    for place in objects:
        data = (iteration / place.relative_path).read_bytes()
        filled = payload.ljust(place.length, b".")[: place.length]
        start, end = place.offset, place.offset + place.length
        (iteration / place.relative_path).write_bytes(data[:start] + filled + data[end:])
    for name in ("common.pt", "train_state.pt"):
        (iteration / name).write_bytes(payload)
    assert open_with(shape, iteration).problems() == []
    metadata.planner_data = Payload(mark)
    (iteration / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointDamaged, match=r"it names '(posix|nt)\.system', which does not belong there"):
        open_with(shape, iteration)
    metadata.planner_data = None
    (iteration / ".metadata").write_bytes(pickle.dumps(metadata))
    config = iteration / "run_config.yaml"
    config.write_text(f"{config.read_text()}\nextra: !!python/object/apply:os.system ['touch {mark}']\n")
    with pytest.raises(ConfigError, match="it is not YAML of plain values"):
        open_with(shape, iteration)
    assert objects
    assert not mark.exists()


def test_the_strict_reading_refuses_what_megatron_writes(iteration: Path) -> None:
    """Objects that a checkpoint of ckptrain never holds are allowed in others' only, and only listed."""
    with pytest.raises(CheckpointDamaged, match="is a pickled object; ckptrain stores tensors only"):
        read_dcp_metadata(iteration)
    found = read_foreign_metadata(iteration, lambda name: name.endswith("linear_proj.adapter.linear_in.weight"))
    assert len(found.tensors) == 1
    assert len(found.others) == 7
    assert {"common_state/shard_0_1", "rng_state/shard_0.0_1.1"} == set(found.objects)


@pytest.mark.parametrize(
    ("architecture", "experts", "words"),
    [
        ("Gemma2ForCausalLM", 0, "adds the adapters of linear_fc2, linear_proj of a Gemma2ForCausalLM after the norm"),
        ("GptOssForCausalLM", 4, "the experts of a GptOssForCausalLM are adapted, which PEFT passes over"),
    ],
)
def test_what_megatron_bridge_adds_elsewhere_is_refused(
    base_of: BaseOf, tmp_path: Path, architecture: str, experts: int, words: str
) -> None:
    """Its layers of some families hold the norm that follows, and its experts are not PEFT's everywhere."""
    base = base_of("qwen3_moe" if experts else "llama")
    launch(1, lambda: Run(base=base).save(tmp_path / "run"))
    with pytest.raises(ProblemsError, match=words):
        open_with(attrs.evolve(base.shape, architecture=architecture), tmp_path / "run")
