"""What Megatron-Bridge saves is read as it was trained: compared with the live model, in every form that it has."""

from __future__ import annotations

import io
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.bridge_changes import Change, change_config, layout, matrices, open_with, rename, setting, without
from support.bridge_checkpoint import Run, canonical, lora, whole_matrices
from support.launch import launch
from torch import Tensor

from ckptrain.config.shape import ModelShape
from ckptrain.convert.megatron_source import looks_like_megatron, open_megatron
from ckptrain.convert.parity import huggingface_logits, probe_batch
from ckptrain.convert.source import BaseReference
from ckptrain.convert.to_peft import export_adapter
from ckptrain.convert.unfuse import unfuse_rows
from ckptrain.errors import CheckpointNotFound, ProblemsError

pytest_plugins = ["support.bridge_fixtures"]

BaseOf = Callable[[str], Any]


def by_layer(live: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the experts of a layer, which Megatron has as modules of their own."""
    experts: dict[str, dict[int, Tensor]] = {}
    for name, matrix in live.items():
        place, _, rest = name.partition(".local_experts.")
        number, _, end = rest.partition(".")
        experts.setdefault(f"{place}.{end}" if rest else name, {})[int(number) if rest else -1] = matrix
    return {
        name: torch.stack([found[number] for number in sorted(found)]) if -1 not in found else found[-1]
        for name, found in experts.items()
    }


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare names and bits."""
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


GATE_AND_UP = ["linear_proj", "linear_fc1_up", "linear_fc1_gate", "linear_fc2"]
ONE_BY_ONE = {"non_homogeneous_layers": True}
SINGLETONS = {"singleton_local_shards": True}


@pytest.mark.parametrize(
    ("family", "run"),
    [
        ("llama", {}),
        ("llama", {"layout": layout(tensor=2)}),
        ("llama", {"layout": layout(pipeline=2)}),
        ("qwen3", {"layout": layout(tensor=2, pipeline=2)}),
        ("llama", {"dtype": "bfloat16", "keeps_extra_state": True}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"layout": layout(expert=2)}),
        ("qwen3_moe", {"metadata": SINGLETONS}),
        ("llama", {"metadata": SINGLETONS, "layout": layout(tensor=2)}),
        ("llama", {"metadata": ONE_BY_ONE, "peft": lambda: lora(target_modules=["*.layers.1.*.linear_qkv"])}),
        ("llama", {"peft": canonical}),
        ("qwen3_moe", {"peft": canonical}),
        ("llama", {"peft": lambda: canonical(target_modules=GATE_AND_UP), "layout": layout(tensor=2)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "one process",
)
def test_every_matrix_is_the_live_models(base_of: BaseOf, tmp_path: Path, family: str, run: dict[str, Any]) -> None:
    """Whatever layout, type and form it was saved in; nothing is missing and nothing is there besides."""
    training = Run(base=base_of(family), **run)
    ranks = launch(training.ranks, lambda: training.save(tmp_path / "run"))
    source = open_with(training.base.shape, tmp_path / "run")
    assert source.problems() == []
    assert_equal(matrices(source), by_layer(whole_matrices(ranks)))
    settings = source.facts.lora.settings
    kind = "canonical" if any(".adapter_" in name for name in ranks[0].parameters) else "lora"
    assert (settings.dim, settings.alpha, settings.kind) == (4, 12, kind)
    assert (source.step, source.facts.dtype, source.base.name) == (10, training.dtype, str(training.base.path))


@pytest.mark.parametrize(("family", "peft"), [("llama", lora), ("qwen3_moe", lora), ("qwen2", canonical)])
def test_the_exported_adapter_computes_what_megatron_computes(
    base_of: BaseOf, tmp_path: Path, family: str, peft: Callable[[], Any]
) -> None:
    """Logits under PEFT are those of the model that was saved, and not the base's."""
    base = base_of(family)
    [rank] = launch(1, lambda: Run(base=base, peft=peft).save(tmp_path / "run", logits=True))
    export_adapter(tmp_path / "run", tmp_path / "out")
    batch = probe_batch(base.shape.vocab_size)
    found = huggingface_logits(PeftModel.from_pretrained(base.load(), tmp_path / "out"), batch)
    largest = found.abs().max().item()
    assert (found - huggingface_logits(base.load(), batch)).abs().max().item() > 1e-2 * largest
    torch.testing.assert_close(found, rank.logits, rtol=0.0, atol=1e-5 * largest)


def test_a_fused_adapter_is_read_as_one_of_its_parts(saved: Path, shape: ModelShape) -> None:
    """As canonical, every part has the A that all share and its own rows of B, bit for bit."""
    fused, split = matrices(open_with(shape, saved)), matrices(open_with(shape, saved, "canonical"))
    names = {"linear_qkv": ["adapter_q", "adapter_k", "adapter_v"], "linear_fc1": ["adapter_gate", "adapter_up"]}
    expected = {}
    for name, matrix in fused.items():
        parts = next((parts for short, parts in names.items() if f".{short}." in name), None)
        if parts is None:
            expected[name] = matrix
            continue
        rows = [matrix] * len(parts) if "linear_in" in name else unfuse_rows(name.split(".")[4], matrix, shape)
        expected |= {
            name.replace(".adapter.", f".adapter.{part}."): piece for part, piece in zip(parts, rows, strict=True)
        }
    assert_equal(split, expected)


def test_parts_of_their_own_are_not_read_as_fused(base_of: BaseOf, tmp_path: Path) -> None:
    """One A cannot hold three; the message says what can."""
    base = base_of("llama")
    launch(1, lambda: Run(base=base, peft=canonical).save(tmp_path / "run"))
    with pytest.raises(ProblemsError, match=re.escape("linear_q, linear_v have an A of their own; set lora.kind=cano")):
        open_with(base.shape, tmp_path / "run", "lora")


def test_a_checkpoint_is_found_from_above(saved: Path, shape: ModelShape, tmp_path: Path) -> None:
    """By its iteration, by the directory with the tracker or without, and by a step of NeMo-RL, which has the number."""
    for path in (saved, saved / "iter_0000010"):
        assert looks_like_megatron(path)
        assert open_with(shape, path).path == saved / "iter_0000010"
    weights = tmp_path / "step_70/policy/weights"
    shutil.copytree(saved / "iter_0000010", weights / "iter_0000000")
    for path in (tmp_path / "step_70", weights, weights / "iter_0000000"):
        assert looks_like_megatron(path)
        assert open_with(shape, path).step == 70
    shutil.copytree(saved / "iter_0000010", weights / "iter_0000002")
    assert open_with(shape, weights).step == 2
    (weights / "latest_checkpointed_iteration.txt").write_text("0\n")
    assert open_with(shape, weights).step == 70


def test_what_is_no_checkpoint_of_megatron_is_told_so(tmp_path: Path, base_of: BaseOf) -> None:
    """An empty directory, and a base model."""
    for path in (tmp_path, base_of("llama").path, tmp_path / "nowhere"):
        assert not looks_like_megatron(path)
        with pytest.raises(CheckpointNotFound, match="is no checkpoint of Megatron"):
            open_megatron(path, lambda *_: pytest.fail("the base was asked for"), "auto")


def test_opening_one_loads_no_torch(saved: Path, base_of: BaseOf) -> None:
    """What it is can be told where torch is not installed."""
    code = (
        "import sys, pathlib; sys.modules['torch'] = None;"
        "from ckptrain.config.base import locate_base; from ckptrain.config.schema import ModelConfig;"
        "from ckptrain.config.shape import read_shape;"
        "from ckptrain.convert.megatron_source import open_megatron;"
        "base = lambda said, _: (None, read_shape(locate_base(ModelConfig(pretrained=said))));"
        "print(len(open_megatron(pathlib.Path(sys.argv[1]), base, 'auto').facts.lora.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code, saved], capture_output=True, text=True, check=True)
    assert int(result.stdout) == 4 * base_of("llama").shape.num_layers


def test_the_base_is_the_one_that_megatron_bridge_would_take(iteration: Path, shape: ModelShape) -> None:
    """In its order; the Megatron path that the training loaded its weights from is not one."""
    asked: list[tuple[str | None, str | None]] = []

    def base_of(said: str | None, revision: str | None) -> tuple[BaseReference, ModelShape]:
        asked.append((said, revision))
        return BaseReference(pretrained="base", name="base"), shape

    changes: list[Change] = [
        setting("checkpoint", "hf_source_path", "given"),
        lambda config: [config["checkpoint"].pop("hf_source_path"), config["model"].update(hf_model_id="org/model")],
        setting("model", "hf_model_revision", "abc"),
        lambda config: [config["model"].pop("hf_model_id"), config["tokenizer"].update(tokenizer_model="org/tokens")],
        without("tokenizer", "tokenizer_model"),
    ]
    notes = []
    for change in changes:
        change_config(iteration, change)
        notes.append(open_megatron(iteration, base_of, "auto").facts.notes)
    assert asked == [("given", None), ("org/model", None), ("org/model", "abc"), ("org/tokens", None), (None, None)]
    assert [len(note) for note in notes] == [0, 0, 0, 1, 0]
    assert "org/tokens, of which it has the tokenizer, is taken for it" in notes[3][0]


def test_prefixes_of_other_versions_are_known(iteration: Path, shape: ModelShape) -> None:
    """Some name a tensor by its place in what was saved, not in the model."""
    expected = matrices(open_with(shape, iteration))
    rename(iteration, lambda name: f"model.{name}")
    assert_equal(matrices(open_with(shape, iteration)), expected)


def test_base_and_optimizer_beside_the_adapter_are_left_alone(iteration: Path, shape: ModelShape) -> None:
    """They are listed, and a checkpoint of nothing else is told to be none of an adapter."""
    expected = matrices(open_with(shape, iteration))
    others = {"linear_fc1.adapter.linear_in": "linear_fc1", "linear_fc1.adapter.linear_out": "linear_fc1.bias"}
    path = iteration / ".metadata"
    kept = path.read_bytes()
    rename(iteration, lambda name: next((name.replace(*pair) for pair in others.items() if pair[0] in name), name))
    source = open_with(shape, iteration)
    assert source.facts.notes == ("it holds 2 tensors of the base too, which are not read",)
    assert_equal(matrices(source), {name: matrix for name, matrix in expected.items() if "linear_fc1" not in name})
    path.write_bytes(kept)
    rename(iteration, lambda name: f"optimizer.state.exp_avg.{name}" if "linear_fc1" in name else name)
    assert open_with(shape, iteration).facts.notes == ()
    rename(iteration, lambda name: name.replace(".adapter.", "."))
    with pytest.raises(ProblemsError, match="it holds a whole model and no adapter"):
        open_with(shape, iteration)


SHARED = [True, False]


@pytest.mark.parametrize("is_shared_outer", SHARED)
def test_an_adapter_that_all_experts_share_is_given_to_each(
    base_of: BaseOf, tmp_path: Path, is_shared_outer: bool
) -> None:
    """Where one was saved without an axis for the experts it counts for all, unless those of other processes were lost."""
    base = base_of("qwen3_moe")
    launch(1, lambda: Run(base=base).save(tmp_path / "run"))
    iteration = tmp_path / "run/iter_0000010"
    expected = matrices(open_with(base.shape, iteration))
    shared = ".mlp.experts.experts.linear_fc1.adapter.linear_in."
    keep_first_expert(iteration, shared)
    found = matrices(open_with(base.shape, iteration))
    for name, matrix in expected.items():
        same = matrix[:1].expand_as(matrix) if ".mlp.experts.linear_fc1.adapter.linear_in." in name else matrix
        assert torch.equal(found[name], same)
    change_config(iteration, setting("model", "expert_model_parallel_size", 2))
    change_config(iteration, setting("peft", "experts_shared_outer_loras", is_shared_outer))
    if is_shared_outer:
        assert_equal(matrices(open_with(base.shape, iteration)), found)
    else:
        with pytest.raises(ProblemsError, match="of 2 expert parallel processes it is only one's"):
            open_with(base.shape, iteration)


def keep_first_expert(iteration: Path, name: str) -> None:
    """Take the axis of experts from a tensor that is stacked over layers, and all experts but the first."""
    path = iteration / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    [key] = [key for key in metadata.state_dict_metadata if name in key]
    entry = metadata.state_dict_metadata[key]
    entry.size = torch.Size([entry.size[0], *entry.size[2:]])
    stored = {index: place for index, place in metadata.storage_data.items() if index.fqn != key}
    for index, place in list(metadata.storage_data.items()):
        if index.fqn == key and index.offset[1] == 0:
            replace_record(iteration / place.relative_path, place)
            stored[type(index)(key, torch.Size([index.offset[0], *index.offset[2:]]), index.index)] = place
    chunks = [chunk for chunk in entry.chunks if chunk.offsets[1] == 0]
    for chunk in chunks:
        chunk.offsets, chunk.sizes = (torch.Size([size[0], *size[2:]]) for size in (chunk.offsets, chunk.sizes))
    entry.chunks, metadata.storage_data = chunks, stored
    path.write_bytes(pickle.dumps(metadata))


def replace_record(path: Path, place: Any) -> None:
    """Put the tensor at a place at the end of its file, without its second axis."""
    data = path.read_bytes()
    tensor = torch.load(io.BytesIO(data[place.offset : place.offset + place.length]))
    out = io.BytesIO()
    torch.save(tensor[:, 0].clone(), out)
    place.offset, place.length = len(data), len(out.getvalue())
    path.write_bytes(data + out.getvalue())
